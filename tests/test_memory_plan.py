"""The memory plan: its terms are what loading then takes, and what does not fit is refused with the numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_config, write_drafter, write_target

from runtime import changes, memory_plan
from runtime.interface import ConfigRejected
from runtime.loader import Loaded, inspect, load
from runtime.memory_plan import GIB, MemoryPlan, Term, Wanted, check_memory, held, round_buffers

CPU = torch.device("cpu")
CONTEXT = 256


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    target = write_target(tmp_path / "target", "llama", head_dim=16, tie_word_embeddings=True)
    return target, write_drafter(tmp_path / "drafter", target, head_dim=16)


def loaded_pair(pair: tuple[Path, Path], **settings: object) -> Loaded:
    return load(tiny_config(*pair, linear="plain", max_seq_len=CONTEXT, **settings))


def test_terms_are_what_loading_takes(pair: tuple[Path, Path]) -> None:
    loaded = loaded_pair(pair)
    assert loaded.memory is not None
    told = {term.name: term.bytes for term in loaded.memory.terms}
    cache, target, drafter = loaded.models.cache, loaded.models.target, loaded.models.drafter
    assert cache.drafter is not None and drafter is not None

    def taken(*things: object) -> int:
        return sum(held(things).values())

    assert told["target KV slots"] == taken(cache.target)
    assert told["drafter KV slots"] == taken(cache.drafter)
    # Beside the weights stand the rotation's frequencies and order, and the norms of a layer as one tensor.
    assert told["target weights"] <= taken(target) <= told["target weights"] + 4096
    assert told["drafter weights"] <= taken(drafter) <= told["drafter weights"] + 4096
    assert loaded.memory.words.startswith(f"{loaded.memory.total / GIB:.2f} of ")
    assert "peak" not in loaded.memory.words  # torch counts none on a CPU


def test_buffers_of_captured_rounds_are_those_they_have(pair: tuple[Path, Path]) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from runtime.gpu_round import GpuRound

    loaded = loaded_pair(pair)
    checked = inspect(tiny_config(*pair))
    assert checked.drafter_path and checked.drafter_config
    wanted = Wanted(
        checkpoint=checked.checkpoint, drafter=(checked.drafter_path, checked.drafter_config), dtype=torch.float32,
        device=CPU, slots=loaded.models.cache.slots, scratch=0, block_size=loaded.models.block_size, max_batch=3,
        positions=CONTEXT, max_nodes=16, graphs=True,
    )  # fmt: skip
    rounds = GpuRound(loaded.models, 3, CONTEXT, timed=False)
    own = sum(held((rounds,)).values()) - sum(held((loaded.models,)).values())
    assert round_buffers(wanted) == own
    assert round_buffers(replace(wanted, max_batch=8)) > own  # type: ignore[operator]


def test_what_does_not_fit_is_refused_before_a_weight_is_read(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(*pair, max_seq_len=CONTEXT)
    plan = check_memory(config, inspect(config))
    assert plan is not None
    monkeypatch.setattr(memory_plan, "free_bytes", lambda _device: plan.total - 1)
    (pair[0] / "model.safetensors").write_bytes(_header_of(pair[0] / "model.safetensors"))
    with pytest.raises(
        ConfigRejected, match=r"^memory: .*target weights.*; set kv_slots = (\d+) or less"
    ) as refused:
        load(config)
    assert refused.value.field == "kv_slots"
    monkeypatch.setattr(memory_plan, "free_bytes", lambda _device: 1000)
    with pytest.raises(ConfigRejected, match="no number of KV slots fits"):
        load(config)


def _header_of(file: Path) -> bytes:
    """The file with its header intact and every weight overwritten."""
    content = file.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    assert "__metadata__" in json.loads(content[8:size])
    return content[:size] + b"\xff" * (len(content) - size)


def test_an_8b_target_with_more_slots_than_a_gpu_of_80_gib_holds() -> None:
    free = 84_400_000_000
    per_slot = 2 * 36 * 8 * 128 * 2
    plan = MemoryPlan(
        (
            Term("target weights", 16_381_470_720),
            Term("target KV slots", per_slot * 600_064, per_slot),
            Term("reserve (assumed)", GIB),
        ),
        "cuda:0",
        free,
        600_000,
    )
    with pytest.raises(ConfigRejected) as refused:
        plan.check(100)
    text = str(refused.value)
    assert "98.66 GiB are needed and 78.60 GiB are free on cuda:0" in text
    assert "target weights 15.26, target KV slots 82.41, reserve (assumed) 1.00" in text
    assert f"set kv_slots = {plan.fitting_slots} or less (it is 600000)" in text
    assert plan.fitting_slots is not None
    spare = plan.fitting_slots - plan.slots
    fits = replace(plan, terms=tuple(replace(t, bytes=t.bytes + t.per_slot * spare) for t in plan.terms))
    fits.check(100)
    assert free - fits.total < per_slot
    replace(plan, free=None).check(100)


@pytest.mark.parametrize(("limit", "used", "prefix"), [entry[1:] for entry in changes.CGROUPS])
def test_files_that_a_container_has_read_leave_their_memory_to_who_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, used: str, prefix: str
) -> None:
    monkeypatch.setattr(changes, "CGROUPS", ((tmp_path, limit, used, prefix),))
    (tmp_path / limit).write_text("40000000\n")
    (tmp_path / used).write_text("35000000\n")
    (tmp_path / "memory.stat").write_text(
        f"anon 5000000\n{prefix}inactive_file 20000000\n{prefix}active_file 9000000\n"
    )
    assert changes.available_memory() == 34_000_000
    (tmp_path / limit).write_text("max\n")
    unlimited = changes.available_memory()
    assert unlimited is not None and unlimited > 40_000_000
