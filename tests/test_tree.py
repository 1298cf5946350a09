"""Tree building against brute force and against a heap, ancestor masks and the walk along the target's choices."""

from __future__ import annotations

import heapq
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.sampling import SMALL_SORT, ordered_top
from runtime.tree import (
    DraftTree,
    accept_path,
    accepted_nodes,
    ancestor_mask,
    build_tree,
    grow_tree,
    path_by_depth,
    tree_links,
)

Node = tuple[int, int, int]
"""Token, parent's index, depth."""
NO_DEADLINE = settings(deadline=None, derandomize=True, max_examples=150)


def nodes_of(tree: DraftTree, row: int = 0) -> list[Node]:
    """Valid nodes of one tree behind the root."""
    size = int(tree.sizes[row])
    columns = (tree.token_ids, tree.parents, tree.depths)
    return list(zip(*(column[row, 1:size].tolist() for column in columns), strict=True))


def brute_force(log_probs: Tensor, budget: int) -> list[Node]:
    """All paths, sorted: higher score, lower depth, lower rank of the last token, earlier parent."""
    depth, vocab = log_probs.shape
    possible = [[token for token in range(vocab) if row[token] > float("-inf")] for row in log_probs.tolist()]
    ranks = [
        sorted(tokens, key=lambda token, row=row: (-float(row[token]), token))
        for row, tokens in zip(log_probs, possible, strict=True)
    ]
    level: list[tuple[Tensor, tuple[int, ...]]] = [(torch.zeros(()), ())]
    everything: list[tuple[float, int, int, tuple[int, ...]]] = []
    for d in range(depth):
        paths = [
            (score + log_probs[d, token], (*path, token)) for score, path in level for token in possible[d]
        ]
        level = [(score, path) for score, path in paths if float(score) > float("-inf")]
        everything += [(-float(score), d + 1, ranks[d].index(path[-1]), path) for score, path in level]
    kept: dict[tuple[int, ...], int] = {(): 0}
    nodes: list[Node] = []
    waiting = everything
    while waiting and len(nodes) < budget:
        # The first parent is the one placed first, so ties are settled while placing.
        candidates = [each for each in waiting if each[3][:-1] in kept]
        best = min(candidates, key=lambda each: (each[0], each[1], each[2], kept[each[3][:-1]]))
        waiting.remove(best)
        path = best[3]
        nodes.append((path[-1], kept[path[:-1]], len(path)))
        kept[path] = len(nodes)
    return nodes


def best_first(log_probs: Tensor, budget: int) -> list[Node]:
    """Best-first search with a heap: each popped path offers its next sibling and its first child."""
    depth, _ = log_probs.shape
    values, tokens = log_probs.double().sort(dim=-1, descending=True, stable=True)
    values, tokens = values.tolist(), tokens.tolist()
    serial = itertools.count()
    heap = [(-values[0][0], next(serial), 1, 0, 0, 0.0)]
    nodes: list[Node] = []
    while heap and len(nodes) < budget:
        score, _, level, rank, parent, parent_score = heapq.heappop(heap)
        nodes.append((tokens[level - 1][rank], parent, level))
        if rank + 1 < len(values[level - 1]):
            sibling = parent_score - values[level - 1][rank + 1]
            heapq.heappush(heap, (sibling, next(serial), level, rank + 1, parent, parent_score))
        if level < depth:
            heapq.heappush(heap, (score - values[level][0], next(serial), level + 1, 0, len(nodes), score))
    return nodes


@st.composite
def rough_log_probs(draw: st.DrawFn) -> Tensor:
    """Tables of few distinct values, so that ties and -inf are common; some as wide as a real vocabulary."""
    depth, vocab = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    value = st.sampled_from([-0.5, -0.5, -1.0, -2.0, -4.0, 0.0, -0.0, float("-inf")])
    rows = draw(st.lists(st.lists(value, min_size=vocab, max_size=vocab), min_size=depth, max_size=depth))
    never = [float("-inf")] * (SMALL_SORT + 1 if draw(st.booleans()) else 0)
    return torch.tensor([[*row, *never] for row in rows])


