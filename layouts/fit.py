"""Whether a layout fits into memory: every term of one rank in bytes, with how it was worked out."""

from __future__ import annotations

from typing import Literal

from layouts.presets import Degrees
from layouts.shapes import Format, Formats, ModelShape, bytes_of
from layouts.values import Engine, Frozen, Mode
from layouts.weights import cache_bytes, drafter_counts, resident, shares_of, stage_layers

GIB = 2**30
SPLIT_KV = 8
"""Parts SGLang's Triton decoding splits a prefix into; each leaves a partial result."""
MAX_CONCURRENCY = 4096


class Load(Frozen):
    """What has to fit at once."""

    concurrency: int = 8
    context: int = 4096
    """Tokens of one sequence, prompt and output."""
    mode: Mode = "off"
    block_size: int = 1
    tree_budget: int = 0
    prefill_chunk: int = 256
    dtype: Format = "bfloat16"
    """What the native engine computes in; SGLang keeps the format of the checkpoint."""
    kv_format: Format = "bfloat16"
    graphs: bool = True

    @property
    def nodes(self) -> int:
        """Rows of one sequence in a verify step, root included."""
        if self.mode == "off":
            return 1
        return self.block_size if self.mode == "chain" else self.tree_budget + 1


class Term(Frozen):
    name: str
    bytes: float
    how: str
    assumed: bool = False
    """Built on a figure that no document gives."""


class Fit(Frozen):
    """Memory of the fullest rank."""

    terms: tuple[Term, ...]
    capacity: float | None
    """Bytes a rank has; None = not known."""
    capacity_words: str
    largest_concurrency: int | None
    """Most sequences of the asked context that fit; None where the capacity is not known."""

    @property
    def total(self) -> float:
        return sum(term.bytes for term in self.terms)

    @property
    def verdict(self) -> Literal["fits", "does not fit", "unknown"]:
        if self.capacity is None:
            return "unknown"
        return "fits" if self.total <= self.capacity else "does not fit"

    @property
    def shortage(self) -> str | None:
        """Why it does not fit, with the numbers; None where it does."""
        if self.verdict != "does not fit":
            return None
        assert self.capacity is not None
        largest = max(self.terms, key=lambda term: term.bytes)
        return (
            f"needs {self.total / GIB:.1f} GiB on a rank that has {self.capacity / GIB:.1f} GiB "
            f"({largest.name} alone {largest.bytes / GIB:.1f} GiB); "
            + (
                f"at most {self.largest_concurrency} sequences of this length fit"
                if self.largest_concurrency
                else "not one sequence of this length fits"
            )
        )


def in_memory(shape: ModelShape, engine: Engine, dtype: Format) -> ModelShape:
    """`shape` with its weights as the engine holds them: the native one converts every checkpoint to one format."""
    if engine != "native":
        return shape
    formats = Formats(layers=dtype, experts=dtype, embedding=dtype, norms=dtype)
    drafter = shape.drafter.model_copy(update={"format": dtype}) if shape.drafter else None
    return shape.model_copy(update={"formats": formats, "drafter": drafter})


def fit(
    shape: ModelShape,
    degrees: Degrees,
    engine: Engine,
    load: Load,
    capacity: float | None,
    capacity_words: str,
    reserve: float,
) -> Fit:
    """The memory of the fullest rank under `load`; `capacity` and `reserve` are bytes of one rank."""

    def at(concurrency: int) -> tuple[Term, ...]:
        return terms(shape, degrees, engine, load.model_copy(update={"concurrency": concurrency}), reserve)

    def holds(concurrency: int) -> bool:
        return capacity is not None and sum(term.bytes for term in at(concurrency)) <= capacity

    largest = None
    if capacity is not None:
        largest, above = 0, MAX_CONCURRENCY + 1
        while above - largest > 1:
            middle = (largest + above) // 2
            largest, above = (middle, above) if holds(middle) else (largest, middle)
    return Fit(
        terms=at(load.concurrency),
        capacity=capacity,
        capacity_words=capacity_words,
        largest_concurrency=largest,
    )


def terms(
    shape: ModelShape, degrees: Degrees, engine: Engine, load: Load, reserve: float
) -> tuple[Term, ...]:
    """All terms of the pipeline stage that needs most."""
    shape = in_memory(shape, engine, load.dtype)
    stages = [_stage_terms(shape, degrees, engine, load, stage) for stage in range(degrees.pp)]
    fullest = max(stages, key=lambda each: sum(term.bytes for term in each))
    rest = Term(name="reserve", bytes=reserve, how="device context, communicators, libraries", assumed=True)
    return (*fullest, rest) if reserve else fullest


