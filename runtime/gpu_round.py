"""One DDTree round as a fixed sequence of kernels on device memory: what `round.decode_round` does, without the host.

    enqueue
      draft    block through the drafter, scores of all tokens, the best of each depth
      tree     `tree_kernel`: the exact tree of each sequence
      verify   all nodes through the target, the target's choice after each
      accept   `accept_kernel`: the accepted path, stop tokens and caps, what the host will read
      commit   accepted rows to the end of the prefix, their features to the drafter

Every buffer exists before the first round and every size is part of a `Shape`, so a round can be captured as one CUDA
graph (`gpu_graphs.py`). State of the sequences (lengths, roots, budgets, stop tokens) lives on the device and is
written by the host only when the batch or its settings change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.fused import FusedDecoder, FusedLayer, FusedStack
from runtime.gpu_kernels import (
    SCRATCH,
    choose_kernel,
    chosen_kernel,
    combine_kernel,
    context_store_kernel,
    draft_kernel,
    embed_kernel,
    gated_kernel,
    linear_kernel,
    noise_kernel,
    rotate_store_kernel,
    tree_attention_kernel,
)
from runtime.gpu_tree import (
    accept_kernel,
    compact_kernel,
    end_kernel,
    root_kernel,
    top_keys_kernel,
    top_scores_kernel,
    tree_kernel,
)
from runtime.kv_cache import Pool
from runtime.linear import PlainLinear
from runtime.round import Models

MOST_ROWS = int(SCRATCH.value)
STOPS = 8
"""Stop tokens a sequence may have on the device."""
CHUNK = 256
STAMPS = 6


@dataclass(frozen=True)
class Shape:
    """Sizes a round is captured for: `rows` tree nodes, root included, of `batch` sequences.

    `noisy`: some sequence samples; `shared`: the drafter sees the verifier's noise; `context`: what is committed is
    handed to the drafter.
    """

    batch: int
    rows: int
    noisy: bool = False
    shared: bool = False
    context: bool = True


def pow2(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()


def unsupported(models: Models) -> str | None:
    """Why these models cannot decode by `GpuRound`; None if they can."""
    target, drafter = models.target, models.drafter
    if not target.fused:
        return "the target runs through transformers' modules"
    decoder = target.decoder
    assert isinstance(decoder, FusedDecoder)
    stacks = [decoder.stack] + ([drafter.stack] if drafter is not None else [])
    for stack in stacks:
        if stack.shape.head_dim not in (16, 32, 64, 128, 256):
            return f"head size {stack.shape.head_dim} is no power of two from 16 to 256"
        if any(window is not None for window in stack.shape.windows):
            return "sliding windows"
        if not all(isinstance(layer.qkv, PlainLinear) for layer in stack.layers):
            return "packed linear layers"
    if models.propose is not None:
        return "drafts come from elsewhere"
    return None


class GpuRound:
    """Buffers and kernel calls of rounds of up to `max_batch` sequences over the slots of `models`."""

    def __init__(
        self, models: Models, max_batch: int, positions: int, *, timed: bool, chunk: int = CHUNK
    ) -> None:
        """`positions`: most positions a sequence has, tree rows included; `timed`: stamp the stages (GPU only).

        `chunk`: scores sorted together.
        """
        self._chunk = chunk
        early = models.target.device.type == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
        self._overlap = {"PDL": True, "launch_pdl": True} if early else {"PDL": False}
        decoder = models.target.decoder
        assert isinstance(decoder, FusedDecoder)
        self.models, self.max_batch, self.timed = models, max_batch, timed
        self.device = models.target.device
        self._decoder = decoder
        self._target = _Stack(decoder.stack, models.cache.target, positions)
        drafter, pool = models.drafter, models.cache.drafter
        self._drafter = (
            _Stack(drafter.stack, pool, positions) if drafter is not None and pool is not None else None
        )
        self._block = models.block_size if self._drafter else 1
        self._allocate(max_batch * MOST_ROWS)

    @property
    def block(self) -> int:
        """Positions of a draft block, root included: no round commits more."""
        return self._block

    def record(self, shape: Shape) -> int:
        """int32 words a sequence's result takes in `results`."""
        return 4 + 2 * self._block + 4 * shape.rows

    def results(self, shape: Shape) -> Tensor:
        """What the last round of `shape` tells the host, int32 `[batch, record]`."""
        return self._out[: shape.batch * self.record(shape)].view(shape.batch, -1)

    def enqueue(self, shape: Shape) -> None:
        """Puts the kernels of one round into the current stream."""
        speculative = shape.rows > 1
        depths = self._block if speculative else 1
        if shape.noisy:
            groups = (self.models.target.vocab_size + 3) // 4
            grid = (shape.batch * depths, -(-groups // 512))
            self._call(
                noise_kernel,
                grid,
                self._noise,
                self.seeds,
                self.committed,
                self.temperature,
                depths,
                self.models.target.vocab_size,
                BLOCK=512,
            )
        if speculative:
            self._draft(shape)
        else:
            self._call(
            root_kernel, (shape.batch,),
            self.root, self.active, self._tokens, self._parents, self._depths, self._log_probs, self._bits, self._size,
                self.stamps, TIMED=self.timed,
            )  # fmt: skip
        self._verify(shape, depths)
        self._accept(shape)
        self._commit(shape)

    def _call(self, kernel: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
        """Launches a kernel; where the device can, its start overlaps the end of the one before."""
        kernel[grid](*args, **settings, **self._overlap)

    def _allocate(self, rows: int) -> None:
        models, device, batch = self.models, self.device, self.max_batch
        dtype, vocab = models.target.dtype, models.target.vocab_size
        hidden = int(models.target.config.hidden_size)

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        self.state = ints(8, batch)
        """root, committed, slot_start, remaining, budget, chain, active, drafted rows; by sequence."""
        (self.root, self.committed, self.slot_start, self.remaining, self.budget, self.chain, self.active,
         self.block_rows) = self.state.unbind(0)  # fmt: skip
        self.seeds = ints(batch, dtype=torch.int64)
        self.temperature = floats(batch)
        self.stops = ints(batch, STOPS)
        self.stamps = ints(STAMPS, dtype=torch.int64)
        self._size, self._kept = ints(batch), ints(batch)
        self._path, self._feature_rows = ints(batch * self._block), ints(batch * self._block)
        self._tokens, self._parents, self._depths, self._chosen = (ints(rows) for _ in range(4))
        self._bits = ints(rows, dtype=torch.int64)
        self._log_probs = floats(rows)
        self._out = ints(batch * (4 + 2 * self._block + 4 * MOST_ROWS))
        self._offsets = torch.arange(self._block, dtype=torch.int32, device=device).repeat(batch)
        self._block_bits = torch.full(
            (batch * self._block,), 2**self._block - 1, dtype=torch.int64, device=device
        )

        stacks = [self._target] + ([self._drafter] if self._drafter else [])
        self._hidden = torch.zeros(rows, hidden, dtype=dtype, device=device)
        self._scaled = torch.zeros(rows, hidden, dtype=dtype, device=device)
        self._tiles, self._parts = pow2(-(-hidden // 16)), 1
        self._squares = floats(rows * self._tiles)
        self._qkv = torch.zeros(rows, max(each.qkv_width for each in stacks), dtype=dtype, device=device)
        self._context = torch.zeros(0, dtype=dtype, device=device)
        self._attended = torch.zeros(rows, max(each.out_width for each in stacks), dtype=dtype, device=device)
        self._gated = torch.zeros(rows, max(each.mlp_width for each in stacks), dtype=dtype, device=device)
        parts = max(
            each.most_partial(batch, most)
            for each, most in zip(stacks, (MOST_ROWS, self._block), strict=False)
        )
        self._partial = floats(parts)
        self._lse = floats(max(1, parts // min(each.shape.head_dim for each in stacks)))
        tiles = -(-vocab // head_block(hidden))
        self._best, self._best_ids = floats(tiles * rows), ints(tiles * rows)
        self._noise = floats(batch * self._block * vocab)
        if self._drafter is None:
            return
        taps = len(self._decoder.taps)
        horizon = self._block - 1
        assert models.drafter is not None
        context_width = int(models.drafter.context_linear.weight.shape[0])
        self._context = torch.zeros(batch * self._block, context_width, dtype=dtype, device=device)
        self._features = torch.zeros(rows, taps * hidden, dtype=dtype, device=device)
        self._scores = floats(batch * horizon * vocab)
        self._tile_max, self._tile_sum = floats(tiles * batch * horizon), floats(tiles * batch * horizon)
        chunks = -(-vocab // self._chunk)
        self._keys = [ints(batch * horizon * chunks * MOST_ROWS, dtype=torch.int64) for _ in range(2)]
        every = pow2(horizon * MOST_ROWS)
        self._work_scores = floats(batch * (horizon + 1) * MOST_ROWS)
        self._work_order, self._work_places = ints(batch * horizon * MOST_ROWS), ints(batch * every)
        self._pairs = {}
        for count in (4, 8, 16, 32, 64):
            self._pairs[count] = _candidate_pairs(count, device)

    def _draft(self, shape: Shape) -> None:
        """Drafter over `[root, mask, ...]`, the best tokens of each depth, and the tree."""
        models, drafter, batch, block = self.models, self.models.drafter, shape.batch, self._block
        assert drafter is not None and self._drafter is not None
        horizon, vocab = block - 1, models.target.vocab_size
        mask_id, gain = drafter.config.mask_token_id, drafter.stack.layers[0].input_norm
        self._embed(self.root, batch * block, block, mask_id, gain, masked=True)
        where = _Where(self._offsets, self._block_bits, self.block_rows)
        self._layers(self._drafter, batch, block, where, (), drafter.norm)
        head = models.target.decoder.head
        rows = batch * horizon
        tiles = -(-vocab // head_block(int(head.weight.shape[1])))
        blocks = _blocks(rows, *head.weight.shape, "head")
        self._call(
            draft_kernel, (tiles, -(-rows // blocks["BLOCK_M"])),
            self._scaled, head.weight, self._squares, self._noise, self.temperature,
            self._scores, self._tile_max, self._tile_sum, rows, horizon, vocab, head.weight.shape[1],
            self._parts, drafter.stack.shape.eps, NOISY=shape.noisy, SHARED=shape.shared, TILES=self._tiles, **blocks,
        )  # fmt: skip
        keep = pow2(max(shape.rows - 1, 2))
        keys, length = self._best_keys(rows, vocab, keep)
        ranks, places, pairs = self._pairs[max(4, pow2(shape.rows))]
        self._call(
            tree_kernel, (batch,),
            keys, self._tile_max, self._tile_sum, tiles, ranks, places,
            self.root, self.remaining, self.budget, self.chain, self.active,
            self._work_scores, self._work_order, self._work_places,
            self._tokens, self._parents, self._depths, self._log_probs, self._bits, self._size, self.stamps, shape.rows,
            BATCH=batch, LEVELS=horizon, KEEP=length, WIDTH=keep, PAIRS=pairs, ALL=pow2(horizon * keep),
            ROWS_P2=pow2(shape.rows), TILES_P2=pow2(tiles), TIMED=self.timed,
            num_warps=4,
        )  # fmt: skip

    def _best_keys(self, rows: int, vocab: int, keep: int) -> tuple[Tensor, int]:
        """Sorted keys `[rows, keep]` of the best scores, by sorting chunks until one is left."""
        chunk = max(self._chunk, 2 * keep)
        chunks = -(-vocab // chunk)
        # One warp sorts its chunk in registers; more of them meet in shared memory at every step.
        here, there = self._keys
        self._call(
            top_scores_kernel,
            (rows, chunks),
            self._scores,
            here,
            vocab,
            chunks,
            CHUNK=chunk,
            KEEP=keep,
            num_warps=1,
        )
        while chunks > 1:
            length, chunks = chunks * keep, -(-chunks * keep // (2 * chunk))
            self._call(
                top_keys_kernel,
                (rows, chunks),
                here,
                there,
                length,
                chunks,
                CHUNK=min(2 * chunk, max(keep, pow2(length))),
                KEEP=keep,
                num_warps=1,
            )
            here, there = there, here
        return here, keep

    def _verify(self, shape: Shape, depths: int) -> None:
        """All nodes through the target, and the target's choice after each."""
        batch, rows = shape.batch, shape.rows
        total, target = batch * rows, self.models.target
        self._embed(self._tokens, total, rows, 0, self._target.layers[0].input_norm, masked=False)
        taps = self._decoder.taps if shape.context and self._drafter is not None else ()
        self._layers(
            self._target, batch, rows, _Where(self._depths, self._bits, self._size), taps, self._decoder.norm
        )
        head = self._decoder.head
        width = int(head.weight.shape[1])
        tiles = -(-target.vocab_size // head_block(width))
        blocks = _blocks(total, *head.weight.shape, "head")
        self._call(
            choose_kernel, (tiles, -(-total // blocks["BLOCK_M"])),
            self._scaled, head.weight, self._squares, self._noise, self.temperature, self._depths,
            self._best, self._best_ids, total, rows, depths, target.vocab_size, width, self._parts, self._target.shape.eps,
            NOISY=shape.noisy, TILES=self._tiles, **blocks,
        )  # fmt: skip
        self._call(
            chosen_kernel,
            (total,),
            self._best,
            self._best_ids,
            self._chosen,
            total,
            tiles,
            TILES_P2=pow2(tiles),
        )

    def _accept(self, shape: Shape) -> None:
        self._call(
            accept_kernel, (shape.batch,),
            self._tokens, self._parents, self._depths, self._log_probs, self._bits, self._size, self._chosen,
            self.root, self.committed, self.remaining, self.active, self.block_rows, self.stops,
            self._path, self._feature_rows, self._kept, self._out, self.stamps,
            shape.rows, self._block, self.record(shape),
            STOPS=STOPS, ROWS_P2=pow2(shape.rows), BLOCK_P2=pow2(self._block), TIMED=self.timed, num_warps=1,
        )  # fmt: skip

    def _commit(self, shape: Shape) -> None:
        """Compacts the target's slots and extends the drafter's context by what was kept."""
        batch, block = shape.batch, self._block
        if shape.rows > 1:
            pool, stack = self.models.cache.target, self._target.shape
            self._call(
            compact_kernel, (batch, pool.keys.shape[0] * stack.kv_heads),
            pool.keys, pool.values, self.committed, self._kept, self.slot_start, self._path, block,
                pool.keys.shape[2], KV_HEADS=stack.kv_heads, D=stack.head_dim, BLOCK_P2=pow2(block), num_warps=1,
            )  # fmt: skip
        drafter, pool_d = self.models.drafter, self.models.cache.drafter
        if drafter is not None and pool_d is not None and self._drafter is not None and shape.context:
            stack = self._drafter.shape
            layers = len(stack.windows)
            rows = batch * block
            self._linear(
                drafter.fc,
                self._features,
                self._hidden,
                rows,
                gather=self._feature_rows,
                gain=drafter.hidden_norm,
            )
            self._linear(drafter.context_linear, self._scaled, self._context, rows, norm_eps=stack.eps)
            self._call(
            context_store_kernel, (rows, layers),
            self._context, drafter.k_norms, self._drafter.cos, self._drafter.sin, pool_d.keys, pool_d.values,
                self.committed, self._kept, self.slot_start, block, pool_d.keys.shape[2], stack.eps,
                LAYERS=layers, KV_HEADS=stack.kv_heads, D=stack.head_dim, KV_P2=pow2(stack.kv_heads), num_warps=2,
            )  # fmt: skip
        if self.timed:
            self._call(end_kernel, (1,), self.stamps, TIMED=True)

    def _embed(self, ids: Tensor, total: int, rows: int, mask_id: int, gain: Tensor, *, masked: bool) -> None:
        embedding = self._decoder.embedding
        width = int(embedding.shape[1])
        self._call(
            embed_kernel, (total,),
            ids, embedding, self._hidden, gain, self._scaled, self._squares, self.stamps, rows, mask_id,
            WIDTH=width, BLOCK=pow2(width), TILES=self._tiles, MASKED=masked, TIMED=self.timed and masked, num_warps=4,
        )  # fmt: skip
        self._parts = 1

    def _layers(
        self, stack: _Stack, batch: int, rows: int, where: _Where, taps: tuple[int, ...], final: Tensor
    ) -> None:
        """Every layer of a stack over `self._hidden`, in place; outputs of the layers in `taps` to the features.

        `final`: gain of the norm that follows the last layer.
        """
        total, eps, count = batch * rows, stack.shape.eps, len(stack.layers)
        for index, layer in enumerate(stack.layers):
            self._linear(layer.qkv, self._scaled, self._qkv, total, norm_eps=eps)
            self._attention(stack, layer, index, batch, rows, where)
            self._linear(layer.o, self._attended, self._hidden, total, add=True, gain=layer.post_norm)
            self._gate(layer, total, eps)
            tap = None
            if index in taps:
                width = self._hidden.shape[1]
                tap = self._features[:, taps.index(index) * width :]
            gain = stack.layers[index + 1].input_norm if index + 1 < count else final
            self._linear(layer.down, self._gated, self._hidden, total, add=True, gain=gain, tap=tap)

    def _attention(
        self, stack: _Stack, layer: FusedLayer, index: int, batch: int, rows: int, where: _Where
    ) -> None:
        shape, pool, total = stack.shape, stack.pool, batch * rows
        heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
        keys, values, width = pool.keys[index], pool.values[index], pool.keys.shape[2]
        norms = layer.qk_norm
        self._call(
            rotate_store_kernel, (total,),
            self._qkv, layer.input_norm if norms is None else norms, stack.cos, stack.sin, keys, values,
            self.committed, self.slot_start, where.depths, where.size, rows, width, shape.eps,
            HEADS=heads, KV_HEADS=kv_heads, D=dim, NORM=norms is not None,
            HEADS_P2=pow2(heads + kv_heads), KV_P2=pow2(kv_heads), num_warps=4,
        )  # fmt: skip
        block_q, q_blocks, splits = stack.attention_grid(batch, rows)
        self._call(
            tree_attention_kernel, (batch * kv_heads, q_blocks, splits),
            self._qkv, keys, values, where.bits, self.committed, where.size, self.slot_start,
            self._attended, self._partial, self._lse, rows, width, total, dim**-0.5,
            HEADS=heads, KV_HEADS=kv_heads, D=dim, BLOCK_Q=block_q, BLOCK_KV=64, SPLITS=splits, num_warps=4,
        )  # fmt: skip
        if splits > 1:
            self._call(
            combine_kernel, (total,),
            self._partial, self._lse, self._attended, total,
                HEADS=heads, D=dim, SPLITS=splits, HEADS_P2=pow2(heads), num_warps=4,
            )  # fmt: skip

    def _linear(
        self,
        linear: Any,
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
        weight, bias = linear.weight, linear.bias
        n, k = weight.shape
        blocks = _blocks(rows, n, k)
        self._call(
            linear_kernel, _grid(rows, n, blocks),
            x, weight, out, self._squares, x if bias is None else bias, out,
            self._feature_rows if gather is None else gather, x if gain is None else gain, self._scaled, self._squares,
            x if tap is None else tap, rows, n, k, self._parts, 0 if tap is None else tap.stride(0), norm_eps or 0.0,
            NORM=norm_eps is not None, BIAS=bias is not None, RESIDUAL=add, GATHER=gather is not None,
            NEXT=gain is not None, TAP=tap is not None, TILES=self._tiles, **blocks,
        )  # fmt: skip
        if gain is not None:
            self._parts = -(-n // blocks["BLOCK_N"])

    def _gate(self, layer: FusedLayer, rows: int, eps: float) -> None:
        weight = layer.gate_up.weight
        n, k = weight.shape[0] // 2, weight.shape[1]
        blocks = _blocks(rows, n, k, "gate")
        self._call(
            gated_kernel, _grid(rows, n, blocks),
            self._scaled, weight, self._gated, self._squares, rows, n, k, self._parts, eps, TILES=self._tiles, **blocks,
        )  # fmt: skip


@dataclass(frozen=True)
class _Where:
    """Where the rows of a pass stand: depths and ancestor bits `[batch, rows]`, valid rows `[batch]`."""

    depths: Tensor
    bits: Tensor
    size: Tensor


class _Stack:
    """Decoder layers with their slots and rotation tables."""

    def __init__(self, stack: FusedStack, pool: Pool, positions: int) -> None:
        self.shape, self.layers, self.pool = stack.shape, stack.layers, pool
        rotation = stack.rotation(torch.arange(positions, device=pool.device))[:, 0]
        self.cos, self.sin = rotation.real.contiguous(), rotation.imag.contiguous()
        self.qkv_width = int(self.layers[0].qkv.weight.shape[0])
        self.out_width = self.shape.heads * self.shape.head_dim
        self.mlp_width = int(self.layers[0].down.weight.shape[1])
        self._positions = positions

    def attention_grid(self, batch: int, rows: int) -> tuple[int, int, int]:
        """Rows of a query tile, tiles, and splits of the prefix: enough programs for the device, fixed by the sizes."""
        packed = rows * (self.shape.heads // self.shape.kv_heads)
        block_q = min(64, max(16, pow2(packed)))
        q_blocks = -(-packed // block_q)
        programs = batch * self.shape.kv_heads * q_blocks
        splits = min(pow2(-(-132 // programs)), 16, pow2(-(-self._positions // 64)))
        return block_q, q_blocks, splits

    def most_partial(self, max_batch: int, most_rows: int) -> int:
        """Elements of the largest partial result any shape needs."""
        sizes = [1]
        for batch in batches(max_batch):
            for rows in (1, 8, 16, 32, most_rows):
                splits = self.attention_grid(batch, rows)[2]
                if splits > 1:
                    sizes.append(splits * batch * rows * self.out_width)
        return max(sizes)


def batches(max_batch: int) -> list[int]:
    """Batch sizes that rounds are captured for: powers of two up to `max_batch`, and that."""
    sizes = [1]
    while sizes[-1] < max_batch:
        sizes.append(min(2 * sizes[-1], max_batch))
    return sizes


def _candidate_pairs(count: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Ranks and places of all pairs that can be among the `count - 1` best of a depth, padded, and how many.

    Pair (rank, place) comes after all pairs with no larger rank and place, (rank + 1) * (place + 1) with itself.
    """
    most = count - 1
    pairs = [(r, p) for r in range(most) for p in range(most) if (r + 1) * (p + 1) <= most]
    size = max(pow2(len(pairs)), pow2(most))
    table = torch.full((2, size), -1, dtype=torch.int32)
    table[1] = 0
    table[:, : len(pairs)] = torch.tensor(pairs, dtype=torch.int32).T
    table = table.to(device)
    return table[0].contiguous(), table[1].contiguous(), size


def _grid(rows: int, n: int, blocks: dict[str, int]) -> tuple[int, int]:
    return -(-n // blocks["BLOCK_N"]), -(-rows // blocks["BLOCK_M"])


def head_block(k: int) -> int:
    """Vocabulary entries of a tile of the head."""
    return 128 if k <= 1024 else 64


def _blocks(rows: int, n: int, k: int, kind: str = "") -> dict[str, int]:
    """Tile sizes and launch settings of a product of `rows` rows with a weight `[n, k]`, as measured on an H200.

    Small weights want many narrow tiles, which wait for memory side by side; large ones deep tiles. `kind`: "gate",
    which multiplies two weights at once, or "head".
    """
    few, large = rows <= 16, n * k >= 8_000_000
    block_m = 16 if few else 32 if rows <= 32 else 128 if rows >= 256 and (large or kind == "head") else 64
    warps = 8 if block_m == 128 else 4
    if kind == "head":
        block_n, block_k, stages = head_block(k), 64 if k <= 1024 or rows > 32 else 128, 5
    elif large and block_m == 128:
        block_n, block_k, stages = 128 if n > 4096 else 64, 64, 4
    elif large and (n <= 4096 or few or (rows <= 32 and kind != "gate")):
        block_n, block_k, stages = 32, 256, 4
    elif large:
        block_n, block_k, stages = 64, 128, 4
    elif rows > 64:
        block_n, block_k, stages = 64 if kind == "gate" else 32, 64, 4 if kind == "gate" else 5
    elif k <= 1024:
        block_n, block_k, stages = 32 if few and kind == "gate" else 16, 64, 9
        warps = 2 if few and kind != "gate" else 4
    else:
        block_n, block_k, stages = 16, 256 if rows <= 32 else 128, 6 if rows <= 32 else 5
    block_k = min(block_k, max(16, pow2(k)))
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "EVEN": k % block_k == 0,
        "num_warps": warps,
        "num_stages": stages,
    }
