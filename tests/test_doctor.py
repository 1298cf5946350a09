"""The doctor finds each broken condition, made for real where this host can, and leaves a healthy host alone."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from test_cli import ddtree

from runtime.doctor import CHECKS, FixFailed, examine, fix, lines, to_json
from runtime.doctor_checks import Finding
from runtime.host_probe import Driver, Gpu, Probe, Sources, read_probe
from runtime.site_packages import Packages


def toolkit(home: Path, version: str) -> Path:
    """A folder like a CUDA toolkit's, whose nvcc answers as that version's does."""
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release {version}, V{version}.88"\n')
    nvcc.chmod(0o755)
    return home


def installed(folder: Path, name: str, version: str, files: Mapping[str, str], requires: str = "") -> None:
    """A package in a site-packages folder, as an installer leaves it."""
    module = name.replace("-", "_")
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir(parents=True)
    requirement = f"Requires-Dist: {requires}\n" if requires else ""
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requirement}")
    record = []
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(text)}")
    (info / "RECORD").write_text("\n".join(record) + "\n")


def nvml_that_says(folder: Path, program: str) -> Path:
    script = folder / "nvml.py"
    script.write_text(program)
    return script


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Any]:
    """Makes sources of an empty host without GPU, on which one thing may be broken."""
    for folder in ("root", "site", "run"):
        (tmp_path / folder).mkdir()
    installed(tmp_path / "site", "torch", "2.13.0", {"torch/version.py": "cuda: Optional[str] = None\n"})
    silent = nvml_that_says(tmp_path, 'print(\'{"error": "LibraryNotFound"}\')')
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def make(env: Mapping[str, str] | None = None, **changes: Any) -> Sources:
        fields: dict[str, Any] = {
            "root": tmp_path / "root",
            "site_packages": tmp_path / "site",
            "port": port,
            "runtime_folder": tmp_path / "run",
            "nvml_script": silent,
            "deadline_s": 20.0,
        }
        return Sources(env={"PATH": os.environ["PATH"], **(env or {})}, **(fields | changes))

    yield make


def found(probe: Probe, name: str) -> Finding:
    return next(each for each in examine(probe) if each.id == name)


def with_gpus(probe: Probe, *gpus: Gpu, **driver: Any) -> Probe:
    told = Driver(version="580.95", module_version="580.95", cuda="13.0", gpus=gpus, **driver)
    return probe.model_copy(update={"driver": told, "nvidia_devices": len(gpus)})


def gpu(index: int, capability: str = "12.0", **facts: Any) -> Gpu:
    return Gpu(index=index, name="Test GPU", compute_capability=capability, **facts)


def test_a_healthy_host_without_a_gpu_has_no_finding(sources: Any, tmp_path: Path) -> None:
    probe = read_probe(sources({"PATH": str(tmp_path)}))
    findings = examine(probe)
    assert len(findings) == len(CHECKS)
    assert [each.id for each in findings if each.severity in ("warning", "error")] == []
    assert "CPU" in found(probe, "gpu-driver").found
    assert Probe.model_validate_json(probe.model_dump_json()) == probe


@pytest.mark.parametrize(
    ("home", "path", "used", "works"),
    [("12.8", "13.0", "12.8", False), ("13.0", "12.8", "13.0", True), (None, "12.8", "12.8", False)],
)
def test_flashinfers_toolkit_is_named_with_its_verdict_on_compute_capability_12(
    sources: Any, tmp_path: Path, home: str | None, path: str, used: str, works: bool
) -> None:
    homes = {version: toolkit(tmp_path / f"cuda-{version}", version) for version in ("12.8", "13.0")}
    env = {"PATH": f"{homes[path]}/bin:/usr/bin:/bin"} | ({"CUDA_HOME": str(homes[home])} if home else {})
    probe = read_probe(sources(env))
    here = found(probe, "cuda-toolkit")
    assert f"FlashInfer would use CUDA {used} in {homes[used]}" in here.found
    assert ("12.0 that works" in here.found) is works and ("does not work" in here.found) is not works
    assert here.severity == ("ok" if works else "info"), "without such a GPU it is no trouble"
    if home:
        assert f"also here: {path} in {homes[path]} (PATH)" in here.found
    blackwell = found(with_gpus(probe, gpu(0)), "cuda-toolkit")
    assert blackwell.severity == ("ok" if works else "warning")
    if home == "12.8":
        assert f"export CUDA_HOME={homes['13.0']}" in blackwell.remedy
    flashinfer = probe.packages.model_copy(update={"versions": {"flashinfer-python": "0.6.1"}})
    with_flashinfer = with_gpus(probe, gpu(0)).model_copy(update={"packages": flashinfer})
    assert found(with_flashinfer, "cuda-toolkit").severity == ("ok" if works else "error")


def test_a_cuda_home_without_a_compiler_is_reported(sources: Any, tmp_path: Path) -> None:
    usual = toolkit(tmp_path / "root/usr/local/cuda-13.0", "13.0")
    here = found(
        read_probe(sources({"PATH": "/usr/bin:/bin", "CUDA_HOME": str(tmp_path / "gone")})), "cuda-toolkit"
    )
    assert here.severity == "warning" and str(tmp_path / "gone") in here.found
    assert f"export CUDA_HOME={usual}" in here.remedy


def test_the_usual_folder_is_one_toolkit_under_two_names(sources: Any, tmp_path: Path) -> None:
    real = toolkit(tmp_path / "root/usr/local/cuda-13.0", "13.0")
    (tmp_path / "root/usr/local/cuda").symlink_to(real)
    here = found(read_probe(sources({"PATH": "/usr/bin:/bin"})), "cuda-toolkit")
    assert "CUDA 13.0" in here.found and "also here" not in here.found


def test_a_busy_port_is_named(sources: Any) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        here = found(read_probe(sources(port=port)), "port")
        assert here.severity == "warning" and str(port) in here.found and str(port) in here.remedy


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_a_small_shared_memory_folder_is_reported(tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    reading = (
        "import pathlib; from runtime.host_probe import Sources, read_probe; "
        f"print(read_probe(Sources(env={{}}, shm=pathlib.Path({str(shm)!r}))).model_dump_json())"
    )
    script = f'mount -t tmpfs -o size=64m none {shm} && exec {sys.executable} -c "$1"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", reading], capture_output=True, text=True
    )
    if done.returncode and "python" not in done.stderr.lower():
        pytest.skip(f"no private mount here: {done.stderr.strip()}")
    probe = Probe.model_validate_json(done.stdout)
    here = found(probe, "dev-shm")
    assert here.severity == "warning" and "64 MiB" in here.found and "--shm-size" in here.remedy
    assert found(with_gpus(probe, gpu(0), gpu(1)), "dev-shm").severity == "error"


def test_a_file_changed_since_installation_is_named_with_its_package(sources: Any, tmp_path: Path) -> None:
    site = tmp_path / "site"
    installed(
        site, "sglang", "0.5.17", {"sglang/a.py": "a = 1\n", "sglang/b.py": "b = 1\n", "sglang/c.py": ""}
    )
    assert found(read_probe(sources()), "packages-altered").severity == "ok"
    (site / "sglang/a.py").write_text("a = 2\n")
    (site / "sglang/c.py").unlink()
    here = found(read_probe(sources()), "packages-altered")
    assert here.severity == "warning"
    assert "sglang 0.5.17: sglang/a.py, sglang/c.py (missing)" in here.found and "b.py" not in here.found


def test_files_that_were_not_looked_at_are_counted(sources: Any) -> None:
    probe = read_probe(sources(deadline_s=-1.0))
    assert "1 files not looked at" in found(probe, "packages-altered").found


def test_an_xgrammar_other_than_sglang_asks_for_is_reported(sources: Any, tmp_path: Path) -> None:
    installed(tmp_path / "site", "sglang", "0.5.17", {}, requires="xgrammar (==0.1.27)")
    installed(tmp_path / "site", "xgrammar", "0.2.0", {})
    here = found(read_probe(sources()), "grammar-backend")
    assert here.severity == "warning" and "0.2.0" in here.found and "--grammar-backend none" in here.remedy
    shutil.rmtree(tmp_path / "site/xgrammar-0.2.0.dist-info")
    installed(tmp_path / "site", "xgrammar", "0.1.27", {})
    assert found(read_probe(sources()), "grammar-backend").severity == "ok"


@pytest.mark.case("B3")
def test_the_deprecated_nvml_package_is_reported(sources: Any, tmp_path: Path) -> None:
    installed(tmp_path / "site", "pynvml", "13.0.1", {})
    assert found(read_probe(sources()), "nvml-package").severity == "warning"


@pytest.mark.case("B3")
@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("LibRmVersionMismatch", "kernel module (version 580.65.06) differ"),
        ("DriverNotLoaded", "not loaded"),
        ("LibraryNotFound", "libnvidia-ml"),
        ("NoPermission", "no permission"),
    ],
)
def test_a_gpu_whose_driver_cannot_be_used_is_an_error_with_its_cause(
    sources: Any, tmp_path: Path, error: str, words: str
) -> None:
    device = tmp_path / "root/sys/bus/pci/devices/0000:17:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    version = tmp_path / "root/proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\n")
    script = nvml_that_says(tmp_path, f'print(\'{{"error": "{error}"}}\')')
    here = found(read_probe(sources(nvml_script=script)), "gpu-driver")
    assert here.severity == "error" and words in here.found and here.remedy


def test_a_driver_that_hangs_holds_nothing_up(sources: Any, tmp_path: Path) -> None:
    script = nvml_that_says(tmp_path, "import time\ntime.sleep(600)")
    here = found(read_probe(sources(nvml_script=script, deadline_s=0.5)), "gpu-driver")
    assert here.severity == "warning" and "did not answer" in here.found


def test_what_the_driver_tells_of_a_card_is_completed_by_the_bus(sources: Any, tmp_path: Path) -> None:
    device = tmp_path / "root/sys/bus/pci/devices/0000:17:00.0"
    device.mkdir(parents=True)
    facts = {"numa_node": "1", "current_link_width": "8", "max_link_width": "16", "vendor": "0x10de"}
    for name, value in {**facts, "class": "0x030000"}.items():
        (device / name).write_text(value + "\n")
    card = {"index": 0, "name": "Card", "bus_id": "00000000:17:00.0", "throttle": ["power cap"]}
    script = nvml_that_says(tmp_path, f"print({json.dumps(json.dumps({'cuda': '13.0', 'gpus': [card]}))})")
    probe = read_probe(sources(nvml_script=script))
    assert probe.driver.gpus[0].numa_node == 1
    assert found(probe, "pcie-link").found == "GPU 0: x8 of x16"
    assert found(probe, "torch-cuda").severity == "error", "a GPU, and torch built without CUDA"
    assert found(probe, "throttling").severity == "info"


@pytest.mark.parametrize(
    ("name", "gpus", "driver", "severity", "words"),
    [
        ("gpu-mig", (gpu(0, "9.0", mig=True), gpu(1, "9.0")), {}, "warning", "GPU 0"),
        ("shared-memory-sm120", (gpu(0, "9.0"), gpu(1)), {}, "info", "GPU 1"),
        ("pcie-link", (gpu(0, pcie_width=4, pcie_width_max=16),), {}, "warning", "x4 of x16"),
        ("peer-to-peer", (gpu(0), gpu(1)), {"blocked_peers": ((0, 1),)}, "warning", "0-1"),
        ("numa", (gpu(0, numa_node=0), gpu(1, numa_node=1)), {}, "info", "node 1: GPU 1"),
        ("throttling", (gpu(0, throttle=("too hot (hardware)",)),), {}, "warning", "too hot"),
    ],
)
def test_conditions_of_gpus_are_found(
    sources: Any, name: str, gpus: tuple[Gpu, ...], driver: dict[str, Any], severity: str, words: str
) -> None:
    probe = read_probe(sources())
    here = found(with_gpus(probe, *gpus, **driver), name)
    assert here.severity == severity and words in here.found and here.remedy
    assert found(with_gpus(probe, gpu(0, "9.0", numa_node=0)), name).severity == "ok"


def test_flashinfer_attention_on_compute_capability_12_is_warned_of(sources: Any) -> None:
    probe = with_gpus(read_probe(sources()), gpu(0))
    packages = Packages(versions={"torch": "2.11.0", "flashinfer-python": "0.6.1"}, torch_cuda="13.0")
    here = found(probe.model_copy(update={"packages": packages}), "attention-sm120")
    assert here.severity == "warning" and "triton" in here.remedy
    assert found(probe, "attention-sm120").severity == "ok"


@pytest.mark.parametrize(
    ("cuda", "severity"), [("12.8", "ok"), ("13.0", "ok"), ("13.2", "info"), ("14.0", "error")]
)
def test_torch_for_a_newer_cuda_than_the_driver_runs(sources: Any, cuda: str, severity: str) -> None:
    probe = with_gpus(read_probe(sources()), gpu(0))
    packages = Packages(versions={"torch": "2.13.0"}, torch_cuda=cuda)
    assert found(probe.model_copy(update={"packages": packages}), "torch-cuda").severity == severity


def test_a_user_service_without_linger_and_killed_sessions_are_reported(sources: Any, tmp_path: Path) -> None:
    root, unit = tmp_path / "root", tmp_path / "ddtree.service"
    (root / "run/systemd/system").mkdir(parents=True)
    probe = read_probe(sources(user_unit=unit))
    assert found(probe, "logout").severity == "ok"
    unit.write_text("")
    here = found(read_probe(sources(user_unit=unit)), "logout")
    assert here.severity == "warning" and here.fix == "linger" and "enable-linger" in here.remedy
    unit.unlink()
    drop_in = root / "etc/systemd/logind.conf.d/kill.conf"
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text("[Login]\nKillUserProcesses=yes\nKillExcludeUsers=\n")
    here = found(read_probe(sources(user_unit=unit)), "logout")
    assert here.severity == "warning" and "KillUserProcesses" in here.found
    mark = root / "var/lib/systemd/linger" / probe.login.user
    mark.parent.mkdir(parents=True)
    mark.touch()
    assert found(read_probe(sources(user_unit=unit)), "logout").severity == "ok"


def test_a_key_that_others_may_read_is_an_error_and_fixed(sources: Any, tmp_path: Path) -> None:
    key = tmp_path / "run/operator.key"
    key.write_text("secret")
    key.chmod(0o644)
    probe = read_probe(sources())
    findings = examine(probe)
    assert findings[0].id == "private-files" and findings[0].severity == "error", "the worst comes first"
    done = fix(probe, findings)
    assert "undo: chmod 644" in done[0]
    assert found(read_probe(sources()), "private-files").severity == "ok"
    assert "secret" not in json.dumps(to_json(findings))


def test_fix_lets_the_user_linger_and_says_what_went_wrong_if_it_cannot(
    sources: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loginctl that keeps what it was told stands in for systemd's: only root of a systemd host has a real one."""
    (tmp_path / "root/run/systemd/system").mkdir(parents=True)
    unit = tmp_path / "ddtree.service"
    unit.write_text("")
    probe = read_probe(sources(user_unit=unit))
    tool = tmp_path / "bin/loginctl"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/told\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    done = fix(probe, examine(probe))
    user = probe.login.user
    assert done == (f"{user} lingers (undo: loginctl disable-linger {user})",)
    assert (tmp_path / "told").read_text() == f"enable-linger {user}\n"
    tool.write_text("#!/bin/sh\necho 'Could not enable linger: Access denied' >&2\nexit 1\n")
    with pytest.raises(FixFailed, match="enable-linger .*: Could not enable linger: Access denied") as failed:
        fix(probe, examine(probe))
    assert failed.value.exit_code == 1


