"""Prefixes of earlier requests: same text, same drafts, exact match, least recently used first out."""

from __future__ import annotations

from typing import Any

import pytest
from engine_driver import MODES, Client, MakeEngine, answer, ask, run
from tiny_models import prompt_of

from runtime.engine import Engine
from runtime.interface import GenerateRequest, TreeTrace


def trees(engine: Engine, request: GenerateRequest) -> tuple[Client, list[TreeTrace]]:
    """Runs a request and keeps the tree of each of its rounds."""
    client, seen = ask(engine, request), {}
    while engine.busy:
        engine.step()
        seen |= {tree.round_index: tree for tree in engine.trace(str(request.request_id))}
    return client, list(seen.values())


def shape(tree: TreeTrace) -> list[tuple[int, int]]:
    return [(node.token_id, node.parent) for node in tree.nodes]


@pytest.mark.parametrize("first_mode", MODES)
def test_a_reused_prefix_gives_the_same_text_and_the_same_drafts(
    make_engine: MakeEngine, first_mode: Any
) -> None:
    """The drafts tell whether the drafter's context came along; the random drafter's depend on all of it."""
    engine = make_engine(mode=first_mode)
    first = answer(engine, prompt_of(40), max_tokens=12)
    engine.config = engine.config.changed({"mode": "tree"})
    turn = (*prompt_of(40), *first.token_ids, *prompt_of(9, 5))

    def second(reuse: bool) -> GenerateRequest:
        return GenerateRequest(prompt_token_ids=turn, request_id=f"reuse{reuse}", reuse_prefix=reuse)

    cold, cold_trees = trees(make_engine(), second(False))
    warm, warm_trees = trees(engine, second(True))
    assert warm.finished.stats.cached_tokens == 40 + 12 - 1
    assert cold.finished.stats.cached_tokens == 0
    assert warm.finished.token_ids == cold.finished.token_ids
    assert [shape(tree) for tree in warm_trees][:-1] == [shape(tree) for tree in cold_trees][:-1]


def test_a_prefix_is_reused_up_to_the_first_difference(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = prompt_of(30)
    answer(engine, prompt)
    for shared in (1, 17, 29):
        other = (*prompt[:shared], (prompt[shared] + 1) % 200, *prompt_of(8))
        fresh = answer(make_engine(), other)
        again = answer(engine, other)
        assert again.stats.cached_tokens == shared and again.token_ids == fresh.token_ids
    same = answer(engine, prompt)
    assert same.stats.cached_tokens == 29 and same.token_ids == answer(make_engine(), prompt).token_ids


def test_the_least_recently_used_prefix_makes_room(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_slots=160, max_tree_budget=8, max_tokens=8)
    texts = {number: prompt_of(40, number) for number in range(3)}
    for number in (0, 1, 0):
        answer(engine, texts[number])
    answer(engine, texts[2])
    assert answer(engine, texts[0]).stats.cached_tokens == 39
    assert answer(engine, texts[1]).stats.cached_tokens == 0


def test_a_request_may_refuse_prefixes_and_the_setting_switches_them_off(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_reuse=False)
    assert [answer(engine, prompt_of(20)).stats.cached_tokens for _ in range(2)] == [0, 0]
    engine = make_engine()
    for _ in range(2):
        client = ask(engine, GenerateRequest(prompt_token_ids=prompt_of(20), reuse_prefix=False))
        run(engine)
        assert client.finished.stats.cached_tokens == 0
    assert engine.scheduler.prefixes.slots == 0
