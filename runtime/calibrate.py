"""What an engine goes through before it serves: its first tokens, the default budget and, also when idle, baselines.

The best budget depends on how much a verify of more rows costs here and on how much acceptance it buys, so it is
chosen from measured step times and the drafter's measured accept lengths.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from runtime.attention import Segment, Step, causal_mask
from runtime.engine import Engine
from runtime.interface import (
    Baseline,
    GenerateEvent,
    GenerateRequest,
    Mode,
    RequestFinished,
    RuntimeUnavailable,
    SamplingParams,
)
from runtime.loader import Loaded
from runtime.samples import MEASURING

CANDIDATE_BUDGETS = (4, 7, 11, 15, 23, 31)
"""Trees of 5, 8, 12, 16, 24, 32 rows, root included: matrix libraries work in blocks of 8 or 16 rows."""
CAPTURED_BUDGETS = (7, 15, 31, 63)
"""Trees that fill the rows of a captured round; one between costs as much as the next larger."""
FALLBACK_BUDGET = 11
"""Used where the drafter brings no measured accept lengths."""
CONTEXT_ROWS = 128
REPEATS = 6
BASELINE_PROMPT = "Explain in a few sentences why the sky is blue and sunsets are red."
BASELINE_TOKENS = 24


@dataclass(frozen=True)
class Calibration:
    """The chosen budget, the predicted tok/s it was chosen by (budget 0 = plain), and a line saying so."""

    tree_budget: int
    predicted_tok_s: Mapping[int, float]
    summary: str


def measured_accept_lengths(loaded: Loaded) -> dict[int, float]:
    """Mean accept length by budget over the drafter's measured sets at temperature 0, from its config.json."""
    if loaded.drafter_path is None:
        return {}
    config = json.loads((loaded.drafter_path / "config.json").read_text(encoding="utf-8"))
    by_budget: dict[int, list[float]] = {}
    try:
        for cells in config["ddtree"]["measured"]["accept_length"].values():
            for name, value in cells.items():
                if name.startswith("tree"):
                    by_budget.setdefault(int(name.removeprefix("tree")), []).append(float(value))
    except (
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
    ):  # a note of ours, which a drafter may have or not
        return {}
    return {budget: statistics.fmean(values) for budget, values in by_budget.items()}


def interpolate(points: Mapping[int, float], at: int) -> float:
    """Piecewise-linear value at `at`, flat beyond the ends."""
    known = sorted(points)
    if at <= known[0]:
        return points[known[0]]
    for low, high in zip(known, known[1:], strict=False):
        if at <= high:
            share = (at - low) / (high - low)
            return points[low] * (1 - share) + points[high] * share
    return points[known[-1]]


@torch.inference_mode()
def verify_seconds(loaded: Loaded, rows: Sequence[int]) -> dict[int, float] | None:
    """Least seconds of one target forward with logits over `rows` new rows behind a short prefix, on idle slots.

    Where rounds are captured, of a whole captured round, draft included. None where the slots are too few.
    """
    target, cache, graphs = loaded.models.target, loaded.models.cache, loaded.graphs
    if graphs is not None:
        return _least({count: partial(graphs.round_seconds, count) for count in rows})
    extent = cache.allocate(CONTEXT_ROWS + max(rows))
    if extent is None:
        return None
    try:
        return _least({count: _forward_of(target, cache, extent.start, count) for count in rows})
    finally:
        cache.free(extent)


def _least(once: Mapping[int, Callable[[], float]]) -> dict[int, float]:
    """The least time of each size, some repeats after a first one."""
    for play in once.values():
        play()
    # Interleaved, so that a busy moment of the host falls on all sizes and not on one of them.
    seconds = [{count: play() for count, play in once.items()} for _ in range(REPEATS)]
    return no_less_for_more_rows({count: min(each[count] for each in seconds) for count in once})


def no_less_for_more_rows(seconds: Mapping[int, float]) -> dict[int, float]:
    """Least times made monotone: what more rows were seen to take bounds what fewer can take undisturbed."""
    return {count: min(took for more, took in seconds.items() if more >= count) for count in seconds}


def _forward_of(target, cache, start: int, rows: int) -> Callable[[], float]:  # type: ignore[no-untyped-def]
    """One forward of `rows` rows and their greedy choice, as a function that returns the seconds it took."""
    device = target.device
    positions = torch.arange(CONTEXT_ROWS, CONTEXT_ROWS + rows, device=device)
    step = Step.of(cache.target, [Segment(start, CONTEXT_ROWS, rows, causal_mask(rows, device), positions)])
    token_ids = torch.arange(rows, device=device) % target.vocab_size

    def forward() -> float:
        begin = time.perf_counter()
        target.likeliest(target.forward(token_ids, positions, step).hidden).tolist()
        return time.perf_counter() - begin

    return forward