def test_the_text_says_severity_in_words_and_what_to_do(sources: Any) -> None:
    probe = with_gpus(read_probe(sources()), gpu(0, pcie_width=4, pcie_width_max=16))
    text = lines(examine(probe), width=80)
    assert all(len(line) <= 80 for line in text)
    at = next(number for number, line in enumerate(text) if line.startswith("warning pcie-link"))
    assert any(line.strip().startswith("do:") for line in text[at : at + 8])


def test_the_command_answers_as_data_and_loads_no_engine(tmp_path: Path) -> None:
    home = toolkit(tmp_path / "cuda-12.8", "12.8")
    env = {"CUDA_HOME": str(home), "XDG_RUNTIME_DIR": "", "XDG_STATE_HOME": str(tmp_path)}
    done = ddtree("doctor", "--json", **env)
    answer = json.loads(done.stdout)
    errors = [each["id"] for each in answer["checks"] if each["severity"] == "error"]
    assert done.returncode == (1 if errors else 0)
    assert answer["schema"] == 1 and len(answer["checks"]) == len(CHECKS)
    fields = {"id", "found", "expected", "severity", "remedy", "source", "fix"}
    assert all(set(each) == fields for each in answer["checks"])
    loaded = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from console.cli import main; code = main(['doctor', '--json']); "
            "sys.exit(9 if {'torch', 'transformers', 'sglang'} & set(sys.modules) else code)",
        ],
        capture_output=True,
        env={**os.environ, **env},
    )
    assert loaded.returncode == done.returncode


