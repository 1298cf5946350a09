"""Draft trees of the last rounds: kept as plain tuples while decoding, named and shaped only for who looks at them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from runtime.interface import TreeNode, TreeTrace

if TYPE_CHECKING:
    from runtime.round import SequenceRound
    from runtime.sequence import Speculation

ROUNDS_KEPT = 64
NODES_KEPT = 8192
"""Most nodes kept of one request, about 1 MB; a large budget keeps fewer rounds."""
ENDED_KEPT = 8
"""Requests whose trees are kept after their end."""


@dataclass(frozen=True, slots=True)
class TracedRound:
    """One round of one request."""

    index: int
    position: int
    """Absolute position of the root."""
    outcome: SequenceRound
    how: Speculation
    emitted: int
    """Tokens that count; fewer than the round gave where a stop string ended the text."""
    ended: bool
    """The text ended with this round."""

    @property
    def finish(self) -> Literal["stop", "length"] | None:
        if not self.ended:
            return None
        cut = self.emitted < len(self.outcome.tokens)
        return "length" if self.outcome.finish == "length" and not cut else "stop"


class RequestTraces:
    """The last rounds of one request, bounded in rounds and nodes."""

    def __init__(self) -> None:
        self._rounds: deque[TracedRound] = deque()
        self._nodes = 0

    def add(self, traced: TracedRound) -> None:
        self._rounds.append(traced)
        self._nodes += len(traced.outcome.nodes)
        while len(self._rounds) > ROUNDS_KEPT or (self._nodes > NODES_KEPT and len(self._rounds) > 1):
            self._nodes -= len(self._rounds.popleft().outcome.nodes)

    def since(self, after: int) -> tuple[TracedRound, ...]:
        """Kept rounds whose index is above `after`, oldest first."""
        return tuple(traced for traced in self._rounds if traced.index > after)


class LateRounds:
    """Rounds that come apart from their tokens: each is kept once its tokens are part of the text."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[TracedRound]] = {}

    def add(self, request_id: str, traced: TracedRound) -> None:
        self._waiting.setdefault(request_id, []).append(traced)

    def settle(self, request_id: str, text: list[int], traces: RequestTraces, ended: bool = False) -> None:
        """Adds to `traces` what `text`, prompt included, bears out; of the last one, at its end, what counts."""
        for traced in self._waiting.pop(request_id, []):
            ids = [token.token_id for token in traced.outcome.tokens]
            come = text[traced.position + 1 :][: len(ids)]
            if come != ids[: len(come)]:
                continue
            if len(come) == len(ids) or (ended and come):
                last = ended and traced.position + 1 + len(come) == len(text)
                traces.add(replace(traced, emitted=len(come), ended=last))
            elif not ended:
                self.add(request_id, traced)


class EndedTraces:
    """Traces of the requests that ended last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, RequestTraces] = OrderedDict()

    def keep(self, request_id: str, traces: RequestTraces) -> None:
        self._kept.pop(request_id, None)
        self._kept[request_id] = traces
        if len(self._kept) > ENDED_KEPT:
            self._kept.popitem(last=False)

    def get(self, request_id: str) -> RequestTraces | None:
        return self._kept.get(request_id)


def tree_traces(rounds: Iterable[TracedRound], name: Callable[[int], str]) -> tuple[TreeTrace, ...]:
    """What `Runtime.trace` gives for kept rounds; `name` gives the text of a token."""
    names: dict[int, str] = {}

    def named(token_id: int) -> str:
        if token_id not in names:
            names[token_id] = name(token_id)
        return names[token_id]

    return tuple(_tree_trace(traced, named) for traced in rounds)


def _tree_trace(traced: TracedRound, name: Callable[[int], str]) -> TreeTrace:
    accepted, bonus = accepted_nodes(traced)
    return TreeTrace(
        round_index=traced.index,
        position=traced.position,
        nodes=tuple(
            TreeNode(
                token_id=token_id,
                text=name(token_id),
                parent=parent,
                depth=depth,
                log_prob=log_prob,
                accepted=i in accepted,
            )
            for i, (token_id, parent, depth, log_prob) in enumerate(traced.outcome.nodes)
        ),
        bonus_token_id=bonus,
        bonus_text="" if bonus is None else name(bonus),
        tree_budget=traced.how.tree_budget,
        mode=traced.how.mode,
        reason=traced.how.reason,
        finish=traced.finish,
    )


def accepted_nodes(traced: TracedRound) -> tuple[frozenset[int], int | None]:
    """(nodes whose tokens were emitted, root included; bonus token, None where the round was cut before it)."""
    nodes = traced.outcome.nodes
    path = [0]
    for token in traced.outcome.tokens[: traced.emitted]:
        if not token.drafted:
            return frozenset(path), token.token_id
        here = path[-1]
        path.append(
            next(
                i
                for i, (token_id, parent, _, _) in enumerate(nodes)
                if i and parent == here and token_id == token.token_id
            )
        )
    return frozenset(path), None
