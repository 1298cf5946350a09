"""What an engine takes of its device's memory, in bytes term by term, from files and configuration alone.

Made before a weight is read. On a GPU what does not fit is refused with the numbers; on a CPU only what certainly does
not. The buffers of captured rounds are measured: they are built by their own code without memory (torch's meta device).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runtime.changes import available_memory
from runtime.drafter import Drafter, DrafterConfig
from runtime.fused import FusedDrafter
from runtime.interface import ConfigRejected
from runtime.kv_cache import Geometry, KVCache
from runtime.models import Checkpoint, CheckpointError
from runtime.round import Models
from runtime.target import TargetModel, outline

if TYPE_CHECKING:
    from runtime.admission import Limits
    from runtime.config import RuntimeConfig
    from runtime.loader import Pair

GIB = 2**30
RESERVE = GIB
"""Bytes kept free on a GPU for compiled kernels, captured graphs, libraries and the allocator's rounding; assumed."""
META = torch.device("meta")
GRAPH_SCRATCH = 64
"""Slots beyond the allocator's on a GPU, for rows that do not count: as many as a captured tree has rows."""
MOST_GRAPHED = 32
"""Sequences in a captured round."""


@dataclass(frozen=True)
class Term:
    """One part of the memory; `per_slot`: bytes of it that each KV slot adds."""

    name: str
    bytes: int
    per_slot: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """`free`: bytes the device can give, None where unknown; `peak`: most that was taken while loading."""

    terms: tuple[Term, ...]
    device: str
    free: int | None
    slots: int
    peak: int | None = None

    @property
    def total(self) -> int:
        return sum(term.bytes for term in self.terms)

    @property
    def fitting_slots(self) -> int | None:
        """Most KV slots that fit; None where the free memory is not known."""
        per_slot = sum(term.per_slot for term in self.terms)
        if self.free is None or not per_slot:
            return None
        return max(0, self.free - self.total + per_slot * self.slots) // per_slot

    @property
    def words(self) -> str:
        """The plan in one line."""
        free = "n/a" if self.free is None else f"{self.free / GIB:.2f}"
        peak = "" if self.peak is None else f", peak after loading {self.peak / GIB:.2f}"
        return f"{self.total / GIB:.2f} of {free} GiB free on {self.device}{peak}: {self._parts}"

    def check(self, least_slots: int) -> None:
        """Raises ConfigRejected with the numbers where it does not fit; with `least_slots` a request can run."""
        if self.free is None or self.total <= self.free:
            return
        needs = (
            f"memory: {self.total / GIB:.2f} GiB are needed and {self.free / GIB:.2f} GiB are free on {self.device}: "
            f"{self._parts}"
        )
        fitting = self.fitting_slots
        if fitting is not None and fitting >= least_slots:
            raise ConfigRejected(
                f"{needs}; set kv_slots = {fitting} or less (it is {self.slots}), or lower max_seq_len or "
                "max_concurrency",
                "kv_slots",
            )
        raise ConfigRejected(
            f"{needs}; no number of KV slots fits, so lower max_concurrency or max_seq_len, use dtype = 'bfloat16', "
            "a smaller model, or end what else holds memory",
            "model",
        )

    @property
    def _parts(self) -> str:
        return ", ".join(f"{term.name} {term.bytes / GIB:.2f}" for term in self.terms)


def check_memory(config: RuntimeConfig, pair: Pair) -> MemoryPlan | None:
    """The plan of what `pair` takes in this process; raises ConfigRejected with the numbers where it does not fit.

    None where several processes share it.
    """
    if config.layout != "single":
        return None
    device, limits, drafter = pair.device, pair.limits, pair.drafter_config
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    max_batch, positions = graph_sizes(config, limits)
    plan = plan_memory(
        Wanted(
            checkpoint=pair.checkpoint,
            drafter=(pair.drafter_path, drafter) if pair.drafter_path and drafter else None,
            dtype=pair.dtype,
            device=device,
            slots=limits.kv_slots,
            scratch=scratch_slots(device),
            block_size=pair.block_size,
            max_batch=max_batch,
            positions=positions,
            max_nodes=limits.max_tree_budget,
            graphs=config.attention_backend != "sdpa",
        )
    )
    if plan is not None:
        plan.check(limits.slot_reserve + 2)
    return plan


def scratch_slots(device: torch.device) -> int:
    """KV slots beyond the allocator's."""
    return GRAPH_SCRATCH if device.type == "cuda" else 0


def graph_sizes(config: RuntimeConfig, limits: Limits) -> tuple[int, int]:
    """Most sequences of a captured round, and most positions of one, slots in reserve included."""
    positions = limits.max_seq_len + limits.slot_reserve + GRAPH_SCRATCH
    return min(config.max_concurrency, MOST_GRAPHED), positions


@dataclass(frozen=True)
class Wanted:
    """What is to be loaded. `max_batch` and `positions` as for `GraphRounds`; `graphs`: rounds may be captured."""

    checkpoint: Checkpoint
    drafter: tuple[Path, DrafterConfig] | None
    dtype: torch.dtype
    device: torch.device
    slots: int
    scratch: int
    block_size: int
    max_batch: int
    positions: int
    max_nodes: int
    graphs: bool


