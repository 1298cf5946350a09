"""Service units of the host: those the operator names, and running ones that serve with ddtree or SGLang.

What is captured has its secrets marked out; what is written back takes the live file's values for them.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from snapshots.content import REDACTED, UnitFile
from snapshots.secrets import SecretMissing, fill, redact

SERVES = re.compile(
    r"\bddtree(?:\.pex)?\s+serve\b|-m\s+console\s+serve\b|\bsglang[. ](?:launch_server|serve)\b"
    r"|-m\s+sglang\.launch_server\b"
)
SUFFIXES = (".service", ".socket", ".timer", ".target", ".slice", ".path", ".mount")
SYSTEMCTL_SECONDS = 5.0
MAX_BYTES = 1 << 20


class UnitRefused(Exception):
    """A unit cannot be captured or restored; the text says which and why."""

    exit_code = 3


class UnitNotFound(UnitRefused):
    """The operator named a unit that this host does not have."""

    exit_code = 2


def unit_folders() -> tuple[Path, ...]:
    """Where unit files lie that an administrator or a user wrote."""
    config = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    home = config if config.is_absolute() else Path.home() / ".config"
    return home / "systemd/user", Path("/etc/systemd/system"), Path("/etc/systemd/user")


def capture(names: Iterable[str] = (), *, running: bool = True) -> tuple[UnitFile, ...]:
    """Unit files with their drop-ins, each once, secrets marked out.

    Args:
        names: units as systemctl names them, or paths of unit files.
        running: also those units that run now and serve with ddtree or SGLang.

    Raises:
        UnitNotFound: a named unit does not exist here.
    """
    files: dict[str, Path] = {}
    for name in names:
        for path in _named(name):
            files.setdefault(str(path), path)
    if running:
        for path in _running():
            files.setdefault(str(path), path)
    units = (_captured(path) for path in files.values())
    return tuple(unit for unit in units if unit is not None)


def _named(name: str) -> tuple[Path, ...]:
    if "/" in name:
        path = Path(name).expanduser().absolute()
        if not path.is_file():
            raise UnitNotFound(f"unit {name!r}: no such file")
        return (path,)
    full = name if name.endswith(SUFFIXES) else f"{name}.service"
    if full.startswith("-") or not re.fullmatch(r"[A-Za-z0-9:_.@\\-]+", full):
        raise UnitNotFound(f"unit {name!r}: not a unit's name; give it as systemctl shows it, or its path")
    told = [path for scope in _scopes() for unit in _show(scope, full) for path in unit.files]
    if told:
        return tuple(told)
    for folder in unit_folders():
        if (folder / full).is_file():
            return folder / full, *sorted((folder / f"{full}.d").glob("*.conf"))
    looked = ", ".join(map(str, unit_folders()))
    raise UnitNotFound(
        f"unit {name!r}: systemd knows none of that name and {looked} have none; give its path"
    )


def _running() -> Iterator[Path]:
    for scope in _scopes():
        for unit in _show(scope, "*", "--type=service", "--state=running"):
            if SERVES.search(unit.command):
                yield from unit.files


@dataclass(frozen=True)
class _Unit:
    command: str
    files: tuple[Path, ...]


def _scopes() -> tuple[tuple[str, ...], ...]:
    return ((), ("--user",)) if shutil.which("systemctl") else ()


def _show(scope: tuple[str, ...], pattern: str, *options: str) -> list[_Unit]:
    """Units as systemctl shows them, with a file each; none where no systemd answers."""
    wanted = "--property=Id,FragmentPath,DropInPaths,ExecStart"
    command = ["systemctl", *scope, "--no-pager", "show", wanted, *options, "--", pattern]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SYSTEMCTL_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return []
    units: list[_Unit] = []
    for block in done.stdout.decode("utf-8", "replace").split("\n\n"):
        told = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        paths = [Path(each) for each in (told.get("FragmentPath", ""), *told.get("DropInPaths", "").split())]
        files = tuple(path for path in paths if path.is_absolute() and path.is_file())
        if files:
            units.append(_Unit(told.get("ExecStart", ""), files))
    return units


def _captured(path: Path) -> UnitFile | None:
    """A unit file as it is stored; None for one that cannot be read or is far too large for a unit."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError:
        return None
    if len(content) > MAX_BYTES:
        return None
    return UnitFile(name=_name(path), path=str(path), content=redact(content.decode("utf-8", "replace")))


