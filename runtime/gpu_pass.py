"""A forward pass on the device: embedding, layers over slots, the token chosen after each row, the drafter's context.

Buffers exist before the first pass and every size is the caller's, so passes can be captured in CUDA graphs. The
kernels are in `gpu_kernels.py` and `gpu_attention.py`; what they compute is `fused.FusedDecoder` and
`fused.FusedDrafter`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.fused import FusedDecoder, FusedLayer, FusedStack
from runtime.gpu_attention import (
    combine_kernel,
    context_store_kernel,
    rotate_store_kernel,
    tree_attention_kernel,
)
from runtime.gpu_heads import choose_kernel, chosen_kernel, filter_kernel
from runtime.gpu_kernels import SCRATCH, add_sum_kernel, embed_kernel, gated_kernel, linear_kernel
from runtime.gpu_tiles import blocks_of, head_block, pow2
from runtime.kv_cache import Pool
from runtime.linear import Linear, PlainLinear, ReducedLinear
from runtime.round import Models

MOST_ROWS = int(SCRATCH.value)
PROGRAMS = 132
"""Programs a kernel should have at least: one for each multiprocessor of an H100 or H200."""
KV_BLOCK = 64
FILTERED_ROWS = 256
"""Rows whose scores are stored at a time, where a choice is filtered."""
FILTER_BLOCK = 8192


def unsupported(models: Models) -> str | None:
    """Why these models cannot run by `DevicePass`; None if they can."""
    target, drafter = models.target, models.drafter
    if not target.fused:
        return "the target runs through transformers' modules"
    decoder = target.decoder
    assert isinstance(decoder, FusedDecoder)
    stacks = [decoder.stack] + ([drafter.stack] if drafter is not None else [])
    for stack in stacks:
        why = unsupported_attention(stack.shape.head_dim, stack.shape.windows)
        if why is not None:
            return why
        if not all(isinstance(layer.qkv, PlainLinear) for layer in stack.layers):
            return "packed linear layers"
    if models.propose is not None:
        return "drafts come from elsewhere"
    return None


def unsupported_attention(head_dim: int, windows: tuple[int | None, ...]) -> str | None:
    """Why the attention kernel does not know such layers; None if it does."""
    if head_dim not in (16, 32, 64, 128, 256):
        return f"head size {head_dim} is no power of two from 16 to 256"
    return None if all(window is None for window in windows) else "sliding windows"


def weight_of(linear: Linear) -> Tensor:
    """The weight `[n, k]` of a plain layer; `unsupported` has refused others."""
    assert isinstance(linear, PlainLinear)
    return linear.weight


@dataclass(frozen=True)
class Rows:
    """The rows of a pass: `each` rows of `batch` sequences, and where they stand.

    `committed`, `slot_start`, `size [batch]`, `depths [batch * each]`; `bits [batch * each]` are ancestor bits, None
    where each row sees those before it.
    """

    batch: int
    each: int
    committed: Tensor
    slot_start: Tensor
    size: Tensor
    depths: Tensor
    bits: Tensor | None

    @property
    def total(self) -> int:
        return self.batch * self.each


@dataclass(frozen=True)
class Filters:
    """Filters of the sequences of a pass, `[batch]` each, and how many of their rows are chosen from."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    size: Tensor


