"""A race between settings: few interleaved measurements, losers leave early, the verdict says how sure it is.

In each block every setting still in the race is measured once on the same prompts, so that prompts and slow minutes of
the host hit all alike. Logarithms of the speeds are fitted by one effect of the setting and one of the block (two-way
analysis of variance); a setting leaves when the leader is ahead by more than chance explains. Tree budgets begin with
every second one; the neighbours of a leader join in the next block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import NamedTuple

from runtime.interface import Mode

CONFIDENCE = 0.95
TOLERANCE = 0.03
"""The race ends when nobody left can be faster than the leader by more than this."""
PRIOR_NOISE, PRIOR_FREEDOM = 0.03, 3
"""Relative noise of one measurement as expected beforehand, and how many degrees of freedom that is worth."""
FULL_BLOCKS = 5
"""What an exhaustive search would spend on each setting."""
FIT_STEPS = 60
LEAST = 1e-9
"""A speed of zero has no logarithm."""


class Arm(NamedTuple):
    """One setting; the budget is 0 unless the mode is tree."""

    mode: Mode
    tree_budget: int

    def __str__(self) -> str:
        return f"tree {self.tree_budget}" if self.mode == "tree" else self.mode


class Gain(NamedTuple):
    """How many times as fast, with the bounds of its 95 % interval."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.2f}x (95 %: {self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Fit:
    """Effects of settings on the logarithm of the speed, and the noise of one measurement."""

    effects: dict[Arm, float]
    counts: dict[Arm, int]
    noise: float
    freedom: int

    def margin(self, one: Arm, other: Arm, confidence: float = CONFIDENCE) -> float:
        """Difference of their effects that chance explains, one-sided."""
        error = self.noise * math.sqrt(1 / self.counts[one] + 1 / self.counts[other])
        return student(confidence, self.freedom) * error

    def gain(self, one: Arm, other: Arm) -> Gain:
        lead = self.effects[one] - self.effects[other]
        margin = self.margin(one, other, (1 + CONFIDENCE) / 2)
        return Gain(math.exp(lead), math.exp(lead - margin), math.exp(lead + margin))


class Race:
    """Says what to measure next; `add` takes the results in that order. The same results give the same race."""

    def __init__(self, arms: Sequence[Arm], current: Arm | None = None, limit: int | None = None) -> None:
        """`current`, the setting in force, runs from the first block on; `limit` of measurements, None: a third."""
        self.arms = tuple(dict.fromkeys(arms))
        self.exhaustive = len(self.arms) * FULL_BLOCKS
        self.limit = (self.exhaustive - 1) // 3 if limit is None else limit
        self.values: dict[Arm, dict[int, float]] = {}
        self.dropped: dict[Arm, str] = {}
        self.block = 0
        self.over: str | None = None
        """Why it ended."""
        trees = self.trees
        first = [
            each for each in self.arms if each.mode != "tree" or trees.index(each) % 2 or each == current
        ]
        self._alive = first if len(trees) > 3 else list(self.arms)
        self._left = list(self._alive)

    @property
    def trees(self) -> list[Arm]:
        return sorted(each for each in self.arms if each.mode == "tree")

    @property
    def measurements(self) -> int:
        return sum(map(len, self.values.values()))

    @property
    def next(self) -> Arm | None:
        """The setting to measure in block `block`; None when the race is over."""
        return None if self.over is not None else self._left[0]

    @property
    def leader(self) -> Arm:
        fit = self.fit()
        return max((each for each in self._alive if each in fit.effects), key=fit.effects.__getitem__)

    def add(self, speed: float) -> None:
        """The speed of `next`."""
        self.values.setdefault(self._left.pop(0), {})[self.block] = math.log(max(speed, LEAST))
        if not self._left:
            self._close_block()
        if self.over is None and self.measurements >= self.limit:
            self.over = f"all {self.limit} measurements are made"

    def fit(self) -> Fit:
        """Least squares over all measurements: log speed = effect of the setting + effect of the block."""
        effects = {arm: fmean(found.values()) for arm, found in self.values.items()}
        blocks = dict.fromkeys(range(self.block + 1), 0.0)
        for _ in range(FIT_STEPS):
            for block in blocks:
                here = [found[block] - effects[arm] for arm, found in self.values.items() if block in found]
                blocks[block] = fmean(here) if here else 0.0
            effects = {
                arm: fmean(value - blocks[block] for block, value in found.items())
                for arm, found in self.values.items()
            }
        used = {block for found in self.values.values() for block in found}
        squares = sum(
            (value - effects[arm] - blocks[block]) ** 2
            for arm, found in self.values.items()
            for block, value in found.items()
        )
        freedom = max(0, self.measurements - len(effects) - len(used) + 1)
        noise = math.sqrt((PRIOR_FREEDOM * PRIOR_NOISE**2 + squares) / (PRIOR_FREEDOM + freedom))
        counts = {arm: len(found) for arm, found in self.values.items()}
        return Fit(effects, counts, noise, PRIOR_FREEDOM + freedom)

    def _close_block(self) -> None:
        fit, leader = self.fit(), self.leader
        for arm in list(self._alive):
            if fit.effects[leader] - fit.effects[arm] > fit.margin(leader, arm):
                self._alive.remove(arm)
                self.dropped[arm] = f"slower than {leader}: {fit.gain(arm, leader)}"
        joining = [arm for arm in self._neighbours(leader) if arm not in self.values]
        rivals = [arm for arm in self._alive if arm != leader]
        if not joining and not rivals:
            self.over = f"{leader} is ahead of all others"
        elif not joining and all(
            fit.effects[arm] - fit.effects[leader] + fit.margin(leader, arm) < math.log1p(TOLERANCE)
            for arm in rivals
        ):
            self.over = f"nobody left can be faster than {leader} by more than {TOLERANCE:.0%}"
        self._alive += joining
        # The leader first, those behind it after: if measurements run out, they went to the best.
        self.block += 1
        self._left = sorted(self._alive, key=lambda arm: -fit.effects.get(arm, math.inf))

    def _neighbours(self, leader: Arm) -> list[Arm]:
        """Tree budgets next to a leading tree, which may be faster still."""
        trees = self.trees
        if all(value <= math.log(LEAST) for value in self.values[leader].values()):
            return list(self.arms)  # Nobody has reached anything yet, so nothing says where to look.
        if leader not in trees:
            return []
        at = trees.index(leader)
        return [trees[each] for each in (at - 1, at + 1) if 0 <= each < len(trees)]


def student(confidence: float, freedom: int) -> float:
    """One-sided quantile of Student's t (Abramowitz and Stegun 26.7.5), for 3 and more degrees of freedom."""
    z = NormalDist().inv_cdf(confidence)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
