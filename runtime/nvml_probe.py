"""What the NVIDIA driver says of its GPUs, printed as JSON by a process of its own, which may hang without harm.

Run as a script by `runtime.host_probe`; needs nothing but the standard library and nvidia-ml-py. It starts no CUDA
context: NVML talks to the driver alone. How NVML is imported, asked and read stands here for all who ask it.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

Value = TypeVar("Value")
THROTTLE_WORDS = (
    (0x0004, "power cap"),
    (0x0008, "hardware slowdown"),
    (0x0020, "too hot (driver)"),
    (0x0040, "too hot (hardware)"),
    (0x0080, "power brake"),
    (0x0002, "clocks set by hand"),
    (0x0010, "sync boost"),
    (0x0100, "display clocks"),
    (0x0200, "board limit"),
    (0x0400, "reliability limit"),
    (0x0001, "idle"),
)
"""nvmlClocksEventReason bits in the order in which they matter."""
TROUBLE = 0x0004 | 0x0008 | 0x0020 | 0x0040 | 0x0080
"""Those that mean trouble."""


def main() -> None:
    print(json.dumps(probe()))


def probe() -> dict[str, Any]:
    """Driver and GPUs as `runtime.host_probe.Driver` has them; `error` names the NVML error where there is one."""
    try:
        nvml = import_nvml()
    except ImportError:
        return {"error": "nvidia-ml-py is not installed"}
    try:
        nvml.nvmlInit()
    except Exception as error:
        return {"error": type(error).__name__.removeprefix("NVMLError_"), "error_text": str(error)}
    handles = [nvml.nvmlDeviceGetHandleByIndex(at) for at in range(nvml.nvmlDeviceGetCount())]
    return {
        "version": attempt(lambda: text(nvml.nvmlSystemGetDriverVersion())),
        "cuda": attempt(lambda: cuda_version(nvml.nvmlSystemGetCudaDriverVersion())),
        "gpus": [_gpu(nvml, at, handle) for at, handle in enumerate(handles)],
        "blocked_peers": _blocked_peers(nvml, handles),
    }


def import_nvml() -> Any:
    """The NVML binding of the package nvidia-ml-py; importing it needs no driver."""
    with warnings.catch_warnings():
        # A deprecated package of the same import name warns here, which must not reach the screen.
        warnings.simplefilter("ignore")
        return importlib.import_module("pynvml")


def attempt(read: Callable[[], Value]) -> Value | None:
    """What `read` gives; None where driver, device or system does not tell."""
    try:
        return read()
    except Exception:  # a value is unknown whatever hinders its reading: each library has errors of its own
        return None


def text(value: str | bytes) -> str:
    """A string of NVML, which older bindings give as bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def throttle_words(reasons: int) -> tuple[str, ...]:
    """The set bits in words; none set: nothing holds the clocks down."""
    known = tuple(words for bit, words in THROTTLE_WORDS if reasons & bit)
    rest = reasons & ~sum(bit for bit, _ in THROTTLE_WORDS)
    return (*known, f"reason {rest:#x}") if rest else known


def cuda_version(number: int) -> str:
    """13000 as "13.0"."""
    return f"{number // 1000}.{number % 1000 // 10}"


class EnergyMeter:
    """Energy that the GPUs of this host take from its making on, by NVML's counters.

    Where there is no counter (no GPU, or one older than Volta) there is no figure.
    """

    def __init__(self, nvml: Callable[[], Any] = import_nvml) -> None:
        self._handles: list[Any] = []
        try:
            self._nvml = nvml()
        except ImportError:
            self._nvml = None
        else:
            self._handles = attempt(self._found) or []
        self._start = self._read()

    def joules(self) -> float | None:
        """All GPUs since the start; None: not known."""
        now = self._read()
        return None if now is None or self._start is None else now - self._start

    def _found(self) -> list[Any]:
        self._nvml.nvmlInit()
        return [self._nvml.nvmlDeviceGetHandleByIndex(at) for at in range(self._nvml.nvmlDeviceGetCount())]

    def _read(self) -> float | None:
        """Joules since the driver was loaded."""
        if not self._handles:
            return None
        counter = self._nvml.nvmlDeviceGetTotalEnergyConsumption
        return attempt(lambda: float(sum(map(counter, self._handles)) / 1e3))


def _gpu(nvml: Any, index: int, handle: Any) -> dict[str, Any]:
    reasons = attempt(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
    return {
        "index": index,
        "name": attempt(lambda: text(nvml.nvmlDeviceGetName(handle))) or "unknown GPU",
        "uuid": attempt(lambda: text(nvml.nvmlDeviceGetUUID(handle))),
        "bus_id": attempt(lambda: text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        "compute_capability": attempt(
            lambda: ".".join(map(str, nvml.nvmlDeviceGetCudaComputeCapability(handle)))
        ),
        "memory_total": attempt(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total) or None),
        "mig": attempt(lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0])),
        "pcie_width": attempt(lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        "pcie_width_max": attempt(lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        "nvlinks": _nvlinks(nvml, handle),
        "throttle": throttle_words(reasons & TROUBLE),
    }


def _nvlinks(nvml: Any, handle: Any) -> int:
    """Active NVLink connections."""
    states = (
        attempt(lambda link=link: nvml.nvmlDeviceGetNvLinkState(handle, link))  # type: ignore[misc]
        for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18))
    )
    return sum(1 for state in states if state)


def _blocked_peers(nvml: Any, handles: list[Any]) -> list[tuple[int, int]]:
    """Pairs of GPUs that the driver says cannot read each other's memory."""
    blocked = []
    for first, one in enumerate(handles):
        for second in range(first + 1, len(handles)):
            other = handles[second]
            status = attempt(
                lambda one=one, other=other: nvml.nvmlDeviceGetP2PStatus(  # type: ignore[misc]
                    one, other, nvml.NVML_P2P_CAPS_INDEX_READ
                )
            )
            if status is not None and status != nvml.NVML_P2P_STATUS_OK:
                blocked.append((first, second))
    return blocked


if __name__ == "__main__":
    main()
