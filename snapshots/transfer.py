"""One snapshot as one file, to be handed on and taken in elsewhere.

The file is a plain tar archive: the snapshot's files and `snapshot.json`. What comes in is checked and is foreign: its
patches and units are shown, and restored only where the operator trusts its commit.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
import tempfile
from pathlib import Path

from snapshots.codec import Unreadable, from_files
from snapshots.content import NoteRefused, checked_label, checked_note
from snapshots.git import StoreFault, StoreRefused
from snapshots.message import Entry
from snapshots.store import Store

ABOUT = "snapshot.json"
SCHEMA = 1
MAX_FILES = 20_000
MAX_BYTES = 512 << 20


def export(store: Store, name: str, path: Path, overwrite: bool = False) -> Entry:
    """Write the snapshot called `name` to `path`; an existing file is kept unless `overwrite`."""
    entry = store.entry(name)
    files = store.files(entry.commit)
    about = {
        "schema": SCHEMA,
        "id": entry.id,
        "commit": entry.commit,
        "label": entry.label,
        "note": entry.note,
        "annotation": entry.annotation,
        "taken_at_s": entry.time_s,
    }
    files = {ABOUT: json.dumps(about, indent=2).encode() + b"\n", **files}
    if path.exists() and not overwrite:
        raise StoreRefused(f"{path} exists; choose another name or use --force")
    try:
        _write(path, files, int(entry.time_s))
    except OSError as error:
        raise StoreFault(f"{path} cannot be written: {error.strerror}") from None
    return entry


def take_in(store: Store, path: Path) -> Entry:
    """Commit the snapshot in the file `path` as a foreign one.

    Raises:
        Unreadable: the file holds no snapshot, or one that is damaged.
    """
    files = _read(path)
    try:
        about = json.loads(files.pop(ABOUT, b"{}"))
        snapshot = from_files(files)
        label, note = checked_label(str(about.get("label", ""))), checked_note(str(about.get("note", "")))
        origin = f"{str(about['commit'])[:64]} {snapshot.host.name}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, NoteRefused) as error:
        raise Unreadable(f"{path} holds no snapshot: {' '.join(str(error).split())}") from None
    entry = store.save(
        snapshot.model_copy(update={"label": label, "note": note}), "import", {"Origin": origin}
    )
    annotation = str(about.get("annotation") or "")
    return store.note(entry.commit, annotation) if annotation else entry


def _write(path: Path, files: dict[str, bytes], time_s: int) -> None:
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".draft")
    try:
        with os.fdopen(handle, "wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size, entry.mtime, entry.mode = len(content), time_s, 0o644
                archive.addfile(entry, io.BytesIO(content))
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def _read(path: Path) -> dict[str, bytes]:
    """The plain files of an archive; nothing is ever unpacked to a file system."""
    files: dict[str, bytes] = {}
    left = MAX_BYTES
    try:
        with tarfile.open(path, "r:") as archive:
            for entry in archive:
                if not entry.isfile():
                    continue
                left -= entry.size
                if left < 0 or len(files) >= MAX_FILES:
                    raise Unreadable(f"{path} is too large for a snapshot; at most {MAX_BYTES >> 20} MiB")
                content = archive.extractfile(entry)
                files[entry.name.removeprefix("./")] = content.read() if content else b""
    except OSError as error:
        raise StoreFault(f"{path} cannot be read: {error.strerror or 'it is no archive'}") from None
    except (tarfile.TarError, EOFError):
        raise Unreadable(f"{path} is no archive of 'ddtree snapshot export'") from None
    return files