def choose_budget(loaded: Loaded, draft_seconds: float) -> Calibration:
    """The candidate budget of highest predicted tok/s at concurrency 1.

    `draft_seconds` is what drafting and tree building take where that is not part of the times of `verify_seconds`; a
    round yields the drafter's measured accept length.
    """
    accepts = measured_accept_lengths(loaded)
    candidates = CANDIDATE_BUDGETS if loaded.graphs is None else CAPTURED_BUDGETS
    allowed = [budget for budget in candidates if budget <= loaded.limits.max_tree_budget]
    verify = verify_seconds(loaded, [1, *(budget + 1 for budget in allowed)])
    if not accepts or not allowed or verify is None:
        budget = min(FALLBACK_BUDGET, loaded.limits.max_tree_budget)
        reason = "too few slots to measure" if accepts else "the drafter brings no measured accept lengths"
        return Calibration(budget, {}, f"tree budget {budget}: {reason}")
    predicted = {0: 1 / verify[1]}
    for budget in allowed:
        predicted[budget] = interpolate(accepts, budget) / (verify[budget + 1] + draft_seconds)
    best = max(allowed, key=lambda budget: predicted[budget])
    gain = predicted[best] / predicted[0]
    return Calibration(
        best,
        predicted,
        f"tree budget {best}: predicted {gain:.1f}x plain from step times measured at start-up "
        f"and the drafter's measured accept lengths",
    )


def prove(engine: Engine) -> None:
    """Decodes two tokens, the second one in a round: before that an engine does not count as ready.

    Raises RuntimeUnavailable where they do not come.
    """
    finished: list[RequestFinished] = []
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(prompt_token_ids=(0,), sampling=sampling, reuse_prefix=False)
    engine.submit(request, _keeper_of_ends(finished))
    while engine.busy:
        engine.step()
    if not finished or len(finished[0].token_ids) != 2:
        raise RuntimeUnavailable("the engine gave no tokens in its first round")


def calibrate(engine: Engine) -> Calibration:
    """Measures this host with an idle engine and returns the budget to use by default."""
    loaded = engine.loaded
    if loaded.no_drafter_reason is not None:
        return Calibration(0, {}, f"plain decoding: {loaded.no_drafter_reason}")
    if loaded.graphs is not None:
        return choose_budget(loaded, 0.0)
    stages: list[tuple[float, ...]] = []
    _run(engine, "tree", FALLBACK_BUDGET, 12, stages)
    timed = stages[1:] or stages
    draft_seconds = statistics.median(sum(stage) - stage[2] for stage in timed) if timed else 0.0
    return choose_budget(loaded, draft_seconds)


def measure_baselines(engine: Engine, interrupted: Callable[[], bool]) -> tuple[Baseline, ...] | None:
    """Plain and chain decoding of one fixed prompt on the idle engine: what speculation is compared with.

    None where `interrupted` turned true meanwhile: somebody wants the engine. Nothing of it is left behind.
    """
    with engine.unseen():
        return _measure_baselines(engine, interrupted)


def _measure_baselines(engine: Engine, interrupted: Callable[[], bool]) -> tuple[Baseline, ...] | None:
    modes: list[tuple[Mode, int]] = [("off", 0)]
    if engine.loaded.no_drafter_reason is None:
        modes.append(("chain", engine.models.draft_horizon))
    baselines = []
    load = os.getloadavg()[0]
    for mode, budget in modes:
        rate = _run(engine, mode, budget, BASELINE_TOKENS, [], interrupted)
        if rate is None:
            return None
        baselines.append(
            Baseline(
                mode=mode,
                tree_budget=budget,
                tok_s=rate,
                measured_at_s=time.time(),
                conditions=f"one request, T=0, {BASELINE_TOKENS} tokens, host load {load:.1f}",
            )
        )
    return tuple(baselines)


def _keeper_of_ends(finished: list[RequestFinished]) -> Callable[[GenerateEvent], None]:
    """A sink that keeps the last event of each request."""

    def sink(event: GenerateEvent) -> None:
        if isinstance(event, RequestFinished):
            finished.append(event)

    return sink


def _prompt_ids(loaded: Loaded) -> tuple[int, ...]:
    """The fixed prompt as a chat where the model has a template, else as plain text."""
    try:
        ids = loaded.tokenizer.apply_chat_template([{"role": "user", "content": BASELINE_PROMPT}])
    except ValueError:
        ids = loaded.tokenizer.encode(BASELINE_PROMPT)
    return tuple(token for token in ids if token < loaded.limits.vocab_size)


def _run(
    engine: Engine,
    mode: Mode,
    budget: int,
    tokens: int,
    stages: list[tuple[float, ...]],
    interrupted: Callable[[], bool] = lambda: False,
) -> float | None:
    """Decodes one fixed prompt; returns tok/s, None if interrupted; appends the stage times of its rounds."""
    finished: list[RequestFinished] = []
    limits = engine.loaded.limits
    room = min(limits.max_seq_len, limits.kv_slots - limits.slot_reserve)
    if room < 2:
        return None
    tokens = min(tokens, room - 1)
    request = GenerateRequest(
        prompt_token_ids=_prompt_ids(engine.loaded)[: room - tokens],
        sampling=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
        mode=mode,
        tree_budget=min(budget, limits.max_tree_budget),
        reuse_prefix=False,
        client=MEASURING,
    )
    request_id = engine.submit(request, _keeper_of_ends(finished))
    while engine.busy:
        if interrupted():
            engine.cancel(request_id)
            return None
        stats = engine.step()
        if stats is not None and stats.stage_s is not None:
            stages.append(stats.stage_s)
    return finished[0].stats.tok_s or 0.0
