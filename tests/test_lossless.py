"""Speculation never changes the text: random cases in all modes, mutations that are noticed, exact distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_sampler
import round_driver
import tiny_models
import torch
from constructed import ConstructedDrafter, Reference, Request, Script
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_sampler import Rule
from round_driver import Slots, Tally, decode, with_draft
from safetensors.torch import load_file, save_file
from tiny_models import tiny_config
from torch import Tensor

from runtime import round as round_module
from runtime import sequence as request_state
from runtime.kv_cache import Extent, KVCache
from runtime.loader import Loaded, load
from runtime.noise import gumbel_rows, signed_seed
from runtime.round import DraftTree, Models, decode_round, extend_drafter
from runtime.sampling import Sampling
from runtime.sequence import Speculation

VOCAB = 288
NEW_TOKENS = 20
CASES = 200


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp("lossless")
    target = tiny_models.write_target(folder / "target", vocab_size=VOCAB, num_hidden_layers=2)
    return load(tiny_config(target, tiny_models.write_drafter(folder / "drafter", target)))


@pytest.fixture(scope="module")
def reference(loaded: Loaded) -> Reference:
    return Reference(loaded.checkpoint.path, VOCAB)


@dataclass(frozen=True)
class Case:
    """Requests of one batch with a budget each, and the block size."""

    requests: tuple[Request, ...]
    budgets: tuple[int, ...]
    block_size: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    requests, budgets = [], []
    for number in range(draw(st.integers(1, 3))):
        rule = Rule(
            temperature=draw(st.sampled_from([0.0, 1.0, 0.7, 0.3, 1.5])),
            top_k=draw(st.sampled_from([0, 0, 5, 40, 1])),
            top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.5])),
            min_p=draw(st.sampled_from([0.0, 0.0, 0.05])),
            seed=draw(st.integers(0, 2**64 - 1)),
        )
        prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40))
        requests.append(Request(f"q{number}", tuple(prompt), NEW_TOKENS, rule, chunk=16))
        budgets.append(draw(st.sampled_from([16, 24, 32, 31, 11, 4, 48, 1])))
    return Case(tuple(requests), tuple(budgets), draw(st.sampled_from([8, 7, 6, 5, 4, 3, 8, 2])))


@dataclass
class Verdict:
    """Differences from the text of the second implementation, near-ties apart."""

    tokens: int = 0
    near_ties: int = 0
    divergences: list[str] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)

    def judge(self, mode: str, request: Request, script: Script, said: Sequence[int]) -> None:
        """Compares up to the first difference, which is a near-tie if its scores are closer than rounding."""
        self.tokens += len(said)
        expected = script.outputs
        if tuple(said) == expected:
            return
        at = next(i for i, pair in enumerate(zip(said, expected, strict=True)) if pair[0] != pair[1])
        row = script.logits[len(request.prompt) + at].numpy()
        scores = reference_sampler.scores(row, request.rule, request.prompt, expected[:at])
        margin = float(scores[expected[at]] - scores[said[at]])
        if margin <= 1e-3 / max(request.rule.temperature, 0.1):
            self.near_ties += 1
        else:
            self.divergences.append(f"{mode}: token {at} of {request} is {said[at]}, margin {margin:.4f}")


def compare(loaded: Loaded, reference: Reference, case: Case, verdict: Verdict) -> None:
    """Decodes a case plainly, as a chain and as a tree."""
    scripts = reference.scripts(case.requests)
    models = with_draft(loaded.models, ConstructedDrafter(scripts), case.block_size)
    chain = Speculation("chain", case.block_size - 1)
    trees = [Speculation("tree", budget) for budget in case.budgets]
    for mode, how in (("plain", [Speculation()]), ("chain", [chain]), ("tree", trees)):
        results = decode(models, case.requests, how if mode == "tree" else how * len(case.requests))
        for request, result in zip(case.requests, results, strict=True):
            verdict.judge(mode, request, scripts[request.name], result.token_ids)
            if mode == "tree":
                verdict.tally.add(result.rounds)


@pytest.mark.case("A19")
def test_tree_chain_and_plain_give_the_same_text(loaded: Loaded, reference: Reference) -> None:
    verdict = Verdict()

    @settings(
        max_examples=CASES,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(cases())
    def one(case: Case) -> None:
        compare(loaded, reference, case, verdict)
        assert not verdict.divergences, verdict.divergences[0]

    one()
    assert verdict.near_ties <= max(1, verdict.tokens // 5000)
    tally = verdict.tally
    assert tally.accept_length >= 2.5, str(tally)
    assert tally.sideways >= 0.30 * tally.rounds, str(tally)
    assert tally.empty >= 0.05 * tally.rounds, str(tally)


def fixed_cases() -> Iterator[Case]:
    """Few cases, enough to notice each mutation."""
    rng = np.random.default_rng(0)
    for number in range(4):
        requests = tuple(
            Request(
                f"m{i}",
                tuple(map(int, rng.integers(0, VOCAB - 1, 12 + i))),
                NEW_TOKENS,
                Rule(temperature=0.7 * (number % 2), seed=number),
            )
            for i in range(2)
        )
        yield Case(requests, (16, 24), 8)


def skip_compaction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "keep_path", lambda *_: None)


def swap_two_accepted_slots(patch: pytest.MonkeyPatch) -> None:
    real = KVCache.keep_path

    def keep_path(cache: KVCache, extent: Extent, committed_len: int, path: list[int]) -> None:
        swapped = [path[0], path[2], path[1], *path[3:]] if len(path) > 2 else path
        real(cache, extent, committed_len, swapped)

    patch.setattr(KVCache, "keep_path", keep_path)


def patch_tree(patch: pytest.MonkeyPatch, change: Callable[[DraftTree], DraftTree]) -> None:
    """Lets the target verify a changed tree, while acceptance still sees the true one."""
    real = round_module.verify_tree

    def verify_tree(models: Models, batch: Sequence[Any], tree: DraftTree, sizes: Sequence[int]) -> Any:
        return real(models, batch, change(tree), sizes)

    patch.setattr(round_module, "verify_tree", verify_tree)


def position_off_by_one(patch: pytest.MonkeyPatch) -> None:
    patch_tree(patch, lambda tree: replace(tree, depths=tree.depths + (tree.depths > 0)))


def drop_one_ancestor_bit(patch: pytest.MonkeyPatch) -> None:
    def change(tree: DraftTree) -> DraftTree:
        mask = tree.ancestor_mask.clone()
        for row, depths in enumerate(tree.depths.tolist()):
            if 2 in depths:
                node = depths.index(2)
                mask[row, node, tree.parents[row, node]] = False
        return replace(tree, ancestor_mask=mask)

    patch_tree(patch, change)


def differences(loaded: Loaded, reference: Reference) -> set[str]:
    """Which of text and slots differ from what they should be over the fixed cases."""
    found, verdict = set(), Verdict()
    for case in fixed_cases():
        compare(loaded, reference, case, verdict)
        models = with_draft(loaded.models, ConstructedDrafter(reference.scripts(case.requests)))
        slots = Slots(models)
        sequences = [slots.begin(request) for request in case.requests]
        for _ in range(3):
            decode_round(models, sequences, [Speculation("tree", 16)] * len(sequences))
        try:
            for sequence in sequences:
                slots.assert_same_state(sequence)
        except AssertionError:
            found.add("slots")
        slots.close()
    if any(line.startswith("tree") for line in verdict.divergences):
        found.add("text")
    assert not any(line.startswith("plain") for line in verdict.divergences)
    return found


@pytest.mark.parametrize(
    ("mutate", "expected"),
    [
        (lambda _: None, set()),
        (skip_compaction, {"text", "slots"}),
        # Attention does not see the order of slots, whoever reads them as positions does.
        (swap_two_accepted_slots, {"slots"}),
        (position_off_by_one, {"text", "slots"}),
        (drop_one_ancestor_bit, {"text", "slots"}),
    ],
    ids=["unchanged", "compaction", "swapped slots", "position", "ancestor bit"],
)
def test_a_wrong_round_is_noticed(
    loaded: Loaded,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[pytest.MonkeyPatch], None],
    expected: set[str],
) -> None:
    mutate(monkeypatch)
    assert differences(loaded, reference) == expected


@pytest.mark.case("A19")
def test_an_exact_tie_goes_to_the_lowest_token_in_every_mode(tmp_path: Path) -> None:
    """Two tokens whose rows of the head are zero have exactly their bias as logits; the later one is never said."""
    target = tiny_models.write_target(tmp_path / "target", vocab_size=VOCAB, num_hidden_layers=2)
    lowest, twin = 30, 200
    state = load_file(target / "model.safetensors")
    state["lm_head.weight"][[lowest, twin]] = 0.0
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    loaded = load(tiny_config(target, tiny_models.write_drafter(tmp_path / "drafter", target)))
    rule = Rule(logit_bias={lowest: 8.0, twin: 8.0})
    requests = [Request(f"t{i}", (i, 7, 9), 12, rule) for i in range(3)]
    scripts = Reference(target, VOCAB).scripts(requests)
    models = with_draft(loaded.models, ConstructedDrafter(scripts))
    for mode in (Speculation(), Speculation("chain", 7), Speculation("tree", 16)):
        said = [each.token_ids for each in decode(models, requests, [mode] * 3)]
        assert said == [scripts[request.name].outputs for request in requests]
        assert any(lowest in text for text in said) and not any(twin in text for text in said)


# Distribution: a target of eight tokens, whose every continuation can be listed.

SMALL = 8
PROMPT = (1, 2, 3, 1)
SEEDS = [(number * 0x9E3779B97F4A7C15) % 2**64 for number in range(20_000)]
BATCH = 250


@dataclass(frozen=True)
class Listed:
    """The small target's logits after the prompt and every text of 0 to 4 tokens: `tables[n]` is `[8 ** n, 8]`."""

    tables: tuple[Tensor, ...]

    @classmethod
    def of(cls, reference: Reference) -> Listed:
        tables = []
        for length in range(5):
            texts = [[*PROMPT, *digits(index, length)] for index in range(SMALL**length)]
            tables.append(reference.logits(texts)[:, -1])
        return cls(tuple(tables))

    def joint(self, rule: Rule) -> np.ndarray[Any, Any]:
        """Exact probabilities `[512]` of the first three tokens."""
        joint = np.ones(1)
        for table in self.tables[:3]:
            rows = []
            for logits in table.numpy():
                scaled = logits / np.float32(rule.temperature)
                weights = np.where(
                    reference_sampler.kept(scaled, rule), np.exp(scaled.astype(np.float64)), 0.0
                )
                rows.append(weights / weights.sum())
            joint = (joint[:, None] * np.stack(rows)).reshape(-1)
        return joint

    def propose(self, models: Models, batch: Sequence[request_state.Sequence]) -> Tensor:
        """`Models.propose`: the target's logits along what the seed says, disturbed."""
        extend_drafter(models, batch)
        horizon, temperature = models.draft_horizon, batch[0].sampling.temperature
        seeds = torch.tensor([signed_seed(sequence.sampling.seed) for sequence in batch])
        said = [sequence.token_ids[len(PROMPT) :] for sequence in batch]
        places = torch.tensor([number(tokens) for tokens in said])
        lengths = torch.tensor([len(tokens) for tokens in said])
        drafted = torch.empty(len(batch), horizon, SMALL)
        for depth in range(horizon):
            for length in lengths.unique().tolist():
                rows = lengths == length
                drafted[rows, depth] = self.tables[length + depth][places[rows]]
            noise = gumbel_rows(seeds, len(PROMPT) + lengths + depth, SMALL)
            places = places * SMALL + (drafted[:, depth] / temperature + noise).argmax(-1)
        disturbance = torch.Generator().manual_seed(int(seeds[0]) & 0xFFFF)
        return drafted + 1.5 * torch.randn(drafted.shape, generator=disturbance)


