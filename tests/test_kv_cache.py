"""The slot allocator: extents first-fit, joined when freed, and leaks found."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CPU

from runtime.kv_cache import Geometry, KVCache


def test_slots_are_given_out_and_joined_without_a_gap() -> None:
    cache = KVCache(Geometry(1, 1, 2, torch.float32), None, 100, CPU)
    first, second, third = (cache.allocate(size) for size in (30, 30, 40))
    assert first and second and third and cache.allocate(1) is None
    cache.free(second)
    cache.check_integrity([first, third])
    assert cache.allocate(31) is None
    rest = cache.shrink(first, 10)
    cache.check_integrity([rest, third])
    assert cache.free_slots == 50 and cache.allocate(50) is not None
    with pytest.raises(ValueError, match="freed twice"):
        cache.free(rest)
        cache.free(rest)


def test_a_leaked_slot_is_found() -> None:
    cache = KVCache(Geometry(1, 1, 2, torch.float32), None, 100, CPU)
    held = cache.allocate(30)
    assert held is not None
    with pytest.raises(AssertionError, match="slots leak or overlap at slot 0"):
        cache.check_integrity([])
    cache.check_integrity([held])
