"""The round's parts on real tiny models: what commit leaves behind, batches, limits, decoders against each other."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from reference_sampler import Rule
from tiny_models import (
    CPU,
    ConstructedDrafter,
    Reference,
    Request,
    Slots,
    Tally,
    decode,
    tiny_config,
    with_draft,
)
from torch import Tensor

from runtime.attention import Segment, Step, attend_slots, causal_mask, full_mask, pad_segments
from runtime.drafter import Drafter, load_drafter, read_drafter_config
from runtime.fused import FusedDrafter
from runtime.kv_cache import Geometry, KVCache, Pool
from runtime.linear import KINDS, PlainLinear, choose_linear, probe
from runtime.loader import Loaded, load
from runtime.models import open_checkpoint
from runtime.round import Models, ancestor_mask, commit_path, decode_round, drafter_logits
from runtime.sequence import Speculation
from runtime.target import TargetModel

VOCAB = 288
TREE = Speculation("tree", 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("round")
    target = tiny_models.write_target(folder / "target", vocab_size=VOCAB)
    tiny_models.write_drafter(folder / "drafter", target, block_size=16, taps=(0, 1))
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return load(tiny_config(folder / "target", folder / "drafter", max_concurrency=6))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder / "target", VOCAB)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(0, VOCAB - 4, (length,), generator=generator).tolist())


@pytest.fixture
def slots(loaded: Loaded) -> Iterator[Slots]:
    slots = Slots(loaded.models)
    yield slots
    slots.close()


def scripted(loaded: Loaded, reference: Reference, requests: Seq[Request], block_size: int = 8) -> Models:
    return with_draft(loaded.models, ConstructedDrafter(reference.scripts(requests)), block_size)


def test_slots_and_drafter_logits_after_20_tree_rounds_are_those_of_a_fresh_prefill(
    loaded: Loaded, reference: Reference, slots: Slots
) -> None:
    requests = [Request(f"r{i}", prompt_of(12 + 5 * i, i), 130, Rule(0.7, seed=i)) for i in range(3)]
    models = scripted(loaded, reference, requests)
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


@pytest.mark.case("A10")
def test_features_are_the_outputs_of_the_tapped_layers_in_the_given_order(
    folder: Path, reference: Reference
) -> None:
    text = prompt_of(20)
    with torch.inference_mode():
        states = reference.model(torch.tensor([text]), output_hidden_states=True).hidden_states
    expected = torch.cat((states[1 + 1][0], states[0 + 1][0]), -1)
    for fuse in (True, False):
        target = TargetModel(open_checkpoint(str(folder / "target")), taps=(1, 0), fuse=fuse)
        output, _ = run_target(target, text)
        torch.testing.assert_close(output.features, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.case("A15")
def test_a_scattered_path_is_committed_as_if_fed_one_by_one(loaded: Loaded, slots: Slots) -> None:
    models = with_draft(loaded.models, None)
    sequence = slots.begin(Request("scattered", prompt_of(9), 40))
    parents = torch.tensor([[0, 0, 0, 1, 1, 2, 2]])
    depths = torch.tensor([[0, 1, 1, 2, 2, 2, 2]])
    mask = ancestor_mask(parents, depths)[0]
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
    loaded: Loaded, reference: Reference, count: int
) -> None:
    requests = [Request(f"c{n}", prompt_of(n), 14, chunk=256) for n in (5, 130, 131, 700)][:count]
    budgets = [Speculation("tree", nodes - 1) for nodes in (3, 9, 1, 16)][:count]
    models = scripted(loaded, reference, requests)
    solo = [decode(models, [request], [TREE])[0].token_ids for request in requests]
    together = decode(models, requests, budgets)
    assert [each.token_ids for each in together] == solo
    assert [len(each.rounds[0].nodes) for each in together] == [3, 9, 1, 16][:count]


@pytest.mark.case("A17")
def test_a_dropped_tree_means_one_plain_token_in_that_round(
    loaded: Loaded, reference: Reference, slots: Slots
) -> None:
    requests = [Request(f"c{n}", prompt_of(n, 3), 20) for n in (5, 130, 131)]
    models = scripted(loaded, reference, requests)
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
    loaded: Loaded, reference: Reference, mode: Speculation
) -> None:
    requests = [Request("near", prompt_of(30), 3), Request("neighbour", prompt_of(31), 24)]
    models = scripted(loaded, reference, requests, block_size=16)
    solo = decode(models, requests[1:], [mode])[0]
    near, neighbour = decode(models, requests, [mode, mode])
    assert near.token_ids == reference.scripts(requests[:1])["near"].outputs
    assert near.finish == "length"
    assert all(one.draft_depth <= 1 for one in near.rounds)
    assert neighbour.token_ids == solo.token_ids


def test_plain_decoding_is_a_tree_of_the_root_alone(loaded: Loaded, reference: Reference) -> None:
    request = Request("plain", prompt_of(8), 6)
    result = decode(loaded.models, [request], [Speculation("tree", 0)])[0]
    assert result.token_ids == reference.scripts([request])["plain"].outputs
    assert [len(one.nodes) for one in result.rounds] == [1] * 5


def test_a_chain_is_a_tree_of_one_path(loaded: Loaded, reference: Reference) -> None:
    request = Request("chain", prompt_of(8), 30)
    result = decode(scripted(loaded, reference, [request]), [request], [Speculation("chain", 7)])[0]
    for one in result.rounds:
        assert [node[1] for node in one.nodes] == [0, *range(len(one.nodes) - 1)]
    assert max(len(one.nodes) for one in result.rounds) == 8


def test_tokens_cut_at_a_stop_or_cap_are_not_counted(loaded: Loaded, reference: Reference) -> None:
    free = Request("free", prompt_of(8), 40)
    models = scripted(loaded, reference, [free])
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


def run_target(
    target: TargetModel, text: Seq[int], tree: tuple[Seq[int], Tensor, Tensor] | None = None
) -> tuple[object, Tensor]:
    """Prefills `text` in two chunks, then, if given, the nodes (tokens, mask, depths) of a tree; logits of all rows."""
    pool = Pool(target.geometry, 512, CPU)
    pool.keys.fill_(float("nan"))
    pool.values.fill_(float("nan"))
    outputs, logits = [], []
    with torch.inference_mode():
        for first, last in ((0, 7), (7, len(text))):
            positions = torch.arange(first, last)
            segment = Segment(3, first, last - first, causal_mask(last - first, CPU), positions)
            outputs.append(
                target.forward(torch.tensor(text[first:last]), positions, Step.of(pool, (segment,)))
            )
        if tree is not None:
            tokens, mask, depths = tree
            positions = len(text) + depths
            segment = Segment(3, len(text), len(tokens), mask, positions)
            outputs.append(target.forward(torch.tensor(tokens), positions, Step.of(pool, (segment,))))
        logits = [target.logits(output.hidden) for output in outputs]
    features = None if outputs[0].features is None else torch.cat([output.features for output in outputs])
    return replace(outputs[0], features=features), torch.cat(logits)


FAMILIES = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biased": ("llama", {"attention_bias": True}),
    "llama3 rope": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2 sliding": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": ("qwen3", {}),
    "mistral sliding": ("mistral", {"sliding_window": 9}),
    "mistral": ("mistral", {"sliding_window": None}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_both_decoders_equal_transformers_in_prefill_and_in_a_tree(tmp_path: Path, name: str) -> None:
    family, config = FAMILIES[name]
    folder = tiny_models.write_target(tmp_path / "target", family, vocab_size=VOCAB, **config)
    text, tokens = prompt_of(25), prompt_of(6, 2)
    parents, depths = torch.tensor([[0, 0, 0, 1, 3, 2]]), torch.tensor([[0, 1, 1, 2, 3, 2]])
    tree = (tokens, ancestor_mask(parents, depths)[0], depths[0])
    reference = Reference(folder, VOCAB)
    paths = ([0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4], [0, 2, 5])
    branches = [reference.logits([[*text, *(tokens[i] for i in path)]])[0, -1:] for path in paths]
    expected = torch.cat([reference.logits([text])[0], *branches])
    for fuse in (True, False):
        target = TargetModel(open_checkpoint(str(folder)), taps=(0, 2), fuse=fuse)
        assert target.fused == fuse
        torch.testing.assert_close(run_target(target, text, tree)[1], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 6])
def test_padded_attention_equals_attention_sequence_by_sequence(window: int | None) -> None:
    """Unwritten slots hold anything, so they are filled with NaN here."""
    geometry = Geometry(layers=2, kv_heads=2, head_dim=8, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    plan = [(40, 0, 5), (60, 30, 1), (100, 7, 9)]
    segments = []
    for at, prefix, rows in plan:
        mask = torch.rand(rows, rows, generator=generator).gt(0.5).tril() | torch.eye(rows, dtype=torch.bool)
        segments.append(Segment(at, prefix, rows, mask, prefix + torch.arange(rows)))
    total = sum(rows for _, _, rows in plan)
    queries = torch.randn(4, total, 8, generator=generator)
    keys, values = torch.randn(2, 2, total, 8, generator=generator)
    outputs, pools = [], []
    for padded in (False, True):
        pool = Pool(geometry, 160, CPU)
        pool.keys.fill_(float("nan"))
        pool.values.fill_(float("nan"))
        for at, prefix, _ in plan:
            written = torch.randn(2, 2, prefix, 8, generator=torch.Generator().manual_seed(at))
            pool.write(1, at, written[0], written[1])
        step = Step(pool, tuple(segments), pad_segments(segments, CPU) if padded else None)
        outputs.append(attend_slots(step, 1, queries, keys, values, 8**-0.5, window))
        pools.append(torch.stack((pool.keys, pool.values)))
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pools[1], pools[0], equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "plain"])
@pytest.mark.parametrize("shape", [(1, 48), (7, 48), (300, 48), (3, 7, 48)])
def test_a_prepacked_layer_equals_the_plain_one(kind: str, shape: tuple[int, ...]) -> None:
    reason = probe(KINDS[kind])
    if reason is not None:
        pytest.skip(f"{kind}: {reason}")
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(80, 48, generator=generator), torch.randn(80, generator=generator)
    x = torch.randn(shape, generator=generator)
    for given in (bias, None):
        torch.testing.assert_close(
            KINDS[kind](weight, given)(x), PlainLinear(weight, given)(x), atol=1e-4, rtol=1e-4
        )


def test_prepacked_models_say_what_plain_ones_say(
    folder: Path, loaded: Loaded, reference: Reference, slots: Slots
) -> None:
    factory, line = choose_linear("auto", torch.float32, CPU)
    if factory is PlainLinear:
        pytest.skip(line)
    packed = load(tiny_config(folder / "target", folder / "drafter", linear="auto"))
    request = Request("packed", prompt_of(20), 40, Rule(0.8, seed=4))
    scripts = reference.scripts([request])
    models = with_draft(packed.models, ConstructedDrafter(scripts))
    assert decode(models, [request], [TREE])[0].token_ids == scripts["packed"].outputs
    unfused = TargetModel(open_checkpoint(str(folder / "target")), linear=factory, fuse=False)
    _, mine = run_target(unfused, prompt_of(20))
    torch.testing.assert_close(mine, reference.logits([prompt_of(20)])[0], atol=1e-4, rtol=1e-4)
    drafter = FusedDrafter(plain_drafter(folder), factory)
    sequence = slots.begin(Request("drafted", prompt_of(20), 8))
    with torch.inference_mode():
        plain = drafter_logits(loaded.models, [sequence])
        prepacked = drafter_logits(replace(loaded.models, drafter=drafter), [sequence])
    torch.testing.assert_close(prepacked, plain, atol=1e-4, rtol=1e-4)


def plain_drafter(folder: Path) -> Drafter:
    return load_drafter(folder / "drafter", read_drafter_config(folder / "drafter"), torch.float32, CPU)


@pytest.mark.parametrize("attention_bias", [False, True])
def test_the_fused_drafter_equals_the_plain_module(
    folder: Path, tmp_path: Path, attention_bias: bool
) -> None:
    """Context keys and values per layer, and a block that attends to all of the context and to itself."""
    where = tiny_models.write_drafter(
        tmp_path / "drafter", folder / "target", block_size=6, attention_bias=attention_bias
    )
    plain = load_drafter(where, read_drafter_config(where), torch.float32, CPU)
    fused = FusedDrafter(plain, PlainLinear)
    generator = torch.Generator().manual_seed(0)
    features, block = torch.randn(11, 64, generator=generator), torch.randn(6, 32, generator=generator)
    before, here = torch.arange(11), torch.arange(11, 17)
    pool = Pool(Geometry(2, 2, 8, torch.float32), 40, CPU)
    with torch.inference_mode():
        context = plain.context(features, before)
        for layer, (keys, values) in enumerate(fused.context(features, before)):
            pool.write(layer, 5, keys, values)
        step = Step.of(pool, [Segment(5, 11, 6, full_mask(6, CPU), here)])
        mine = fused.forward(block, here, step)

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            seen_keys = torch.cat((context[layer][0], keys), -2).repeat_interleave(2, 0)
            seen_values = torch.cat((context[layer][1], values), -2).repeat_interleave(2, 0)
            return F.scaled_dot_product_attention(queries, seen_keys, seen_values)

        theirs = plain(block, here, attend)
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_slots_are_given_out_and_joined_without_a_gap() -> None:
    cache = KVCache(Geometry(1, 1, 2, torch.float32), None, 100, CPU)
    first, second, third = (cache.allocate(size) for size in (30, 30, 40))
    assert first and second and third and cache.allocate(1) is None
    cache.free(second)
    cache.check_integrity([first, third])
    assert cache.allocate(31) is None
    rest = cache.shrink(first, 10)
    cache.check_integrity([rest, third])
    assert cache.free_slots == 50 and cache.allocate(50) is not None
    with pytest.raises(ValueError, match="freed twice"):
        cache.free(rest)
        cache.free(rest)


def test_a_leaked_slot_is_found() -> None:
    cache = KVCache(Geometry(1, 1, 2, torch.float32), None, 100, CPU)
    held = cache.allocate(30)
    assert held is not None
    with pytest.raises(AssertionError, match="slots leak or overlap at slot 0"):
        cache.check_integrity([])
    cache.check_integrity([held])
