"""What layouts take (`speed`): milliseconds a round and tok/s, every layout and mode in turn on the same prompts.

tok/s counts the steps that decode and prefill nothing, so it is what the cost model predicts; `window_tok_s` is over
the whole time from the first submission to the last token.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gpu_bench import Arm, Taken, take
from gpu_layouts import Engines, Tell
from gpu_random import Pair, prompts_of

from runtime.admission import admit
from runtime.engine import Engine
from runtime.interface import GenerateRequest
from runtime.native_layouts import label

LEAST_TOKENS, MOST_TOKENS = 8, 128
TREES: tuple[Arm, ...] = (("tree", 15), ("tree", 31), ("tree", 63))
ALL: tuple[Arm, ...] = (("off", 0), ("chain", 0), *TREES)
OFF: tuple[Arm, ...] = (("off", 0),)


@dataclass(frozen=True)
class Group:
    """Cells that are measured in turn: every layout with every arm."""

    pair: Pair
    drafts: bool
    arms: tuple[Arm, ...]
    concurrency: int


@dataclass
class Cell:
    """One layout with one arm: how many tokens a request gets, and what was measured."""

    layout: str
    engine: Engine
    arm: Arm
    tokens: int = LEAST_TOKENS
    taken: list[Taken] = field(default_factory=list)
    failed: bool = False


def speed_groups(made: Mapping[str, Callable[[], Pair]]) -> Iterator[Group]:
    """What is measured, the most wanted first; a pair is made when its turn comes."""
    yield Group(made["dense"](), False, OFF, 1)
    yield Group(made["default"](), True, ALL, 1)
    yield Group(made["moe"](), False, OFF, 1)
    yield Group(made["dense"](), True, ALL[1:], 1)
    for concurrency in (8, 32):
        yield Group(made["dense"](), False, OFF, concurrency)
        yield Group(made["default"](), True, ALL, concurrency)
        yield Group(made["moe"](), False, OFF, concurrency)
    for concurrency in (8, 32):
        yield Group(made["dense"](), True, ALL[1:], concurrency)


def speed(
    groups: Iterator[Group], engines: Engines, cell_s: float, n: int, left: Callable[[], float], tell: Tell
) -> None:
    """Measures group after group; a cell takes about `cell_s` seconds for `n` repetitions, each of its own prompts."""
    for group in groups:
        if left() < 0:
            tell(kind="stopped", model=group.pair.name, concurrency=group.concurrency)
            return
        cells = []
        for layout in group.pair.layouts:
            engine = engines.of(group.pair, layout, group.drafts)
            cells += [Cell(layout, engine, arm) for arm in group.arms if engine is not None]
        for cell in cells:
            _try(group, cell, engines, partial(_rehearse, group, cell, cell_s / n))
        for turn in range(n):
            if left() < 0 and turn:
                break
            for cell in cells[turn % len(cells) :] + cells[: turn % len(cells)]:
                _try(group, cell, engines, partial(_repeat, group, cell, turn))
        for cell in cells:
            if cell.taken:
                tell(kind="cell", **_figures(group, cell))


def _try(group: Group, cell: Cell, engines: Engines, act: Callable[[], None]) -> None:
    """Does it unless the cell has failed; a failure is told, and the engine is ended, as it may have lost a rank."""
    if cell.failed:
        return
    try:
        act()
    except Exception as error:  # the other cells are still worth measuring
        cell.failed = True
        engines.tell(
            kind="failed", model=group.pair.name, layout=cell.layout, mode=cell.arm[0], tree_budget=cell.arm[1],
            concurrency=group.concurrency, error=f"{type(error).__name__}: {error}",
        )  # fmt: skip
        engines.drop(cell.engine)


def _repeat(group: Group, cell: Cell, turn: int) -> None:
    cell.taken.append(_take(group, cell, turn))


def _rehearse(group: Group, cell: Cell, pass_s: float) -> None:
    """Captures and compiles what is needed, and finds how many tokens a pass of `pass_s` seconds gives."""
    _take(group, cell, 0)
    taken = _take(group, cell, 1)
    step_s = statistics.median(seconds for seconds, _ in taken.steps) if taken.steps else taken.seconds
    accept = taken.decoded / max(taken.sequence_rounds, 1)
    cell.tokens = int(min(max(pass_s / step_s * accept, LEAST_TOKENS), MOST_TOKENS))


def _take(group: Group, cell: Cell, turn: int) -> Taken:
    count = group.concurrency
    every = prompts_of(group.pair, count * 16, cell.engine.models.target.vocab_size)
    at = turn * count % len(every)
    return take(cell.engine, every[at : at + count], cell.arm, 0.0, count, cell.tokens)


def _figures(group: Group, cell: Cell) -> dict[str, Any]:
    """Medians and spread over the repetitions; tok/s while nothing is prefilled."""
    pair, engine = group.pair, cell.engine
    speeds = [sum(t for _, t in each.steps) / sum(s for s, _ in each.steps) for each in cell.taken]
    rounds = [statistics.median(s for s, _ in each.steps) * 1e3 for each in cell.taken]
    window = [each.tokens / each.seconds for each in cell.taken]
    decoded, played = (
        sum(getattr(each, name) for each in cell.taken) for name in ("decoded", "sequence_rounds")
    )
    prompts = prompts_of(pair, 24, engine.models.target.vocab_size)
    lengths = [
        len(
            admit(
                GenerateRequest(**each), engine.config, engine.loaded.limits, engine.loaded.tokenizer
            ).prompt
        )
        for each in prompts
    ]
    return {
        "model": pair.name, "layout": cell.layout, "label": label(cell.layout, pair.checkpoint.config),
        "mode": cell.arm[0], "tree_budget": cell.arm[1], "concurrency": group.concurrency,
        "drafter": "none" if not group.drafts else "trained" if pair.real else "random",
        "tok_s": round(statistics.median(speeds), 2), "tok_s_spread": [round(f(speeds), 2) for f in (min, max)],
        "ms_round": round(statistics.median(rounds), 4), "ms_round_spread": [round(f(rounds), 4) for f in (min, max)],
        "window_tok_s": round(statistics.median(window), 2), "accept_length": round(decoded / max(played, 1), 3),
        "tokens": cell.tokens, "context": round(statistics.fmean(lengths)) + cell.tokens // 2,
        "n": len(cell.taken), "dtype": engine.config.dtype, "graphs": engine.loaded.graphs is not None,
        "rounds_by": engine.loaded.rounds, "words": engine.loaded.layout, "temperature": 0.0,
    }  # fmt: skip