class DeviceStack:
    """Decoder layers with their slots and rotation tables."""

    def __init__(self, stack: FusedStack, pool: Pool, positions: int) -> None:
        """`positions`: most positions of a sequence, rows in reserve included."""
        self.shape, self.layers, self.pool = stack.shape, stack.layers, pool
        rotation = stack.rotation(torch.arange(positions, device=pool.device))[:, 0]
        self.cos, self.sin = rotation.real.contiguous(), rotation.imag.contiguous()
        self.qkv_width = int(weight_of(self.layers[0].qkv).shape[0])
        self.out_width = self.shape.heads * self.shape.head_dim
        self.mlp_width = int(weight_of(self.layers[0].down).shape[1])
        self._positions = positions

    def attention_grid(self, batch: int, rows: int) -> tuple[int, int, int]:
        """Rows of a query tile, tiles, and splits of the prefix: enough programs for the device, fixed by the sizes."""
        packed = rows * (self.shape.heads // self.shape.kv_heads)
        block_q = min(64, max(16, pow2(packed)))
        q_blocks = -(-packed // block_q)
        programs = batch * self.shape.kv_heads * q_blocks
        splits = min(pow2(-(-PROGRAMS // programs)), 16, pow2(-(-self._positions // KV_BLOCK)))
        return block_q, q_blocks, splits

    def partial_size(self, batch: int, rows: int) -> int:
        """Elements of the partial results of one attention call."""
        splits = self.attention_grid(batch, rows)[2]
        return splits * batch * rows * self.out_width if splits > 1 else 1


class DevicePass:
    """Buffers and kernel calls of passes over up to `rows` rows."""

    def __init__(self, models: Models, rows: int, positions: int, partials: list[tuple[int, int]]) -> None:
        """`partials`: all (batch, rows) of a sequence that passes will have; `positions` as in `DeviceStack`."""
        decoder = models.target.decoder
        assert isinstance(decoder, FusedDecoder)
        self.decoder = decoder
        self.device = models.target.device
        self.vocab = models.target.vocab_size
        self._pool_d = models.cache.drafter
        self._drafter = models.drafter
        self.target = DeviceStack(decoder.stack, models.cache.target, positions)
        self.drafter: DeviceStack | None = None
        if models.drafter is not None and models.cache.drafter is not None:
            self.drafter = DeviceStack(models.drafter.stack, models.cache.drafter, positions)
        early = self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) >= (9, 0)
        self._overlap = {"PDL": True, "launch_pdl": True} if early else {"PDL": False}

        dtype, hidden = models.target.dtype, int(models.target.config.hidden_size)
        stacks = [self.target] + ([self.drafter] if self.drafter else [])

        def make(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.hidden, self.scaled = make(rows, hidden), make(rows, hidden)
        self._qkv = make(rows, max(each.qkv_width for each in stacks))
        self._attended = make(rows, max(each.out_width for each in stacks))
        self._gated = make(rows, max(each.mlp_width for each in stacks))
        self.tiles, self.parts = pow2(-(-hidden // 8)), 1
        """Room a row has for sums of squares of its parts, and the parts there are since the last product."""
        self.squares = self.floats(rows * self.tiles)
        parts = max(stack.partial_size(*sizes) for stack in stacks for sizes in partials)
        self._partial = self.floats(parts)
        self._lse = self.floats(max(1, parts // min(each.shape.head_dim for each in stacks)))
        self.head_tiles = -(-self.vocab // head_block(hidden))
        self._best = self.floats(self.head_tiles * rows)
        self._best_ids = torch.zeros(self.head_tiles * rows, dtype=torch.int32, device=self.device)
        split = any(isinstance(layer.down, ReducedLinear) for layer in decoder.stack.layers)
        self._summed = self.floats(rows if split else 0, hidden)
        self.stored = self.floats(min(rows, FILTERED_ROWS), self.vocab)
        """Scores of rows whose choice is filtered."""
        self.features = make(rows if self.drafter else 0, len(decoder.taps) * hidden)
        width = 0 if self._drafter is None else int(weight_of(self._drafter.context_linear).shape[0])
        self._context = make(rows, width)

    def floats(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    def call(self, kernel: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
        """Launches a kernel; where the device can, its start overlaps the end of the one before."""
        kernel[grid](*args, **settings, **self._overlap)

    def call_after_all(self, kernel: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
        """Launches a kernel that starts when what is before has ended, kernels of others too."""
        kernel[grid](*args, **settings, PDL=False)

    def embed(
        self,
        ids: Tensor,
        total: int,
        gain: Tensor,
        stamps: Tensor,
        *,
        block: int = 0,
        mask_id: int = 0,
        timed: bool = False,
    ) -> None:
        """Embeds `ids [total]`; with `block`, draft blocks of so many positions, `ids` their roots."""
        embedding = self.decoder.embedding
        width = int(embedding.shape[1])
        self.call(
            embed_kernel, (total,),
            ids, embedding, self.hidden, gain, self.scaled, self.squares, stamps, max(block, 1), mask_id,
            WIDTH=width, BLOCK=pow2(width), TILES=self.tiles, MASKED=block > 0, TIMED=timed, num_warps=4,
        )  # fmt: skip
        self.parts = 1

    def layers(self, stack: DeviceStack, rows: Rows, final: Tensor, taps: tuple[int, ...] = ()) -> None:
        """Every layer of a stack over the embedded rows; outputs of the layers in `taps` to the features.

        `final`: gain of the norm that follows the last layer.
        """
        total, eps, count = rows.total, stack.shape.eps, len(stack.layers)
        for index, layer in enumerate(stack.layers):
            self._linear(layer.qkv, self.scaled, self._qkv, total, norm_eps=eps)
            self._attention(stack, layer, index, rows)
            self._linear(layer.o, self._attended, self.hidden, total, add=True, gain=layer.post_norm)
            self._gate(layer, total, eps)
            tap = None
            if index in taps:
                width = self.hidden.shape[1]
                tap = self.features[:, taps.index(index) * width :]
            gain = stack.layers[index + 1].input_norm if index + 1 < count else final
            self._linear(layer.down, self._gated, self.hidden, total, add=True, gain=gain, tap=tap)

    def choose(
        self, total: int, chosen: Tensor, noise: Tensor, temperature: Tensor, depths: Tensor,
        *, rows: int, noise_rows: int, noisy: bool, gather: Tensor | None = None, filters: Filters | None = None,
    ) -> None:  # fmt: skip
        """The target's choice after each of `total` rows, or of rows `gather`, into `chosen`.

        `noise [batch, noise_rows, vocab]` is looked up by `depths`; `rows` of a sequence stand together. With `filters`
        whole sequences are taken at a time, as many as there is room for their scores.
        """
        weight, vocab, tiles = weight_of(self.decoder.head), self.vocab, self.head_tiles
        portion = total if filters is None else rows * max(1, self.stored.shape[0] // rows)
        for first in range(0, total, portion):
            count, b = min(portion, total - first), first // rows
            draws = noise[b * noise_rows * vocab :], temperature[b:]
            at, out = depths[first:], chosen[first:]
            blocks = blocks_of(count, weight, "head")
            self.call(
                choose_kernel, (tiles, -(-count // blocks["BLOCK_M"])),
                self.scaled[first:], weight, self.squares[first * self.tiles :], *draws, at,
                chosen if gather is None else gather, self._best if filters is None else self.stored, self._best_ids,
                count, rows, noise_rows, vocab, weight.shape[1], self.parts, self.target.shape.eps,
                NOISY=noisy, GATHER=gather is not None, STORED=filters is not None, TILES=self.tiles, **blocks,
            )  # fmt: skip
            if filters is None:
                best = self._best, self._best_ids
                self.call(chosen_kernel, (count,), *best, out, count, tiles, TILES_P2=pow2(tiles))
                continue
            self.call(
                filter_kernel, (count,),
                self.stored, *draws, filters.top_k[b:], filters.top_p[b:], filters.min_p[b:], filters.size[b:],
                at, out, rows, noise_rows, vocab, BLOCK=min(FILTER_BLOCK, pow2(vocab)), num_warps=16,
            )  # fmt: skip

    def extend_context(
        self,
        batch: int,
        block: int,
        committed: Tensor,
        kept: Tensor,
        slot_start: Tensor,
        gather: Tensor | None,
    ) -> None:
        """Drafter keys and values of the `kept [batch]` positions before `committed`, from features (rows `gather`)."""
        drafter, stack = self._drafter, self.drafter
        if drafter is None or stack is None:
            return
        shape, rows, pool = stack.shape, batch * block, stack.pool
        self._linear(drafter.fc, self.features, self.hidden, rows, gather=gather, gain=drafter.hidden_norm)
        self._linear(drafter.context_linear, self.scaled, self._context, rows, norm_eps=shape.eps)
        self.call(
            context_store_kernel, (rows, len(shape.windows)),
            self._context, drafter.k_norms, stack.cos, stack.sin, pool.keys, pool.values,
            committed, kept, slot_start, block, pool.keys.shape[2], shape.eps,
            LAYERS=len(shape.windows), KV_HEADS=shape.kv_heads, D=shape.head_dim, KV_P2=pow2(shape.kv_heads),
            num_warps=2,
        )  # fmt: skip

    def _attention(self, stack: DeviceStack, layer: FusedLayer, index: int, rows: Rows) -> None:
        shape, pool, total = stack.shape, stack.pool, rows.total
        heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
        keys, values, width = pool.keys[index], pool.values[index], pool.keys.shape[2]
        norms = layer.qk_norm
        block = min(8, pow2(heads + 2 * kv_heads))
        self.call(
            rotate_store_kernel, (total, -(-(heads + 2 * kv_heads) // block)),
            self._qkv, layer.input_norm if norms is None else norms, stack.cos, stack.sin, keys, values,
            rows.committed, rows.slot_start, rows.depths, rows.size, rows.each, width, shape.eps,
            HEADS=heads, KV_HEADS=kv_heads, D=dim, NORM=norms is not None, BLOCK=block, num_warps=2,
        )  # fmt: skip
        block_q, q_blocks, splits = stack.attention_grid(rows.batch, rows.each)
        self.call(
            tree_attention_kernel, (rows.batch * kv_heads, q_blocks, splits),
            self._qkv, keys, values, rows.depths if rows.bits is None else rows.bits, rows.committed, rows.size,
            rows.slot_start, self._attended, self._partial, self._lse, rows.each, width, total, dim**-0.5,
            HEADS=heads, KV_HEADS=kv_heads, D=dim, BLOCK_Q=block_q, BLOCK_KV=KV_BLOCK, SPLITS=splits,
            CAUSAL=rows.bits is None, num_warps=4,
        )  # fmt: skip
        if splits > 1:
            block = min(4, pow2(heads))
            self.call(
                combine_kernel, (total, -(-heads // block)), self._partial, self._lse, self._attended, total,
                HEADS=heads, D=dim, SPLITS=splits, BLOCK=block, num_warps=4,
            )  # fmt: skip

    def _linear(
        self,
        linear: Linear,
        x: Tensor,
        out: Tensor,
        rows: int,
        *,
        norm_eps: float | None = None,
        add: bool = False,
        gain: Tensor | None = None,
        gather: Tensor | None = None,
        tap: Tensor | None = None,
    ) -> None:
        """`linear_kernel`: `norm_eps` of the norm before, `add` the product to `out`, `gain` of the norm after."""
        assert isinstance(linear, PlainLinear)
        if isinstance(linear, ReducedLinear):
            assert add and gain is not None
            self._linear_over_ranks(linear, x, out, rows, gain, tap)
            return
        weight, bias = linear.weight, linear.bias
        n, k = weight.shape
        blocks = blocks_of(rows, weight)
        self.call(
            linear_kernel, _grid(rows, n, blocks),
            x, weight, out, self.squares, x if bias is None else bias, out,
            x if gather is None else gather, x if gain is None else gain, self.scaled, self.squares,
            x if tap is None else tap, rows, n, k, self.parts, 0 if tap is None else tap.stride(0), norm_eps or 0.0,
            NORM=norm_eps is not None, BIAS=bias is not None, RESIDUAL=add, GATHER=gather is not None,
            NEXT=gain is not None, TAP=tap is not None, TILES=self.tiles, **blocks,
        )  # fmt: skip
        if gain is not None:
            self.parts = -(-n // blocks["BLOCK_N"])

    def _linear_over_ranks(
        self, linear: ReducedLinear, x: Tensor, out: Tensor, rows: int, gain: Tensor, tap: Tensor | None
    ) -> None:
        """`_linear` with `add` and `gain`, where each rank has a part of the product."""
        weight, bias = linear.weight, linear.bias
        n, k = weight.shape
        blocks = blocks_of(rows, weight)
        part = self._summed[:rows]
        self.call(
            linear_kernel, _grid(rows, n, blocks),
            x, weight, part, self.squares, x, out, x, x, self.scaled, self.squares, x, rows, n, k, 0, 0, 0.0,
            NORM=False, BIAS=False, RESIDUAL=False, GATHER=False, NEXT=False, TAP=False, TILES=self.tiles, **blocks,
        )  # fmt: skip
        linear.reduce(part)
        self.call_after_all(
            add_sum_kernel, (rows,),
            part, x if bias is None else bias, out, gain, self.scaled, self.squares,
            x if tap is None else tap, 0 if tap is None else tap.stride(0),
            WIDTH=n, BLOCK=pow2(n), TILES=self.tiles, BIAS=bias is not None, TAP=tap is not None,
            num_warps=8 if n > 1024 else 4,
        )  # fmt: skip
        self.parts = 1

    def _gate(self, layer: FusedLayer, rows: int, eps: float) -> None:
        weight = weight_of(layer.gate_up)
        n, k = weight.shape[0] // 2, weight.shape[1]
        blocks = blocks_of(rows, weight, "gate")
        self.call(
            gated_kernel, _grid(rows, n, blocks),
            self.scaled, weight, self._gated, self.squares, rows, n, k, self.parts, eps, TILES=self.tiles, **blocks,
        )  # fmt: skip


def _grid(rows: int, n: int, blocks: dict[str, int]) -> tuple[int, int]:
    return -(-n // blocks["BLOCK_N"]), -(-rows // blocks["BLOCK_M"])
