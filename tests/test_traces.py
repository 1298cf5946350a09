"""Draft trees as the engine keeps them: what was accepted, how a text ended, bounds, requests that have ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from constructed import ConstructedDrafter, Reference, Request
from engine_driver import Client, MakeEngine, as_generate, ask, run
from tiny_models import prompt_of

from runtime import traces
from runtime.engine import Engine
from runtime.interface import TreeTrace

REQUEST = Request("mine", prompt_of(20), new_tokens=40)


def decoded(
    engine: Engine, request: Request = REQUEST, **sampling: Any
) -> tuple[Client, tuple[TreeTrace, ...]]:
    """One request to its end, and its trees."""
    asked = as_generate(request)
    client = ask(engine, asked.model_copy(update={"sampling": asked.sampling.model_copy(update=sampling)}))
    run(engine)
    return client, engine.trace(request.name)


@pytest.fixture
def engine(make_engine: MakeEngine, tiny_reference: Reference) -> Engine:
    return make_engine(ConstructedDrafter(tiny_reference.scripts([REQUEST])), mode="tree", tree_budget=16)


def tokens(trace: TreeTrace) -> list[int]:
    """The tokens a round gave, read from its tree."""
    path = [0]
    for number, node in enumerate(trace.nodes):
        if number and node.accepted:
            assert node.parent == path[-1]
            path.append(number)
    drafted = [trace.nodes[number].token_id for number in path[1:]]
    return drafted + ([] if trace.bonus_token_id is None else [trace.bonus_token_id])


def check_trees(trees: Iterable[TreeTrace], text: tuple[int, ...]) -> None:
    """What each round took of its tree is what `text`, prompt included, has there; children follow their parents."""
    for tree in trees:
        told = (tree.nodes[0].token_id, *tokens(tree))
        assert told == text[tree.position :][: len(told)]
        assert all(node.parent < i for i, node in enumerate(tree.nodes) if i)
        assert all(node.depth == tree.nodes[node.parent].depth + 1 for node in tree.nodes[1:])


def test_the_trees_of_an_ended_request_tell_every_token_of_its_text(engine: Engine) -> None:
    client, trees = decoded(engine)
    told = [token_id for tree in trees for token_id in tokens(tree)]
    assert told == list(client.finished.token_ids[1:])
    assert [len(tokens(tree)) for tree in trees if len(tokens(tree)) > 2]
    assert [tree.finish for tree in trees] == [None] * (len(trees) - 1) + ["length"]
    for tree, following in zip(trees, trees[1:], strict=False):
        assert following.position == tree.position + len(tokens(tree))
        assert following.nodes[0].token_id == tokens(tree)[-1]


def test_a_round_that_a_stop_cuts_inside_its_drafts_has_no_bonus_token(engine: Engine) -> None:
    client, trees = decoded(engine)
    text = list(client.finished.token_ids)
    drafted = [token_id for tree in trees for token_id in tokens(tree)[:-1]]
    stop = next(each for each in drafted if text.index(each) > 0 and is_drafted_at(trees, text.index(each)))
    _, trees = decoded(engine, stop_token_ids=(stop,))
    assert trees[-1].finish == "stop" and trees[-1].bonus_token_id is None and trees[-1].bonus_text == ""
    assert tokens(trees[-1])[-1] == stop


def is_drafted_at(trees: tuple[TreeTrace, ...], at: int) -> bool:
    """Whether output token `at` was an accepted draft."""
    first = 1
    for tree in trees:
        count = len(tokens(tree))
        if at < first + count:
            return tree.bonus_token_id is None or at < first + count - 1
        first += count
    return False


@pytest.mark.parametrize("mode", ["off", "chain"])
def test_modes_without_a_tree_tell_how_they_drafted(engine: Engine, mode: Any) -> None:
    engine.config = engine.config.changed({"mode": mode})
    _, trees = decoded(engine)
    assert {tree.mode for tree in trees} == {mode}
    parents = [node.parent for tree in trees for node in tree.nodes[1:]]
    assert bool(parents) is (mode == "chain")


def test_only_rounds_after_the_named_one_are_given(engine: Engine) -> None:
    _, trees = decoded(engine)
    middle = trees[len(trees) // 2].round_index
    assert [tree.round_index for tree in engine.trace("mine", middle)] == [
        tree.round_index for tree in trees if tree.round_index > middle
    ]
    assert engine.trace("unknown") == ()


def test_what_is_kept_is_bounded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "ROUNDS_KEPT", 5)
    monkeypatch.setattr(traces, "ENDED_KEPT", 2)
    _, trees = decoded(engine)
    assert len(trees) == 5
    monkeypatch.setattr(traces, "NODES_KEPT", 20)
    _, trees = decoded(engine)
    assert len(trees) == 1
    kept = traces.EndedTraces()
    for name in "abc":
        kept.keep(name, traces.RequestTraces())
    assert [kept.get(name) is not None for name in "abc"] == [False, True, True]


def test_rounds_that_come_apart_from_their_tokens_are_kept_once_the_text_bears_them_out(
    engine: Engine,
) -> None:
    client, _ = decoded(engine)
    text = [*REQUEST.prompt, *client.finished.token_ids]
    rounds = engine.traced(REQUEST.name)
    rounds = rounds[: max(i for i, each in enumerate(rounds) if len(each.outcome.tokens) > 1) + 1]
    late, kept = traces.LateRounds(), traces.RequestTraces()
    for each in rounds:
        late.add("mine", each)
    late.settle("mine", text[: rounds[2].position + 1], kept)
    assert kept.since(0) == rounds[:2]
    # One that the text does not bear out is of another life of the request.
    late.add("mine", replace(rounds[3], position=rounds[3].position + 1))
    stopped = text[: rounds[-1].position + 2]
    late.settle("mine", stopped, kept, ended=True)
    found = kept.since(0)
    assert found[:-1] == rounds[:-1] and (found[-1].emitted, found[-1].finish) == (1, "stop")
    assert not late._waiting
