"""The round's parts on tiny models: what commit leaves behind, ragged batches, limits, and what counts as accepted."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import tiny_models
import torch
from constructed import ConstructedDrafter, Reference, Request
from reference_sampler import Rule
from round_driver import Slots, Tally, decode, with_draft
from tiny_models import prompt_of, tiny_config

from runtime.attention import Segment, Step
from runtime.loader import Loaded, load
from runtime.round import Models, ancestor_mask, commit_path, decode_round, drafter_logits
from runtime.sequence import Speculation

TREE = Speculation("tree", 12)


@pytest.fixture(scope="module")
def loaded(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """The tiny target with a drafter of long blocks."""
    where = tmp_path_factory.mktemp("round") / "drafter"
    drafter = tiny_models.write_drafter(where, tiny_folder / "target", block_size=16)
    return load(tiny_config(tiny_folder / "target", drafter))


@pytest.fixture
def slots(loaded: Loaded) -> Iterator[Slots]:
    slots = Slots(loaded.models)
    yield slots
    slots.close()


def scripted(loaded: Loaded, reference: Reference, requests: Seq[Request], block_size: int = 8) -> Models:
    return with_draft(loaded.models, ConstructedDrafter(reference.scripts(requests)), block_size)


def test_slots_and_drafter_logits_after_20_tree_rounds_are_those_of_a_fresh_prefill(
    loaded: Loaded, tiny_reference: Reference, slots: Slots
) -> None:
    requests = [Request(f"r{i}", prompt_of(12 + 5 * i, i), 130, Rule(0.7, seed=i)) for i in range(3)]
    models = scripted(loaded, tiny_reference, requests)
    sequences = [slots.begin(request) for request in requests]
    tally = Tally()
    for _ in range(20):
        tally.add(decode_round(models, sequences, [TREE] * 3).sequences)
    assert tally.sideways > 10 and tally.accept_length > 2
    for sequence in sequences:
        with torch.inference_mode():
            mine = drafter_logits(models, [sequence])
            theirs = drafter_logits(models, [slots.fresh(sequence)])
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
        slots.assert_same_state(sequence)


def test_drafter_logits_of_a_batch_are_those_of_each_sequence_alone(loaded: Loaded, slots: Slots) -> None:
    models = with_draft(loaded.models, None)
    sequences = [slots.begin(Request(f"d{n}", prompt_of(n), 8)) for n in (5, 40, 17)]
    with torch.inference_mode():
        together = drafter_logits(models, sequences)
        alone = torch.cat([drafter_logits(models, [sequence]) for sequence in sequences])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.case("A15")
def test_a_scattered_path_is_committed_as_if_fed_one_by_one(loaded: Loaded, slots: Slots) -> None:
    models = with_draft(loaded.models, None)
    sequence = slots.begin(Request("scattered", prompt_of(9), 40))
    parents = torch.tensor([[0, 0, 0, 1, 1, 2, 2]])
    depths = torch.tensor([[0, 1, 1, 2, 2, 2, 2]])
    mask = ancestor_mask(parents, int(depths.max()))[0]
    for number in range(3):
        base = sequence.committed_len
        nodes = [sequence.token_ids[-1], *prompt_of(6, 50 + number)]
        positions = base + depths[0]
        segment = Segment(sequence.extent.start, base, 7, mask, positions)
        with torch.inference_mode():
            output = models.target.forward(
                torch.tensor(nodes), positions, Step.of(models.cache.target, (segment,))
            )
            commit_path(models, sequence, [0, 2, 5], output.features)
            bonus = int(models.target.logits(output.hidden[5]).argmax())
        sequence.token_ids += [nodes[2], nodes[5], bonus]
        sequence.check()
        assert sequence.committed_len == base + 3 == len(sequence.token_ids) - 1
    slots.assert_same_state(sequence)


@pytest.mark.case("A17")
@pytest.mark.parametrize("count", [2, 4])
def test_ragged_batches_give_each_request_its_solo_text(
    loaded: Loaded, tiny_reference: Reference, count: int
) -> None:
    requests = [Request(f"c{n}", prompt_of(n), 14, chunk=256) for n in (5, 130, 131, 700)][:count]
    budgets = [Speculation("tree", nodes - 1) for nodes in (3, 9, 1, 16)][:count]
    models = scripted(loaded, tiny_reference, requests)
    solo = [decode(models, [request], [TREE])[0].token_ids for request in requests]
    together = decode(models, requests, budgets)
    assert [each.token_ids for each in together] == solo
    assert [len(each.rounds[0].nodes) for each in together] == [3, 9, 1, 16][:count]


@pytest.mark.case("A17")
def test_a_dropped_tree_means_one_plain_token_in_that_round(
    loaded: Loaded, tiny_reference: Reference, slots: Slots
) -> None:
    requests = [Request(f"c{n}", prompt_of(n, 3), 20) for n in (5, 130, 131)]
    models = scripted(loaded, tiny_reference, requests)
    solo = [decode(models, [request], [TREE])[0].token_ids for request in requests]
    sequences = [slots.begin(request) for request in requests]
    texts = [list(sequence.token_ids[-1:]) for sequence in sequences]
    for number in range(4):
        how = [TREE, Speculation() if number == 1 else TREE, TREE]
        outcome = decode_round(models, sequences, how)
        for text, one in zip(texts, outcome.sequences, strict=True):
            text += [token.token_id for token in one.tokens]
        if number == 1:
            dropped = outcome.sequences[1]
            assert len(dropped.nodes) == len(dropped.tokens) == 1 and not dropped.tokens[0].drafted
        else:
            assert len(outcome.sequences[1].nodes) == 13
    assert all(tuple(text) == whole[: len(text)] for text, whole in zip(texts, solo, strict=True))
    for sequence in sequences:
        slots.assert_same_state(sequence)


@pytest.mark.case("A25")
@pytest.mark.parametrize("mode", [Speculation("tree", 32), Speculation("chain", 15)])
def test_depth_is_clamped_to_what_may_still_be_said(
    loaded: Loaded, tiny_reference: Reference, mode: Speculation
) -> None:
    requests = [Request("near", prompt_of(30), 3), Request("neighbour", prompt_of(31), 24)]
    models = scripted(loaded, tiny_reference, requests, block_size=16)
    solo = decode(models, requests[1:], [mode])[0]
    near, neighbour = decode(models, requests, [mode, mode])
    assert near.token_ids == tiny_reference.scripts(requests[:1])["near"].outputs
    assert near.finish == "length"
    assert all(one.draft_depth <= 1 for one in near.rounds)
    assert neighbour.token_ids == solo.token_ids


def test_plain_decoding_is_a_tree_of_the_root_alone(loaded: Loaded, tiny_reference: Reference) -> None:
    request = Request("plain", prompt_of(8), 6)
    result = decode(loaded.models, [request], [Speculation("tree", 0)])[0]
    assert result.token_ids == tiny_reference.scripts([request])["plain"].outputs
    assert [len(one.nodes) for one in result.rounds] == [1] * 5


def test_a_chain_is_a_tree_of_one_path(loaded: Loaded, tiny_reference: Reference) -> None:
    request = Request("chain", prompt_of(8), 30)
    result = decode(scripted(loaded, tiny_reference, [request]), [request], [Speculation("chain", 7)])[0]
    for one in result.rounds:
        assert [node[1] for node in one.nodes] == [0, *range(len(one.nodes) - 1)]
    assert max(len(one.nodes) for one in result.rounds) == 8


def test_tokens_cut_at_a_stop_or_cap_are_not_counted(loaded: Loaded, tiny_reference: Reference) -> None:
    free = Request("free", prompt_of(8), 40)
    models = scripted(loaded, tiny_reference, [free])
    whole = decode(models, [free], [TREE])[0]
    ends = list(accumulate([len(one.tokens) for one in whole.rounds], initial=1))
    kept = next(
        whole.token_ids[: first + 2]
        for first, end in pairwise(ends)
        if end - first >= 4 and whole.token_ids.index(whole.token_ids[first + 1]) == first + 1
    )
    capped = replace(free, new_tokens=len(kept))
    stopped = replace(free, rule=Rule(stop_token_ids=frozenset({kept[-1]})))
    for request, finish in ((capped, "length"), (stopped, "stop")):
        result = decode(models, [request], [TREE])[0]
        assert (result.token_ids, result.finish) == (kept, finish)
        assert len(result.rounds[-1].path) == len(result.rounds[-1].tokens) == 2
        assert result.rounds[-1].tokens[-1].drafted == (finish == "stop")
