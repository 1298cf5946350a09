"""One training step's material: batches of texts, anchors, the block mask, the drafter's forward, and the loss.

A block `[anchor token, mask, ...]` at positions anchor .. anchor + block_size - 1 sees the target features of
positions 0 .. anchor - 1 and itself in both directions, exactly as in decoding; row k is supervised by the token and
the target's logits for position anchor + k. Source: DFlash as published, with the loss of distilled block drafters:
share x CE + (1 - share) x KL(target || drafter), weighted by exp(-(k - 1) / gamma).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.drafter import Drafter
from runtime.train_data import Sequences
from runtime.train_kernels import Kernels, head_logits, plain_distill

ANCHOR_DENSITY = 0.3
GROUP_BLOCKS = 16
_LENGTH_STEP = 64
_POOL = 8192
_TOKENS_PER_BLOCK = 8


@dataclass(frozen=True)
class Plan:
    """A batch before it is on the device: which texts, padded to what length, with how many anchors each."""

    members: np.ndarray
    length: int
    anchors: int


@dataclass(frozen=True)
class Batch:
    """Device tensors of one step; `n` texts of padded length `L`, `A` anchors each, `u` supervised source positions.

    `tokens [n, L]`, `anchors [n, A]`, `source [u]` flat positions `text * L + position` whose target logits supervise
    something, and per supervised row `[n * A * (block_size - 1)]`: `source_rows` (index into `source`), `labels`,
    `weights` (0 where there is nothing to learn; they add up to 1) and `valid`.
    """

    tokens: Tensor
    anchors: Tensor
    source: Tensor
    source_rows: Tensor
    labels: Tensor
    weights: Tensor
    valid: Tensor


def plan_pass(data: Sequences, chosen: np.ndarray, blocks: int, seed: int, number: int) -> list[Plan]:
    """Batches of one pass over the texts `chosen`, about `blocks` blocks each, texts of like length together.

    The same arguments give the same batches, so a resumed run continues in the middle of a pass.
    """
    draw = np.random.default_rng((seed, number))
    order = draw.permutation(chosen)
    lengths, responses = data.lengths, data.lengths - data.prompt_lengths
    plans: list[Plan] = []
    for start in range(0, len(order), _POOL):
        pool = order[start : start + _POOL]
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        at = 0
        while at < len(pool):
            likely = pool[at : at + max(1, blocks // 32)]
            wanted = ANCHOR_DENSITY * float(responses[likely].mean())
            anchors = GROUP_BLOCKS * max(1, round(wanted / GROUP_BLOCKS))
            room = min(blocks // anchors, _TOKENS_PER_BLOCK * blocks // int(lengths[likely[-1]]))
            members = pool[at : at + max(1, room)]
            longest = int(lengths[members].max())
            plans.append(Plan(members, _LENGTH_STEP * -(-longest // _LENGTH_STEP), anchors))
            at += len(members)
    return [plans[index] for index in draw.permutation(len(plans))]


class BatchMaker:
    """Keeps the flat tokens on the device and turns plans into batches without a host sync."""

    def __init__(self, data: Sequences, block_size: int, gamma: float, device: torch.device) -> None:
        self._data, self._block, self._device = data, block_size, device
        flat = data.tokens if data.tokens.dtype == np.int32 else data.tokens.view(np.int16)
        self._flat = torch.from_numpy(flat).to(device)
        self._wide = data.tokens.dtype == np.int32
        depth = torch.arange(1, block_size, device=device)
        self._depth = depth
        self._decay = torch.exp(-(depth - 1).float() / gamma)

    def make(self, plan: Plan, seed: int) -> Batch:
        """The batch of `plan`, anchors drawn from `seed` among positions whose next token is in the response."""
        data, device, length = self._data, self._device, plan.length
        totals = data.lengths[plan.members]
        prompts = data.prompt_lengths[plan.members].astype(np.int64)
        counts = np.maximum(totals - 1 - prompts, 1)
        bases = np.cumsum(counts) - counts
        table = torch.from_numpy(np.stack((data.offsets[plan.members], totals, prompts, bases)))
        starts, ends, firsts, base = (each[:, None] for each in table.to(device, non_blocking=True))
        source = np.concatenate(
            [
                np.arange(n) + row * length + first
                for row, (first, n) in enumerate(zip(prompts, counts, strict=True))
            ]
        )
        places = torch.arange(length, device=device)
        index = (starts + places).clamp(max=self._flat.shape[0] - 1)
        tokens = self._flat[index].long()
        tokens = tokens if self._wide else tokens & 0xFFFF
        tokens = torch.where(places < ends, tokens, 0)
        generator = torch.Generator(device).manual_seed(seed)
        drawn = torch.rand(tokens.shape, generator=generator, device=device)
        drawn = torch.where((places >= firsts) & (places <= ends - 2), drawn, -1.0)
        best, anchors = drawn.topk(min(plan.anchors, length), dim=1)
        usable = best >= 0
        anchors = torch.where(usable, anchors, firsts)
        labelled = anchors[..., None] + self._depth
        valid = usable[..., None] & (labelled < ends[..., None])
        labels = tokens.gather(1, labelled.clamp(max=length - 1).flatten(1)).flatten()
        rows = base[..., None] + (labelled - 1 - firsts[..., None])
        weights = (valid * self._decay).flatten()
        return Batch(
            tokens=tokens,
            anchors=anchors,
            source=torch.from_numpy(source).to(device, non_blocking=True),
            source_rows=torch.where(valid, rows, 0).flatten(),
            labels=labels,
            weights=weights / weights.sum().clamp(min=1e-9),
            valid=valid,
        )


def block_mask(anchors: Tensor, length: int, block: int, group: int, dtype: torch.dtype) -> Tensor:
    """Additive mask `[n * groups, 1, group * block, length + group * block]` of blocks taken `group` at a time.

    Columns are the `length` context positions, then the rows of the group's own blocks.
    """
    rows = group * block
    grouped = anchors.unflatten(1, (-1, group)).flatten(0, 1)
    context = torch.arange(length, device=anchors.device) < grouped.repeat_interleave(block, dim=1)[..., None]
    which = torch.arange(rows, device=anchors.device) // block
    own = (which[:, None] == which).expand(len(grouped), rows, rows)
    seen = torch.cat((context, own), dim=-1)
    mask = torch.zeros(seen.shape, dtype=dtype, device=anchors.device)
    return mask.masked_fill_(~seen, float("-inf"))[:, None]


class BlockTrainer(nn.Module):
    """The drafter's forward over many blocks of many texts at once."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, features: Tensor, embedding: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
        """Hidden states `[n, A, block_size - 1, hidden]` of the drafted rows.

        `features [n, L, taps * hidden]`, `embedding [vocab, hidden]`, `tokens [n, L]`, `anchors [n, A]`.
        """
        config = self.drafter.config
        block, (count, length) = config.block_size, tokens.shape
        amount = anchors.shape[1]
        group = GROUP_BLOCKS if amount % GROUP_BLOCKS == 0 else amount
        ids = torch.full((count, amount, block), config.mask_token_id, device=tokens.device)
        ids[..., 0] = tokens.gather(1, anchors)
        positions = anchors[..., None] + torch.arange(block, device=tokens.device)
        everywhere = torch.arange(length, device=tokens.device).expand(count, length)
        context = self.drafter.context(features, everywhere)
        sharing = config.num_attention_heads // config.num_key_value_heads
        mask = block_mask(anchors, length, block, group, features.dtype).repeat(1, 1, sharing, 1)
        kv_heads, groups, rows = config.num_key_value_heads, amount // group, group * block

        def joined(before: Tensor, own: Tensor) -> Tensor:
            """Puts the context before each group's own rows: `[n * groups, kv_heads, L + rows, dim]`."""
            before = before[:, None].expand(-1, groups, -1, -1, -1)
            return torch.cat((before, own.unflatten(2, (groups, rows)).transpose(1, 2)), dim=3).flatten(0, 1)

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            # Query heads that share a key head become further rows, so that no key is copied for them.
            folded = queries.unflatten(1, (kv_heads, sharing)).unflatten(3, (groups, rows))
            folded = folded.permute(0, 3, 1, 2, 4, 5).flatten(0, 1).flatten(2, 3)
            all_keys, all_values = joined(context[layer][0], keys), joined(context[layer][1], values)
            out = F.scaled_dot_product_attention(folded, all_keys, all_values, attn_mask=mask)
            out = out.unflatten(2, (sharing, rows)).unflatten(0, (count, groups))
            return out.permute(0, 2, 3, 1, 4, 5).flatten(3, 4).flatten(1, 2)

        hidden = self.drafter(F.embedding(ids.flatten(1), embedding), positions.flatten(1), attend)
        return hidden.unflatten(1, (amount, block))[:, :, 1:]


