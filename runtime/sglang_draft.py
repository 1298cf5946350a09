"""The drafter's last step under SGLang: from its hidden states to trees in fixed buffers, inside its CUDA graph.

The scores are those of `runtime.round.draft_block`; the trees those of `runtime.tree`. Nothing is read back, so the
step is captured with the drafter's forward pass and replayed with it. At temperature > 0 the noise that SGLang's
seeded sampler adds at a position is added here too (same hash, same token id as column), which changes what is
proposed and never what is emitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from sglang.kernels.ops.sampling.murmur_hash import fmix32, murmur3_mix
from torch import Tensor

from runtime.sampling import ordered_top
from runtime.tree import DraftTree, grow_tree

COLUMNS = 1024


@dataclass(frozen=True)
class TreeShape:
    """What is drafted: trees of `tree_budget` nodes, at most `ranks` children each, over `block_size - 1` depths."""

    block_size: int
    tree_budget: int
    ranks: int

    @classmethod
    def of(cls, mode: str, block_size: int, width: int) -> TreeShape:
        """`width`: nodes of a verify pass, root included; raises ValueError where the two do not go together."""
        horizon, budget = block_size - 1, width - 1
        if horizon < 1:
            raise ValueError(f"block size {block_size} leaves no draft position; it must be 2 or more")
        if mode == "chain":
            if budget != horizon:
                raise ValueError(
                    f"a chain verifies its block: speculative_num_draft_tokens is {width}, the block {block_size}"
                )
            return cls(block_size, budget, 1)
        if budget < horizon:
            raise ValueError(
                f"speculative_num_draft_tokens {width} is below the draft block of {block_size}: SGLang reserves slots "
                f"for the first and the block needs its own; use {block_size} or more, or a smaller block"
            )
        return cls(block_size, budget, budget)

    @property
    def horizon(self) -> int:
        return self.block_size - 1

    @property
    def nodes(self) -> int:
        return self.tree_budget + 1


@dataclass(frozen=True)
class Head:
    """This rank's rows of the target's head: tokens `first ..`; `group` joins the ranks, None where there is one."""

    weight: Tensor
    first: int = 0
    group: Any = None

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else int(self.group.world_size)

    def gather(self, part: Tensor) -> Tensor:
        """`[ranks, *part.shape]`: the same of all ranks, lowest rank (and so lowest token ids) first."""
        whole = part.new_empty((self.ranks * part.shape[0], *part.shape[1:]))
        self.group.all_gather_into_tensor(whole, part.contiguous())
        return whole.view(self.ranks, *part.shape)


class Drafts:
    """Trees of up to `max_batch` requests at fixed addresses, and the settings that they are drafted under."""

    def __init__(self, shape: TreeShape, head: Head, max_batch: int) -> None:
        device = head.weight.device
        self.shape, self.head = shape, head
        rows = (max_batch, shape.nodes)
        self.token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.parents = torch.zeros_like(self.token_ids)
        self.depths = torch.zeros_like(self.token_ids)
        self.log_probs = torch.zeros(rows, device=device)
        self.mask = torch.zeros((*rows, shape.nodes), dtype=torch.bool, device=device)
        self.temperatures = torch.ones(max_batch, device=device)
        self.seeds = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.noisy = torch.zeros(max_batch, dtype=torch.int32, device=device)

    def set_sampling(self, temperatures: Tensor, seeds: Tensor | None, top_ks: Tensor) -> None:
        """Under what the next trees of a batch are drafted, one value a request; one that is greedy gets no noise."""
        batch = temperatures.shape[0]
        self.temperatures[:batch].copy_(temperatures)
        self.noisy[:batch].copy_(top_ks != 1)
        if seeds is None:
            self.noisy[:batch].zero_()
        else:
            self.seeds[:batch].copy_(seeds)

    def draft(self, hidden: Tensor, block_ids: Tensor, positions: Tensor) -> None:
        """Builds the trees of a drafter pass from `hidden [batch * block, width]`.

        `block_ids` and `positions` are those of the pass, `[batch * block]`: each block begins with its root.
        """
        shape = self.shape
        batch = hidden.shape[0] // shape.block_size
        rows = hidden.view(batch, shape.block_size, -1)[:, 1:].flatten(0, 1)
        logits = torch.matmul(rows.to(self.head.weight.dtype), self.head.weight.T)
        # The token at a position is chosen from the logits of the position before, whose noise it gets.
        before = positions.view(batch, shape.block_size)[:, :-1].flatten()
        scores = tempered(logits, self, before, shape.horizon)
        values, ids = top_log_probs(scores.view(batch, shape.horizon, -1), self.head, shape.ranks)
        tree = grow_tree(values, ids, shape.tree_budget, block_ids.view(batch, -1)[:, 0])
        self.token_ids[:batch].copy_(tree.token_ids)
        self.parents[:batch].copy_(tree.parents)
        self.depths[:batch].copy_(tree.depths)
        self.log_probs[:batch].copy_(tree.log_probs)
        self.mask[:batch].copy_(tree.ancestor_mask)

    def trees(self, batch: int) -> DraftTree:
        """The trees of the last pass over `batch` requests; all their nodes are valid."""
        sizes = torch.full((batch,), self.shape.nodes, device=self.token_ids.device)
        return DraftTree(
            self.token_ids[:batch],
            self.parents[:batch],
            self.depths[:batch],
            self.log_probs[:batch],
            self.mask[:batch],
            sizes,
        )


def top_log_probs(scores: Tensor, head: Head, ranks: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids `[batch, depth, k]` of the likeliest tokens over all ranks' `scores [..., vocab]`.

    The same on every rank; ties to the lowest token id.
    """
    values, ids = ordered_top(scores, min(ranks, scores.shape[-1]))
    total = scores.logsumexp(-1, keepdim=True)
    if head.ranks == 1:
        return values - total, ids + head.first
    totals = head.gather(total).logsumexp(0)
    # Ranks hold ascending ids, so the lowest place among equal values is the lowest id.
    all_values = head.gather(values).movedim(0, 2).flatten(2)
    all_ids = head.gather(ids + head.first).movedim(0, 2).flatten(2)
    best, places = ordered_top(all_values, min(ranks, all_values.shape[-1]))
    return best - totals, all_ids.gather(-1, places)


