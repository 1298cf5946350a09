"""NVIDIA GPUs through NVML: every value with its age, every call with a deadline.

One thread makes the calls, pass by pass. Whoever asks waits a moment for the pass and otherwise takes what is known;
a call that does not come back costs its GPU alone: the thread is left behind in it, and another one goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from runtime.nvml_probe import attempt, import_nvml, text
from runtime.nvml_readings import INSTANCE_READINGS, READINGS, Reading
from runtime.rejection import words_of
from runtime.samples import GpuSample

RETRY_S = 30.0
"""Seconds until NVML is started again after it could not be used, or a GPU was lost."""
SLOW_S = 0.1
REST_FACTOR = 50
"""A reading that takes longer than SLOW_S rests for this many times as long: it may take 2 % of the time."""
UNSUPPORTED_S = 60.0
"""Seconds until a reading that is not supported is tried again."""
DEADLINE_S = 1.0
"""A call that takes longer has hung."""
LIST_DEADLINE_S = 10.0
WAIT_S = 0.25
"""Longest wait for a pass; after it the values known so far are given."""

logger = logging.getLogger("ddtree.telemetry")


@dataclass(slots=True)
class Device:
    """One GPU or MIG instance: who it is, what was read when, and what is to be read when."""

    index: int
    handle: Any
    name: str
    uuid: str | None = None
    bus_id: str | None = None
    instance: int | None = None
    lost: bool = False
    last_good_s: float | None = None
    """Unix time of the last reading."""
    hung: str | None = None
    """The call that has not come back, and since when."""
    slow: dict[str, float] = field(default_factory=dict)
    """Readings that rest for being slow, and how long they took."""
    values: dict[str, tuple[Any, float]] = field(default_factory=dict)
    """Field of GpuSample to value and clock time."""
    due: dict[str, float] = field(default_factory=dict)
    """Reading to the clock time before which it is not made."""
    counters: dict[str, tuple[int, float]] = field(default_factory=dict)
    """For readings that are differences: the counter and the clock time before."""

    @property
    def words(self) -> str:
        return f"GPU {self.index}" + ("" if self.instance is None else f" MIG {self.instance}")


@dataclass(slots=True)
class _Pass:
    """Calls to make in order by one thread, and which one it is in."""

    calls: Iterator[tuple[str, Device | None, Callable[[], None], float]]
    """Name, device, call, deadline in seconds."""
    done: threading.Event = field(default_factory=threading.Event)
    at: tuple[str, Device | None, float, float] | None = None
    """Name, device, when it began, deadline; None between calls."""
    left: bool = False
    """True: the call hung, and what it brings comes late."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        for name, device, call, deadline_s in self.calls:
            if device is not None and device.hung:
                continue
            with self.lock:
                self.at = (name, device, time.monotonic(), deadline_s)
            call()
            with self.lock:
                self.at = None
                if self.left:
                    if device is not None:
                        device.hung = None
                    return
        self.done.set()

    def leave(self) -> tuple[str, Device | None] | None:
        """Gives up waiting for the call at hand and says which, if it is over its deadline; else None."""
        with self.lock:
            if self.at is None or time.monotonic() < self.at[2] + self.at[3]:
                return None
            self.left = True
            name, device, _, _ = self.at
            if device is not None:
                device.hung = f"{name} not answered since {time.strftime('%H:%M:%S')}"
            return name, device


