"""A rank that holds its share of a dense target in fused layers, and plays whole rounds as CUDA graphs.

Every rank has its heads and its columns of the MLPs, and all of embedding, head and drafter. So all ranks draft the
same block, build the same tree and choose the same tokens from the same sums: but for these sums nothing has to be told
to anybody, and a round with its collectives is one graph (Megatron-LM's split of a layer, two sums each).
"""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.drafter import load_drafter, read_drafter_config
from runtime.fused import FusedDecoder, FusedDrafter, head_dim_of
from runtime.gang import RankSpec, RoundsSpec
from runtime.gang_rounds import RankRounds
from runtime.gang_step import FORWARD, step_of, to_bytes, unpack
from runtime.gpu_device import RoundDevice
from runtime.gpu_pass import unsupported
from runtime.kv_cache import Geometry, KVCache, Pool
from runtime.linear import PlainLinear, ReducedLinear
from runtime.models import Checkpoint
from runtime.native_layouts import RANKS, splits_attention
from runtime.round import Models
from runtime.target import TargetModel, hf_config, rotation_of, skeleton


class ShardTarget(TargetModel):
    """One rank's part of a dense target."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        rank: int,
        *,
        taps: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.device, self.dtype = device, dtype
        architecture, whole = hf_config(checkpoint)
        self.vocab_size = int(whole.vocab_size)
        heads = splits_attention("tp2", checkpoint.config)
        self.config = _share(whole) if heads else whole
        state = checkpoint.load_state()
        self.whole = sum(value.numel() for name, value in state.items() if not name.startswith("lm_head."))
        mine = {name: _part(name, value, rank, heads).to(device, dtype) for name, value in state.items()}
        self.held = sum(value.numel() for name, value in mine.items() if not name.startswith("lm_head."))
        rotary = type(skeleton(architecture, whole).model.rotary_emb)(config=whole).to(device)
        decoder = FusedDecoder(mine, self.config, rotation_of(rotary), PlainLinear, taps)
        layers = decoder.stack.layers
        for index, layer in enumerate(layers):
            down = _reduced(layer.down)
            layers[index] = replace(layer, o=_reduced(layer.o) if heads else layer.o, down=down)
        self.decoder = decoder
        self._draft_head = self._greedy_head = None


class Shard:
    """A rank's part of the target with all of the drafter, their slots, and what plays rounds over them."""

    def __init__(self, spec: RankSpec, checkpoint: Checkpoint, device: torch.device) -> None:
        rounds, dtype = spec.rounds, getattr(torch, spec.dtype)
        assert rounds is not None
        target = ShardTarget(checkpoint, spec.rank, taps=spec.taps, dtype=dtype, device=device)
        target.limit_vocabulary(rounds.vocab_size)
        drafter, geometry = _drafter(rounds, dtype, device)
        cache = KVCache(target.geometry, geometry, spec.slots, device, scratch=rounds.scratch)
        self.held, self.whole = target.held, target.whole
        self._target = target
        self.pools: list[Pool] = [pool for pool in (cache.target, cache.drafter) if pool is not None]
        models = Models(target, drafter, cache, rounds.block_size, rounds.draft_noise)
        why = unsupported(models)
        if why is not None:
            raise ValueError(f"rounds cannot be captured: {why}")
        self._device = device
        own = RoundDevice(models, rounds.max_batch, rounds.positions, rounds.chunk)
        self._rounds = RankRounds(own, self.pools, rounds.max_batch, device.type == "cuda")
        self._answers = spec.rank == 0

    @torch.inference_mode()
    def run(self, message: bytes) -> bytes | None:
        """As `Stage.run`; also what `gang_rounds.GangDevice` sends."""
        if int.from_bytes(message[:8], sys.byteorder) != FORWARD:
            answer = self._rounds.run(message)
            return answer if self._answers else None
        packed = unpack(message, self._device)
        step = step_of(packed, self.pools)
        out = self._target.forward(packed.token_ids, packed.positions, step)
        if not self._answers:
            return None
        parts = [out.hidden] if out.features is None else [out.hidden, out.features]
        return to_bytes(torch.cat(parts, dim=-1))


def _drafter(
    rounds: RoundsSpec, dtype: torch.dtype, device: torch.device
) -> tuple[FusedDrafter | None, Geometry | None]:
    if rounds.drafter is None:
        return None, None
    folder = Path(rounds.drafter)
    config = read_drafter_config(folder)
    drafter = FusedDrafter(load_drafter(folder, config, dtype, device), PlainLinear)
    return drafter, config.geometry(dtype)


def _share(config: Any) -> Any:
    """The configuration of one rank's layers: its share of the heads."""
    mine = copy.copy(config)
    mine.head_dim = head_dim_of(config)
    mine.num_attention_heads = int(config.num_attention_heads) // RANKS
    mine.num_key_value_heads = int(config.num_key_value_heads) // RANKS
    return mine


def _part(name: str, value: Tensor, rank: int, heads: bool) -> Tensor:
    """This rank's part of a weight; rows of what a layer reads from, columns of what it adds to the sum."""
    kind = name.split(".")[-2]
    attention = ("q_proj", "k_proj", "v_proj", "o_proj") if heads else ()
    if kind not in ("gate_proj", "up_proj", "down_proj", *attention):
        return value
    if kind in ("o_proj", "down_proj"):
        return value if value.dim() == 1 else value.chunk(RANKS, 1)[rank].contiguous()
    return value.chunk(RANKS, 0)[rank].contiguous()


def _reduced(linear: Any) -> ReducedLinear:
    return ReducedLinear(linear.weight, linear.bias)