def smooth_log_probs(seed: int, depth: int, vocab: int, sharpness: float, batch: int = 1) -> Tensor:
    """Log-probabilities as a drafter gives them: peaked, less so with depth."""
    generator = torch.Generator().manual_seed(seed)
    fading = sharpness * 0.85 ** torch.arange(depth).unsqueeze(1)
    return (torch.randn(batch, depth, vocab, generator=generator) * fading).log_softmax(-1)


@NO_DEADLINE
@given(rough_log_probs(), st.integers(1, 40))
def test_tree_equals_brute_force_with_ties_and_impossible_tokens(log_probs: Tensor, budget: int) -> None:
    assert nodes_of(build_tree(log_probs.unsqueeze(0), budget)) == brute_force(log_probs, budget)


@NO_DEADLINE
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 6), st.integers(1, 60))
def test_tree_equals_brute_force_on_random_log_probabilities(
    seed: int, depth: int, vocab: int, budget: int
) -> None:
    log_probs = smooth_log_probs(seed, depth, vocab, 2.0)[0]
    assert nodes_of(build_tree(log_probs.unsqueeze(0), budget)) == brute_force(log_probs, budget)


@pytest.mark.parametrize("sharpness", [1.5, 4.0, 8.0])
@pytest.mark.parametrize("budget", [1, 4, 11, 31, 64])
def test_tree_equals_best_first_search_on_drafter_like_log_probabilities(
    sharpness: float, budget: int
) -> None:
    log_probs = smooth_log_probs(budget, 7, 2 * SMALL_SORT, sharpness, batch=6)
    tree = build_tree(log_probs, budget)
    for row in range(6):
        assert nodes_of(tree, row) == best_first(log_probs[row], budget)


@NO_DEADLINE
@given(rough_log_probs(), st.integers(1, 30), st.integers(1, 30))
def test_the_tree_of_a_smaller_budget_begins_the_larger_one(log_probs: Tensor, small: int, more: int) -> None:
    narrow, wide = (nodes_of(build_tree(log_probs.unsqueeze(0), n)) for n in (small, small + more))
    assert wide[: len(narrow)] == narrow
    assert len(narrow) == min(small, len(wide))


@NO_DEADLINE
@given(st.lists(rough_log_probs(), min_size=2, max_size=4), st.integers(1, 20))
def test_each_row_of_a_batch_is_the_tree_it_is_alone(tables: list[Tensor], budget: int) -> None:
    depth = min(table.shape[0] for table in tables)
    vocab = min(table.shape[1] for table in tables)
    batch = torch.stack([table[:depth, :vocab] for table in tables])
    together = build_tree(batch, budget)
    for row, table in enumerate(batch):
        assert nodes_of(together, row) == nodes_of(build_tree(table.unsqueeze(0), budget))


@NO_DEADLINE
@given(rough_log_probs(), st.integers(1, 30))
def test_nodes_are_ordered_by_score_which_is_the_sum_along_their_path(log_probs: Tensor, budget: int) -> None:
    tree = build_tree(log_probs.unsqueeze(0), budget)
    scores = tree.log_probs[0, : int(tree.sizes[0])].tolist()
    assert scores == sorted(scores, reverse=True)
    for i, (token, parent, depth) in enumerate(nodes_of(tree), start=1):
        assert parent < i
        assert scores[i] == pytest.approx(scores[parent] + float(log_probs[depth - 1, token]), abs=1e-6)


def test_roots_stand_first_and_a_budget_of_zero_leaves_them_alone() -> None:
    roots = torch.tensor([5, 9])
    tree = build_tree(torch.empty(2, 0, 16), 0, roots)
    assert tree.token_ids.tolist() == [[5], [9]] and tree.sizes.tolist() == [1, 1]
    assert build_tree(smooth_log_probs(0, 3, 16, 2.0, 2), 4, roots).token_ids[:, 0].tolist() == [5, 9]


def random_parents(data: st.DataObject, nodes: int) -> tuple[Tensor, Tensor]:
    """Parents and depths `[1, nodes]` of a random tree."""
    parents, depths = [0], [0]
    for i in range(1, nodes):
        parents.append(data.draw(st.integers(0, i - 1)))
        depths.append(depths[parents[i]] + 1)
    return torch.tensor([parents]), torch.tensor([depths])


