"""Scripted draft trees: what a fake runtime tells of its rounds, and trees of any shape for tests of their drawing."""

from __future__ import annotations

import math

from runtime.interface import Mode, TreeNode, TreeTrace


def tree(
    nodes: list[tuple[str, int, float, bool]],
    bonus: str | None = " next",
    *,
    index: int = 1,
    mode: Mode = "tree",
    budget: int = 11,
    **more: object,
) -> TreeTrace:
    """A tree of (text, parent, probability after its parent, accepted) nodes below a root, which is number 0."""
    made = [TreeNode(token_id=0, text="root", parent=0, depth=0, log_prob=0.0, accepted=True)]
    for number, (text, parent, share, accepted) in enumerate(nodes, start=1):
        above = made[parent]
        made.append(
            TreeNode(
                token_id=number,
                text=text,
                parent=parent,
                depth=above.depth + 1,
                log_prob=above.log_prob + math.log(share),
                accepted=accepted,
            )
        )
    return TreeTrace(
        round_index=index,
        position=100 + index,
        nodes=tuple(made),
        bonus_token_id=None if bonus is None else 999,
        bonus_text=bonus or "",
        tree_budget=budget,
        mode=mode,
        **more,  # type: ignore[arg-type]
    )


def bushy(size: int, index: int = 1) -> TreeTrace:
    """A tree of `size` drafts in which every third node begins a branch, accepted to depth 3."""
    nodes: list[tuple[str, int, float, bool]] = []
    depth_of = [0]
    first_at = {0: 0}
    for number in range(1, size + 1):
        parent = number // 3 if number % 3 else max(number - 3, 0)
        depth = depth_of[parent] + 1
        first = depth not in first_at and parent == first_at.get(depth - 1)
        if first:
            first_at[depth] = number
        nodes.append((f" w{number}", parent, 0.9 if first else 0.3, first and depth <= 3))
        depth_of.append(depth)
    return tree(nodes, index=index, budget=size)


def scripted(index: int, emitted: list[str], mode: Mode, budget: int) -> TreeTrace:
    """The tree of a fake's round that gave the texts `emitted`, the last one as bonus token."""
    if mode == "off":
        return tree([], emitted[0], index=index, mode="off", budget=0)
    accepted = emitted[:-1]
    nodes = [(text, number, 0.8, True) for number, text in enumerate(accepted)]
    here = len(accepted)
    if mode == "chain":
        nodes += [(f" {number}", number, 0.5, False) for number in range(here, 7)]
    nodes += [(" other", here, 0.1, False)] if mode == "tree" else []
    while mode == "tree" and len(nodes) < budget:
        nodes.append((f" {len(nodes)}", 0 if len(nodes) == here + 1 else len(nodes), 0.5, False))
    return tree(nodes, emitted[-1], index=index, mode=mode, budget=budget)
