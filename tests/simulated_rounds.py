"""Decode rounds without a model: drafts of a given quality, best-first trees, and a cost by rows and batch."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.auto import Auto, Observed, Outcome
from runtime.race import Arm

HORIZON = 7
RANKS = (0.0, 0.45, 0.25)
"""Share of what the likeliest token leaves that the second and third have."""


@dataclass(frozen=True)
class Costs:
    """Seconds of a round."""

    base: float
    row: float
    free_rows: int
    """Rows that cost no more than one."""
    draft: float
    draft_row: float
    change: float = 0.0
    """Seconds that another setting than in the round before costs by itself."""
    every: int = 1
    """One of so many rounds is learnt from, and those that try another setting."""

    def verify(self, rows: int) -> float:
        return self.base + self.row * max(0, rows - self.free_rows)

    def other(self, batch: int, drafted: bool) -> float:
        return self.draft + self.draft_row * batch if drafted else 0.0005


@dataclass(frozen=True)
class Phase:
    """So many tokens at so many sequences, of text that is so easy to draft (0 to 1)."""

    tokens: int
    batch: int
    quality: float


def outcome(draws: random.Random, quality: float, arm: Arm) -> Outcome:
    """One sequence of one round."""
    shares = []
    for _ in range(HORIZON):
        top = min(0.98, max(0.02, draws.gauss(quality, 0.12)))
        shares.append([top, *(share * (1 - top) for share in RANKS[1:])])
    nodes: list[tuple[int, int, int, float]] = [(0, 0, 0, 0.0)]
    right: list[int] = []
    for share in shares:
        draw, rank = draws.random(), 0
        while rank < len(share) and draw >= share[rank]:
            draw -= share[rank]
            rank += 1
        right.append(rank)
    if arm.mode == "chain":
        total = 0.0
        for depth in range(1, HORIZON + 1):
            total += math.log(shares[depth - 1][0])
            nodes.append((0, depth - 1, depth, total))
    elif arm.mode == "tree":
        heap = [(-math.log(share), 0, 1, rank) for rank, share in enumerate(shares[0])]
        heapq.heapify(heap)
        while heap and len(nodes) <= arm.tree_budget:
            cost, parent, depth, rank = heapq.heappop(heap)
            nodes.append((rank, parent, depth, -cost))
            if depth < HORIZON:
                for following, share in enumerate(shares[depth]):
                    heapq.heappush(heap, (cost - math.log(share), len(nodes) - 1, depth + 1, following))
    path = [0]
    for depth in range(1, HORIZON + 1):
        child = next(
            (
                at
                for at, node in enumerate(nodes)
                if at and node[1] == path[-1] and node[0] == right[depth - 1]
            ),
            None,
        )
        if child is None:
            break
        path.append(child)
    return Outcome(nodes, path)


def seconds(trace: Sequence[Phase], costs: Costs, how: Auto | Arm, seed: int) -> float:
    """Time a trace takes with auto or with one setting; the drafts are the same for the same seed."""
    draws, noise = random.Random(seed), random.Random(seed + 1)
    total, before, played = 0.0, None, 0
    for phase in trace:
        left = phase.tokens
        while left > 0:
            arm = how if isinstance(how, Arm) else how.choose(phase.batch)
            outcomes = [outcome(draws, phase.quality, arm) for _ in range(phase.batch)]
            rows = sum(len(each.nodes) for each in outcomes)
            verify = costs.verify(rows) * math.exp(noise.gauss(0, 0.05))
            other = costs.other(phase.batch, arm.mode != "off") * math.exp(noise.gauss(0, 0.05))
            total += verify + other + (costs.change if arm != before else 0.0)
            before, played = arm, played + 1
            left -= sum(len(each.path) for each in outcomes)
            if isinstance(how, Auto) and (arm != how.arm or played % costs.every == 0):
                how.saw(Observed(arm, phase.batch, rows, verify, other, outcomes))
    return total