def test_fix_as_typed_says_how_to_undo_it_and_then_what_is_left(tmp_path: Path) -> None:
    key = tmp_path / "ddtree/operator.key"
    key.parent.mkdir(mode=0o700)
    key.write_text("secret")
    key.chmod(0o644)
    installed(tmp_path / "env/lib/python3.11/site-packages", "torch", "2.13.0", {})
    env = {"XDG_RUNTIME_DIR": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    done = ddtree("doctor", "--fix", "--environment", str(tmp_path / "env"), **env)
    assert f"{key} is readable by you only (undo: chmod 644 {key})" in done.stderr
    assert key.stat().st_mode & 0o777 == 0o600
    text = done.stdout.splitlines()
    assert text[-1].startswith(f"{len(CHECKS)} checks, ") and "secret" not in done.stdout + done.stderr
    assert not any(line.startswith(("error   private-files", "warning private-files")) for line in text)
    assert done.returncode == (1 if any(line.startswith("error ") for line in text) else 0)


def test_fix_is_refused_where_only_reading_is_allowed() -> None:
    done = ddtree("doctor", "--fix", DDTREE_READ_ONLY="1")
    assert done.returncode == 3 and "DDTREE_READ_ONLY" in done.stderr


def test_a_folder_that_is_no_environment_is_wrong_usage(tmp_path: Path) -> None:
    done = ddtree("doctor", "--environment", str(tmp_path))
    assert done.returncode == 2 and str(tmp_path) in done.stderr
