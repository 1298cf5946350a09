"""Models that do not fit each other are refused before they run, in one line naming both, the key and the values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import round_driver
import tiny_models
import torch
from constructed import Request
from engine_driver import MakeEngine, answer
from safetensors.torch import load_file, save_file
from tiny_models import tiny_config

from runtime.interface import ConfigRejected
from runtime.loader import load
from runtime.round import decode_round
from runtime.sequence import Speculation
from runtime.target import TargetModel

VOCAB = 288


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write_target(tmp_path_factory.mktemp("refusals") / "tiny-target", vocab_size=VOCAB)


@pytest.fixture
def drafter(tmp_path: Path, target: Path) -> Path:
    return tiny_models.write_drafter(tmp_path / "tiny-drafter", target)


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if a refusal comes only after the target took its memory."""

    def taken(*_: Any, **__: Any) -> None:
        pytest.fail("the target was loaded before the refusal")

    monkeypatch.setattr(TargetModel, "__init__", taken)


def refusal(target: Path, drafter: Path | str, **settings: Any) -> tuple[str, str | None]:
    """The one line and the field of the refusal."""
    with pytest.raises(ConfigRejected) as refused:
        load(tiny_config(target, drafter, **settings))
    line = str(refused.value)
    assert "\n" not in line and len(line) < 500
    return line, refused.value.field


def edit(folder: Path, **changes: Any) -> None:
    """Changes keys of a config.json: None removes one, a table is merged into the one there."""
    path = folder / "config.json"
    path.write_text(json.dumps(merged(json.loads(path.read_text()), changes)))


