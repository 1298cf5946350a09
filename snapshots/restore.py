"""Patched files of a snapshot put back into the installed packages, as one change.

Only into the same version of a package, only its own files inside site-packages, and only while no process of this
environment has the package loaded. `plan` looks and touches nothing; `run` writes through `snapshots.journal`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.site_packages import is_inside
from snapshots import installed
from snapshots.content import EnvironmentName, PackageState, PatchedFile, digest
from snapshots.hashes import HashCache
from snapshots.installed import Elsewhere, Installed
from snapshots.journal import FileWrite, Journal, RestoreFailed, RestoreRefused, check_target
from snapshots.originals import Originals
from snapshots.patches import examine

__all__ = [
    "FileWrite",
    "RestoreFailed",
    "RestorePlan",
    "RestoreRefused",
    "RestoreReport",
    "Restored",
    "plan",
    "plan_all",
    "recover",
    "run",
]


NO_SGLANG = (
    "it was patched in SGLang's own environment, and none is known here; set sglang_python to its Python"
)


@dataclass(frozen=True)
class Restored:
    """What becomes of one package."""

    package: str
    version: str | None
    """Installed now; None if it is not."""
    site_packages: Path | None = None
    """Where it is installed, links resolved."""
    environment: EnvironmentName = ""
    python: str = ""
    """Its interpreter; empty: this one."""
    writes: tuple[FileWrite, ...] = ()
    """Paths relative to `site_packages`."""
    refused: str = ""
    """Why its files cannot be restored; empty if they can or nothing is to be done."""
    note: str = ""
    """What an operator should know where nothing is refused."""


@dataclass(frozen=True)
class RestorePlan:
    """What restoring would do; nothing has been touched."""

    packages: tuple[Restored, ...]

    @property
    def writes(self) -> tuple[FileWrite, ...]:
        return tuple(write for package in self.packages for write in package.writes)

    @property
    def refused(self) -> tuple[str, ...]:
        return tuple(package.refused for package in self.packages if package.refused)

    @property
    def lines(self) -> tuple[str, ...]:
        """The plan in words, one line a file or remark."""
        told: list[str] = []
        for each in self.packages:
            told += [
                f"{'delete' if write.content is None else 'write'} {write.path}" for write in each.writes
            ]
            told += [text for text in (each.refused, each.note) if text]
        return tuple(told)


@dataclass(frozen=True)
class RestoreReport:
    """What was done, or would be."""

    written: tuple[str, ...]
    saved_in: Path | None
    """Folder that keeps the files that were replaced; None where nothing was written."""
    hashes: dict[str, str | None]
    """Path to the SHA-256 it has; None where the file is gone."""


def plan(
    packages: Iterable[PackageState],
    patches: Iterable[PatchedFile],
    *,
    site_packages: Path | None = None,
    originals: Originals | None = None,
    hashes: HashCache | None = None,
) -> RestorePlan:
    """How the installed packages get to the patch state that a snapshot holds.

    Files patched now that the snapshot has as their wheel's go back to the wheel's content.
    """
    wanted = tuple(patches)
    states = {state.package: state for state in packages}
    for patch in wanted:
        if patch.package not in states:
            states[patch.package] = PackageState(
                package=patch.package, version=patch.version, install="wheel"
            )
    now = examine(states, site_packages=site_packages, originals=originals, hashes=hashes)
    planned = []
    for state in states.values():
        theirs = tuple(each for each in wanted if each.package == state.package)
        ours = tuple(each for each in now.patches if each.package == state.package)
        planned.append(_planned(state, theirs, ours, installed.find(state.package, site_packages)))
    return RestorePlan(tuple(planned))


def plan_all(
    packages: Iterable[PackageState],
    patches: Iterable[PatchedFile],
    sglang: Elsewhere | None,
    *,
    originals: Originals | None = None,
) -> RestorePlan:
    """`plan` for the packages beside ddtree and for those in SGLang's own environment, which must be here."""
    states, wanted = tuple(packages), tuple(patches)
    names: tuple[EnvironmentName, ...] = ("", "sglang")
    planned: list[Restored] = []
    for name in names:
        theirs = [each for each in states if each.environment == name]
        files = [each for each in wanted if each.environment == name]
        if name and sglang is None:
            planned += [
                Restored(each, None, environment=name, refused=f"{each}: {NO_SGLANG}")
                for each in dict.fromkeys(each.package for each in files)
            ]
        elif theirs or files:
            site = sglang.site_packages if name and sglang is not None else None
            found = plan(theirs, files, site_packages=site, originals=originals)
            python = sglang.python if name and sglang is not None else ""
            planned += [replace(each, environment=name, python=python) for each in found.packages]
    return RestorePlan(tuple(planned))