def ancestors(parents: list[int], node: int) -> set[int]:
    """The node itself and all above it."""
    line = {node}
    while node:
        node = parents[node]
        line.add(node)
    return line


@NO_DEADLINE
@given(st.data(), st.integers(1, 12))
def test_a_node_attends_to_itself_and_its_ancestors_only(data: st.DataObject, nodes: int) -> None:
    parents, depths = random_parents(data, nodes)
    mask = ancestor_mask(parents, int(depths.max()))[0]
    for node in range(nodes):
        assert set(mask[node].nonzero().flatten().tolist()) == ancestors(parents[0].tolist(), node)


def naive_walk(tokens: list[int], parents: list[int], chosen: list[int], size: int) -> list[int]:
    """Follows the target's choice from child to child."""
    path = [0]
    while True:
        children = [i for i in range(1, size) if parents[i] == path[-1] and tokens[i] == chosen[path[-1]]]
        if not children:
            return path
        path.append(children[0])


@NO_DEADLINE
@given(st.data(), st.integers(0, 2**32), st.integers(1, 24))
def test_the_accepted_path_is_the_walk_along_the_choices(data: st.DataObject, seed: int, budget: int) -> None:
    tree = build_tree(smooth_log_probs(seed, 4, 3, 1.0, batch=3), budget)
    sizes = [data.draw(st.integers(1, int(size))) for size in tree.sizes]
    width = max(sizes)
    drawn = data.draw(st.lists(st.integers(0, 2), min_size=3 * width, max_size=3 * width))
    chosen = torch.tensor(drawn).view(3, width)
    paths = accept_path(tree, chosen, sizes)
    for row in range(3):
        tokens, parents = tree.token_ids[row].tolist(), tree.parents[row].tolist()
        assert paths[row] == naive_walk(tokens, parents, chosen[row].tolist(), sizes[row])


def test_a_node_beyond_the_row_s_size_is_never_accepted() -> None:
    tree = build_tree(torch.tensor([[[0.0, -1.0]], [[0.0, -1.0]]]), 2)
    chosen = torch.tensor([[1, 0, 0], [0, 0, 0]])
    assert accept_path(tree, chosen, [3, 1]) == [[0, 2], [0]]


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 14))
@NO_DEADLINE
def test_the_path_by_depth_is_the_accepted_path_and_then_the_depth_itself(
    seed: int, horizon: int, budget: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.randn(3, horizon, 4, generator=generator).log_softmax(-1)
    tree = build_tree(log_probs, budget)
    choices = torch.randint(0, 4, tree.token_ids.shape, generator=generator)
    valid = torch.arange(tree.token_ids.shape[1]) < tree.sizes.unsqueeze(1)
    accepted = accepted_nodes(tree.token_ids, tree.parents, tree.ancestor_mask, choices) & valid
    paths, lengths = path_by_depth(accepted, tree.depths, horizon + 1)
    for path, length, expected in zip(
        paths.tolist(), lengths.tolist(), accept_path(tree, choices), strict=True
    ):
        assert path[:length] == expected
        assert path[length:] == list(range(length, horizon + 1))


@given(st.integers(0, 10_000), st.integers(1, 12))
@NO_DEADLINE
def test_first_child_and_next_sibling_lead_to_every_node_once(seed: int, budget: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tree = build_tree(torch.randn(1, 3, 12, generator=generator).log_softmax(-1), budget)
    children, siblings = (each[0].tolist() for each in tree_links(tree.parents))
    reached: list[tuple[int, int]] = []

    def walk(node: int, parent: int) -> None:
        while node >= 0:
            reached.append((node, parent))
            walk(children[node], node)
            node = siblings[node]

    walk(children[0], 0)
    assert sorted(reached) == [(node, int(tree.parents[0, node])) for node in range(1, budget + 1)]
    assert siblings[0] == -1


def test_a_tree_from_the_best_tokens_alone_is_the_tree_of_all() -> None:
    log_probs = torch.randn(4, 5, 50, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    whole, grown = build_tree(log_probs, 20), grow_tree(*ordered_top(log_probs, 20), 20)
    assert torch.equal(whole.token_ids, grown.token_ids) and torch.equal(whole.parents, grown.parents)
