"""Host and GPU figures against a fake NVML with the real binding's names, errors and shapes."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml
import pytest

from runtime.telemetry import HostSampler, import_nvml

GIB = 1024**3


class FakeNvml:
    """Two healthy GPUs; `broken` replaces functions. What is not faked is the binding's own."""

    def __init__(self, **broken: Callable[..., Any]) -> None:
        self.broken = broken
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in self.broken:
            self.calls.append(name)
            return self.broken[name]
        if name.startswith("nvml"):
            assert hasattr(pynvml, name), f"the binding has no {name}"
            return getattr(FakeNvml, f"healthy_{name}")
        return getattr(pynvml, name)

    healthy_nvmlInit = staticmethod(lambda: None)
    healthy_nvmlShutdown = staticmethod(lambda: None)
    healthy_nvmlDeviceGetCount = staticmethod(lambda: 2)
    healthy_nvmlDeviceGetHandleByIndex = staticmethod(lambda index: index)
    healthy_nvmlDeviceGetName = staticmethod(lambda handle: "NVIDIA H200")
    healthy_nvmlDeviceGetUUID = staticmethod(lambda handle: f"GPU-{handle}")
    healthy_nvmlDeviceGetMigMode = staticmethod(lambda handle: [0, 0])
    healthy_nvmlDeviceGetMemoryInfo = staticmethod(
        lambda handle: SimpleNamespace(total=140 * GIB, used=61 * GIB, free=79 * GIB)
    )
    healthy_nvmlDeviceGetUtilizationRates = staticmethod(lambda handle: SimpleNamespace(gpu=93, memory=40))
    healthy_nvmlDeviceGetPowerUsage = staticmethod(lambda handle: 512_300)
    healthy_nvmlDeviceGetEnforcedPowerLimit = staticmethod(lambda handle: 700_000)
    healthy_nvmlDeviceGetTemperature = staticmethod(lambda handle, sensor: 54)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def raising(code: int) -> Callable[..., Any]:
    def function(*_: object) -> Any:
        raise pynvml.NVMLError(code)

    return function


def sampler(nvml: object, clock: Clock | None = None) -> HostSampler:
    return HostSampler(nvml=lambda: nvml, clock=clock or Clock())


def test_healthy_gpus_give_every_field():
    gpu = sampler(FakeNvml()).sample().gpus[1]
    assert (gpu.index, gpu.name, gpu.uuid, gpu.state) == (1, "NVIDIA H200", "GPU-1", "ok")
    assert (gpu.utilisation, gpu.memory_used, gpu.memory_total) == (0.93, 61 * GIB, 140 * GIB)
    assert (gpu.power_w, gpu.power_limit_w, gpu.temperature_c) == (512.3, 700.0, 54.0)


def test_the_first_cpu_figure_is_unknown_for_it_needs_two_samples():
    host = HostSampler(nvml=lambda: FakeNvml())
    assert host.sample().cpu is None
    second = host.sample()
    assert second.cpu is None or 0.0 <= second.cpu <= 1.0
    assert second.memory_total is not None and 0 < (second.memory_used or 0) <= second.memory_total
    assert (second.process_memory or 0) > 2**20


def test_without_psutil_the_host_is_unknown_and_gpus_are_shown():
    sample = HostSampler(nvml=lambda: FakeNvml(), psutil=lambda: None).sample()
    assert (sample.cpu, sample.memory_used, sample.process_memory) == (None, None, None)
    assert len(sample.gpus) == 2


@pytest.mark.case("B1")
@pytest.mark.parametrize(
    ("function", "field"),
    [
        ("nvmlDeviceGetMemoryInfo", "memory_used"),
        ("nvmlDeviceGetUtilizationRates", "utilisation"),
        ("nvmlDeviceGetPowerUsage", "power_w"),
        ("nvmlDeviceGetEnforcedPowerLimit", "power_limit_w"),
        ("nvmlDeviceGetTemperature", "temperature_c"),
    ],
)
@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND])
def test_an_unsupported_reading_is_unknown_and_the_others_stay(function: str, field: str, code: int):
    gpu = sampler(FakeNvml(**{function: raising(code)})).sample().gpus[0]
    values = gpu.model_dump()
    assert values.pop(field) is None
    values.pop("memory_total")
    assert None not in values.values()
    assert gpu.state == "ok"


@pytest.mark.case("B1")
def test_a_memory_total_of_zero_is_unknown():
    unified = FakeNvml(nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=0, used=0, free=0))
    gpu = sampler(unified).sample().gpus[0]
    assert (gpu.memory_used, gpu.memory_total) == (None, None)


