"""Why a layout cannot run a model, from static facts alone, and what it is called where it runs only in part."""

from __future__ import annotations

from collections.abc import Iterator

from layouts.presets import Degrees
from layouts.shapes import DrafterShape, ModelShape
from layouts.values import Engine, Mode
from layouts.weights import shares_of, split_share

NATIVE_RANKS = 2
"""The native engine's multi-rank layouts are for correctness and for pipelines with speculation; more is SGLang's."""
INT4_GROUP = 32


def refusals(
    shape: ModelShape | None,
    degrees: Degrees,
    engine: Engine,
    mode: Mode = "off",
    devices: int | None = None,
    device_word: str = "GPU",
) -> tuple[str, ...]:
    """Every reason why `degrees` cannot run; empty if they can.

    Args:
        shape: None = dimensions not known, so only what holds for any model is checked.
        devices: how many there are; None = not checked. Ranks of the native engine may also be processes on a CPU.
    """
    found = list(_general(shape, degrees, engine, mode))
    if devices is not None and degrees.ranks > devices:
        there = f"{devices} {device_word}{'' if devices == 1 else 's'}"
        found.append(f"{degrees.label} needs {degrees.ranks} {device_word}s, there are {there}")
    if shape is not None:
        found += _native(shape, degrees) if engine == "native" else _sglang(shape, degrees)
    return tuple(found)


def tree_refusal(tree_budget: int, block_size: int) -> str | None:
    """Why SGLang's slots do not hold a draft block beside the tree, if they do not."""
    if tree_budget + 1 >= block_size:
        return None
    return (
        f"tree_budget = {tree_budget} leaves {tree_budget + 1} slots a request for a draft block of {block_size}; "
        f"use tree_budget >= {block_size - 1}"
    )


def label_of(shape: ModelShape | None, degrees: Degrees, engine: Engine) -> str:
    """As in TP8+EP8; a native tensor parallelism that splits only the MLP says so."""
    if shape is None or degrees.ep > 1 or not shares_of(shape, degrees, engine).partial:
        return degrees.label
    return f"{degrees.label} (MLP only)"


def split_words(shape: ModelShape, degrees: Degrees, engine: Engine) -> str:
    """How much of the weights the ranks share out, in words; empty for one rank."""
    if degrees.ranks == degrees.dp:
        return ""
    return f"{split_share(shape, degrees, engine) * 100:.0f} % of the weights are split over ranks"


def _general(shape: ModelShape | None, degrees: Degrees, engine: Engine, mode: Mode) -> Iterator[str]:
    if engine == "native":
        if degrees.pp > 1 and max(degrees.tp, degrees.ep) > 1:
            yield (
                f"{degrees.label}: the native engine does not combine a pipeline with tensor or expert "
                f"parallelism; use {_native_choice(shape)}"
            )
        elif degrees.ranks > NATIVE_RANKS:
            yield f"{degrees.label}: the native engine runs at most {NATIVE_RANKS} ranks; use engine = sglang"
        if degrees.dp > 1:
            yield f"dp = {degrees.dp}: the native engine has no data parallelism; use engine = sglang"
        if degrees.ep > 1 and degrees.tp > 1 and degrees.tp != degrees.ep:
            yield f"{degrees.label}: the native engine needs tp = ep where both are used"
        return
    if degrees.pp > 1 and mode != "off":
        yield (
            f"SGLang refuses pipeline parallelism (pp = {degrees.pp}) with speculation; set speculation off, "
            "or use the native pp2, which has both"
        )
    if degrees.ep > degrees.tp or degrees.tp % degrees.ep:
        yield f"ep = {degrees.ep} does not divide tp = {degrees.tp}: SGLang spreads experts over the TP ranks"


def _common(shape: ModelShape, degrees: Degrees) -> Iterator[str]:
    if degrees.ep > 1 and shape.experts is None:
        yield f"ep = {degrees.ep}: {shape.title} is a dense model, it has no experts to spread"
    elif shape.experts is not None and shape.experts.count % degrees.ep:
        yield f"ep = {degrees.ep} does not divide the {shape.experts.count} experts of {shape.title}"
    if degrees.pp > shape.layers:
        yield f"pp = {degrees.pp}: {shape.title} has only {shape.layers} layers"


def _native(shape: ModelShape, degrees: Degrees) -> Iterator[str]:
    yield from _common(shape, degrees)
    obstacle = _indivisible(shape, degrees)
    if obstacle:
        yield f"{obstacle}; use {_native_choice(shape)}"


def _indivisible(shape: ModelShape, degrees: Degrees) -> str:
    """What of `shape` cannot be cut into `degrees.tp` parts, though it would have to be; empty if nothing."""
    tp = degrees.tp
    if tp == 1 or not shares_of(shape, degrees, "native").partial:
        return ""
    heads = f"{shape.heads} query and {shape.kv_heads} KV heads do not divide by tp = {tp}"
    width = shape.intermediate_size if shape.experts is None else shape.experts.intermediate_size
    if degrees.ep > 1:
        return heads
    return f"{heads}, nor does the MLP width {width}" if width % tp else ""


def _native_choice(shape: ModelShape | None) -> str:
    """The native layouts of two ranks that can run `shape`, as advice."""
    degrees = {
        "tp2": Degrees(tp=2),
        "ep2": Degrees(ep=2),
        "tp2ep2": Degrees(tp=2, ep=2),
        "pp2": Degrees(pp=2),
    }
    names = list(degrees)
    if shape is not None:
        names = [
            name
            for name, each in degrees.items()
            if not any(_common(shape, each)) and not _indivisible(shape, each)
        ]
    return " or ".join(names or ["single"])


def _sglang(shape: ModelShape, degrees: Degrees) -> Iterator[str]:
    yield from _common(shape, degrees)
    tp = degrees.tp
    if shape.heads % tp:
        yield f"tp = {tp} does not divide the {shape.heads} attention heads of {shape.title}"
    elif shape.latent is None and shape.kv_heads % tp and tp % shape.kv_heads:
        yield f"the {shape.kv_heads} KV heads of {shape.title} can be neither split nor repeated over tp = {tp}"
    if shape.experts is None:
        return
    slices = tp // degrees.ep if degrees.ep <= tp else 1
    width = shape.experts.intermediate_size
    group = INT4_GROUP if shape.formats.experts == "int4-g32" else 1
    if width % (slices * group):
        yield f"an expert's width {width} cannot be cut into {slices} slices of whole groups of {group}"


def block_of(drafter: DrafterShape | None, block_size: int | None) -> int | None:
    """The draft block in use: as asked for, else as trained; None where neither is known."""
    return block_size if block_size is not None else drafter.block_size if drafter is not None else None
