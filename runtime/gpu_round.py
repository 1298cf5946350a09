"""One DDTree round as a fixed sequence of kernels on device memory: what `round.decode_round` does, without the host.

    enqueue
      draft    block through the drafter, scores of all tokens, the best of each depth
      tree     `tree_kernel`: the exact tree of each sequence
      verify   all nodes through the target, the target's choice after each
      accept   `accept_kernel`: the accepted path, stop tokens and caps, what the host will read
      commit   accepted rows to the end of the prefix, their features to the drafter

Every buffer exists before the first round and every size is part of a `Shape`, so a round can be captured as one CUDA
graph (`gpu_graphs.py`). State of the sequences (lengths, roots, budgets, stop tokens) lives on the device and is
written by the host only when the batch or its settings change. A chunk of a prompt is such a sequence too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.gpu_heads import draft_kernel, noise_kernel
from runtime.gpu_pass import MOST_ROWS, DevicePass, Filters, Rows, weight_of
from runtime.gpu_tiles import blocks_of, pow2
from runtime.gpu_tree import (
    accept_kernel,
    compact_kernel,
    end_kernel,
    root_kernel,
    top_keys_kernel,
    top_scores_kernel,
    tree_kernel,
)
from runtime.round import Models

ROWS = (1, 8, 16, 32, MOST_ROWS)
"""Tree sizes, root included, that rounds are captured for; a size between runs in the next larger one."""
PREFILLS = (32, 64, 128, 256, 512, 1024)
"""Prompt chunks that are captured; a chunk between runs in the next larger one."""
STOPS = 8
"""Stop tokens a sequence may have on the device."""
CHUNK = 256
"""Scores one warp sorts together, in registers."""
STAMPS = 6


@dataclass(frozen=True)
class Shape:
    """Sizes a round is captured for: `rows` tree nodes, root included, of `batch` sequences.

    `noisy`: some sequence samples; `shared`: the drafter sees the verifier's noise; `context`: what is committed is
    handed to the drafter; `filtered`: some sequence samples with top_k, top_p or min_p.
    """

    batch: int
    rows: int
    noisy: bool = False
    shared: bool = False
    context: bool = True
    filtered: bool = False


@dataclass(frozen=True)
class PromptShape:
    """Sizes a prompt chunk is captured for; `last`: the first token is chosen behind it."""

    rows: int
    last: bool
    noisy: bool
    context: bool
    filtered: bool = False


def batches(max_batch: int) -> list[int]:
    """Batch sizes that rounds are captured for: powers of two up to `max_batch`, and that."""
    sizes = [1]
    while sizes[-1] < max_batch:
        sizes.append(min(2 * sizes[-1], max_batch))
    return sizes


def prefill_sizes(max_batch: int) -> tuple[int, ...]:
    """Prompt chunks that are captured beside rounds of up to `max_batch` sequences."""
    return tuple(size for size in PREFILLS if size <= max(max_batch * MOST_ROWS, PREFILLS[0]))


class GpuRound:
    """Buffers and kernel calls of rounds of up to `max_batch` sequences over the slots of `models`."""

    def __init__(
        self, models: Models, max_batch: int, positions: int, *, timed: bool, chunk: int = CHUNK
    ) -> None:
        """`positions`: most positions a sequence has, tree rows included; `timed`: stamp the stages (GPU only).

        `chunk`: scores sorted together.
        """
        self.models, self.max_batch, self.timed, self._chunk = models, max_batch, timed, chunk
        self.block = models.block_size if models.drafter is not None else 1
        """Positions of a draft block, root included: no round commits more."""
        rows = max_batch * MOST_ROWS
        self.prefills = prefill_sizes(max_batch)
        sizes = [(batch, each) for batch in batches(max_batch) for each in (*ROWS, self.block)]
        sizes += [(1, each) for each in self.prefills]
        self._pass = DevicePass(models, max(rows, self.prefills[-1]), positions, sizes)
        self._allocate(max(rows, self.prefills[-1]))
        if models.drafter is not None:
            self._allocate_draft()

    def record(self, rows: int) -> int:
        """int32 words a sequence's result takes in `results`, of a round of `rows` tree nodes, root included."""
        return 4 + 2 * self.block + 4 * rows

    def results(self, shape: Shape) -> Tensor:
        """What the last round of `shape` tells the host, int32 `[batch, record]`."""
        return self.out[: shape.batch * self.record(shape.rows)].view(shape.batch, -1)

    @property
    def scores(self) -> Tensor:
        """Stored scores `[vocab]` of the first row that was filtered last."""
        return self._pass.stored[0]

    def rest(self) -> None:
        """Makes every sequence inactive, so that rounds and chunks write scratch slots alone."""
        self.active.zero_()
        self.block_rows.zero_()
        self.prompt_state.zero_()

    def enqueue(self, shape: Shape) -> None:
        """Puts the kernels of one round into the current stream."""
        speculative = shape.rows > 1
        depths = self.block if speculative else 1
        if shape.noisy:
            self._draw_noise(shape.batch, depths, self.seeds, self.committed, self.temperature)
        if speculative:
            self._draft(shape)
        else:
            self._pass.call(
                root_kernel, (shape.batch,),
                self.root, self.active, self._tokens, self._parents, self._depths, self._log_probs, self._bits,
                self._size, self.stamps, TIMED=self.timed,
            )  # fmt: skip
        self._verify(shape, depths)
        self._accept(shape)
        self._commit(shape)

    def enqueue_prompt(self, shape: PromptShape) -> None:
        """Puts the kernels of one prompt chunk, as `prompt` and `prompt_ids` describe it, into the current stream.

        The first token, where one is chosen, is left in `prompt_choice`.
        """
        before, end, slot_start, size, last_row, tail, top_k = self.prompt
        rows = Rows(1, shape.rows, before, slot_start, size, self._steps, None)
        stack = self._pass.target
        taps = self._pass.decoder.taps if shape.context else ()
        self._pass.embed(self.prompt_ids, shape.rows, stack.layers[0].input_norm, self.stamps)
        self._pass.layers(stack, rows, self._pass.decoder.norm, taps)
        if shape.last:
            hot, top_p, min_p = self.prompt_odds.unbind(0)
            if shape.noisy:
                self._draw_noise(1, 1, self.prompt_seed, tail, hot)
            self._pass.choose(
                1, self.prompt_choice, self._noise, hot, self._zero,
                rows=1, noise_rows=1, noisy=shape.noisy, gather=last_row,
                filters=Filters(top_k, top_p, min_p, size) if shape.filtered else None,
            )  # fmt: skip
        if shape.context:
            self._pass.extend_context(1, shape.rows, end, size, slot_start, None)

    def _allocate(self, rows: int) -> None:
        device, batch = self.models.target.device, self.max_batch

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.state = ints(9, batch)
        """root, committed, slot_start, remaining, budget, chain, active, drafted rows, top_k; by sequence."""
        (self.root, self.committed, self.slot_start, self.remaining, self.budget, self.chain, self.active,
         self.block_rows, self.top_k) = self.state.unbind(0)  # fmt: skip
        self.seeds = ints(batch, dtype=torch.int64)
        self.odds = self._pass.floats(3, batch)
        """temperature, top_p, min_p; by sequence."""
        self.temperature, self.top_p, self.min_p = self.odds.unbind(0)
        self.stops = ints(batch, STOPS)
        self.stamps = ints(STAMPS, dtype=torch.int64)
        self.prompt_state = ints(7)
        self.prompt = self.prompt_state.unsqueeze(1).unbind(0)
        """committed before and after, slot_start, rows that count, the last of them, the position before the choice,
        top_k."""
        self.prompt_ids, self.prompt_choice = ints(self.prefills[-1]), ints(1)
        self.prompt_seed, self.prompt_odds = ints(1, dtype=torch.int64), self._pass.floats(3, 1)
        self._steps = torch.arange(self.prefills[-1], dtype=torch.int32, device=device)
        self._zero = ints(1)
        self._size, self._kept = ints(batch), ints(batch)
        self._path, self._feature_rows = ints(batch * self.block), ints(batch * self.block)
        self._tokens, self._parents, self._depths, self._chosen = (ints(rows) for _ in range(4))
        self._bits = ints(rows, dtype=torch.int64)
        self._log_probs = self._pass.floats(rows)
        self.out = ints(batch * self.record(MOST_ROWS))
        """Results of a round: of each sequence a record, see `accept_kernel`."""
        self._noise = self._pass.floats(batch * self.block * self.models.target.vocab_size)

    def _allocate_draft(self) -> None:
        device, batch, horizon = self.models.target.device, self.max_batch, self.block - 1
        vocab, tiles = self.models.target.vocab_size, self._pass.head_tiles

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        steps = torch.arange(self.block, dtype=torch.int32, device=device).repeat(batch)
        everything = torch.full((batch * self.block,), 2**self.block - 1, dtype=torch.int64, device=device)
        self._block_depths, self._block_bits = steps, everything
        self._scores = self._pass.floats(batch * horizon * vocab)
        self._tile_max, self._tile_sum = (self._pass.floats(tiles * batch * horizon) for _ in range(2))
        chunks = -(-vocab // self._chunk)
        self._keys = [ints(batch * horizon * chunks * MOST_ROWS, dtype=torch.int64) for _ in range(2)]
        self._work_scores = self._pass.floats(batch * (horizon + 1) * MOST_ROWS)
        self._work_order = ints(batch * horizon * MOST_ROWS)
        self._work_places = ints(batch * pow2(horizon * MOST_ROWS))
        self._pairs = {rows: _candidate_pairs(rows, device) for rows in ROWS[1:]}

    def _draw_noise(
        self, batch: int, depths: int, seeds: Tensor, committed: Tensor, temperature: Tensor
    ) -> None:
        vocab = self.models.target.vocab_size
        grid = (batch * depths, -(-vocab // (4 * 512)))
        self._pass.call(
            noise_kernel, grid, self._noise, seeds, committed, temperature, depths, vocab, BLOCK=512
        )

    def _draft(self, shape: Shape) -> None:
        """Drafter over `[root, mask, ...]`, the best tokens of each depth, and the tree."""
        drafter, batch, block, stack = self.models.drafter, shape.batch, self.block, self._pass.drafter
        assert drafter is not None and stack is not None
        self._pass.embed(
            self.root, batch * block, stack.layers[0].input_norm, self.stamps,
            block=block, mask_id=drafter.config.mask_token_id, timed=self.timed,
        )  # fmt: skip
        rows = Rows(
            batch,
            block,
            self.committed,
            self.slot_start,
            self.block_rows,
            self._block_depths,
            self._block_bits,
        )
        self._pass.layers(stack, rows, drafter.norm)

        horizon, vocab, tiles = block - 1, self.models.target.vocab_size, self._pass.head_tiles
        weight = weight_of(self._pass.decoder.head)
        blocks = blocks_of(batch * horizon, weight, "head")
        self._pass.call(
            draft_kernel, (tiles, -(-batch * horizon // blocks["BLOCK_M"])),
            self._pass.scaled, weight, self._pass.squares, self._noise, self.temperature,
            self._scores, self._tile_max, self._tile_sum, batch * horizon, horizon, vocab, weight.shape[1],
            self._pass.parts, stack.shape.eps,
            NOISY=shape.noisy, SHARED=shape.shared, TILES=self._pass.tiles, **blocks,
        )  # fmt: skip
        keep = pow2(shape.rows - 1)
        keys = self._best_keys(batch * horizon, vocab, keep)
        ranks, places, pairs = self._pairs[shape.rows]
        self._pass.call(
            tree_kernel, (batch,),
            keys, self._tile_max, self._tile_sum, tiles, ranks, places,
            self.root, self.remaining, self.budget, self.chain, self.active,
            self._work_scores, self._work_order, self._work_places,
            self._tokens, self._parents, self._depths, self._log_probs, self._bits, self._size, self.stamps,
            shape.rows, batch,
            LEVELS=horizon, KEEP=keep, WIDTH=keep, PAIRS=pairs, ALL=pow2(horizon * keep),
            ROWS_P2=pow2(shape.rows), TILES_P2=pow2(tiles), TIMED=self.timed, num_warps=4,
        )  # fmt: skip

    def _best_keys(self, rows: int, vocab: int, keep: int) -> Tensor:
        """Sorted keys `[rows, keep]` of the best scores, by sorting chunks until one is left."""
        chunk = max(self._chunk, 2 * keep)
        chunks = -(-vocab // chunk)
        here, there = self._keys
        grid = (rows, chunks)
        self._pass.call(
            top_scores_kernel, grid, self._scores, here, vocab, chunks, CHUNK=chunk, KEEP=keep, num_warps=1
        )
        while chunks > 1:
            length, chunks = chunks * keep, -(-chunks * keep // (2 * chunk))
            size = min(2 * chunk, max(keep, pow2(length)))
            grid = (rows, chunks)
            self._pass.call(
                top_keys_kernel, grid, here, there, length, chunks, CHUNK=size, KEEP=keep, num_warps=1
            )
            here, there = there, here
        return here

    def _verify(self, shape: Shape, depths: int) -> None:
        """All nodes through the target, and the target's choice after each."""
        batch, each, stack = shape.batch, shape.rows, self._pass.target
        rows = Rows(batch, each, self.committed, self.slot_start, self._size, self._depths, self._bits)
        taps = self._pass.decoder.taps if shape.context and self.models.drafter is not None else ()
        self._pass.embed(self._tokens, rows.total, stack.layers[0].input_norm, self.stamps)
        self._pass.layers(stack, rows, self._pass.decoder.norm, taps)
        self._pass.choose(
            rows.total, self._chosen, self._noise, self.temperature, self._depths,
            rows=each, noise_rows=depths, noisy=shape.noisy,
            filters=Filters(self.top_k, self.top_p, self.min_p, self._size) if shape.filtered else None,
        )  # fmt: skip

    def _accept(self, shape: Shape) -> None:
        self._pass.call(
            accept_kernel, (shape.batch,),
            self._tokens, self._parents, self._depths, self._log_probs, self._bits, self._size, self._chosen,
            self.root, self.committed, self.remaining, self.active, self.block_rows, self.stops,
            self._path, self._feature_rows, self._kept, self.out, self.stamps,
            shape.rows, self.block, self.record(shape.rows),
            STOPS=STOPS, ROWS_P2=pow2(shape.rows), BLOCK_P2=pow2(self.block), TIMED=self.timed, num_warps=1,
        )  # fmt: skip

    def _commit(self, shape: Shape) -> None:
        """Compacts the target's slots and extends the drafter's context by what was kept."""
        if shape.rows > 1:
            pool, stack = self.models.cache.target, self._pass.target.shape
            self._pass.call(
                compact_kernel, (shape.batch, pool.keys.shape[0] * stack.kv_heads),
                pool.keys, pool.values, self.committed, self._kept, self.slot_start, self._path, self.block,
                pool.keys.shape[2], KV_HEADS=stack.kv_heads, D=stack.head_dim, BLOCK_P2=pow2(self.block), num_warps=1,
            )  # fmt: skip
        if shape.context:
            self._pass.extend_context(
                shape.batch, self.block, self.committed, self._kept, self.slot_start, self._feature_rows
            )
        if self.timed:
            self._pass.call(end_kernel, (1,), self.stamps, TIMED=True)


def _candidate_pairs(rows: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Ranks and places of all pairs that can be among the `rows - 1` best of a depth, padded, and how many.

    Pair (rank, place) comes after all pairs with no larger rank and place, (rank + 1) * (place + 1) with itself.
    """
    most = rows - 1
    pairs = [(r, p) for r in range(most) for p in range(most) if (r + 1) * (p + 1) <= most]
    size = max(pow2(len(pairs)), pow2(most))
    table = torch.full((2, size), -1, dtype=torch.int32)
    table[1] = 0
    table[:, : len(pairs)] = torch.tensor(pairs, dtype=torch.int32).T
    table = table.to(device)
    return table[0].contiguous(), table[1].contiguous(), size