@pytest.mark.case("B1")
def test_mig_instances_have_rows_with_their_own_memory():
    def handle_of(device: int, number: int) -> str:
        if number > 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return f"mig-{number}"

    def memory(handle: object) -> SimpleNamespace:
        size = 10 if str(handle).startswith("mig") else 140
        return SimpleNamespace(total=size * GIB, used=GIB, free=(size - 1) * GIB)

    nvml = FakeNvml(
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetMigMode=lambda handle: [1, 1],
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=handle_of,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetUtilizationRates=raising(pynvml.NVML_ERROR_NOT_SUPPORTED),
    )
    whole, *instances = sampler(nvml).sample().gpus
    assert whole.utilisation is None
    assert [gpu.memory_total for gpu in instances] == [10 * GIB, 10 * GIB]
    assert all(gpu.utilisation is None and gpu.power_w is None for gpu in instances)
    assert [gpu.name[:5] for gpu in instances] == ["MIG 0", "MIG 1"]


@pytest.mark.case("B3")
def test_names_may_come_as_bytes():
    gpu = sampler(FakeNvml(nvmlDeviceGetName=lambda handle: b"NVIDIA \xff")).sample().gpus[0]
    assert gpu.name == "NVIDIA \ufffd"


@pytest.mark.case("B2")
def test_a_lost_gpu_is_called_lost_the_others_go_on_and_it_comes_back(caplog: pytest.LogCaptureFixture):
    clock, nvml = Clock(), FakeNvml()
    host = sampler(nvml, clock)
    assert [gpu.state for gpu in host.sample().gpus] == ["ok", "ok"]

    def lost(handle: int, *_: object) -> Any:
        if handle == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return 60

    nvml.broken.update(
        {
            name: lost
            for name in (
                "nvmlDeviceGetName",
                "nvmlDeviceGetMemoryInfo",
                "nvmlDeviceGetPowerUsage",
                "nvmlDeviceGetTemperature",
            )
        }
    )
    nvml.broken["nvmlDeviceGetMemoryInfo"] = lambda handle: (
        lost(handle) and SimpleNamespace(total=GIB, used=1, free=1)
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            clock.now += 1
            first, second = host.sample().gpus
            assert (first.state, first.temperature_c) == ("ok", 60.0)
            assert second.state.startswith("lost, last reading ")
            assert (second.name, second.memory_used, second.utilisation) == ("NVIDIA H200", None, None)
    assert len(caplog.records) == 1

    nvml.broken["nvmlDeviceGetCount"] = raising(pynvml.NVML_ERROR_UNKNOWN)
    clock.now += 40
    sample = host.sample()
    assert [gpu.state[:4] for gpu in sample.gpus] == ["ok", "lost"]
    assert "cannot be listed" in (sample.gpu_note or "")

    nvml.broken.clear()
    clock.now += 40
    sample = host.sample()
    assert [gpu.state for gpu in sample.gpus] == ["ok", "ok"]
    assert sample.gpu_note is None


@pytest.mark.case("B3")
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver library"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "reload the driver or reboot"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "not loaded"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "no permission"),
    ],
)
def test_a_driver_that_cannot_be_used_is_one_line_and_is_retried_slowly(code: int, words: str):
    clock, nvml = Clock(), FakeNvml(nvmlInit=raising(code))
    host = sampler(nvml, clock)
    for _ in range(10):
        sample = host.sample()
        assert sample.gpus == () and words in (sample.gpu_note or "")
        clock.now += 1
    assert nvml.calls.count("nvmlInit") == 1
    nvml.broken.clear()
    clock.now += 60
    assert len(host.sample().gpus) == 2


def test_no_binding_and_no_gpu_are_said():
    def missing() -> Any:
        raise ImportError("no module")

    assert "nvidia-ml-py is not installed" in (HostSampler(nvml=missing).sample().gpu_note or "")
    assert sampler(FakeNvml(nvmlDeviceGetCount=lambda: 0)).sample().gpu_note == "no NVIDIA GPU on this host"


@pytest.mark.case("B5")
def test_a_slow_reading_rests_and_the_row_says_so():
    clock = Clock()
    calls = 0

    def slow(handle: int) -> int:
        nonlocal calls
        calls += 1
        clock.now += 3.0
        return 100_000

    host = sampler(FakeNvml(nvmlDeviceGetCount=lambda: 1, nvmlDeviceGetPowerUsage=slow), clock)
    assert host.sample().gpus[0].power_w == 100.0
    for _ in range(20):
        clock.now += 1
        gpu = host.sample().gpus[0]
        assert gpu.power_w is None and gpu.temperature_c == 54.0
        assert gpu.state == "power not read: the driver is slow"
    assert calls == 1
    clock.now += 60
    assert host.sample().gpus[0].power_w == 100.0


@pytest.mark.case("B3")
def test_a_warning_of_a_shadowing_package_stays_off_the_screen(monkeypatch: pytest.MonkeyPatch):
    class Warns:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "pynvml":
                warnings.warn("deprecated", FutureWarning, stacklevel=1)

    monkeypatch.setattr(sys, "meta_path", [Warns(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "pynvml")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert isinstance(import_nvml(), ModuleType)
    assert not caught
