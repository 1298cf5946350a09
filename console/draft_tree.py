"""A draft tree as rows of text: which token stands where, what was accepted, where the target left it. No widgets."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from console.formats import NA, clean_line
from runtime.interface import TreeNode, TreeTrace

LABEL_CHARS = 24
"""Most characters of one token's text that are shown."""
MAX_INDENT = 28
"""Cells of guide lines at most; a deeper row names its depth alone."""
ARROW = " → "
RIGHT_CELLS = len("✓ ") + len("  d12-15  100%")
ACCEPTED, BONUS, REST = "✓", "►", " "
LEGEND = "✓ accepted · ► bonus token, the target's own · % after parent, then of path"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the drawn tree: one node, or a run of nodes of which each is its parent's only child."""

    guide: str
    nodes: tuple[TreeNode, ...]
    shares: tuple[float, ...]
    """Drafter's probability of each node after its parent."""
    path: float
    """Drafter's probability of the last node's whole path."""
    mark: str
    """`ACCEPTED`, `BONUS` or `REST`; a bonus row has no nodes."""
    bonus: str = ""


def token_label(text: str, token_id: int) -> str:
    """Text of one token with visible blanks, without anything that could move or hide what stands beside it."""
    if not text:
        return f"<{token_id}>"
    shown = "".join(_visible(character) for character in text[:LABEL_CHARS])
    return f"{shown}…" if len(text) > LABEL_CHARS else shown


def _visible(character: str) -> str:
    if character in _BLANKS:
        return _BLANKS[character]
    cleaned = clean_line(character)
    kind = unicodedata.category(character)
    if not cleaned or kind in ("Cf", "Zs", "Zl", "Zp", "Cn", "Co") or 0xFE00 <= ord(character) <= 0xFE0F:
        return f"\\u{ord(character):04x}"
    return f"\u25cc{cleaned}" if kind.startswith("M") else cleaned


_BLANKS = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def shares(trace: TreeTrace) -> list[float]:
    """Drafter's probability of each node after its parent; 1 for the root."""
    nodes = trace.nodes
    found = [1.0]
    for node in nodes[1:]:
        found.append(_probability(node.log_prob - nodes[node.parent].log_prob))
    return found


def _probability(log_prob: float) -> float:
    return math.exp(min(log_prob, 0.0)) if math.isfinite(log_prob) else 0.0


def tree_rows(trace: TreeTrace, width: int | None = None) -> list[Row]:
    """The rows of a tree, root first, children by probability.

    With a `width` runs without a branch share a row as far as they fit into that many cells; None: a row each.
    """
    share = shares(trace)
    children: list[list[int]] = [[] for _ in trace.nodes]
    for i, node in enumerate(trace.nodes[1:], start=1):
        children[node.parent].append(i)
    for each in children:
        each.sort(key=lambda i: (-trace.nodes[i].log_prob, i))
    leaves_at = last_accepted(trace)
    has_bonus = trace.bonus_token_id is not None
    rows: list[Row] = []
    waiting: list[tuple[int, str, str]] = [(0, "", "")]
    while waiting:
        first, lead, below = waiting.pop()
        if first < 0:
            rows.append(Row(lead, (), (), 0.0, BONUS, bonus_label(trace)))
            continue
        run = [first]
        room = 0 if width is None else width - len(lead) - RIGHT_CELLS - _cells(trace.nodes[first])
        while len(children[run[-1]]) == 1 and run[-1] not in (0, leaves_at):
            (only,) = children[run[-1]]
            room -= len(ARROW) + _cells(trace.nodes[only])
            if room < 0 or trace.nodes[only].accepted != trace.nodes[first].accepted:
                break
            run.append(only)
        last = run[-1]
        nodes = tuple(trace.nodes[i] for i in run)
        mark = ACCEPTED if trace.nodes[first].accepted else REST
        path = _probability(trace.nodes[last].log_prob)
        rows.append(Row(lead, nodes, tuple(share[i] for i in run), path, mark))
        under = list(children[last])
        if last == leaves_at and has_bonus:
            under.append(-1)
        for at in reversed(range(len(under))):
            final = at == len(under) - 1
            waiting.append((under[at], below + ("└ " if final else "├ "), below + ("  " if final else "│ ")))
    return rows


def _cells(node: TreeNode) -> int:
    return cell_len(token_label(node.text, node.token_id)) + len(" 100%")


def last_accepted(trace: TreeTrace) -> int:
    """The node at which the target left the tree."""
    return max((i for i, node in enumerate(trace.nodes) if node.accepted), default=0)


def bonus_label(trace: TreeTrace) -> str:
    return "" if trace.bonus_token_id is None else token_label(trace.bonus_text, trace.bonus_token_id)


