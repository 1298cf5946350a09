"""The draft tree: its exact best-first construction, its ancestor mask and the walk that accepts a path.

Pure functions of tensors and numbers, on the device of their arguments; decoding, the engine plugin and the tests use
the same ones. Source: DDTree (best-first trees from the per-position marginals of a block-diffusion drafter).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.sampling import ordered_top


@dataclass(frozen=True)
class DraftTree:
    """Trees of a batch, padded to equal size; node 0 is the root, valid nodes come first.

    `token_ids`, `parents` (root: 0), `depths`, `log_probs` are `[batch, nodes]`; `ancestor_mask` is bool
    `[batch, nodes, nodes]`, True = may attend, each node sees itself; `sizes [batch]` counts valid nodes, root too.
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    log_probs: Tensor
    ancestor_mask: Tensor
    sizes: Tensor


def build_tree(
    log_probs: Tensor, tree_budget: int, roots: Tensor | None = None, ranks: int | None = None
) -> DraftTree:
    """The exact best-first trees: for each batch row the `tree_budget` nodes of highest path log-probability.

    `log_probs [batch, depth, vocab]` are per-position log-probabilities (-inf: never), `roots [batch]` the root tokens;
    `ranks` = 1 makes chains, of the likeliest token at each depth.
    A node at depth d with tokens t1..td scores sum_i log_probs[i, ti]. Ties: lower depth, then lower rank of the last
    token among its siblings, then the parent that comes first; so a parent always comes before its children and the
    tree of a smaller budget is a prefix of this one. Runs on the device without reading a value back: per depth the
    best `tree_budget` of (kept prefixes x top-K) are kept, then one global selection.
    """
    batch, horizon, vocab = log_probs.shape
    width = min(ranks or tree_budget, vocab)
    if tree_budget == 0 or horizon == 0:
        nothing = torch.empty(batch, 0, dtype=torch.int64, device=log_probs.device)
        return _assemble(roots, log_probs.new_empty(batch, 0), (nothing, nothing, nothing), 0)
    return grow_tree(*ordered_top(log_probs, width), tree_budget, roots)