class Gpus:
    """The NVIDIA GPUs of the host, found again after a driver came back. For use by one thread."""

    def __init__(
        self,
        nvml: Callable[[], Any] = import_nvml,
        clock: Callable[[], float] = time.monotonic,
        own_pids: Callable[[], frozenset[int]] = frozenset,
    ) -> None:
        """`own_pids`: the processes that count as the runtime's own."""
        self._import_nvml = nvml
        self._clock = clock
        self._own_pids = own_pids
        self._nvml: Any = None
        self._devices: list[Device] = []
        self._note: str | None = None
        self._retry_at = float("-inf")
        self._pass: _Pass | None = None
        self._hung: list[_Pass] = []

    def sample(self) -> tuple[tuple[GpuSample, ...], str | None]:
        """One sample a device, and why there is none or why they may be out of date; within WAIT_S or little more."""
        end = time.monotonic() + WAIT_S
        self._hung = [each for each in self._hung if each.at is not None]
        while self._nvml is not None or self._pass is not None or self._clock() >= self._retry_at:
            if self._pass is None:
                self._pass = self._start()
            if self._pass.done.wait(max(0.0, min(self._patience(self._pass), end - time.monotonic()))):
                self._pass = None
                break
            if self._given_up(self._pass):
                self._pass = None
            if time.monotonic() >= end:
                break
        return tuple(self._sample(device) for device in tuple(self._devices)), self._note

    def _start(self) -> _Pass:
        begun = _Pass(self._calls())
        threading.Thread(target=begun.run, name="ddtree-nvml", daemon=True).start()
        return begun

    @staticmethod
    def _patience(running: _Pass) -> float:
        """Seconds left to the call at hand; a moment between calls."""
        at = running.at
        return SLOW_S if at is None else at[2] + at[3] - time.monotonic()

    def _given_up(self, running: _Pass) -> bool:
        """True where the call at hand has hung: the next pass goes on without it."""
        left = running.leave()
        if left is None:
            return False
        name, device = left
        self._hung.append(running)
        if device is None:
            self._say(f"the NVIDIA driver does not answer since {time.strftime('%H:%M:%S')} ({name})")
        else:
            logger.warning("%s: the driver does not answer: %s", device.words, name)
        return True

    def _calls(self) -> Iterator[tuple[str, Device | None, Callable[[], None], float]]:
        """The calls of one pass; runs in the pass's thread, between the calls."""
        now = self._clock()
        lost = any(device.lost for device in self._devices)
        # Starting NVML again ends it first, which a call that hangs in it would not survive.
        if (self._nvml is None or lost) and now >= self._retry_at and not self._hung:
            self._retry_at = now + RETRY_S
            yield "listing the GPUs", None, self._find, LIST_DEADLINE_S
        if self._nvml is None:
            return
        for device in self._devices:
            for reading in READINGS if device.instance is None else INSTANCE_READINGS:
                if device.lost:
                    break
                if device.due.get(reading.name, float("-inf")) <= self._clock():
                    yield reading.name, device, lambda d=device, r=reading: self._read(d, r), DEADLINE_S  # type: ignore[misc]

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
            self._say(f"GPUs cannot be listed: {words_of(error)}")
            return
        self._devices = found
        self._say(None if found else "no NVIDIA GPU on this host")

    def _list(self, nvml: Any) -> list[Device]:
        known = {device.index: device for device in self._devices if device.instance is None}
        devices: list[Device] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                device = Device(index, handle, text(nvml.nvmlDeviceGetName(handle)), _uuid(nvml, handle))
                device.bus_id = attempt(lambda h=handle: text(nvml.nvmlDeviceGetPciInfo(h).busId))  # type: ignore[misc]
            except Exception as error:
                device = known.get(index) or Device(index, None, f"GPU: {words_of(error)}")
                device.lost = True
            devices.append(device)
            if not device.lost:
                devices.extend(self._instances(nvml, index, device.handle))
        return devices

    def _instances(self, nvml: Any, index: int, handle: Any) -> list[Device]:
        """The MIG instances of a GPU, if it is divided."""
        mode = attempt(lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
        if not mode:
            return []
        instances: list[Device] = []
        for number in range(attempt(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0):
            try:
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                name = f"MIG {number} {text(nvml.nvmlDeviceGetName(part))}"
            except Exception:  # no instance has this number, or it does not answer: the others are shown
                continue
            instances.append(Device(index, part, name, _uuid(nvml, part), instance=number))
        return instances

    def _read(self, device: Device, reading: Reading) -> None:
        """One reading: keeps what it brings; notes a lost GPU; says when it is to be made again."""
        began = self._clock()
        try:
            found = reading.read(self._nvml, device.handle, self._own_pids)
        except Exception as error:
            for name in reading.fields:
                device.values.pop(name, None)
            if _is(self._nvml, error, "GPU_IS_LOST", "RESET_REQUIRED", "UNINITIALIZED"):
                device.lost = True
                logger.warning("%s (%s) is lost: %s", device.words, device.name, words_of(error))
            elif _is(self._nvml, error, "NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "NO_PERMISSION"):
                device.due[reading.name] = began + UNSUPPORTED_S
            return
        now = self._clock()
        device.last_good_s = time.time()
        for name, value in zip(reading.fields, found, strict=True):
            if reading.counts and value is not None:
                before, device.counters[name] = device.counters.get(name), (value, now)
                value = None
                if before is not None and now > before[1] and device.counters[name][0] >= before[0]:
                    value = (device.counters[name][0] - before[0]) / (now - before[1])
            if value is None:
                device.values.pop(name, None)
            else:
                device.values[name] = (value, now)
        self._schedule(device, reading, began, now - began)

    def _schedule(self, device: Device, reading: Reading, began: float, took: float) -> None:
        if took > SLOW_S:
            rest = took * REST_FACTOR
            device.due[reading.name] = began + took + rest
            device.slow[reading.name] = took
            logger.warning(
                "%s: reading %s took %.1f s and rests for %.0f s", device.words, reading.name, took, rest
            )
            return
        device.slow.pop(reading.name, None)
        if reading.period_s:
            first = reading.name not in device.due
            # The GPUs take turns, so that no pass has all the longer calls in it.
            device.due[reading.name] = began + reading.period_s * (1 + (device.index % 8 / 8 if first else 0))

    def _sample(self, device: Device) -> GpuSample:
        who = {"index": device.index, "instance": device.instance, "name": device.name}
        who |= {"uuid": device.uuid, "bus_id": device.bus_id}
        if device.lost or self._nvml is None:
            state = "lost"
            if device.last_good_s is not None:
                state += f", last reading {time.strftime('%H:%M:%S', time.localtime(device.last_good_s))}"
            return GpuSample(**who, state=state)
        now = self._clock()
        values = dict(device.values)
        slow = ", ".join(f"{name} is slow to read ({took:.1f} s)" for name, took in dict(device.slow).items())
        return GpuSample(
            **who,
            **{name: value for name, (value, _) in values.items()},
            ages={name: max(0.0, now - at) for name, (_, at) in values.items()},
            state=device.hung or slow or "ok",
        )

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
    return known.get(name, f"no GPU rows: {words_of(error)}")


def _is(nvml: Any, error: Exception, *names: str) -> bool:
    """Whether `error` is one of the NVML errors with these names."""
    code = getattr(error, "value", None)
    return code is not None and code in {getattr(nvml, f"NVML_ERROR_{name}", object()) for name in names}


def _uuid(nvml: Any, handle: Any) -> str | None:
    return attempt(lambda: text(nvml.nvmlDeviceGetUUID(handle)))
