"""The target as drafter training needs it: hidden states at the taps, and batched decoding over a static cache.

`CompactTarget` is a functional forward of the Llama family (Llama, Qwen2, Qwen3, Mistral without a sliding window)
with joined qkv and gate/up products; `TransformersTarget` takes every other supported architecture through its
transformers class, slower. Equations: Llama (arXiv 2302.13971), grouped-query attention
(2305.13245), RoPE (2104.09864).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.train_kernels import Kernels, head_logits

COMPACT_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")


class TrainTarget(Protocol):
    """What training asks of a target. `embedding` and `head` are `[vocab, hidden]` in the compute dtype."""

    embedding: Tensor
    head: Tensor

    def features(self, ids: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Tapped hidden states `[n, L, taps * hidden]` and final normalised ones `[n, L, hidden]` of `ids [n, L]`.

        Sequences are right-padded: what stands behind a sequence's end changes nothing before it.
        """
        ...


@dataclass(frozen=True)
class KeyValueCache:
    """Static keys and values `[layers, rows, kv_heads, length, head_dim]`."""

    keys: Tensor
    values: Tensor

    @property
    def length(self) -> int:
        return self.keys.shape[3]


@dataclass(frozen=True)
class CompactLayer:
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class CompactTarget:
    """A Llama-family target from its config.json and Hugging Face weights, in `dtype` on `device`."""

    def __init__(
        self,
        config: Mapping[str, Any],
        state: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels | None = None,
    ) -> None:
        self.hidden = int(config["hidden_size"])
        self.heads = int(config["num_attention_heads"])
        self.kv_heads = int(config["num_key_value_heads"])
        self.head_dim = int(config.get("head_dim") or self.hidden // self.heads)
        self.eps = float(config["rms_norm_eps"])
        self.dtype, self.device, self.kernels = dtype, device, kernels or Kernels()
        rope = config.get("rope_parameters") or {}
        self._theta = float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0)
        self._tables: tuple[Tensor, Tensor] = self._rope_tables(2048)

        def load(name: str) -> Tensor:
            return state[name].to(device, dtype).contiguous()

        self.embedding = load("model.embed_tokens.weight")
        self.norm = load("model.norm.weight")
        self.head = load("lm_head.weight") if "lm_head.weight" in state else self.embedding
        self.layers = tuple(
            _compact_layer(state, f"model.layers.{i}.", load) for i in range(int(config["num_hidden_layers"]))
        )

    def _rope_tables(self, length: int) -> tuple[Tensor, Tensor]:
        steps = torch.arange(0, self.head_dim, 2, device=self.device, dtype=torch.float32)
        inverse = self._theta ** (-steps / self.head_dim)
        angles = torch.arange(length, device=self.device, dtype=torch.float32)[:, None] * inverse
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def _rope(self, length: int) -> tuple[Tensor, Tensor]:
        if length > self._tables[0].shape[0]:
            self._tables = self._rope_tables(2 * length)
        return self._tables

    def new_cache(self, rows: int, length: int) -> KeyValueCache:
        shape = (len(self.layers), rows, self.kv_heads, length, self.head_dim)
        made = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2)]
        return KeyValueCache(made[0], made[1])

    def _project(self, layer: CompactLayer, x: Tensor) -> tuple[Tensor, Tensor]:
        """Unrotated queries and keys `[..., heads + kv_heads, dim]` and values `[..., kv_heads, dim]`."""
        qkv = F.linear(F.rms_norm(x, (self.hidden,), layer.input_norm, self.eps), layer.qkv, layer.qkv_bias)
        qkv = qkv.unflatten(-1, (-1, self.head_dim))
        rotated, values = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=-2)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = rotated.split((self.heads, self.kv_heads), dim=-2)
            queries = F.rms_norm(queries, (self.head_dim,), layer.q_norm, self.eps)
            keys = F.rms_norm(keys, (self.head_dim,), layer.k_norm, self.eps)
            rotated = torch.cat((queries, keys), dim=-2)
        return rotated, values

    def _finish(self, layer: CompactLayer, x: Tensor, attended: Tensor) -> Tensor:
        x = x + F.linear(attended, layer.out)
        normed = F.rms_norm(x, (self.hidden,), layer.mlp_norm, self.eps)
        gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, layer.down)

    @torch.no_grad()
    def features(self, ids: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See `TrainTarget.features`."""
        tapped: dict[int, Tensor] = {}
        x = self._forward(ids, None, None, tapped, frozenset(taps))
        return torch.cat([tapped[tap] for tap in taps], dim=-1), F.rms_norm(
            x, (self.hidden,), self.norm, self.eps
        )

    @torch.no_grad()
    def prefill(self, ids: Tensor, cache: KeyValueCache, rows: Tensor) -> None:
        """Puts keys and values of `ids [n, L]` into positions 0 .. L - 1 of the cache rows `rows [n]`."""
        self._forward(ids, cache, rows, {}, frozenset())

    def _forward(
        self,
        ids: Tensor,
        cache: KeyValueCache | None,
        rows: Tensor | None,
        tapped: dict[int, Tensor],
        taps: frozenset[int],
    ) -> Tensor:
        length = ids.shape[1]
        cos, sin = (table[:length, None].to(self.dtype) for table in self._rope(length))
        x = F.embedding(ids, self.embedding)
        for index, layer in enumerate(self.layers):
            rotated, values = self._project(layer, x)
            rotated = _rotate(rotated, cos, sin).transpose(1, 2)
            queries, keys = rotated.split((self.heads, self.kv_heads), dim=1)
            values = values.transpose(1, 2)
            if cache is not None:
                cache.keys[index, rows, :, :length] = keys
                cache.values[index, rows, :, :length] = values
            attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
            x = self._finish(layer, x, attended.transpose(1, 2).flatten(2))
            if index in taps:
                tapped[index] = x
        return x

    @torch.no_grad()
    def decode(self, ids: Tensor, positions: Tensor, cache: KeyValueCache, bound: int) -> Tensor:
        """Feeds `ids [rows]` at `positions [rows]`; returns final normalised hidden states `[rows, hidden]`.

        `bound` (host) is above every position: plain attention reads the cache up to it.
        """
        cos_table, sin_table = self._rope(cache.length)
        cos, sin = cos_table[positions], sin_table[positions]
        x = F.embedding(ids, self.embedding)
        if not self.kernels.decode:
            everyone = torch.arange(ids.shape[0], device=ids.device)
            bound = min(bound, cache.length)
            seen = (torch.arange(bound, device=ids.device) <= positions[:, None])[:, None, None]
        for index, layer in enumerate(self.layers):
            rotated, values = self._project(layer, x)
            keys_cache, values_cache = cache.keys[index], cache.values[index]
            if self.kernels.decode:
                attended = self.kernels.decode_attention(
                    rotated, values, cos, sin, positions, keys_cache, values_cache
                )
            else:
                rotated = _rotate(rotated, cos[:, None].to(self.dtype), sin[:, None].to(self.dtype))
                queries, keys = rotated.split((self.heads, self.kv_heads), dim=1)
                keys_cache[everyone, :, positions] = keys
                values_cache[everyone, :, positions] = values
                grouped = queries.unflatten(1, (self.kv_heads, -1))
                attended = F.scaled_dot_product_attention(
                    grouped, keys_cache[:, :, :bound], values_cache[:, :, :bound], attn_mask=seen
                )
            x = self._finish(layer, x, attended.flatten(1))
        return F.rms_norm(x, (self.hidden,), self.norm, self.eps)


class TransformersTarget:
    """Any supported architecture through its transformers class."""

    def __init__(
        self, config: Mapping[str, Any], state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.model = transformers_model(config, state, dtype, device)
        self.embedding = self.model.get_input_embeddings().weight.detach()
        self.head = self.model.get_output_embeddings().weight.detach()

    @torch.no_grad()
    def features(self, ids: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See `TrainTarget.features`."""
        found = self.model.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        tapped = torch.cat([found.hidden_states[tap + 1] for tap in taps], dim=-1)
        return tapped, found.last_hidden_state


def transformers_model(
    config: Mapping[str, Any], state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> Any:
    """The transformers causal language model of a config.json with weights `state`, frozen."""
    import transformers

    made = transformers.AutoConfig.for_model(**dict(config))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=dtype)
    model.to_empty(device=device)
    model.load_state_dict({name: value.to(dtype) for name, value in state.items()}, strict=False)
    model.tie_weights()
    # Its frequencies are no weights: on the meta device they were never computed.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=made).to(device)
    return model.eval().requires_grad_(False)


def is_compact(config: Mapping[str, Any]) -> bool:
    """Whether `CompactTarget` computes this model."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    architecture = (config.get("architectures") or [""])[0]
    return (
        architecture in COMPACT_ARCHITECTURES
        and rope.get("rope_type", rope.get("type", "default")) == "default"
        and not config.get("mlp_bias")
        and not (config.get("sliding_window") and config.get("use_sliding_window", True))
        and config.get("hidden_act", "silu") == "silu"
    )


def build_target(
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
) -> CompactTarget | TransformersTarget:
    """The fastest of the two targets that computes this model."""
    if is_compact(config):
        return CompactTarget(config, state, dtype, device, kernels)
    return TransformersTarget(config, state, dtype, device)


def choose_tokens(hidden: Tensor, head: Tensor, temperature: Tensor, generator: torch.Generator) -> Tensor:
    """Next ids `[rows]` from `hidden [rows, width]`: argmax at temperature 0, else sampled.

    Gumbel-max: argmax of logits / T - log(Exponential(1)) has the softmax distribution.
    """
    chosen = []
    for part, heat in zip(hidden.split(2048), temperature.split(2048), strict=True):
        scores = head_logits(part, head)
        noise = torch.empty_like(scores).exponential_(generator=generator)
        if not noise.is_cuda:
            noise.clamp_(min=1e-30)  # the CPU generator can return 0, whose logarithm times 0 is not a number
        noise.log_()
        chosen.append(scores.addcmul_(noise, heat[:, None], value=-1.0).argmax(dim=-1))
    return torch.cat(chosen)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def _compact_layer(state: Mapping[str, Tensor], prefix: str, load: Any) -> CompactLayer:
    def join(*parts: str) -> Tensor | None:
        names = [prefix + part for part in parts]
        return torch.cat([load(name) for name in names]) if names[0] in state else None

    def maybe(part: str) -> Tensor | None:
        return load(prefix + part) if prefix + part in state else None

    qkv = join(*(f"self_attn.{each}_proj.weight" for each in "qkv"))
    gate_up = join("mlp.gate_proj.weight", "mlp.up_proj.weight")
    if qkv is None or gate_up is None:
        raise ValueError(f"weights {prefix}self_attn or {prefix}mlp are missing; copy the model again")
    return CompactLayer(
        input_norm=load(prefix + "input_layernorm.weight"),
        qkv=qkv,
        qkv_bias=join(*(f"self_attn.{each}_proj.bias" for each in "qkv")),
        q_norm=maybe("self_attn.q_norm.weight"),
        k_norm=maybe("self_attn.k_norm.weight"),
        out=load(prefix + "self_attn.o_proj.weight"),
        mlp_norm=load(prefix + "post_attention_layernorm.weight"),
        gate_up=gate_up,
        down=load(prefix + "mlp.down_proj.weight"),
    )
