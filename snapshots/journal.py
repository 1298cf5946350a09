"""Several files replaced as one: after a crash at any moment either all of them are as before or all are as wanted.

Originals and wanted contents are first written and synced in a folder of the journal; renaming that folder to `active`
is the moment of decision. From there on the files are written one by one, each beside its target and renamed; what a
crash leaves unfinished is finished by `recover`, or rolled back where writing had failed.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ACTIVE, DRAFT, BACK = "active", "draft", "back"
KEPT = 10
"""Finished journals that stay, so that the files replaced can be had again by hand."""
LOCK_SECONDS = 10.0


class RestoreRefused(Exception):
    """Files are not replaced, and why; nothing was touched."""

    exit_code = 3


class RestoreFailed(Exception):
    """Files could not be written; they are as before."""

    exit_code = 1


@dataclass(frozen=True)
class FileWrite:
    """One file to be as it is wanted."""

    path: str
    """Relative to the root folder."""
    content: bytes | None
    """None: the file is to be gone."""
    mode: int = 0o644


@dataclass(frozen=True)
class _Entry:
    """One file in the manifest; a hash is None where there is no file."""

    path: str
    old_sha256: str | None
    old_mode: int
    new_sha256: str | None
    new_mode: int


class Journal:
    """The journal in one folder of the user's state."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or _default_folder()

    def replace(self, root: Path, writes: tuple[FileWrite, ...]) -> Path:
        """Makes all files under `root` as wanted; returns the folder that keeps the replaced ones.

        Raises:
            RestoreRefused: a target is no plain file inside `root`, or another process is at it.
            RestoreFailed: a file could not be written (disk full, no permission); all are as before.
        """
        root = root.resolve()
        for write in writes:
            check_target(root, write.path)
        with self._locked():
            self._recover()
            try:
                self._prepare(root, writes)
            except OSError as error:
                shutil.rmtree(self.folder / DRAFT, ignore_errors=True)
                raise RestoreFailed(f"nothing was restored: {_words(error)}") from None
            try:
                self._apply(forward=True)
            except OSError as error:
                self._back(error)
            return self._finish()

    def recover(self) -> str | None:
        """Finishes or rolls back what a crash left; one line on what was done, None if there was nothing.

        Raises:
            RestoreRefused: another process is at it.
            RestoreFailed: it still cannot be written.
        """
        if not any((self.folder / name).exists() for name in (ACTIVE, DRAFT)):
            return None
        with self._locked():
            return self._recover()

    def _recover(self) -> str | None:
        shutil.rmtree(self.folder / DRAFT, ignore_errors=True)
        if not (self.folder / ACTIVE).exists():
            return None
        forward = not (self.folder / ACTIVE / BACK).exists()
        root, entries = self._manifest()
        try:
            self._apply(forward)
        except OSError as error:
            raise RestoreFailed(
                f"an interrupted restore in {root} is not finished: {_words(error)}; free it and run ddtree again"
            ) from None
        self._finish()
        done = "finished" if forward else "rolled back"
        return f"an interrupted restore of {len(entries)} files in {root} was {done}"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the journal's lock, which the kernel releases when a process dies."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        end = time.monotonic() + LOCK_SECONDS
        with open(self.folder / "lock", "wb") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise RestoreRefused(
                            "another ddtree restores files on this host; wait until it is done"
                        ) from None
                    time.sleep(0.05)
            yield

    def _prepare(self, root: Path, writes: tuple[FileWrite, ...]) -> None:
        draft = self.folder / DRAFT
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        entries = [self._saved(draft, number, root, write) for number, write in enumerate(writes)]
        manifest = {"root": str(root), "files": [asdict(entry) for entry in entries]}
        _store(draft / "manifest.json", json.dumps(manifest, indent=1).encode())
        _sync_folder(draft)
        os.rename(draft, self.folder / ACTIVE)
        _sync_folder(self.folder)

    def _saved(self, draft: Path, number: int, root: Path, write: FileWrite) -> _Entry:
        """Stores what one target holds and what it is to hold."""
        target = root / write.path
        old, old_mode = (
            (target.read_bytes(), target.stat().st_mode & 0o7777) if target.exists() else (None, 0)
        )
        for name, content in ((f"old-{number}", old), (f"new-{number}", write.content)):
            if content is not None:
                _store(draft / name, content)
        return _Entry(write.path, _digest(old), old_mode, _digest(write.content), write.mode & 0o777)

    def _manifest(self) -> tuple[Path, tuple[_Entry, ...]]:
        try:
            read = json.loads((self.folder / ACTIVE / "manifest.json").read_bytes())
            root = Path(read["root"])
            entries = tuple(_Entry(**each) for each in read["files"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RestoreFailed(
                f"the journal {self.folder / ACTIVE} cannot be read: {_words(error)}"
            ) from None
        for entry in entries:
            check_target(root, entry.path)
        return root, entries

    def _apply(self, forward: bool) -> None:
        """Brings every file to its wanted state, or to the one before; may be run again."""
        root, entries = self._manifest()
        for number, entry in enumerate(entries):
            wanted = entry.new_sha256 if forward else entry.old_sha256
            mode = entry.new_mode if forward else entry.old_mode
            content = None
            if wanted is not None:
                content = (self.folder / ACTIVE / f"{'new' if forward else 'old'}-{number}").read_bytes()
            _put(root / entry.path, content, mode)

    def _back(self, error: OSError) -> None:
        """Undoes what was written; the journal stays for `recover` if even that fails."""
        try:
            (self.folder / ACTIVE / BACK).touch()
            self._apply(forward=False)
        except OSError as worse:
            raise RestoreFailed(
                f"restoring stopped half-way: {_words(error)}; going back failed too: {_words(worse)};"
                " the next ddtree start tries again"
            ) from None
        self._finish()
        raise RestoreFailed(f"nothing was restored, the files are as before: {_words(error)}") from None

    def _finish(self) -> Path:
        """Files the journal under its time; old ones leave."""
        kept = self.folder / time.strftime("%Y%m%d-%H%M%S")
        number = 1
        while kept.exists():
            kept = kept.with_name(f"{kept.name.partition('.')[0]}.{number}")
            number += 1
        os.rename(self.folder / ACTIVE, kept)
        _sync_folder(self.folder)
        done = sorted(each for each in self.folder.iterdir() if each.is_dir() and each.name[0].isdigit())
        for old in done[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        return kept


def check_target(root: Path, path: str) -> None:
    """A target lies inside `root`, no part of its path is a link, and it is a plain file or nothing.

    Raises:
        RestoreRefused: it is not so.
    """
    parts = path.split("/")
    if path.startswith("/") or "\0" in path or not {"", ".", ".."}.isdisjoint(parts):
        raise RestoreRefused(f"{path!r} is not a path inside {root}")
    here = root
    for part in parts:
        here = here / part
        if here.is_symlink():
            raise RestoreRefused(f"{here} is a symbolic link; files are restored through none")
    if here.exists() and not here.is_file():
        raise RestoreRefused(f"{here} is not a plain file")
    if any(parent.exists() and not parent.is_dir() for parent in here.parents):
        raise RestoreRefused(f"{here} lies below something that is no folder")


def _put(target: Path, content: bytes | None, mode: int) -> None:
    """Brings one file into its state in one step, and removes bytecode made from another."""
    draft = target.with_name(f".{target.name}.ddtree-restore")
    if _is_as(target, content, mode):
        pass  # also after writing it has failed, which going back must not do again
    elif content is None:
        target.unlink()
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        owner = _owner(target if target.exists() else target.parent)
        try:
            _store(draft, content)
            os.chmod(draft, mode)
            if owner != _owner(draft):
                os.chown(draft, *owner)
            os.replace(draft, target)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise
    if draft.is_file():
        draft.unlink()
    with contextlib.suppress(FileNotFoundError):
        _sync_folder(target.parent)
    if target.suffix == ".py":
        for stale in (target.parent / "__pycache__").glob(f"{glob.escape(target.stem)}.*.pyc"):
            stale.unlink(missing_ok=True)


def _is_as(target: Path, content: bytes | None, mode: int) -> bool:
    if not target.exists():
        return content is None
    return content == target.read_bytes() and mode == target.stat().st_mode & 0o7777


def _store(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _owner(path: Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_uid, state.st_gid


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(content: bytes | None) -> str | None:
    return hashlib.sha256(content).hexdigest() if content is not None else None


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _default_folder() -> Path:
    home = os.environ.get("XDG_STATE_HOME", "").strip()
    return Path(home or Path.home() / ".local/state") / "ddtree" / "restore"
