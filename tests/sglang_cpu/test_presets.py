"""Every shipped SGLang layout, in each mode it can run, through SGLang's own parser and checks, without a GPU."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
from sglang.srt.plugins import load_plugins

from layouts.arguments import launch
from layouts.library import load_library
from layouts.presets import Preset
from layouts.shapes import ModelShape
from layouts.values import LayoutRefused

LIBRARY = load_library(Path("/nonexistent"))
PRESETS = [preset for preset in LIBRARY.presets.values() if preset.engine == "sglang"]
ANY_MODEL, ANY_EXPERTS = LIBRARY.model("qwen3-8b"), LIBRARY.model("qwen3-30b-a3b")
"""Stand for the model of a layout that takes any, or any with experts."""


def target_config(shape: ModelShape) -> dict:
    """A config.json of these dimensions, of the class that such a target has."""
    fields = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate_size or 4 * shape.hidden_size,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
    }
    if shape.latent:
        fields |= shape.latent.model_dump() | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
        }
        fields |= {"n_routed_experts": shape.experts.count, "num_experts_per_tok": shape.experts.per_token}
        return fields | {"moe_intermediate_size": shape.experts.intermediate_size, "first_k_dense_replace": 1}
    fields["head_dim"] = shape.head_dim
    if shape.experts:
        fields |= {"num_experts": shape.experts.count, "num_experts_per_tok": shape.experts.per_token}
        fields |= {"moe_intermediate_size": shape.experts.intermediate_size}
        return fields | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    family = ("Qwen3ForCausalLM", "qwen3") if shape.qk_norm else ("LlamaForCausalLM", "llama")
    return fields | {"architectures": [family[0]], "model_type": family[1]}


def drafter_config(shape: ModelShape, block: int) -> dict:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "layer_types": ["full_attention"] * 2,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": 4 * shape.hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": shape.context,
        "block_size": block,
        "num_target_layers": shape.layers,
        "dflash_config": {"target_layer_ids": [1, 2], "mask_token_id": 5},
    }


def written(folder: Path, config: dict) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_sglangs_parser_accepts_the_arguments(preset: Preset, tmp_path: Path) -> None:
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    anything = ANY_EXPERTS if preset.degrees.ep > 1 else ANY_MODEL
    shape = LIBRARY.model(preset.model) if preset.model else anything
    block = preset.speculation.block_size or (shape.drafter.block_size if shape.drafter else 8)
    if shape.drafter is None:
        preset = preset.model_copy(
            update={"speculation": preset.speculation.model_copy(update={"block_size": block})}
        )
    target = written(tmp_path / "target", target_config(shape))
    drafter = written(tmp_path / "drafter", drafter_config(shape, block))
    parsed = 0
    for mode in ("off", "chain", "tree"):
        try:
            made = launch(
                preset, shape, model=target, drafter=drafter, mode=mode, tree_budget=max(31, block - 1)
            )
        except LayoutRefused:
            assert mode != "off"  # a pipeline, which SGLang has no speculation with
            continue
        line = shlex.split(made.command)
        assert line[:3] == ["python", "-m", "sglang.launch_server"]
        extra = ["--device", "cuda", "--load-format", "dummy", "--skip-tokenizer-init"]
        # Without a GPU nothing is measured, and backends that need one to be chosen are given.
        extra += ["--mem-fraction-static", "0.8"]
        extra += [] if "--attention-backend" in line else ["--attention-backend", "triton"]
        extra += [] if "--sampling-backend" in line else ["--sampling-backend", "pytorch"]
        arguments = prepare_server_args(line[3:] + extra)
        assert (arguments.tp_size, arguments.pp_size) == (preset.degrees.tp, preset.degrees.pp)
        wanted = {"off": None, "chain": "DFLASH", "tree": "DDTREE_CONSOLE"}[mode]
        assert arguments.speculative_algorithm == wanted
        assert dataclasses.is_dataclass(arguments)
        parsed += 1
    assert parsed == (1 if preset.degrees.pp > 1 else 3)
