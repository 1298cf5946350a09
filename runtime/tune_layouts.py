"""Tunes layout after layout: a race of settings in each, then the runtime is put back as it was.

A rebuild takes seconds, so layouts cannot take turns in a block as settings do. The fastest setting of each is measured
some times more, one layout after the other; another layout is found only where chance does not explain its lead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from runtime.interface import ConfigRejected, Frozen, Runtime, RuntimeFault
from runtime.race import Arm, Gain, student
from runtime.tune import WORTH, Ledger, TunePlan, TuneReport, check_alone, measure, tune

Progress = Callable[[float | None, str], None]

REPEATS = 5
"""Measurements of each layout's fastest setting that layouts are compared by."""

LEAST = 1e-9
"""In place of nothing, as where no answer keeps to the SLO."""


class LayoutFound(Frozen):
    """How one layout came out."""

    layout: str
    fastest: str = ""
    """Its fastest setting, as `tree 11`."""
    values: tuple[float, ...] = ()
    """The objective with it, measurement by measurement."""
    refused: str = ""
    """Why it was not measured."""

    def __str__(self) -> str:
        if self.refused:
            return f"layout {self.layout}: not measured: {self.refused}"
        return f"layout {self.layout}: {self.fastest}, {math.exp(_log_mean(self.values)):.1f} (n {len(self.values)})"


class LayoutsReport(TuneReport):
    """The evidence in the layout that was found, beside what the others gave."""

    layouts: tuple[LayoutFound, ...] = ()
    """The layout that was in force first, then in the order asked for."""
    over_layout: tuple[float, float, float] | None = None
    """Ratio of the fastest other layout to the one in force, with the bounds of its 95 % interval."""

    def table(self) -> str:
        lines = [f"in layout {self.layout}", super().table(), *map(str, self.layouts)]
        if self.over_layout is not None:
            lines.append(f"the fastest other layout: {Gain(*self.over_layout)} the one in force")
        return "\n".join(lines)


class _Held(Ledger):
    """Keeps a race that has ended until the tune of all layouts has: it goes on after a stop there too."""

    def close(self) -> None:
        pass

    def end(self) -> None:
        super().close()


async def tune_layouts(
    runtime: Runtime,
    plan: TunePlan,
    layouts: Sequence[str],
    author: str,
    folder: Path | None = None,
    fresh: bool = False,
    progress: Progress = lambda _share, _text: None,
) -> LayoutsReport:
    """Races the settings of `plan` in the layout in force and in each of `layouts`; one that is refused is passed over.

    The layout that was in force is put back at the end, also of a failure, and RuntimeFault raised where that fails.
    One that somebody else put in force meanwhile is left, as is what a server still builds when this is cancelled.
    Else the same is raised as by `tune`, also before a rebuild.
    """
    home = entered = await _layout(runtime)
    reports: dict[str, TuneReport] = {}
    found: list[LayoutFound] = []
    ledgers: list[_Held] = []
    try:
        for name in dict.fromkeys((home, *layouts)):
            progress(None, f"layout {name}")
            await check_alone(runtime, plan)
            refused = await _enter(runtime, name, author)
            if refused:
                found.append(LayoutFound(layout=name, refused=refused))
                continue
            entered = name
            ledgers.append(_Held(folder, fresh))
            report = reports[name] = await tune(runtime, plan, ledgers[-1], partial(_tell, progress, name))
            fastest = Arm(report.mode, report.tree_budget)
            values = []
            for number in range(REPEATS):
                progress(None, f"{name}: {fastest} again, {number + 1} of {REPEATS}")
                await check_alone(runtime, plan)
                values.append((await measure(runtime, plan, fastest, number)).value)
            found.append(LayoutFound(layout=name, fastest=str(fastest), values=tuple(values)))
    finally:
        now = await _layout(runtime)
        refused = await _enter(runtime, home, author) if now == entered else ""
        if refused:
            raise RuntimeFault(f"layout {home}, which was in force, could not be put back: {refused}")
    for ledger in ledgers:
        ledger.end()
    report = _chosen(home, found, reports)
    if now == entered:
        return report
    note = f"layout {now} was put in force by somebody else meanwhile, and is left"
    return report.model_copy(update={"notes": (*report.notes, note)})


async def _layout(runtime: Runtime) -> str:
    return str((await runtime.status()).config["layout"])


def _tell(progress: Progress, layout: str, share: float | None, text: str) -> None:
    progress(share, f"{layout}: {text}")


async def _enter(runtime: Runtime, layout: str, author: str) -> str:
    """Brings a layout into force; returns why it is not."""
    try:
        plan = await runtime.preview({"layout": layout})
        if not plan.allowed:
            return plan.summary
        if not plan.changes:
            return ""
        return (await runtime.apply({"layout": layout}, plan.revision, author)).failure or ""
    except ConfigRejected as error:
        return str(error)


def _chosen(home: str, found: Sequence[LayoutFound], reports: dict[str, TuneReport]) -> LayoutsReport:
    measured = {each.layout: each.values for each in found if each.values}
    others = [name for name in measured if name != home]
    best = max(others, key=lambda name: _log_mean(measured[name])) if others else None
    gain = compared(measured[best], measured[home]) if best is not None else None
    moves = best is not None and gain is not None and gain.low > 1 and gain.ratio > 1 + WORTH
    layout = best if moves and best is not None else home
    facts: dict[str, Any] = reports[layout].model_dump() | {"layout": layout}
    facts["worth_it"] = facts["worth_it"] or moves
    return LayoutsReport(**facts, layouts=tuple(found), over_layout=gain)


def compared(ours: Sequence[float], theirs: Sequence[float]) -> Gain:
    """How many times as fast `ours` are, by the means of their logarithms and Student's t with pooled variance."""
    freedom = len(ours) + len(theirs) - 2
    difference = _log_mean(ours) - _log_mean(theirs)
    squares = sum((len(each) - 1) * variance(_logs(each)) for each in (ours, theirs))
    error = math.sqrt(squares / freedom * (1 / len(ours) + 1 / len(theirs)))
    margin = student(0.975, freedom) * error
    return Gain(*(math.exp(each) for each in (difference, difference - margin, difference + margin)))


def _log_mean(values: Sequence[float]) -> float:
    return fmean(_logs(values))


def _logs(values: Sequence[float]) -> list[float]:
    return [math.log(max(value, LEAST)) for value in values]
