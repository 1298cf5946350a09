"""Auto mode in the engine: asks `runtime.auto` what the next round plays, and tells it what came of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from runtime.auto import CHAIN, PLAIN, Auto, Observed, Outcome
from runtime.config import RuntimeConfig
from runtime.loader import Loaded
from runtime.race import Arm
from runtime.round import RoundResult
from runtime.sequence import Speculation

BUDGETS = (4, 7, 11, 15, 23, 31, 63)
"""Trees of 5 to 64 rows, root included: matrix libraries work in blocks of 8 or 16 rows."""
LEARNT_FROM = 4
"""Sequences of a round whose trees are looked at: reading a tree costs the host time that the round waits for."""
EVERY = 8
"""Of the rounds of a GPU, which take less than a millisecond and wait for a host that takes longer, one of so many is
learnt from, and those that try another setting."""
CHANGE_ROUNDS = 1.0
"""What a change costs a GPU: the round in flight is waited for, and the state is written anew before the next one."""
logger = logging.getLogger("ddtree")


class AutoPlay:
    """The choice of one engine, for all sequences that follow its configured mode while that is auto."""

    def __init__(self, loaded: Loaded) -> None:
        most = loaded.limits.max_tree_budget
        self._drafts = loaded.no_drafter_reason is None
        horizon = loaded.models.draft_horizon if self._drafts else 0
        self._graphs = loaded.graphs
        budgets = [each for each in (self._graphs.budgets if self._graphs else BUDGETS) if each <= most]
        change = CHANGE_ROUNDS if self._graphs else 0.0
        self._auto = Auto(budgets, horizon, _accepts(loaded, budgets), change)
        self._arm: Arm = self._auto.arm
        self._round = 0
        self._every = EVERY if self._graphs else 1

    @property
    def told(self) -> str:
        """What is played and why, in one line."""
        return f"{self._auto.arm}; {self._auto.reason}"

    def follows(self, mode: str | None, config: RuntimeConfig) -> bool:
        """Whether a request that asks for `mode` leaves it to auto mode."""
        return mode is None and config.mode == "auto" and self._drafts

    def speculation(self) -> Speculation:
        if self._arm == PLAIN:
            return Speculation(reason="auto mode expects plain decoding to be faster here")
        mode, budget = self._arm
        return Speculation(mode, self._auto.horizon if mode == "chain" else budget)

    def choose(self, following: int) -> None:
        """Settles the next round, in which `following` sequences follow auto."""
        if following == 0:
            return
        before = self._auto.arm
        self._arm = self._auto.choose(self._size(following))
        if self._auto.arm != before:
            logger.info("auto: %s", self._auto.reason)

    def learn(self, result: RoundResult, played: Seq[Speculation]) -> None:
        """Takes in a round in which every sequence followed auto; a mixed one tells nothing clear.

        `played`: how each drafted, which is not what was chosen last where rounds are launched ahead.
        """
        arms = {Arm(how.mode, how.tree_budget if how.mode == "tree" else 0) for how in played}
        self._round += 1
        if len(arms) != 1:
            return
        arm = arms.pop()
        if self._round % self._every and arm == self._auto.arm:
            return
        draft, tree, verify, accept, commit = result.stage_s
        # In turn, so that over some rounds every sequence is looked at; the last rounds of a text draft less.
        batch = len(result.sequences)
        turned = [result.sequences[(at + self._round) % batch] for at in range(batch)]
        outcomes = [Outcome(each.nodes, each.path) for each in turned if len(each.nodes) > 1][:LEARNT_FROM]
        other_s = draft + tree + accept + commit
        rows = self._auto.rows(arm, self._size(batch)) if self._graphs else result.nodes
        self._auto.saw(Observed(arm, self._size(batch), rows, verify, other_s, outcomes))

    def _size(self, batch: int) -> int:
        """Sequences that a round of `batch` computes: captured rounds have room for more than may be there."""
        return self._graphs.size_for(batch) if self._graphs else batch


def _accepts(loaded: Loaded, budgets: Seq[int]) -> Mapping[Arm, float]:
    """Tokens a round by budget as measured with the drafter, where it brings such figures."""
    from runtime.calibrate import interpolate, measured_accept_lengths

    points = measured_accept_lengths(loaded)
    if not points:
        return {}
    trees = {Arm("tree", budget): interpolate(points, budget) for budget in budgets}
    # A chain is accepted about as far as the smallest tree, whose likeliest path it is.
    return trees | {CHAIN: min(trees.values())}
