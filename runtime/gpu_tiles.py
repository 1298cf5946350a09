"""Tile sizes of the products on a GPU, as measured on an H200."""

from __future__ import annotations

from torch import Tensor


def pow2(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()


def head_block(k: int) -> int:
    """Vocabulary entries of a tile of the head."""
    return 128 if k <= 1024 else 64


def blocks_of(rows: int, weight: Tensor, kind: str = "") -> dict[str, int]:
    """Tile sizes and launch settings of a product of `rows` rows with a weight `[n, k]`, as measured on an H200.

    Measured inside whole rounds, where what a kernel leaves free lets the next one start. Small weights want many
    narrow tiles, which wait for memory side by side; large ones deep tiles. From 17 rows on tiles have 64, which is
    what the warp group's product takes. `kind`: "gate", which multiplies two weights at once, or "head".
    """
    n, k = weight.shape
    n = n // 2 if kind == "gate" else n
    block_m, block_n, block_k, stages, warps = _tiles(rows, n, k, kind)
    # Stages were measured with two bytes an element and have to fit into shared memory with four.
    block_k = min(block_k * 2 // weight.element_size(), max(16, pow2(k)))
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "EVEN": k % block_k == 0,
        "num_warps": warps,
        "num_stages": stages,
    }


def _tiles(rows: int, n: int, k: int, kind: str) -> tuple[int, int, int, int, int]:
    """Rows, columns, depth, stages and warps of a tile."""
    few, large, gate = rows <= 16, n * k >= 8_000_000, kind == "gate"
    if rows == 1 and large and kind != "head":
        return 1, 8, 2048, 1, 8
    if kind == "head":
        block_m = 16 if few else 32 if rows <= 32 else 128 if rows >= 256 else 64
        return block_m, head_block(k), 64 if k <= 1024 or rows > 32 else 128, 5, 8 if block_m == 128 else 4
    if large:
        if few:
            return (16, 64, 128, 3, 8) if gate else (16, 32, 256, 4, 4)
        if rows >= 256:
            return 128, 128 if n > 4096 else 64, 64, 4, 8
        if rows > 64:
            return (64, 64, 128, 4, 4) if n > 4096 else (64, 32, 256, 4, 4)
        return (64, 128, 64, 4, 4) if gate else (64, 64, 128, 4, 4) if n > 4096 else (64, 32, 128, 6, 4)
    if rows > 64:
        return (64, 64, 64, 4, 4) if gate else (64, 32, 64, 5, 4)
    if k > 1024:
        return (16 if few else 32, 16, 256, 6, 4) if rows <= 32 else (64, 16, 128, 5, 4)
    if few:
        return (16, 32, 64, 9, 4) if gate else (16, 16, 64, 9, 2)
    return (64, 32, 64, 6, 4) if n <= k else (64, 16, 64, 9, 4)
