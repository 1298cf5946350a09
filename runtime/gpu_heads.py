"""Triton kernels over the vocabulary: noise, the heads of target and drafter, the token chosen after each row.

Plain references are `runtime/noise.py` and `sampling.py`; tests hold each kernel against them.

Filters (top-k, top-p, min-p) need no order of the vocabulary. Tokens are ordered by (score, -id); what a filter keeps
is a beginning of that order, so it is known by its last token, the boundary, which bisection over the float's bits
finds exactly. Sums over tokens are float64 of float32 exponentials, as in `sampling.py`, whose exponentials may differ
in their last bits. So a token may be kept by one and dropped by the other only where the probability before it equals
top_p, or its ratio to the likeliest token's equals min_p, within 1e-6: a near-tie of the filter, which `verify` judges.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.gpu_kernels import begin, gathered, prefetch, product, row_scale


@triton.jit
def order_of(value):
    """int32 that sorts like a float32; -0.0 equals 0.0."""
    word = (value + 0.0).to(tl.int32, bitcast=True)
    return word ^ ((word >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["depths"])
def noise_kernel(noise, seeds, committed, temperature, depths, vocab, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Gumbel noise `[batch, depths, vocab]` of the tokens at positions `committed + 1 + depth`; none where greedy."""
    begin(PDL)
    row = tl.program_id(0)
    b, depth = row // depths, row % depths
    if tl.load(temperature + b) > 0.0:
        group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        position = tl.zeros((BLOCK,), tl.int32) + (tl.load(committed + b) + 1 + depth)
        zero = tl.zeros((BLOCK,), tl.int32)
        words = tl.philox(tl.load(seeds + b), group, position, zero, zero)
        for part in tl.static_range(4):
            word = words[part].to(tl.uint32, bitcast=True)
            uniform = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
            token = group * 4 + part
            tl.store(noise + row.to(tl.int64) * vocab + token, -tl.log(-tl.log(uniform)), mask=token < vocab)


@triton.jit
def _noisy(total, temperature, noise, m, b, depth, live, n, columns, depths, vocab, SHARED: tl.constexpr):
    """Scores `logits / T`, with the noise where `SHARED`, of rows that sample; greedy rows keep their logits."""
    t = tl.load(temperature + b, mask=live, other=0.0)[:, None]
    scores = tl.div_rn(total, tl.broadcast_to(tl.where(t > 0.0, t, 1.0), total.shape))
    if SHARED:
        spot = (b * depths + depth).to(tl.int64)[:, None] * vocab + n[None, :]
        g = tl.load(noise + spot, mask=live[:, None] & columns[None, :] & (t > 0.0), other=0.0)
        scores += g
    return scores


