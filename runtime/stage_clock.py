"""Times the stages of a round: wall clock on a CPU, events on a GPU, so that timing never waits for the device."""

from __future__ import annotations

import time

import torch


class StageClock:
    """Laps since construction. `seconds` may be read once the round's last value has been read back."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._laps = [self._now()]

    def lap(self, _stage: str) -> None:
        """Ends the stage that ran since the last lap."""
        self._laps.append(self._now())

    def seconds(self) -> tuple[float, ...]:
        """Duration of each stage in order."""
        pairs = zip(self._laps, self._laps[1:], strict=False)
        if not self._cuda:
            return tuple(end - start for start, end in pairs)
        self._laps[-1].synchronize()
        return tuple(start.elapsed_time(end) / 1e3 for start, end in pairs)

    def _now(self):  # type: ignore[no-untyped-def]  # a float or a CUDA event, by device
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