def digits(index: int, length: int) -> list[int]:
    """`index` in base 8, `length` digits, highest first."""
    return [index // SMALL**place % SMALL for place in reversed(range(length))]


def number(tokens: Sequence[int]) -> int:
    """The inverse of `digits`."""
    value = 0
    for token in tokens:
        value = value * SMALL + token
    return value


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Models, Listed]:
    folder = tmp_path_factory.mktemp("small")
    target = tiny_models.write_target(folder / "target", vocab_size=SMALL, num_hidden_layers=2, seed=5)
    drafter = tiny_models.write_drafter(folder / "drafter", target, block_size=4, num_hidden_layers=1)
    models = load(tiny_config(target, drafter, kv_slots=8192)).models
    listed = Listed.of(Reference(target, SMALL))
    return replace(models, propose=listed.propose), listed


def first_tokens(models: Models, rule: Rule, seeds: Sequence[int], prefix: Extent, tally: Tally) -> list[int]:
    """Numbers of the first three tokens for each seed; the prompt's last token is the root of the first round."""
    sequences = []
    for seed in seeds:
        extent = models.cache.allocate(len(PROMPT) + 8 + 12)
        assert extent is not None
        models.cache.copy_prefix(prefix, extent, len(PROMPT) - 1)
        sampling = Sampling(rule.temperature, rule.top_p, rule.top_k, rule.min_p, seed)
        sequence = request_state.Sequence("d", list(PROMPT), len(PROMPT), sampling, 8, extent)
        sequence.committed_len = sequence.drafter_len = len(PROMPT) - 1
        sequences.append(sequence)
    while active := [sequence for sequence in sequences if sequence.num_outputs < 3]:
        tally.add(decode_round(models, active, [Speculation("tree", 6)] * len(active)).sequences)
    for sequence in sequences:
        models.cache.free(sequence.extent)
    return [number(sequence.token_ids[len(PROMPT) :][:3]) for sequence in sequences]


