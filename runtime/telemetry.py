"""Figures of the host and its NVIDIA GPUs, from psutil and NVML.

What the host, the driver or a device does not tell is None, never 0. `HostSampler.sample` never raises; it may
take as long as the driver takes, so it belongs in a thread of its own that samples about once a second.
"""

from __future__ import annotations

import importlib
import logging
import os
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from runtime.interface import GpuSample, HostSample

RETRY_S = 30.0
"""Seconds until NVML is tried again after it could not be used."""
SLOW_S = 0.1
"""A reading that takes longer is skipped for REST_S seconds."""
REST_S = 60.0

Value = TypeVar("Value")
logger = logging.getLogger(__name__)


def import_nvml() -> Any:
    """The NVML binding of the package nvidia-ml-py; importing it needs no driver."""
    with warnings.catch_warnings():
        # A deprecated package of the same import name warns here, which must not reach the screen.
        warnings.simplefilter("ignore")
        return importlib.import_module("pynvml")


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
        self._gpus = _Gpus(nvml, clock)
        self._import_psutil = psutil
        self._psutil: Any | None = None
        self._process: Any | None = None
        self._sampled = False

    def sample(self) -> HostSample:
        """The present figures; `cpu` is None in the first sample, for it needs the time between two."""
        first, self._sampled = not self._sampled, True
        if first:
            self._psutil = self._import_psutil()
        psutil = self._psutil
        cpu = cpu_count = memory = process = None
        if psutil is not None:
            cpu = _try(lambda: psutil.cpu_percent(None) / 100.0)
            cpu_count = _try(lambda: psutil.cpu_count())
            memory = _try(psutil.virtual_memory)
            if self._process is None:
                self._process = _try(psutil.Process)
            process = _try(lambda: self._process.memory_info().rss if self._process else None)
        gpus, note = self._gpus.sample()
        return HostSample(
            host=platform.node() or "localhost",
            time_s=time.time(),
            cpu=None if first else cpu,
            cpu_count=cpu_count or os.cpu_count(),
            memory_used=memory.total - memory.available if memory is not None else None,
            memory_total=memory.total if memory is not None else None,
            process_memory=process,
            load_1m=_try(lambda: os.getloadavg()[0]),
            gpus=gpus,
            gpu_note=note,
        )


def _try(read: Callable[[], Value]) -> Value | None:
    """What `read` returns; None if the system refuses."""
    try:
        return read()
    except Exception:
        return None


@dataclass(slots=True)
class _Device:
    """One GPU or MIG instance: who it is, when it last answered, which readings rest."""

    index: int
    handle: Any
    name: str
    uuid: str | None
    is_instance: bool = False
    last_good_s: float | None = None
    lost: bool = False
    resting: dict[str, float] = field(default_factory=dict)
    """Reading to the clock time at which it may be tried again."""


