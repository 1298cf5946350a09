"""Output tokens per second of the work at hand, from decode rounds."""

from __future__ import annotations

from collections import deque

from runtime.interface import RoundStats

WINDOW_S = 10.0
IDLE_S = 1.0
"""A gap between rounds that counts as idleness and is no part of any rate."""


class Throughput:
    """Counts tokens, not rounds, over the last seconds of uninterrupted decoding."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, int]] = deque()

    def add(self, stats: RoundStats) -> None:
        if self._rounds and stats.time_s - self._rounds[-1][0] > IDLE_S:
            self._rounds.clear()
        self._rounds.append((stats.time_s, stats.emitted))
        while stats.time_s - self._rounds[0][0] > WINDOW_S:
            self._rounds.popleft()

    def tok_s(self, now_s: float) -> float | None:
        """Tokens per second; None when idle or before there are two rounds. `now_s` is Unix time."""
        if len(self._rounds) < 2 or now_s - self._rounds[-1][0] > IDLE_S:
            return None
        # The first round's tokens came before the window began.
        tokens = sum(emitted for _, emitted in self._rounds) - self._rounds[0][1]
        return tokens / max(self._rounds[-1][0] - self._rounds[0][0], 1e-9)
