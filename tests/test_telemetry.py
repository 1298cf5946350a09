"""Host and GPU figures against a fake NVML with the real binding's names, errors and shapes."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pynvml
import pytest
from fake_nvml import GIB, FakeNvml, raising

from runtime.nvml_probe import import_nvml, throttle_words
from runtime.samples import GpuProcess
from runtime.telemetry import HostSampler


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def sampler(nvml: FakeNvml, clock: Clock | None = None) -> HostSampler:
    nvml.clock = clock = clock or Clock()
    return HostSampler(nvml=lambda: nvml, clock=clock)


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """The warnings of the telemetry, wherever the log goes meanwhile."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, keep = logging.getLogger("ddtree.telemetry"), Keep(logging.WARNING)
    logger.addHandler(keep)
    yield lines
    logger.removeHandler(keep)


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, f"never came true: {what}"
        time.sleep(0.01)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_healthy_gpus_give_every_field_and_its_age(count: int):
    clock, nvml = Clock(), FakeNvml(gpus=count)
    host = sampler(nvml, clock)
    host.sample()
    clock.now += 2.0
    gpus = host.sample().gpus
    assert [gpu.index for gpu in gpus] == list(range(count))
    gpu = gpus[-1]
    values = gpu.model_dump(exclude={"index", "instance", "name", "uuid", "bus_id", "state", "ages"})
    assert None not in values.values()
    assert set(gpu.ages) == set(values)
    assert gpu.ages["utilisation"] == 0.0 and gpu.ages["power_limit_w"] == 2.0
    assert gpu.bus_id == f"00000000:0{count - 1}:00.0"
    assert (gpu.sm_clock_mhz, gpu.memory_clock_mhz, gpu.throttle) == (1980, 3201, ("power cap",))
    assert (gpu.pcie_rx_b_s, gpu.pcie_tx_b_s) == (2048 * 1024, 1024 * 1024)
    assert (gpu.nvlink_rx_b_s, gpu.nvlink_tx_b_s) == (GIB, GIB / 2)
    assert gpu.processes == (
        GpuProcess(pid=os.getpid(), memory_used=60 * GIB, ours=True),
        GpuProcess(pid=1, memory_used=GIB),
    )


def test_readings_that_cost_much_are_made_rarely():
    clock, nvml = Clock(), FakeNvml(gpus=1)
    host = sampler(nvml, clock)
    for _ in range(100):
        host.sample()
        clock.now += 0.1
    assert nvml.calls.count("nvmlDeviceGetUtilizationRates") == 100
    assert nvml.calls.count("nvmlDeviceGetPcieThroughput") <= 6
    assert nvml.calls.count("nvmlDeviceGetComputeRunningProcesses") <= 3


def test_what_holds_the_clocks_down_in_words():
    assert throttle_words(0) == ()
    assert throttle_words(pynvml.nvmlClocksEventReasonGpuIdle) == ("idle",)
    both = pynvml.nvmlClocksEventReasonHwThermalSlowdown | pynvml.nvmlClocksEventReasonHwSlowdown
    assert throttle_words(both) == ("hardware slowdown", "too hot (hardware)")
    assert throttle_words(1 << 40 | 4) == ("power cap", "reason 0x10000000000")
    every = throttle_words(pynvml.nvmlClocksThrottleReasonAll)
    assert not any(words.startswith("reason") for words in every)


def test_an_older_driver_gives_throttle_reasons_under_their_older_name():
    nvml = FakeNvml(
        nvmlDeviceGetCurrentClocksEventReasons=raising(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND),
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: (
            pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
        ),
    )
    assert sampler(nvml).sample().gpus[0].throttle == ("too hot (driver)",)


def test_a_healthy_gpu_in_figures():
    gpu = sampler(FakeNvml()).sample().gpus[1]
    assert (gpu.index, gpu.name, gpu.uuid, gpu.state) == (1, "NVIDIA H200", "GPU-1", "ok")
    assert (gpu.utilisation, gpu.memory_used, gpu.memory_total) == (0.93, 61 * GIB, 140 * GIB)
    assert (gpu.power_w, gpu.power_limit_w, gpu.temperature_c) == (512.3, 700.0, 54.0)


