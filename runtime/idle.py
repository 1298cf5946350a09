"""When plain and chain decoding are measured anew: in idle moments, seldom, and not at all where that is not wanted."""

from __future__ import annotations

import math
from dataclasses import dataclass

QUIET_S = 10.0
"""An engine without work for so long is idle: its host may be measured."""
SHARE = 0.02
"""Most of the time that measuring may take."""


@dataclass
class IdleClock:
    """Moments in seconds of a monotonic clock."""

    due_at: float | None = None
    """When the next measurement is due; None: there was none yet, and it is not waited for."""
    worked_at: float = -math.inf
    """When the engine last worked for somebody."""

    def rest_s(self, now: float, interval: float, engaged: bool) -> float:
        """Seconds until measuring may begin; 0 or less: now. `interval` 0: never but for the first time.

        `engaged`: somebody wants the engine for longer than its requests tell.
        """
        if self.due_at is None:
            return 0.0
        if not interval:
            return math.inf
        return max(self.due_at, self.worked_at + QUIET_S, now + QUIET_S if engaged else now) - now

    def measured(self, now: float, took_s: float, interval: float) -> None:
        """A measurement is made; what is slow to measure is measured less often."""
        self.due_at = now + max(interval, took_s / SHARE)

    def gave_way(self, now: float) -> None:
        """A measurement was broken off for somebody."""
        self.worked_at = now

    def failed(self) -> None:
        """This engine cannot be measured so; it is not tried again."""
        self.due_at = math.inf