class _Gpus:
    """The NVIDIA GPUs of the host, found again after a driver came back."""

    def __init__(self, nvml: Callable[[], Any], clock: Callable[[], float]) -> None:
        self._import_nvml = nvml
        self._clock = clock
        self._nvml: Any = None
        self._devices: list[_Device] = []
        self._note: str | None = None
        self._retry_at = float("-inf")

    def sample(self) -> tuple[tuple[GpuSample, ...], str | None]:
        """One sample a device, and why there is none or why they may be out of date."""
        now = self._clock()
        if (self._nvml is None or any(device.lost for device in self._devices)) and now >= self._retry_at:
            self._retry_at = now + RETRY_S
            self._find()
        return tuple(self._read(device) for device in self._devices), self._note

    def _find(self) -> None:
        """Loads NVML if it is not loaded, and lists the devices; keeps the known ones if that fails."""
        try:
            nvml = self._nvml
            if nvml is None:
                nvml = self._import_nvml()
            else:
                nvml.nvmlShutdown()  # A driver that came back is seen by a fresh start only.
            nvml.nvmlInit()
        except Exception as error:
            self._say(_why_not(error))
            self._nvml = None
            return
        self._nvml = nvml
        try:
            found = self._list(nvml)
        except Exception as error:
            self._say(f"GPUs cannot be listed: {_text(error)}")
            return
        self._devices = found
        self._say(None if found else "no NVIDIA GPU on this host")

    def _list(self, nvml: Any) -> list[_Device]:
        known = {device.index: device for device in self._devices if not device.is_instance}
        devices: list[_Device] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                device = _Device(index, handle, _string(nvml.nvmlDeviceGetName(handle)), _uuid(nvml, handle))
            except Exception as error:
                device = known.get(index) or _Device(index, None, f"GPU: {_text(error)}", None)
                device.lost = True
            devices.append(device)
            if not device.lost:
                devices.extend(self._instances(nvml, index, device.handle))
        return devices

    def _instances(self, nvml: Any, index: int, handle: Any) -> list[_Device]:
        """The MIG instances of a GPU, if it is divided."""
        mode = _try(lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
        if not mode:
            return []
        instances: list[_Device] = []
        for number in range(_try(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0):
            try:
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                name = f"MIG {number} {_string(nvml.nvmlDeviceGetName(part))}"
            except Exception:
                continue
            instances.append(_Device(index, part, name, _uuid(nvml, part), is_instance=True))
        return instances

    def _read(self, device: _Device) -> GpuSample:
        nvml = self._nvml
        if nvml is None or device.lost:
            return self._lost_sample(device)
        slow: list[str] = []

        def read(name: str, call: Callable[[], Value]) -> Value | None:
            return self._reading(device, name, call, slow)

        handle = device.handle
        memory = read("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        used = total = None
        if memory is not None and memory.total > 0:
            used, total = int(memory.used), int(memory.total)
        utilisation = power = limit = temperature = None
        if not device.is_instance:
            utilisation = read("utilisation", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0)
            power = read("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0)
            limit = read("power limit", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000.0)
            temperature = read(
                "temperature",
                lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            )
        if device.lost:
            return self._lost_sample(device)
        return GpuSample(
            index=device.index,
            name=device.name,
            uuid=device.uuid,
            utilisation=utilisation,
            memory_used=used,
            memory_total=total,
            power_w=power,
            power_limit_w=limit,
            temperature_c=temperature,
            state=f"{', '.join(slow)} not read: the driver is slow" if slow else "ok",
        )

    def _reading(
        self, device: _Device, name: str, call: Callable[[], Value], slow: list[str]
    ) -> Value | None:
        """One reading, None where it is not supported; a slow one rests, a lost GPU is marked."""
        if device.lost:
            return None
        if device.resting.get(name, float("-inf")) > self._clock():
            slow.append(name)
            return None
        began = self._clock()
        try:
            value = call()
        except Exception as error:
            if _is(self._nvml, error, "GPU_IS_LOST", "RESET_REQUIRED", "UNINITIALIZED"):
                device.lost = True
                logger.warning("GPU %d (%s) is lost: %s", device.index, device.name, _text(error))
            return None
        device.last_good_s = time.time()
        if self._clock() - began > SLOW_S:
            device.resting[name] = self._clock() + REST_S
            logger.warning("GPU %d: reading %s is slow and rests for %d s", device.index, name, REST_S)
        return value

    def _lost_sample(self, device: _Device) -> GpuSample:
        state = "lost"
        if device.last_good_s is not None:
            state += f", last reading {time.strftime('%H:%M:%S', time.localtime(device.last_good_s))}"
        return GpuSample(index=device.index, name=device.name, uuid=device.uuid, state=state)

    def _say(self, note: str | None) -> None:
        if note is not None and note != self._note:
            logger.info("%s", note)
        self._note = note


def _why_not(error: Exception) -> str:
    """Why NVML cannot be used, and what to do, in one line."""
    if isinstance(error, ImportError):
        return "no GPU rows: the package nvidia-ml-py is not installed"
    name = type(error).__name__.removeprefix("NVMLError_")
    known = {
        "LibraryNotFound": "no GPU rows: no NVIDIA driver library (libnvidia-ml) on this host",
        "DriverNotLoaded": "no GPU rows: the NVIDIA driver is installed but not loaded",
        "LibRmVersionMismatch": (
            "no GPU rows: NVIDIA driver and library versions differ; reload the driver or reboot"
        ),
        "NoPermission": "no GPU rows: no permission to talk to the NVIDIA driver",
        "FunctionNotFound": "no GPU rows: the NVIDIA driver is too old for NVML",
    }
    return known.get(name, f"no GPU rows: {_text(error)}")


def _is(nvml: Any, error: Exception, *names: str) -> bool:
    """Whether `error` is one of the NVML errors with these names."""
    code = getattr(error, "value", None)
    return code is not None and code in {getattr(nvml, f"NVML_ERROR_{name}", object()) for name in names}


def _uuid(nvml: Any, handle: Any) -> str | None:
    return _try(lambda: _string(nvml.nvmlDeviceGetUUID(handle)))


def _string(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _text(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