def tempered(logits: Tensor, drafts: Drafts, positions: Tensor, per_request: int) -> Tensor:
    """`logits [rows, vocab] / temperature` in float32, with the sampler's noise where the request's is wanted.

    `positions [rows]` are those the sampler is given; `per_request` consecutive rows belong to one request.
    """
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    rows, vocab = logits.shape
    _tempered[(rows, triton.cdiv(vocab, COLUMNS))](
        logits,
        out,
        drafts.temperatures,
        drafts.seeds,
        drafts.noisy,
        positions,
        vocab,
        drafts.head.first,
        per_request,
        BLOCK=COLUMNS,
    )
    return out


@triton.jit
def _tempered(  # type: ignore[no-untyped-def]
    logits, out, temperatures, seeds, noisy, positions, vocab, first, per_request, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    request = row // per_request
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    place = row.to(tl.int64) * vocab + columns
    value = tl.load(logits + place, mask=inside, other=0.0).to(tl.float32)
    value = value / tl.load(temperatures + request)
    if tl.load(noisy + request) != 0:
        seed = tl.load(seeds + request).to(tl.uint64)
        position = tl.load(positions + row).to(tl.uint32)
        h = murmur3_mix(0, (seed & 0xFFFFFFFF).to(tl.uint32))
        h = murmur3_mix(h, ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
        h = murmur3_mix(h, position)
        h = murmur3_mix(h, (columns + first).to(tl.uint32))
        h = fmix32(h ^ 16).to(tl.uint32)
        # u = h / (2^32 - 1). Near 1 the distance to it is exact and u itself is not.
        rest = (4294967295 - h.to(tl.int64)).to(tl.float32) / 4294967295.0
        u = h.to(tl.float32) / 4294967295.0
        minus_log = tl.where(rest < 0.01, rest + rest * rest / 2 + rest * rest * rest / 3, -tl.log(u))
        value += -tl.log(tl.minimum(tl.maximum(minus_log, 2.3283064e-10), 1e30))
    tl.store(out + place, value, mask=inside)