def chi_square_p(counts: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """Probability of a fit at most this good; cells with fewer than five expected are merged."""
    assert counts[expected == 0].sum() == 0, "a text that cannot be said was said"
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 5:
        counts, expected = counts[:-1], expected[:-1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)))


@pytest.mark.parametrize(
    "rule", [Rule(1.0), Rule(1.0, top_k=3), Rule(1.0, top_p=0.8)], ids=["untouched", "top_k", "top_p"]
)
def test_the_first_three_tokens_have_the_target_s_exact_distribution(
    small: tuple[Models, Listed], rule: Rule
) -> None:
    models, listed = small
    first = round_driver.start(models, Request("prefix", PROMPT, 8))
    round_driver.run_prefill(models, first)
    tally, counts = Tally(), np.zeros(SMALL**3)
    for start in range(0, len(SEEDS), BATCH):
        said = first_tokens(models, rule, SEEDS[start : start + BATCH], first.extent, tally)
        counts += np.bincount(said, minlength=SMALL**3)
    models.cache.free(first.extent)
    models.cache.check_integrity([])
    assert tally.accept_length >= 2, str(tally)
    expected = listed.joint(rule) * len(SEEDS)
    assert (expected >= 5).sum() >= 8
    assert chi_square_p(counts, expected) > 0.001
