"""Facts of this host that decide whether and how fast an engine runs here, read once into frozen values.

Reading never imports torch and starts no CUDA: versions come from package metadata, the driver is asked by a child
process with a deadline. What cannot be told is None, never a guess.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.interface import Frozen
from runtime.site_packages import Packages, read_packages

DEADLINE_S = 2.0
"""Longest wait for the driver and for compilers; one that takes longer is reported as silent."""
KILL_S = 0.5
"""Longest wait for a killed process to end."""
NVIDIA_VENDOR = "0x10de"


class Toolkit(Frozen):
    """One CUDA toolkit."""

    homes: tuple[str, ...]
    """Its folder under every name that leads to it."""
    version: str | None
    """Of its nvcc, as "12.9"; None where nvcc is missing or does not answer."""
    named_by: tuple[str, ...]
    """What leads there: CUDA_HOME, CUDA_PATH, PATH, or the folder it was found in."""

    @property
    def home(self) -> str:
        return self.homes[0]


class Gpu(Frozen):
    """One GPU as the driver and the PCI bus tell."""

    index: int
    name: str
    uuid: str | None = None
    bus_id: str | None = None
    compute_capability: str | None = None
    """As "12.0"."""
    memory_total: int | None = None
    """Bytes."""
    mig: bool | None = None
    pcie_width: int | None = None
    """Lanes in use."""
    pcie_width_max: int | None = None
    """Lanes of the card."""
    nvlinks: int = 0
    """Active NVLink connections."""
    numa_node: int | None = None
    throttle: tuple[str, ...] = ()
    """Why its clocks are held down at this moment, in words."""


class Driver(Frozen):
    """The NVIDIA driver."""

    error: str | None = None
    """Name of the NVML error where NVML cannot be used; "silent" where it did not answer in time."""
    error_text: str | None = None
    version: str | None = None
    module_version: str | None = None
    """Of the loaded kernel module."""
    cuda: str | None = None
    """Newest CUDA version the driver runs, as "13.0"."""
    gpus: tuple[Gpu, ...] = ()
    blocked_peers: tuple[tuple[int, int], ...] = ()
    """Pairs of GPU indices without peer-to-peer access."""


class Login(Frozen):
    """What becomes of a user's processes at logout."""

    user: str
    systemd: bool
    """Whether systemd runs this host."""
    lingers: bool
    kills_user_processes: bool
    """`KillUserProcesses` of logind holds for this user."""
    user_service: bool
    """Whether `ddtree service install --user` was done."""


class PortUse(Frozen):
    """The address a server would listen on."""

    host: str
    port: int
    busy: bool
    ours: bool
    """Held by a running instance of this user."""


class Probe(Frozen):
    """All facts, at one moment."""

    cuda_home: str | None
    """`CUDA_HOME`, else `CUDA_PATH`, as set."""
    flashinfer_nvcc: str | None
    """`FLASHINFER_NVCC`, which overrides the compiler of the toolkit."""
    toolkits: tuple[Toolkit, ...]
    flashinfer_home: str | None
    """The toolkit folder FlashInfer's compiler would take; None: none."""
    flashinfer_why: str
    """What leads it there."""
    driver: Driver
    nvidia_devices: int
    """NVIDIA display controllers on the PCI bus."""
    packages: Packages
    shm_bytes: int | None
    port: PortUse
    login: Login
    loose_files: tuple[str, ...]
    """Files of the runtime folder, keys among them, that others may read."""
    numa_nodes: int


@dataclass(frozen=True)
class Sources:
    """Where facts are read; another root or folder makes a broken condition for real."""

    env: Mapping[str, str]
    root: Path = Path("/")
    shm: Path = Path("/dev/shm")
    site_packages: Path | None = None
    """Whose packages count; None = those of this Python."""
    host: str = "127.0.0.1"
    port: int = 8642
    runtime_folder: Path | None = None
    user_unit: Path | None = None
    nvml_script: Path = Path(__file__).with_name("nvml_probe.py")
    deadline_s: float = DEADLINE_S


