"""Time of one decode round under a layout, from dimensions and hardware: memory, arithmetic, kernels, links.

A rank reads its weights once a round, the prefix once a sequence, and computes every row; where memory traffic and
arithmetic overlap the longer one counts (roofline, Williams et al. 2009). Tensor parallelism adds two all-reduces a
layer, expert parallelism a dispatch and a combine in place of the second one, a pipeline its hops and its bubbles.
Routing is taken as uniform and independent, so a batch touches E * (1 - (1 - k/E)^rows) of E experts a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt
from statistics import NormalDist

from layouts.fit import Load, in_memory
from layouts.presets import Degrees
from layouts.shapes import Hardware, ModelShape, bytes_of
from layouts.values import Engine
from layouts.weights import cache_bytes, drafter_counts, layer_kinds, shares_of, stage_layers

ATTENTION_KERNELS, LATENT_KERNELS, MLP_KERNELS, EXPERT_KERNELS = 6, 12, 4, 10
"""Kernels of a layer's parts: norm, projections, rotation, cache write, attention, output; and so on."""
DRAFT_KERNELS = ATTENTION_KERNELS + MLP_KERNELS
ROUND_KERNELS = 12
"""Embedding, head, sampling, acceptance and bookkeeping of one round."""


@dataclass(frozen=True)
class Rates:
    """What one rank and its links reach; bytes/s, FLOP/s, seconds."""

    memory: float
    arithmetic: float
    link: float
    step_s: float
    """One step of a collective."""
    kernel_s: float
    eager_kernel_s: float
    exchange_s: float
    host_step_s: float
    host_request_s: float
    switched: bool
    overlaps: bool


@dataclass(frozen=True)
class Prediction:
    """One decode round of all sequences, in seconds by cause, and what follows."""

    concurrency: int
    accept_length: float
    memory_s: float
    """Weights and prefix, and arithmetic where that is longer."""
    kernels_s: float
    links_s: float
    """All-reduces, dispatch and combine, hops."""
    bubbles_s: float
    """Stages that wait for others."""
    drafter_s: float
    experts_touched: float | None
    """Distinct experts a layer that one step reads, of all ranks."""

    @property
    def round_s(self) -> float:
        return self.memory_s + self.kernels_s + self.links_s + self.bubbles_s + self.drafter_s

    @property
    def tok_s(self) -> float:
        """Output tokens per second of one request."""
        return self.accept_length / self.round_s

    @property
    def total_tok_s(self) -> float:
        return self.concurrency * self.tok_s


def rates(hardware: Hardware, degrees: Degrees = Degrees(), engine: Engine = "native") -> Rates | str:  # noqa: B008
    """The rates of one rank, or which figures of `hardware` are missing.

    Ranks that share a device share its bandwidth while they work, and its cores always; stages of the native pipeline
    work in turns.
    """
    ranks = degrees.ranks
    needed = {"memory_gb_s": hardware.memory_gb_s, "tflops": hardware.tflops}
    if ranks > 1:
        needed |= {"link_gb_s": hardware.link_gb_s, "link_latency_us": hardware.link_latency_us}
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        return f"{hardware.title}: {', '.join(missing)} not known"
    assert hardware.memory_gb_s is not None and hardware.tflops is not None
    part = busy_ranks(degrees, engine) if hardware.shared else 1
    return Rates(
        memory=hardware.memory_gb_s * 1e9 * hardware.memory_efficiency / part,
        arithmetic=hardware.tflops * 1e12 * hardware.compute_efficiency / (ranks if hardware.shared else 1),
        link=(hardware.link_gb_s or 1.0) * 1e9,
        step_s=(hardware.link_latency_us or 0.0) * 1e-6,
        kernel_s=hardware.kernel_us * 1e-6,
        eager_kernel_s=hardware.eager_kernel_us * 1e-6,
        exchange_s=hardware.exchange_us * 1e-6,
        host_step_s=hardware.host_step_us * 1e-6,
        host_request_s=hardware.host_request_us * 1e-6,
        switched=hardware.switched,
        overlaps=hardware.overlaps,
    )


def busy_ranks(degrees: Degrees, engine: Engine) -> int:
    """Ranks that work at the same time."""
    return degrees.ranks // degrees.pp if engine == "native" else degrees.ranks


def experts_touched(count: int, per_token: int, rows: int) -> float:
    """Expected distinct experts of a layer that `rows` rows choose."""
    return count * (1 - (1 - per_token / count) ** rows)


