"""The environment of a snapshot: versions, toolkits, GPUs and model files, without CUDA and without a GPU."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from snapshots import environment
from snapshots.content import REDACTED, GpuLink
from snapshots.hardware import read_hardware
from snapshots.hashes import HashCache

NVCC = """#!/bin/sh
echo 'nvcc: NVIDIA (R) Cuda compiler driver'
echo 'Cuda compilation tools, release {0}, V{0}.86'
"""


def make_toolkit(root: Path, release: str) -> Path:
    nvcc = root / f"cuda-{release}" / "bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(NVCC.format(release))
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    return nvcc.parent.parent


def test_a_host_without_a_gpu_is_described_with_the_reason(tmp_path: Path) -> None:
    found = environment.capture(None, None, hashes=HashCache(tmp_path / "hashes"))
    assert found.software.packages["torch"] == version("torch")
    assert found.software.packages["sglang"] is None or found.software.packages["sglang"][0].isdigit()
    assert found.hardware.cpu_count and found.hardware.memory_bytes and found.software.kernel
    assert found.hardware.gpus or found.hardware.gpu_note
    assert found.files == ()


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from snapshots import environment, patches, services, restore\n"
        "environment.capture(None, None)\n"
        "print({'torch', 'transformers', 'sglang', 'triton', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent.parent, capture_output=True, text=True
    )
    assert done.stdout == "set()\n", done.stderr


def test_every_toolkit_is_found_and_the_one_in_use_named(tmp_path: Path) -> None:
    older, newer = make_toolkit(tmp_path, "12.4"), make_toolkit(tmp_path, "13.0")
    (tmp_path / "cuda").symlink_to(newer)
    path = f"{older}/bin:/usr/bin:/bin"
    by_path = environment.find_toolkits({"PATH": path}, roots=(tmp_path,))
    assert [(each.path, each.nvcc) for each in by_path.found] == [
        (str(older), "12.4.86"),
        (str(newer), "13.0.86"),
    ]
    assert (by_path.in_use, by_path.chosen_by) == (str(older), "PATH")
    by_home = environment.find_toolkits({"PATH": path, "CUDA_HOME": str(tmp_path / "cuda")}, (tmp_path,))
    assert (by_home.in_use, by_home.chosen_by) == (str(newer), "CUDA_HOME")
    none = environment.find_toolkits({"PATH": "/nowhere"}, roots=(tmp_path / "empty",))
    assert (none.found, none.in_use, none.chosen_by) == ((), None, None)


def test_a_script_on_the_path_stands_for_the_toolkit_that_it_calls(tmp_path: Path) -> None:
    toolkit = make_toolkit(tmp_path, "13.0")
    wrapper = tmp_path / "bin/nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {toolkit}/bin/nvcc "$@"\n')
    wrapper.chmod(0o755)
    found = environment.find_toolkits({"PATH": f"{wrapper.parent}:/bin"}, roots=())
    assert found.in_use == str(toolkit)


def test_variables_that_matter_are_kept_and_secrets_are_not(tmp_path: Path) -> None:
    env = {
        "CUDA_HOME": "/usr/local/cuda",
        "HF_TOKEN": "hf_" + "a1" * 17,
        "DDTREE_API_KEY": "correct-horse",
        "NCCL_P2P_DISABLE": "1",
        "EDITOR": "vi",
        "PATH": "/bin",
    }
    found = environment.capture(None, None, env=env, hashes=HashCache(tmp_path / "hashes"))
    assert found.variables == {
        "CUDA_HOME": "/usr/local/cuda",
        "DDTREE_API_KEY": REDACTED,
        "HF_TOKEN": REDACTED,
        "NCCL_P2P_DISABLE": "1",
        "PATH": "/bin",
    }


def test_model_files_are_hashed_once_and_again_when_they_change(tmp_path: Path) -> None:
    model, cache = tmp_path / "model", tmp_path / "hashes.json"
    model.mkdir()
    (model / "config.json").write_text("{}")
    old = time.time() - 60
    os.utime(model / "config.json", (old, old))
    first = environment.capture(model, None, hashes=HashCache(cache)).files
    assert [(each.role, each.path, each.size) for each in first] == [("target", "config.json", 2)]
    (model / "config.json").write_text("[]")
    os.utime(model / "config.json", (old, old))
    second = environment.capture(model, None, hashes=HashCache(cache)).files
    assert first[0].sha256 != second[0].sha256


def test_what_cannot_be_hashed_in_time_is_unknown_until_it_was_read_once(tmp_path: Path) -> None:
    model, cache = tmp_path / "model.bin", tmp_path / "hashes.json"
    with model.open("wb") as file:
        file.truncate(64 << 20)
    os.utime(model, (1, 1))
    time.sleep(1.1)  # a file changed within the last second is not remembered
    assert environment.capture(None, model, hashes=HashCache(cache), hash_seconds=0).files[0].sha256 is None
    environment.hash_models(model, hashes=HashCache(cache))
    known = environment.capture(None, model, hashes=HashCache(cache), hash_seconds=0).files[0]
    assert known.role == "drafter" and known.sha256 is not None


class Nvml:
    """Two GPUs on one NVSwitch and one on PCIe alone, as the binding tells it."""

    def __init__(self) -> None:
        self.users = 0

    def nvmlInit(self) -> None:
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    nvmlSystemGetDriverVersion = staticmethod(lambda: "580.65.06")
    nvmlSystemGetCudaDriverVersion_v2 = staticmethod(lambda: 13000)
    nvmlDeviceGetCount = staticmethod(lambda: 3)
    nvmlDeviceGetHandleByIndex = staticmethod(lambda index: index)
    nvmlDeviceGetName = staticmethod(lambda handle: b"NVIDIA H200")
    nvmlDeviceGetUUID = staticmethod(lambda handle: f"GPU-{handle}")
    nvmlDeviceGetPciInfo = staticmethod(lambda handle: SimpleNamespace(busId=f"00000000:0{handle}:00.0"))
    nvmlDeviceGetCudaComputeCapability = staticmethod(lambda handle: (9, 0))
    nvmlDeviceGetMemoryInfo = staticmethod(lambda handle: SimpleNamespace(total=150 << 30))
    nvmlDeviceGetCurrPcieLinkGeneration = staticmethod(lambda handle: 1)
    nvmlDeviceGetMaxPcieLinkGeneration = staticmethod(lambda handle: 5)
    nvmlDeviceGetCurrPcieLinkWidth = staticmethod(lambda handle: 8)
    nvmlDeviceGetTopologyCommonAncestor = staticmethod(lambda one, other: 50)
    nvmlDeviceGetNvLinkRemoteDeviceType = staticmethod(lambda handle, link: 2)

    @staticmethod
    def nvmlDeviceGetNvLinkState(handle: int, link: int) -> int:
        if handle == 2 or link >= 18:
            raise RuntimeError("Not Supported")
        return 1

    @staticmethod
    def nvmlDeviceGetNvLinkRemotePciInfo(handle: int, link: int) -> None:
        raise RuntimeError("Not Supported")

    @staticmethod
    def nvmlDeviceGetMaxPcieLinkWidth(handle: int) -> int:
        raise RuntimeError("Not Supported")


def test_gpus_and_what_joins_them_with_none_for_what_the_driver_does_not_tell() -> None:
    nvml = Nvml()
    found = read_hardware(lambda: nvml)
    assert (found.driver, found.driver_cuda, found.gpu_note) == ("580.65.06", "13.0", None)
    gpu = found.gpus[1]
    assert (gpu.name, gpu.compute_capability, gpu.bus_id) == ("NVIDIA H200", "9.0", "00000000:01:00.0")
    assert (gpu.pcie_generation_now, gpu.pcie_generation_possible) == (1, 5)
    assert (gpu.pcie_width_now, gpu.pcie_width_possible) == (8, None)
    assert found.links == (
        GpuLink(first=0, second=1, kind="NV18"),
        GpuLink(first=0, second=2, kind="SYS"),
        GpuLink(first=1, second=2, kind="SYS"),
    )
    assert nvml.users == 0


@pytest.mark.gpu
def test_a_real_gpu_is_described() -> None:
    gpus = read_hardware().gpus
    if not gpus:
        pytest.skip("no NVIDIA GPU on this host")
    gpu = gpus[0]
    assert gpu.name and gpu.uuid and gpu.compute_capability and gpu.memory_bytes and gpu.pcie_width_now
