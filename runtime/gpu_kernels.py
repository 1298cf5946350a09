"""Triton kernels of a forward pass over tree rows: products, norms and embedding.

Rows of a batch are `[batch, rows]` flattened, the same number of rows for each sequence; what does not count of a
sequence (`row >= size`) is computed and never read. Nothing is read back and no shape depends on a length, so the
calls can be captured in a CUDA graph. The plain reference is `runtime/fused.py`; tests hold each kernel against it, on
a CPU through Triton's interpreter. Rotation and attention are in `gpu_attention.py`, the heads in `gpu_heads.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

SCRATCH = tl.constexpr(64)
"""Slots behind the allocator's, for rows that do not count; also the most rows of a tree."""


@triton.jit
def stamp(stamps, at: tl.constexpr, TIMED: tl.constexpr):
    """Notes the device's clock, nanoseconds, in `stamps[at]`."""
    if TIMED:  # noqa: SIM102, the outer condition is known when the kernel is compiled
        if tl.program_id(0) == 0:
            tl.store(stamps + at, tl.extra.cuda.globaltimer())


@triton.jit
def begin(PDL: tl.constexpr):
    """Waits for the kernel before, where this one was let start early, and lets the next one start early."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(w, n, N, K, PDL: tl.constexpr):
    """Asks for the first columns of weight rows `n` while the kernel before still runs: nothing writes weights."""
    if PDL:
        lines = 64 * tl.arange(0, 16)
        for start in range(0, min(K, 2048), 1024):
            spot = w + tl.minimum(n, N - 1)[:, None] * K + tl.minimum(start + lines, K - 1)[None, :]
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [spot.to(tl.uint64, bitcast=True)],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def product(
    x, w, source, live, n, columns, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One tile of `x @ w.T`, float32."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (k < K) | EVEN
        a = tl.load(x + source[:, None] * K + k[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        b = tl.load(w + n[:, None] * K + k[None, :], mask=columns[:, None] & inside[None, :], other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    return total


@triton.jit
def row_product(
    first, x, w, row, n, columns, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`product` of one row `[1, BLOCK_N]`, in registers: no shared memory to fill, so that more loads are under way.

    `first`: the first `BLOCK_K` columns of the weights, as `row_weights` gives them. Each thread adds up what it loads;
    they add up together once, at the end.
    """
    b = first
    total = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    for start in range(0, K, BLOCK_K):
        following = row_weights(w, n, columns, start + BLOCK_K, K, BLOCK_K)
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x + row * K + k, mask=(k < K) | EVEN, other=0.0).to(tl.float32)
        each = tl.reshape(b.to(tl.float32) * a[None, :], (BLOCK_N, BLOCK_K // 8, 8))
        total += tl.sum(each, 2)
        b = following
    return tl.sum(total, 1)[None, :]


@triton.jit
def row_weights(w, n, columns, start, K, BLOCK_K: tl.constexpr):
    """Columns `start` and on of weight rows `n`; read once a round, so that they need not stay in the cache."""
    k = start + tl.arange(0, BLOCK_K)
    wanted = columns[:, None] & (k < K)[None, :]
    return tl.load(w + n[:, None] * K + k[None, :], mask=wanted, other=0.0, eviction_policy="evict_first")


@triton.jit
def gathered(
    x, w, rows, M, N, K, GATHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """This program's tile of `x @ w.T`, or with `GATHER` of `x[rows] @ w.T`: rows and columns of the tile, which of
    them there are, rows of x, product."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live, columns = m < M, n < N
    if BLOCK_M == 1:
        first = row_weights(w, n, columns, 0, K, BLOCK_K)
    else:
        prefetch(w, n, N, K, PDL)
    begin(PDL)
    source = m
    if GATHER:
        source = tl.load(rows + m, mask=live, other=0)
    if BLOCK_M == 1:
        total = row_product(first, x, w, tl.sum(source, 0), n, columns, K, BLOCK_N, BLOCK_K, EVEN)
    else:
        total = product(x, w, source, live, n, columns, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN)
    return m, n, live, columns, source, total


@triton.jit
def row_scale(squares, rows, live, tiles, K, eps, TILES: tl.constexpr):
    """`1 / rms` of rows whose sums of squares stand in the first `tiles` entries of `squares [rows, TILES]`."""
    CHUNK: tl.constexpr = TILES if TILES * rows.shape[0] <= 8192 else 8192 // rows.shape[0]
    total = tl.zeros((rows.shape[0],), tl.float32)
    for start in range(0, tiles, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        there = live[:, None] & (tile < tiles)[None, :]
        total += tl.sum(tl.load(squares + rows[:, None] * TILES + tile[None, :], mask=there, other=0.0), 1)
    return tl.rsqrt(total / K + eps)


@triton.jit(do_not_specialize=["M", "tiles"])
def linear_kernel(
    x, w, out, squares, bias, residual, rows, gain, scaled, squares_out, tap, M, N, K, tiles, tap_stride, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATHER: tl.constexpr, NEXT: tl.constexpr,
    TAP: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`out [M, N] = x @ w.T + bias + residual`, each part optional; `GATHER` takes rows `rows [M]` of x.

    RMS norm is split between the products around it: `NEXT` also writes `scaled = out * gain`, the gain of the norm
    that follows, and each tile's sums of squares; `NORM` reads such an `x` and divides by the root of their mean.
    `TAP` also writes the result to `tap [M, tap_stride]`.
    """
    m, n, live, columns, _source, total = gathered(
        x, w, rows, M, N, K, GATHER, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, PDL
    )
    here = live[:, None] & columns[None, :]
    spot = m[:, None] * N + n[None, :]
    if NORM:
        total *= row_scale(squares, m, live, tiles, K, eps, TILES)[:, None]
    if BIAS:
        total += tl.load(bias + n, mask=columns, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL:
        total += tl.load(residual + spot, mask=here, other=0.0).to(tl.float32)
    result = total.to(out.dtype.element_ty)
    tl.store(out + spot, result, mask=here)
    if TAP:
        tl.store(tap + m[:, None] * tap_stride + n[None, :], result, mask=here)
    if NEXT:
        wide = tl.where(here, result.to(tl.float32), 0.0)
        factor = tl.load(gain + n, mask=columns, other=0.0).to(tl.float32)
        tl.store(scaled + spot, (wide * factor[None, :]).to(out.dtype.element_ty), mask=here)
        tl.store(squares_out + m * TILES + tl.program_id(0), tl.sum(wide * wide, 1), mask=live)


@triton.jit(do_not_specialize=["tap_stride"])
def add_sum_kernel(
    summed, bias, hidden, gain, scaled, squares, tap, tap_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, BIAS: tl.constexpr, TAP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`hidden [rows, WIDTH] += summed + bias`, a product that was summed over ranks; the rest as `linear_kernel`."""
    begin(PDL)
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    here = i < WIDTH
    total = tl.load(summed + row * WIDTH + i, mask=here, other=0.0)
    if BIAS:
        total += tl.load(bias + i, mask=here, other=0.0).to(tl.float32)
    total += tl.load(hidden + row * WIDTH + i, mask=here, other=0.0).to(tl.float32)
    result = total.to(hidden.dtype.element_ty)
    tl.store(hidden + row * WIDTH + i, result, mask=here)
    if TAP:
        tl.store(tap + row * tap_stride + i, result, mask=here)
    wide = result.to(tl.float32)
    factor = tl.load(gain + i, mask=here, other=0.0).to(tl.float32)
    tl.store(scaled + row * WIDTH + i, (wide * factor).to(hidden.dtype.element_ty), mask=here)
    tl.store(squares + row * TILES, tl.sum(wide * wide, 0))


@triton.jit
def both_row_products(
    first, x, w, row, n, columns, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`row_product` with the two halves of `w [2 * N, K]` at once."""
    g, u = first
    gate = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    for start in range(0, K, BLOCK_K):
        next_g = row_weights(w, n, columns, start + BLOCK_K, K, BLOCK_K)
        next_u = row_weights(w, N + n, columns, start + BLOCK_K, K, BLOCK_K)
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x + row * K + k, mask=(k < K) | EVEN, other=0.0).to(tl.float32)[None, :]
        gate += tl.sum(tl.reshape(g.to(tl.float32) * a, (BLOCK_N, BLOCK_K // 8, 8)), 2)
        up += tl.sum(tl.reshape(u.to(tl.float32) * a, (BLOCK_N, BLOCK_K // 8, 8)), 2)
        g, u = next_g, next_u
    return tl.sum(gate, 1)[None, :], tl.sum(up, 1)[None, :]


@triton.jit
def both_products(
    x, w, m, live, n, columns, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`product` with the two halves of `w [2 * N, K]`."""
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (k < K) | EVEN
        a = tl.load(x + m[:, None] * K + k[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        wanted = columns[:, None] & inside[None, :]
        g = tl.load(w + n[:, None] * K + k[None, :], mask=wanted, other=0.0)
        u = tl.load(w + (N + n)[:, None] * K + k[None, :], mask=wanted, other=0.0)
        gate = tl.dot(a, tl.trans(g), gate, input_precision="ieee")
        up = tl.dot(a, tl.trans(u), up, input_precision="ieee")
    return gate, up


@triton.jit(do_not_specialize=["M", "tiles"])
def gated_kernel(
    x, w, out, squares, M, N, K, tiles, eps, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SwiGLU: `out [M, N] = silu(g) * u` with `g, u = norm(x) @ w.T`, gate rows first in `w [2 * N, K]`."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live, columns = m < M, n < N
    if BLOCK_M == 1:
        first = row_weights(w, n, columns, 0, K, BLOCK_K), row_weights(w, N + n, columns, 0, K, BLOCK_K)
        begin(PDL)
        gate, up = both_row_products(first, x, w, tl.program_id(1), n, columns, N, K, BLOCK_N, BLOCK_K, EVEN)
    else:
        prefetch(w, n, N, K, PDL)
        prefetch(w, N + n, 2 * N, K, PDL)
        begin(PDL)
        gate, up = both_products(x, w, m, live, n, columns, N, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN)
    scale = row_scale(squares, m, live, tiles, K, eps, TILES)[:, None]
    gate, up = gate * scale, up * scale
    result = gate / (1.0 + tl.exp(-gate)) * up
    here = live[:, None] & columns[None, :]
    tl.store(out + m[:, None] * N + n[None, :], result.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["rows", "mask_id"])
def embed_kernel(
    ids, embedding, out, gain, scaled, squares, stamps, rows, mask_id,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    MASKED: tl.constexpr, TIMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Embeddings `[batch * rows, WIDTH]` of `ids [batch, rows]`; `MASKED`: of a draft block, `ids [batch]` its root.

    `scaled` and one entry of `squares` prepare the norm that follows, as in `linear_kernel`.
    """
    begin(PDL)
    row = tl.program_id(0)
    stamp(stamps, 0, TIMED)
    if MASKED:  # noqa: SIM108, known when the kernel is compiled
        token = tl.where(row % rows == 0, tl.load(ids + row // rows), mask_id)
    else:
        token = tl.load(ids + row)
    i = tl.arange(0, BLOCK)
    vector = tl.load(embedding + token.to(tl.int64) * WIDTH + i, mask=i < WIDTH, other=0.0)
    tl.store(out + row * WIDTH + i, vector, mask=i < WIDTH)
    wide = vector.to(tl.float32)
    factor = tl.load(gain + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    tl.store(scaled + row * WIDTH + i, (wide * factor).to(out.dtype.element_ty), mask=i < WIDTH)
    tl.store(squares + row * TILES, tl.sum(wide * wide, 0))