def _name(path: Path) -> str:
    """A unit's name; a drop-in under its unit's, as in "ddtree.service.d/override.conf"."""
    return f"{path.parent.name}/{path.name}" if path.parent.name.endswith(".d") else path.name


@dataclass(frozen=True)
class UnitChange:
    """What restoring one unit file would do."""

    name: str
    path: str
    diff: str
    """From the live file to the stored one, secrets marked out in both; empty where they are the same."""
    refused: str = ""
    """Why it cannot be written; empty if it can."""

    @property
    def is_needed(self) -> bool:
        return bool(self.diff)


def changes(units: Iterable[UnitFile]) -> tuple[UnitChange, ...]:
    """What restoring stored units would change on this host; nothing is touched."""
    found: list[UnitChange] = []
    for unit in units:
        live = _live(Path(unit.path))
        before = redact(live or "").splitlines(keepends=True)
        lines = difflib.unified_diff(
            before,
            unit.content.splitlines(keepends=True),
            fromfile=f"{unit.path} (live)" if live is not None else "/dev/null",
            tofile=f"{unit.path} (snapshot)",
        )
        refused = ""
        try:
            _restored(unit)
        except (UnitRefused, SecretMissing) as error:
            refused = str(error)
        found.append(UnitChange(unit.name, unit.path, "".join(lines), refused))
    return tuple(found)


def restore(units: Iterable[UnitFile], dry_run: bool = False) -> tuple[str, ...]:
    """Writes stored units over the live ones, each in one step; returns the paths written or to be written.

    A value that was marked out is taken from the live file. Nothing is written unless all can be.

    Raises:
        UnitRefused, SecretMissing: a unit cannot be restored; none was touched.
    """
    contents = {unit.path: text for unit in units if (text := _restored(unit)) != _live(Path(unit.path))}
    if not dry_run:
        for path, text in contents.items():
            _write(Path(path), text)
    return tuple(contents)


def _restored(unit: UnitFile) -> str:
    """The text to write for a stored unit."""
    path = Path(unit.path)
    _check_target(path, unit.name)
    if REDACTED not in unit.content:
        return unit.content
    text = fill(unit.content, _live(path) or "", unit.path)
    if REDACTED in text:
        raise UnitRefused(
            f"{unit.path}: the live file itself has a redaction mark; put the value there first"
        )
    return text


def _check_target(path: Path, name: str) -> None:
    """A target is a unit file by its name, where units lie or where one is already, and no link."""
    is_unit = path.suffix in SUFFIXES or (path.suffix == ".conf" and path.parent.name.endswith(".d"))
    if not path.is_absolute() or ".." in path.parts or not is_unit:
        raise UnitRefused(f"unit {name}: {path} is not the path of a unit file; restore it by hand")
    if path.is_symlink():
        raise UnitRefused(f"unit {name}: {path} is a symbolic link; restore it by hand")
    if not path.exists() and not any(path.is_relative_to(folder) for folder in unit_folders()):
        raise UnitRefused(f"unit {name}: {path} does not exist and lies in no folder of units")


def _live(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return None


def _write(path: Path, text: str) -> None:
    """Replaces a file in one step, keeping its mode and owner."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".draft")
    try:
        with open(handle, "wb") as file:
            file.write(text.encode("utf-8", "surrogateescape"))
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            state = path.stat()
            os.chmod(draft, stat.S_IMODE(state.st_mode))
            if (state.st_uid, state.st_gid) != (os.geteuid(), os.getegid()):
                os.chown(draft, state.st_uid, state.st_gid)
        else:
            os.chmod(draft, 0o644)
        os.replace(draft, path)
    except OSError:
        os.unlink(draft)
        raise
