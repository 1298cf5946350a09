"""Verification under SGLang: the input of the target's pass over trees, the choice at every node, the accepted path.

The choice after a node is the one SGLang's own sampler makes when it decodes plainly: the same functions with the same
seeds and that node's position. Then the walk of `runtime.tree` follows it. So what is emitted is what SGLang emits
without speculation, whatever the trees hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.sampler import sampling_from_probs_torch
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from torch import Tensor

from runtime.tree import DraftTree, accepted_nodes, path_by_depth


@dataclass
class DDTreeVerifyInput(DFlashVerifyInput):
    """One target pass over trees of `draft_token_num` nodes; attention backends take `topk` > 1 for "has a mask"."""

    topk: int = 2


class MaskBuffer:
    """The full verify mask in SGLang's layout: per request `[nodes, committed + nodes]`, requests one after another.

    Only the tree's cells are written. The Triton backend reads no others; the prefix is visible to every node. The
    cells' places depend on lengths that only the device knows, so the buffer is as large as it can ever need to be.
    """

    def __init__(self, buffer: Tensor, nodes: int, max_context: int) -> None:
        """`buffer`: the attention backend's own where it has one (captured graphs read that), one byte a cell."""
        self.buffer, self.nodes = buffer, nodes
        self.max_batch = buffer.numel() // (nodes * (max_context + nodes))
        self._rows = torch.arange(nodes, device=buffer.device).view(1, nodes, 1)
        self._columns = torch.arange(nodes, device=buffer.device).view(1, 1, nodes)

    def fill(self, mask: Tensor, committed: Tensor) -> Tensor:
        """Writes `mask` (bool `[batch, nodes, nodes]`) behind prefixes of `committed [batch]`; returns the buffer."""
        nodes = self.nodes
        committed = committed.to(torch.int64)
        widths = committed + nodes
        starts = torch.cumsum(widths * nodes, 0) - widths * nodes
        places = starts.view(-1, 1, 1) + self._rows * widths.view(-1, 1, 1)
        places = places + committed.view(-1, 1, 1) + self._columns
        self.buffer.index_put_((places.flatten(),), mask.flatten().to(self.buffer.dtype))
        return self.buffer


@dataclass(frozen=True)
class Accepted:
    """Of each request: tokens `[batch, block]` (valid up to `lengths [batch]`, int32), its path and the bonus token."""

    token_ids: Tensor
    lengths: Tensor
    path: Tensor
    bonus: Tensor


def choose(logits: Tensor, sampling: Any, positions: Tensor, nodes: int) -> Tensor:
    """The target's choice after each node, `[batch, nodes]`.

    `logits [batch * nodes, vocab]` are overwritten at temperature > 0; `sampling` is the batch's SamplingBatchInfo,
    `positions [batch * nodes]` those of the nodes.
    """
    if sampling is None or sampling.is_all_greedy:
        return logits.argmax(-1).view(-1, nodes)
    logits.div_(sampling.temperatures.repeat_interleave(nodes, 0, output_size=logits.shape[0]))
    logits[:] = torch.softmax(logits, dim=-1)

    def per_node(values: Tensor) -> Tensor:
        return values.repeat_interleave(nodes, 0, output_size=logits.shape[0])

    if not is_simple(sampling):
        min_ps = per_node(sampling.min_ps) if sampling.need_min_p_sampling else None
        logits = kept(logits, per_node(sampling.top_ks), per_node(sampling.top_ps), min_ps)
    seeds = None if sampling.sampling_seed is None else per_node(sampling.sampling_seed)
    chosen = sampling_from_probs_torch(logits, sampling_seed=seeds, positions=positions)
    return chosen.view(-1, nodes).to(torch.int64)


def kept(probs: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor | None) -> Tensor:
    """`probs [rows, vocab]` with 0 where SGLang's filters (one value a row each) leave a token out, in place.

    SGLang's own function draws among ranks instead of token ids. There, a seed's noise depends on whether any request
    of the batch filters or is greedy, and moves with every pair of near-equal tokens.
    """
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    out = (ranks >= top_ks.view(-1, 1)) | (ordered.cumsum(-1) - ordered > top_ps.view(-1, 1))
    if min_ps is not None:
        out |= ordered < ordered[:, :1] * min_ps.view(-1, 1)
    return probs.zero_().scatter_(-1, ids, ordered.masked_fill_(out, 0.0))


def is_simple(sampling: Any) -> bool:
    """True where no request of the batch filters anything or is greedy."""
    return not (sampling.need_top_p_sampling or sampling.need_top_k_sampling or sampling.need_min_p_sampling)


def accept(tree: DraftTree, choices: Tensor, block_size: int, tree_budget: int | None = None) -> Accepted:
    """Follows `choices [batch, nodes]` down the trees, which are at most `block_size - 1` deep.

    Nodes beyond `tree_budget` do not count: the best-first tree of a smaller budget is a prefix of a larger one's.
    """
    accepted = accepted_nodes(tree.token_ids, tree.parents, tree.ancestor_mask, choices)
    if tree_budget is not None:
        accepted[:, tree_budget + 1 :] = False
    path, lengths = path_by_depth(accepted, tree.depths, block_size)
    token_ids = choices.gather(1, path)
    bonus = token_ids.gather(1, lengths.unsqueeze(1) - 1).squeeze(1)
    return Accepted(token_ids, lengths.to(torch.int32), path, bonus)
