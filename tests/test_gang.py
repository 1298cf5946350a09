"""Layouts over two ranks on this CPU: they compute what one process computes, and decode the same tokens."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from constructed import ConstructedDrafter, Reference, Request
from engine_driver import MODES, MakeEngine, as_generate, ask, run
from reference_sampler import Rule
from safetensors.torch import load_file, save_file
from tiny_models import SLOTS, TAPS, gang_target, prompt_of, tiny_config, write_drafter, write_target
from torch import Tensor

import runtime.gang
import runtime.gang_target
from runtime.attention import Segment, Step, causal_mask
from runtime.gang import RankSpec, RoundsSpec
from runtime.gang_step import RemotePool, pack, step_of, unpack
from runtime.interface import ConfigRejected, EngineLost
from runtime.kv_cache import Extent, Geometry, KVCache, Pool
from runtime.loader import inspect
from runtime.models import open_checkpoint
from runtime.native_layouts import label, refusal
from runtime.target import TargetModel

CPU = torch.device("cpu")
FAMILIES = {"llama": ("tp2", "pp2"), "qwen3": ("tp2", "pp2"), "qwen3_moe": ("tp2", "ep2", "tp2ep2", "pp2")}
CASES = [(family, layout) for family, layouts in FAMILIES.items() for layout in layouts]
TOLERANCE = {"tp2": 1e-4, "tp2ep2": 1e-4, "ep2": 0.0, "pp2": 0.0}
"""Each token goes to two experts, so that the sum over ranks has two terms and no order."""


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny random target of each family."""
    root = tmp_path_factory.mktemp("gang")
    return {family: write_target(root / family, family) for family in FAMILIES}


@dataclass
class Passes:
    """One target with its slots, fed pass by pass."""

    target: TargetModel
    cache: KVCache

    @torch.inference_mode()
    def __call__(self, ids: Tensor, prefix: int, positions: Tensor, mask: Tensor) -> list[Tensor]:
        """Logits and features of new rows behind `prefix` tokens."""
        segment = Segment(0, prefix, len(ids), mask, positions)
        output = self.target.forward(ids, positions, Step.of(self.cache.target, [segment]))
        assert output.features is not None
        return [self.target.logits(output.hidden), output.features]


def both_passes(passes: Passes) -> list[Tensor]:
    """A prefill, a tree of eight nodes, its second path compacted, and a pass that sees the compacted rows."""
    ids = torch.tensor(prompt_of(37))
    results = passes(ids, 0, torch.arange(37), causal_mask(37, CPU))
    parents, depths = [0, 0, 0, 1, 2, 2, 5, 6], torch.tensor([0, 1, 1, 2, 2, 2, 3, 4])
    mask = torch.eye(8, dtype=torch.bool)
    for node, parent in enumerate(parents[1:], start=1):
        mask[node] |= mask[parent]
    results += passes(torch.tensor(prompt_of(8, seed=3)), 37, 37 + depths, mask)
    passes.cache.keep_path(Extent(0, SLOTS), 37, [0, 2, 5, 6])
    results += passes(torch.tensor(prompt_of(2, seed=4)), 41, torch.arange(41, 43), causal_mask(2, CPU))
    return results


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_prefill_tree_and_features_are_those_of_one_process(
    targets: dict[str, Path], family: str, layout: str
) -> None:
    one = TargetModel(open_checkpoint(str(targets[family])), taps=TAPS, fuse=False)
    expected = both_passes(Passes(one, KVCache(one.geometry, None, SLOTS, CPU)))
    target = gang_target(targets[family], layout)
    try:
        found = both_passes(Passes(target, KVCache(target.pool, None, SLOTS, CPU)))
    finally:
        target.close()
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE[layout], rtol=0.0)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_ranks_that_play_rounds_compute_what_one_process_computes(tmp_path: Path, family: str) -> None:
    """Fused layers with split weights, as `tp2` has them on GPUs; passes sent one by one."""
    pytest.importorskip("triton", reason="triton is not installed")
    folder = write_target(tmp_path / family, family, head_dim=16)
    one = TargetModel(open_checkpoint(str(folder)), taps=TAPS, fuse=False)
    expected = both_passes(Passes(one, KVCache(one.geometry, None, SLOTS, CPU)))
    rounds = RoundsSpec(None, 1, False, one.vocab_size, max_batch=1, positions=128, scratch=64, chunk=64)
    target = gang_target(folder, "tp2", rounds=rounds)
    try:
        found = both_passes(Passes(target, KVCache(target.pool, None, SLOTS, CPU)))
        assert target.gang.held[0] == target.gang.held[1] < target.gang.whole
    finally:
        target.close()
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("layout", ["ep2", "pp2"])
def test_splits_that_leave_sums_alone_are_exact_in_bfloat16(targets: dict[str, Path], layout: str) -> None:
    one = TargetModel(open_checkpoint(str(targets["qwen3_moe"])), taps=TAPS, dtype=torch.bfloat16, fuse=False)
    expected = both_passes(Passes(one, KVCache(one.geometry, None, SLOTS, CPU)))
    target = gang_target(targets["qwen3_moe"], layout, torch.bfloat16)
    try:
        found = both_passes(Passes(target, KVCache(target.pool, None, SLOTS, CPU)))
    finally:
        target.close()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.fixture(scope="session")