class _DistilledHead(torch.autograd.Function):
    """Loss of drafted hidden states through a frozen head; the hidden gradient is made chunk by chunk in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        target: Tensor,
        batch: Batch,
        share: float,
        kernels: Kernels,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        distill = kernels.distill_gradient if kernels.distill else plain_distill
        slope = torch.empty_like(hidden)
        cross_entropy = torch.zeros((), dtype=torch.float32, device=hidden.device)
        divergence = torch.zeros_like(cross_entropy)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = head_logits(hidden[part], head)
            gradient = torch.empty(logits.shape, dtype=hidden.dtype, device=hidden.device)
            weights = batch.weights[part]
            ce, kl = distill(
                logits, target, batch.source_rows[part], batch.labels[part], weights, share, gradient
            )
            slope[part] = gradient @ head
            cross_entropy += (weights * ce).sum()
            divergence += (weights * kl).sum()
        ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(cross_entropy, divergence)
        return share * cross_entropy + (1 - share) * divergence, cross_entropy, divergence

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return slope * gradients[0].to(slope.dtype), None, None, None, None, None, None


def distilled_loss(
    hidden: Tensor,
    head: Tensor,
    target: Tensor,
    batch: Batch,
    share: float,
    kernels: Kernels,
    chunk: int = 4096,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, cross-entropy and KL (weighted means) of `hidden [rows, width]` against float32 `target [u, vocab]`."""
    found: tuple[Tensor, Tensor, Tensor] = _DistilledHead.apply(
        hidden, head, target, batch, share, kernels, chunk
    )
    return found


def chunks(total: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover `range(total)`."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))
