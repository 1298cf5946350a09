"""Turns a llama-architecture GGUF file into what a Hugging Face folder holds: configs and weights.

Names and the q/k row order follow llama.cpp's `convert_hf_to_gguf.py` (class LlamaModel, `permute`).
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.gguf import CheckpointError, GgufFile, UnsupportedCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LAYER_WEIGHTS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def hf_config(gguf: GgufFile) -> dict[str, Any]:
    """Return the `config.json` content of the model in `gguf`.

    Raises:
        CheckpointError: another architecture than llama, experts or a RoPE scaling that the file does not
            describe fully, or a missing or malformed key.
    """
    architecture = gguf.metadata.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedCheckpoint(
            f"{gguf.path}: GGUF architecture {architecture!r} is not supported, only 'llama' is;"
            " give the model's Hugging Face folder instead"
        )
    if gguf.metadata.get("llama.expert_count", 0):
        raise UnsupportedCheckpoint(
            f"{gguf.path}: expert layers in GGUF are not supported; give the Hugging Face folder"
        )
    if _number(gguf, "llama.block_count") > len(gguf.tensors):
        raise CheckpointError(
            f"{gguf.path}: llama.block_count is {gguf.metadata['llama.block_count']}, more than the "
            f"{len(gguf.tensors)} tensors there; the file is damaged, fetch it again"
        )
    scaling = gguf.metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in gguf.tensors:
        raise UnsupportedCheckpoint(
            f"{gguf.path}: scaled RoPE in GGUF is not supported; give the Hugging Face folder"
        )
    hidden = _number(gguf, "llama.embedding_length")
    heads = _number(gguf, "llama.attention.head_count")
    head_dim = _number(gguf, "llama.rope.dimension_count", hidden // max(heads, 1))
    if heads < 1 or head_dim < 2 or head_dim % 2:
        raise CheckpointError(
            f"{gguf.path}: {heads} heads of dimension {head_dim} are impossible; the file is damaged"
        )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": _number(gguf, "llama.feed_forward_length"),
        "num_hidden_layers": _number(gguf, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _number(gguf, "llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rms_norm_eps": _shortest(_number(gguf, "llama.attention.layer_norm_rms_epsilon", kind=float)),
        "rope_theta": _shortest(_number(gguf, "llama.rope.freq_base", 10000.0, kind=float)),
        "rope_scaling": None,
        "max_position_embeddings": _number(gguf, "llama.context_length"),
        "initializer_range": 0.02,
        "vocab_size": _vocab_size(gguf),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "use_cache": True,
    }
    return config | _special_ids(gguf)


def hf_generation_config(gguf: GgufFile) -> dict[str, Any]:
    """Return the `generation_config.json` content: special ids, with end-of-turn ids counted as ends."""
    ids = _special_ids(gguf)
    ends = [ids.get("eos_token_id")] + [
        gguf.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom")
    ]
    unique = list(dict.fromkeys(each for each in ends if isinstance(each, int)))
    if unique:
        ids["eos_token_id"] = unique if len(unique) > 1 else unique[0]
    return ids


def hf_weights(
    gguf: GgufFile, config: dict[str, Any], wanted: Callable[[str], bool] = lambda _name: True
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield `(Hugging Face parameter name, float32 array)` for each `wanted` tensor; a tied head is not yielded.

    Raises:
        CheckpointError: a tensor is missing, unknown, or has another shape than `config` says.
    """
    names = _parameter_names(config["num_hidden_layers"])
    unknown = sorted(set(gguf.tensors) - set(names))
    if unknown:
        raise UnsupportedCheckpoint(
            f"{gguf.path}: tensor {unknown[0]!r} has no place in LlamaForCausalLM;"
            " give the model's Hugging Face folder instead"
        )
    tied = config["tie_word_embeddings"]
    for source, target in names.items():
        if (source == "output.weight" and tied) or not wanted(target):
            continue
        array = gguf.load(source)
        expected = _expected_shape(target, config)
        if array.shape != expected:
            raise CheckpointError(
                f"{gguf.path}: tensor {source!r} has shape {list(array.shape)}, not {list(expected)} as its"
                " header says; the file is damaged, fetch it again"
            )
        if target.endswith("q_proj.weight"):
            array = _undo_permutation(array, config["num_attention_heads"])
        elif target.endswith("k_proj.weight"):
            array = _undo_permutation(array, config["num_key_value_heads"])
        yield target, array


def _parameter_names(layers: int) -> dict[str, str]:
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    for layer in range(layers):
        for source, target in _LAYER_WEIGHTS.items():
            names[f"blk.{layer}.{source}"] = f"model.layers.{layer}.{target}"
    return names


def _expected_shape(name: str, config: dict[str, Any]) -> tuple[int, ...]:
    hidden, mlp, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    part = name.split(".")[-2]
    return {
        "embed_tokens": (config["vocab_size"], hidden),
        "lm_head": (config["vocab_size"], hidden),
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (mlp, hidden),
        "up_proj": (mlp, hidden),
        "down_proj": (hidden, mlp),
    }.get(part, (hidden,))


def _undo_permutation(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows from llama.cpp's interleaved RoPE pairs to the half-split order of Hugging Face models.

    `weight`: `[heads * head_dim, hidden]`, result likewise.
    """
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _vocab_size(gguf: GgufFile) -> int:
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(
            f"{gguf.path}: has no tensor 'token_embd.weight'; the file is incomplete, fetch it again"
        )
    return embedding.shape[0]


def _special_ids(gguf: GgufFile) -> dict[str, Any]:
    ids: dict[str, Any] = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        value = gguf.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(value, int):
            ids[f"{ours}_token_id"] = value
    return ids


def _number(gguf: GgufFile, key: str, default: Any = None, kind: type[float] = int) -> Any:
    value: Any = gguf.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < inf:
        found = "is missing" if value is None else f"is {value!r}"
        raise CheckpointError(
            f"{gguf.path}: {key} {found}, a positive {kind.__name__} is needed; fetch the file again"
        )
    return value


def _shortest(value: float) -> float:
    """Undo the float32 storage of a decimal: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))