def scripts(targets: dict[str, Path]) -> Iterator[dict[str, tuple[list[Request], ConstructedDrafter]]]:
    """What each target says to two requests, one greedy and one sampled, and a drafter that often knows it."""
    requests = [
        Request("greedy", prompt_of(19), 24),
        Request("sampled", prompt_of(41), 24, Rule(temperature=0.7, seed=5)),
    ]
    yield {
        family: (requests, ConstructedDrafter(Reference(folder, 288).scripts(requests)))
        for family, folder in targets.items()
    }


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_every_layout_decodes_the_same_tokens_in_every_mode(
    targets: dict[str, Path],
    scripts: dict[str, tuple[list[Request], ConstructedDrafter]],
    make_engine: MakeEngine,
    tmp_path: Path,
    family: str,
    layout: str,
) -> None:
    requests, drafter = scripts[family]
    folder = write_drafter(tmp_path / "drafter", targets[family])
    engine = make_engine(drafter, target=targets[family], drafter=folder, layout=layout, max_seq_len=256)
    accepted = 0
    for mode in MODES:
        clients = [ask(engine, as_generate(each, mode=mode, reuse_prefix=False)) for each in requests]
        run(engine)
        for request, client in zip(requests, clients, strict=True):
            assert client.finished.token_ids == drafter.scripts[request.name].outputs, (mode, request.name)
            accepted += client.finished.stats.num_correct_drafts
    assert accepted > 20, "drafts are accepted, so that slots move on the ranks"


@pytest.mark.case("A28")
def test_eight_requests_then_one_then_none_keep_expert_ranks_in_step(
    targets: dict[str, Path],
    scripts: dict[str, tuple[list[Request], ConstructedDrafter]],
    make_engine: MakeEngine,
    tmp_path: Path,
) -> None:
    _, drafter = scripts["qwen3_moe"]
    folder = write_drafter(tmp_path / "drafter", targets["qwen3_moe"])
    script = drafter.scripts["greedy"]
    names = [f"r{i}" for i in range(8)]
    drafter = replace(drafter, scripts=dict.fromkeys(names, script))
    lengths = {}
    for layout in ("tp2", "ep2"):
        settings = {"layout": layout, "max_concurrency": 8, "max_seq_len": 128}
        engine = make_engine(drafter, target=targets["qwen3_moe"], drafter=folder, **settings)
        for count in (8, 1):
            requests = [Request(name, prompt_of(19), 24) for name in names[:count]]
            clients = [ask(engine, as_generate(each, reuse_prefix=False)) for each in requests]
            run(engine)
            assert all(client.finished.token_ids == script.outputs for client in clients)
            lengths[layout, count] = clients[0].finished.stats.accept_length
    assert len(set(lengths.values())) == 1


@pytest.mark.case("A26")
def test_ranks_are_told_what_was_decided_and_decide_nothing() -> None:
    ids, positions = torch.tensor([5, 6, 7, 8, 9]), torch.tensor([11, 12, 12, 40, 41])
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    segments = [
        Segment(0, 11, 3, tree, positions[:3]),
        Segment(64, 40, 2, causal_mask(2, CPU), positions[3:]),
    ]
    mine = RemotePool(CPU)
    theirs, drafters = (Pool(Geometry(2, 1, 4, torch.float32), 128, CPU) for _ in range(2))
    for pool in (mine, theirs):
        pool.copy(torch.tensor([3, 5, 9]), 3, 3)
        pool.copy(slice(64, 70), 20, 6)
    theirs.keys.random_(0, 1000)
    drafters.keys.copy_(theirs.keys)
    expected = Pool(Geometry(2, 1, 4, torch.float32), 128, CPU)
    expected.keys.copy_(theirs.keys)
    expected.copy(torch.tensor([3, 5, 9]), 3, 3)
    expected.copy(slice(64, 70), 20, 6)
    packed = unpack(pack(ids, positions, segments, mine.take_moves()), CPU)
    step = step_of(packed, [theirs, drafters])
    assert torch.equal(theirs.keys, expected.keys) and torch.equal(drafters.keys, expected.keys)
    assert step.pool is theirs
    assert mine.take_moves() == ()
    assert torch.equal(packed.token_ids, ids) and torch.equal(packed.positions, positions)
    for got, given in zip(step.segments, segments, strict=True):
        assert (got.slot_start, got.prefix_len, got.rows) == (given.slot_start, given.prefix_len, given.rows)
        assert torch.equal(got.mask, given.mask) and torch.equal(got.positions, given.positions)


