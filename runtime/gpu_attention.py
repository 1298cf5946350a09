"""Triton kernels of a forward pass over tree rows: rotation, KV slots, attention over prefix and tree.

Rows are those of `gpu_kernels.py`. Plain references are `runtime/fused.py` and `attention.py`. Rotated pairs stand side
by side, as `fused.FusedStack` lays the weights out at load.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.gpu_kernels import SCRATCH, begin


@triton.jit
def _rotated(x, cos, sin, position, norms, eps, NORM: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr):
    """Heads `x [HEADS, D]` of one token, normalised with gains `norms [HEADS, D]` and rotated (RoFormer, eq. 34).

    Tables are `[positions, D / 2]`.
    """
    if NORM:
        x = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None] * norms
    i = tl.arange(0, D // 2)
    c = tl.load(cos + position * (D // 2) + i)[None, :]
    s = tl.load(sin + position * (D // 2) + i)[None, :]
    even, odd = tl.split(tl.reshape(x, (HEADS, D // 2, 2)))
    return tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), (HEADS, D))


@triton.jit(do_not_specialize=["rows"])
def rotate_store_kernel(
    qkv, norms, cos, sin, keys, values, committed, slot_start, depths, size, rows, width, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Rotates queries in place and stores keys and values of row `r` at slot `slot_start + committed + r`.

    `qkv [batch * rows, heads + 2 * kv_heads, D]`, caches `[kv_heads, width, D]`; a row at or beyond `size` of its
    sequence goes to the last `SCRATCH` slots. Positions are `committed + depths [batch, rows]`. A program takes `BLOCK`
    heads of one row.
    """
    begin(PDL)
    row = tl.program_id(0)
    b, r = row // rows, row % rows
    start = tl.load(committed + b)
    position = start + tl.load(depths + row)
    slot = tl.where(r < tl.load(size + b), tl.load(slot_start + b) + start + r, width - SCRATCH + r % SCRATCH)
    head_stride = width.to(tl.int64) * D
    TURNED: tl.constexpr = HEADS + KV_HEADS
    h, d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    turned, here = (h < TURNED)[:, None], (h < TURNED + KV_HEADS)[:, None]
    spot = h[:, None] * D + d[None, :]
    base = qkv + row * (TURNED + KV_HEADS) * D
    raw = tl.load(base + spot, mask=here, other=0.0)
    gains = tl.load(norms + spot, mask=turned, other=0.0).to(tl.float32) if NORM else 0.0
    new = _rotated(raw.to(tl.float32), cos, sin, position, gains, eps, NORM, BLOCK, D).to(raw.dtype)
    tl.store(base + spot, new, mask=(h < HEADS)[:, None])
    place = slot * D + d[None, :]
    tl.store(keys + (h - HEADS)[:, None] * head_stride + place, new, mask=(h >= HEADS)[:, None] & turned)
    tl.store(values + (h - TURNED)[:, None] * head_stride + place, raw, mask=(h >= TURNED)[:, None] & here)


