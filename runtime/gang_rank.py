"""One rank of a gang: a child process that holds its share of the target and runs the forward passes it is sent.

The module is preloaded in the process from which ranks are forked, with torch and transformers, so a rank starts at
once. A rank ends with its parent, at the first fault, and when its pipe closes.
"""

from __future__ import annotations

import os
import re
import sys
import zlib
from datetime import timedelta
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

# The process that ranks are forked from must not initialise CUDA: no fork could use it then.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.distributed.configuration_utils import DistributedConfig

from runtime.fused import head_dim_of
from runtime.gang import RankSpec
from runtime.gang_step import ANSWER, ERROR, PING, PONG, READY, step_of, to_bytes, unpack
from runtime.kv_cache import Geometry, Pool
from runtime.linear import choose_linear, replace_linears
from runtime.models import SUPPORTED_ARCHITECTURES, CheckpointError, open_checkpoint
from runtime.native_layouts import RANKS, split_plan, splits_attention, stage_layers
from runtime.target import hf_config

if TYPE_CHECKING:
    from runtime.gang_shard import Shard

_CLASSES = {name: getattr(transformers, name) for name in SUPPORTED_ARCHITECTURES}
"""Imported once, before ranks are forked."""
BACKSTOP = timedelta(minutes=30)
"""A collective's own limit; the parent's deadlines are far shorter."""