def _planned(
    state: PackageState,
    wanted: tuple[PatchedFile, ...],
    now: tuple[PatchedFile, ...],
    package: Installed | None,
) -> Restored:
    name, version = state.package, package.version if package is not None else None
    if package is None and not wanted:
        gone = f"{name}: {state.version} in the snapshot, not installed here"
        return Restored(name, None, note="" if state.install == "absent" else gone)
    if package is None:
        return Restored(
            name, None, refused=f"{name}: not installed here; install {name}=={state.version} first"
        )
    if state.version is not None and state.version != package.version:
        taken = f"{name}: the snapshot was taken with {state.version}, {package.version} is installed"
        if not wanted:
            return Restored(name, version, note=f"{taken}; it had no patches")
        return Restored(
            name, version, refused=f"{taken}; its patches are for {state.version}: check whether still needed"
        )
    if "editable" in (state.install, package.install):
        described = f" at {state.describe}" if state.describe else ""
        return Restored(name, version, note=f"{name}: an editable install{described}; use git in its folder")
    before = {each.path: each for each in now}
    writes: list[FileWrite] = []
    try:
        for patch in wanted:
            current = before.pop(patch.path, None)
            write = _to_patch(patch, current)
            if write is not None:
                writes.append(write)
        writes += [_to_wheel(patch) for patch in before.values()]
        for write in writes:
            _check_owned(package, write.path)
    except RestoreRefused as refusal:
        return Restored(name, version, refused=f"{name} {version}: {refusal}")
    return Restored(name, version, package.site_packages.resolve(), writes=tuple(writes))


def _to_patch(patch: PatchedFile, current: PatchedFile | None) -> FileWrite | None:
    """What brings a file to the snapshot's state; None if it is in it."""
    if patch.kind == "missing":
        return None if current is not None and current.kind == "missing" else FileWrite(patch.path, None)
    if patch.content is None:
        raise RestoreRefused(f"{patch.path} was too large to be kept in the snapshot; copy it by hand")
    if patch.sha256 is not None and digest(patch.content) != patch.sha256:
        raise RestoreRefused(f"{patch.path}: the snapshot's content does not have the hash it names")
    if current is not None and current.sha256 == digest(patch.content) and current.mode == patch.mode:
        return None
    return FileWrite(patch.path, patch.content, patch.mode)


def _to_wheel(current: PatchedFile) -> FileWrite:
    """What brings a file that is patched now back to the wheel's."""
    if current.kind == "added":
        return FileWrite(current.path, None)
    if current.original is None:
        raise RestoreRefused(
            f"the original of {current.path} cannot be had (no wheel in reach, no earlier snapshot with it);"
            f" run: pip install --force-reinstall --no-deps {current.package}=={current.version}"
        )
    return FileWrite(current.path, current.original, current.mode)


def _check_owned(package: Installed, path: str) -> None:
    if not is_inside(path) or not package.owns(path):
        raise RestoreRefused(f"{path} is no file of this package inside site-packages")
    check_target(package.site_packages, path)


