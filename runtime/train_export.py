"""Writes trained drafter weights as a folder in the published DFlash format, in shards small enough to pass around."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.drafter import DrafterConfig

SHARD_BYTES = 11_500_000
"""Largest file of weights; a weight that is larger has a file of its own."""


class ExportError(ValueError):
    """A drafter that cannot be written within the limits."""


def drafter_config(
    target: Mapping[str, Any], layers: int, taps: tuple[int, ...], block: int, mask_id: int
) -> DrafterConfig:
    """A drafter of target-shaped layers."""
    hidden, heads = int(target["hidden_size"]), int(target["num_attention_heads"])
    rope = target.get("rope_parameters") or {}
    return DrafterConfig(
        hidden_size=hidden,
        intermediate_size=int(target["intermediate_size"]),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=int(target["num_key_value_heads"]),
        head_dim=int(target.get("head_dim") or hidden // heads),
        rms_norm_eps=float(target["rms_norm_eps"]),
        rope_theta=float(target.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
        attention_bias=False,
        vocab_size=int(target["vocab_size"]),
        block_size=block,
        mask_token_id=mask_id,
        target_layer_ids=taps,
        num_target_layers=int(target["num_hidden_layers"]),
    )


def spread_taps(depth: int, count: int) -> tuple[int, ...]:
    """`count` target layers evenly spaced from 1 to `depth - 3`, where the published drafters take their features."""
    if depth < 4 or count == 1:
        return tuple(range(max(0, depth - count), depth))[-count:]
    step = (depth - 4) / (count - 1)
    return tuple(dict.fromkeys(round(1 + step * index) for index in range(count)))


def published_config(
    config: DrafterConfig, target: Mapping[str, Any], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """The config.json content: what public DFlash code reads, and `extra` under the key `ddtree`."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": int(target.get("max_position_embeddings", 8192)),
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "max_window_layers": config.num_hidden_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "use_cache": True,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
        "bos_token_id": target.get("bos_token_id"),
        "eos_token_id": target.get("eos_token_id"),
        "pad_token_id": target.get("pad_token_id"),
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "ddtree": dict(extra),
    }


def export_drafter(
    folder: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any], max_bytes: int | None = None
) -> int:
    """Writes config.json and bfloat16 shards into `folder`, replacing it; returns the bytes written.

    `weights` carry the published names (`fc.weight`, `layers.0. ...`).

    Raises:
        ExportError: the files would take more than `max_bytes`.
    """
    from safetensors.torch import save_file

    half = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous()
        for name, weight in sorted(weights.items())
    }
    shards: list[dict[str, Tensor]] = [{}]
    room = SHARD_BYTES
    for name, weight in half.items():
        size = weight.numel() * weight.element_size()
        if size > room and shards[-1]:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = weight
        room -= size
    scratch = folder.with_name(folder.name + ".partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, scratch / name, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, name)
    total = sum(weight.numel() * 2 for weight in half.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (scratch / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=2) + "\n", encoding="utf-8"
    )
    (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    written = sum(file.stat().st_size for file in scratch.iterdir())
    if max_bytes is not None and written > max_bytes:
        raise ExportError(
            f"the drafter takes {written:,} bytes, more than {max_bytes:,}; use fewer layers or taps"
        )
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(scratch, folder)
    return written
