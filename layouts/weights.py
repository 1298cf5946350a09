"""How many weights a model has, in which groups, and what share of each a rank holds under a layout."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from layouts.presets import Degrees
from layouts.shapes import DrafterShape, Formats, ModelShape, bytes_of
from layouts.values import Engine

Group = Literal["attention", "replicated", "mlp", "experts", "router", "norms", "embedding", "head"]


@dataclass(frozen=True)
class Counts:
    """Weights of one layer, by how tensor parallelism treats them."""

    attention: int
    """Split by heads."""
    kv: int
    """Of those in `attention`, the key and value projections, which are split by KV heads."""
    replicated: int
    """Down-projections of latent attention, the same on every rank."""
    mlp: int
    """Plain MLP, or shared experts."""
    experts: int
    router: int
    norms: int

    @property
    def total(self) -> int:
        return self.attention + self.kv + self.replicated + self.mlp + self.experts + self.router + self.norms


def layer_counts(shape: ModelShape, layer: int) -> Counts:
    """Weights of layer `layer`, from 0."""
    hidden = shape.hidden_size
    norms = 2 * hidden + (2 * shape.head_dim if shape.qk_norm else 0)
    if shape.latent is not None:
        ranks = shape.latent
        per_head = ranks.q_lora_rank * (ranks.qk_nope_head_dim + ranks.qk_rope_head_dim)
        per_head += ranks.kv_lora_rank * (ranks.qk_nope_head_dim + ranks.v_head_dim)
        per_head += ranks.v_head_dim * hidden
        attention, kv = shape.heads * per_head, 0
        replicated = hidden * (ranks.q_lora_rank + ranks.kv_lora_rank + ranks.qk_rope_head_dim)
        norms += ranks.q_lora_rank + ranks.kv_lora_rank
    else:
        attention = 2 * hidden * shape.heads * shape.head_dim
        kv, replicated = 2 * hidden * shape.kv_heads * shape.head_dim, 0
    experts = shape.experts
    if experts is None or layer < experts.dense_layers:
        return Counts(attention, kv, replicated, 3 * hidden * shape.intermediate_size, 0, 0, norms)
    one = 3 * hidden * experts.intermediate_size
    return Counts(
        attention, kv, replicated, one * experts.shared, one * experts.count, hidden * experts.count, norms
    )


def layer_kinds(shape: ModelShape, layers: range) -> tuple[tuple[Counts, int], ...]:
    """The different layers among `layers`, each with how many there are: those with a plain MLP, those with experts."""
    dense = (
        len(layers) if shape.experts is None else len([i for i in layers if i < shape.experts.dense_layers])
    )
    found = []
    if dense:
        found.append((layer_counts(shape, layers[0]), dense))
    if len(layers) > dense:
        found.append((layer_counts(shape, layers[-1]), len(layers) - dense))
    return tuple(found)


def parameter_count(shape: ModelShape) -> int:
    """All weights of a target, a tied head counted once."""
    layers = sum(counts.total * number for counts, number in layer_kinds(shape, range(shape.layers)))
    tables = shape.vocab_size * shape.hidden_size * (1 if shape.tied else 2)
    return layers + tables + shape.hidden_size


def drafter_counts(drafter: DrafterShape, hidden: int) -> tuple[int, int]:
    """(weights of the fusion of taps, weights of all layers and norms) of a drafter."""
    width = drafter.heads * drafter.head_dim
    attention = 2 * hidden * width + 2 * hidden * drafter.kv_heads * drafter.head_dim
    layer = attention + 3 * hidden * drafter.intermediate_size + 2 * hidden + 2 * drafter.head_dim
    return len(drafter.taps) * hidden * hidden, drafter.layers * layer + 2 * hidden


@dataclass(frozen=True)
class Shares:
    """The share of each group that one rank holds, 0 to 1; the layers of a stage are counted apart."""

    attention: float
    kv: float
    mlp: float
    experts: float
    embedding: float
    head: float
    cache: float
    """Of the keys and values of a token."""
    drafter: float
    partial: bool = False
    """Only the MLP is split."""


def shares_of(shape: ModelShape, degrees: Degrees, engine: Engine) -> Shares:
    """What one rank holds under `degrees`.

    SGLang splits heads, MLP, experts, vocabulary and drafter over the tensor-parallel ranks and repeats KV heads where
    there are fewer than ranks. The native engine leaves embedding, head and drafter whole, and where KV heads do not
    divide splits nothing but the MLP.
    """
    tp, spread = degrees.tp, max(degrees.tp, degrees.ep)
    if engine == "sglang":
        kv = 1 / tp if shape.latent is not None else ceil(shape.kv_heads / tp) / shape.kv_heads
        cache = 1.0 if shape.latent is not None else kv
        return Shares(1 / tp, kv, 1 / tp, 1 / spread, 1 / tp, 1 / tp, cache, 1 / tp)
    if tp > 1 and (shape.heads % tp or shape.kv_heads % tp):
        return Shares(1.0, 1.0, 1 / tp, 1 / spread, 1.0, 1.0, 1.0, 1.0, partial=True)
    cache = 1.0 if shape.latent is not None else 1 / tp
    return Shares(1 / tp, 1 / tp, 1 / tp, 1 / spread, 1.0, 1.0, cache, 1.0)


def stage_layers(layers: int, pp: int, engine: Engine) -> tuple[range, ...]:
    """Layers of each pipeline stage: transformers gives the rest to the last stage, SGLang to the first ones."""
    base, rest = divmod(layers, pp)
    sizes = [base] * pp
    if engine == "native":
        sizes[-1] += rest
    else:
        sizes = [base + (stage < rest) for stage in range(pp)]
    starts = [sum(sizes[:stage]) for stage in range(pp)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


@dataclass(frozen=True)
class Resident:
    """Bytes of weights on one rank of one stage."""

    attention: float
    mlp: float
    experts: float
    tables: float
    """Embedding, head and norms."""

    @property
    def total(self) -> float:
        return self.attention + self.mlp + self.experts + self.tables


def resident(shape: ModelShape, degrees: Degrees, engine: Engine, stage: int) -> Resident:
    """Weights of a rank of pipeline stage `stage`, from 0."""
    shares, formats = shares_of(shape, degrees, engine), shape.formats
    attention = mlp = experts = norms = 0.0
    for counts, number in layer_kinds(shape, stage_layers(shape.layers, degrees.pp, engine)[stage]):
        held = counts.attention * shares.attention + counts.kv * shares.kv + counts.replicated
        attention += number * held
        mlp += number * (counts.mlp * shares.mlp + counts.router)
        experts += number * counts.experts * shares.experts
        norms += number * counts.norms
    first, last = stage == 0, stage == degrees.pp - 1
    table = shape.vocab_size * shape.hidden_size
    if shape.tied and first and last:
        tables = table * shares.embedding
    else:
        tables = table * ((shares.embedding if first else 0) + (shares.head if last else 0))
    norms += shape.hidden_size if last else 0
    return Resident(
        bytes_of(attention, formats.layers),
        bytes_of(mlp, formats.layers),
        bytes_of(experts, formats.experts),
        bytes_of(tables, formats.embedding) + bytes_of(norms, formats.norms),
    )


def split_share(shape: ModelShape, degrees: Degrees, engine: Engine) -> float:
    """The share of all weights that is split over ranks rather than repeated on each, 0 to 1."""
    ranks = degrees.ranks // degrees.dp
    if ranks == 1:
        return 0.0
    shape = shape.model_copy(update={"formats": Formats()})
    whole = resident(shape, Degrees(), engine, 0).total
    held = sum(resident(shape, degrees, engine, stage).total for stage in range(degrees.pp)) * (
        ranks // degrees.pp
    )
    repeated = (held - whole) / (ranks - 1) if ranks > 1 else 0.0
    return min(max(1.0 - repeated / whole, 0.0), 1.0)


def cache_bytes(shape: ModelShape, layers: int, share: float, format: str) -> float:
    """Bytes of keys and values of one token over `layers` layers, on a rank that holds `share` of the heads."""
    if shape.latent is not None:
        row: float = shape.latent.kv_lora_rank + shape.latent.qk_rope_head_dim
    else:
        row = 2 * shape.kv_heads * shape.head_dim
    return bytes_of(row * share * layers, format)