def busiest_rank(count: int, per_token: int, rows: int, ranks: int) -> float:
    """Expected distinct experts on the rank that has most of them to read, of `count` spread over `ranks`.

    The number on one rank is taken as normal with the variance of sampling without replacement between ranks; the
    largest of `ranks` such values by Blom's formula (Blom 1958).
    """
    mine = count / ranks
    if ranks == 1:
        return experts_touched(count, per_token, rows)
    chance = experts_touched(count, per_token, rows) / count
    deviation = sqrt(mine * chance * (1 - chance) * (1 - 1 / ranks))
    highest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return min(mine, rows * per_token, mine * chance + highest * deviation)


def ranks_reached(per_token: int, ranks: int) -> float:
    """Expected other ranks that hold at least one of a token's experts."""
    return (ranks - 1) * (1 - (1 - 1 / ranks) ** per_token)


def all_reduce_s(size: float, ranks: int, at: Rates) -> float:
    """Sum of `size` bytes over `ranks`: the best of ring, one-step and two-step where a switch allows those."""
    if ranks == 1:
        return 0.0
    volume = 2 * (ranks - 1) / ranks * size / at.link
    ring = 2 * (ranks - 1) * at.step_s + volume
    if not at.switched:
        return ring
    return min(ring, at.step_s + (ranks - 1) * size / at.link, 2 * at.step_s + volume)


def exchange_s(rows: int, per_token: int, row_bytes: float, ranks: int, at: Rates) -> float:
    """Dispatch of rows to the ranks of their experts and combine of the results.

    Each is one all-to-all; the dispatch sends the counts first. A rank owns its part of the rows.
    """
    if ranks == 1:
        return 0.0
    steps = 1 if at.switched else ranks - 1
    volume = rows / ranks * ranks_reached(per_token, ranks) * row_bytes / at.link
    return 3 * steps * at.step_s + 2 * (at.exchange_s + volume)


@dataclass(frozen=True)
class Step:
    """What is constant over one prediction."""

    shape: ModelShape
    degrees: Degrees
    engine: Engine
    load: Load
    at: Rates

    def busy_s(self, size: float, operations: float) -> float:
        """Time to move `size` bytes and do `operations`."""
        memory, arithmetic = size / self.at.memory, operations / self.at.arithmetic
        return max(memory, arithmetic) if self.at.overlaps else memory + arithmetic

    @property
    def kernel_s(self) -> float:
        return self.at.kernel_s if self.load.graphs else self.at.eager_kernel_s


def predict(
    shape: ModelShape,
    degrees: Degrees,
    engine: Engine,
    load: Load,
    accept_length: float,
    at: Rates,
) -> Prediction:
    """One round of `load.concurrency` sequences of `load.context` tokens that gives `accept_length` tokens each."""
    step = Step(in_memory(shape, engine, load.dtype), degrees, engine, load, at)
    sequences = ceil(load.concurrency / degrees.dp)
    parts = min(degrees.pp, sequences) if engine == "sglang" else 1
    batch = ceil(sequences / parts)
    stages = [_stage(step, stage, batch) for stage in range(degrees.pp)]
    slowest = max(sum(each) for each in stages)
    round_s = degrees.pp * slowest if parts > 1 else sum(sum(each) for each in stages)
    host = degrees.pp * (at.host_step_s + batch * at.host_request_s) if degrees.pp > 1 else 0.0
    hops = (degrees.pp - 1) * _hop_s(step, batch)
    memory, kernels, links = (sum(values) for values in zip(*stages, strict=True))
    rows = batch * load.nodes
    experts = shape.experts
    return Prediction(
        concurrency=load.concurrency,
        accept_length=accept_length,
        memory_s=memory,
        kernels_s=kernels + host,
        links_s=links + hops,
        bubbles_s=max(0.0, round_s - memory - kernels - links),
        drafter_s=_drafter_s(step, sequences),
        experts_touched=experts_touched(experts.count, experts.per_token, rows) if experts else None,
    )


