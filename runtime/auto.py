"""Auto mode: off, chain or tree and its budget, chosen from what rounds cost here and from what is accepted.

Expected speed of a setting = sequences x tokens a round / seconds a round. Seconds come from the rounds themselves: the
verify by the rows it had, the rest by batch. Tokens a round come from the trees that were verified: a smaller tree is
the likeliest part of a larger one and the text does not depend on the tree, so one round tells what every smaller
budget and the chain would have had accepted. Settings that a round tells nothing of move along with those it tells of,
and are tried once in a while; so are those whose rounds were hardly timed and that may be as fast. A change needs a
clear gain and is not made again at once.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from runtime.race import Arm

PLAIN, CHAIN = Arm("off", 0), Arm("chain", 0)
MEMORY = 0.02
"""Weight of a new round in what is accepted: the last 50 rounds count for most."""
PRIOR = 20
"""Rounds that what was expected at first weighs as much as."""
COSTS_KEPT = 25
"""Rounds of one size whose median is their cost: one that was held up by something else changes nothing."""
EXACT_ROWS, STEP = 16, 1.07
"""Above so many rows, sizes within 7 % count as one."""
HOPE = 0.5
"""Share of a known cost that does not shrink with the rows, before anything is known of it."""
GAIN = 0.03
"""What a change must promise."""
PLAINLY = 0.2
"""A gain that needs no waiting."""
HOLD_ROUNDS = 8
"""Fewest rounds between two changes at the same load, unless the gain is plain."""
LOOK_UP_ROUNDS = 8
"""The next larger tree is played this often: a tree tells nothing of larger ones."""
TIMED, NEAR = 3, 0.1
"""A setting that is expected to be at most 10 % slower is tried until its rounds of this size were timed so often."""
PROBE_COST = 0.005
"""Share of the time that trying a setting may lose."""
PROBE_FIRST, PROBE_MOST = 16, 256
"""Rounds until a setting that nothing was learnt of lately is tried; doubles while nothing changes."""
TRY_ROUNDS = 8
"""Rounds a setting is tried for where a change takes time; else one."""

Node = tuple[int, int, int, float]
"""Token id, parent, depth, log-probability of its path, as `runtime.round.SequenceRound` has them."""


@dataclass(frozen=True)
class Outcome:
    """One sequence of a round: its draft nodes, root first, and the accepted ones among them."""

    nodes: Sequence[Node]
    path: Sequence[int]


@dataclass(frozen=True)
class Observed:
    """One round: what was played, by how many sequences, over how many rows in all, for how long."""

    arm: Arm
    batch: int
    rows: int
    verify_s: float
    other_s: float
    """Draft, tree, accept and commit."""
    outcomes: Sequence[Outcome]


class Auto:
    """The choice for all sequences that leave it open."""

    def __init__(
        self,
        budgets: Iterable[int],
        horizon: int,
        accepts: Mapping[Arm, float] | None = None,
        change_rounds: float = 0.0,
    ) -> None:
        """`horizon`: drafts of a chain; `accepts`: tokens a round as measured before, bonus token included.

        `change_rounds`: the time, in rounds, that playing another setting than in the round before takes by itself; to
        try one takes two changes.
        """
        self.horizon = horizon
        self._change_rounds = change_rounds
        self._try_rounds = TRY_ROUNDS if change_rounds else 1
        trees = [Arm("tree", budget) for budget in sorted(set(budgets)) if budget > 0]
        self.arms = (PLAIN, CHAIN, *trees) if horizon > 0 else (PLAIN,)
        self.arm = trees[len(trees) // 2] if trees and horizon > 0 else PLAIN
        self.reason = "nothing is measured yet"
        self._accepts = {arm: (accepts or {}).get(arm, _guess(arm)) for arm in self.arms}
        self._verify = _Cost()
        self._other = {False: _Cost(), True: _Cost()}
        self._batch = 0
        self._hold = max(HOLD_ROUNDS, change_rounds / PROBE_COST)
        self._news = False
        """Whether anything was learnt since the last choice."""
        self._round = 0
        self._changed_at = -self._hold
        self._probed_at = 0
        self._told: dict[Arm, int] = dict.fromkeys(self.arms, 0)
        self._told_at: dict[Arm, int] = dict.fromkeys(self.arms, 0)
        self._probe_every = PROBE_FIRST
        self._probing: Arm | None = None
        self._tried = 0
        """Rounds that the setting being tried was played for."""

    def choose(self, batch: int) -> Arm:
        """The setting of the next round of `batch` sequences."""
        moved = batch != self._batch
        self._batch = batch
        self._round += 1
        if self._probing is not None and self._tried < self._try_rounds and not moved:
            self._tried += 1
            return self._probing
        self._probing = None
        if self._verify.known and (moved or self._news):
            self._news = False
            speeds = {arm: self.speed(arm, batch) for arm in self.arms}
            best = max(speeds, key=speeds.__getitem__)
            gain = speeds[best] / speeds[self.arm] - 1 if speeds[self.arm] > 0 else 1.0
            held = self._round - self._changed_at <= self._hold and not moved and gain < PLAINLY
            if best != self.arm and gain > GAIN and not held:
                self._change(best, batch, gain)
            else:
                self._probing, self._tried = self._probe(speeds), 1
        return self._probing or self.arm

    def speed(self, arm: Arm, batch: int) -> float:
        """Expected tokens per second over `batch` sequences; 0 where nothing is known of the cost."""
        seconds = self._seconds(arm, batch)
        return batch * self._accepts[arm] / seconds if seconds > 0 else 0.0

    def _seconds(self, arm: Arm, batch: int) -> float:
        return self._verify.at(self.rows(arm, batch)) + self._other[arm != PLAIN].at(batch)

    def saw(self, observed: Observed) -> None:
        """Learns from a round."""
        self._verify.learn(observed.rows, observed.verify_s)
        self._other[observed.arm != PLAIN].learn(observed.batch, observed.other_s)
        self._news = True
        if observed.arm == PLAIN or not observed.outcomes:
            return
        told = self._lengths(observed)
        before = self._accepts[observed.arm]
        for arm, tokens in told.items():
            self._told[arm] += 1
            weight = max(MEMORY, 1 / (PRIOR + self._told[arm]))
            self._accepts[arm] += weight * (tokens - self._accepts[arm])
            self._told_at[arm] = self._round
        # What this round was silent about moves as what was played: easy text is easy for every tree.
        shift = (self._accepts[observed.arm] - 1) / max(before - 1, 0.05)
        for arm in self.arms:
            if arm not in told and arm != PLAIN:
                self._accepts[arm] = 1 + (self._accepts[arm] - 1) * shift
        self._keep_order()

    def _lengths(self, observed: Observed) -> dict[Arm, float]:
        """Mean tokens a round that each setting would have had, of those that the round tells of."""
        trees = [
            arm for arm in self.arms if arm.mode == "tree" and arm.tree_budget <= observed.arm.tree_budget
        ]
        known = [CHAIN, *trees] if observed.arm.mode == "tree" else [CHAIN]
        sums = dict.fromkeys(known, 0.0)
        for outcome in observed.outcomes:
            ranks = _ranks(outcome.nodes)
            for arm in known:
                if arm == CHAIN:
                    sums[arm] += _chain_length(outcome)
                else:
                    sums[arm] += _length(outcome.path, ranks, arm.tree_budget)
        return {arm: total / len(observed.outcomes) for arm, total in sums.items()}

    def _keep_order(self) -> None:
        """A larger tree never accepts less."""
        least = 1.0
        for arm in self.arms:
            if arm.mode == "tree":
                least = self._accepts[arm] = max(least, self._accepts[arm])

    def _change(self, best: Arm, batch: int, gain: float) -> None:
        self.reason = (
            f"{self.arm} -> {best}: {gain:.0%} faster expected at {batch} sequence{'s' if batch > 1 else ''} "
            f"({self._accepts[best]:.2f} tokens a round against {self._accepts[self.arm]:.2f})"
        )
        self.arm = best
        self._changed_at = self._round
        self._probe_every = PROBE_FIRST

    def _probe(self, speeds: Mapping[Arm, float]) -> Arm | None:
        """A setting to play for one round because nothing was learnt of it lately: one that costs little to try.

        Of a tree in force that is the next larger one; else what may be as fast; else the most promising.
        """
        at = self.arms.index(self.arm)
        larger = self.arms[at + 1 : at + 2] if self.arm.mode == "tree" else ()
        if any(self._may_try(arm, LOOK_UP_ROUNDS, speeds) for arm in larger):
            return larger[0]
        if self._round - self._probed_at >= PROBE_FIRST:
            near = [arm for arm in self.arms if speeds[arm] > (1 - NEAR) * speeds[self.arm]]
            untimed = [arm for arm in near if self._verify.times(self.rows(arm, self._batch)) < TIMED]
            if untimed:
                self._probed_at = self._round
                return max(untimed, key=speeds.__getitem__)
        others = [arm for arm in self.arms if arm not in (self.arm, PLAIN)]
        if self.arm == PLAIN:
            others = [max(others, key=speeds.__getitem__)] if others else []
        silent = [arm for arm in others if self._may_try(arm, self._probe_every, speeds)]
        if not silent or self._round - self._probed_at < self._probe_every:
            return None
        self._probe_every = min(2 * self._probe_every, PROBE_MOST)
        self._probed_at = self._round
        return max(silent, key=speeds.__getitem__)

    def _may_try(self, arm: Arm, rounds: int, speeds: Mapping[Arm, float]) -> bool:
        """Whether it was silent for so many rounds, and for so long that to try it costs under 0.5 % of them."""
        usual = self._seconds(self.arm, self._batch)
        if not usual or not speeds[self.arm]:
            return False
        lost = self._seconds(arm, self._batch) * (1 - speeds[arm] / speeds[self.arm]) / usual
        cost = self._try_rounds * lost + 2 * self._change_rounds
        return self._round - self._told_at[arm] >= max(rounds, cost / PROBE_COST)

    def rows(self, arm: Arm, batch: int) -> int:
        """Rows that the target verifies for `batch` sequences whose trees are full."""
        nodes = 0 if arm == PLAIN else self.horizon if arm == CHAIN else arm.tree_budget
        return batch * (1 + nodes)


class _Cost:
    """Seconds by size, from the rounds that were seen."""

    def __init__(self) -> None:
        self.known: dict[int, float] = {}
        self._seen: dict[int, deque[float]] = {}

    def learn(self, size: int, value: float) -> None:
        size = _about(size)
        seen = self._seen.setdefault(size, deque(maxlen=COSTS_KEPT))
        seen.append(value)
        self.known[size] = statistics.median(seen)

    def times(self, size: int) -> int:
        """How often rounds of this size were timed, `COSTS_KEPT` at most."""
        return len(self._seen.get(_about(size), ()))

    def at(self, size: int) -> float:
        return _between(self.known, size)


def _about(size: int) -> int:
    """The size that stands for all within a step."""
    return (
        size if size <= EXACT_ROWS else round(EXACT_ROWS * STEP ** round(math.log(size / EXACT_ROWS, STEP)))
    )


def _guess(arm: Arm) -> float:
    """Tokens a round before anything is known: hopeful, so that it is tried."""
    return 1.0 if arm == PLAIN else 2.0 if arm == CHAIN else 2.0 + 0.02 * arm.tree_budget


def _ranks(nodes: Sequence[Node]) -> list[int]:
    """Place of each node among the likeliest, root left out (0); parents come before their children."""
    order = sorted(range(1, len(nodes)), key=lambda at: (-nodes[at][3], nodes[at][2], at))
    ranks = [0] * len(nodes)
    for place, at in enumerate(order, start=1):
        ranks[at] = place
    return ranks


def _length(path: Sequence[int], ranks: Sequence[int], budget: int) -> int:
    """Tokens of a round whose tree had only the `budget` likeliest nodes, bonus token included."""
    count = 1
    for at in path[1:]:
        if ranks[at] > budget:
            break
        count += 1
    return count


def _chain_length(outcome: Outcome) -> int:
    """Tokens of a round with the chain: as far as the path takes the likeliest node of each depth."""
    best: dict[int, tuple[float, int]] = {}
    for at, (_, _, depth, log_prob) in enumerate(outcome.nodes):
        if depth not in best or log_prob > best[depth][0]:
            best[depth] = (log_prob, at)
    count = 1
    for depth, at in enumerate(outcome.path[1:], start=1):
        if best[depth][1] != at:
            break
        count += 1
    return count


def _between(known: Mapping[int, float], at: int) -> float:
    """Piecewise-linear value; beyond the known ends as steep as the nearest stretch, never falling with `at`.

    From one known value half is expected to be the same for all and half to grow with `at`.
    """
    if not known:
        return 0.0
    if at in known:
        return known[at]
    places = sorted(known)
    if len(places) == 1:
        only = places[0]
        return known[only] * (HOPE + (1 - HOPE) * at / only)
    right = next((place for place, each in enumerate(places) if each > at), len(places) - 1)
    low, high = (places[max(right, 1) - 1], places[max(right, 1)])
    slope = (known[high] - known[low]) / (high - low)
    if at < low:
        return max(known[low] - max(0.0, slope) * (low - at), HOPE * known[low])
    if at > high:
        return known[high] + max(0.0, slope) * (at - high)
    return known[low] + slope * (at - low)
