"""One day under its faults, and what has to hold after every one of them.

No accepted request lost or altered, no snapshot lost, the configuration the last one that was confirmed, no slot or
descriptor leaked, no process left, the terminal sane.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import threading
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from fault_day import ALL, BAD_FILES, FULL, KILLED, RAISED, STEPS, TRACKED, Day, Step, tracked
from fault_kinds import FAULTS, Fault
from fault_nursery import Nursery
from fault_world import World, until

MORE_DESCRIPTORS = 8
"""Connections and the like that an idle server may have open beyond those it began with."""


@dataclass(frozen=True)
class Report:
    """How one day went."""

    seed: int
    problems: tuple[str, ...]
    story: tuple[str, ...]
    answered: int
    kept: int
    struck: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Plan:
    """Steps, and the fault that strikes in some of them after so many seconds."""

    steps: tuple[tuple[Step, tuple[Fault, float] | None], ...]
    layouts: bool


def plan_of(seed: int, rng: random.Random, small: bool, layouts: bool) -> Plan:
    """The day of a seed: the same seed is the same plan. `layouts`: engines of several processes, on some days."""
    layouts = layouts and seed % 6 == 0
    faults = [each for each in FAULTS if (small or not each.small_disk) and (layouts or not each.ranks)]
    steps = [step for step, chance in STEPS if rng.random() < chance]
    struck = set(rng.sample(range(len(steps)), min(len(steps), rng.randint(2, 4))))
    return Plan(
        tuple(
            (step, (rng.choice(faults), rng.uniform(0.0, 0.25)) if at in struck else None)
            for at, step in enumerate(steps)
        ),
        layouts,
    )


def run_day(
    seed: int,
    folder: Path,
    models: Path,
    logs: Path,
    nursery: Nursery,
    texts: Mapping[tuple[Any, ...], str],
    *,
    small: bool = False,
    layouts: bool = False,
) -> Report:
    """Runs the day of `seed` in `folder`, which is made; whatever happens, nothing of it is left running."""
    rng = random.Random(seed)
    plan = plan_of(seed, rng, small, layouts)
    began = time.monotonic()
    world = World(folder, models, logs, nursery, small)
    day = Day(world, texts, rng, layouts=plan.layouts)
    problems: list[str] = []
    struck: list[str] = []
    try:
        for step, strike in plan.steps:
            day.step, day.hurt = step.__name__, set()
            world.tell(step.__name__)
            found = _under(day, step, *strike, struck) if strike else _tried(day, step)
            problems += found or _checked(day, lambda: after_step(day))
            if problems:
                break
        if not problems:
            problems += _checked(day, lambda: after_day(day))
    finally:
        world.close()
    return Report(
        seed,
        tuple(problems),
        tuple(world.story),
        day.answered,
        len(day.kept),
        tuple(struck),
        time.monotonic() - began,
    )


def _tried(day: Day, step: Step) -> list[str]:
    try:
        return step(day)
    except (AssertionError, HTTPException, KeyError, OSError, ValueError) as failed:
        return [] if day.excused(KILLED, RAISED, FULL, BAD_FILES) else [f"{day.step}: {failed!r}"]


def _under(day: Day, step: Step, fault: Fault, delay_s: float, struck: list[str]) -> list[str]:
    """The step with a fault in the middle of it, mended at its end."""
    found: list[str] = []
    working = threading.Thread(target=lambda: found.extend(_tried(day, step)))
    working.start()
    working.join(delay_s)
    if fault.hurts:
        day.hurt.add(fault.hurts)
    day.world.tell(f"  {fault.name}, {delay_s:.3f} s into it")
    mend = fault.strike(day)
    if mend is None:
        day.world.tell("  nothing to strike")
        day.hurt.discard(fault.hurts or "")
    else:
        struck.append(fault.name)
    working.join()
    if mend is not None:
        found += [f"{fault.name}: {each}" for each in _checked(day, mend)]
    return found + _checked(day, lambda: _up_again(day))


def _up_again(day: Day) -> list[str]:
    """Starts the server anew where the fault may have ended it."""
    world = day.world
    if day.step == "stop":
        return []
    if day.excused(KILLED) and world.server is not None:
        world.server.wait(10.0)
    if day.excused(RAISED, BAD_FILES, FULL):
        heard: list[tuple[int, Any]] = []  # nothing, where it is about to end: it closes its address first
        until(lambda: world.ended or heard.append(world.get("/ready")) or heard, "it answers or has ended")
        if heard and heard[-1][0] != 200 and "failed" in heard[-1][1]["error"]["message"]:
            world.end_server()
    if not world.ended:
        return []
    if not day.excused(KILLED, RAISED, FULL, BAD_FILES):
        return [f"serve ended by itself: {world.server_log.read_text(errors='replace')[-1500:]}"]
    world.write_config()
    world.start_server()
    day.begins()
    return []


def _checked(day: Day, check: Any) -> list[str]:
    try:
        return [f"after {day.step}: {each}" for each in check()]
    except (AssertionError, HTTPException, KeyError, OSError, ValueError) as failed:
        return [f"after {day.step}: {failed!r}"]


def after_step(day: Day) -> list[str]:
    """What holds whenever nothing is asked."""
    world = day.world
    if world.ended:
        return [] if day.step == "stop" else ["the server is gone"]
    until(lambda: _idle(world.status()), "no request, no slot in use", 120.0)
    status = world.status()
    problems = []
    for name in TRACKED:
        now, wanted = status["config"][name], day.wanted.get(name, day.config[name])
        if now not in (day.config[name], wanted):
            problems.append(f"{name} is {now!r}, confirmed was {day.config[name]!r}")
        day.config[name] = now
    day.wanted = {}
    if status["state"] not in ("ready", "degraded"):
        problems.append(f"the engine is {status['state']}: {status['reason']}")
    if not 0 <= status["slots_cached"] <= status["slots_total"]:
        problems.append(f"slots kept: {status['slots_cached']} of {status['slots_total']}")
    return problems + _last_good(day) + _descriptors(day)


def after_day(day: Day) -> list[str]:
    """What holds when everything was stopped."""
    problems = []
    with contextlib.suppress(AssertionError):
        until(lambda: not day.world.processes(), "all processes ended", 15.0)
    for left in day.world.processes():
        problems.append(f"left running: {left}")
    texts = [each.read_text(errors="replace") for each in day.world.logs.glob(f"{day.world.folder.name}-*")]
    if any("--- Logging error ---" in each for each in texts):
        problems.append("logging failed aloud")
    return problems + _store(day)


def _idle(status: Mapping[str, Any]) -> bool:
    return not (status["running"] or status["waiting"] or status["slots_used"])


def _last_good(day: Day) -> list[str]:
    """It is one that served, or there is none yet."""
    path = day.world.last_good
    if not path.exists():
        return []
    kept = tomllib.loads(path.read_text())
    good = [{name: value for name, value in each.items() if value is not None} for each in day.good]
    tracked = {name: value for name, value in kept.items() if name in TRACKED}
    if tracked not in good:
        return [f"last good is {tracked}, which never served"]
    return []


def _descriptors(day: Day) -> list[str]:
    """Descriptors of the server come back to what they were."""
    server = day.world.server
    if server is None:
        return []
    folder = Path(f"/proc/{server.pid}/fd")
    began = day.world.descriptors.setdefault(server.pid, len(list(folder.iterdir())))
    allowed = began + MORE_DESCRIPTORS + (40 if day.layouts else 0)
    try:
        until(lambda: len(list(folder.iterdir())) <= allowed, "descriptors are closed", 20.0)
    except AssertionError:
        return [f"{len(list(folder.iterdir()))} descriptors, {began} at first"]
    return []


def _store(day: Day) -> list[str]:
    """Every snapshot that was confirmed is there as it was saved; git finds nothing wrong."""
    from snapshots.store import Store

    folder = day.world.store
    if not (folder / "HEAD").exists():
        return [f"the store is gone with {len(day.kept)} snapshots"] if day.kept else []
    store = Store.at(folder)
    problems = []
    listed = {entry.id for entry in store.list(limit=ALL).entries}
    for name, settings in day.kept.items():
        if name not in listed:
            problems.append(f"snapshot {name} is gone")
            continue
        entry, snapshot = store.load(name)
        saved = tracked(snapshot)
        if day.layouts:  # a rank may be lost while it is saved
            saved["layout"] = settings["layout"]
        if saved != settings or entry.note != f"note of {entry.label}\n#1":
            problems.append(f"snapshot {name} is altered: {saved} {entry.note!r}, saved was {settings}")
    said = subprocess.run(["git", "--git-dir", folder, "fsck", "--strict"], capture_output=True, text=True)
    wrong = [
        line
        for line in (said.stdout + said.stderr).splitlines()
        if not line.startswith(("dangling", "notice"))
    ]
    problems += [f"git fsck: {line}" for line in wrong[:3]]
    problems += [f"a lock is left: {path}" for path in folder.rglob("*.lock")]
    return problems