def test_the_first_cpu_figure_is_unknown_for_it_needs_two_samples():
    host = sampler(FakeNvml())
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
    ("function", "fields"),
    [
        ("nvmlDeviceGetMemoryInfo", {"memory_used", "memory_total"}),
        ("nvmlDeviceGetUtilizationRates", {"utilisation"}),
        ("nvmlDeviceGetPowerUsage", {"power_w"}),
        ("nvmlDeviceGetEnforcedPowerLimit", {"power_limit_w"}),
        ("nvmlDeviceGetTemperature", {"temperature_c"}),
        ("nvmlDeviceGetClockInfo", {"sm_clock_mhz", "memory_clock_mhz"}),
        ("nvmlDeviceGetCurrentClocksEventReasons", {"throttle"}),
        ("nvmlDeviceGetPcieThroughput", {"pcie_rx_b_s", "pcie_tx_b_s"}),
        ("nvmlDeviceGetFieldValues", {"nvlink_rx_b_s", "nvlink_tx_b_s"}),
        ("nvmlDeviceGetComputeRunningProcesses", {"processes"}),
        ("nvmlDeviceGetUUID", {"uuid"}),
        ("nvmlDeviceGetPciInfo", {"bus_id"}),
        ("nvmlDeviceGetMigMode", {"instance"}),
    ],
)
@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_UNKNOWN])
def test_a_reading_that_any_call_refuses_is_unknown_and_the_others_stay(
    function: str, fields: set[str], code: int
):
    clock, nvml = Clock(), FakeNvml(**{function: raising(code)})
    host = sampler(nvml, clock)
    host.sample()
    clock.now += 1.0
    gpu = host.sample().gpus[0]
    assert {name for name, value in gpu.model_dump().items() if value is None} == fields | {"instance"}
    assert not fields & set(gpu.ages) and gpu.state == "ok"


@pytest.mark.case("B1")
def test_nvlink_counters_of_a_gpu_without_links_are_unknown():
    def none(handle: int, asked: object) -> Any:
        answers = (pynvml.c_nvmlFieldValue_t * 2)()
        for answer in answers:
            answer.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
        return answers

    clock, nvml = Clock(), FakeNvml(nvmlDeviceGetFieldValues=none)
    host = sampler(nvml, clock)
    for _ in range(5):
        gpu = host.sample().gpus[0]
        assert gpu.nvlink_rx_b_s is None and gpu.state == "ok"
        clock.now += 2.0
    assert nvml.calls.count("nvmlDeviceGetFieldValues") == 2, "one a GPU; what is unsupported is asked rarely"


@pytest.mark.case("B1")
def test_a_memory_total_of_zero_is_unknown():
    unified = FakeNvml(nvmlDeviceGetMemoryInfo=lambda handle: pynvml.c_nvmlMemory_t(total=0, used=0, free=0))
    gpu = sampler(unified).sample().gpus[0]
    assert (gpu.memory_used, gpu.memory_total) == (None, None)


@pytest.mark.case("B1")
def test_mig_instances_have_rows_with_their_own_memory():
    def handle_of(device: int, number: int) -> str:
        if number > 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return f"mig-{number}"

    def memory(handle: object) -> Any:
        size = 10 if str(handle).startswith("mig") else 140
        return pynvml.c_nvmlMemory_t(total=size * GIB, used=GIB, free=(size - 1) * GIB)

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
    assert [(gpu.index, gpu.instance) for gpu in (whole, *instances)] == [(0, None), (0, 0), (0, 1)]
    assert [gpu.name[:5] for gpu in instances] == ["MIG 0", "MIG 1"]


@pytest.mark.case("B3")
def test_names_may_come_as_bytes():
    gpu = sampler(FakeNvml(nvmlDeviceGetName=lambda handle: b"NVIDIA \xff")).sample().gpus[0]
    assert gpu.name == "NVIDIA \ufffd"


