"""SHA-256 of files, remembered by path, size and times, so that gigabytes are read once and not at every snapshot."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

from layouts.user_files import replace_text

CHUNK_BYTES = 8 << 20
KEPT = 50_000
"""Most files that are remembered; the ones asked for last stay."""


class HashCache:
    """Digests of one file on disk. Load, ask, `save`; two processes at once cost a second reading, nothing more.

    A file counts as unchanged while its device, inode, size, modification and change times are the same.
    """

    def __init__(self, file: Path | None = None) -> None:
        """`file`: where digests are remembered; None for the user's cache folder."""
        self._file = file or _default_file()
        self._known: dict[str, list[object]] = {}
        self._changed = False
        with contextlib.suppress(OSError, ValueError, RecursionError):
            known = json.loads(self._file.read_text(encoding="utf-8"))
            self._known = known if isinstance(known, dict) else {}

    def sha256(self, path: str | Path, deadline_s: float | None = None) -> str | None:
        """Lower-case hexadecimal digest; None if it is not known and `deadline_s` (monotonic) passes first.

        Raises:
            OSError: the file cannot be read.
        """
        state = os.stat(path)
        times = (state.st_mtime_ns, state.st_ctime_ns)
        stamp: list[object] = [state.st_dev, state.st_ino, state.st_size, *times]
        key = os.path.abspath(path)
        entry = self._known.get(key)
        if isinstance(entry, list) and entry[:-1] == stamp and isinstance(entry[-1], str):
            return entry[-1]
        digest = _digest(Path(path), deadline_s)
        if digest is not None and time.time_ns() - max(times) > 1_000_000_000:
            # A file written within the last second may change again without its times showing it.
            self._known.pop(key, None)
            self._known[key] = [*stamp, digest]
            self._changed = True
        return digest

    def save(self) -> None:
        """Remembers for the next time; a cache that cannot be written is no error."""
        if not self._changed:
            return
        kept = dict(list(self._known.items())[-KEPT:])
        with contextlib.suppress(OSError):
            replace_text(self._file, json.dumps(kept))
        self._changed = False


def _digest(path: Path, deadline_s: float | None) -> str | None:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            if deadline_s is not None and len(chunk) == CHUNK_BYTES and time.monotonic() > deadline_s:
                return None
    return digest.hexdigest()


def _default_file() -> Path:
    import platformdirs

    return platformdirs.user_cache_path("ddtree") / "hashes.json"
