"""Attention over KV slots: each sequence's rows see its committed prefix and, in the new rows, what a mask allows.

Rows of all sequences are one ragged batch: linear layers run over all of them at once, attention runs per sequence on
a view of its slots. Prefill and verify are the same call; only the mask differs (causal, or the tree's ancestors).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kv_cache import Pool


@dataclass(frozen=True)
class Segment:
    """The new rows of one sequence.

    `mask` is bool `[rows, rows]`, True = may attend, each row sees itself; `positions [rows]` are absolute. New keys
    are stored at slots `slot_start + prefix_len ..` in row order.
    """

    slot_start: int
    prefix_len: int
    rows: int
    mask: Tensor
    positions: Tensor


@dataclass(frozen=True)
class Step:
    """One forward pass over a ragged batch, passed through the model to the attention function."""

    pool: Pool
    segments: tuple[Segment, ...]
    padded: Padded | None = None
    """Set where the batch runs as one padded call instead of sequence by sequence."""
    _biases: dict[tuple[int, int | None, int], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, pool: Pool, segments: Seq[Segment]) -> Step:
        """A step over `segments`: on a GPU several sequences run padded, on a CPU one after the other."""
        device = pool.device
        together = device.type != "cpu" and len(segments) > 1
        return cls(pool, tuple(segments), pad_segments(segments, device) if together else None)

    def bias(self, index: int, groups: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Additive mask `[groups * rows, prefix + rows]` of segment `index`, made once a step; None = sees all."""
        segment = self.segments[index]
        key = (index, window, groups)
        if key not in self._biases:
            self._biases[key] = _bias(segment, groups, window, dtype)
        bias = self._biases[key]
        return bias if bias.numel() else None


def _bias(segment: Segment, groups: int, window: int | None, dtype: torch.dtype) -> Tensor:
    rows, prefix, device = segment.rows, segment.prefix_len, segment.mask.device
    narrow = window is not None and prefix + rows > window
    if rows == 1 and not narrow:
        return torch.empty(0, dtype=dtype, device=device)
    allowed = torch.ones(rows, prefix + rows, dtype=torch.bool, device=device)
    allowed[:, prefix:] = segment.mask
    if narrow:
        key_positions = torch.cat((torch.arange(prefix, device=device), segment.positions))
        allowed &= segment.positions.unsqueeze(1) - key_positions < window
    bias = torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(~allowed, -torch.inf)
    return bias.repeat(groups, 1)


def packed_attention(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float
) -> Tensor:
    """Grouped-query attention with the query heads of one KV head packed into its rows.

    `queries [heads, rows, dim]`, `keys` and `values [kv_heads, length, dim]`, `bias [groups * rows, length]`.
    """
    heads, rows, dim = queries.shape
    packed = queries.reshape(keys.shape[0], heads // keys.shape[0] * rows, dim)
    if queries.device.type == "cpu" and packed.shape[1] <= 256:
        # For the few rows of a tree three plain products beat torch's fused CPU kernel.
        scores = torch.bmm(packed, keys.transpose(1, 2)).mul_(scale)
        if bias is not None:
            scores += bias
        out = torch.bmm(scores.softmax(-1), values)
    else:
        out = F.scaled_dot_product_attention(
            packed.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), attn_mask=bias, scale=scale
        )
    return out.reshape(heads, rows, dim)