@pytest.mark.case("A26")
def test_a_rank_that_rounds_otherwise_moves_no_decision(
    targets: dict[str, Path], make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = targets["llama"]
    other = shutil.copytree(family, tmp_path / "other")
    state = load_file(other / "model.safetensors")
    state["model.norm.weight"] *= (
        1.001  # of its own logits alone: what ranks exchange comes before the last norm
    )
    save_file(state, other / "model.safetensors", metadata={"format": "pt"})

    def spec(**fields: Any) -> RankSpec:
        return RankSpec(**(fields | ({"model": str(other)} if fields["rank"] == 1 else {})))

    monkeypatch.setattr(runtime.gang_target, "RankSpec", spec)
    requests = [
        Request("greedy", prompt_of(19), 24),
        Request("sampled", prompt_of(41), 24, Rule(temperature=1.0, seed=5)),
    ]
    drafter = ConstructedDrafter(Reference(family, 288).scripts(requests))
    folder = write_drafter(tmp_path / "drafter", family)
    engine = make_engine(drafter, target=family, drafter=folder, layout="tp2", max_seq_len=128)
    clients = [ask(engine, as_generate(each, mode="tree")) for each in requests]
    run(engine)
    for request, client in zip(requests, clients, strict=True):
        assert client.finished.token_ids == drafter.scripts[request.name].outputs


def test_a_rank_that_takes_no_message_is_lost_and_nobody_waits_for_ever(
    targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime.gang, "STEP_S", 1.0)
    target = gang_target(targets["llama"], "tp2")
    try:
        os.kill(target.gang.pids[1], signal.SIGSTOP)
        with pytest.raises(EngineLost, match="rank 1 hangs or is stopped"):
            target.gang.tell(bytes(16 << 20))
    finally:
        target.close()


REFUSED = [
    ({}, "ep2", None, "has none (a dense model); use tp2 or pp2"),
    ({}, "tp2ep2", None, "dense model); use tp2 or pp2"),
    ({"intermediate_size": 63}, "ep2", None, "dense model); use pp2"),
    ({"num_hidden_layers": 1, "intermediate_size": 63}, "ep2", None, "dense model); use single"),
    ({"num_hidden_layers": 1}, "pp2", None, "has 1; use tp2"),
    ({"intermediate_size": 63}, "tp2", None, "intermediate_size = 63 of a target over 2 ranks; use pp2"),
    ({"num_experts": 7, "moe_intermediate_size": 16}, "ep2", None, "7 experts"),
    (
        {"num_experts": 8, "num_key_value_heads": 3},
        "tp2ep2",
        None,
        "3 KV heads of a target over 2 ranks; use tp2 or ep2",
    ),
    ({}, "pp2", 1, "needs 2 GPUs, torch sees 1"),
]
"""What is refused, and what is offered instead: only what this target can have."""


@pytest.mark.case("A27")
@pytest.mark.parametrize(("fields", "layout", "gpus", "part"), REFUSED)
def test_what_a_target_or_a_host_cannot_have_is_refused_from_its_files(
    fields: dict[str, int], layout: str, gpus: int | None, part: str
) -> None:
    known = {
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    }
    why = refusal(layout, known | fields, "a target", gpus)
    assert why is not None and part in why and "\n" not in why


def test_a_refusal_names_the_layout_and_comes_before_any_weight_is_read(targets: dict[str, Path]) -> None:
    with pytest.raises(ConfigRejected, match="splits experts and llama has none") as refused:
        inspect(tiny_config(targets["llama"], layout="ep2"))
    assert refused.value.field == "layout"


def test_heads_that_do_not_divide_leave_the_attention_whole_and_are_named_so(tmp_path: Path) -> None:
    folder = write_target(
        tmp_path / "odd",
        hidden_size=24,
        num_attention_heads=3,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    checkpoint = open_checkpoint(str(folder))
    assert label("tp2", checkpoint.config) == "TP2 (MLP only)"
    one = TargetModel(checkpoint, taps=TAPS, fuse=False)
    expected = both_passes(Passes(one, KVCache(one.geometry, None, SLOTS, CPU)))
    target = gang_target(folder, "tp2")
    try:
        found = both_passes(Passes(target, KVCache(target.pool, None, SLOTS, CPU)))
        assert target.words.startswith("TP2 (MLP only): 2 processes, ")
    finally:
        target.close()
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0.0)
