"""Dimensions of models and figures of hardware, as their files give them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from layouts.values import Count, Frozen, Line, Name, Positive

Format = Literal["float32", "bfloat16", "fp8", "int4-g32", "q4_1", "q8_0"]
BITS: dict[str, float] = {
    "float32": 32,
    "bfloat16": 16,
    "fp8": 8,
    "int4-g32": 4.5,
    "q4_1": 5.0,
    "q8_0": 8.5,
}
"""Bits a weight takes, its group's scale (and minimum) included: int4-g32 has a 16-bit scale for 32 weights; q4_1 and
q8_0 are GGUF blocks of 32 weights in 20 and 34 bytes."""


def bytes_of(count: float, format: str) -> float:
    """Bytes that `count` numbers take."""
    return count * BITS[format] / 8


class Experts(Frozen):
    """The mixture-of-experts part of a model."""

    count: Count
    """Routed experts a layer."""
    per_token: Count
    intermediate_size: Count
    shared: int = Field(default=0, ge=0)
    """Experts every token passes."""
    dense_layers: int = Field(default=0, ge=0)
    """Leading layers with a plain MLP instead."""

    @model_validator(mode="after")
    def _per_token_exist(self) -> Self:
        if self.per_token > self.count:
            raise ValueError(f"per_token = {self.per_token} is more than the {self.count} experts there are")
        return self


class Latent(Frozen):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one compressed row a token instead of heads."""

    q_lora_rank: Count
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count


class Formats(Frozen):
    """Number format of each group of weights."""

    layers: Format = "bfloat16"
    """Attention, dense MLP and shared experts."""
    experts: Format = "bfloat16"
    embedding: Format = "bfloat16"
    norms: Format = "bfloat16"


class DrafterShape(Frozen):
    """Dimensions of a DFlash drafter; embedding and head are the target's."""

    layers: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    intermediate_size: Count
    taps: tuple[int, ...]
    """Target layers whose outputs are fused, from 0."""
    block_size: Count
    mask_token_id: int = Field(ge=0)
    format: Format = "bfloat16"
    assumed: tuple[str, ...] = ()
    """Fields that no document gives; figures built on them are marked."""


class ModelShape(Frozen):
    """Dimensions of a target, from its config.json."""

    name: Name
    title: Line
    sources: tuple[Line, ...] = ()
    layers: Count
    hidden_size: Count
    vocab_size: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    intermediate_size: int = Field(default=0, ge=0)
    """Width of the plain MLP; 0 where every layer has experts."""
    tied: bool = False
    """The head is the embedding."""
    qk_norm: bool = False
    context: Count
    """Positions it was trained for."""
    latent: Latent | None = None
    experts: Experts | None = None
    formats: Formats = Formats()
    drafter: DrafterShape | None = None
    notes: tuple[Line, ...] = ()

    @property
    def moe_layers(self) -> int:
        return 0 if self.experts is None else max(0, self.layers - self.experts.dense_layers)

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}")
        if self.moe_layers < self.layers and not self.intermediate_size:
            raise ValueError("intermediate_size is missing: some layers have a plain MLP")
        return self


class Hardware(Frozen):
    """One class of device and what connects several of them. Rates in bytes/s and FLOP/s of one device."""

    name: Name
    title: Line
    class_name: Line
    """What scopes call it."""
    sources: tuple[Line, ...]
    match: tuple[Line, ...] = ()
    """What the device calls itself contains one of these."""
    exclude: tuple[Line, ...] = ()
    device: Literal["gpu", "cpu"] = "gpu"
    interconnect: Line
    memory_gib: Positive | None = None
    memory_gb_s: Positive | None = None
    """Peak memory bandwidth, 10^9 bytes/s."""
    tflops: Positive | None = None
    """Dense bf16 peak (float32 on a CPU), 10^12 FLOP/s."""
    memory_efficiency: float = Field(default=0.8, gt=0, le=1)
    """Share of the peak that decoding kernels reach."""
    compute_efficiency: float = Field(default=0.5, gt=0, le=1)
    link_gb_s: Positive | None = None
    """Bandwidth one device gets in one direction in a collective of decoding size."""
    link_latency_us: Positive | None = None
    """One step of a collective."""
    switched: bool = False
    """Every device reaches every other at full rate at once, so a collective needs one or two steps, not a ring."""
    kernel_us: Positive = 3.0
    """Launch and drain of one kernel inside a CUDA graph."""
    eager_kernel_us: Positive = 15.0
    """The same without graphs."""
    exchange_us: float = Field(default=20.0, ge=0)
    """Sorting and packing of rows around one all-to-all."""
    host_step_us: float = Field(default=200.0, ge=0)
    """Scheduling of one step on the host, where nothing hides it."""
    host_request_us: float = Field(default=30.0, ge=0)
    """The same for each sequence of the step."""
    reserve_gib: float = Field(default=1.5, ge=0)
    """CUDA context, communicators and library workspaces of one rank."""
    shared: bool = False
    """Ranks share the memory, bandwidth and arithmetic of one device (processes on one CPU)."""
    overlaps: bool = True
    """Memory traffic hides behind arithmetic; else their times add up."""
    notes: tuple[Line, ...] = ()
