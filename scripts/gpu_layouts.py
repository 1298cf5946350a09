"""Layouts of two ranks beside one: the same logits, features and tokens (`parity`).

Logits are judged against transformers' own modules in one process. A pipeline has to give the same bits, and so has
expert parallelism where a token goes to two experts at most; tensor parallelism has to be within 1e-4 in float32, and
in bfloat16 every likeliest token has to be the one of one process or a near-tie there.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_bench import take
from gpu_random import PROMPT, Pair, prompts_of
from torch import Tensor

from runtime.attention import Segment, Step, causal_mask
from runtime.config import RuntimeConfig, validate
from runtime.engine import Engine
from runtime.kv_cache import Extent, KVCache
from runtime.linear import PlainLinear
from runtime.loader import load
from runtime.target import TargetModel
from runtime.verify import VerifyPlan, compare

Tell = Callable[..., None]
PARENTS, DEPTHS, KEPT = (0, 0, 0, 1, 2, 2, 5, 6), (0, 1, 1, 2, 2, 2, 3, 4), [0, 2, 5, 6]
"""A tree of eight nodes, and the path of it that is kept."""


@dataclass
class Engines:
    """Engines by pair, layout and whether they draft, each built when it is first asked for and kept."""

    settings: dict[str, Any]
    tell: Tell
    built: dict[tuple[str, str, bool], Engine] = field(default_factory=dict)

    def of(self, pair: Pair, layout: str, drafts: bool) -> Engine | None:
        """None where it did not come up, which is told."""
        key = (pair.name, layout, drafts)
        if key not in self.built:
            began = time.perf_counter()
            drafter = pair.drafter if drafts else "none"
            config = validate({**self.settings, "model": pair.model, "drafter": drafter, "layout": layout})
            try:
                loaded = load(config)
            except Exception as error:  # the other layouts are still worth measuring
                self.tell(
                    kind="failed", model=pair.name, layout=layout, error=f"{type(error).__name__}: {error}"
                )
                return None
            self.built[key] = Engine(loaded, config, 31)
            self.tell(
                kind="loaded", model=pair.name, layout=layout, drafts=drafts, s=round(time.perf_counter() - began, 2),
                words=loaded.layout, rounds_by=loaded.rounds, linear=loaded.linear,
            )  # fmt: skip
        return self.built[key]

    def drop(self, engine: Engine) -> None:
        """Ends one engine, which is built anew when it is next asked for."""
        for key in [key for key, built in self.built.items() if built is engine]:
            self.built.pop(key).loaded.close()

    def close(self) -> None:
        """Ends all engines; their memory goes with them."""
        while self.built:
            self.built.popitem()[1].loaded.close()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@torch.inference_mode()
def passes(target: TargetModel, cache: KVCache) -> list[Tensor]:
    """Logits and features of a prompt, of a tree behind it, and of two tokens behind its kept path."""
    extent = cache.allocate(PROMPT + 16)
    assert extent is not None, "an idle engine has slots"
    below = min(target.vocab_size - 1, 40_000)
    draws = random.Random(1)
    found: list[Tensor] = []

    def run(count: int, prefix: int, positions: Tensor, mask: Tensor) -> None:
        here = target.device
        ids = torch.tensor(draws.choices(range(below), k=count), device=here)
        positions = positions.to(here)
        step = Step.of(cache.target, [Segment(extent.start, prefix, count, mask.to(here), positions)])
        output = target.forward(ids, positions, step)
        found.append(target.logits(output.hidden))
        if output.features is not None:
            found.append(output.features)

    cpu = torch.device("cpu")
    mask = torch.eye(len(PARENTS), dtype=torch.bool)
    for node, parent in enumerate(PARENTS[1:], start=1):
        mask[node] |= mask[parent]
    try:
        run(PROMPT, 0, torch.arange(PROMPT), causal_mask(PROMPT, cpu))
        run(len(PARENTS), PROMPT, PROMPT + torch.tensor(DEPTHS), mask)
        cache.keep_path(Extent(extent.start, extent.size), PROMPT, KEPT)
        behind = PROMPT + len(KEPT)
        run(2, behind, torch.arange(behind, behind + 2), causal_mask(2, cpu))
    finally:
        cache.free(extent)
    return found


@dataclass(frozen=True)
class Expected:
    """What one process computes, and how far its logits are from themselves under other rounding.

    `rows_tau`: twice the 99.9th percentile of their change between 1 and 32 rows at a time, the near-tie rule's.
    `round_tau`: the same of their distance to float32, which bounds what any order of sums in this dtype may do.
    """

    outputs: list[Tensor]
    rows_tau: float
    round_tau: float
    error: float
    """Median distance of its logits to those in float32."""
    exact_outputs: list[Tensor]
    """In float32."""


@torch.inference_mode()
def one_process(pair: Pair, taps: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Expected:
    """The reference: transformers' modules in this process, on the first device."""
    target = TargetModel(pair.checkpoint, taps=taps, dtype=dtype, device=device, fuse=False)
    target.limit_vocabulary(pair.checkpoint.load_tokenizer().vocab_size)
    cache = KVCache(target.geometry, None, 2 * PROMPT, device)
    ids = torch.tensor(
        random.Random(2).choices(range(min(target.vocab_size - 1, 40_000)), k=64), device=device
    )

    def logits(rows: int) -> Tensor:
        parts = []
        for at in range(0, len(ids), rows):
            positions = torch.arange(at, at + rows, device=device)
            segment = Segment(0, at, rows, causal_mask(rows, device), positions)
            step = Step.of(cache.target, [segment])
            parts.append(target.logits(target.forward(ids[at : at + rows], positions, step).hidden))
        return torch.cat(parts)

    outputs = passes(target, cache)
    if dtype == torch.float32:
        return Expected(outputs, 1e-2, 1e-2, 0.0, outputs)
    rows_tau = _tau(logits(1), logits(32))
    _widen(target)
    wide = passes(target, KVCache(target.geometry, None, 2 * PROMPT, device))
    width = outputs[0].shape[-1]
    mine, theirs = (torch.cat([each for each in one if each.shape[-1] == width]) for one in (outputs, wide))
    return Expected(outputs, rows_tau, _tau(mine, theirs), float((mine - theirs).abs().median()), wide)


