"""Fused decoder layers for dense Llama-type models on one rank: the plain modules' result with a third of the calls.

Query, key and value projections are one product, gate and up another. Rotary embedding is one complex multiplication:
the rows of the query and key weights are interleaved at load so that a rotation's two numbers stand side by side,
which leaves every query-key product as it was. The target and the drafter run through the same stack; tests hold them
against the transformers classes and against `drafter.Drafter`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.attention import Step, attend_slots
from runtime.drafter import Drafter, DrafterConfig
from runtime.linear import Linear, LinearFactory

FUSED_ARCHITECTURES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})


def fusable(architecture: str, config: Any) -> bool:
    """True if this module computes what transformers' class does for `config` (a transformers configuration)."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        architecture in FUSED_ARCHITECTURES
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in _ROPE_TYPES
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and not getattr(config, "mlp_bias", False)
    )


def head_dim_of(config: Any) -> int:
    """Size of a head of a target (a transformers configuration)."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def windows_of(config: Any) -> tuple[int | None, ...]:
    """The sliding window of each layer of a target, None = full attention."""
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * int(config.num_hidden_layers)
    window = getattr(config, "sliding_window", None)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


@dataclass(frozen=True)
class StackShape:
    """Dimensions of a stack; `windows` has the sliding window of each layer, None = full attention.

    `frequencies [head_dim / 2]` are the rotary embedding's inverse frequencies, `rope_scale` its attention scaling.
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    windows: tuple[int | None, ...]
    frequencies: Tensor
    rope_scale: float = 1.0


@dataclass(frozen=True)
class FusedLayer:
    """One layer's weights; norms are `[hidden]`, that of queries and keys `[heads + kv_heads, head_dim]`."""

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    input_norm: Tensor
    post_norm: Tensor
    qk_norm: Tensor | None
    window: int | None


class FusedStack:
    """Decoder layers from a state dict with names `{prefix}{index}.…`, whose entries are taken out to save memory."""

    def __init__(
        self, state: dict[str, Tensor], prefix: str, shape: StackShape, factory: LinearFactory
    ) -> None:
        self.shape = shape
        self.interleave = torch.arange(shape.head_dim).view(2, -1).t().flatten().to(shape.frequencies.device)
        self.layers = [self._layer(state, f"{prefix}{i}.", i, factory) for i in range(len(shape.windows))]

    def rotation(self, positions: Tensor) -> Tensor:
        """Complex rotation factors `[rows, 1, head_dim / 2]` at `positions [rows]` (RoFormer, eq. 34)."""
        angles = positions.float().unsqueeze(1) * self.shape.frequencies
        return torch.polar(torch.full_like(angles, self.shape.rope_scale), angles).unsqueeze(1)

    def run(
        self, hidden: Tensor, positions: Tensor, step: Step, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """All layers over `hidden [rows, hidden_size]`; also the outputs of the layers in `taps`."""
        rotation = self.rotation(positions)
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            hidden = hidden + self._attention(
                layer, index, self.rms(hidden, layer.input_norm), rotation, step
            )
            gate, up = layer.gate_up(self.rms(hidden, layer.post_norm)).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate) * up)
            if index in taps:
                tapped[index] = hidden
        return hidden, tapped

    def rms(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension."""
        return F.rms_norm(x, weight.shape, weight, self.shape.eps)

    def rotate(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Rotates interleaved heads `[rows, heads, head_dim]`, computed in float32."""
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)

    def interleaved(self, weight: Tensor) -> Tensor:
        """Interleaves each head's rows of a query or key weight (or bias): (i, i + dim / 2) become neighbours."""
        return weight.unflatten(0, (-1, self.shape.head_dim))[:, self.interleave].flatten(0, 1)

    def _attention(self, layer: FusedLayer, index: int, x: Tensor, rotation: Tensor, step: Step) -> Tensor:
        rows, heads = x.shape[0], self.shape.heads
        turned = heads + self.shape.kv_heads
        qkv = layer.qkv(x).view(rows, -1, self.shape.head_dim)
        pairs = qkv[:, :turned]
        if layer.qk_norm is not None:
            pairs = F.rms_norm(pairs, pairs.shape[-1:], None, self.shape.eps) * layer.qk_norm
        rotated = self.rotate(pairs, rotation).transpose(0, 1)
        values = qkv[:, turned:].transpose(0, 1)
        scale = self.shape.head_dim**-0.5
        out = attend_slots(step, index, rotated[:heads], rotated[heads:], values, scale, layer.window)
        return layer.o(out.transpose(0, 1).reshape(rows, -1))

    def _layer(self, state: dict[str, Tensor], prefix: str, index: int, factory: LinearFactory) -> FusedLayer:
        def take(name: str) -> Tensor | None:
            return state.pop(prefix + name, None)

        def need(name: str) -> Tensor:
            return state.pop(prefix + name)

        def projection(name: str) -> tuple[Tensor, Tensor | None]:
            return need(f"self_attn.{name}_proj.weight"), take(f"self_attn.{name}_proj.bias")

        (q, q_bias), (k, k_bias), (v, v_bias) = projection("q"), projection("k"), projection("v")
        bias = None
        if q_bias is not None and k_bias is not None and v_bias is not None:
            bias = torch.cat((self.interleaved(q_bias), self.interleaved(k_bias), v_bias))
        q_norm, k_norm = take("self_attn.q_norm.weight"), take("self_attn.k_norm.weight")
        qk_norm = None
        if q_norm is not None and k_norm is not None:
            norms = [q_norm] * self.shape.heads + [k_norm] * self.shape.kv_heads
            qk_norm = torch.stack(norms)[:, self.interleave]
        return FusedLayer(
            qkv=factory(torch.cat((self.interleaved(q), self.interleaved(k), v)), bias),
            o=factory(*projection("o")),
            gate_up=factory(torch.cat((need("mlp.gate_proj.weight"), need("mlp.up_proj.weight")))),
            down=factory(need("mlp.down_proj.weight")),
            input_norm=need("input_layernorm.weight"),
            post_norm=need("post_attention_layernorm.weight"),
            qk_norm=qk_norm,
            window=self.shape.windows[index],
        )