def grow_tree(
    top_values: Tensor, top_ids: Tensor, tree_budget: int, roots: Tensor | None = None
) -> DraftTree:
    """`build_tree` from the best tokens of each depth alone.

    `top_values` and `top_ids` are `[batch, depth, ranks]`, best first, ties to the lowest token id; with `ranks` below
    `tree_budget` (and the vocabulary) no node has more than `ranks` children. Nothing is read back or sent from the
    host, so the calls can be captured in a CUDA graph.
    """
    batch, horizon, _ = top_values.shape
    device = top_values.device
    # Depth by depth: score, token and the parent's place in the depth before. Candidates lie rank-major, so the
    # lowest flat index is the lowest rank and then the first parent.
    scores = top_values.new_zeros(batch, 1)
    kept_scores, kept_tokens, kept_parents = [], [], []
    for depth in range(horizon):
        places = scores.shape[1]
        candidates = (top_values[:, depth].unsqueeze(2) + scores.unsqueeze(1)).flatten(1)
        scores, picked = ordered_top(candidates, min(tree_budget, candidates.shape[1]))
        kept_scores.append(scores)
        kept_tokens.append(top_ids[:, depth].gather(1, picked // places))
        kept_parents.append(picked % places)

    counts = [kept.shape[1] for kept in kept_scores]
    offsets = list(itertools.accumulate(counts, initial=0))
    all_scores = torch.cat(kept_scores, 1)
    node_scores, order = ordered_top(all_scores, min(tree_budget, all_scores.shape[1]))
    place_of = torch.full((batch, offsets[-1]), -1, device=device)
    place_of.scatter_(1, order, torch.arange(1, order.shape[1] + 1, device=device).expand_as(order))
    root_places = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    parents = [root_places.expand(batch, counts[0])]
    for depth in range(1, horizon):
        parents.append(place_of[:, offsets[depth - 1] : offsets[depth]].gather(1, kept_parents[depth]))
    depths = torch.cat([torch.full((count,), d + 1, device=device) for d, count in enumerate(counts)])
    columns = (torch.cat(kept_tokens, 1), torch.cat(parents, 1), depths.expand(batch, -1))
    token_ids, parent_places, node_depths = (column.gather(1, order) for column in columns)
    return _assemble(roots, node_scores, (token_ids, parent_places, node_depths), min(horizon, tree_budget))


def _assemble(
    roots: Tensor | None, scores: Tensor, columns: tuple[Tensor, Tensor, Tensor], levels: int
) -> DraftTree:
    """Puts the root before the nodes and derives ancestor mask and sizes; nodes of score -inf are invalid.

    `scores [batch, n]`; `columns` are token ids, parents (root: 0; -1 behind an invalid node) and depths `[batch, n]`.
    """
    batch = scores.shape[0]
    front = torch.zeros(batch, 1, dtype=torch.int64, device=scores.device)
    root_ids = front if roots is None else roots.view(batch, 1)
    token_ids, parents, depths = columns
    parents = torch.cat((front, parents.clamp_min(0)), 1)
    return DraftTree(
        token_ids=torch.cat((root_ids, token_ids), 1),
        parents=parents,
        depths=torch.cat((front, depths), 1),
        log_probs=torch.cat((scores.new_zeros(batch, 1), scores), 1),
        ancestor_mask=ancestor_mask(parents, levels),
        sizes=1 + (scores > -torch.inf).sum(1),
    )


def ancestor_mask(parents: Tensor, levels: int) -> Tensor:
    """Bool `[batch, nodes, nodes]`, True where the row's node may attend: its ancestors and itself.

    `parents [batch, nodes]` (root: 0); no node lies deeper than `levels`.
    """
    nodes = parents.shape[1]
    mask = torch.eye(nodes, dtype=torch.bool, device=parents.device).repeat(parents.shape[0], 1, 1)
    current = torch.arange(nodes, device=parents.device).expand_as(parents)
    for _ in range(levels):
        current = parents.gather(1, current)
        mask.scatter_(2, current.unsqueeze(2), True)
    return mask


def root_tree(roots: Tensor) -> DraftTree:
    """Trees of the root alone, for plain decoding."""
    return build_tree(torch.empty(len(roots), 0, 1, device=roots.device), 0, roots)


def accept_path(tree: DraftTree, target_token_ids: Tensor, sizes: Seq[int] | None = None) -> list[list[int]]:
    """Node indices of the accepted path of each batch row, root first.

    `target_token_ids [batch, nodes]` is what the target chooses after each node; `sizes` limits the nodes of each row
    (default: `tree.sizes`). A node is accepted if its parent is and the target chose its token there; siblings differ,
    so this is one path.
    """
    nodes = target_token_ids.shape[1]
    limits = tree.sizes if sizes is None else torch.tensor(sizes, device=tree.parents.device)
    accepted = accepted_nodes(
        tree.token_ids[:, :nodes],
        tree.parents[:, :nodes],
        tree.ancestor_mask[:, :nodes, :nodes],
        target_token_ids,
    )
    accepted &= torch.arange(nodes, device=accepted.device) < limits.unsqueeze(1)
    return [[i for i, kept in enumerate(row) if kept] for row in accepted.tolist()]


def accepted_nodes(token_ids: Tensor, parents: Tensor, mask: Tensor, target_token_ids: Tensor) -> Tensor:
    """Bool `[batch, nodes]`: the target chose this node's token at its parent, and so for all its ancestors.

    `token_ids`, `parents` and `target_token_ids` are `[batch, nodes]`, `mask` the ancestor mask.
    """
    chosen = target_token_ids.gather(1, parents) == token_ids
    chosen[:, 0] = True
    return (chosen.unsqueeze(1) | ~mask).all(-1)


def path_by_depth(accepted: Tensor, depths: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """The accepted path of each row as a tensor, without reading anything back.

    `accepted` and `depths` are `[batch, nodes]`. Returns node indices `[batch, levels]`, the root first, where entry d
    beyond the path is d itself, and the path's length with the root `[batch]` (int64). No node lies at depth `levels`.
    """
    batch, nodes = accepted.shape
    indices = torch.arange(nodes, device=accepted.device).expand(batch, nodes)
    path = torch.arange(levels + 1, device=accepted.device).repeat(batch, 1)
    path.scatter_(1, torch.where(accepted, depths, levels), indices)
    return path[:, :levels], accepted.sum(1)


def tree_links(parents: Tensor) -> tuple[Tensor, Tensor]:
    """First child and next sibling of each node, `[batch, nodes]`, -1 where there is none.

    `parents [batch, nodes]` (root: 0) of trees without invalid nodes.
    """
    batch, nodes = parents.shape
    index = torch.arange(nodes, device=parents.device)
    none = torch.full((), nodes, device=parents.device)
    child_of = (parents.unsqueeze(1) == index.view(1, nodes, 1)) & (index > 0)
    children = torch.where(child_of, index, none).amin(-1)
    siblings = (parents.unsqueeze(1) == parents.unsqueeze(2)) & (index > index.unsqueeze(1)).unsqueeze(0)
    later = torch.where(siblings, index, none).amin(-1)
    later[:, 0] = nodes
    return torch.where(children < nodes, children, -1), torch.where(later < nodes, later, -1)
