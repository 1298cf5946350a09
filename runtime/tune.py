"""Finds the fastest mode and tree budget of a runtime for an objective, by a race of few measurements.

Settings are tried request by request: the runtime's own configuration is not touched while measuring, so that nothing
has to be put back, whatever happens. Measurements are kept as they come, so that a tune goes on where it was stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from runtime.interface import Frozen, Mode, Runtime, RuntimeFault
from runtime.load import Answer, Load, LoadRun, Prompt, RuntimeTarget, run_load
from runtime.load_report import LoadResult, Slo, conditions, summarise
from runtime.race import Arm, Gain, Race

SCHEMA = 1
BUDGETS = (4, 7, 11, 15, 23, 31, 63)
"""Trees of 5 to 64 rows, root included: matrix libraries work in blocks of 8 or 16 rows."""
PROMPTS_PER_BLOCK = 12
FRESH_S = 3600.0
"""Measurements older than this are not gone on with: the host may be another one by then."""
GRACE_S, LOOK_S = 2.0, 0.05
SLOWEST = 0.2
"""Share of the pauses that are cut, see `undisturbed_speed`."""
LEAST_S = 1e-9
WORTH = 0.01
"""A setting that is faster by less than this is not worth a change."""

Objective = Literal["latency", "throughput", "goodput"]


class TuneRefused(RuntimeFault):
    """The runtime serves others: figures would be wrong, and theirs would suffer."""

    exit_code = 3


@dataclass(frozen=True)
class TunePlan:
    """What is sought, and under which load."""

    objective: Objective = "latency"
    concurrency: int = 1
    """Users at a time; for goodput the rate takes its place."""
    rate: float | None = None
    slo: Slo | None = None
    temperature: float = 0.0
    modes: tuple[Mode, ...] = ("off", "chain", "tree")
    budgets: tuple[int, ...] = BUDGETS
    max_tokens: int = 32
    prompts: tuple[Prompt, ...] = ()
    under_load: bool = False
    """Measure although other clients' requests run."""
    client: str = "tune"


class Measurement(Frozen):
    """One setting on the prompts of one block."""

    mode: Mode
    tree_budget: int
    block: int
    value: float
    """The objective: tok/s (latency: `undisturbed_speed`; throughput: of all), or good answers per second."""
    accept_length: float | None
    time_s: float
    """Unix time."""


class Standing(Frozen):
    """How one setting came out."""

    mode: Mode
    tree_budget: int
    value: float | None
    """The objective, fitted over all blocks; None: never measured."""
    accept_length: float | None
    measurements: int
    verdict: str


class TuneReport(Frozen):
    """The evidence of a tune."""

    objective: Objective
    unit: str
    mode: Mode
    tree_budget: int
    """What was found; of a mode other than tree 0."""
    over_plain: tuple[float, float, float] | None
    """Ratio to plain decoding with the bounds of its 95 % interval."""
    over_current: tuple[float, float, float] | None
    """Ratio to the setting that was in force."""
    worth_it: bool
    """Whether it differs from the setting in force and is faster by more than 1 %."""
    why_ended: str
    measurements: int
    exhaustive: int
    """Measurements of a search that tries every setting in five blocks."""
    results: tuple[Standing, ...]
    """The fastest first."""
    conditions: dict[str, Any]
    notes: tuple[str, ...] = ()
    applied: str | None = None
    """Where it was applied."""
    layout: str | None = None
    """The layout found with them; None: none was sought."""

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "kind": "tune", **self.model_dump(mode="json")}

    def table(self) -> str:
        """The evidence for people."""
        head = f"{'setting':<10}{self.unit:>12}{'accept':>8}{'n':>4}  verdict"
        lines = [head, "-" * len(head)]
        for each in self.results:
            accept = "n/a" if each.accept_length is None else f"{each.accept_length:.2f}"
            value = "n/a" if each.value is None else f"{each.value:.1f}"
            name = str(Arm(each.mode, each.tree_budget))
            lines.append(f"{name:<10}{value:>12}{accept:>8}{each.measurements:>4}  {each.verdict}")
        chosen = str(Arm(self.mode, self.tree_budget))
        gains = [f"fastest for {self.objective}: {chosen}"]
        if self.over_plain is not None:
            gains.append(f"{Gain(*self.over_plain)} plain")
        if self.over_current is not None:
            gains.append(f"{Gain(*self.over_current)} the setting in force")
        lines.append(", ".join(gains))
        lines.append(
            f"{self.why_ended}; {self.measurements} measurements, exhaustive would be {self.exhaustive}"
        )
        return "\n".join([*lines, *self.notes])