class FusedDecoder:
    """The decoder of a dense target, from a state dict of Hugging Face names (taken apart)."""

    def __init__(
        self,
        state: dict[str, Tensor],
        config: Any,
        rotary: tuple[Tensor, float],
        factory: LinearFactory,
        taps: tuple[int, ...],
    ) -> None:
        shape = StackShape(
            heads=int(config.num_attention_heads),
            kv_heads=int(config.num_key_value_heads),
            head_dim=head_dim_of(config),
            eps=float(config.rms_norm_eps),
            windows=windows_of(config),
            frequencies=rotary[0],
            rope_scale=rotary[1],
        )
        self.taps = taps
        self.stack = FusedStack(state, "model.layers.", shape, factory)
        self.norm = state["model.norm.weight"]
        self.embedding = state["model.embed_tokens.weight"]
        self.head = factory(state.get("lm_head.weight", self.embedding))

    def forward(self, token_ids: Tensor, positions: Tensor, step: Step) -> tuple[Tensor, Tensor | None]:
        """Hidden states after the final norm `[rows, hidden]` and tapped features `[rows, taps * hidden]`."""
        embedded = F.embedding(token_ids, self.embedding)
        hidden, tapped = self.stack.run(embedded, positions, step, self.taps)
        features = torch.cat([tapped[tap] for tap in self.taps], dim=-1) if self.taps else None
        return self.stack.rms(hidden, self.norm), features


class FusedDrafter:
    """A drafter for decoding, from the plain module; rows of several sequences run as one ragged batch."""

    def __init__(self, drafter: Drafter, factory: LinearFactory) -> None:
        config: DrafterConfig = drafter.config
        state = dict(drafter.state_dict())
        self.config = config
        device = state["norm.weight"].device
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
        shape = StackShape(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            windows=(None,) * config.num_hidden_layers,
            frequencies=config.rope_theta**-exponents,
        )
        names = [f"layers.{i}.self_attn" for i in range(config.num_hidden_layers)]
        kept = {
            f"{name}.{part}": state[f"{name}.{part}"] for name in names for part in _context_parts(config)
        }
        self.stack = FusedStack(state, "layers.", shape, factory)
        self.fc = factory(state["fc.weight"])
        self.hidden_norm, self.norm = state["hidden_norm.weight"], state["norm.weight"]
        inner = self.stack.interleaved
        weights = [(inner(kept[f"{n}.k_proj.weight"]), kept[f"{n}.v_proj.weight"]) for n in names]
        bias = None
        if config.attention_bias:
            pairs = [(inner(kept[f"{n}.k_proj.bias"]), kept[f"{n}.v_proj.bias"]) for n in names]
            bias = torch.cat([part for pair in pairs for part in pair])
        self.context_linear = factory(torch.cat([part for pair in weights for part in pair]), bias)
        self.k_norms = torch.stack([kept[f"{n}.k_norm.weight"][self.stack.interleave] for n in names])

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values `[kv_heads, rows, head_dim]` per layer for committed tokens.

        `features [rows, taps * hidden]` are the target's tapped hidden states, `positions [rows]` where they stand.
        """
        shape = self.stack.shape
        rows, layers = features.shape[0], len(shape.windows)
        context = self.stack.rms(self.fc(features), self.hidden_norm)
        both = self.context_linear(context).view(rows, layers, 2, shape.kv_heads, shape.head_dim)
        normed = F.rms_norm(both[:, :, 0], (shape.head_dim,), None, shape.eps) * self.k_norms.unsqueeze(1)
        keys = self.stack.rotate(normed.flatten(1, 2), self.stack.rotation(positions))
        keys = keys.view(rows, layers, shape.kv_heads, shape.head_dim)
        return [(keys[:, i].transpose(0, 1), both[:, i, 1].transpose(0, 1)) for i in range(layers)]

    def forward(self, embeddings: Tensor, positions: Tensor, step: Step) -> Tensor:
        """Final hidden states `[rows, hidden]` of block rows `embeddings [rows, hidden]`."""
        hidden, _ = self.stack.run(embeddings, positions, step)
        return self.stack.rms(hidden, self.norm)


def _context_parts(config: DrafterConfig) -> list[str]:
    parts = ["k_proj.weight", "v_proj.weight", "k_norm.weight"]
    return parts + ["k_proj.bias", "v_proj.bias"] if config.attention_bias else parts
