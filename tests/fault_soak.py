"""The day over and over on one server, with what it holds measured after every turn: memory, descriptors, threads."""

from __future__ import annotations

import json
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
WARM = 1 / 3
"""Share of the turns at the beginning in which caches fill."""


@dataclass(frozen=True)
class Sample:
    """What the server holds when nothing is asked."""

    at_s: float
    memory: int
    """Resident bytes."""
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Slope:
    """How a figure goes over time after the warm-up: a straight line through it, and how far it strays from that."""

    what: str
    first: float
    last: float
    per_hour: float
    noise: float
    """Standard deviation about the line."""
    hours: float

    @property
    def is_flat(self) -> bool:
        """Whether the line's rise over the time is within the noise."""
        return self.per_hour * self.hours <= 2 * self.noise

    def __str__(self) -> str:
        return (
            f"{self.what}: {self.first:.1f} to {self.last:.1f}, {self.per_hour:+.2f} an hour, "
            f"noise {self.noise:.2f}, {'flat' if self.is_flat else 'not flat'}"
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
        warm = self.samples[int(len(self.samples) * WARM) :]
        figures: Sequence[tuple[str, Callable[[Sample], float]]] = (
            ("memory, MiB", lambda each: each.memory / 2**20),
            ("descriptors", lambda each: each.descriptors),
            ("threads", lambda each: each.threads),
        )
        return tuple(slope(what, [(each.at_s, read(each)) for each in warm]) for what, read in figures)

    def __str__(self) -> str:
        head = f"{self.turns} turns, {self.answered} texts as alone, {self.kept} snapshots, "
        return "\n".join((f"{head}{len(self.problems)} violations", *map(str, self.slopes)))

    def to_json(self) -> str:
        return json.dumps(
            {
                "schema": 1,
                "turns": self.turns,
                "answered": self.answered,
                "kept": self.kept,
                "problems": self.problems,
                "slopes": [vars(each) | {"flat": each.is_flat} for each in self.slopes],
            }
        )


def slope(what: str, points: Sequence[tuple[float, float]]) -> Slope:
    """The least-squares line through `(seconds, value)` points."""
    times, values = [each[0] / 3600 for each in points], [each[1] for each in points]
    if len(points) < 3 or times[0] == times[-1]:
        return Slope(what, values[0], values[-1], 0.0, 0.0, 0.0)
    line = statistics.linear_regression(times, values)
    strays = [value - line.intercept - line.slope * at for at, value in zip(times, values, strict=True)]
    return Slope(what, values[0], values[-1], line.slope, statistics.pstdev(strays), times[-1] - times[0])


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
    return Sample(
        at_s,
        int(fields["VmRSS"].split()[0]) * 1024,
        len(list((process / "fd").iterdir())),
        int(fields["Threads"]),
    )