def run(plan: RestorePlan, dry_run: bool = False, *, journal: Journal | None = None) -> RestoreReport:
    """Writes what was planned, all or nothing, and reads it back.

    Raises:
        RestoreRefused: the plan is refused in part, or a process has a package loaded; nothing was touched.
        RestoreFailed: writing failed; the files are as before.
    """
    if plan.refused:
        raise RestoreRefused("; ".join(plan.refused))
    wanted = {
        each.site_packages / write.path: write
        for each in plan.packages
        for write in each.writes
        if each.site_packages is not None
    }
    paths = tuple(write.path for write in wanted.values())
    if dry_run or not paths:
        return RestoreReport(paths, None, {write.path: _hash(file) for file, write in wanted.items()})
    for each in plan.packages:
        package = installed.find(each.package, each.site_packages) if each.writes else None
        if package is not None:
            users = tuple(users_of(package))
            if users:
                raise RestoreRefused(
                    f"{each.package} is or may be loaded by {', '.join(users)}; stop it and roll back again"
                )
    root = Path(os.path.commonpath([each.site_packages for each in plan.packages if each.site_packages]))
    writes = (replace(write, path=str(file.relative_to(root))) for file, write in wanted.items())
    saved = (journal or Journal()).replace(root, tuple(writes))
    hashes = {file: _hash(file) for file in wanted}
    wrong = [
        write.path
        for file, write in wanted.items()
        if hashes[file] != (digest(write.content) if write.content is not None else None)
    ]
    if wrong:
        raise RestoreFailed(f"{', '.join(wrong)} changed again while restoring; the old files are in {saved}")
    return RestoreReport(paths, saved, {write.path: hashes[file] for file, write in wanted.items()})


def recover(journal: Journal | None = None) -> str | None:
    """Finishes or rolls back a restore that a crash interrupted; one line on it, None if there was none.

    Raises:
        RestoreRefused, RestoreFailed: it cannot be done now.
    """
    return (journal or Journal()).recover()


def users_of(package: Installed) -> Iterator[str]:
    """Processes that have the package loaded or, as Python of the same environment, may have; as "pid 7 (python x)".

    What is pure Python leaves no trace in a process's memory map, so every Python of a virtual environment counts, and
    elsewhere those with a library of the same site-packages; not the ones that started this process, and of this one
    the modules are known.
    """
    import psutil  # type: ignore[import-untyped]

    folders = [f"{package.site_packages.resolve()}/{top}/" for top in sorted(package.folders)]
    if any(_has_imported(folder) for folder in folders):
        yield f"this process (pid {os.getpid()})"
    site = f"{package.site_packages.resolve()}/"
    environment = _environment_folder(package.site_packages)
    is_virtual = environment is not None and (environment / "pyvenv.cfg").exists()
    starters = {each.pid for each in psutil.Process().parents()}
    for process in psutil.process_iter(["pid", "cmdline"]):
        if process.pid == os.getpid():
            continue
        maps = _mapped(process.pid)
        certain = any(path.startswith(folder) for path in maps for folder in folders)
        command = process.info["cmdline"] or []
        may = environment is not None and _runs_in(command, environment) and process.pid not in starters
        may = may and (is_virtual or any(path.startswith(site) for path in maps))
        if certain or may:
            yield f"pid {process.pid} ({' '.join(command)[:60] or 'unknown'})"


def _has_imported(folder: str) -> bool:
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return any(os.path.realpath(file).startswith(folder) for file in files if isinstance(file, str))


def _environment_folder(site_packages: Path) -> Path | None:
    """The virtual environment, or the prefix, that a site-packages folder belongs to."""
    for parent in site_packages.absolute().parents:
        if (parent / "bin" / "python").exists() or (parent / "bin" / "python3").exists():
            return parent
    return None


def _runs_in(command: list[str], environment: Path) -> bool:
    return bool(command) and command[0].startswith(f"{environment}/bin/python")


def _mapped(pid: int) -> set[str]:
    """Files in a process's memory map; empty where we may not look."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as maps:
            fields = (line.split(maxsplit=5) for line in maps)
            return {each[5].rstrip("\n") for each in fields if len(each) == 6 and each[5].startswith("/")}
    except OSError:
        return set()


def _hash(path: Path) -> str | None:
    try:
        return digest(path.read_bytes())
    except OSError:
        return None
