"""How busy the host was over the last minutes: its GPUs, or its CPU where it has none."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from console.figures import KEEP_S
from runtime.interface import HostSample


@dataclass(frozen=True, slots=True)
class Busy:
    """A percentage for every second up to the present; None where it is not known."""

    words: str = "CPU %"
    series: tuple[float | None, ...] = ()


class HostWindow:
    """Keeps the mean utilisation of every second of the last KEEP_S."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, float, int]] = deque(maxlen=KEEP_S)
        """Unix second, sum, number of samples."""
        self._words = "CPU %"

    def add(self, sample: HostSample) -> None:
        loads = [gpu.utilisation for gpu in sample.gpus if gpu.utilisation is not None]
        words = "GPU util %" if loads else "CPU %"
        if len(loads) > 1:
            words += f", mean of {len(loads)}"
        value = sum(loads) / len(loads) if loads else sample.cpu
        if words.split()[0] != self._words.split()[0]:
            self._seconds.clear()
        self._words = words
        if value is None:
            return
        at, total, count = int(sample.time_s), value, 1
        if self._seconds and self._seconds[-1][0] >= at:
            at, before, number = self._seconds.pop()
            total, count = before + value, number + 1
        self._seconds.append((at, total, count))

    def busy(self, now_s: float) -> Busy:
        first = int(now_s) - KEEP_S + 1
        series: list[float | None] = [None] * KEEP_S
        for at, total, count in self._seconds:
            if 0 <= at - first < KEEP_S:
                series[at - first] = 100 * total / count
        return Busy(self._words, tuple(series))