def merged(old: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    tables = {
        key: merged(old.get(key, {}), value) for key, value in changes.items() if isinstance(value, dict)
    }
    return {key: value for key, value in (old | changes | tables).items() if value is not None}


@pytest.mark.case("A10")
@pytest.mark.parametrize(
    ("changes", "key", "mine", "theirs"),
    [
        ({"dflash_config": {"target_layer_ids": [0, 3]}}, "target_layer_ids", "[0, 3]", "3 layers (0 to 2)"),
        ({"hidden_size": 64}, "hidden_size", "64", "32"),
        ({"num_target_layers": 30}, "num_target_layers", "30", "3"),
        ({"dflash_config": {"mask_token_id": 999}}, "mask_token_id", "999", "vocabulary 288"),
        ({"vocab_size": 151_936}, "vocab_size", "151936", "288"),
    ],
)
@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_drafter_of_another_target_is_refused_before_memory_is_taken(
    target: Path, drafter: Path, changes: dict[str, Any], key: str, mine: str, theirs: str
) -> None:
    edit(drafter, **changes)
    line, field = refusal(target, drafter)
    assert field == "drafter"
    assert str(drafter) in line and "tiny-target" in line
    assert f"{key} is {mine} in the drafter and {theirs} in the target" in line


@pytest.mark.case("A10")
@pytest.mark.parametrize("key", ["target_layer_ids", "mask_token_id"])
@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_missing_tap_list_is_never_guessed(target: Path, drafter: Path, key: str) -> None:
    edit(drafter, dflash_config={key: None})
    line, field = refusal(target, drafter)
    assert field == "drafter"
    assert str(drafter) in line and "tiny-target" in line and f"dflash_config.{key} is missing" in line


@pytest.mark.case("A10")
def test_taps_in_another_order_are_kept_in_the_given_one(target: Path, drafter: Path, tmp_path: Path) -> None:
    """Features of the swapped taps are the same halves the other way round."""
    swapped = tiny_models.write_drafter(tmp_path / "swapped", target, taps=(1, 0))
    features = []
    for folder in (drafter, swapped):
        models = load(tiny_config(target, folder)).models
        sequence = round_driver.start(models, Request("r", (1, 2, 3)))
        round_driver.run_prefill(models, sequence)
        decode_round(models, [sequence], [Speculation()])
        features.append(sequence.pending[0])
    assert torch.equal(features[1], features[0].roll(32, -1)) and not torch.equal(*features)


@pytest.mark.case("A11")
def test_a_head_padded_beyond_the_tokenizer_loads(tmp_path: Path) -> None:
    """Published drafters carry the padded size or the bare one."""
    target = tiny_models.write_target(tmp_path / "padded", vocab_size=VOCAB, head_rows=320)
    for vocab_size in (320, VOCAB):
        drafter = tiny_models.write_drafter(tmp_path / f"d{vocab_size}", target, vocab_size=vocab_size)
        loaded = load(tiny_config(target, drafter))
        assert loaded.limits.vocab_size == loaded.models.target.vocab_size == VOCAB
        assert loaded.no_drafter_reason is None


@pytest.mark.case("A11")
@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_drafter_with_another_tokenizer_of_the_same_size_is_refused(target: Path, drafter: Path) -> None:
    content = json.loads((target / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["q"], vocabulary["~"] = vocabulary["~"], vocabulary["q"]
    content["model"]["merges"] = []
    (drafter / "tokenizer.json").write_text(json.dumps(content))
    line, field = refusal(target, drafter)
    assert field == "drafter" and str(drafter) in line and "tiny-target" in line
    assert "its tokenizer (288 tokens) is not the target's (288 tokens)" in line


@pytest.mark.case("A11")
def test_the_target_s_own_tokenizer_beside_the_drafter_is_accepted(target: Path, drafter: Path) -> None:
    shutil.copy(target / "tokenizer.json", drafter)
    assert load(tiny_config(target, drafter)).no_drafter_reason is None


@pytest.mark.case("A11")
def test_a_drafter_with_a_vocabulary_of_its_own_is_refused(target: Path, drafter: Path) -> None:
    """An offset table from draft to target ids (`d2t`) is no part of the format; its ids may lie anywhere."""
    state = load_file(drafter / "model.safetensors")
    save_file(state | {"d2t": torch.tensor([0, 1, 999])}, drafter / "model.safetensors")
    line, field = refusal(target, drafter)
    assert field == "drafter" and str(drafter) in line and "d2t" in line


@pytest.mark.case("A12")
@pytest.mark.parametrize("block_size", [9, 16])
@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_block_longer_than_trained_is_refused(target: Path, drafter: Path, block_size: int) -> None:
    line, field = refusal(target, drafter, block_size=block_size)
    assert field == "block_size"
    assert f"{block_size} is above the 8" in line and str(drafter) in line and "use 1 to 8" in line


@pytest.mark.case("A12")
def test_a_refused_block_size_leaves_the_running_engine_serving(make_engine: MakeEngine) -> None:
    engine = make_engine()
    before = answer(engine, (1, 2, 3)).token_ids
    with pytest.raises(ConfigRejected, match="16 is above the 8"):
        load(engine.config.changed({"block_size": 16}))
    assert answer(engine, (1, 2, 3)).token_ids == before


@pytest.mark.case("A22")
def test_a_hybrid_target_is_refused_naming_its_layer_types(
    target: Path, tmp_path: Path, drafter: Path
) -> None:
    hybrid = tmp_path / "hybrid"
    shutil.copytree(target, hybrid)
    kinds = ["full_attention", "linear_attention", "conv"]
    edit(hybrid, layer_types=kinds)
    line, field = refusal(hybrid, drafter)
    assert field == "drafter" and "hybrid" in line and "conv, linear_attention" in line
    assert "drafter = 'none'" in line
    edit(hybrid, architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next")
    line, field = refusal(hybrid, "none")
    assert field == "model" and "Qwen3NextForCausalLM is not supported" in line and "linear_attention" in line


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json there"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no .safetensors file there"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 40), "cannot be read"),
        (lambda folder: edit(folder, num_hidden_layers=3), "weight layers.2"),
        (lambda folder: edit(folder, block_size=1), "leaves no draft position"),
        (lambda folder: edit(folder, rms_norm_eps=None), "lacks 'rms_norm_eps'"),
        (lambda folder: edit(folder, dflash_config={"target_layer_ids": []}), "target_layer_ids is empty"),
        (lambda folder: edit(folder, dflash_config={"target_layer_ids": 3}), "wrong type"),
        (lambda folder: edit(folder, dflash_config={"mask_token_id": -1}), "mask_token_id"),
        (lambda folder: edit(folder, layer_types=["sliding_attention"] * 2), "sliding_attention"),
        (lambda folder: edit(folder, rope_scaling={"rope_type": "yarn"}), "yarn"),
    ],
)
def test_a_damaged_drafter_folder_is_refused(target: Path, drafter: Path, break_it: Any, words: str) -> None:
    break_it(drafter)
    line, field = refusal(target, drafter)
    assert field == "drafter" and str(drafter) in line and words in line


def test_a_context_or_cache_that_cannot_be_is_refused(target: Path) -> None:
    line, field = refusal(target, "none", max_seq_len=4096)
    assert field == "max_seq_len" and "4096 is above the 1024 positions" in line
    line, field = refusal(target, "none", device="cuda:7")
    assert field == "device" and "cuda:7" in line


def test_a_gpu_that_is_not_there_is_refused(target: Path, drafter: Path, nothing_is_loaded: None) -> None:
    line, field = refusal(target, drafter, device="cuda:99")
    assert f"'cuda:99' is not there, torch sees {torch.cuda.device_count()} CUDA devices" in line
    assert field == "device"


def test_a_drafter_trained_for_other_bytes_of_the_target_is_told_and_used(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(gguf_files.llama_file())
    shape = {"hidden_size": 8, "vocab_size": 6, "num_hidden_layers": 2, "pad_token_id": 4}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    drafter = tiny_models.write_drafter(tmp_path / "drafter", tmp_path)
    edit(drafter, ddtree={"target_digest": "0123456789abcdef"})
    (note,) = load(tiny_config(file, drafter)).notes
    assert note.startswith("the drafter was trained for a target file 0123456789ab..., this one is ")


def test_a_target_with_a_missing_weight_is_refused(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(target, folder)
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    line, field = refusal(folder, "none")
    assert field == "model" and "model.layers.1.mlp.up_proj.weight is missing" in line
