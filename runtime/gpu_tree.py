"""Triton kernels of a round's bookkeeping: top-K, exact tree, accepted path, compaction. One program a sequence.

They compute what `runtime/tree.py` and `runtime/round.py` compute with torch, ties included, from and into device
memory alone; tests hold them against those. Score and index travel as one int64 key that sorts like (value, -index).
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.gpu_heads import order_of
from runtime.gpu_kernels import begin, stamp


@triton.jit
def _key(value, index):
    """int64 that sorts like (float32 value, -index); -0.0 equals 0.0."""
    return (order_of(value).to(tl.int64) << 32) - index.to(tl.int64)


@triton.jit
def _index(key):
    return ((-key) & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _value(key):
    word = ((key + ((-key) & 0xFFFFFFFF)) >> 32).to(tl.int32)
    return (word ^ ((word >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["length", "chunks"])
def top_scores_kernel(
    scores, out, length, chunks, CHUNK: tl.constexpr, KEEP: tl.constexpr, PDL: tl.constexpr
):
    """Keys of the `KEEP` best of each chunk of `scores [rows, length]`, best first, `[rows, chunks * KEEP]`."""
    begin(PDL)
    row, chunk = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, CHUNK)
    index = chunk * CHUNK + lane
    value = tl.load(scores + row.to(tl.int64) * length + index, mask=index < length, other=float("-inf"))
    ordered = tl.sort(_key(value, index), descending=True)
    tl.store(out + (row * chunks + chunk) * KEEP + lane, ordered, mask=lane < KEEP)


@triton.jit(do_not_specialize=["length", "chunks"])
def top_keys_kernel(keys, out, length, chunks, CHUNK: tl.constexpr, KEEP: tl.constexpr, PDL: tl.constexpr):
    """`top_scores_kernel` over keys `[rows, length]`."""
    begin(PDL)
    row, chunk = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, CHUNK)
    index = chunk * CHUNK + lane
    key = tl.load(keys + row * length + index, mask=index < length, other=-0x7FFFFFFFFFFFFFFF)
    ordered = tl.sort(key, descending=True)
    tl.store(out + (row * chunks + chunk) * KEEP + lane, ordered, mask=lane < KEEP)


@triton.jit(do_not_specialize=["tiles", "rows", "batch"])
def tree_kernel(
    keys, tile_max, tile_sum, tiles, ranks, places,
    root, remaining, budget, chain, active,
    work_scores, work_order, work_places,
    tokens, parents, depths, log_probs, bits, size, stamps, rows, batch,
    LEVELS: tl.constexpr, KEEP: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
    ALL: tl.constexpr, ROWS_P2: tl.constexpr, TILES_P2: tl.constexpr, TIMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The exact best-first tree of each sequence: `budget` nodes of the `rows - 1` there is room for.

    `keys [batch * LEVELS, KEEP]` are the best tokens of each depth. A candidate at a depth is a pair of a kept prefix
    (its place, best first) and a token (its rank): `ranks` and `places [PAIRS]` list the pairs with
    (rank + 1) * (place + 1) <= rows - 1, all that can be among the best so many; rank -1 pads. Invalid nodes come last,
    see themselves alone and have parent 0. `chain [batch]` keeps rank 0 only.
    """
    begin(PDL)
    b = tl.program_id(0)
    stamp(stamps, 1, TIMED)
    lane = tl.arange(0, WIDTH)
    tl.store(work_scores + b * (LEVELS + 1) * WIDTH + lane, tl.where(lane == 0, 0.0, float("-inf")))
    tl.debug_barrier()
    pair = tl.arange(0, PAIRS)
    rank, place = tl.load(ranks + pair), tl.load(places + pair)
    usable = (rank >= 0) & ((rank == 0) | (tl.load(chain + b) == 0))
    deepest = tl.load(remaining + b) - 1
    tile = tl.arange(0, TILES_P2)
    for level in range(LEVELS):
        row = b * LEVELS + level
        most = tl.load(tile_max + tile * (batch * LEVELS) + row, mask=tile < tiles, other=float("-inf"))
        part = tl.load(tile_sum + tile * (batch * LEVELS) + row, mask=tile < tiles, other=0.0)
        top = tl.max(most, 0)
        lse = top + tl.log(tl.sum(part * tl.exp(most - top), 0))
        value = _value(tl.load(keys + row * KEEP + tl.maximum(rank, 0)))
        before = tl.load(work_scores + (b * (LEVELS + 1) + level) * WIDTH + place)
        score = tl.where(usable & (level < deepest), (value - lse) + before, float("-inf"))
        ordered = tl.sort(_key(score, tl.maximum(rank, 0) * WIDTH + place), descending=True)
        kept = pair < WIDTH
        tl.store(work_scores + (b * (LEVELS + 1) + level + 1) * WIDTH + pair, _value(ordered), mask=kept)
        tl.store(work_order + row * WIDTH + pair, _index(ordered), mask=kept)
        tl.debug_barrier()

    every = tl.arange(0, ALL)
    there = every < LEVELS * WIDTH
    score = tl.load(work_scores + b * (LEVELS + 1) * WIDTH + WIDTH + every, mask=there, other=float("-inf"))
    ordered = tl.sort(_key(score, every), descending=True)
    spot = _index(ordered)
    tl.store(work_places + b * ALL + spot, every + 1)
    node = every + 1
    chosen = (every < rows - 1) & (every < tl.load(budget + b)) & (_value(ordered) > float("-inf"))
    chosen = chosen & (tl.load(active + b) != 0)
    tl.debug_barrier()
    level = spot // WIDTH
    picked = tl.load(work_order + b * LEVELS * WIDTH + spot, mask=chosen, other=0)
    above = (level - 1) * WIDTH + picked % WIDTH
    parent = tl.load(work_places + b * ALL + tl.maximum(above, 0), mask=chosen & (level > 0), other=0)
    token = _index(tl.load(keys + (b * LEVELS + level) * KEEP + picked // WIDTH, mask=chosen, other=0))
    here = every < rows - 1
    first = b * rows
    tl.store(tokens + first + node, tl.where(chosen, token, 0), mask=here)
    tl.store(parents + first + node, tl.where(chosen, parent, 0), mask=here)
    tl.store(depths + first + node, tl.where(chosen, level + 1, 0), mask=here)
    tl.store(log_probs + first + node, tl.where(chosen, _value(ordered), float("-inf")), mask=here)
    valid = tl.sum(chosen.to(tl.int32), 0)
    tl.store(tokens + first, tl.load(root + b))
    tl.store(parents + first, 0)
    tl.store(depths + first, 0)
    tl.store(log_probs + first, 0.0)
    tl.store(size + b, tl.where(tl.load(active + b) != 0, valid + 1, 0))
    tl.debug_barrier()
    n = tl.arange(0, ROWS_P2)
    mine = n < rows
    one = tl.full((ROWS_P2,), 1, tl.int64)
    word = one << n.to(tl.int64)
    at = n
    inside = mine & (n <= valid)
    for _ in range(LEVELS):
        at = tl.load(parents + first + at, mask=inside, other=0)
        word = tl.where(inside, word | (one << at.to(tl.int64)), word)
    tl.store(bits + first + n, word, mask=mine)
    stamp(stamps, 2, TIMED)


@triton.jit
def root_kernel(
    root,
    active,
    tokens,
    parents,
    depths,
    log_probs,
    bits,
    size,
    stamps,
    TIMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Trees of the root alone: plain decoding."""
    begin(PDL)
    b = tl.program_id(0)
    stamp(stamps, 0, TIMED)
    stamp(stamps, 1, TIMED)
    tl.store(tokens + b, tl.load(root + b))
    tl.store(parents + b, 0)
    tl.store(depths + b, 0)
    tl.store(log_probs + b, 0.0)
    tl.store(bits + b, tl.full((), 1, tl.int64))
    tl.store(size + b, tl.where(tl.load(active + b) != 0, 1, 0))
    stamp(stamps, 2, TIMED)


@triton.jit(do_not_specialize=["rows", "block", "record"])
def accept_kernel(
    tokens, parents, depths, log_probs, bits, size, chosen,
    root, committed, remaining, active, block_rows, stops, path, feature_rows, kept, out, stamps, rows, block, record,
    STOPS: tl.constexpr, ROWS_P2: tl.constexpr, BLOCK_P2: tl.constexpr, TIMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Follows the target's choices from the root, cuts at the first stop token or the cap, advances the sequence.

    `chosen [batch, rows]` is the target's choice after each node. `kept [batch]` nodes are committed, `path
    [batch, block]` lists them, `feature_rows [batch * block]` their rows in the batch. `out [batch, record]` int32 is
    what the host reads: accept length before the cut, kept, finish (1 stop token, 2 cap), nodes; then
    `block` emitted ids, `block` path nodes, and tokens, parents, depths, log-probability bits of all `rows` nodes.
    """
    begin(PDL)
    b = tl.program_id(0)
    stamp(stamps, 3, TIMED)
    n = tl.arange(0, ROWS_P2)
    first = b * rows
    mine = n < rows
    nodes = tl.load(size + b)
    token = tl.load(tokens + first + n, mask=mine, other=0)
    parent = tl.load(parents + first + n, mask=mine, other=0)
    depth = tl.load(depths + first + n, mask=mine, other=0)
    word = tl.load(bits + first + n, mask=mine, other=0)
    valid = n < nodes
    followed = (tl.load(chosen + first + parent, mask=mine, other=0) == token) | (n == 0)
    one = tl.full((ROWS_P2,), 1, tl.int64)
    missed = tl.sum(tl.where(valid & (followed == 0), one << n.to(tl.int64), 0), 0)
    accepted = valid & ((word & missed) == 0)
    length = tl.sum(accepted.to(tl.int32), 0)
    tl.store(path + b * block + depth, n, mask=accepted)
    tl.debug_barrier()
    d = tl.arange(0, BLOCK_P2)
    spots = d < block
    on = spots & (d < length)
    node = tl.load(path + b * block + d, mask=on, other=0)
    emitted = tl.load(chosen + first + node, mask=on, other=0)
    stopped = tl.zeros((BLOCK_P2,), tl.int32)
    for s in tl.static_range(STOPS):
        stopped += (emitted == tl.load(stops + b * STOPS + s)).to(tl.int32)
    stop_at = tl.min(tl.where(on & (stopped > 0), d, 1 << 20), 0)
    room = tl.load(remaining + b)
    count = tl.minimum(tl.minimum(length, stop_at + 1), room)
    finish = tl.where(stop_at < count, 1, tl.where(length >= room, 2, 0))
    finish = tl.where(nodes > 0, finish, 0)
    last = tl.sum(tl.where(d == count - 1, emitted, 0), 0)
    tl.store(kept + b, count)
    tl.store(committed + b, tl.load(committed + b) + count)
    tl.store(remaining + b, room - count)
    if count > 0:
        tl.store(root + b, last)
    if finish > 0:
        tl.store(active + b, 0)
        tl.store(block_rows + b, 0)
    tl.store(feature_rows + b * block + d, first + node, mask=spots)
    line = out + b * record
    tl.store(line, length)
    tl.store(line + 1, count)
    tl.store(line + 2, finish)
    tl.store(line + 3, nodes)
    tl.store(line + 4 + d, emitted, mask=spots)
    tl.store(line + 4 + block + d, node, mask=spots)
    table = line + 4 + 2 * block + n
    probability = tl.load(log_probs + first + n, mask=mine, other=0.0)
    tl.store(table, token, mask=mine)
    tl.store(table + rows, parent, mask=mine)
    tl.store(table + 2 * rows, depth, mask=mine)
    tl.store(table + 3 * rows, probability.to(tl.int32, bitcast=True), mask=mine)
    stamp(stamps, 4, TIMED)


@triton.jit(do_not_specialize=["block"])
def compact_kernel(
    keys, values, committed, kept, slot_start, path, block, width,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_P2: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Moves the accepted rows to the end of the committed prefix, `kept [batch]` of them ending at `committed`.

    Caches `[layers, kv_heads, width, D]`; all rows of a head are read before the first is written, since they overlap.
    """
    begin(PDL)
    b, head = tl.program_id(0), tl.program_id(1)
    d, i = tl.arange(0, BLOCK_P2), tl.arange(0, D)
    count = tl.load(kept + b)
    node = tl.load(path + b * block + d, mask=d < count, other=0)
    moved = (d < count) & (node != d)
    if tl.sum(moved.to(tl.int32), 0) > 0:
        base = head.to(tl.int64) * width + tl.load(slot_start + b) + tl.load(committed + b) - count
        source = (base + node)[:, None] * D + i[None, :]
        target = (base + d)[:, None] * D + i[None, :]
        key = tl.load(keys + source, mask=moved[:, None], other=0.0)
        value = tl.load(values + source, mask=moved[:, None], other=0.0)
        tl.debug_barrier()
        tl.store(keys + target, key, mask=moved[:, None])
        tl.store(values + target, value, mask=moved[:, None])


@triton.jit
def end_kernel(stamps, TIMED: tl.constexpr, PDL: tl.constexpr):
    """Marks the end of the round."""
    begin(PDL)
    stamp(stamps, 5, TIMED)
