"""An NVML without a driver: the real binding's names, signatures, structures and errors, with figures of its own."""

from __future__ import annotations

import inspect
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pynvml

GIB = 1024**3


CALLS_KEPT = 10_000
"""Names of calls that are remembered: a server that is soaked with it makes them for hours."""


class FakeNvml:
    """Healthy GPUs at work; `broken` replaces functions by name. What is not faked is the binding's own."""

    def __init__(self, gpus: int = 2, **broken: Callable[..., Any]) -> None:
        self.gpus = gpus
        self.broken = broken
        self.calls: deque[str] = deque(maxlen=CALLS_KEPT)
        self.clock: Callable[[], float] = time.monotonic

    def __getattr__(self, name: str) -> Any:
        real = getattr(pynvml, name)  # an unknown name is an error, as with the binding
        if not name.startswith("nvml") or not inspect.isfunction(real):
            return real

        def call(*given: Any) -> Any:
            inspect.signature(real).bind(*given)
            self.calls.append(name)
            answer = self.broken.get(name) or getattr(FakeNvml, name.replace("nvml", "healthy", 1))
            return answer(*given) if name in self.broken else answer(self, *given)

        return call

    def healthyInit(self) -> None: ...

    def healthyShutdown(self) -> None: ...

    def healthyDeviceGetCount(self) -> int:
        return self.gpus

    def healthyDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def healthyDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def healthyDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def healthyDeviceGetPciInfo(self, handle: int) -> Any:
        return pynvml.nvmlPciInfo_t(busId=f"00000000:0{handle}:00.0".encode())

    def healthyDeviceGetMigMode(self, handle: int) -> list[int]:
        return [0, 0]

    def healthyDeviceGetMemoryInfo(self, handle: int) -> Any:
        return pynvml.c_nvmlMemory_t(total=140 * GIB, used=61 * GIB, free=79 * GIB)

    def healthyDeviceGetUtilizationRates(self, handle: int) -> Any:
        return pynvml.c_nvmlUtilization_t(gpu=93, memory=40)

    def healthyDeviceGetPowerUsage(self, handle: int) -> int:
        return 512_300

    def healthyDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return 700_000

    def healthyDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 54

    def healthyDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201}[kind]

    def healthyDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return pynvml.nvmlClocksEventReasonSwPowerCap

    def healthyDeviceGetPcieThroughput(self, handle: int, counter: int) -> int:
        """KiB per second, as the real one gives."""
        return {pynvml.NVML_PCIE_UTIL_RX_BYTES: 2048, pynvml.NVML_PCIE_UTIL_TX_BYTES: 1024}[counter]

    def healthyDeviceGetFieldValues(self, handle: int, asked: Sequence[tuple[int, int]]) -> Any:
        """NVLink payload counters in KiB: 1 GiB/s in, half of that out."""
        rates = {
            pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX: 1024 * 1024,
            pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX: 512 * 1024,
        }
        answers = (pynvml.c_nvmlFieldValue_t * len(asked))()
        for answer, (field, scope) in zip(answers, asked, strict=True):
            assert scope == 0xFFFFFFFF, "only the sum over all links is asked for"
            answer.value.ullVal = int(self.clock() * rates[field])
        return answers

    def healthyDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        raw = (
            pynvml.c_nvmlProcessInfo_v3_t(pid=os.getpid(), usedGpuMemory=60 * GIB),
            pynvml.c_nvmlProcessInfo_v3_t(pid=1, usedGpuMemory=GIB),
        )
        return [pynvml.nvmlStructToFriendlyObject(each) for each in raw]


def raising(code: int) -> Callable[..., Any]:
    """A function that fails as the binding does."""

    def function(*_: object) -> Any:
        raise pynvml.NVMLError(code)

    return function