def row_text(row: Row, width: int) -> Text:
    """One row in `width` cells: mark, guide, tokens; at the right depth and probabilities."""
    text = Text(no_wrap=True, overflow="ellipsis", end="")
    style = "good" if row.mark == ACCEPTED else "bonus" if row.mark == BONUS else ""
    text.append(f"{row.mark} ", style if row.mark != REST else "")
    guide = row.guide if len(row.guide) <= MAX_INDENT else "… " + row.guide[-(MAX_INDENT - 2) :]
    text.append(guide, "dim")
    if not row.nodes:
        text.append(row.bonus, "bonus")
        text.append("  bonus: the target's own choice", "dim")
        return text
    root = row.nodes[0].depth == 0
    right = "" if root else _right(row)
    room = max(width - text.cell_len - len(right) - 1, 8)
    body = _tokens(row, style)
    if root:
        body.append("  root, the bonus token of the round before", "dim")
    body.truncate(room, overflow="ellipsis", pad=True)
    text.append_text(body)
    text.append(f" {right}", "dim")
    return text


def _tokens(row: Row, style: str) -> Text:
    text = Text()
    for i, (node, share) in enumerate(zip(row.nodes, row.shares, strict=True)):
        if i:
            text.append(ARROW, "dim")
        text.append(token_label(node.text, node.token_id), style or "bold")
        if node.depth:
            text.append(f" {share_text(share)}", "dim")
    return text


def _right(row: Row) -> str:
    first, last = row.nodes[0].depth, row.nodes[-1].depth
    depths = f"d{first}" if first == last else f"d{first}-{last}"
    return f"{depths:>6} {share_text(row.path):>5}"


def share_text(share: float) -> str:
    """A probability as a percentage; what rounds to 0 is said to be less, not none."""
    if not math.isfinite(share):
        return NA
    if 0 <= share < 0.005:
        return "<1%"
    return f"{share * 100:.0f}%"


def summary(trace: TreeTrace) -> str:
    """What the round did, in words: the budget used, how deep, what was accepted, with what the target left."""
    drafted = len(trace.nodes) - 1
    if not drafted:
        return f"{why_no_tree(trace)} {_left(trace)}"
    accepted = sum(node.accepted for node in trace.nodes[1:])
    deepest = max(node.depth for node in trace.nodes)
    if trace.mode == "chain":
        shape = f"mode chain: one path of {drafted} drafts and no branches, so there is no tree"
    else:
        shape = f"{drafted} of budget {trace.tree_budget} used, {leaf_count(trace)} leaves, deepest {deepest}"
    return f"{shape}; {accepted} accepted. {_left(trace)}"


def leaf_count(trace: TreeTrace) -> int:
    parents = {node.parent for node in trace.nodes[1:]}
    return sum(i not in parents for i in range(len(trace.nodes)))


def why_no_tree(trace: TreeTrace) -> str:
    """Why nothing was drafted in a round, in words."""
    if trace.reason:
        return f"No tree: decoded plainly, {clean_line(trace.reason)}."
    if trace.mode == "off":
        return (
            "No tree: mode off drafts nothing, the target alone chooses one token a round (m flips the mode)."
        )
    return "No tree: the text may take no further draft, its limit is one token away."


def _left(trace: TreeTrace) -> str:
    here = trace.nodes[last_accepted(trace)]
    if trace.finish == "length":
        return "The text ended here at its token limit."
    if trace.finish == "stop" and trace.bonus_token_id is None:
        return f"The text ended at {token_label(here.text, here.token_id)}, an accepted draft that stops it."
    end = ", which ends the text" if trace.finish == "stop" else ""
    if len(trace.nodes) == 1:
        return f"The target chose {bonus_label(trace)}{end}."
    if not any(node.parent == last_accepted(trace) for node in trace.nodes[1:]):
        return f"All of a path was accepted; the target went on with {bonus_label(trace)}{end}."
    where = "at once" if here.depth == 0 else f"after {token_label(here.text, here.token_id)}"
    return f"The target left the tree {where} with {bonus_label(trace)}{end}."


def as_text(trace: TreeTrace, width: int = 100) -> str:
    """The whole tree as plain text, to be copied."""
    head = f"round {trace.round_index}, position {trace.position}: {summary(trace)}"
    return "\n".join([head, *(row_text(row, width).plain.rstrip() for row in tree_rows(trace))])


def rounds_strip(accepts: Sequence[int], at: int, width: int) -> Text:
    """Accept lengths of rounds, oldest first, the shown one in brackets, cut to `width` cells around it."""
    words = [f"[{accept}]" if i == at else f" {accept} " for i, accept in enumerate(accepts)]
    first, last = at, at
    used = len(words[at]) if words else 0
    while True:
        grown = False
        for step in (-1, 1):
            i = first - 1 if step < 0 else last + 1
            if 0 <= i < len(words) and used + len(words[i]) <= width:
                used += len(words[i])
                first, last = min(first, i), max(last, i)
                grown = True
        if not grown:
            break
    text = Text(no_wrap=True)
    for i in range(first, last + 1) if words else ():
        text.append(words[i], "bold reverse" if i == at else "")
    return text


def accept_length(trace: TreeTrace) -> int:
    """Tokens the round gave, the bonus token included."""
    return sum(node.accepted for node in trace.nodes[1:]) + (trace.bonus_token_id is not None)
