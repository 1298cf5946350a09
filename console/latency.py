"""Latency over the last finished requests: percentiles of what a client waits for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runtime.interface import RequestStats

KEEP = 200
"""Finished requests the percentiles cover at most."""
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles in seconds; `count` says of how many."""

    count: int
    values: tuple[float | None, ...] = (None,) * len(QUANTILES)


@dataclass(frozen=True, slots=True)
class Latency:
    """What the last `requests` finished requests took."""

    requests: int = 0
    ttft: Spread = Spread(0)
    tpot: Spread = Spread(0)
    """Time per output token after the first."""
    end_to_end: Spread = Spread(0)
    """Submission to the last token."""
    queue: Spread = Spread(0)


class RequestWindow:
    """The last KEEP finished requests. Cancelled and failed ones are left out: they were cut short."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], RequestStats] = {}
        """The latest last."""
        self.latency = Latency()
        """Of those that are kept."""

    def add(self, found: Iterable[RequestStats]) -> None:
        """Takes finished requests in the order of their ends; one that is known already is not counted twice."""
        ended = [stats for stats in found if stats.finish_reason in ("stop", "length")]
        missing = {key: stats for stats in ended if (key := _key(stats)) not in self._kept}
        if missing:
            self._kept = dict([*self._kept.items(), *missing.items()][-KEEP:])
            self.latency = _latency(tuple(self._kept.values()))


def _latency(kept: Sequence[RequestStats]) -> Latency:
    return Latency(
        requests=len(kept),
        ttft=spread([stats.ttft_s for stats in kept]),
        tpot=spread([_tpot(stats) for stats in kept]),
        end_to_end=spread([_end_to_end(stats) for stats in kept]),
        queue=spread([stats.queue_s for stats in kept]),
    )


def spread(values: Sequence[float | None]) -> Spread:
    """Percentiles by nearest rank: each is a value that occurred."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return Spread(0)
    ranks = (max(0, math.ceil(share * len(known)) - 1) for share in QUANTILES)
    return Spread(len(known), tuple(known[rank] for rank in ranks))


def _key(stats: RequestStats) -> tuple[object, ...]:
    return stats.request_id, stats.age_s, stats.ttft_s, stats.output_tokens


def _tpot(stats: RequestStats) -> float | None:
    return (
        None
        if stats.decode_s is None or stats.output_tokens < 2
        else stats.decode_s / (stats.output_tokens - 1)
    )


def _end_to_end(stats: RequestStats) -> float | None:
    return None if stats.ttft_s is None or stats.decode_s is None else stats.ttft_s + stats.decode_s
