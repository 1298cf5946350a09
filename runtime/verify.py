"""Checks that speculation changes no token: the same prompts plain and speculative, compared token by token.

Where texts differ, the speculative one is fed through the plain path (teacher forcing): every token must be the plain
choice there or score within tau of it, a near-tie that batched arithmetic may round either way. Near-ties are rare by
rule; more than the dtype allows is a failure whatever the gaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.admission import admit
from runtime.attention import Segment, Step, causal_mask
from runtime.calibrate import calibrate
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.interface import GenerateRequest, Mode, RequestFinished, SamplingParams
from runtime.kv_cache import Extent
from runtime.loader import load
from runtime.noise import position_noise
from runtime.prompt_sets import bundled_prompts, read_prompts
from runtime.sampling import RowContext, Sampling, choice_scores

SCHEMA = 1
TOKENS_PER_NEAR_TIE = {torch.float32: 5000, torch.bfloat16: 100}


@dataclass(frozen=True)
class VerifyPlan:
    """What to compare with plain decoding. `budgets` empty = the configured or calibrated one."""

    config: RuntimeConfig
    modes: tuple[str, ...] = ("chain", "tree")
    budgets: tuple[int, ...] = ()
    temperatures: tuple[float, ...] = (0.0, 0.7)
    seed: int = 7
    prompts: Path | None = None
    max_tokens: int = 64
    prompts_per_kind: int = 8


@dataclass(frozen=True)
class Divergence:
    """One token that is not the plain choice. `margin` is the plain choice's score less this token's."""

    prompt: int
    mode: str
    tree_budget: int
    temperature: float
    position: int
    """Output token number, from 0."""
    plain: int
    speculative: int
    margin: float
    tau: float

    @property
    def near_tie(self) -> bool:
        return self.margin <= self.tau


@dataclass(frozen=True)
class VerifyReport:
    """Texts compared and what was found; a text is one prompt under one mode, budget and temperature."""

    conditions: dict[str, Any]
    prompts: int
    texts: int
    identical: int
    tokens: int
    allowed_near_ties: int
    near_ties: tuple[Divergence, ...]
    divergences: tuple[Divergence, ...]

    @property
    def exit_code(self) -> int:
        return 1 if self.divergences or len(self.near_ties) > self.allowed_near_ties else 0

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "prompts": self.prompts,
            "texts": self.texts,
            "identical": self.identical,
            "tokens": self.tokens,
            "near_ties": len(self.near_ties),
            "near_ties_allowed": self.allowed_near_ties,
            "near_tie_list": [asdict(each) for each in self.near_ties],
            "divergences": [asdict(each) for each in self.divergences],
            "conditions": self.conditions,
        }

    @property
    def verdict(self) -> str:
        """What was found, in words."""
        if self.divergences:
            return "speculation changed the text: this is a bug"
        if len(self.near_ties) > self.allowed_near_ties:
            return f"{len(self.near_ties)} near-ties are more than the {self.allowed_near_ties} this dtype allows"
        if self.near_ties:
            return f"no divergence beyond {len(self.near_ties)} near-ties ({self.allowed_near_ties} allowed)"
        return "no divergence"

    def table(self) -> str:
        """The findings for people."""
        lines = [
            f"{self.identical} of {self.texts} texts ({self.prompts} prompts) have exactly the plain tokens; "
            f"{self.tokens} tokens compared"
        ]
        for each in (*self.divergences, *self.near_ties):
            kind = "near-tie" if each.near_tie else "DIVERGENCE"
            lines.append(
                f"{kind}: prompt {each.prompt}, {each.mode} budget {each.tree_budget}, T={each.temperature:g}, token "
                f"{each.position}: plain {each.plain}, speculative {each.speculative}, "
                f"margin {each.margin:.2e} (tau {each.tau:.2e})"
            )
        lines.append(self.verdict)
        return "\n".join(lines)


def run_verify(plan: VerifyPlan, progress: Callable[[str], None] = lambda _line: None) -> VerifyReport:
    """Loads the engine and compares every mode and budget of `plan` with plain decoding."""
    engine = Engine(load(plan.config, lambda _share, what: progress(what)), plan.config, default_budget=0)
    if plan.budgets:
        budgets: tuple[int, ...] = plan.budgets
    else:
        configured = plan.config.tree_budget
        budgets = (calibrate(engine).tree_budget if configured is None else configured,)
    if plan.prompts is not None:
        prompts = read_prompts(plan.prompts)
    else:
        prompts = [prompt for kind in bundled_prompts(plan.prompts_per_kind).values() for prompt in kind]
    return compare(engine, plan, prompts, budgets, progress)


def compare(
    engine: Engine,
    plan: VerifyPlan,
    prompts: list[dict[str, Any]],
    budgets: tuple[int, ...],
    progress: Callable[[str], None] = lambda _line: None,
) -> VerifyReport:
    """Compares on a loaded, idle engine: each plain text is decoded alone, the others as many at once as it runs."""
    tally = Tally(plan, budgets)
    for number, prompt in enumerate(prompts):
        progress(f"prompt {number + 1} of {len(prompts)}")
        for temperature in plan.temperatures:
            (plain,) = _decode(engine, plan, prompt, [("off", 0)], temperature)
            texts = _decode(engine, plan, prompt, tally.variants, temperature)
            for (mode, budget), spec in zip(tally.variants, texts, strict=True):
                if not tally.same(plain, spec):
                    tally.judge(engine, prompt, Place(number, mode, budget, temperature), spec)
    return tally.report(engine, len(prompts))


@dataclass(frozen=True)
class Place:
    """Where a text that differs stands."""

    prompt: int
    mode: str
    tree_budget: int
    temperature: float


class Tally:
    """Counts texts as they are compared, and judges those that differ on the engine they came from."""

    def __init__(self, plan: VerifyPlan, budgets: tuple[int, ...]) -> None:
        self.variants: list[tuple[Mode, int]] = [
            (mode, budget)  # type: ignore[misc]
            for mode in plan.modes
            for budget in (budgets if mode == "tree" else (0,))
        ]
        self.texts = 0
        self.identical = 0
        self._plan = plan
        self._tokens = 0
        self._found: list[Divergence] = []
        self._taus: dict[float, float] = {}

    def same(self, plain: RequestFinished, speculative: RequestFinished) -> bool:
        """Counts a text; False if its tokens are not the plain ones."""
        self.texts += 1
        self._tokens += len(speculative.token_ids)
        same = speculative.token_ids == plain.token_ids
        self.identical += same
        return same

    def judge(self, engine: Engine, prompt: dict[str, Any], place: Place, text: RequestFinished) -> None:
        """Finds the tokens of `text` that are not the plain choice; needs free slots for all of it."""
        temperature = place.temperature
        if temperature not in self._taus:
            self._taus[temperature] = near_tie_gap(engine, temperature, _prompt_ids(engine, prompt))
        at = (place.prompt, place.mode, place.tree_budget, temperature)
        tau = self._taus[temperature]
        for position, choice, margin in judge(engine, self._plan, prompt, text, temperature, tau):
            self._found.append(Divergence(*at, position, choice, text.token_ids[position], margin, tau))

    def report(self, engine: Engine, prompts: int) -> VerifyReport:
        plan, found = self._plan, self._found
        dtype = engine.models.target.dtype
        return VerifyReport(
            conditions={
                "model": engine.loaded.checkpoint.name,
                "dtype": str(dtype).removeprefix("torch."),
                "variants": [{"mode": mode, "tree_budget": budget} for mode, budget in self.variants],
                "temperatures": list(plan.temperatures),
                "seed": plan.seed,
                "max_tokens": plan.max_tokens,
                "speculation": engine.loaded.no_drafter_reason or "ready",
            },
            prompts=prompts,
            texts=self.texts,
            identical=self.identical,
            tokens=self._tokens,
            allowed_near_ties=max(1, self._tokens // TOKENS_PER_NEAR_TIE[dtype]),
            near_ties=tuple(each for each in found if each.near_tie),
            divergences=tuple(each for each in found if not each.near_tie),
        )


def judge(
    engine: Engine,
    plan: VerifyPlan,
    prompt: dict[str, Any],
    text: RequestFinished,
    temperature: float,
    tau: float,
) -> list[tuple[int, int, float]]:
    """`judge_tokens` of a text decoded under `plan` at `temperature`."""
    config = engine.config
    sampling = Sampling(temperature=temperature, top_p=config.top_p, top_k=config.top_k, seed=plan.seed)
    return judge_tokens(engine, _prompt_ids(engine, prompt), text.token_ids, sampling, tau)


@torch.inference_mode()
def judge_tokens(
    engine: Engine, prompt: tuple[int, ...], token_ids: tuple[int, ...], sampling: Sampling, tau: float
) -> list[tuple[int, int, float]]:
    """(number, plain choice, margin) of every token of an output that is not the plain choice there.

    The output is fed through the plain path; `sampling` counts no tokens and has no bias.
    """
    start, rows = len(prompt), len(token_ids)
    target = engine.models.target
    logits = teacher_logits(engine, (*prompt, *token_ids[:-1]), rows=32)[start - 1 :]
    noise = None
    if not sampling.greedy:
        noise = position_noise(sampling.seed, start, rows, target.vocab_size, target.device)
    choices = choice_scores(logits, sampling, _context(logits), noise).argmax(-1).tolist()
    return [
        (
            i,
            plain,
            _margin(logits[i : i + 1], sampling, None if noise is None else noise[i : i + 1], token, tau),
        )
        for i, (plain, token) in enumerate(zip(choices, token_ids, strict=True))
        if plain != token
    ]


def _context(logits: Tensor) -> RowContext:
    return RowContext(torch.arange(len(logits), device=logits.device))


def _margin(logits: Tensor, sampling: Sampling, noise: Tensor | None, token: int, tau: float) -> float:
    """The best score less that of `token` in the row `logits [1, vocab]`; infinite for a token no filter may keep.

    Scores within `tau` move what a filter keeps: a token near the k-th largest score, or near the mass of top_p, which
    moves by up to 2 * tau * p * (1 - p). `token` may be one that the widest filters keep, and it is compared with the
    best that even the narrowest keep.
    """
    if not sampling.filtered:
        scores = choice_scores(logits, sampling, _context(logits), noise)[0]
        return float(scores.max() - scores[token])
    values = logits[0] / sampling.temperature

    def kept(slack: float) -> Tensor:
        """Scores under filters that keep more by `slack`, or less where it is negative."""
        count = sampling.top_k
        if 0 < count < len(values):
            count = max(1, int((values >= values.topk(count).values[-1] - slack).sum()))
        mass = sampling.top_p + 2 * slack * sampling.top_p * (1 - sampling.top_p)
        floor = min(1.0, sampling.min_p * math.exp(-slack))
        moved = replace(sampling, top_k=count, top_p=min(1.0, max(1e-9, mass)), min_p=floor)
        return choice_scores(logits, moved, _context(logits), noise)[0]

    return float(kept(-tau).max() - kept(tau)[token])


def teacher_logits(engine: Engine, token_ids: tuple[int, ...], rows: int) -> Tensor:
    """Logits `[tokens, vocab]` (float32) after each of `token_ids`, computed `rows` at a time over free slots."""
    with _free_slots(engine, len(token_ids)) as extent:
        return torch.cat(
            [_chunk_logits(engine, extent, token_ids, at, rows) for at in range(0, len(token_ids), rows)]
        )


@contextmanager
def _free_slots(engine: Engine, count: int) -> Iterator[Extent]:
    cache = engine.models.cache
    engine.scheduler.drop_prefixes()
    extent = cache.allocate(count)
    if extent is None:
        raise RuntimeError("verification needs an idle engine")
    try:
        yield extent
    finally:
        cache.free(extent)


def _single_rows(engine: Engine, token_ids: tuple[int, ...]) -> Tensor:
    """Logits as `teacher_logits`, one row at a time and as the engine decodes: by captured rounds where it has them."""
    graphs = engine.loaded.graphs
    if graphs is not None:
        with _free_slots(engine, len(token_ids)) as extent:
            found = graphs.row_logits(token_ids, extent.start)
        if found is not None:
            return found
    return teacher_logits(engine, token_ids, 1)


def _chunk_logits(engine: Engine, extent: Extent, token_ids: tuple[int, ...], at: int, rows: int) -> Tensor:
    target = engine.models.target
    ids = torch.tensor(token_ids[at : at + rows], device=target.device)
    positions = torch.arange(at, at + len(ids), device=target.device)
    segment = Segment(extent.start, at, len(ids), causal_mask(len(ids), target.device), positions)
    return target.logits(
        target.forward(ids, positions, Step.of(engine.models.cache.target, [segment])).hidden
    )


@torch.inference_mode()
def near_tie_gap(engine: Engine, temperature: float, token_ids: tuple[int, ...]) -> float:
    """The largest score gap that counts as a near-tie (tau).

    float32: 1e-3 / max(T, 0.1). Other dtypes: twice the 99.9th percentile of the logit differences between the same
    positions computed one row at a time, by captured rounds where the engine has them, and 32 rows at a time on the
    plain path, divided by T.
    """
    if engine.models.target.dtype == torch.float32:
        return 1e-3 / max(temperature, 0.1)
    sample = token_ids[:96]
    gaps = (_single_rows(engine, sample) - teacher_logits(engine, sample, 32)).abs().flatten().sort().values
    return 2 * float(gaps[int(0.999 * (len(gaps) - 1))]) / (temperature if temperature >= 1e-4 else 1.0)


def _decode(
    engine: Engine,
    plan: VerifyPlan,
    prompt: dict[str, Any],
    variants: Sequence[tuple[Mode, int]],
    temperature: float,
) -> list[RequestFinished]:
    """The text of `prompt` under each mode and budget, as many at once as the engine runs."""
    finished: dict[str, RequestFinished] = {}

    def sink(event: object) -> None:
        if isinstance(event, RequestFinished):
            finished[event.request_id] = event

    sampling = SamplingParams(max_tokens=plan.max_tokens, temperature=temperature, seed=plan.seed)
    asked: list[str] = []
    while len(finished) < len(variants):
        if len(asked) < len(variants) and len(asked) - len(finished) < engine.config.max_concurrency:
            mode, budget = variants[len(asked)]
            request = GenerateRequest(
                **prompt, sampling=sampling, mode=mode, tree_budget=budget, reuse_prefix=False
            )
            asked.append(engine.submit(request, sink))
        else:
            engine.step()
    return [finished[request_id] for request_id in asked]


def _prompt_ids(engine: Engine, prompt: dict[str, Any]) -> tuple[int, ...]:
    return admit(
        GenerateRequest(**prompt), engine.config, engine.loaded.limits, engine.loaded.tokenizer
    ).prompt
