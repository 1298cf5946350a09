"""Attention over slots: the padded batch of a GPU against one sequence after the other."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CPU

from runtime.attention import Segment, Step, attend_slots, pad_segments
from runtime.kv_cache import Geometry, Pool


@pytest.mark.parametrize("window", [None, 6])
def test_padded_attention_equals_attention_sequence_by_sequence(window: int | None) -> None:
    """Unwritten slots hold anything, so they are filled with NaN here."""
    geometry = Geometry(layers=2, kv_heads=2, head_dim=8, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    plan = [(40, 0, 5), (60, 30, 1), (100, 7, 9)]
    segments = []
    for at, prefix, rows in plan:
        mask = torch.rand(rows, rows, generator=generator).gt(0.5).tril() | torch.eye(rows, dtype=torch.bool)
        segments.append(Segment(at, prefix, rows, mask, prefix + torch.arange(rows)))
    total = sum(rows for _, _, rows in plan)
    queries = torch.randn(4, total, 8, generator=generator)
    keys, values = torch.randn(2, 2, total, 8, generator=generator)
    outputs, pools = [], []
    for padded in (False, True):
        pool = Pool(geometry, 160, CPU)
        pool.keys.fill_(float("nan"))
        pool.values.fill_(float("nan"))
        for at, prefix, _ in plan:
            written = torch.randn(2, 2, prefix, 8, generator=torch.Generator().manual_seed(at))
            pool.write(1, at, written[0], written[1])
        step = Step(pool, tuple(segments), pad_segments(segments, CPU) if padded else None)
        outputs.append(attend_slots(step, 1, queries, keys, values, 8**-0.5, window))
        pools.append(torch.stack((pool.keys, pool.values)))
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pools[1], pools[0], equal_nan=True, atol=0, rtol=0)
