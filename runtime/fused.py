"""A fused decoder for dense Llama-type targets on one rank: the transformers classes' result with a third of the calls.

Query, key and value projections are one product, gate and up another. Rotary embedding is one complex multiplication:
the rows of the query and key weights are interleaved at load so that a rotation's two numbers stand side by side,
which leaves every query-key product as it was. Tests hold it against the transformers classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.attention import Step, attend_slots
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


@dataclass(frozen=True)
class FusedLayer:
    """One layer's weights; norms are `[hidden]` or `[head_dim]`."""

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int | None


class FusedDecoder:
    """The decoder stack of a dense target, from a state dict of Hugging Face names (consumed to save memory)."""

    def __init__(
        self,
        state: dict[str, Tensor],
        config: Any,
        rotary: tuple[Tensor, float],
        factory: LinearFactory,
        taps: tuple[int, ...],
    ) -> None:
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // self._heads)
        self._eps = float(config.rms_norm_eps)
        self._scale = self._head_dim**-0.5
        self._inverse, self._rope_scale = rotary
        self._taps = taps
        self.embedding = state["model.embed_tokens.weight"]
        head = state.get("lm_head.weight", self.embedding)
        self.head = factory(head)
        self._norm = state["model.norm.weight"]
        self._interleave = torch.arange(self._head_dim).view(2, -1).t().flatten().to(self.embedding.device)
        self._layers = [self._layer(state, config, i, factory) for i in range(int(config.num_hidden_layers))]

    def forward(self, token_ids: Tensor, positions: Tensor, step: Step) -> tuple[Tensor, Tensor | None]:
        """Hidden states after the final norm `[rows, hidden]` and tapped features `[rows, taps * hidden]`."""
        angles = positions.float().unsqueeze(1) * self._inverse
        turn = torch.polar(torch.full_like(angles, self._rope_scale), angles).unsqueeze(1)
        hidden = F.embedding(token_ids, self.embedding)
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            hidden = hidden + self._attention(layer, index, self._rms(hidden, layer.input_norm), turn, step)
            gate, up = layer.gate_up(self._rms(hidden, layer.post_norm)).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate) * up)
            if index in self._taps:
                tapped[index] = hidden
        features = torch.cat([tapped[tap] for tap in self._taps], dim=-1) if self._taps else None
        return self._rms(hidden, self._norm), features

    def _attention(self, layer: FusedLayer, index: int, x: Tensor, turn: Tensor, step: Step) -> Tensor:
        rows = x.shape[0]
        qkv = layer.qkv(x).view(rows, -1, self._head_dim)
        turned = self._heads + self._kv_heads
        if layer.q_norm is not None and layer.k_norm is not None:
            queries = self._rms(qkv[:, : self._heads], layer.q_norm)
            keys = self._rms(qkv[:, self._heads : turned], layer.k_norm)
            pairs = torch.cat((queries, keys), dim=1)
        else:
            pairs = qkv[:, :turned]
        pairs = pairs.float().reshape(rows, turned, self._head_dim // 2, 2)
        rotated = (
            torch.view_as_real(torch.view_as_complex(pairs) * turn).flatten(-2).to(x.dtype).transpose(0, 1)
        )
        values = qkv[:, turned:].transpose(0, 1)
        out = attend_slots(
            step, index, rotated[: self._heads], rotated[self._heads :], values, self._scale, layer.window
        )
        return layer.o(out.transpose(0, 1).reshape(rows, -1))

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._eps)

    def _layer(self, state: dict[str, Tensor], config: Any, index: int, factory: LinearFactory) -> FusedLayer:
        prefix = f"model.layers.{index}."

        def take(name: str) -> Tensor | None:
            return state.pop(prefix + name, None)

        def need(name: str) -> Tensor:
            return state.pop(prefix + name)

        def joined(parts: list[Tensor | None]) -> Tensor | None:
            return torch.cat([part for part in parts if part is not None]) if parts[0] is not None else None

        q, k = self._rows(need("self_attn.q_proj.weight")), self._rows(need("self_attn.k_proj.weight"))
        qb, kb = take("self_attn.q_proj.bias"), take("self_attn.k_proj.bias")
        qkv_bias = joined(
            [
                None if qb is None else self._rows(qb),
                None if kb is None else self._rows(kb),
                take("self_attn.v_proj.bias"),
            ]
        )
        q_norm, k_norm = take("self_attn.q_norm.weight"), take("self_attn.k_norm.weight")
        types = getattr(config, "layer_types", None)
        sliding = types[index] == "sliding_attention" if types else True
        return FusedLayer(
            qkv=factory(torch.cat((q, k, need("self_attn.v_proj.weight"))), qkv_bias),
            o=factory(need("self_attn.o_proj.weight"), take("self_attn.o_proj.bias")),
            gate_up=factory(torch.cat((need("mlp.gate_proj.weight"), need("mlp.up_proj.weight")))),
            down=factory(need("mlp.down_proj.weight")),
            input_norm=need("input_layernorm.weight"),
            post_norm=need("post_attention_layernorm.weight"),
            q_norm=None if q_norm is None else q_norm[self._interleave],
            k_norm=None if k_norm is None else k_norm[self._interleave],
            window=getattr(config, "sliding_window", None) if sliding else None,
        )

    def _rows(self, weight: Tensor) -> Tensor:
        """Interleaves each head's rows of a query or key weight (or bias): (i, i + dim / 2) become neighbours."""
        return weight.unflatten(0, (-1, self._head_dim))[:, self._interleave].flatten(0, 1)