async def tune(
    runtime: Runtime,
    plan: TunePlan,
    ledger: Ledger | None = None,
    progress: Callable[[float | None, str], None] = lambda _share, _text: None,
) -> TuneReport:
    """Races the settings of `plan` on a runtime that is ready.

    Raises TuneRefused while others' requests run, RuntimeFault where a measurement cannot be made.
    """
    ledger = ledger or Ledger(None)
    about, status = await runtime.describe(), await runtime.status()
    inactive = about.speculation if about.speculation != "ready" else None
    current = current_setting(status.config, inactive is not None)
    arms = arms_to_try(plan, about.max_tree_budget, inactive is not None, current)
    race = Race(arms, current)
    facts = {
        "model": about.target,
        "drafter": about.drafter,
        "device": about.device,
        "dtype": about.dtype,
        "threads": about.threads,
        "layout": status.config["layout"],
        "host": about.host,
        "objective": plan.objective,
        "concurrency": plan.concurrency if plan.rate is None else None,
        "rate": plan.rate,
        "temperature": plan.temperature,
        "max_tokens": plan.max_tokens,
        "current": str(current or "auto"),
    }
    before = conditions(facts, len(plan.prompts))
    ledger.open(_key(facts, plan, arms))
    done = list(_gone_on_with(race, ledger.read()))
    resumed = len(done)
    while (arm := race.next) is not None:
        progress(
            race.measurements / race.limit,
            f"measurement {race.measurements + 1} of at most {race.limit}: {arm}",
        )
        await check_alone(runtime, plan)
        found = await measure(runtime, plan, arm, race.block)
        done.append(found)
        ledger.append(found)
        race.add(found.value)
    report = _report(plan, race, current, done, before)
    notes = [f"speculation is {inactive}"] if inactive else []
    notes += [f"gone on with {resumed} measurements of before"] if resumed else []
    ledger.close()
    return report.model_copy(update={"notes": tuple(notes)})