def _tau(some: Tensor, others: Tensor) -> float:
    """Twice the 99.9th percentile of the distances (`torch.quantile` takes no tensor so large)."""
    gaps = (some - others).abs().flatten().float().sort().values
    return 2 * float(gaps[int(0.999 * (len(gaps) - 1))])


def _widen(target: TargetModel) -> None:
    """Makes the weights of transformers' modules float32, where they are."""
    decoder: Any = target.decoder
    decoder._model.float()
    decoder.embedding = decoder._model.embed_tokens.weight
    decoder.head = PlainLinear(decoder.head.weight.float())
    target.dtype = torch.float32


def parity(
    pair: Pair,
    engines: Engines,
    tokens: int,
    budgets: tuple[int, ...],
    left: Callable[[], float],
    tell: Tell,
) -> None:
    """`pair` in every layout it can have; `left` says how many seconds there still are."""
    device = torch.device(engines.settings["device"])
    dtype = getattr(torch, engines.settings["dtype"])
    if left() < 0 or (first := engines.of(pair, "single", True)) is None:
        tell(kind="stopped", model=pair.name)
        return
    drafter = first.models.drafter
    expected = one_process(
        pair, drafter.config.target_layer_ids if drafter is not None else (), dtype, device
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()
    for layout in pair.layouts:
        if left() < 0:
            tell(kind="stopped", model=pair.name, layout=layout)
            break
        engine = engines.of(pair, layout, True)
        if engine is None:
            continue
        about = {"model": pair.name, "layout": layout, "dtype": engines.settings["dtype"]}
        try:
            found = passes(engine.models.target, engine.models.cache)
            tell(kind="outputs", **about, **judged(pair, layout, dtype, expected, found))
            tell(kind="tokens", **about, budgets=list(budgets), **same_text(pair, engine, tokens, budgets))
        except Exception as error:  # the other layouts are still worth trying
            tell(kind="failed", **about, error=f"{type(error).__name__}: {error}")
        engines.close()
    engines.close()


def judged(
    pair: Pair, layout: str, dtype: torch.dtype, expected: Expected, found: list[Tensor]
) -> dict[str, Any]:
    """How far a layout's logits and features are from those of one process, and whether that is in order.

    `max_gap` is in standard deviations where that is more than 1: features of some layers are in the hundreds.

    Likeliest tokens that differ are counted by their margin in one process: near-ties by the rule, ties within what
    the dtype rounds, and those beyond.
    """
    pairs = list(zip(found, expected.outputs, expected.exact_outputs, strict=True))
    gaps = [
        float((mine.float() - theirs.float()).abs().max()) / max(1.0, float(theirs.float().std()))
        for mine, theirs, _ in pairs
    ]
    gap = max(gaps)
    equal = all(torch.equal(mine, theirs) for mine, theirs, _ in pairs)
    config = pair.checkpoint.config
    exact = layout == "pp2" or (layout == "ep2" and int(config.get("num_experts_per_tok") or 0) <= 2)
    width = expected.outputs[0].shape[-1]
    columns = zip(*pairs, strict=True)
    mine, theirs, wide = (torch.cat([each for each in one if each.shape[-1] == width]) for one in columns)
    best, choice = theirs.max(-1)
    margins = best - theirs.gather(-1, mine.argmax(-1, keepdim=True)).squeeze(-1)
    differ = margins[mine.argmax(-1) != choice].tolist()
    beyond = sum(each > max(expected.rows_tau, expected.round_tau) for each in differ)
    error = float((mine - wide).abs().median())
    within = gap <= 1e-4 if dtype == torch.float32 else not beyond and error <= 2 * expected.error
    return {
        "ok": equal if exact else within, "exact": equal, "has_to_be_exact": exact, "max_gap": gap,
        "logits_gap": float((mine - theirs).abs().max()), "positions": len(choice), "differ": len(differ),
        "near_ties": sum(each <= expected.rows_tau for each in differ), "beyond": beyond,
        "margins": [round(each, 4) for each in differ], "rows_tau": expected.rows_tau, "round_tau": expected.round_tau,
        "error": error, "error_of_one_process": expected.error,
    }  # fmt: skip


def same_text(pair: Pair, engine: Engine, tokens: int, budgets: tuple[int, ...]) -> dict[str, Any]:
    """Texts of chain and trees against plain decoding in one layout, by teacher forcing where they differ."""
    prompts = prompts_of(pair, 3, engine.models.target.vocab_size)
    plan = VerifyPlan(engine.config, temperatures=(0.0, 0.7), max_tokens=tokens)
    report = compare(engine, plan, prompts, budgets)
    accept = take(engine, prompts[:1], ("tree", budgets[-1]), 0.0, 1, tokens)
    worst = max((each.margin for each in (*report.divergences, *report.near_ties)), default=0.0)
    return {
        "ok": report.exit_code == 0, "texts": report.texts, "identical": report.identical, "tokens": report.tokens,
        "near_ties": len(report.near_ties), "near_ties_allowed": report.allowed_near_ties,
        "divergences": len(report.divergences), "worst_margin": round(worst, 4),
        "tau": round(max((each.tau for each in report.near_ties), default=0.0), 4),
        "accept_length": round(accept.decoded / max(accept.sequence_rounds, 1), 3), "verdict": report.verdict,
    }  # fmt: skip


def settings_for(device: str, dtype: str, tiny: bool) -> dict[str, Any]:
    """Configuration of every engine here."""
    made: dict[str, Any] = {
        "device": device, "dtype": dtype, "max_concurrency": 32, "max_queue": 10_000, "prefix_reuse": False,
        "max_tree_budget": 63, "tree_budget": 31, "prefill_chunk": 2048, "max_seq_len": 1024, "kv_slots": 24_000,
        "top_k": 0, "top_p": 1.0, "linear": "plain",
    }  # fmt: skip
    if device == "cpu":
        made["threads"] = 1  # as the ranks have: sums of several threads have another order
    if tiny:
        made |= {"max_seq_len": 512, "kv_slots": 16_384}
    return made


def config_of(pair: Pair, settings: dict[str, Any], **changes: Any) -> RuntimeConfig:
    return validate({**settings, "model": pair.model, "drafter": pair.drafter, **changes})