@triton.jit(do_not_specialize=["M", "rows", "depths", "parts"])
def choose_kernel(
    x, w, squares, noise, temperature, node_depths, gather, best, ids, M, rows, depths, vocab, K, parts, eps,
    NOISY: tl.constexpr, GATHER: tl.constexpr, STORED: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Best score and token of one vocabulary tile for each row, `[tiles, M]`; ties to the lowest token id.

    `GATHER` looks at rows `gather [M]` of x. `STORED`: all scores, without the noise, to `best [M, vocab]` instead.
    """
    tile = tl.program_id(0)
    m, n, live, columns, source, scores = gathered(
        x, w, gather, M, vocab, K, GATHER, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, PDL
    )
    scores *= row_scale(squares, source, live, parts, K, eps, TILES)[:, None]
    if NOISY:
        depth = tl.load(node_depths + m, mask=live, other=0)
        scores = _noisy(
            scores, temperature, noise, m, m // rows, depth, live, n, columns, depths, vocab, not STORED
        )
    if STORED:
        spot = m.to(tl.int64)[:, None] * vocab + n[None, :]
        tl.store(best + spot, scores, mask=live[:, None] & columns[None, :])
    else:
        scores = tl.where(columns[None, :], scores, float("-inf"))
        value, index = tl.max(scores, 1, return_indices=True, return_indices_tie_break_left=True)
        tl.store(best + tile * M + m, value, mask=live)
        tl.store(ids + tile * M + m, tile * BLOCK_N + index, mask=live)


@triton.jit(do_not_specialize=["M", "tiles"])
def chosen_kernel(best, ids, chosen, M, tiles, TILES_P2: tl.constexpr, PDL: tl.constexpr):
    """The token of the highest score over all tiles, `chosen [M]`."""
    begin(PDL)
    row, tile = tl.program_id(0), tl.arange(0, TILES_P2)
    value = tl.load(best + tile * M + row, mask=tile < tiles, other=float("-inf"))
    token = tl.load(ids + tile * M + row, mask=tile < tiles, other=0)
    tl.store(chosen + row, tl.min(tl.where(value == tl.max(value, 0), token, 2147483647), 0))


@triton.jit
def _passing(scores, token, vocab, edge, last):
    """Scores of `token`, their order, and which stand at or before the boundary (`edge`, `last`)."""
    value = tl.load(scores + token, mask=token < vocab, other=float("-inf"))
    key = order_of(value)
    return value, key, (token < vocab) & ((key > edge) | ((key == edge) & (token <= last)))


@triton.jit
def _counted(scores, vocab, least, edge, last, top, BLOCK: tl.constexpr):
    """Of the tokens at or before a boundary, those of at least the order `least`: how many, and their sum of
    `exp(score - top)`."""
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, vocab, BLOCK):
        value, key, passes = _passing(scores, start + tl.arange(0, BLOCK), vocab, edge, last)
        passes = passes & (key >= least)
        count += passes.to(tl.int32)
        mass += tl.where(passes, tl.exp(value - top), 0.0).to(tl.float64)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _cut(
    scores, vocab, wanted, edge, last, count, mass, top, highest, MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The boundary behind the fewest tokens that number `wanted`, or with `MASS` whose mass reaches it.

    `count` and `mass` are those of all tokens at or before the present boundary, `highest` the largest order.
    """
    low, high = edge.to(tl.int64), highest.to(tl.int64) + 1
    above, above_mass = count * 0, mass * 0.0
    while (high - low > 1) & (count - above > 1):
        middle = (low + high) >> 1
        here, here_mass = _counted(scores, vocab, middle.to(tl.int32), edge, last, top, BLOCK)
        reached = here_mass >= wanted if MASS else here >= wanted
        low, high = tl.where(reached, middle, low), tl.where(reached, high, middle)
        count, above = tl.where(reached, here, count), tl.where(reached, above, here)
        mass, above_mass = tl.where(reached, here_mass, mass), tl.where(reached, above_mass, here_mass)
    # What is left between the two is one token, or several of equal score, of which the lowest ids are kept.
    equal = count - above
    if MASS:
        kept = tl.maximum(tl.ceil((wanted - above_mass) / ((mass - above_mass) / equal)).to(tl.int32), 1)
    else:
        kept = wanted - above
    found = low.to(tl.int32)
    until = tl.where(found == edge, last, vocab)
    before = tl.where(kept < equal, -1, until - 1)
    while until - before > 1:
        middle_id = (until + before) >> 1
        here, _mass = _counted(scores, vocab, found, found, middle_id, top, BLOCK)
        enough = here - above >= kept
        until, before = tl.where(enough, middle_id, until), tl.where(enough, before, middle_id)
    return found, until


@triton.jit(do_not_specialize=["rows", "depths"])
def filter_kernel(
    scores, noise, temperature, top_k, top_p, min_p, size, node_depths, chosen, rows, depths, vocab,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The choice `chosen [batch * rows]` from scores `[batch * rows, vocab]`: top-k, top-p, min-p, noise, argmax.

    The filters `[batch]` act where the sequence samples; 0, 1 and 0 are none. Rows at or beyond `size [batch]` of their
    sequence are left alone. One program a row.
    """
    begin(PDL)
    row = tl.program_id(0)
    b = row // rows
    if row % rows < tl.load(size + b):
        line = scores + row.to(tl.int64) * vocab
        lane = tl.arange(0, BLOCK)
        most = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            token = start + lane
            most = tl.maximum(most, tl.load(line + token, mask=token < vocab, other=float("-inf")))
        top = tl.max(most, 0)
        highest = order_of(top)
        samples = tl.load(temperature + b) > 0.0
        k, share = tl.load(top_k + b), tl.load(top_p + b)
        floor = tl.where(samples, tl.load(min_p + b), 0.0)
        edge, last = tl.full((), -2147483648, tl.int32), tl.full((), 0, tl.int32) + vocab
        everything, no_mass = tl.full((), 0, tl.int32) + vocab, tl.full((), 0.0, tl.float64)
        if samples & (k > 0) & (k < vocab):
            edge, last = _cut(line, vocab, k, edge, last, everything, no_mass, top, highest, False, BLOCK)
        if samples & (share < 1.0):
            count, mass = _counted(line, vocab, edge, edge, last, top, BLOCK)
            wanted = share.to(tl.float64) * mass
            edge, last = _cut(line, vocab, wanted, edge, last, count, mass, top, highest, True, BLOCK)
        hot = noise + (b * depths + tl.load(node_depths + row)).to(tl.int64) * vocab
        noisy_until = tl.where(samples, vocab, 0)
        best, winner = tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int32)
        for start in range(0, vocab, BLOCK):
            token = start + lane
            value, _key, passes = _passing(line, token, vocab, edge, last)
            passes = passes & (tl.exp(value - top) >= floor)
            g = tl.load(hot + token, mask=passes & (token < noisy_until), other=0.0)
            score, index = tl.max(
                tl.where(passes, value + g, float("-inf")),
                0,
                return_indices=True,
                return_indices_tie_break_left=True,
            )
            winner = tl.where(score > best, start + index, winner)
            best = tl.maximum(score, best)
        tl.store(chosen + row, winner)


@triton.jit(do_not_specialize=["M", "horizon", "parts"])
def draft_kernel(
    x, w, squares, noise, temperature, scores, tile_max, tile_sum, M, horizon, vocab, K, parts, eps,
    NOISY: tl.constexpr, SHARED: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Draft scores `[batch * horizon, vocab]` with each tile's maximum and sum of exponentials, `[tiles, M]`.

    `x [batch * (horizon + 1), K]`: position 0 of a block, the root, predicts nothing. `SHARED` adds the verifier's
    noise.
    """
    tile = tl.program_id(0)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live, columns = m < M, n < vocab
    prefetch(w, n, vocab, K, PDL)
    begin(PDL)
    b, depth = m // horizon, m % horizon
    source = b * (horizon + 1) + 1 + depth
    total = product(x, w, source, live, n, columns, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN)
    total *= row_scale(squares, source, live, parts, K, eps, TILES)[:, None]
    if NOISY:
        total = _noisy(total, temperature, noise, m, b, depth, live, n, columns, horizon + 1, vocab, SHARED)
    tl.store(
        scores + m.to(tl.int64)[:, None] * vocab + n[None, :], total, mask=live[:, None] & columns[None, :]
    )
    total = tl.where(columns[None, :], total, float("-inf"))
    most = tl.max(total, 1)
    tl.store(tile_max + tile * M + m, most, mask=live)
    tl.store(tile_sum + tile * M + m, tl.sum(tl.exp(total - most[:, None]), 1), mask=live)
