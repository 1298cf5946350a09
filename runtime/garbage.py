"""Garbage of reference cycles: when it is looked for, and what is kept out of that. Imports no torch by itself."""

from __future__ import annotations

import contextlib
import ctypes
import gc


def keep_out() -> None:
    """Keeps all that is loaded out of later collections: one through it would stop every stream for 0.3 s.

    A full collection waits until a quarter as many objects have come as the last one left. The collection after the
    freeze leaves none, so that garbage does not pile up to a quarter of what is kept out.
    """
    gc.collect()
    gc.freeze()
    gc.collect()


def collect() -> None:
    """Gives back what an engine left in reference cycles, to the system too, and on a GPU to the driver.

    What a process keeps out of later collections once its engine is up is looked through as well, and kept out again.
    """
    import torch

    kept_out = gc.get_freeze_count() > 0
    gc.unfreeze()
    if kept_out:
        keep_out()
    else:
        gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # other C libraries than glibc do it by themselves
        ctypes.CDLL(None).malloc_trim(0)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
