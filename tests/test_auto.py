"""Auto mode: near the best fixed setting, better where the load changes, and the text stays the plain one."""

from __future__ import annotations

import os
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
from constructed import ConstructedDrafter, Reference, Request
from engine_driver import MakeEngine, as_generate, ask, rounds_of, run
from simulated_rounds import HORIZON, Costs, Phase, seconds

from runtime.auto import CHAIN, PLAIN, Auto, Observed, Outcome
from runtime.auto_play import CHANGE_ROUNDS, EVERY, AutoPlay
from runtime.interface import GenerateRequest, SamplingParams
from runtime.race import Arm, student
from runtime.round import RoundResult, SequenceRound
from runtime.sequence import OutputToken, Speculation

BUDGETS = (4, 7, 11, 15, 23, 31, 63)
TREE = {budget: Arm("tree", budget) for budget in BUDGETS}
CPU = Costs(base=0.020, row=0.0012, free_rows=1, draft=0.006, draft_row=0.001)
GPU = Costs(base=0.004, row=0.000035, free_rows=32, draft=0.0012, draft_row=0.00002)
GRAPHS = Costs(
    base=0.0004, row=0.000003, free_rows=8, draft=0.0002, draft_row=0.000002, change=0.0008, every=EVERY
)
"""Rounds replayed one ahead: a change costs about a round."""
LONG = bool(os.environ.get("DDTREE_LONG"))
TRACES = 8 if LONG else 5
SIZE = 1000 if LONG else 400


def auto(**changes: Any) -> Auto:
    return Auto(BUDGETS, HORIZON, **changes)


def gains(trace: list[Phase], costs: Costs, fixed: list[Arm], seeds: int) -> dict[Arm, list[float]]:
    """How much faster auto went than each fixed setting, by trace."""
    found: dict[Arm, list[float]] = {arm: [] for arm in fixed}
    for seed in range(seeds):
        chooser = auto()
        if costs is GRAPHS:  # learns more slowly, so it has served before
            chooser = Auto((7, 15, 31, 63), HORIZON, change_rounds=CHANGE_ROUNDS)
            seconds(trace, costs, chooser, TRACES + seed)
        mine = seconds(trace, costs, chooser, seed)
        for arm in fixed:
            found[arm].append(seconds(trace, costs, arm, seed) / mine - 1)
    return found


@pytest.mark.parametrize("costs", [CPU, GPU, GRAPHS], ids=["cpu", "gpu", "graphs"])
def test_on_a_mixed_trace_it_stays_within_3_percent_of_the_best_fixed_setting(costs: Costs) -> None:
    """Paired traces; lower 95 % bound of the mean difference to the best fixed setting."""
    trace = [Phase(2 * SIZE, 1, quality) for quality in (0.8, 0.45, 0.75, 0.3, 0.6)]
    fixed = {CPU: (7, 11), GPU: (23, 31), GRAPHS: (15, 31)}[costs]
    found = gains(trace, costs, [TREE[budget] for budget in fixed], TRACES)
    against = min(found.values(), key=statistics.fmean)
    error = statistics.stdev(against) / len(against) ** 0.5
    assert statistics.fmean(against) - student(0.95, len(against) - 1) * error > -0.03, against


@pytest.mark.parametrize("costs", [CPU, GPU], ids=["cpu", "gpu"])
def test_where_the_load_changes_it_is_faster_than_any_fixed_setting(costs: Costs) -> None:
    trace = [Phase(SIZE, 1, 0.6), Phase(5 * SIZE, 32, 0.6), Phase(SIZE, 1, 0.6)]
    fixed = [PLAIN, TREE[4], TREE[7]] if costs is CPU else [TREE[7], TREE[11], TREE[15]]
    for arm, found in gains(trace, costs, fixed, 2).items():
        assert min(found) > 0, arm


@pytest.mark.case("A24")
def test_where_nothing_is_accepted_and_rows_are_dear_it_falls_back_to_plain_decoding() -> None:
    dear = Costs(base=0.010, row=0.004, free_rows=1, draft=0.008, draft_row=0.001)
    chooser = auto()
    seconds([Phase(300, 2, 0.05)], dear, chooser, 1)
    assert chooser.arm == PLAIN
    assert "off" in chooser.reason and "faster expected" in chooser.reason


