"""Figures of the host the runtime runs on, from psutil, with its GPUs from `runtime.nvml`.

What the host does not tell is None, never 0. `HostSampler.sample` never raises and never waits for a driver that hangs.
"""

from __future__ import annotations

import importlib
import os
import platform
import time
from collections.abc import Callable
from typing import Any

from runtime.nvml import Gpus
from runtime.nvml_probe import attempt, import_nvml
from runtime.samples import HostSample

OWN_PIDS_S = 5.0
"""Seconds for which the list of the runtime's own processes holds."""


def import_psutil() -> Any | None:
    """psutil, or None where it is not installed; the host's figures are then unknown."""
    try:
        return importlib.import_module("psutil")
    except ImportError:
        return None


class HostSampler:
    """Samples the host this process runs on. Not for use by two threads at once."""

    def __init__(
        self,
        *,
        nvml: Callable[[], Any] = import_nvml,
        psutil: Callable[[], Any | None] = import_psutil,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._gpus = Gpus(nvml, clock, self._own_pids)
        self._import_psutil = psutil
        self._psutil: Any | None = None
        self._process: Any | None = None
        self._sampled = False
        self._own: frozenset[int] = frozenset({os.getpid()})
        self._own_until = float("-inf")

    def sample(self) -> HostSample:
        """The present figures; `cpu` is None in the first sample, for it needs the time between two."""
        first, self._sampled = not self._sampled, True
        if first:
            self._psutil = self._import_psutil()
        psutil = self._psutil
        cpu = cpu_count = memory = process = None
        if psutil is not None:
            cpu = attempt(lambda: psutil.cpu_percent(None) / 100.0)
            cpu_count = attempt(lambda: psutil.cpu_count())
            memory = attempt(psutil.virtual_memory)
            if self._process is None:
                self._process = attempt(psutil.Process)
            process = attempt(lambda: self._process.memory_info().rss if self._process else None)
        gpus, note = self._gpus.sample()
        return HostSample(
            host=platform.node() or "localhost",
            time_s=time.time(),
            cpu=None if first else cpu,
            cpu_count=cpu_count or os.cpu_count(),
            memory_used=memory.total - memory.available if memory is not None else None,
            memory_total=memory.total if memory is not None else None,
            process_memory=process,
            load_1m=attempt(lambda: os.getloadavg()[0]),
            gpus=gpus,
            gpu_note=note,
        )

    def _own_pids(self) -> frozenset[int]:
        """This process and its children."""
        if self._clock() >= self._own_until:
            self._own_until = self._clock() + OWN_PIDS_S
            children = attempt(lambda: self._process.children(recursive=True) if self._process else []) or []
            self._own = frozenset({os.getpid(), *(child.pid for child in children)})
        return self._own