def rank_main(spec: RankSpec, pipe: connection.Connection) -> None:
    """What a rank does from when it has imported this module to its end."""
    torch.set_num_threads(spec.threads)
    try:
        stage = _stage(spec)
        pipe.send_bytes(READY + f"{stage.held} {stage.whole}".encode())
        _serve(stage, pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the parent has closed the pipe: there is nobody to tell
    except BaseException as failure:  # told to the parent, which ends the whole gang
        import traceback

        traceback.print_exc()
        with_text = f"{type(failure).__name__}: {failure}".splitlines()[0]
        pipe.send_bytes(ERROR + with_text.encode(errors="replace"))
        sys.stderr.flush()
        os._exit(1)


def _stage(spec: RankSpec) -> Stage | Shard:
    """This rank's share of the target, after it has met its peers."""
    device = torch.device(spec.device)
    if device.type == "cuda":
        os.environ["LOCAL_RANK"] = str(spec.rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{spec.folder}/rendezvous",
        rank=spec.rank,
        world_size=RANKS,
        timeout=BACKSTOP,
        # On a GPU ranks meet now, while they load, and not in their first pass, whose deadline is short.
        device_id=device if device.type == "cuda" else None,
    )
    if spec.rounds is None:
        return Stage(spec)
    from runtime.gang_shard import Shard  # Triton is not on every machine

    return Shard(spec, open_checkpoint(spec.model), device)


def _serve(stage: Stage | Shard, pipe: connection.Connection) -> None:
    while True:
        message = pipe.recv_bytes()
        if int.from_bytes(message[:8], sys.byteorder) == PING:
            pipe.send_bytes(PONG)
            continue
        answer = stage.run(message)
        if answer is not None:
            pipe.send_bytes(ANSWER + answer)


class Stage:
    """This rank's share of the target, loaded by transformers, with its KV slots.

    The same forward serves every layout: under `tp2`, `ep2` and `tp2ep2` transformers' modules do the collectives and
    rank 0 answers; under `pp2` activations and tapped features go to the last stage, which answers.
    """

    def __init__(self, spec: RankSpec) -> None:
        self.rank = spec.rank
        self.device = torch.device(spec.device)
        self.dtype = getattr(torch, spec.dtype)
        self.taps = spec.taps
        checkpoint = open_checkpoint(spec.model)
        fields = checkpoint.config
        architecture, config = hf_config(checkpoint)
        self.pipeline = spec.layout == "pp2"
        layers = int(fields["num_hidden_layers"])
        self.layers = stage_layers(spec.rank, layers) if self.pipeline else range(layers)
        model = self._load(spec.layout, checkpoint, architecture, config)
        self.held = sum(_local(each).numel() for each in model.model.parameters())
        kv_heads = int(config.num_key_value_heads)
        if splits_attention(spec.layout, fields):
            kv_heads //= RANKS
        self.model = model.model
        self.whole = sum(each.numel() for each in self.model.parameters()) if not self.pipeline else self.held
        geometry = Geometry(len(self.layers), kv_heads, head_dim_of(config), self.dtype)
        self.pool = Pool(geometry, spec.slots, self.device)
        self.width = int(config.hidden_size)
        if self.pipeline:
            replace_linears(self.model, choose_linear(spec.linear, self.dtype, self.device)[0])
        self._tapped: dict[int, Tensor] = {}
        self._shift_and_tap()

    def _load(self, layout: str, checkpoint: Any, architecture: str, config: Any) -> Any:
        """The model with this rank's weights; the head is left to the parent, which has it whole."""
        kind = _CLASSES[architecture]
        with torch.device("meta"):
            model = kind(config)
        if self.pipeline:
            distributed, axis = DistributedConfig(pp_size=RANKS), "pp"
        else:
            tensor = dict(getattr(config, "base_model_tp_plan", None) or {})
            expert = dict(getattr(config, "base_model_ep_plan", None) or {})
            plan = split_plan(layout, checkpoint.config, tensor, expert)
            plan = {name: rule for name, rule in plan.items() if name in _places(model)}
            distributed, axis = DistributedConfig(tp_size=RANKS, tp_plan=plan), "tp"
        mesh = init_device_mesh(self.device.type, (RANKS,), mesh_dim_names=(axis,))
        model = kind.maybe_distribute_model(model, distributed, mesh)
        model.lm_head = None
        if self.pipeline and self.rank:
            model.model.embed_tokens = None
        self._fill(model, checkpoint.load_state(self._wanted))
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(self.device)
        return model.eval().requires_grad_(False)

    def _fill(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Puts weights in the places of the model's placeholders, of split ones this rank's part."""
        for path, module in model.named_modules():
            for name, empty in list(module.named_parameters(recurse=False)):
                whole = state.pop(f"{path}.{name}")
                if whole.shape != empty.shape:
                    raise CheckpointError(
                        f"weight {path}.{name} is {tuple(whole.shape)}, not {tuple(empty.shape)}"
                    )
                value = whole.to(self.device, self.dtype)
                if isinstance(empty, DTensor):
                    part = distribute_tensor(value, empty.device_mesh, empty.placements, src_data_rank=None)
                    # A part is a view; a copy lets the whole go.
                    value = DTensor.from_local(
                        part.to_local().clone(),
                        empty.device_mesh,
                        empty.placements,
                        run_check=False,
                        shape=empty.shape,
                        stride=empty.stride(),
                    )
                module.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def _wanted(self, name: str) -> bool:
        if name.startswith("lm_head."):
            return False
        if not name.startswith("model.layers."):
            return True
        return int(name.split(".")[2]) in self.layers

    def _shift_and_tap(self) -> None:
        """Numbers this rank's layers from 0 for its slots, and reads the tapped ones where they run."""
        for index in self.layers:
            layer = self.model.layers[index]
            layer.self_attn.layer_idx = index - self.layers.start
            if index in self.taps:
                layer.register_forward_hook(self._keep(index))

    def _keep(self, index: int) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._tapped[index] = (output[0] if isinstance(output, tuple) else output)[0]

        return keep

    @torch.inference_mode()
    def run(self, message: bytes) -> bytes | None:
        """One pass; hidden states and tapped features `[rows, (1 + taps) * hidden]` where this rank answers."""
        packed = unpack(message, self.device)
        step = step_of(packed, [self.pool])
        self._tapped.clear()
        given: dict[str, Any] = {"input_ids": packed.token_ids.unsqueeze(0)}
        before: list[Tensor] = []
        if self.pipeline and self.rank:
            self._check_stamp(message)
            early = [tap for tap in self.taps if tap < self.layers.start]
            received = torch.empty(
                packed.token_ids.shape[0], (1 + len(early)) * self.width, dtype=self.dtype, device=self.device
            )
            dist.recv(received, src=self.rank - 1)
            hidden, *before = received.split(self.width, dim=-1)
            given = {"inputs_embeds": hidden.unsqueeze(0)}
            self._tapped.update(zip(early, before, strict=True))
        out = self.model(position_ids=packed.positions.unsqueeze(0), use_cache=False, step=step, **given)
        hidden = out.last_hidden_state[0]
        taps = [self._tapped[tap] for tap in self.taps if tap in self._tapped]
        if self.pipeline and self.rank < RANKS - 1:
            ordered = [self._tapped[tap] for tap in self.taps if tap < self.layers.stop]
            dist.send(self._stamp(message), dst=self.rank + 1)
            dist.send(torch.cat([hidden, *ordered], dim=-1).contiguous(), dst=self.rank + 1)
            return None
        if not self.pipeline and self.rank:
            return None
        return to_bytes(torch.cat([hidden, *taps], dim=-1))

    def _stamp(self, message: bytes) -> Tensor:
        """What tells one pass from another, before its activations: a receiver takes fewer than it asked for."""
        return torch.tensor([zlib.crc32(message)], device=self.device)

    def _check_stamp(self, message: bytes) -> None:
        theirs = torch.zeros(1, dtype=torch.int64, device=self.device)
        dist.recv(theirs, src=self.rank - 1)
        if not torch.equal(theirs, self._stamp(message)):
            raise RuntimeError(f"rank {self.rank - 1} runs another pass than rank {self.rank}")


def _places(model: nn.Module) -> set[str]:
    """Names of all modules and parameters as plans write them: `*` for a layer's number."""
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    return {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names}


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