@triton.jit(do_not_specialize=["block"])
def context_store_kernel(
    context, norms, cos, sin, keys, values, committed, kept, slot_start, block, width, eps,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, KV_P2: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Stores the drafter's keys and values of newly committed tokens: `kept [batch]` of them end at `committed`.

    `context [batch * block, LAYERS * 2 * kv_heads * D]`, `norms [LAYERS, D]`, caches `[LAYERS, kv_heads, width, D]`.
    """
    begin(PDL)
    row, layer = tl.program_id(0), tl.program_id(1)
    b, at = row // block, row % block
    count = tl.load(kept + b)
    if at < count:
        position = tl.load(committed + b) - count + at
        slot = tl.load(slot_start + b) + position
        head_stride = width.to(tl.int64) * D
        h, d = tl.arange(0, KV_P2), tl.arange(0, D)
        mine = (h < KV_HEADS)[:, None]
        spot = h[:, None] * D + d[None, :]
        base = context + row * (LAYERS * 2 * KV_HEADS * D) + layer * (2 * KV_HEADS * D)
        raw = tl.load(base + spot, mask=mine, other=0.0)
        gains = tl.load(norms + layer * D + d).to(tl.float32)[None, :]
        new = _rotated(raw.to(tl.float32), cos, sin, position, gains, eps, True, KV_P2, D)
        place = (layer * KV_HEADS + h)[:, None] * head_stride + slot * D + d[None, :]
        tl.store(keys + place, new.to(raw.dtype), mask=mine)
        tl.store(values + place, tl.load(base + KV_HEADS * D + spot, mask=mine, other=0.0), mask=mine)


@triton.jit(do_not_specialize=["rows", "total_rows"])
def tree_attention_kernel(
    qkv, keys, values, bits, committed, size, slot_start, out, partial, lse, rows, width, total_rows, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, SPLITS: tl.constexpr, CAUSAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of all rows over the committed prefix and, by ancestor bits, over the rows of their own tree.

    The query heads of one KV head are packed into its rows. A prefix is cut into `SPLITS` ranges, read from the
    lengths on the device. `bits [batch, rows]` has bit j set where the row may see row j; `CAUSAL`: it sees those
    before it and itself. With one split the result goes to `out [rows, heads * D]`, else to
    `partial [SPLITS, rows, heads, D]` with `lse [SPLITS, rows, heads]`.
    """
    begin(PDL)
    b, kv_head, split = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS, tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    packed = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    r, head = packed // GROUP, kv_head * GROUP + packed % GROUP
    live = r < rows
    row = b * rows + r
    d = tl.arange(0, D)
    q = tl.load(qkv + row[:, None] * ((HEADS + 2 * KV_HEADS) * D) + head[:, None] * D + d[None, :],
                mask=live[:, None], other=0.0)  # fmt: skip
    word = tl.zeros((BLOCK_Q,), tl.int64) if CAUSAL else tl.load(bits + row, mask=live, other=0)
    length = tl.load(committed + b)
    seen = length + tl.load(size + b)
    chunk = tl.cdiv(tl.cdiv(seen, SPLITS), BLOCK_KV) * BLOCK_KV
    low = split * chunk
    high = tl.minimum(seen, low + chunk)
    first = kv_head.to(tl.int64) * width + tl.load(slot_start + b)
    most = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_Q,), tl.float32)
    total = tl.zeros((BLOCK_Q, D), tl.float32)
    for start in range(low, high, BLOCK_KV):
        p = start + tl.arange(0, BLOCK_KV)
        there = p < high
        spot = (first + p)[:, None] * D + d[None, :]
        k = tl.load(keys + spot, mask=there[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
        node = p - length
        if CAUSAL:
            sees = node[None, :] <= r[:, None]
        else:
            bit = (word[:, None] >> tl.maximum(node, 0).to(tl.int64)[None, :]) & 1
            sees = (node < 0)[None, :] | (bit == 1)
        scores = tl.where(sees & there[None, :], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - anchor[:, None])
        fade = tl.exp2(most - anchor)
        norm = norm * fade + tl.sum(weights, 1)
        v = tl.load(values + spot, mask=there[:, None], other=0.0)
        total = tl.dot(weights.to(v.dtype), v, total * fade[:, None], input_precision="ieee")
        most = higher
    divisor = tl.where(norm == 0.0, 1.0, norm)
    total = total / divisor[:, None]
    if SPLITS == 1:
        tl.store(out + row[:, None] * (HEADS * D) + head[:, None] * D + d[None, :],
                 total.to(out.dtype.element_ty), mask=live[:, None])  # fmt: skip
    else:
        spot = (split * total_rows + row) * HEADS + head
        tl.store(partial + spot[:, None] * D + d[None, :], total, mask=live[:, None])
        tl.store(lse + spot, tl.where(norm == 0.0, float("-inf"), most + tl.log2(divisor)), mask=live)


@triton.jit(do_not_specialize=["total_rows"])
def combine_kernel(
    partial, lse, out, total_rows,
    HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Joins the splits of `tree_attention_kernel` into `out [rows, heads * D]`, `BLOCK` heads a program."""
    begin(PDL)
    row = tl.program_id(0)
    h, d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    split = tl.arange(0, SPLITS)
    mine = h < HEADS
    spot = (split[:, None] * total_rows + row) * HEADS + h[None, :]
    parts = tl.load(lse + spot, mask=mine[None, :], other=float("-inf"))
    most = tl.max(parts, 0)
    weights = tl.exp2(parts - tl.where(most == float("-inf"), 0.0, most)[None, :])
    norm = tl.sum(weights, 0)
    vectors = tl.load(partial + spot[:, :, None] * D + d[None, None, :], mask=mine[None, :, None], other=0.0)
    total = tl.sum(vectors * weights[:, :, None], 0) / tl.where(norm == 0.0, 1.0, norm)[:, None]
    tl.store(
        out + row * (HEADS * D) + h[:, None] * D + d[None, :],
        total.to(out.dtype.element_ty),
        mask=mine[:, None],
    )
