"""The engine on tiny models: requests, seeds, ends, limits, cancelling, live changes, figures, and no slot lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from constructed import ConstructedDrafter, Reference, Request
from engine_driver import MODES, Client, MakeEngine, answer, as_generate, ask, rounds_of, run
from reference_sampler import Rule
from safetensors.torch import load_file, save_file
from tiny_models import END, OTHER_END, prompt_of

from runtime.engine import Engine
from runtime.interface import (
    GenerateRequest,
    RequestAdmitted,
    RequestRejected,
    RoundStats,
    RuntimeUnavailable,
    SamplingParams,
)

VOCAB = 288


def special(engine: Engine, token: str) -> int:
    token_id = engine.loaded.tokenizer.token_id(token)
    assert token_id is not None
    return token_id


# Sampling as requests ask for it.


@pytest.mark.case("A02")
def test_sampled_requests_differ_and_degenerate_filters_are_greedy(make_engine: MakeEngine) -> None:
    engine = make_engine(temperature=0.8)
    prompt = prompt_of(10)
    greedy = answer(engine, prompt, temperature=0.0).token_ids
    assert len({answer(engine, prompt, temperature=1.0).token_ids for _ in range(5)}) > 1
    assert answer(engine, prompt, temperature=1.0, top_k=1).token_ids == greedy
    assert answer(engine, prompt, temperature=1.0, top_p=1e-6).token_ids == greedy
    assert answer(engine, prompt, temperature=1e-6).token_ids == greedy
    assert (
        answer(engine, prompt, top_k=50, seed=3).token_ids
        == answer(engine, prompt, top_k=50, seed=3, temperature=0.8).token_ids
    )
    assert answer(engine, prompt, top_k=50, seed=3).token_ids != greedy


@pytest.mark.case("A04")
def test_seeds_are_kept_drawn_and_echoed(make_engine: MakeEngine) -> None:
    engine = make_engine(max_concurrency=5)
    prompt = prompt_of(12)

    def seeded() -> Client:
        sampling = SamplingParams(temperature=1.0, seed=42)
        return ask(engine, GenerateRequest(prompt_token_ids=prompt, sampling=sampling))

    unseeded = {answer(engine, prompt, temperature=1.0).token_ids for _ in range(8)}
    assert len(unseeded) > 1
    texts = []
    for others in (0, 0, 4, 4):
        for other in range(others):
            sampling = SamplingParams(temperature=1.0)
            ask(engine, GenerateRequest(prompt_token_ids=prompt_of(5 + other, 2), sampling=sampling))
        client = seeded()
        run(engine)
        texts.append(client.finished.token_ids)
    assert len(set(texts)) == 1
    drawn = ask(engine, GenerateRequest(prompt_token_ids=prompt, sampling=SamplingParams(temperature=1.0)))
    run(engine)
    admitted = drawn.events[0]
    assert isinstance(admitted, RequestAdmitted)
    assert answer(engine, prompt, temperature=1.0, seed=admitted.seed).token_ids == drawn.finished.token_ids


@pytest.mark.case("A06")
@pytest.mark.parametrize("mode", MODES)
def test_each_piece_carries_its_logprob_and_none_follows_the_stop(
    make_engine: MakeEngine, tiny_reference: Reference, mode: Any
) -> None:
    request = Request("r", prompt_of(9), 16, logprobs=2)
    scripts = tiny_reference.scripts([request])
    outputs = scripts["r"].outputs
    stop = outputs[11]
    engine = make_engine(ConstructedDrafter(scripts))
    client = ask(engine, as_generate(request, mode=mode))
    run(engine)
    table = tiny_reference.logits([[*request.prompt, *outputs]])[0].log_softmax(-1)
    assert [piece.token_id for piece in client.pieces] == list(outputs)
    for i, piece in enumerate(client.pieces):
        row = table[len(request.prompt) + i - 1]
        assert piece.logprob.logprob == pytest.approx(float(row[piece.token_id]), abs=1e-3)
        assert [token for token, _, _ in piece.logprob.top] == row.topk(2).indices.tolist()
    if mode == "tree":
        assert client.finished.stats.accept_length > 1.5
    sampling = SamplingParams(max_tokens=16, temperature=0.0, logprobs=0, stop_token_ids=(stop,))
    client = ask(engine, as_generate(request, mode=mode, sampling=sampling))
    run(engine)
    assert [piece.token_id for piece in client.pieces] == list(outputs[: outputs.index(stop) + 1])
    assert all(piece.logprob is not None for piece in client.pieces)


# Ends of a text.


@pytest.mark.case("A08")
@pytest.mark.parametrize("end", [END, OTHER_END])
@pytest.mark.parametrize("mode", MODES)
def test_every_end_token_ends_the_text_and_stays_out_of_it(
    make_engine: MakeEngine, tmp_path: Path, end: str, mode: str
) -> None:
    target = tiny_models.write_target(tmp_path / "qwen3", "qwen3", vocab_size=VOCAB)
    drafter = tiny_models.write_drafter(tmp_path / "drafter", target)
    engine = make_engine(target=target, drafter=drafter, mode=mode)
    last = special(engine, end)
    ended = answer(engine, prompt_of(8), logit_bias={last: 100.0}, min_tokens=5)
    assert ended.reason == "stop" and ended.token_ids[-1] == last and len(ended.token_ids) == 6
    assert ended.text == engine.loaded.tokenizer.decode(ended.token_ids[:-1])
    assert "end" not in ended.text


@pytest.mark.case("A08")
def test_end_tokens_join_the_request_s_own_and_can_be_ignored(make_engine: MakeEngine) -> None:
    engine = make_engine()
    end, mine = special(engine, END), 65
    both = {"stop_token_ids": (mine,), "max_tokens": 6}
    assert answer(engine, prompt_of(8), logit_bias={mine: 100.0}, **both).token_ids == (mine,)
    assert answer(engine, prompt_of(8), logit_bias={end: 100.0}, **both).token_ids == (end,)
    ignoring = answer(engine, prompt_of(8), logit_bias={end: 100.0}, ignore_eos=True, **both)
    assert (ignoring.token_ids, ignoring.reason, ignoring.text) == ((end,) * 6, "length", "")


# Vocabulary, block size, context limit.


@pytest.mark.case("A11")
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_ids_of_a_padded_head_enter_neither_tree_nor_text(
    make_engine: MakeEngine, tmp_path: Path, temperature: float
) -> None:
    target = tiny_models.write_target(tmp_path / "padded", vocab_size=VOCAB, head_rows=VOCAB + 32)
    state = load_file(target / "model.safetensors")
    state["lm_head.weight"][VOCAB:] *= 50
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    drafter = tiny_models.write_drafter(tmp_path / "drafter", target)
    engine = make_engine(target=target, drafter=drafter)
    sampling = SamplingParams(temperature=temperature, seed=1, max_tokens=40)
    client = ask(engine, GenerateRequest(prompt_token_ids=(1, 2, 3), request_id="r", sampling=sampling))
    drafted: set[int] = set()
    while engine.busy:
        engine.step()
        drafted |= {node.token_id for tree in engine.trace("r") for node in tree.nodes}
    assert len(drafted) > 20 and max(drafted) < VOCAB
    assert max(client.finished.token_ids) < VOCAB
    for field in ("stop_token_ids", "logit_bias"):
        value = (VOCAB,) if field == "stop_token_ids" else {VOCAB: 1.0}
        with pytest.raises(RequestRejected, match=f"{field}: token id {VOCAB} is not in 0 to {VOCAB - 1}"):
            answer(engine, (1, 2), **{field: value})


@pytest.mark.case("A12")
@pytest.mark.parametrize("block_size", [1, 2, 7, 8, None])
def test_a_block_of_n_drafts_n_minus_one_deep(make_engine: MakeEngine, block_size: int | None) -> None:
    engine = make_engine(block_size=block_size, tree_budget=64, max_tokens=30)
    client = ask(engine, GenerateRequest(prompt_token_ids=prompt_of(6), mode="chain"))
    rounds = rounds_of(engine)
    assert max(max(one.draft_depths) for one in rounds) == (block_size or 8) - 1
    assert len(client.finished.token_ids) == 30
    reason = client.finished.stats.plain_reason
    assert reason == ("block_size 1 leaves no draft position" if block_size == 1 else None)


@pytest.mark.case("A25")
def test_the_context_limit_ends_a_text_and_leaves_the_neighbour_alone(make_engine: MakeEngine) -> None:
    settings: dict[str, Any] = {"max_seq_len": 64, "tree_budget": 32, "prefix_reuse": False}
    near, neighbour = prompt_of(61), prompt_of(20)
    alone = answer(make_engine(**settings), neighbour, max_tokens=40).token_ids
    engine = make_engine(**settings)
    clients = [
        ask(engine, GenerateRequest(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=40)))
        for prompt in (near, neighbour)
    ]
    run(engine)
    assert clients[0].finished.reason == "length" and len(clients[0].finished.token_ids) == 3
    assert clients[1].finished.token_ids == alone
    with pytest.raises(
        RequestRejected, match="64 tokens leave no room in the context limit of 64"
    ) as refused:
        answer(engine, prompt_of(64))
    assert refused.value.field == "prompt"


@pytest.mark.parametrize(
    ("request_fields", "words"),
    [
        ({}, "exactly one of prompt"),
        ({"prompt": "a", "prompt_token_ids": (1,)}, "exactly one of prompt"),
        ({"prompt_token_ids": ()}, "it has no tokens"),
        ({"prompt_token_ids": (VOCAB,)}, f"token id {VOCAB} is not in 0 to {VOCAB - 1}"),
        ({"prompt": "a", "tree_budget": 65}, "65 is above 64 .max_tree_budget."),
    ],
)
def test_a_request_that_can_never_run_is_refused(
    make_engine: MakeEngine, request_fields: dict[str, Any], words: str
) -> None:
    engine = make_engine()
    with pytest.raises(RequestRejected, match=words):
        engine.submit(GenerateRequest(**request_fields), Client())
    assert not engine.busy


def test_a_request_larger_than_the_cache_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_slots=128)
    with pytest.raises(RequestRejected, match="need 165 KV slots, there are 128"):
        answer(engine, prompt_of(60), max_tokens=40)


# Many requests.


def test_requests_of_all_modes_in_one_batch_get_their_solo_texts(
    make_engine: MakeEngine, tiny_reference: Reference
) -> None:
    requests = [
        Request(f"r{i}", prompt_of(5 + 20 * i), 20, Rule(0.7 * (i % 2), top_k=9 * (i % 3), seed=i))
        for i in range(6)
    ]
    drafter = ConstructedDrafter(tiny_reference.scripts(requests))
    engine = make_engine(drafter, max_concurrency=3, prefill_chunk=16)
    clients = [ask(engine, as_generate(each, mode=MODES[i % 3])) for i, each in enumerate(requests)]
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, len(engine.scheduler.running))
        engine.check_integrity()
    assert most == 3
    for request, client in zip(requests, clients, strict=True):
        assert client.finished.token_ids == drafter.scripts[request.name].outputs
        assert isinstance(client.events[0], RequestAdmitted)
        assert client.streamed == client.finished.text


def test_by_default_two_of_four_full_contexts_have_slots_and_the_others_wait(make_engine: MakeEngine) -> None:
    engine = make_engine(max_concurrency=4, max_seq_len=128, max_tree_budget=8)
    full = SamplingParams(max_tokens=28, ignore_eos=True)
    clients = [
        ask(engine, GenerateRequest(prompt_token_ids=prompt_of(100, i), sampling=full)) for i in range(4)
    ]
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert most == 2
    assert [client.finished.stats.output_tokens for client in clients] == [28] * 4


@pytest.mark.case("A31")
@pytest.mark.parametrize("prefix_reuse", [False, True])
def test_no_slot_is_lost_over_200_requests_half_aborted(make_engine: MakeEngine, prefix_reuse: bool) -> None:
    engine = make_engine(
        kv_slots=200,
        max_tree_budget=8,
        tree_budget=8,
        prefix_reuse=prefix_reuse,
        max_queue=400,
        max_concurrency=4,
    )
    rng = random.Random(0)
    clients = {}
    for number in range(200):
        prompt = prompt_of(rng.randint(1, 30), number % 40)
        sampling = SamplingParams(max_tokens=rng.randint(1, 10), temperature=rng.choice([0.0, 1.0]))
        request = GenerateRequest(
            prompt_token_ids=prompt,
            request_id=f"r{number}",
            sampling=sampling,
            mode=rng.choice(MODES),
        )
        clients[f"r{number}"] = ask(engine, request)
    doomed = set(rng.sample(sorted(clients), 100))
    while engine.busy:
        engine.step()
        engine.check_integrity()
        alive = [ticket.request_id for ticket in (*engine.scheduler.running, *engine.scheduler.waiting)]
        for request_id in [each for each in alive[:6] if each in doomed and rng.random() < 0.6]:
            assert engine.cancel(request_id)
            engine.check_integrity()
    reasons = [client.finished.reason for client in clients.values()]
    assert reasons.count("cancelled") >= 80 and reasons.count("length") >= 80
    cache, prefixes = engine.models.cache, engine.scheduler.prefixes
    assert cache.free_slots + prefixes.slots == cache.slots
    assert (prefixes.slots > 0) == prefix_reuse


def test_cancelling_ends_a_request_where_it_stands(make_engine: MakeEngine) -> None:
    engine = make_engine(max_concurrency=1, prefix_reuse=False)
    running = ask(engine, GenerateRequest(prompt_token_ids=prompt_of(6), request_id="running"))
    waiting = ask(engine, GenerateRequest(prompt_token_ids=prompt_of(7), request_id="waiting"))
    for _ in range(3):
        engine.step()
    assert {each.request_id: each.state for each in engine.requests()} == {
        "running": "decoding",
        "waiting": "queued",
    }
    assert engine.cancel("waiting") and engine.cancel("running") and not engine.cancel("running")
    assert waiting.finished.reason == running.finished.reason == "cancelled"
    assert waiting.finished.token_ids == () and waiting.finished.stats.ttft_s is None
    said = running.finished.token_ids
    assert 3 <= len(said) < 24 and [piece.token_id for piece in running.pieces] == list(said)
    assert running.streamed == running.finished.text
    assert not engine.busy and engine.models.cache.free_slots == engine.models.cache.slots


def test_a_request_cancelled_while_it_is_prefilled_leaves_no_trace(make_engine: MakeEngine) -> None:
    engine = make_engine(prefill_chunk=16)
    client = ask(engine, GenerateRequest(prompt_token_ids=prompt_of(60), request_id="long"))
    engine.step()
    assert engine.requests()[0].state == "prefill"
    assert engine.cancel("long") and client.finished.token_ids == ()
    whole = answer(make_engine(), prompt_of(60))
    again = answer(engine, prompt_of(60))
    assert again.token_ids == whole.token_ids and again.stats.cached_tokens == 16


def test_running_requests_decode_a_round_after_each_chunk_of_a_long_prompt(make_engine: MakeEngine) -> None:
    """No step computes more prompt tokens than a chunk has, so nobody waits for a whole prompt."""
    engine = make_engine(prefill_chunk=16, prefix_reuse=False)
    for number in range(2):
        sampling = SamplingParams(max_tokens=60, ignore_eos=True)
        ask(engine, GenerateRequest(prompt_token_ids=prompt_of(6, number), mode="off", sampling=sampling))
    while any(each.state != "decoding" for each in engine.requests()):
        engine.step()
    ask(engine, GenerateRequest(prompt_token_ids=prompt_of(100), request_id="long", mode="off"))
    for chunk in range(7):
        before = engine.prefilled_tokens
        stats = engine.step()
        assert stats is not None and stats.batch == (2 if chunk < 6 else 3)
        assert engine.prefilled_tokens - before == (16 if chunk < 6 else 100 - 6 * 16)
    assert engine.requests()[-1].state == "decoding"


def test_the_queue_has_a_limit_and_ids_are_unique(make_engine: MakeEngine) -> None:
    engine = make_engine(max_concurrency=1, max_queue=2)
    for number in range(3):
        ask(engine, GenerateRequest(prompt_token_ids=(number, 1), request_id=f"r{number}"))
    with pytest.raises(RuntimeUnavailable, match="max_queue = 2"):
        ask(engine, GenerateRequest(prompt_token_ids=(9, 1)))
    run(engine)
    ask(engine, GenerateRequest(prompt_token_ids=(0, 1), request_id="r0"))
    with pytest.raises(RequestRejected, match="r0 is in use"):
        ask(engine, GenerateRequest(prompt_token_ids=(0, 1), request_id="r0"))


# Changes while text streams.


def test_who_names_no_request_is_not_refused_for_the_name_another_has_chosen(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for number in range(1, 4):
        ask(engine, GenerateRequest(prompt_token_ids=(number, 1), request_id=f"r{number}"))
    assert engine.submit(GenerateRequest(prompt_token_ids=(0, 1)), Client()) not in {"r1", "r2", "r3"}


def test_mode_and_budget_act_from_the_next_round_while_the_stream_goes_on(
    make_engine: MakeEngine, tiny_reference: Reference
) -> None:
    following, fixed = Request("following", prompt_of(8), 60), Request("fixed", prompt_of(9), 60)
    drafter = ConstructedDrafter(tiny_reference.scripts([following, fixed]))
    engine = make_engine(drafter, mode="off")
    clients = [ask(engine, as_generate(following)), ask(engine, as_generate(fixed, mode="chain"))]
    plan: list[tuple[dict[str, Any], Callable[[RoundStats], bool]]] = [
        ({}, lambda one: one.draft_depths == (0, 7) and one.mode == "off"),
        ({"mode": "tree", "tree_budget": 4}, lambda one: one.nodes == 5 + 8),
        ({"tree_budget": 11}, lambda one: one.nodes == 12 + 8 and one.tree_budget == 11),
        ({"mode": "chain"}, lambda one: one.draft_depths == (7, 7)),
        ({"tree_budget": 0, "mode": "tree"}, lambda one: one.draft_depths == (0, 7)),
        ({"mode": "off"}, lambda one: one.nodes == 1 + 8),
    ]
    for change, holds in plan:
        engine.config = engine.config.changed(change)
        stats = engine.step()
        assert stats is not None and holds(stats), (change, stats)
    run(engine)
    for request, client in zip((following, fixed), clients, strict=True):
        assert client.finished.token_ids == drafter.scripts[request.name].outputs


def test_temperature_reaches_later_requests_and_never_a_running_one(make_engine: MakeEngine) -> None:
    engine = make_engine(temperature=0.0, top_k=0)
    greedy = answer(make_engine(), prompt_of(8)).token_ids
    before = ask(engine, GenerateRequest(prompt_token_ids=prompt_of(8)))
    engine.step()
    engine.config = engine.config.changed({"temperature": 1.5})
    after = ask(engine, GenerateRequest(prompt_token_ids=prompt_of(8), sampling=SamplingParams(seed=1)))
    run(engine)
    assert before.finished.token_ids == greedy and before.finished.stats.temperature == 0.0
    assert after.finished.token_ids != greedy and after.finished.stats.temperature == 1.5


def test_figures_of_a_request_count_what_they_say(make_engine: MakeEngine, tiny_reference: Reference) -> None:
    request = Request("r", prompt_of(12), 30)
    engine = make_engine(ConstructedDrafter(tiny_reference.scripts([request])), tree_budget=16)
    client = ask(engine, as_generate(request))
    rounds = rounds_of(engine)
    stats = client.finished.stats
    assert stats.output_tokens == 30 == 1 + sum(one.emitted for one in rounds)
    assert stats.rounds == len(rounds) == engine.rounds
    assert stats.accept_length == pytest.approx(29 / stats.rounds) and stats.accept_length > 2
    assert stats.num_correct_drafts == sum(piece.drafted for piece in client.pieces)
    assert stats.num_correct_drafts == 29 - stats.rounds
    assert stats.prompt_tokens == 12 and stats.finish_reason == "length" and stats.plain_reason is None
    assert all(one.accept_lengths == (one.emitted,) and len(one.stage_s) == 5 for one in rounds)
    assert [one.prefill_tokens for one in rounds] == [12] + [0] * (len(rounds) - 1) and rounds[
        0
    ].prefill_s > 0
    assert stats.age_s >= (stats.ttft_s or 0) + (stats.decode_s or 0) and stats.last_token_age_s is None  # type: ignore[operator]
    single = answer(engine, prompt_of(5), max_tokens=1).stats
    assert (single.rounds, single.accept_length, single.tok_s) == (0, None, None)


def test_a_request_without_a_drafter_says_why_it_is_plain(make_engine: MakeEngine) -> None:
    engine = make_engine(drafter="none")
    finished = answer(engine, prompt_of(5))
    assert finished.stats.plain_reason == "no drafter, as configured (drafter = 'none')"
    assert finished.stats.accept_length == 1.0


def test_unfit_defaults_never_exceed_the_reserved_slots(make_engine: MakeEngine) -> None:
    """A default budget above the reserve would write over a neighbour's slots."""
    engine = make_engine(max_tree_budget=4, tree_budget=None, max_tokens=12, prefix_reuse=False)
    engine.default_budget = 64
    alone = [answer(make_engine(), prompt_of(n)).token_ids[:12] for n in (6, 7)]
    clients = [ask(engine, GenerateRequest(prompt_token_ids=prompt_of(n))) for n in (6, 7)]
    rounds = rounds_of(engine)
    assert max(one.nodes for one in rounds) <= 2 * 5
    assert [client.finished.token_ids for client in clients] == alone