class Ledger:
    """Measurements of a tune that has not ended, in a file of its own; without a folder nothing is kept."""

    def __init__(self, folder: Path | None, fresh: bool = False) -> None:
        """`fresh`: what is there is thrown away."""
        self._folder = folder
        self._fresh = fresh
        self._file: Path | None = None

    def open(self, key: str) -> None:
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = self._folder / f"tune-{key}.jsonl"
            if self._fresh:
                self._file.unlink(missing_ok=True)

    def read(self) -> list[Measurement]:
        """What was measured within the last hour; a last line that was cut off is left out."""
        if self._file is None or not self._file.exists():
            return []
        found = []
        with contextlib.suppress(ValueError):
            for line in self._file.read_text(encoding="utf-8").splitlines():
                found.append(Measurement.model_validate_json(line))
        if not found or time.time() - found[-1].time_s > FRESH_S:
            self._file.unlink(missing_ok=True)
            return []
        # Rewritten whole, so that what follows does not continue a cut line.
        self._file.write_text("".join(each.model_dump_json() + "\n" for each in found), encoding="utf-8")
        return found

    def append(self, measurement: Measurement) -> None:
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(measurement.model_dump_json() + "\n")
                file.flush()
                os.fsync(file.fileno())

    def close(self) -> None:
        """The tune has ended."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def current_setting(config: Mapping[str, Any], plain_only: bool = False) -> Arm | None:
    """What a runtime decodes with by its configuration; None in auto mode, which has no one setting."""
    mode, budget = config["mode"], config.get("tree_budget")
    if plain_only or mode == "off" or (mode == "tree" and budget == 0):
        return Arm("off", 0)
    if mode == "auto":
        return None
    return Arm(mode, int(budget or 0) if mode == "tree" else 0)


def arms_to_try(plan: TunePlan, most: int, plain_only: bool, current: Arm | None) -> list[Arm]:
    """The settings to try; plain decoding and the setting in force always, to compare with."""
    if plain_only:
        return [Arm("off", 0)]
    arms = [Arm("off", 0), *([current] if current else [])]
    arms += [Arm(mode, 0) for mode in plan.modes if mode != "tree"]
    if "tree" in plan.modes:
        arms += [Arm("tree", budget) for budget in plan.budgets if 0 < budget <= most]
    # A tree whose budget is chosen at start-up is known by the budget only when it says so.
    return [arm for arm in dict.fromkeys(arms) if arm.mode != "tree" or arm.tree_budget > 0]


def _gone_on_with(race: Race, kept: Sequence[Measurement]) -> Iterator[Measurement]:
    """Gives the race what was measured before, as far as it fits."""
    for each in kept:
        if race.next != Arm(each.mode, each.tree_budget) or race.block != each.block:
            return
        race.add(each.value)
        yield each


async def check_alone(runtime: Runtime, plan: TunePlan) -> None:
    """Waits a moment for the engine to be idle: what is left of our own last request ends by then."""
    tries = round(GRACE_S / LOOK_S)
    for left in reversed(range(tries)):
        status = await runtime.status()
        others = status.running + status.waiting
        if plan.under_load or not others:
            return
        if left:
            await asyncio.sleep(LOOK_S)
    raise TuneRefused(
        f"{others} requests of others run or wait; try again when it is idle, "
        "or measure all the same with --under-load"
    )


async def measure(runtime: Runtime, plan: TunePlan, arm: Arm | None, block: int) -> Measurement:
    """One setting on the same prompts in each block; None: what is in force.

    How far drafts are accepted differs more between prompts than between neighbouring settings, so other prompts in
    other blocks would decide the race by which of them a setting met.
    """
    many = max(PROMPTS_PER_BLOCK, 2 * plan.concurrency)
    prompts = [plan.prompts[at % len(plan.prompts)] for at in range(many)]
    load = Load(
        concurrency=plan.concurrency if plan.rate is None else None,
        rate=plan.rate,
        requests=many,
        warm_up=0,
        max_tokens=plan.max_tokens,
        temperature=plan.temperature,
        mode=arm.mode if arm else None,
        tree_budget=arm.tree_budget if arm else None,
        seed=0,
    )
    ran = await run_load(load, RuntimeTarget(runtime, plan.client), prompts)
    result = summarise(ran, plan.slo)
    if result.failed:
        raise RuntimeFault(f"{arm or 'what is in force'} could not be measured: {next(iter(result.errors))}")
    asked = arm or Arm("off", 0)
    return Measurement(
        mode=asked.mode,
        tree_budget=asked.tree_budget,
        block=block,
        value=_value(plan, ran, result),
        accept_length=result.accept_length,
        time_s=time.time(),
    )


def _value(plan: TunePlan, ran: LoadRun, result: LoadResult) -> float:
    if plan.objective == "goodput":
        return result.goodput_per_s or 0.0
    if plan.objective == "throughput":
        return result.total_tok_s
    return undisturbed_speed(ran.answers)


def undisturbed_speed(answers: Sequence[Answer]) -> float:
    """Tokens per second of one user after the first token, as far as the host let it.

    The slowest fifth of the pauses between arrivals count as the longest of the others: a moment that another process
    takes is longer than what settings differ by, and would decide between them. Raises RuntimeFault without pauses.
    """
    pauses = sorted(gap for each in answers for gap in each.gaps_s)
    tokens = sum(each.tokens - 1 for each in answers if each.gaps_s)
    if not pauses:
        raise RuntimeFault("answers of one token have no speed; ask for more with --max-tokens")
    most = pauses[min(len(pauses) - 1, int(len(pauses) * (1 - SLOWEST)))]
    return tokens / max(sum(min(each, most) for each in pauses), LEAST_S)


def _report(
    plan: TunePlan, race: Race, current: Arm | None, done: Sequence[Measurement], before: dict[str, Any]
) -> TuneReport:
    fit, leader = race.fit(), race.leader
    scale = _scale(race, done)
    plain = Arm("off", 0)
    rows = []
    for arm in race.arms:
        mine = [each for each in done if Arm(each.mode, each.tree_budget) == arm]
        accepts = [each.accept_length for each in mine if each.accept_length is not None]
        verdict = "fastest" if arm == leader else race.dropped.get(arm, "left in the race")
        rows.append(
            Standing(
                mode=arm.mode,
                tree_budget=arm.tree_budget,
                value=scale * math.exp(fit.effects[arm]) if mine else None,
                accept_length=sum(accepts) / len(accepts) if accepts else None,
                measurements=len(mine),
                verdict=verdict if mine else "not tried: its neighbours were slower",
            )
        )
    rows.sort(key=lambda each: -(each.value or 0.0))
    over_current = fit.gain(leader, current) if current is not None and current in fit.effects else None
    return TuneReport(
        objective=plan.objective,
        unit="good/s" if plan.objective == "goodput" else "tok/s",
        mode=leader.mode,
        tree_budget=leader.tree_budget,
        over_plain=fit.gain(leader, plain) if plain in fit.effects else None,
        over_current=over_current,
        worth_it=leader != current and (over_current is None or over_current.ratio > 1 + WORTH),
        why_ended=race.over or "",
        measurements=race.measurements,
        exhaustive=race.exhaustive,
        results=tuple(rows),
        conditions=before,
    )


def _scale(race: Race, done: Sequence[Measurement]) -> float:
    """Turns effects, which are relative, into the objective as it was measured in the mean."""
    fit = race.fit()
    logs = [
        math.log(each.value) - fit.effects[Arm(each.mode, each.tree_budget)]
        for each in done
        if each.value > 0
    ]
    return math.exp(sum(logs) / len(logs)) if logs else 0.0


def _key(facts: Mapping[str, Any], plan: TunePlan, arms: Sequence[Arm]) -> str:
    """Names what is measured: the same key only for figures that may stand side by side."""
    everything = [facts, [list(arm) for arm in arms], list(plan.prompts), str(plan.slo)]
    return hashlib.sha256(json.dumps(everything, sort_keys=True, default=str).encode()).hexdigest()[:16]
