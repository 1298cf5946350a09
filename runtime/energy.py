"""Energy that the GPUs of this host took, from NVML's counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.nvml_probe import import_nvml


class EnergyMeter:
    """Counts from its making on. Where there is no counter (no GPU, or one older than Volta) there is no figure."""

    def __init__(self, nvml: Callable[[], Any] = import_nvml) -> None:
        self._handles: list[Any] = []
        try:
            self._nvml = nvml()
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        except Exception:
            self._nvml = None
        self._start = self._read()

    def joules(self) -> float | None:
        """All GPUs since the start; None: not known."""
        now = self._read()
        return None if now is None or self._start is None else now - self._start

    def _read(self) -> float | None:
        if not self._handles:
            return None
        try:
            # Millijoules since the driver was loaded.
            return float(sum(map(self._nvml.nvmlDeviceGetTotalEnergyConsumption, self._handles)) / 1e3)
        except Exception:
            return None
