"""Running instances of this user on this host: one 0600 file each, by which `ddtree ctl` and consoles find them."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import platform
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from layouts.user_files import user_home
from runtime.interface import ConfigRejected, RuntimeFault

PREFIX, SUFFIX = "instance-", ".json"


class InstanceUnclear(RuntimeFault):
    """No instance runs, or several do and none was named."""

    exit_code = 3


@dataclass(frozen=True)
class Instance:
    """One running server."""

    url: str
    pid: int
    host: str
    started_at_s: float
    """Unix time."""
    birth: int | None
    """When the process began, in clock ticks since boot: tells it from a later one with its pid. None: not known."""
    key_file: str | None = None
    """Where its operator key stands; None when it came from the environment."""

    def serves(self, url: str) -> bool:
        """Whether `url` is this instance's, under whatever name of this machine."""
        ours, theirs = urlsplit(self.url), urlsplit(url)
        same_host = ours.hostname == theirs.hostname or is_loopback(theirs.hostname or "")
        return same_host and ours.port == theirs.port

    @property
    def alive(self) -> bool:
        birth = birth_of(self.pid)
        if birth is None or self.birth is None:
            return _exists(self.pid)
        return birth == self.birth


def runtime_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Where instance files and the generated operator key stand; made with mode 0700.

    `ddtree` in the XDG runtime folder; where there is none (no login session) `run` in the state folder.
    """
    session = Path(env.get("XDG_RUNTIME_DIR", ""))
    if session.is_absolute() and os.access(session, os.W_OK | os.X_OK):
        folder = session / "ddtree"
    else:
        folder = user_home("state", env) / "run"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def register(folder: Path, url: str, key_file: Path | None) -> Path:
    """Write the file of this process and return its path; complete in the moment it appears."""
    pid = os.getpid()
    instance = Instance(
        url, pid, platform.node(), time.time(), birth_of(pid), str(key_file) if key_file else None
    )
    path = folder / f"{PREFIX}{pid}{SUFFIX}"
    draft = path.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(instance), file)
    draft.replace(path)
    return path


@contextlib.contextmanager
def registered(folder: Path, url: str, key_file: Path | None) -> Iterator[Path]:
    """Keep the file of this process for as long as the block runs."""
    path = register(folder, url, key_file)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def instances(folder: Path) -> tuple[Instance, ...]:
    """The instances that run, oldest first; files of processes that are gone are removed.

    A state folder may be shared between hosts: instances of another one are left alone and left out.
    """
    found = []
    for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
        instance = _read(path)
        if instance is None or (instance.host == platform.node() and not instance.alive):
            with contextlib.suppress(OSError):
                path.unlink()
        elif instance.host == platform.node():
            found.append(instance)
    return tuple(sorted(found, key=lambda each: each.started_at_s))


def the_instance(folder: Path) -> Instance:
    """The one running instance; raises InstanceUnclear where there is none, or naming all where there are several."""
    found = instances(folder)
    if not found:
        raise InstanceUnclear(
            f"no running instance was found in {folder}; start one with 'ddtree serve' or name one with --url"
        )
    if len(found) > 1:
        names = ", ".join(f"{each.url} (pid {each.pid})" for each in found)
        raise InstanceUnclear(f"{len(found)} instances run: {names}; name one with --url")
    return found[0]


def read_key_file(path: Path) -> str:
    """Return the key in a file; raises ConfigRejected where others may read it too, or it is no key file."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise ConfigRejected(
                    f"key file {path} may be read by others; remove it and have a new one generated"
                )
            text = file.read(4096).decode("utf-8").strip()
    except OSError as error:
        raise ConfigRejected(f"key file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        text = ""
    if not text:
        raise ConfigRejected(f"key file {path} holds no key; remove it and have a new one generated")
    return text


def is_loopback(host: str) -> bool:
    """Whether a host name or address, with or without brackets, is this machine only."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def birth_of(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None where the system does not tell or there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    # A zombie has ended and only waits to be collected.
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _exists(pid: int) -> bool:
    if Path("/proc/self").exists():
        return birth_of(pid) is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _read(path: Path) -> Instance | None:
    """The instance a file describes; None where it describes none, or others may have written it."""
    try:
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return None
        return Instance(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, RecursionError, TypeError, ValueError):
        return None