def plan_memory(wanted: Wanted) -> MemoryPlan | None:
    """The plan of one process; None where the files do not tell, which loading then explains."""
    try:
        weights = _numbers(wanted.checkpoint.weight_files(), wanted.checkpoint)
    except (CheckpointError, OSError):
        return None
    drafter_weights = (
        0 if wanted.drafter is None else _numbers(sorted(wanted.drafter[0].glob("*.safetensors")))
    )
    if weights is None or drafter_weights is None:
        return None
    size = wanted.dtype.itemsize
    target, drafter = geometries(wanted)
    if wanted.drafter is not None and drafter is not None:
        # Key and value projections stand in memory twice: for the block, and over all layers for committed tokens.
        drafter_weights += drafter.bytes_per_slot // size * wanted.drafter[1].hidden_size
    slots = wanted.slots + wanted.scratch
    terms = [
        Term("target weights", weights * size),
        Term("drafter weights", drafter_weights * size),
        Term("target KV slots", target.bytes_per_slot * slots, target.bytes_per_slot),
    ]
    if drafter is not None:
        terms.append(Term("drafter KV slots", drafter.bytes_per_slot * slots, drafter.bytes_per_slot))
    if wanted.device.type == "cuda":
        buffers = round_buffers(wanted) if wanted.graphs else None
        if buffers is None:
            terms.append(Term("logits of a round (estimated)", _logits(wanted)))
        else:
            terms.append(Term("buffers of captured rounds", buffers))
        terms.append(Term("reserve (assumed)", RESERVE))
    return MemoryPlan(
        tuple(term for term in terms if term.bytes),
        str(wanted.device),
        free_bytes(wanted.device),
        wanted.slots,
    )


def with_peak(plan: MemoryPlan | None, device: torch.device) -> MemoryPlan | None:
    """`plan` with what torch has taken at most so far; as it is where torch does not count."""
    if plan is None or device.type != "cuda":
        return plan
    return replace(plan, peak=torch.cuda.max_memory_allocated(device))


def free_bytes(device: torch.device) -> int | None:
    """Bytes an engine can take: on a GPU what is free and what torch keeps unused; on a CPU the most that can be.

    That is what is available, with swap and all that this process holds and may give back. None where the host does
    not tell.
    """
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    available = available_memory()
    if available is None:
        return None
    psutil = importlib.import_module("psutil")
    return available + int(psutil.Process().memory_info().rss) + int(psutil.swap_memory().free)


def geometries(wanted: Wanted) -> tuple[Geometry, Geometry | None]:
    """Shapes of the KV slots of target and drafter."""
    config = wanted.checkpoint.config
    heads = int(config["num_attention_heads"])
    target = Geometry(
        int(config["num_hidden_layers"]),
        int(config.get("num_key_value_heads") or heads),
        int(config.get("head_dim") or int(config["hidden_size"]) // heads),
        wanted.dtype,
    )
    return target, None if wanted.drafter is None else wanted.drafter[1].geometry(wanted.dtype)


def round_buffers(wanted: Wanted) -> int | None:
    """Bytes of the buffers of captured rounds; None where rounds of this model are not captured."""
    try:
        from runtime.gpu_pass import unsupported
        from runtime.gpu_round import GpuRound
    except ImportError:
        return None
    taps = wanted.drafter[1].target_layer_ids if wanted.drafter else ()
    target = TargetModel(outline(wanted.checkpoint), taps=taps, dtype=wanted.dtype, device=META)
    drafter = None
    if wanted.drafter is not None:
        with META:
            drafter = FusedDrafter(Drafter(wanted.drafter[1]).to(wanted.dtype), type(target.decoder.head))
    cache = KVCache(target.geometry, geometries(wanted)[1], wanted.slots, META, scratch=wanted.scratch)
    models = Models(target, drafter, cache, wanted.block_size)
    if unsupported(models) is not None:
        return None
    rounds = GpuRound(models, wanted.max_batch, wanted.positions, timed=False)
    return sum(held((rounds,)).values()) - sum(held((models,)).values())


@dataclass
class _Found:
    seen: set[int] = field(default_factory=set)
    storages: dict[int, int] = field(default_factory=dict)


def held(things: Iterable[Any]) -> dict[int, int]:
    """Bytes of every storage that `things` of this program hold, each once."""
    found = _Found()
    waiting = list(things)
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            found.storages[storage._cdata] = storage.nbytes()
        elif id(value) not in found.seen:
            found.seen.add(id(value))
            if isinstance(value, dict):
                waiting += value.values()
            elif isinstance(value, (list, tuple)):
                waiting += value
            elif type(value).__module__.startswith("runtime."):
                waiting += vars(value).values()
    return found.storages


def _numbers(files: list[Path], checkpoint: Checkpoint | None = None) -> int | None:
    """How many numbers the weights are, a tied head once; None for files that tell it only when they are read."""
    if checkpoint is not None and checkpoint.gguf is not None:
        return sum(math.prod(tensor.shape) for tensor in checkpoint.gguf.tensors.values())
    if checkpoint is not None and checkpoint.config.get("quantization_config"):
        return None
    tied = checkpoint is not None and bool(checkpoint.config.get("tie_word_embeddings"))
    from safetensors import SafetensorError, safe_open

    count = 0
    try:
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118, this is no mapping
                    if not (tied and name == "lm_head.weight"):
                        count += math.prod(opened.get_slice(name).get_shape())
    except (SafetensorError, OSError, RuntimeError, TypeError, ValueError):
        return None
    return count


def _logits(wanted: Wanted) -> int:
    """What logits, scores and noise of a round take that is launched from the host: float32, some copies of each."""
    vocab, horizon = int(wanted.checkpoint.config["vocab_size"]), wanted.block_size - 1
    verified = wanted.max_nodes + 1 if wanted.drafter is not None else 1
    return 4 * vocab * wanted.max_batch * (2 * verified + 4 * horizon + wanted.block_size)
