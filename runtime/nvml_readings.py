"""What is read of one GPU, how often, and how NVML's answer becomes a value.

Sources: NVML API reference, "Device Queries", "Field Value Queries" and "Clocks Event Reasons". Where a counter and a
rate exist for the same thing, the cheaper one that cannot wrap within a second is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runtime.nvml_probe import throttle_words
from runtime.samples import GpuProcess

ALL_LINKS = 0xFFFFFFFF
"""Scope of a field value: the sum over all NVLink links."""
KIB = 1024
OwnPids = Callable[[], frozenset[int]]


@dataclass(frozen=True, slots=True)
class Reading:
    """One call, or a pair of them, for one or two fields of a GpuSample."""

    name: str
    fields: tuple[str, ...]
    read: Callable[[Any, Any, OwnPids], tuple[Any, ...]]
    """(NVML, handle, own pids) to one value a field; None where the device says it has none."""
    period_s: float = 0.0
    """Least time between two of it; 0: in every pass."""
    counts: bool = False
    """The values count up; their rate per second is what is shown."""


def _memory(nvml: Any, handle: Any, _: OwnPids) -> tuple[int | None, int | None]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    if memory.total <= 0:  # GPUs that share the host's memory
        return None, None
    return int(memory.used), int(memory.total)


def _throttle(nvml: Any, handle: Any, _: OwnPids) -> tuple[tuple[str, ...]]:
    try:
        reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except Exception as error:
        if getattr(error, "value", None) != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)  # its name before driver 535
    return (throttle_words(int(reasons)),)


def _pcie(nvml: Any, handle: Any, _: OwnPids) -> tuple[float, float]:
    # The driver counts for 20 ms in each of these calls; its byte counters are of 32 bits and wrap in 0.1 s.
    received = nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES)
    sent = nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES)
    return received * float(KIB), sent * float(KIB)


def _nvlink(nvml: Any, handle: Any, _: OwnPids) -> tuple[int | None, int | None]:
    received, sent = nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX
    answers = nvml.nvmlDeviceGetFieldValues(handle, [(received, ALL_LINKS), (sent, ALL_LINKS)])
    for answer in answers:
        if answer.nvmlReturn != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(answer.nvmlReturn)
    return int(answers[0].value.ullVal) * KIB, int(answers[1].value.ullVal) * KIB


def _processes(nvml: Any, handle: Any, own_pids: OwnPids) -> tuple[tuple[GpuProcess, ...]]:
    own = own_pids()
    found = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return (
        tuple(
            GpuProcess(
                pid=each.pid,
                memory_used=None if each.usedGpuMemory is None else int(each.usedGpuMemory),
                ours=each.pid in own,
            )
            for each in found
        ),
    )


_MEMORY = Reading("memory", ("memory_used", "memory_total"), _memory)
_PROCESSES = Reading("processes", ("processes",), _processes, period_s=5.0)

READINGS = (
    _MEMORY,
    Reading(
        "utilisation",
        ("utilisation",),
        lambda nvml, handle, _: (nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0,),
    ),
    Reading(
        "power",
        ("power_w",),
        lambda nvml, handle, _: (nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0,),
    ),
    Reading(
        "power limit",
        ("power_limit_w",),
        lambda nvml, handle, _: (nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000.0,),
        period_s=10.0,
    ),
    Reading(
        "temperature",
        ("temperature_c",),
        lambda nvml, handle, _: (float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),),
    ),
    Reading(
        "SM clock",
        ("sm_clock_mhz",),
        lambda nvml, handle, _: (int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),),
    ),
    Reading(
        "memory clock",
        ("memory_clock_mhz",),
        lambda nvml, handle, _: (int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),),
    ),
    Reading("throttle reasons", ("throttle",), _throttle, period_s=1.0),
    Reading("NVLink traffic", ("nvlink_rx_b_s", "nvlink_tx_b_s"), _nvlink, period_s=1.0, counts=True),
    Reading("PCIe traffic", ("pcie_rx_b_s", "pcie_tx_b_s"), _pcie, period_s=5.0),
    _PROCESSES,
)
INSTANCE_READINGS = (_MEMORY, _PROCESSES)
