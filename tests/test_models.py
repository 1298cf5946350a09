"""Checkpoints: what a folder or file means, what is refused and how, and conversion that other programs load."""

import gc
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from runtime.gguf import read_gguf
from runtime.model_commands import model_app
from runtime.model_convert import ConvertError, convert
from runtime.models import (
    Checkpoint,
    CheckpointError,
    UnsupportedCheckpoint,
    open_checkpoint,
    unrewindable_layers,
)

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "eos_token_id": 2}


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_files.llama_file(**{"tokenizer.chat_template": "{{ messages[0].content }}"}))
    return path


@pytest.fixture(scope="module")
def default() -> Checkpoint:
    try:
        return open_checkpoint()
    except CheckpointError as error:
        pytest.skip(str(error))


def folder_with(tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_default_model_is_complete_and_its_own_digest(default: Checkpoint) -> None:
    state = default.load_state()
    assert sum(each.numel() for each in state.values()) == 134_515_008
    assert "lm_head.weight" not in state and default.config["tie_word_embeddings"]
    assert {each.dtype for each in state.values()} == {torch.float32}
    assert default.eos_token_ids == (2,) and default.config["rms_norm_eps"] == 1e-5
    assert default.digest() == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_default_model_speaks_in_the_reference_classes(default: Checkpoint) -> None:
    """A wrong row order of q and k, scale or tie gives noise instead of this answer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**default.config)).eval()
    missing = model.load_state_dict(default.load_state(), strict=False)
    assert missing.unexpected_keys == [] and missing.missing_keys == ["lm_head.weight"]
    model.tie_weights()
    tokenizer = default.load_tokenizer()
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    with torch.inference_mode():
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in default.eos_token_ids:
                break
    assert tokenizer.decode(ids).endswith("assistant\nThe capital of France is Paris.")


def test_gguf_rows_of_q_and_k_are_reordered_and_the_rest_kept(tiny_gguf: Path) -> None:
    state, gguf = open_checkpoint(str(tiny_gguf)).load_state(), read_gguf(tiny_gguf)
    query = gguf.load("blk.1.attn_q.weight")
    # llama.cpp stores each head's rotary pairs side by side: rows 0, 2 of a head of 4 are its first half.
    expected = query.reshape(2, 4, 8)[:, [0, 2, 1, 3]].reshape(8, 8)
    np.testing.assert_array_equal(state["model.layers.1.self_attn.q_proj.weight"].numpy(), expected)
    value = gguf.load("blk.1.attn_v.weight")
    np.testing.assert_array_equal(state["model.layers.1.self_attn.v_proj.weight"].numpy(), value)
    assert len(state) == 2 + 2 * 9


def test_an_untied_gguf_keeps_its_head(tmp_path: Path) -> None:
    path = tmp_path / "untied.gguf"
    path.write_bytes(gguf_files.llama_file(tied=False))
    checkpoint = open_checkpoint(str(path))
    assert "lm_head.weight" in checkpoint.load_state() and not checkpoint.config["tie_word_embeddings"]


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general.architecture": "qwen2"}, "architecture 'qwen2' is not supported"),
        ({"llama.expert_count": 8}, "expert layers"),
        ({"llama.rope.scaling.type": "yarn"}, "scaled RoPE"),
        ({"llama.block_count": 0}, r"llama\.block_count is 0"),
        ({"llama.embedding_length": "8"}, r"llama\.embedding_length is '8'"),
    ],
)
def test_gguf_models_that_cannot_run_are_refused(
    tmp_path: Path, metadata: dict[str, Any], words: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_files.llama_file(**metadata))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(str(path))


def test_gguf_weights_that_contradict_the_header_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for metadata, words in (
        ({"llama.feed_forward_length": 16}, r"has shape \[12, 8\], not \[16, 8\]"),
        ({"llama.block_count": 3}, r"no tensor 'blk\.2\.attn_norm\.weight'"),
        ({"llama.block_count": 1}, r"'blk\.1\.[a-z_]+\.weight' has no place"),
    ):
        path.write_bytes(gguf_files.llama_file(**metadata))
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(str(path)).load_state()


@pytest.mark.case("A08")
@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 151645}, {"eos_token_id": [151645, 151643]}, (151645, 151643)),
        ({"eos_token_id": 151643}, {"eos_token_id": 151645}, (151645, 151643)),
        ({"eos_token_id": [7, 8]}, None, (7, 8)),
        ({"eos_token_id": None}, {}, ()),
    ],
)
def test_every_end_token_of_both_configs_counts(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    folder = folder_with(tmp_path, {"architectures": ["Qwen3ForCausalLM"], **config}, generation)
    assert open_checkpoint(str(folder)).eos_token_ids == expected


def test_end_tokens_that_are_no_ids_are_refused(tmp_path: Path) -> None:
    for wrong in ("</s>", [1, -1], True):
        folder = folder_with(tmp_path, {**LLAMA, "eos_token_id": wrong})
        with pytest.raises(CheckpointError, match="eos_token_id"):
            open_checkpoint(str(folder))


def test_sharded_folders_load_as_one_without_a_tied_head(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {**LLAMA, "tie_word_embeddings": True})
    parts = (
        {"a": torch.arange(4.0), "lm_head.weight": torch.ones(2)},
        {"b": torch.ones(3, dtype=torch.bfloat16)},
    )
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name)
    index = {"weight_map": {"a": names[0], "lm_head.weight": names[0], "b": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = open_checkpoint(str(folder))
    state = checkpoint.load_state()
    assert set(state) == {"a", "b"} and state["b"].dtype == torch.bfloat16
    contents = b"".join((folder / name).read_bytes() for name in names)
    assert checkpoint.digest() == hashlib.sha256(contents).hexdigest()
    (folder / names[1]).unlink()
    with pytest.raises(CheckpointError, match="shard model-00002"):
        checkpoint.load_state()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../x.safetensors"}})
    )
    with pytest.raises(CheckpointError, match="not a .safetensors file of this folder"):
        checkpoint.load_state()


def test_loading_again_and_again_leaves_nothing_behind(tmp_path: Path) -> None:
    tensors, times = 40, 10
    folder = folder_with(tmp_path, LLAMA)
    save_file({f"w{number}": torch.ones(4) for number in range(tensors)}, folder / "model.safetensors")
    checkpoint = open_checkpoint(str(folder))

    def blocks() -> int:
        gc.collect()
        return sys.getallocatedblocks()

    checkpoint.load_state()
    before = blocks()
    for _ in range(times):
        checkpoint.load_state()
    assert blocks() - before < tensors * times


def test_weights_are_the_same_read_or_mapped_and_outlast_a_file_that_is_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_with(tmp_path, LLAMA)
    save_file({"a": torch.arange(4096.0)}, folder / "model.safetensors")
    checkpoint = open_checkpoint(str(folder))
    read = checkpoint.load_state()
    monkeypatch.setattr("runtime.models.MAPPED_FROM", 1)
    mapped = {name: value.clone() for name, value in checkpoint.load_state().items()}
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(read["a"], torch.arange(4096.0)) and torch.equal(read["a"], mapped["a"])


def test_folders_whose_weights_cannot_be_loaded_are_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, LLAMA)
    with pytest.raises(CheckpointError, match="has no weights"):
        open_checkpoint(str(folder)).load_state()
    torch.save({"a": torch.ones(1)}, folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedCheckpoint, match="only pickled weights"):
        open_checkpoint(str(folder)).load_state()
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        open_checkpoint(str(folder)).load_state()
    folder = folder_with(tmp_path, {**LLAMA, "quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(UnsupportedCheckpoint, match="quantised with 'fp8'"):
        open_checkpoint(str(folder)).load_state()


def test_references_that_name_no_model_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("x")
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = folder_with(tmp_path, LLAMA)
    (broken / "config.json").write_text("{")
    for ref, words in (
        ("no/such-model", "does not exist"),
        (str(text), "neither a .gguf file nor a folder"),
        (str(empty), r"has no config\.json"),
        (str(broken), "not valid JSON"),
    ):
        with pytest.raises(CheckpointError, match=words) as refused:
            open_checkpoint(ref)
        assert "\n" not in str(refused.value) and refused.value.exit_code == 2


@pytest.mark.case("A22")
def test_unsupported_architectures_are_named_with_what_hinders_them(tmp_path: Path) -> None:
    config = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
    with pytest.raises(UnsupportedCheckpoint, match="Qwen3NextForCausalLM") as refused:
        open_checkpoint(str(folder_with(tmp_path, config)))
    message = str(refused.value)
    assert "linear_attention layers" in message and "Qwen3MoeForCausalLM" in message
    assert refused.value.exit_code == 3


@pytest.mark.case("A22")
def test_layers_whose_state_cannot_be_rewound_are_named() -> None:
    full = {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}
    assert unrewindable_layers(full) == () == unrewindable_layers({"model_type": "llama"})
    mixed = {"model_type": "qwen3", "layer_types": ["linear_attention", "full_attention", "mamba"]}
    assert unrewindable_layers(mixed) == ("linear_attention", "mamba")
    assert unrewindable_layers({"model_type": "vl", "text_config": mixed}) == ("linear_attention", "mamba")
    assert unrewindable_layers({"model_type": "recurrent_gemma"}) == ("recurrent",)
    assert unrewindable_layers({"layers_block_type": ["mamba", "attention"]}) == ("mamba",)
    parallel = {"model_type": "falcon_h1", "layer_types": ["full_attention"]}
    assert unrewindable_layers(parallel) == ("mamba2",)


def test_converted_folder_loads_in_transformers_and_here_with_equal_parts(
    tiny_gguf: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = convert(str(tiny_gguf), tmp_path / "hf", "float32")
    source = open_checkpoint(str(tiny_gguf))
    model = AutoModelForCausalLM.from_pretrained(folder)
    for key in (
        "hidden_size",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "rms_norm_eps",
        "eos_token_id",
    ):
        assert getattr(model.config, key) == source.config[key], key
    assert model.config.rope_parameters["rope_theta"] == source.config["rope_theta"]
    for name, weight in source.load_state().items():
        assert torch.equal(model.state_dict()[name], weight), name
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.generation_config.eos_token_id == 1

    tokenizer, theirs = source.load_tokenizer(), AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "abab</s>ba"}]
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.apply_chat_template(messages) == ids == [5, 1, 3, 2]

    again = open_checkpoint(str(folder))
    assert again.eos_token_ids == source.eos_token_ids
    assert again.load_tokenizer().apply_chat_template(messages) == ids
    assert all(torch.equal(again.load_state()[name], weight) for name, weight in source.load_state().items())


def test_converted_default_tokenizer_agrees_with_transformers(default: Checkpoint, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from runtime.model_convert import write_tokenizer

    write_tokenizer(default, tmp_path)
    ours, theirs = default.load_tokenizer(), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("Year 2024, pi 3.14159", "  é 😀 漢字\n\n\tx", "<|im_end|> inside", "Don't we'll I'M"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text) and ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 12?"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.apply_chat_template(messages) == expected


def test_conversion_writes_bfloat16_and_names_its_source(tiny_gguf: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    folder = convert(str(tiny_gguf), tmp_path / "hf", progress=lambda done, total: seen.append((done, total)))
    assert {each.dtype for each in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert hashlib.sha256(tiny_gguf.read_bytes()).hexdigest() in (folder / "README.md").read_text()
    assert seen[-1] == (20, 20)


def test_conversion_never_destroys_what_it_did_not_write(tiny_gguf: Path, tmp_path: Path) -> None:
    out = convert(str(tiny_gguf), tmp_path / "hf")
    with pytest.raises(ConvertError, match="--force") as refused:
        convert(str(tiny_gguf), out)
    assert refused.value.exit_code == 3
    assert convert(str(tiny_gguf), out, "float32", force=True) == out
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ConvertError, match=r"notes\.txt"):
        convert(str(tiny_gguf), out, force=True)
    assert (out / "notes.txt").read_text() == "mine"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["hf", "tiny.gguf"]
    with pytest.raises(UnsupportedCheckpoint, match="already"):
        convert(str(out), tmp_path / "other")


def test_convert_command_answers_in_json_and_refuses_in_one_line(tiny_gguf: Path, tmp_path: Path) -> None:
    arguments = ["convert", str(tmp_path / "hf"), "--model", str(tiny_gguf), "--json"]
    done = CliRunner().invoke(model_app, arguments)
    answer = json.loads(done.stdout)
    assert done.exit_code == 0 and answer["schema"] == 1 and answer["path"] == str(tmp_path / "hf")
    again = CliRunner().invoke(model_app, arguments)
    assert again.exit_code == 3 and again.stdout == "" and "--force" in again.stderr
    assert again.stderr.count("\n") == 1


def test_listing_and_opening_models_load_no_torch(tiny_gguf: Path) -> None:
    code = (
        "import sys; from runtime.models import open_checkpoint;"
        "from runtime.model_commands import list_cached_models;"
        f"open_checkpoint({str(tiny_gguf)!r}); list_cached_models();"
        "print([each for each in ('torch', 'transformers', 'tokenizers', 'jinja2') if each in sys.modules])"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