def _stage_terms(
    shape: ModelShape, degrees: Degrees, engine: Engine, load: Load, stage: int
) -> tuple[Term, ...]:
    held = resident(shape, degrees, engine, stage)
    shares = shares_of(shape, degrees, engine)
    layers = len(stage_layers(shape.layers, degrees.pp, engine)[stage])
    slots, slots_how = _slots(engine, degrees, load)
    row = cache_bytes(shape, layers, shares.cache, load.kv_format)
    kind = "latent rows" if shape.latent else f"{shape.kv_heads * shares.cache:g} KV heads"
    found = [
        Term(
            name="attention weights",
            bytes=held.attention,
            how=f"{layers} layers, 1/{degrees.tp} of the heads",
        ),
        Term(name="MLP weights", bytes=held.mlp, how=f"plain and shared, 1/{degrees.tp} of the width"),
        Term(
            name="expert weights",
            bytes=held.experts,
            how=f"{shape.formats.experts}, share {shares.experts:g}",
        ),
        Term(name="embedding, head", bytes=held.tables, how=f"{shape.formats.embedding}, norms included"),
        Term(name="KV cache", bytes=row * slots, how=f"{slots_how} x {row:.0f} B ({kind}, {layers} layers)"),
        *_drafter_terms(shape, degrees, engine, load, stage, slots),
        _buffers(shape, degrees, engine, load, stage),
        _activations(shape, degrees, engine, load),
    ]
    return tuple(term for term in found if term.bytes > 0)


def _slots(engine: Engine, degrees: Degrees, load: Load) -> tuple[int, str]:
    """Token slots of one replica that hold the asked load; SGLang reserves two widths of a round for each sequence."""
    sequences = -(-load.concurrency // degrees.dp)
    if engine == "native":
        each = load.context + max(load.nodes, load.block_size)
    else:
        each = load.context + (2 * load.nodes if load.mode != "off" else 0)
    return sequences * each, f"{sequences} x {each} slots"


def _drafter_terms(
    shape: ModelShape, degrees: Degrees, engine: Engine, load: Load, stage: int, slots: int
) -> tuple[Term, ...]:
    """The drafter stands on every tensor-parallel rank (SGLang), or whole on the first rank (native)."""
    drafter = shape.drafter
    if load.mode == "off" or drafter is None or stage != 0:
        return ()
    share = shares_of(shape, degrees, engine).drafter
    fusion, rest = drafter_counts(drafter, shape.hidden_size)
    weights = bytes_of((fusion + rest) * share, drafter.format)
    heads = drafter.kv_heads if share == 1 else -(-drafter.kv_heads // degrees.tp)
    row = bytes_of(2 * drafter.layers * heads * drafter.head_dim, load.kv_format)
    guessed = bool(drafter.assumed)
    how = f"{drafter.layers} layers, {len(drafter.taps)} taps, share {share:g}"
    if guessed:
        how += f"; assumed: {', '.join(drafter.assumed)}"
    return (
        Term(name="drafter weights", bytes=weights, how=how, assumed=guessed),
        Term(name="drafter KV", bytes=row * slots, how=f"{slots} slots x {row:.0f} B", assumed=guessed),
    )


def _buffers(shape: ModelShape, degrees: Degrees, engine: Engine, load: Load, stage: int) -> Term:
    """Static buffers of decoding steps at the largest batch.

    SGLang with graphs (Triton backend): the tree's mask B*n*(C+n), slot indices 8*B*n*C, logits 4*B*n*V and partial
    attention results 4*B*n*heads*8*head_dim bytes, for B sequences of n nodes over C tokens.
    """
    rows = -(-load.concurrency // degrees.dp) * load.nodes
    logits = rows * shape.vocab_size * 4 if stage == degrees.pp - 1 else 0
    if engine == "native":
        return Term(name="step buffers", bytes=logits, how=f"logits of {rows} rows in float32")
    if not load.graphs:
        return Term(name="step buffers", bytes=logits, how=f"logits of {rows} rows; no graphs")
    mask = rows * (load.context + load.nodes) if load.mode == "tree" else 0
    heads = shape.heads * shares_of(shape, degrees, engine).attention
    width = shape.latent.kv_lora_rank if shape.latent is not None else shape.head_dim
    partial = rows * heads * SPLIT_KV * width * 4
    return Term(
        name="graphs",
        bytes=logits + mask + rows * load.context * 8 + partial,
        how=f"{rows} rows: mask, slot indices, logits, partial attention",
    )


def _activations(shape: ModelShape, degrees: Degrees, engine: Engine, load: Load) -> Term:
    """The widest layer over one prefill chunk, and the taps kept for the drafter."""
    rows = max(load.prefill_chunk, -(-load.concurrency // degrees.dp) * load.nodes)
    shares = shares_of(shape, degrees, engine)
    width = 4 * shape.hidden_size + 3 * shape.heads * shape.head_dim * shares.attention
    width += 3 * shape.intermediate_size * shares.mlp
    if shape.experts is not None:
        inside = 3 * shape.experts.intermediate_size * max(shares.mlp, 1 / max(1, degrees.tp))
        width += shape.experts.per_token * (shape.hidden_size + inside)
    if load.mode != "off" and shape.drafter is not None:
        width += len(shape.drafter.taps) * shape.hidden_size
    format = load.dtype if engine == "native" else "bfloat16"
    return Term(
        name="activations",
        bytes=bytes_of(rows * width, format),
        how=f"{rows} rows of the widest layer",
        assumed=True,
    )