def read_probe(sources: Sources) -> Probe:
    """Reads everything, side by side; takes no longer than the slowest reading."""
    with ThreadPoolExecutor(max_workers=3) as pool:
        toolkits = pool.submit(find_toolkits, sources)
        packages = pool.submit(read_packages, sources.site_packages, time.monotonic() + sources.deadline_s)
        driver = pool.submit(read_driver, sources)
        home, why = flashinfer_toolkit(sources.env, sources.root)
        return Probe(
            cuda_home=sources.env.get("CUDA_HOME") or sources.env.get("CUDA_PATH") or None,
            flashinfer_nvcc=sources.env.get("FLASHINFER_NVCC") or None,
            flashinfer_home=home,
            flashinfer_why=why,
            nvidia_devices=_nvidia_devices(sources.root),
            shm_bytes=_size_of(sources.shm),
            port=_port_use(sources),
            login=read_login(sources.root, sources.user_unit),
            loose_files=tuple(_loose_files(sources.runtime_folder)),
            numa_nodes=len(list((sources.root / "sys/devices/system/node").glob("node[0-9]*"))),
            toolkits=toolkits.result(),
            packages=packages.result(),
            driver=driver.result(),
        )


def flashinfer_toolkit(env: Mapping[str, str], root: Path = Path("/")) -> tuple[str | None, str]:
    """The toolkit folder FlashInfer compiles with, and what leads it there.

    Its order (flashinfer/jit/cpp_ext.py, `get_cuda_path`): CUDA_HOME, CUDA_PATH, the folder above that of the first
    nvcc on PATH, /usr/local/cuda.
    """
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if env.get(name):
            return env[name], name
    nvcc = shutil.which("nvcc", path=env.get("PATH", ""))
    if nvcc is not None:
        return str(Path(nvcc).parent.parent), "PATH"
    usual = root / "usr/local/cuda"
    return (str(usual), "its default") if usual.exists() else (None, "nothing")


def find_toolkits(sources: Sources) -> tuple[Toolkit, ...]:
    """Every toolkit that a variable, PATH or the usual folders name, each once, with the version of its nvcc."""
    env, root = sources.env, sources.root
    named: dict[Path, dict[str, None]] = {}
    homes: dict[Path, dict[str, None]] = {}

    def add(home: Path, name: str) -> None:
        real = (home / "bin" / "nvcc").resolve()
        homes.setdefault(real, {})[str(home)] = None
        named.setdefault(real, {})[name] = None

    for name in ("CUDA_HOME", "CUDA_PATH"):
        if env.get(name):
            add(Path(env[name]), name)
    for folder in env.get("PATH", "").split(os.pathsep):
        if folder and os.access(Path(folder) / "nvcc", os.X_OK):
            add(Path(folder).parent, "PATH")
    usual = [*sorted((root / "usr/local").glob("cuda*")), root / "opt/cuda"]
    for home in usual:
        if (home / "bin" / "nvcc").exists():
            add(home, str(home.parent))
    versions = _nvcc_versions(homes, sources.deadline_s)
    return tuple(
        Toolkit(homes=tuple(folders), version=versions[nvcc], named_by=tuple(named[nvcc]))
        for nvcc, folders in homes.items()
    )


def _nvcc_versions(compilers: Iterable[Path], seconds: float) -> dict[Path, str | None]:
    """The release each nvcc names; all are started before the first is waited for."""
    started = {nvcc: _start([str(nvcc), "--version"]) for nvcc in compilers}
    deadline = time.monotonic() + seconds
    versions: dict[Path, str | None] = {}
    for nvcc, process in started.items():
        said = _answer(process, deadline) or ""
        release = re.search(r"release (\d+\.\d+)", said)
        versions[nvcc] = release[1] if release else None
    return versions


def read_driver(sources: Sources) -> Driver:
    """What a child process learns from NVML, with what the kernel and the PCI bus say."""
    process = _start([sys.executable, "-P", str(sources.nvml_script)])
    said = _answer(process, time.monotonic() + sources.deadline_s)
    try:
        told: dict[str, Any] = json.loads(said) if said is not None else {"error": "silent"}
    except ValueError:
        told = {"error": "silent"}
    cards: list[dict[str, Any]] = told.pop("gpus", [])
    module = None
    with contextlib.suppress(OSError):
        module = re.search(
            r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", (sources.root / "proc/driver/nvidia/version").read_text()
        )
    return Driver(
        **told,
        gpus=tuple(Gpu(**{**card, **_bus_facts(card.get("bus_id"), sources.root)}) for card in cards),
        module_version=module[1] if module else None,
    )


