"""Mutual exclusion between processes that use one store: a file lock that the kernel releases when its holder dies.

The lock is `flock` on a descriptor that the git commands of its holder inherit, so that nobody else begins while one of
them still writes; no ready-made lock hands its descriptor on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from snapshots.git import StoreFault, StoreRefused

WAIT_S = 30.0
POLL_S = 0.05


@dataclass(frozen=True)
class Held:
    """The lock, while it is ours."""

    descriptor: int
    after_a_failure: bool
    """Whether the holder before failed or died while it held it."""


@contextlib.contextmanager
def held(folder: Path, wait_s: float = WAIT_S) -> Iterator[Held]:
    """Hold the lock in `folder`, which is made.

    Raises:
        StoreRefused: another process held it for all of `wait_s`, named with its pid.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise StoreFault(f"{folder / 'lock'} cannot be made: {error.strerror}") from None
    try:
        _acquire(descriptor, folder, wait_s)
        after_a_failure = bool(os.pread(descriptor, 1, 0))
        with contextlib.suppress(OSError):
            os.pwrite(descriptor, f"{os.getpid():<10}\n".encode(), 0)
        yield Held(descriptor, after_a_failure)
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, folder: Path, wait_s: float) -> None:
    end = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise StoreFault(f"{folder / 'lock'} cannot be locked: {error.strerror}") from None
        if time.monotonic() >= end:
            pid = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise StoreRefused(
                f"another process (pid {pid}) has used the snapshot store {folder} for {wait_s:g} s; try again later"
            )
        time.sleep(POLL_S)