def attend_slots(
    step: Step,
    layer: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Stores the new keys and values and attends; queries `[heads, rows, dim]`, others `[kv_heads, rows, dim]`."""
    if step.padded is not None:
        return _attend_padded(step, step.padded, layer, queries, keys, values, scale, window)
    groups = queries.shape[0] // keys.shape[0]
    outputs: list[Tensor] = []
    row = 0
    for index, segment in enumerate(step.segments):
        here = slice(row, row + segment.rows)
        row += segment.rows
        step.pool.write(layer, segment.slot_start + segment.prefix_len, keys[:, here], values[:, here])
        seen_keys, seen_values = step.pool.view(layer, segment.slot_start, segment.prefix_len + segment.rows)
        bias = step.bias(index, groups, window, queries.dtype)
        outputs.append(packed_attention(queries[:, here], seen_keys, seen_values, bias, scale))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


@dataclass(frozen=True)
class Padded:
    """Index tensors that turn a ragged batch into a padded one, so that a GPU gets few large calls.

    `rows [batch, most rows]` row numbers, `slots [batch, most slots]`, `new_slots [rows]` where new keys go,
    `back [rows]` places in the padded output, `allowed [batch, most rows, most slots]`; `row_positions`
    `[batch, most rows]` and `slot_positions [batch, most slots]` are absolute.
    """

    rows: Tensor
    slots: Tensor
    new_slots: Tensor
    back: Tensor
    allowed: Tensor
    row_positions: Tensor
    slot_positions: Tensor


def pad_segments(segments: Seq[Segment], device: torch.device) -> Padded:
    """Index tensors of a ragged batch. Padding rows repeat row 0 of the batch, padding slots are masked out.

    Padding slots repeat the first slot of their sequence: it has been written, and a masked value must still be finite.
    """
    most_rows = max(segment.rows for segment in segments)
    most_slots = max(segment.prefix_len + segment.rows for segment in segments)
    rows = torch.zeros(len(segments), most_rows, dtype=torch.int64)
    slots = torch.tensor([segment.slot_start for segment in segments]).unsqueeze(1).repeat(1, most_slots)
    allowed = torch.zeros(len(segments), most_rows, most_slots, dtype=torch.bool, device=device)
    row_positions = torch.zeros(len(segments), most_rows, dtype=torch.int64, device=device)
    slot_positions = torch.zeros(len(segments), most_slots, dtype=torch.int64, device=device)
    new_slots, back = [], []
    first = 0
    for i, segment in enumerate(segments):
        length = segment.prefix_len + segment.rows
        rows[i, : segment.rows] = torch.arange(first, first + segment.rows)
        slots[i, :length] = torch.arange(segment.slot_start, segment.slot_start + length)
        new_slots.append(slots[i, segment.prefix_len : length])
        back.append(torch.arange(i * most_rows, i * most_rows + segment.rows))
        allowed[i, :, : max(segment.prefix_len, 1)] = True
        allowed[i, : segment.rows, segment.prefix_len : length] = segment.mask
        row_positions[i, : segment.rows] = segment.positions
        slot_positions[i, : segment.prefix_len] = torch.arange(segment.prefix_len, device=device)
        slot_positions[i, segment.prefix_len : length] = segment.positions
        first += segment.rows
    return Padded(
        rows.to(device),
        slots.to(device),
        torch.cat(new_slots).to(device),
        torch.cat(back).to(device),
        allowed,
        row_positions,
        slot_positions,
    )


def _attend_padded(
    step: Step,
    padded: Padded,
    layer: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """`attend_slots` by one gathered, padded attention over all sequences."""
    pool = step.pool
    pool.keys[layer][:, padded.new_slots] = keys
    pool.values[layer][:, padded.new_slots] = values
    batch, rows = padded.rows.shape
    heads, _, dim = queries.shape
    kv_heads = keys.shape[0]
    packed = queries[:, padded.rows].reshape(kv_heads, heads // kv_heads, batch, rows, dim)
    packed = packed.permute(2, 0, 1, 3, 4).reshape(batch, kv_heads, -1, dim)
    seen_keys = pool.keys[layer][:, padded.slots].transpose(0, 1)
    seen_values = pool.values[layer][:, padded.slots].transpose(0, 1)
    allowed = padded.allowed
    if window is not None and padded.slots.shape[1] > window:
        allowed = allowed & (padded.row_positions.unsqueeze(2) - padded.slot_positions.unsqueeze(1) < window)
    mask = allowed.repeat(1, heads // kv_heads, 1).unsqueeze(1)
    out = F.scaled_dot_product_attention(packed, seen_keys, seen_values, attn_mask=mask, scale=scale)
    out = out.reshape(batch, kv_heads, heads // kv_heads, rows, dim).permute(1, 2, 0, 3, 4)
    return out.reshape(heads, batch * rows, dim)[:, padded.back]


def full_mask(rows: int, device: torch.device) -> Tensor:
    """Mask of a draft block: every row sees every row."""
    return torch.ones(rows, rows, dtype=torch.bool, device=device)


def causal_mask(rows: int, device: torch.device) -> Tensor:
    """Mask of consecutive tokens: each row sees itself and the rows before it."""
    return full_mask(rows, device).tril()
