"""Weights, keys and values by layout: against real models' tensors, and in what must hold for any numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from layouts.fit import GIB, Fit, Load, fit, terms
from layouts.library import load_library, shape_from_config
from layouts.presets import Degrees
from layouts.shapes import Formats, ModelShape, bytes_of
from layouts.weights import (
    cache_bytes,
    drafter_counts,
    parameter_count,
    resident,
    shares_of,
    split_share,
    stage_layers,
)
from runtime.kv_cache import Geometry
from runtime.models import Checkpoint

LIBRARY = load_library(Path("/nonexistent"))
SMOL = LIBRARY.model("smollm2-135m-instruct")
KIMI = LIBRARY.model("kimi-k2.6-int4")
MOE = LIBRARY.model("qwen3-30b-a3b")
DENSE = LIBRARY.model("llama-3.1-8b")
SHAPES = tuple(LIBRARY.models.values())
DRAFTER = Path(__file__).parent.parent / "runtime" / "drafters"

degrees = st.builds(Degrees, tp=st.sampled_from((1, 2, 4, 8)), pp=st.sampled_from((1, 2, 4)))
loads = st.builds(
    Load,
    concurrency=st.integers(1, 512),
    context=st.integers(16, 8192),
    mode=st.sampled_from(("off", "chain", "tree")),
    block_size=st.integers(2, 16),
    tree_budget=st.integers(1, 128),
    graphs=st.booleans(),
)


def test_the_default_models_weights_are_counted_to_the_byte(default_checkpoint: Checkpoint) -> None:
    file = default_checkpoint.gguf
    assert file is not None
    assert (
        sum(tensor.size_bytes for tensor in file.tensors.values())
        == resident(SMOL, Degrees(), "native", 0).total
    )
    numbers = sum(torch.tensor(tensor.shape).prod().item() for tensor in file.tensors.values())
    assert parameter_count(SMOL) == numbers == 134_515_008


def test_the_shipped_drafters_weights_are_counted_to_the_byte() -> None:
    stored = 0
    for path in DRAFTER.glob("*/*.safetensors"):
        with safe_open(path, "pt") as file:
            stored += sum(file.get_slice(key).get_shape()[0] * _rest(file, key) for key in file.keys())  # noqa: SIM118
    assert SMOL.drafter is not None
    assert sum(drafter_counts(SMOL.drafter, SMOL.hidden_size)) == stored


def _rest(file: object, key: str) -> int:
    shape = file.get_slice(key).get_shape()  # type: ignore[attr-defined]
    return shape[1] if len(shape) > 1 else 1


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (
            Qwen3MoeConfig(
                vocab_size=288,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                num_experts=8,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
            ),
            Qwen3MoeForCausalLM,
        ),
        (
            DeepseekV3Config(
                vocab_size=288,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=4,
                n_routed_experts=8,
                n_shared_experts=1,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                first_k_dense_replace=1,
                kv_lora_rank=16,
                q_lora_rank=24,
                qk_nope_head_dim=16,
                qk_rope_head_dim=8,
                v_head_dim=16,
                n_group=1,
                topk_group=1,
            ),
            DeepseekV3ForCausalLM,
        ),
    ],
    ids=["qwen3-moe", "deepseek-v3"],
)
def test_weights_of_expert_and_latent_models_are_those_transformers_makes(config: object, kind: type) -> None:
    with torch.device("meta"):
        model = kind(config)
    values = {**config.to_dict(), "head_dim": config.to_dict().get("head_dim") or 16}  # type: ignore[attr-defined]
    shape = shape_from_config("tiny", values)
    assert parameter_count(shape) == sum(parameter.numel() for parameter in model.parameters())


def test_known_models_have_their_known_sizes() -> None:
    assert parameter_count(DENSE) == 8_030_261_248
    assert parameter_count(MOE) == 30_532_122_624
    assert resident(KIMI, Degrees(), "sglang", 0).total == pytest.approx(594e9, rel=0.01)


def test_keys_and_values_take_what_the_cache_takes() -> None:
    geometry = Geometry(SMOL.layers, SMOL.kv_heads, SMOL.head_dim, torch.float32)
    assert cache_bytes(SMOL, SMOL.layers, 1.0, "float32") == geometry.bytes_per_slot
    assert cache_bytes(KIMI, 61, 1.0, "bfloat16") == 61 * (512 + 64) * 2


def test_partial_tensor_parallelism_splits_the_mlp_alone() -> None:
    shares = shares_of(SMOL, Degrees(tp=2), "native")
    assert shares.partial and (shares.attention, shares.mlp, shares.cache) == (1.0, 0.5, 1.0)
    assert split_share(SMOL, Degrees(tp=2), "native") == pytest.approx(30 * 3 * 576 * 1536 / 134_515_008)
    assert not shares_of(DENSE, Degrees(tp=2), "native").partial


def test_a_pipeline_has_every_layer_once_and_the_engines_differ_in_where_the_rest_goes() -> None:
    assert [len(layers) for layers in stage_layers(61, 8, "native")] == [7] * 7 + [12]
    assert [len(layers) for layers in stage_layers(61, 8, "sglang")] == [8] * 5 + [7] * 3
    for engine in ("native", "sglang"):
        assert [i for layers in stage_layers(61, 8, engine) for i in layers] == list(range(61))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SHAPES), degrees, st.sampled_from(("native", "sglang")))
def test_ranks_together_hold_every_weight_at_least_once(shape: ModelShape, at: Degrees, engine: str) -> None:
    whole = resident(shape, Degrees(), engine, 0).total
    held = at.tp * sum(resident(shape, at, engine, stage).total for stage in range(at.pp))
    assert held >= whole * (1 - 1e-9)
    assert 0.0 <= split_share(shape, at, engine) <= 1.0


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SHAPES), degrees, st.sampled_from(("native", "sglang")), loads)
def test_more_load_never_needs_less(shape: ModelShape, at: Degrees, engine: str, load: Load) -> None:
    def total(**changes: object) -> float:
        return sum(term.bytes for term in terms(shape, at, engine, load.model_copy(update=changes), GIB))

    base = total()
    assert total(concurrency=load.concurrency + 1) >= base
    assert total(context=load.context + 64) >= base
    assert total(tree_budget=load.tree_budget + 8) >= base
    assert total(kv_format="float32") >= base >= total(mode="off")


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SHAPES), loads, st.floats(1e9, 1e12))
def test_the_largest_load_said_to_fit_fits_and_one_more_does_not(
    shape: ModelShape, load: Load, capacity: float
) -> None:
    def fitted(concurrency: int) -> Fit:
        asked = load.model_copy(update={"concurrency": concurrency})
        return fit(shape, Degrees(tp=2), "sglang", asked, capacity, "a rank", 0.0)

    largest = fitted(1).largest_concurrency
    assert largest is not None
    if largest:
        assert fitted(largest).verdict == "fits"
    if largest < 4096:
        refused = fitted(largest + 1)
        assert refused.verdict == "does not fit"
        assert f"{refused.total / GIB:.1f} GiB on a rank that has {capacity / GIB:.1f} GiB" in str(
            refused.shortage
        )


def test_every_kind_of_term_is_shown() -> None:
    load = Load(concurrency=4, mode="tree", block_size=8, tree_budget=16)
    names = [term.name for term in terms(KIMI, Degrees(tp=8), "sglang", load, GIB)]
    assert names == [
        "attention weights",
        "MLP weights",
        "expert weights",
        "embedding, head",
        "KV cache",
        "drafter weights",
        "drafter KV",
        "graphs",
        "activations",
        "reserve",
    ]
    assumed = {term.name for term in terms(KIMI, Degrees(tp=8), "sglang", load, GIB) if term.assumed}
    assert {"drafter weights", "drafter KV"} <= assumed


def test_sglangs_graph_buffers_are_those_of_the_worked_example() -> None:
    """48 requests, 61 nodes, 40960 tokens, 151936 words: 0.12 + 0.96 + 1.78 GB and the partial attention."""
    shape = LIBRARY.model("qwen3-8b")
    load = Load(concurrency=48, context=40960, mode="tree", block_size=16, tree_budget=60)
    graphs = next(t for t in terms(shape, Degrees(), "sglang", load, 0.0) if t.name == "graphs")
    partial = 48 * 61 * 32 * 8 * 128 * 4
    assert graphs.bytes - partial == pytest.approx((0.12 + 0.96 + 1.78) * 1e9, rel=0.01)


def test_quantised_weights_count_their_scales() -> None:
    assert bytes_of(32, "int4-g32") == 18 and bytes_of(32, "q4_1") == 20 and bytes_of(32, "q8_0") == 34
    plain = KIMI.model_copy(update={"formats": Formats()})
    assert resident(plain, Degrees(), "sglang", 0).experts == pytest.approx(
        16 / 4.5 * resident(KIMI, Degrees(), "sglang", 0).experts
    )