def test_it_comes_back_from_plain_decoding_when_text_gets_easy() -> None:
    dear = Costs(base=0.010, row=0.002, free_rows=1, draft=0.004, draft_row=0.001)
    chooser = auto()
    seconds([Phase(300, 1, 0.05)], dear, chooser, 1)
    seconds([Phase(1500, 1, 0.95)], dear, chooser, 2)
    assert chooser.arm != PLAIN


def test_one_round_that_was_held_up_changes_nothing() -> None:
    chooser = auto()
    seconds([Phase(600, 1, 0.6)], CPU, chooser, 3)
    before = chooser.arm
    outcome = Outcome([(0, 0, 0, 0.0)], [0])
    chooser.saw(Observed(before, 1, 1 + before.tree_budget, 5.0, 0.01, [outcome]))
    chooser.choose(1)
    assert chooser.arm == before


def test_a_round_tells_what_smaller_trees_and_the_chain_would_have_had() -> None:
    """Path 0 -> 2 -> 5: the chain misses its first step; node 5 is the fifth likeliest."""
    nodes = [
        (0, 0, 0, 0.0),
        (1, 0, 1, -0.3),  # rank 1, the chain's
        (2, 0, 1, -0.5),  # rank 2, accepted
        (3, 1, 2, -0.9),  # rank 3
        (4, 2, 2, -1.0),  # rank 4
        (5, 2, 2, -1.6),  # rank 5, accepted
    ]
    chooser = Auto(
        (2, 4, 5, 9), HORIZON, dict.fromkeys([CHAIN, *(Arm("tree", each) for each in (2, 4, 5, 9))], 2.0)
    )
    told = chooser._lengths(Observed(Arm("tree", 5), 1, 6, 0.1, 0.1, [Outcome(nodes, [0, 2, 5])]))
    assert told == {CHAIN: 1.0, Arm("tree", 2): 2.0, Arm("tree", 4): 2.0, Arm("tree", 5): 3.0}


def test_without_a_drafter_there_is_nothing_to_choose() -> None:
    chooser = Auto(BUDGETS, 0)
    assert chooser.arms == (PLAIN,) and chooser.choose(4) == PLAIN


# In the engine.


def request(name: str, start: int) -> Request:
    return Request(name, tuple(range(start, start + 9)), 24)


def test_the_text_is_the_plain_one_whatever_is_chosen(
    make_engine: MakeEngine, tiny_reference: Reference
) -> None:
    """Rounds of all kinds, a request with a mode of its own among them."""
    asked = [request("a", 60), request("b", 70), request("c", 80)]
    scripts = tiny_reference.scripts(asked)
    engine = make_engine(ConstructedDrafter(scripts), mode="auto", max_concurrency=3)
    forced = [TREE[7], PLAIN, CHAIN, TREE[4]]
    chooser = engine.auto._auto
    chooser.choose = lambda *_: forced[engine.rounds % len(forced)]  # type: ignore[method-assign]
    clients = [ask(engine, as_generate(each, mode="chain" if each.name == "c" else None)) for each in asked]
    rounds = rounds_of(engine)
    for client, each in zip(clients, asked, strict=True):
        assert client.finished.token_ids == tuple(scripts[each.name].outputs)
    assert {stats.mode for stats in rounds} == {"off", "chain", "tree"}, "what is shown is what is played"
    first = rounds[0]
    assert (first.mode, first.tree_budget, first.auto, first.mixed) == (*forced[0], True, True)


@pytest.mark.parametrize("mode", ["off", "chain", "tree"])
def test_the_figures_of_a_round_name_what_its_requests_asked_for_not_what_is_configured(
    make_engine: MakeEngine, mode: Any
) -> None:
    engine = make_engine(mode="tree" if mode != "tree" else "off", tree_budget=11)
    asked = GenerateRequest(
        prompt_token_ids=(60, 61, 62),
        sampling=SamplingParams(max_tokens=12, ignore_eos=True),
        mode=mode,
        tree_budget=4,
    )
    client = ask(engine, asked)
    rounds = rounds_of(engine)
    assert {(each.mode, each.mixed, each.auto) for each in rounds} == {(mode, False, False)}
    assert mode != "tree" or {each.tree_budget for each in rounds} == {4}
    assert client.finished.stats.mode == mode