def _stage(step: Step, stage: int, batch: int) -> tuple[float, float, float]:
    """Seconds of (memory or arithmetic, kernels, links) of one pipeline stage for `batch` sequences."""
    shape, degrees, at = step.shape, step.degrees, step.at
    rows = batch * step.load.nodes
    shares = shares_of(shape, degrees, step.engine)
    message = bytes_of(rows * shape.hidden_size, _activation(step))
    reduce_s = all_reduce_s(message, degrees.tp, at)
    split_attention = degrees.tp > 1 and not shares.partial
    memory, kernels, links = 0.0, 0, 0.0
    for counts, number in layer_kinds(shape, stage_layers(shape.layers, degrees.pp, step.engine)[stage]):
        plain = counts.attention * shares.attention + counts.kv * shares.kv + counts.replicated
        plain += counts.mlp * shares.mlp + counts.router
        busy = step.busy_s(bytes_of(plain, shape.formats.layers), 2 * plain * rows)
        busy += step.busy_s(*_prefix(step, batch, shares.attention, shares.cache))
        launched = LATENT_KERNELS if shape.latent is not None else ATTENTION_KERNELS
        sums = reduce_s if split_attention else 0.0
        if counts.experts:
            busy += step.busy_s(*_experts(step, counts.experts, rows))
            launched += EXPERT_KERNELS
            sums += _experts_links(step, rows, message)
        else:
            launched += MLP_KERNELS
            sums += reduce_s
        memory, kernels, links = memory + number * busy, kernels + number * launched, links + number * sums
    if stage == degrees.pp - 1:
        head = shape.vocab_size * shape.hidden_size * shares.head
        memory += step.busy_s(bytes_of(head, shape.formats.embedding), 2 * head * rows)
        kernels += ROUND_KERNELS
    return memory, kernels * step.kernel_s, links


def _prefix(step: Step, batch: int, heads_share: float, cache_share: float) -> tuple[float, float]:
    """(bytes, operations) of one layer's attention over the prefix."""
    shape, load = step.shape, step.load
    size = batch * load.context * cache_bytes(shape, 1, cache_share, load.kv_format)
    width = 2 * shape.head_dim
    if shape.latent is not None:
        width = 2 * shape.latent.kv_lora_rank + shape.latent.qk_rope_head_dim
    rows = batch * load.nodes
    return size, 2.0 * rows * load.context * shape.heads * heads_share * width


def _experts(step: Step, weights: int, rows: int) -> tuple[float, float]:
    """(bytes, operations) of one layer's experts on the busiest rank."""
    shape, degrees = step.shape, step.degrees
    assert shape.experts is not None
    experts = shape.experts
    slices = max(degrees.tp, degrees.ep) // degrees.ep
    one = weights / experts.count / slices
    read = busiest_rank(experts.count, experts.per_token, rows, degrees.ep) * one
    mean = rows * experts.per_token / degrees.ep
    spread = 0.0
    if degrees.ep > 1:
        highest = NormalDist().inv_cdf((degrees.ep - 0.375) / (degrees.ep + 0.25))
        spread = highest * sqrt(mean * (1 - 1 / degrees.ep))
    return bytes_of(read, shape.formats.experts), 2 * one * min(rows * experts.per_token, mean + spread)


def _experts_links(step: Step, rows: int, message: float) -> float:
    """After the experts: one sum over all ranks, or under SGLang's expert parallelism a dispatch and a combine.

    The native engine lets each rank run its own experts on the whole batch and sums.
    """
    degrees, shape = step.degrees, step.shape
    assert shape.experts is not None
    if degrees.ep == 1 or step.engine == "native":
        return all_reduce_s(message, max(degrees.tp, degrees.ep), step.at)
    inside = all_reduce_s(message / degrees.ep, degrees.tp // degrees.ep, step.at)
    row = bytes_of(shape.hidden_size, _activation(step))
    return inside + exchange_s(rows, shape.experts.per_token, row, degrees.ep, step.at)


def _hop_s(step: Step, batch: int) -> float:
    size = bytes_of(batch * step.load.nodes * step.shape.hidden_size, _activation(step))
    return step.at.step_s + size / step.at.link


def _drafter_s(step: Step, sequences: int) -> float:
    """One pass of the drafter over a block of every sequence, the target's head included."""
    drafter, load = step.shape.drafter, step.load
    if load.mode == "off" or drafter is None:
        return 0.0
    shares = shares_of(step.shape, step.degrees, step.engine)
    rows = sequences * load.block_size
    body = sum(drafter_counts(drafter, step.shape.hidden_size)) * shares.drafter
    head = step.shape.vocab_size * step.shape.hidden_size * (shares.head if shares.drafter < 1 else 1.0)
    size = bytes_of(body, drafter.format) + bytes_of(head, step.shape.formats.embedding)
    kernels = (drafter.layers * DRAFT_KERNELS + ROUND_KERNELS) * step.kernel_s
    sums = 0.0
    if shares.drafter < 1:
        message = bytes_of(rows * step.shape.hidden_size, _activation(step))
        sums = 2 * drafter.layers * all_reduce_s(message, step.degrees.tp, step.at)
    return step.busy_s(size, 2 * (body + head) * rows) + kernels + sums


def _activation(step: Step) -> str:
    return step.load.dtype if step.engine == "native" else "bfloat16"
