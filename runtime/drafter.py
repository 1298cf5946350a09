"""The DFlash block-diffusion drafter, in the published checkpoint format.

One pass drafts a whole block `[root, mask, mask, ...]`: position p of the block predicts the token that stands at p.
Each layer takes its keys and values from two places: from target features of the committed tokens (hidden states of
the tapped target layers, concatenated, projected by `fc`, normalised by `hidden_norm`) and from the block itself,
which attends to both without a causal mask. Embedding and head are the target's.

Source: the published DFlash checkpoints (config.json keys `block_size`, `dflash_config.target_layer_ids`,
`dflash_config.mask_token_id`, `num_target_layers`; weights `fc`, `hidden_norm`, `layers.*`, `norm`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.kv_cache import Geometry
from runtime.models import LARGEST, weights_backend

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [..., heads, rows, dim], keys, values [..., kv_heads, rows, dim]) -> [..., heads, rows, dim]."""


class DrafterMismatch(ValueError):
    """A drafter that does not fit its target or its format; the text names both, the key and the values."""


@dataclass(frozen=True)
class DrafterConfig:
    """What a drafter's config.json says."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    attention_bias: bool
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int

    @property
    def draft_horizon(self) -> int:
        """Deepest drafted position: `block_size - 1`."""
        return self.block_size - 1

    def geometry(self, dtype: torch.dtype) -> Geometry:
        """Shape of the drafter's KV slots, of the target's committed tokens."""
        return Geometry(self.num_hidden_layers, self.num_key_value_heads, self.head_dim, dtype)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str) -> DrafterConfig:
        """Parses a config.json; raises DrafterMismatch naming `where`, the key and what is wrong with it."""
        dflash = config.get("dflash_config") or {}
        if not isinstance(dflash, Mapping):
            raise DrafterMismatch(
                f"drafter {where}: dflash_config is not a table; this is no DFlash checkpoint"
            )
        for key in ("target_layer_ids", "mask_token_id"):
            if dflash.get(key) is None:
                raise DrafterMismatch(
                    f"drafter {where}: dflash_config.{key} is missing; it cannot be guessed without losing acceptance, "
                    "so take it from the checkpoint's training configuration"
                )
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(rope, Mapping) or not isinstance(config.get("layer_types") or [], list):
            raise DrafterMismatch(
                f"drafter {where}: config.json has a value of the wrong type: rope_scaling is a table and layer_types "
                "a list"
            )
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise DrafterMismatch(
                f"drafter {where}: rope_type {rope_type!r} is not supported, only 'default' is"
            )
        sliding = [t for t in config.get("layer_types") or [] if t != "full_attention"]
        if sliding:
            raise DrafterMismatch(
                f"drafter {where}: layer type {sliding[0]!r} is not supported, only full_attention is"
            )
        try:
            heads, width = _count(config, "num_attention_heads"), _count(config, "hidden_size")
            parsed = cls(
                hidden_size=width,
                intermediate_size=_count(config, "intermediate_size"),
                num_hidden_layers=_count(config, "num_hidden_layers"),
                num_attention_heads=heads,
                num_key_value_heads=_count(config, "num_key_value_heads"),
                head_dim=_count(config, "head_dim") if config.get("head_dim") else width // heads,
                rms_norm_eps=float(config["rms_norm_eps"]),
                rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
                attention_bias=bool(config.get("attention_bias", False)),
                vocab_size=_count(config, "vocab_size"),
                block_size=_count(config, "block_size"),
                mask_token_id=_whole(dflash["mask_token_id"]),
                target_layer_ids=tuple(_whole(each) for each in dflash["target_layer_ids"]),
                num_target_layers=_count(config, "num_target_layers"),
            )
        except KeyError as missing:
            raise DrafterMismatch(f"drafter {where}: config.json lacks {missing}") from None
        except (OverflowError, TypeError, ValueError) as bad:
            raise DrafterMismatch(
                f"drafter {where}: config.json has a value of the wrong type: {bad}"
            ) from None
        if not (0.0 < parsed.rms_norm_eps < 1.0 and 1.0 <= parsed.rope_theta < math.inf):
            raise DrafterMismatch(
                f"drafter {where}: rms_norm_eps {parsed.rms_norm_eps} with rope_theta {parsed.rope_theta} cannot be"
            )
        if parsed.block_size < 2:
            raise DrafterMismatch(
                f"drafter {where}: block_size {parsed.block_size} leaves no draft position; need >= 2"
            )
        if not parsed.target_layer_ids:
            raise DrafterMismatch(f"drafter {where}: dflash_config.target_layer_ids is empty")
        return parsed

    def check_target(self, target: Mapping[str, Any], drafter_name: str, target_name: str) -> None:
        """Raises DrafterMismatch unless a target with config.json `target` can feed this drafter."""

        def refuse(key: str, mine: object, theirs: object) -> None:
            raise DrafterMismatch(
                f"drafter {drafter_name} does not fit target {target_name}: {key} is {mine} in the drafter and "
                f"{theirs} in the target; choose the drafter trained for this target"
            )

        depth = int(target["num_hidden_layers"])
        deepest = max(self.target_layer_ids)
        if deepest >= depth or min(self.target_layer_ids) < 0:
            refuse("target_layer_ids", list(self.target_layer_ids), f"{depth} layers (0 to {depth - 1})")
        if self.num_target_layers != depth:
            refuse("num_target_layers", self.num_target_layers, depth)
        if self.hidden_size != int(target["hidden_size"]):
            refuse("hidden_size", self.hidden_size, target["hidden_size"])
        if not 0 <= self.mask_token_id < int(target["vocab_size"]):
            refuse("mask_token_id", self.mask_token_id, f"vocabulary {target['vocab_size']}")


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r:.60} is no whole number")
    return value


def _count(config: Mapping[str, Any], key: str) -> int:
    """A size: at least 1, and small enough that nothing is built in vain before the weights are looked at."""
    value = _whole(config[key])
    if not 1 <= value <= LARGEST:
        raise ValueError(f"{key} = {value!r:.60} is not in 1 to {LARGEST}")
    return value


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Rotary cosines and sines `[..., 1, rows, head_dim]` at `positions [..., rows]` (RoFormer, eq. 34)."""
    inverse = theta ** (
        -torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    )
    angles = positions.float().unsqueeze(-1) * inverse
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(-3)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Applies rotary embedding to `x [..., heads, rows, head_dim]`, computed in float32."""
    cos, sin = tables
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


class DrafterAttention(nn.Module):
    """Projections of one layer; what attends to what is the caller's `attend`."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, width, bias=bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def keys_values(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys (normalised, rotated) and values `[..., kv_heads, rows, head_dim]` of `x [..., rows, hidden]`."""
        keys = self.k_norm(self._heads(self.k_proj(x))).transpose(-3, -2)
        return rotate(keys, tables), self._heads(self.v_proj(x)).transpose(-3, -2)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor], layer: int, attend: Attend) -> Tensor:
        queries = rotate(self.q_norm(self._heads(self.q_proj(x))).transpose(-3, -2), tables)
        keys, values = self.keys_values(x, tables)
        return self.o_proj(attend(layer, queries, keys, values).transpose(-3, -2).flatten(-2))


class DrafterMLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = DrafterAttention(config)
        self.mlp = DrafterMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor], layer: int, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), tables, layer, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The drafter's own weights; parameter names are those of the published format."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def _tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rope_tables(positions, self.config.head_dim, self.config.rope_theta)

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values `[..., kv_heads, rows, head_dim]` per layer for committed tokens.

        `features [..., rows, taps * hidden]` are the target's tapped hidden states, `positions [..., rows]` where the
        tokens stand.
        """
        context = self.hidden_norm(self.fc(features))
        tables = self._tables(positions)
        return [layer.self_attn.keys_values(context, tables) for layer in self.layers]

    def forward(self, embeddings: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden states `[..., rows, hidden]` of block rows `embeddings [..., rows, hidden]`."""
        tables = self._tables(positions)
        hidden = embeddings
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, tables, index, attend)
        return self.norm(hidden)


def read_drafter_config(folder: Path) -> DrafterConfig:
    """Reads `folder/config.json`; raises DrafterMismatch if it is missing or no DFlash configuration."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise DrafterMismatch(f"drafter {folder}: config.json holds no JSON object")
        return DrafterConfig.from_dict(content, str(folder))
    except FileNotFoundError:
        raise DrafterMismatch(
            f"drafter {folder}: no config.json there; give a folder in the DFlash format"
        ) from None
    except OSError as error:
        raise DrafterMismatch(f"drafter {folder}: config.json cannot be read ({error.strerror})") from None
    except DrafterMismatch:
        raise
    except (ValueError, RecursionError) as bad:
        raise DrafterMismatch(f"drafter {folder}: config.json is not valid JSON ({bad})") from None


def load_drafter(folder: Path, config: DrafterConfig, dtype: torch.dtype, device: torch.device) -> Drafter:
    """Loads every `*.safetensors` shard in `folder`; raises DrafterMismatch on missing, extra or misshapen weights."""
    from safetensors.torch import load_file

    state: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        try:
            state.update(load_file(shard, backend=weights_backend(shard)))
        except Exception as bad:  # safetensors raises its own untyped error for a corrupt header
            raise DrafterMismatch(f"drafter {folder}: {shard.name} cannot be read ({bad})") from None
    if not state:
        raise DrafterMismatch(f"drafter {folder}: no .safetensors file there")
    if config.num_hidden_layers > len(state):
        raise DrafterMismatch(
            f"drafter {folder}: num_hidden_layers is {config.num_hidden_layers} in config.json, more than the "
            f"{len(state)} weights there"
        )
    with torch.device("meta"):
        drafter = Drafter(config)
    expected = {name: tuple(value.shape) for name, value in drafter.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in state.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise DrafterMismatch(
                f"drafter {folder}: weight {name} is {found.get(name, 'missing')}, config.json makes it "
                f"{expected.get(name, 'unknown')}"
            )
    drafter.load_state_dict({name: value.to(device, dtype) for name, value in state.items()}, assign=True)
    return drafter.eval().requires_grad_(False)
