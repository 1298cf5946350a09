"""What a configuration runs on: host and GPUs, CUDA toolkits, versions, environment variables, model files.

Nothing here imports torch or an engine, or makes a CUDA context: versions come from the installed metadata, GPUs from
NVML. A part that cannot be told is None.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from snapshots.content import Environment, ModelFile, Software, Toolkit, Toolkits
from snapshots.hardware import read_hardware
from snapshots.hashes import HashCache
from snapshots.installed import Elsewhere
from snapshots.secrets import redact_environment

PACKAGES = (
    "ddtree-console",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "sglang",
    "sglang-kernel",
    "sgl-kernel",
    "flashinfer-python",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "xgrammar",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "numpy",
)
"""Distributions whose versions decide what runs."""
VARIABLES = re.compile(
    r"(CUDA|NVIDIA|NCCL|NVSHMEM|GLOO|UCX|SGLANG|SGL|FLASHINFER|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|DDTREE|HF"
    r"|TRANSFORMERS|TOKENIZERS|SAFETENSORS|OMP|MKL|KMP|GOMP|OPENBLAS|VLLM|DG|DEEPEP|MC|PYTHON|CONDA)_.*"
    r"|PATH|LD_LIBRARY_PATH|LD_PRELOAD|LIBRARY_PATH|CPATH|VIRTUAL_ENV|PYTHON(PATH|HASHSEED|UNBUFFERED|MALLOC)"
    r"|CC|CXX|CFLAGS|CXXFLAGS|LDFLAGS|MAX_JOBS|MALLOC_.*|XDG_(CACHE|CONFIG|DATA|STATE)_HOME|TMPDIR|LANG|LC_ALL"
)
HASH_SECONDS = 0.4
"""Time a capture spends on reading model files whose digests are not remembered; saving must not wait for them."""
NVCC_SECONDS = 3.0
MODEL_FILES_KEPT = 500


def capture(
    target_folder: Path | None,
    drafter_folder: Path | None,
    *,
    env: Mapping[str, str] = os.environ,
    hashes: HashCache | None = None,
    hash_seconds: float | None = HASH_SECONDS,
    sglang: Elsewhere | None = None,
) -> Environment:
    """This host's environment now.

    Args:
        target_folder, drafter_folder: a folder of model files or one file; None where there is none.
        sglang: the virtual environment that SGLang has for itself.
        hash_seconds: time for reading model files not hashed before; what is left keeps sha256 None. None: no limit.
    """
    cache = hashes or HashCache()
    deadline = None if hash_seconds is None else time.monotonic() + hash_seconds
    roles = (("target", target_folder), ("drafter", drafter_folder))
    files = tuple(
        file for role, folder in roles if folder for file in _model_files(role, folder, cache, deadline)
    )
    cache.save()
    return Environment(
        hardware=read_hardware(),
        toolkits=find_toolkits(env),
        software=read_software(),
        sglang=read_software(sglang) if sglang is not None else None,
        variables=redact_environment(
            {name: env[name] for name in sorted(env) if VARIABLES.fullmatch(name) and "\0" not in env[name]}
        ),
        files=files,
    )


def hash_models(*folders: Path | None, hashes: HashCache | None = None) -> None:
    """Reads all model files once, however long it takes, so that captures afterwards know their digests."""
    cache = hashes or HashCache()
    for folder in folders:
        if folder is not None:
            list(_model_files("target", folder, cache, None))
            cache.save()


def _model_files(role: str, folder: Path, cache: HashCache, deadline: float | None) -> Iterator[ModelFile]:
    """The files of a model in order of their names; small ones are hashed first, then as time allows."""
    if not folder.exists():
        return
    root = folder if folder.is_dir() else folder.parent
    paths = [folder] if folder.is_file() else [each for each in folder.rglob("*") if each.is_file()]
    shown = [each for each in paths if not any(part.startswith(".") for part in each.relative_to(root).parts)]
    sized = sorted((_size(path), path) for path in shown)[-MODEL_FILES_KEPT:]
    digests = {path: _digest(path, cache, deadline) for _, path in sized}
    for size, path in sorted(sized, key=lambda each: each[1]):
        name = path.relative_to(root).as_posix().encode("utf-8", "replace").decode()
        yield ModelFile.model_validate({"role": role, "path": name, "size": size, "sha256": digests[path]})


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _digest(path: Path, cache: HashCache, deadline: float | None) -> str | None:
    """The digest of a file; a download cache that names its blobs by SHA-256 is taken at its word."""
    try:
        blob = path.resolve().name if path.is_symlink() else ""
        if re.fullmatch("[0-9a-f]{64}", blob):
            return blob
        return cache.sha256(path, deadline)
    except OSError:
        return None


def find_toolkits(env: Mapping[str, str] = os.environ, roots: tuple[Path, ...] | None = None) -> Toolkits:
    """Every CUDA toolkit on the host with its compiler's version, and the one that a build would use.

    Builds of kernels take `CUDA_HOME` if it is set, else the toolkit of the nvcc on `PATH`.
    """
    home, on_path = env.get("CUDA_HOME") or env.get("CUDA_PATH"), shutil.which("nvcc", path=env.get("PATH"))
    path_folder = _toolkit_of(Path(on_path)) if on_path else None
    candidates: list[Path] = [Path(home)] if home else []
    if path_folder is not None:
        candidates.append(path_folder)
    for root in roots if roots is not None else (Path("/usr/local"), Path("/opt"), Path("/opt/nvidia")):
        candidates += sorted(each for each in root.glob("cuda*") if (each / "bin/nvcc").exists())
    found: dict[Path, Toolkit] = {}
    for folder in candidates:
        real = folder.resolve()
        if real not in found and folder.exists():
            found[real] = Toolkit(path=str(real), nvcc=nvcc_version(real / "bin/nvcc"))
    in_use = Path(home).resolve() if home else path_folder.resolve() if path_folder else None
    return Toolkits(
        found=tuple(found.values()),
        in_use=str(in_use) if in_use is not None else None,
        chosen_by=("CUDA_HOME" if env.get("CUDA_HOME") else "CUDA_PATH")
        if home
        else "PATH"
        if in_use
        else None,
    )


def _toolkit_of(nvcc: Path) -> Path:
    """The toolkit folder of an nvcc on PATH, also of a small script there that calls the real one."""
    real = nvcc.resolve()
    try:
        with real.open("rb") as file:
            head = file.read(512)
    except OSError:
        head = b""
    called = re.search(rb"(/\S+/bin)/nvcc\b", head) if head.startswith(b"#!") else None
    return Path(os.fsdecode(called[1])).parent if called else real.parent.parent


def nvcc_version(nvcc: Path) -> str | None:
    """What a CUDA compiler says its release is, as "12.9"; None if it is not there or does not say."""
    try:
        done = subprocess.run(
            [str(nvcc), "--version"], capture_output=True, text=True, errors="replace", timeout=NVCC_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release (\d+\.\d+)(?:, V([\d.]+))?", done.stdout)
    return (found[2] or found[1]) if found else None


def read_software(other: Elsewhere | None = None) -> Software:
    """Versions of what runs in this interpreter's environment, or in an `other` one."""
    site_packages = other.site_packages if other is not None else None
    version, python = (
        (platform.python_version(), sys.executable) if other is None else (other.version, other.python)
    )
    return Software(
        python=f"{version} ({python})",
        kernel=" ".join(platform.uname()[each] for each in (0, 2)) or None if other is None else None,
        os=_os_name() if other is None else None,
        container=_container() if other is None else None,
        packages={name: installed_version(name, site_packages) for name in PACKAGES},
    )


def installed_version(name: str, site_packages: Path | None = None) -> str | None:
    """The version of an installed distribution from its metadata; None if it is not installed."""
    path = [str(site_packages)] if site_packages is not None else sys.path
    try:
        for found in importlib.metadata.distributions(name=name, path=path):
            return str(found.version)
    except (OSError, ValueError, KeyError):
        pass
    return None


def _os_name() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return platform.platform() or None


def _container() -> str | None:
    """What kind of container this is, "none" outside of one; None where that cannot be told."""
    if Path("/.dockerenv").exists():
        return "docker"
    if Path("/run/.containerenv").exists():
        return "podman"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    try:
        said = dict(
            each.split("=", 1)
            for each in Path("/proc/1/environ").read_bytes().decode("utf-8", "replace").split("\0")
            if "=" in each
        )
        return said.get("container") or "none"
    except OSError:
        try:
            return Path("/run/systemd/container").read_text(encoding="utf-8").strip() or None
        except OSError:
            return None