@pytest.mark.case("B2")
def test_a_lost_gpu_is_called_lost_the_others_go_on_and_it_comes_back(warned: list[str]):
    clock, nvml = Clock(), FakeNvml()
    host = sampler(nvml, clock)
    assert [gpu.state for gpu in host.sample().gpus] == ["ok", "ok"]

    def lost(handle: int, *_: object) -> Any:
        if handle == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return 60

    def memory(handle: int) -> Any:
        return lost(handle) and pynvml.c_nvmlMemory_t(total=GIB, used=1, free=1)

    nvml.broken |= {
        "nvmlDeviceGetName": lost,
        "nvmlDeviceGetPowerUsage": lost,
        "nvmlDeviceGetMemoryInfo": memory,
    }
    nvml.broken["nvmlDeviceGetTemperature"] = lost
    for _ in range(5):
        clock.now += 1
        first, second = host.sample().gpus
        assert (first.state, first.temperature_c) == ("ok", 60.0)
        assert second.state.startswith("lost, last reading ")
        assert (second.name, second.memory_used, second.utilisation) == ("NVIDIA H200", None, None)
    assert len(warned) == 1 and "GPU 1" in warned[0]

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
def test_a_slow_reading_rests_and_its_value_stays_with_its_age(warned: list[str]):
    clock = Clock()
    calls = 0

    def slow(handle: int) -> int:
        nonlocal calls
        calls += 1
        clock.now += 0.2
        return 100_000

    host = sampler(FakeNvml(gpus=1, nvmlDeviceGetPowerUsage=slow), clock)
    assert host.sample().gpus[0].power_w == 100.0
    for second in range(1, 9):
        clock.now += 1
        gpu = host.sample().gpus[0]
        assert (gpu.power_w, gpu.temperature_c) == (100.0, 54.0)
        assert gpu.ages["power_w"] == pytest.approx(second) and gpu.ages["temperature_c"] == 0.0
        assert gpu.state == "power is slow to read (0.2 s)"
    assert (calls, len(warned)) == (1, 1)
    clock.now += 3
    assert host.sample().gpus[0].ages["power_w"] == 0.0


@pytest.mark.case("B5")
def test_a_call_that_hangs_costs_its_gpu_alone_and_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, warned: list[str]
):
    monkeypatch.setattr("runtime.nvml.DEADLINE_S", 0.1)
    let_go = threading.Event()
    hangs = False

    def temperature(handle: int, sensor: int) -> int:
        if hangs and handle == 0:
            let_go.wait(60)
        return 54

    nvml = FakeNvml(nvmlDeviceGetTemperature=temperature)
    host = HostSampler(nvml=lambda: nvml)
    before = host.sample().gpus
    assert [gpu.state for gpu in before] == ["ok", "ok"]
    hangs = True
    until(lambda: host.sample().gpus[0].state.startswith("temperature not answered since "), "said")
    threads = threading.active_count()
    for _ in range(20):
        stuck, other = host.sample().gpus
        assert stuck.temperature_c == 54.0
        assert stuck.state.startswith("temperature not answered since ") and other.state == "ok"
    assert stuck.ages["temperature_c"] > other.ages["temperature_c"]
    assert threading.active_count() <= threads + 1, "one thread is left behind, not one a sample"
    assert len(warned) == 1
    hangs = False
    let_go.set()
    until(lambda: "not answered" not in host.sample().gpus[0].state, "comes back")


@pytest.mark.case("B5")
def test_a_driver_that_hangs_at_start_holds_up_no_sample(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("runtime.nvml.LIST_DEADLINE_S", 0.1)
    monkeypatch.setattr("runtime.nvml.RETRY_S", 0.01)
    let_go = threading.Event()
    nvml = FakeNvml(nvmlInit=lambda: let_go.wait(60))
    host = HostSampler(nvml=lambda: nvml)
    until(lambda: "does not answer since" in (host.sample().gpu_note or ""), "said")
    for _ in range(5):
        assert host.sample().gpus == ()
    assert list(nvml.calls) == ["nvmlInit"]
    let_go.set()
    until(lambda: len(host.sample().gpus) == 2, "comes back")
    assert host.sample().gpu_note is None


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
