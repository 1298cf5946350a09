"""Noise and choice: known answers, a second implementation, ties, filters, and settings that count tokens in a tree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reference_sampler
import torch
from constructed import ConstructedDrafter, Reference, Request
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_sampler import Rule
from round_driver import Decoded, decode, with_draft
from tiny_models import tiny_config

from runtime.loader import Loaded, load
from runtime.noise import MAX_GUMBEL, derived_seed, draw_seed, gumbel_rows, philox4x32, signed_seed
from runtime.sampling import (
    GREEDY_BELOW,
    SMALL_SORT,
    RowContext,
    Sampling,
    adjust_logits,
    choice_scores,
    choose_tokens,
    ordered_top,
    token_logprobs,
)
from runtime.sequence import Speculation

VOCAB = 288
NO_DEADLINE = settings(deadline=None, derandomize=True, max_examples=100)
seeds = st.integers(0, 2**64 - 1)


@pytest.fixture(scope="module")
def loaded(tiny_folder: Path) -> Loaded:
    return load(tiny_config(tiny_folder / "target", tiny_folder / "drafter"))


def words(counter: int, key: int) -> list[int]:
    """Philox with all counter and all key words equal."""
    c, k = torch.tensor(counter), torch.tensor(key)
    return [int(word) for word in philox4x32((c, c, c, c), (k, k))]


def test_philox_gives_the_published_answers() -> None:
    assert words(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert words(ones, ones) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    counter = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert reference_sampler.philox_words(counter, (0xA4093822, 0x299F31D0)) == [
        0xD16CFE09,
        0x94FDCCEB,
        0x5001E420,
        0x24126EA1,
    ]


@NO_DEADLINE
@given(st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6))
def test_philox_equals_the_one_on_python_integers(drawn: list[int]) -> None:
    c0, c1, c2, c3, k0, k1 = map(torch.tensor, drawn)
    ours = [int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1))]
    assert ours == reference_sampler.philox_words(drawn[:4], drawn[4:])


@NO_DEADLINE
@given(seeds, st.integers(0, 2**31), st.integers(1, 70))
def test_noise_equals_the_one_in_numpy(seed: int, position: int, vocab_size: int) -> None:
    rows = gumbel_rows(
        torch.tensor([signed_seed(seed)] * 2), torch.tensor([position, position + 1]), vocab_size
    )
    for row, at in zip(rows, (position, position + 1), strict=True):
        np.testing.assert_allclose(
            row.numpy(), reference_sampler.gumbel(seed, at, vocab_size), rtol=2e-6, atol=2e-6
        )


@NO_DEADLINE
@given(seeds, st.integers(0, 5000), st.integers(0, VOCAB - 1))
def test_noise_of_a_token_is_word_v_mod_4_of_counter_v_div_4(seed: int, position: int, token: int) -> None:
    word = reference_sampler.philox_words((token // 4, position, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))[
        token % 4
    ]
    expected = -np.log(-np.log(((word >> 9) + 0.5) * 2.0**-23))
    ours = gumbel_rows(torch.tensor([signed_seed(seed)]), torch.tensor([position]), VOCAB)[0, token]
    assert float(ours) == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_noise_is_gumbel_and_finite() -> None:
    noise = gumbel_rows(torch.arange(8), torch.arange(8), 20_000).double()
    assert noise.isfinite().all() and float(noise.max()) <= MAX_GUMBEL + 1e-5
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.var()) == pytest.approx(np.pi**2 / 6, abs=0.05)


def test_choices_of_one_request_have_seeds_of_their_own() -> None:
    derived = [derived_seed(42, choice) for choice in range(4)]
    assert derived[0] == 42 and len(set(derived)) == 4
    assert derived == [derived_seed(42, choice) for choice in range(4)]
    assert len({draw_seed() for _ in range(8)}) == 8


@NO_DEADLINE
@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, float("-inf"), 1e-30]), min_size=1, max_size=12),
    st.integers(1, 12),
    st.sampled_from([0, SMALL_SORT]),
)
def test_ordered_top_breaks_ties_to_the_lowest_index(values: list[float], k: int, more: int) -> None:
    """Which of the impossible come last is left open."""
    scores = torch.tensor([values + [-2.0] * more])
    k = min(k, scores.shape[1])
    top, indices = ordered_top(scores, k)
    order = sorted(range(scores.shape[1]), key=lambda i: (-float(scores[0, i]), i))
    possible = [i for i in order[:k] if scores[0, i] > -torch.inf]
    assert indices[0, : len(possible)].tolist() == possible
    assert len(set(indices[0].tolist())) == k and torch.equal(top, scores.gather(1, indices))


def test_exact_ties_choose_the_lowest_token_in_every_path() -> None:
    logits = torch.zeros(1, 40)
    logits[0, [7, 9, 30]] = 2.0
    context, flat = RowContext(torch.zeros(1)), torch.zeros(1, 40)
    for sampling in (
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(temperature=1.0, top_k=2),
        Sampling(1.0, 0.1),
    ):
        noise = None if sampling.greedy else flat
        assert choose_tokens(logits, sampling, context, noise).tolist() == [7]
    kept = choice_scores(logits, Sampling(temperature=1.0, top_k=2), context, flat).isfinite()[0]
    assert kept.nonzero().flatten().tolist() == [7, 9]


def context_of(rule: Rule, vocab: int, prompt: list[int], outputs: list[int]) -> RowContext:
    counts = torch.bincount(torch.tensor([*prompt, *outputs]), minlength=vocab).float()
    return RowContext(torch.tensor([len(outputs)]), counts)


def sampling_of(rule: Rule) -> Sampling:
    fields = {name: getattr(rule, name) for name in Rule.__dataclass_fields__ if name != "logit_bias"}
    return Sampling(**fields, logit_bias=tuple(sorted(rule.logit_bias.items())))


rules = st.builds(
    Rule,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 20, 500]),
    top_p=st.sampled_from([1.0, 0.95, 0.8, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    seed=seeds,
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    logit_bias=st.dictionaries(st.integers(0, 99), st.sampled_from([-100.0, -1.0, 2.0]), max_size=3),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.frozensets(st.integers(0, 99), max_size=3),
)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(rules, st.integers(0, 2**32), st.integers(0, 5))
def test_the_choice_equals_the_second_implementation(rule: Rule, drawn: int, outputs: int) -> None:
    vocab, generator = 100, torch.Generator().manual_seed(drawn)
    logits = 3.0 * torch.randn(1, vocab, generator=generator)
    text = torch.randint(0, vocab, (6 + outputs,), generator=generator).tolist()
    prompt, said = text[:6], text[6:]
    sampling, context = sampling_of(rule), context_of(rule, vocab, prompt, said)
    noise = None
    if not sampling.greedy:
        noise = gumbel_rows(torch.tensor([signed_seed(rule.seed)]), torch.tensor([len(text)]), vocab)
    expected = reference_sampler.scores(logits[0].numpy(), rule, prompt, said)
    ours = choice_scores(logits, sampling, context, noise)[0].numpy()
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(expected))
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-4)
    chosen = int(choose_tokens(logits, sampling, context, noise)[0])
    assert chosen == int(np.argmax(expected))


@pytest.mark.parametrize("vocab", [64, 5000])
def test_top_p_keeps_the_smallest_set_that_reaches_it(vocab: int) -> None:
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[0.1], [1], [3], [6]]
    )
    for top_p in (0.05, 0.5, 0.9, 0.999):
        kept = choice_scores(
            logits, Sampling(1.0, top_p), RowContext(torch.zeros(4)), torch.zeros(4, vocab)
        ).isfinite()
        probs = logits.double().softmax(-1)
        for row in range(4):
            inside = probs[row][kept[row]]
            assert float(inside.sum()) >= top_p - 1e-6
            assert len(inside) == 1 or float(inside.sum() - inside.min()) < top_p + 1e-6
            assert len(inside) == vocab or float(inside.min()) >= float(probs[row][~kept[row]].max())


def test_which_tokens_pass_does_not_depend_on_the_other_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    spread = torch.tensor([[8.0], [8.0], [3.0], [0.01]])
    rows = spread * torch.randn(4, 4000, generator=generator)
    nucleus = Sampling(1.0, top_p=0.9)
    for sampling in (
        nucleus,
        Sampling(1.0, min_p=0.2),
        replace(nucleus, min_p=0.01),
        replace(nucleus, top_k=50),
    ):
        noise = torch.zeros_like(rows)
        together = choice_scores(rows, sampling, RowContext(torch.zeros(4)), noise)
        for i, row in enumerate(rows):
            alone = choice_scores(row.unsqueeze(0), sampling, RowContext(torch.zeros(1)), noise[:1])[0]
            assert torch.equal(together[i], alone)


@pytest.mark.case("A02")
def test_tiny_temperature_and_tiny_top_p_are_finite_and_greedy() -> None:
    logits = 30.0 * torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    greedy = logits.argmax(-1)
    context = RowContext(torch.zeros(5))
    noise = gumbel_rows(torch.arange(5), torch.arange(5), 300)
    assert Sampling(temperature=1e-6).greedy and not Sampling(temperature=GREEDY_BELOW).greedy
    for sampling in (
        Sampling(temperature=1e-6),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.0, top_p=1e-6),
        Sampling(temperature=1.0, min_p=1.0),
    ):
        assert choose_tokens(logits, sampling, context, noise).equal(greedy)
    assert choice_scores(logits, Sampling(temperature=GREEDY_BELOW), context, noise).isfinite().all()


@pytest.mark.case("A05")
def test_penalties_count_each_node_s_own_ancestors() -> None:
    logits = torch.zeros(3, 6)
    counts = torch.tensor([0.0, 2.0, 0.0, 0.0, 0.0, 0.0])
    path = torch.tensor([[-1, -1, -1], [-1, 3, -1], [-1, 3, 1]])
    sampling = Sampling(frequency_penalty=1.0, presence_penalty=0.5)
    adjusted = adjust_logits(logits, sampling, RowContext(torch.arange(3), counts, path))
    assert adjusted[:, 1].tolist() == [-2.5, -2.5, -3.5]
    assert adjusted[:, 3].tolist() == [0.0, -1.5, -1.5]
    assert adjusted[:, 0].tolist() == [0.0, 0.0, 0.0]


def in_both_modes(
    loaded: Loaded, tiny_reference: Reference, requests: list[Request]
) -> tuple[list[Decoded], list[Decoded], list[tuple[int, ...]]]:
    """Plain and tree results with the constructed drafter, and what the second implementation says."""
    scripts = tiny_reference.scripts(requests)
    models = with_draft(loaded.models, ConstructedDrafter(scripts))
    plain = decode(models, requests, [Speculation()] * len(requests))
    tree = decode(models, requests, [Speculation("tree", 12)] * len(requests))
    assert any(len(one.path) >= 3 for result in tree for one in result.rounds), "no round accepts two drafts"
    return plain, tree, [scripts[each.name].outputs for each in requests]


@pytest.mark.case("A05")
@pytest.mark.parametrize(
    "rule",
    [
        Rule(frequency_penalty=1.0),
        Rule(presence_penalty=2.0),
        Rule(repetition_penalty=1.5),
        Rule(temperature=0.8, seed=11, frequency_penalty=0.6, repetition_penalty=1.2, logit_bias={5: 3.0}),
    ],
    ids=["frequency", "presence", "repetition", "all sampled"],
)
def test_penalties_in_a_tree_equal_the_run_without_one(
    loaded: Loaded, tiny_reference: Reference, rule: Rule
) -> None:
    prompts = [(9, 9, 9, 4) * 4, (17, 3) * 6]
    requests = [Request(f"p{i}", prompt, 32, rule) for i, prompt in enumerate(prompts)]
    plain, tree, expected = in_both_modes(loaded, tiny_reference, requests)
    unpenalised = decode(
        loaded.models, [replace(each, rule=Rule()) for each in requests], [Speculation()] * 2
    )
    assert [each.token_ids for each in plain] == expected
    assert [each.token_ids for each in tree] == expected
    assert [each.token_ids for each in unpenalised] != expected


@pytest.mark.case("A05")
def test_min_tokens_holds_inside_an_accepted_run(loaded: Loaded, tiny_reference: Reference) -> None:
    free = tiny_reference.scripts([Request("free", (30, 31, 32), 24)])["free"].outputs
    stop = frozenset({free[2]})
    cut = Request("cut", (30, 31, 32), 24, Rule(stop_token_ids=stop))
    held = Request("held", (30, 31, 32), 24, Rule(stop_token_ids=stop, min_tokens=8))
    plain, tree, expected = in_both_modes(loaded, tiny_reference, [cut, held])
    assert plain[0].token_ids == tree[0].token_ids == free[: free.index(free[2]) + 1]
    assert tree[0].finish == "stop"
    assert plain[1].token_ids == tree[1].token_ids == expected[1][: len(tree[1].token_ids)]
    assert len(tree[1].token_ids) > 8 and not stop & set(tree[1].token_ids[:8])


@pytest.mark.case("A06")
@pytest.mark.parametrize("rule", [Rule(), Rule(temperature=1.0, seed=5, top_k=20, frequency_penalty=0.5)])
def test_every_token_has_the_logprob_of_its_own_row(
    loaded: Loaded, tiny_reference: Reference, rule: Rule
) -> None:
    request = Request("logprobs", (40, 41, 42, 43), 16, rule, logprobs=2)
    plain, tree, _ = in_both_modes(loaded, tiny_reference, [request])
    text = [*request.prompt, *tree[0].token_ids]
    table = tiny_reference.logits([text])[0].log_softmax(-1)
    assert tree[0].token_ids == plain[0].token_ids
    assert len(tree[0].logprobs) == len(plain[0].logprobs) == 16
    for i, (mine, theirs) in enumerate(zip(tree[0].logprobs, plain[0].logprobs, strict=True)):
        row = table[len(request.prompt) + i - 1]
        assert mine[0] == pytest.approx(float(row[tree[0].token_ids[i]]), abs=1e-3)
        assert mine[0] == pytest.approx(theirs[0], abs=1e-3)
        best = row.topk(2)
        assert [token for token, _ in mine[1]] == best.indices.tolist()
        assert [value for _, value in mine[1]] == pytest.approx(best.values.tolist(), abs=1e-3)


@pytest.mark.case("A06")
def test_no_logprob_is_given_behind_the_stop(loaded: Loaded, tiny_reference: Reference) -> None:
    request = Request("stopping", (40, 41, 42, 43), 16, logprobs=0)
    outputs = tiny_reference.scripts([request])["stopping"].outputs
    stopping = replace(request, rule=Rule(stop_token_ids=frozenset({outputs[9]})))
    _, tree, _ = in_both_modes(loaded, tiny_reference, [stopping])
    assert tree[0].finish == "stop"
    assert len(tree[0].logprobs) == len(tree[0].token_ids) == outputs.index(outputs[9]) + 1


def test_logprobs_of_a_row_are_natural_logarithms_and_sorted() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    ((value, likeliest),) = token_logprobs(logits, [0], 3)
    assert value == pytest.approx(float(logits.log_softmax(-1)[0, 0]))
    assert [token for token, _ in likeliest] == [1, 2, 0]
