"""Whether rounds are captured as CUDA graphs, and what that takes: in this process or on the ranks of a layout."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from runtime.admission import Limits
from runtime.config import RuntimeConfig
from runtime.fused import fusable, head_dim_of, windows_of
from runtime.gang import RoundsSpec
from runtime.gang_target import GangTarget
from runtime.memory_plan import GRAPH_SCRATCH, graph_sizes
from runtime.round import Models
from runtime.target import hf_config

if TYPE_CHECKING:
    from runtime.gpu_graphs import GraphRounds
    from runtime.loader import Pair

STEPWISE = "rounds launched from the host"


def graph_rounds(
    config: RuntimeConfig, models: Models, limits: Limits, progress: Callable[[float, str], None]
) -> tuple[GraphRounds | None, str]:
    """Rounds as CUDA graphs where the device, the model and the settings allow, and a line saying so or why not."""
    target = models.target
    why = _no_graphs(config, target.device)
    if why is not None:
        return None, why
    from runtime.gpu_device import Device, RoundDevice
    from runtime.gpu_graphs import GraphRounds
    from runtime.gpu_pass import unsupported

    most, positions = graph_sizes(config, limits)
    device: Device
    if isinstance(target, GangTarget):
        if target.rounds is None:
            return None, f"{STEPWISE} (layout {config.layout})"
        device = target.rounds
    else:
        why = unsupported(models)
        if why is not None:
            return None, f"{STEPWISE} ({why})"
        device = RoundDevice(models, most, positions)
    graphs = GraphRounds(models, device, most)
    graphs.prepare(
        lambda share: progress(0.7 + 0.25 * share, "compiling and capturing the decode rounds"),
        auto=config.mode == "auto",
        draft_noise=config.draft_noise,
    )
    return graphs, "rounds replayed as CUDA graphs"


def _no_graphs(config: RuntimeConfig, device: torch.device) -> str | None:
    """Why no model could have its rounds captured here; None if one could."""
    if device.type != "cuda":
        return STEPWISE
    if config.attention_backend == "sdpa":
        return f"{STEPWISE} (attention_backend = sdpa)"
    if importlib.util.find_spec("triton") is None:
        return f"{STEPWISE} (triton is not installed)"
    return None


def rank_rounds(config: RuntimeConfig, pair: Pair) -> RoundsSpec | None:
    """What the ranks need to play whole rounds; None where they cannot."""
    if config.layout != "tp2" or _no_graphs(config, pair.device) is not None:
        return None
    architecture, target = hf_config(pair.checkpoint)
    if not fusable(architecture, target):
        return None
    from runtime.gpu_pass import unsupported_attention
    from runtime.gpu_round import CHUNK

    if unsupported_attention(head_dim_of(target), windows_of(target)) is not None:
        return None
    most, positions = graph_sizes(config, pair.limits)
    return RoundsSpec(
        drafter=str(pair.drafter_path) if pair.drafter_config else None,
        block_size=pair.block_size,
        draft_noise=config.draft_noise,
        vocab_size=pair.tokenizer.vocab_size,
        max_batch=most,
        positions=positions,
        scratch=GRAPH_SCRATCH,
        chunk=CHUNK,
    )