def test_an_answer_that_auto_decoded_names_the_setting_of_most_of_its_rounds(
    make_engine: MakeEngine, tiny_reference: Reference
) -> None:
    asked = [request("a", 60)]
    engine = make_engine(ConstructedDrafter(tiny_reference.scripts(asked)), mode="auto")
    forced = [CHAIN, TREE[4], TREE[4]]
    engine.auto._auto.choose = lambda *_: forced[engine.rounds % 3]  # type: ignore[method-assign]
    client = ask(engine, as_generate(asked[0]))
    rounds = rounds_of(engine)
    played = [(each.mode, each.tree_budget) for each in rounds]
    stats = client.finished.stats
    assert (stats.mode, stats.tree_budget) == max(played, key=played.count) and len(set(played)) == 2


def test_sampled_text_does_not_depend_on_it_either(make_engine: MakeEngine) -> None:
    def texts(**settings: Any) -> list[tuple[int, ...]]:
        engine = make_engine(**settings)
        sampling = SamplingParams(max_tokens=24, temperature=0.8, seed=5)
        prompts = [tuple(range(60 + n, 70 + n)) for n in range(3)]
        clients = [ask(engine, GenerateRequest(prompt_token_ids=each, sampling=sampling)) for each in prompts]
        run(engine)
        return [client.finished.token_ids for client in clients]

    assert texts(mode="auto") == texts(mode="off")


def test_the_status_says_what_is_played_and_why(make_engine: MakeEngine, tiny_reference: Reference) -> None:
    asked = [request("a", 60)]
    engine = make_engine(ConstructedDrafter(tiny_reference.scripts(asked)), mode="auto")
    client = ask(engine, as_generate(asked[0]))
    run(engine)
    assert engine.auto.told.startswith(str(engine.auto._auto.arm))
    stats = client.finished.stats
    assert stats.plain_reason is None or "auto mode" in stats.plain_reason


def test_auto_without_a_drafter_says_why_it_is_plain(make_engine: MakeEngine) -> None:
    engine = make_engine(drafter="none", mode="auto")
    client = ask(engine, GenerateRequest(prompt_token_ids=(60, 61), sampling=SamplingParams(max_tokens=3)))
    run(engine)
    assert client.finished.stats.mode == "off" and client.finished.stats.plain_reason


def test_a_round_launched_ahead_is_learnt_as_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the round that comes back after a change is the one in flight, drafted as before the change."""
    seen: list[Observed] = []
    monkeypatch.setattr(Auto, "saw", lambda _self, observed: seen.append(observed))
    loaded: Any = SimpleNamespace(
        limits=SimpleNamespace(max_tree_budget=63),
        no_drafter_reason=None,
        models=SimpleNamespace(draft_horizon=HORIZON),
        graphs=SimpleNamespace(budgets=(7, 15, 31, 63), size_for=lambda batch: batch),
        drafter_path=None,
    )
    play = AutoPlay(loaded)
    play.choose(1)
    usual, tried = play.speculation(), Speculation("tree", 63)
    nodes = ((5, 0, 0, 0.0), (6, 0, 1, -0.1))
    one = SequenceRound([OutputToken(6, True)], (0, 1), nodes, None)
    result = RoundResult((one,), 2, (1e-4, 1e-5, 5e-4, 1e-6, 1e-5))
    for _ in range(EVERY):
        play.learn(result, (usual,))
    play.learn(result, (tried,))
    play.learn(result, (usual,))
    play.learn(result, (Speculation("chain", HORIZON),))
    play.learn(result, (usual, tried))
    learnt = [observed.arm for observed in seen]
    assert learnt == [Arm("tree", usual.tree_budget), Arm("tree", 63), CHAIN]