def _bus_facts(bus_id: str | None, root: Path) -> dict[str, int]:
    """NUMA node and lanes of a card from the kernel, which knows the card's own limit."""
    if not bus_id:
        return {}
    # NVML writes the PCI domain with eight digits, the kernel with four.
    folder = root / "sys/bus/pci/devices" / bus_id.lower()[-12:]
    facts = {}
    for name, file in (
        ("numa_node", "numa_node"),
        ("pcie_width", "current_link_width"),
        ("pcie_width_max", "max_link_width"),
    ):
        with contextlib.suppress(OSError, ValueError):
            value = int((folder / file).read_text())
            if value >= 0:
                facts[name] = value
    return facts


def _nvidia_devices(root: Path) -> int:
    count = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        with contextlib.suppress(OSError):
            is_nvidia = (device / "vendor").read_text().strip() == NVIDIA_VENDOR
            count += is_nvidia and (device / "class").read_text().startswith("0x03")
    return count


def _size_of(folder: Path) -> int | None:
    try:
        told = os.statvfs(folder)
    except OSError:
        return None
    return told.f_frsize * told.f_blocks


def _port_use(sources: Sources) -> PortUse:
    from runtime.instance import instances

    url = f"http://{sources.host}:{sources.port}"
    ours = sources.runtime_folder is not None and any(
        each.alive and each.serves(url) for each in instances(sources.runtime_folder)
    )
    family = socket.AF_INET6 if ":" in sources.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((sources.host, sources.port))
            busy = False
        except OSError:
            busy = True
    return PortUse(host=sources.host, port=sources.port, busy=busy, ours=ours)


def read_login(root: Path, user_unit: Path | None) -> Login:
    """Linger mark and logind settings (systemd logind.conf(5): later drop-ins win; root is excluded by default)."""
    import pwd

    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        user = str(os.geteuid())
    settings: dict[str, str] = {}
    files = [root / "etc/systemd/logind.conf"]
    folders = ("usr/lib/systemd/logind.conf.d", "run/systemd/logind.conf.d", "etc/systemd/logind.conf.d")
    drop_ins = {path.name: path for folder in folders for path in (root / folder).glob("*.conf")}
    for path in [*files, *(drop_ins[name] for name in sorted(drop_ins))]:
        with contextlib.suppress(OSError):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                name, equals, value = line.strip().partition("=")
                if equals and not name.startswith(("#", ";")):
                    settings[name.strip()] = value.strip()
    kills = settings.get("KillUserProcesses", "no").lower() in ("yes", "true", "on", "1")
    only = settings.get("KillOnlyUsers", "").split()
    spared = user in settings.get("KillExcludeUsers", "root").split() or bool(only and user not in only)
    return Login(
        user=user,
        systemd=(root / "run/systemd/system").is_dir(),
        lingers=(root / "var/lib/systemd/linger" / user).exists(),
        kills_user_processes=kills and not spared,
        user_service=user_unit is not None and user_unit.exists(),
    )


def _loose_files(folder: Path | None) -> Iterable[str]:
    if folder is None or not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(OSError):
            if path.is_file() and path.stat().st_mode & 0o077:
                yield str(path)


def _start(command: list[str]) -> subprocess.Popen[str] | None:
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return None


def _answer(process: subprocess.Popen[str] | None, deadline: float) -> str | None:
    """What it printed; None where it could not start, failed, or is silent at the deadline and is killed."""
    if process is None:
        return None
    try:
        said, _ = process.communicate(timeout=max(0.01, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # One that is stuck in the driver ends only when the driver lets it.
            process.wait(timeout=KILL_S)
        if process.stdout is not None:
            process.stdout.close()
        return None
    return said if process.returncode == 0 else None
