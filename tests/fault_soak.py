"""The day over and over on one server, with what it holds measured after every turn: memory, descriptors, threads."""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_checks import after_day, after_step
from fault_day import (
    Day,
    attach,
    browse,
    detach,
    flip,
    leavers,
    prompts,
    rebuild,
    rollback,
    save,
    start,
    stop,
)
from fault_world import World

TURN = (
    (prompts, 1.0),
    (flip, 1.0),
    (leavers, 0.7),
    (prompts, 1.0),
    (rebuild, 0.35),
    (save, 0.12),
    (rollback, 0.08),
    (browse, 0.05),
    (attach, 0.06),
    (detach, 1.0),
)
"""Steps of a turn, with how often each is part of it."""
WARM = 1 / 2
"""Share of the time at the beginning in which caches, pools of threads and the allocator's arenas fill."""
PARTS = 12
"""Means that a line is laid through."""


@dataclass(frozen=True)
class Sample:
    """What the server holds when nothing is asked."""

    at_s: float
    memory: int
    """Bytes that no file backs, resident or swapped out: pages of libraries come and go as the host likes."""
    resident: int
    """All resident bytes."""
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Slope:
    """How a figure goes over time after the warm-up: a straight line through it, and how sure that line is."""

    what: str
    first: float
    last: float
    per_hour: float
    error: float
    """Standard error of `per_hour`."""
    noise: float
    """Standard deviation of single readings about the line."""
    hours: float

    @property
    def named_from(self) -> float:
        """The least rise in an hour that counts as one: two standard errors, or what a reading strays over the time."""
        return max(2 * self.error, self.noise / self.hours) if self.hours else 0.0

    @property
    def is_flat(self) -> bool:
        return self.per_hour <= self.named_from

    def __str__(self) -> str:
        return (
            f"{self.what}: {self.first:.1f} to {self.last:.1f} in {60 * self.hours:.0f} min, {self.per_hour:+.2f} "
            f"+- {self.error:.2f} an hour, noise {self.noise:.2f}: {'flat' if self.is_flat else 'not flat'} "
            f"(a rise is named from {self.named_from:.2f} an hour)"
        )


@dataclass(frozen=True)
class Soaked:
    """What a soak gave."""

    turns: int
    answered: int
    kept: int
    problems: tuple[str, ...]
    samples: tuple[Sample, ...]

    @property
    def slopes(self) -> tuple[Slope, ...]:
        if not self.samples:
            return ()
        begins = WARM * self.samples[-1].at_s
        warm = [each for each in self.samples if each.at_s >= begins]
        figures: Sequence[tuple[str, Callable[[Sample], float]]] = (
            ("memory, MiB", lambda each: each.memory / 2**20),
            ("descriptors", lambda each: each.descriptors),
            ("threads", lambda each: each.threads),
        )
        return tuple(slope(what, [(each.at_s, read(each)) for each in warm]) for what, read in figures)

    @property
    def course(self) -> tuple[float, ...]:
        """Mean memory in each part of the whole time, MiB: a pool that fills rises less and less, a leak does not."""
        return tuple(value for _, value in means([(each.at_s, each.memory / 2**20) for each in self.samples]))

    def __str__(self) -> str:
        head = f"{self.turns} turns, {self.answered} texts as alone, {self.kept} snapshots, "
        course = f"memory from the start, MiB: {' '.join(f'{each:.1f}' for each in self.course)}"
        return "\n".join((f"{head}{len(self.problems)} violations", *map(str, self.slopes), course))

    def to_json(self) -> str:
        return json.dumps(
            {
                "schema": 1,
                "turns": self.turns,
                "answered": self.answered,
                "kept": self.kept,
                "problems": self.problems,
                "slopes": [vars(each) | {"flat": each.is_flat} for each in self.slopes],
                "course": self.course,
            }
        )


def means(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The means of `PARTS` equal parts of the time (fewer of few points), without those in which there is no point."""
    if not points:
        return []
    parts = min(PARTS, len(points) // 2) or 1
    begin, span = points[0][0], points[-1][0] - points[0][0] or 1.0
    found: list[list[tuple[float, float]]] = [[] for _ in range(parts)]
    for at, value in points:
        found[min(int((at - begin) / span * parts), parts - 1)].append((at, value))
    return [
        (statistics.fmean(at for at, _ in each), statistics.fmean(value for _, value in each))
        for each in found
        if each
    ]


def slope(what: str, points: Sequence[tuple[float, float]]) -> Slope:
    """The least-squares line through `(seconds, value)` points, by their means over parts of the time.

    Readings of neighbouring turns are alike, so an error from single ones would promise far too much; those of parts
    of minutes hardly are.
    """
    parts = means(points)
    if len(parts) < 3:
        return Slope(what, points[0][1], points[-1][1], 0.0, 0.0, 0.0, 0.0)
    times, values = [at / 3600 for at, _ in parts], [value for _, value in parts]
    line = statistics.linear_regression(times, values)
    off = sum(
        (value - line.intercept - line.slope * at) ** 2 for at, value in zip(times, values, strict=True)
    )
    spread = sum((at - statistics.fmean(times)) ** 2 for at in times)
    error = math.sqrt(off / (len(parts) - 2) / spread)
    strays = [value - line.intercept - line.slope * at / 3600 for at, value in points]
    noise, hours = statistics.pstdev(strays), (points[-1][0] - points[0][0]) / 3600
    return Slope(what, points[0][1], points[-1][1], line.slope, error, noise, hours)


def soak(
    world: World,
    texts: Mapping[tuple[Any, ...], str],
    seed: int,
    seconds: float = 0.0,
    turns: int = 0,
    tell: Callable[[str], None] = lambda _line: None,
) -> Soaked:
    """Turns for so many seconds, or so many; stops at the first violation."""
    day = Day(world, texts, random.Random(seed))
    began = time.monotonic()
    samples: list[Sample] = []
    problems = start(day)
    done = 0
    while not problems and (done < turns if turns else time.monotonic() - began < seconds):
        for step, chance in TURN:
            if day.rng.random() < chance and not problems:
                day.step = step.__name__
                problems += step(day)
        problems += after_step(day)
        samples.append(_sample(world, time.monotonic() - began))
        done += 1
        if done % 50 == 0:
            tell(f"{done} turns: {samples[-1]}")
    day.step = "stop"
    problems += stop(day)
    problems += after_day(day)
    return Soaked(done, day.answered, len(day.kept), tuple(problems), tuple(samples))


def _sample(world: World, at_s: float) -> Sample:
    assert world.server is not None
    process = Path(f"/proc/{world.server.pid}")
    fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    size = {name: int(value.split()[0]) * 1024 for name, value in fields.items() if value.endswith("kB")}
    return Sample(
        at_s,
        size["RssAnon"] + size["RssShmem"] + size["VmSwap"],
        size["VmRSS"],
        len(list((process / "fd").iterdir())),
        int(fields["Threads"]),
    )
