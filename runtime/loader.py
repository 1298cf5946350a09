"""Loads everything an engine needs and refuses what does not fit, before memory is taken where possible."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from runtime.admission import Limits
from runtime.config import RuntimeConfig
from runtime.drafter import DrafterConfig, DrafterMismatch, load_drafter, read_drafter_config
from runtime.fused import FusedDrafter
from runtime.gang_target import GangTarget
from runtime.graph_loading import graph_rounds, rank_rounds
from runtime.interface import ConfigRejected
from runtime.kv_cache import KVCache
from runtime.linear import choose_draft_linear, choose_linear
from runtime.memory_plan import MemoryPlan, check_memory, scratch_slots, with_peak
from runtime.models import Checkpoint, CheckpointError, open_checkpoint, shipped_drafter, unrewindable_layers
from runtime.native_layouts import rank_variables, refusal
from runtime.round import Models
from runtime.target import TargetModel
from runtime.tokenizer import ChatTokenizer, kept_tokenizer

if TYPE_CHECKING:
    from runtime.gpu_graphs import GraphRounds

DEFAULT_CONTEXT = 4096
HEAD_PADDING = 1024
"""Embedding and head are padded to a multiple of at most so many rows, with or without the config saying so."""

Progress = Callable[[float, str], None]
"""Called with the share done, 0 to 1, and what is being done."""


@dataclass(frozen=True)
class Loaded:
    """A target with its drafter and slots, ready to run."""

    models: Models
    checkpoint: Checkpoint
    tokenizer: ChatTokenizer
    limits: Limits
    drafter_path: Path | None
    no_drafter_reason: str | None
    """Why nothing can be drafted; None if it can."""
    linear: str
    threads: int
    target_digest: str | None
    """SHA-256 of a GGUF target; None for a folder, whose shards may be too large to read at each start."""
    layout: str = "1 process"
    """What is really split over which processes, in words."""
    graphs: GraphRounds | None = None
    """Rounds as CUDA graphs; None = every round is launched step by step."""
    rounds: str = "rounds launched from the host"
    """How rounds are launched and why, in words."""
    notes: tuple[str, ...] = ()
    """What an operator should know of this pair."""
    memory: MemoryPlan | None = None
    """What it takes of the device's memory; None where the files did not tell, or several processes share it."""

    def close(self) -> None:
        """Ends what runs for the target outside of this process; memory goes with the last reference."""
        self.models.target.close()


@dataclass(frozen=True)
class Pair:
    """A target and its drafter as their files describe them; no weight has been read."""

    checkpoint: Checkpoint
    tokenizer: ChatTokenizer
    limits: Limits
    device: torch.device
    dtype: torch.dtype
    drafter_path: Path | None
    drafter_config: DrafterConfig | None
    block_size: int
    """Tokens of a draft block in use, root included; 1 without a drafter."""
    no_drafter_reason: str | None


def inspect(config: RuntimeConfig, progress: Progress = lambda _share, _what: None) -> Pair:
    """What `config` names, checked as far as files tell; raises ConfigRejected with one line on what does not fit."""
    pair = read_pair(config, progress)
    checkpoint, device = pair.checkpoint, pair.device
    gpus = None if device.type == "cpu" else torch.cuda.device_count()
    why = refusal(config.layout, checkpoint.config, checkpoint.name, gpus)
    if why is None and config.layout != "single" and device.index:
        why = (
            f"layout: {config.layout} uses GPU 0 and the next one; set device = 'cuda', not {config.device!r}"
        )
    if why is not None:
        raise ConfigRejected(why, "layout")
    return pair


def read_pair(config: RuntimeConfig, progress: Progress = lambda _share, _what: None) -> Pair:
    """`inspect` without what the native engine's layouts ask; SGLang runs more architectures than this engine."""
    device = _device(config)
    try:
        checkpoint = open_checkpoint(
            config.model,
            allow_fetch=True,
            progress=lambda done, total: progress(0.05 + 0.4 * done / max(total, 1), "fetching the model"),
            any_architecture=config.engine != "native",
        )
        if config.engine == "native":
            _check_dimensions(checkpoint)
        folder, drafter, reason = _drafter(config, checkpoint)
        tokenizer = kept_tokenizer(checkpoint.path, checkpoint.load_tokenizer)
        _check_vocabularies(tokenizer, checkpoint, folder, drafter)
    except (CheckpointError, DrafterMismatch) as refused:
        raise ConfigRejected(
            str(refused), "drafter" if isinstance(refused, DrafterMismatch) else "model"
        ) from None
    return Pair(
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        limits=_limits(config, checkpoint, tokenizer, drafter),
        device=device,
        dtype=_dtype(config, device),
        drafter_path=folder,
        drafter_config=drafter,
        block_size=(config.block_size or drafter.block_size) if drafter else 1,
        no_drafter_reason=reason,
    )


def load(config: RuntimeConfig, progress: Progress = lambda _share, _what: None) -> Loaded:
    """Loads target and drafter as `config` says; raises ConfigRejected with one line on what does not fit."""
    if config.engine != "native":
        raise ConfigRejected("engine: this needs the native engine; set engine = native", "engine")
    threads = _set_threads(config)
    progress(0.05, "opening the model")
    pair = inspect(config, progress)
    checkpoint, tokenizer, limits, device, dtype = (
        pair.checkpoint,
        pair.tokenizer,
        pair.limits,
        pair.device,
        pair.dtype,
    )
    folder, drafter_config, reason = pair.drafter_path, pair.drafter_config, pair.no_drafter_reason
    memory = check_memory(config, pair)
    try:
        progress(0.5, "loading the target")
        factory, linear = choose_linear(config.linear, dtype, device)
        draft_factory, beside = choose_draft_linear(factory, dtype, device)
        drafter: FusedDrafter | None = None
        if folder is not None and drafter_config is not None:
            drafter = FusedDrafter(load_drafter(folder, drafter_config, dtype, device), draft_factory)
        taps = drafter_config.target_layer_ids if drafter_config else ()
        target: TargetModel
        if config.layout == "single":
            target = TargetModel(
                checkpoint,
                taps=taps,
                dtype=dtype,
                device=device,
                linear=factory,
                draft_linear=draft_factory if drafter_config else None,
            )
        else:
            progress(0.6, f"starting the ranks of {config.layout}")
            target = GangTarget(
                checkpoint,
                config.layout,
                slots=limits.kv_slots,
                taps=taps,
                dtype=dtype,
                device=device,
                linear=factory,
                linear_setting=config.linear,
                draft_linear=draft_factory if drafter_config else None,
                threads=threads,
                tick=lambda: progress(0.6, f"loading the ranks of {config.layout}"),
                variables=rank_variables(config.layout),
                rounds=rank_rounds(config, pair),
            )
        target.limit_vocabulary(tokenizer.vocab_size)
    except (CheckpointError, DrafterMismatch) as refused:
        raise ConfigRejected(
            str(refused), "drafter" if isinstance(refused, DrafterMismatch) else "model"
        ) from None
    except ValueError as refused:
        raise ConfigRejected(str(refused)) from None
    cache = KVCache(
        target.pool if isinstance(target, GangTarget) else target.geometry,
        drafter_config.geometry(dtype) if drafter_config else None,
        limits.kv_slots,
        device,
        scratch=scratch_slots(device),
    )
    digest = checkpoint.digest() if checkpoint.gguf is not None else None
    models = Models(target, drafter, cache, pair.block_size, config.draft_noise)
    graphs, rounds = graph_rounds(config, models, limits, progress)
    return Loaded(
        models=models,
        graphs=graphs,
        rounds=rounds,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        limits=limits,
        drafter_path=folder,
        no_drafter_reason=reason,
        linear=linear + (beside if drafter else "") + ("" if target.fused else ", transformers modules"),
        threads=threads,
        target_digest=digest,
        notes=_notes(folder, digest),
        memory=with_peak(memory, device),
        layout=target.words if isinstance(target, GangTarget) else "1 process",
    )


def _check_dimensions(checkpoint: Checkpoint) -> None:
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if checkpoint.config.get(key) is None:
            raise CheckpointError(f"{checkpoint.path}: config.json has no {key}; copy the model again")


def _notes(folder: Path | None, digest: str | None) -> tuple[str, ...]:
    """A line where the drafter says that it was trained for a target of other bytes."""
    if folder is None or digest is None:
        return ()
    ours = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("ddtree")
    trained = ours.get("target_digest") if isinstance(ours, dict) else None
    if trained == digest or not isinstance(trained, str):
        return ()
    return (f"the drafter was trained for a target file {trained[:12]}..., this one is {digest[:12]}...",)


def _set_threads(config: RuntimeConfig) -> int:
    threads = config.threads or physical_cores()
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    return threads


def physical_cores() -> int:
    """Physical cores this process may use; hyperthreads share the arithmetic units, so they are not counted."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        psutil = importlib.import_module("psutil")
        return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))
    except ImportError:
        return max(1, allowed)


def _device(config: RuntimeConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(config.device)
    except RuntimeError:
        raise ConfigRejected(
            f"device: {config.device!r} is no device; use cpu, cuda or cuda:N", "device"
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigRejected(f"device: {config.device!r} is not supported; use cpu, cuda or cuda:N", "device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise ConfigRejected(
            f"device: {config.device!r} is not there, torch sees {found} CUDA devices", "device"
        )
    return device


def _dtype(config: RuntimeConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if config.dtype == "float32" else torch.bfloat16


def _drafter(
    config: RuntimeConfig, checkpoint: Checkpoint
) -> tuple[Path | None, DrafterConfig | None, str | None]:
    """Folder and configuration of the drafter, checked against the target; or the reason why there is none."""
    stateful = unrewindable_layers(checkpoint.config)
    if stateful:
        kinds = ", ".join(stateful)
        reason = f"target {checkpoint.name} has layers whose state cannot be rewound ({kinds})"
        if config.drafter not in (None, "none"):
            raise ConfigRejected(
                f"drafter: {reason}, so nothing may be drafted for it; use drafter = 'none'", "drafter"
            )
        return None, None, reason
    if config.drafter == "none":
        return None, None, "no drafter, as configured (drafter = 'none')"
    folder = Path(config.drafter).expanduser() if config.drafter else shipped_drafter(checkpoint.name)
    if folder is None:
        return None, None, f"no drafter is shipped for {checkpoint.name}; give one with --drafter"
    try:
        drafter = read_drafter_config(folder)
    except DrafterMismatch as refused:
        raise DrafterMismatch(f"{refused} (asked for with target {checkpoint.name})") from None
    drafter.check_target(checkpoint.config, str(folder), checkpoint.name)
    if config.block_size is not None and config.block_size > drafter.block_size:
        raise ConfigRejected(
            f"block_size: {config.block_size} is above the {drafter.block_size} the drafter {folder} was trained "
            f"with; use 1 to {drafter.block_size}",
            "block_size",
        )
    if config.block_size == 1:
        return folder, drafter, "block_size 1 leaves no draft position"
    return folder, drafter, None


def _check_vocabularies(
    tokenizer: ChatTokenizer, checkpoint: Checkpoint, folder: Path | None, drafter: DrafterConfig | None
) -> None:
    """Refuses a drafter of another vocabulary: by its size, padding apart, or by a tokenizer in its folder."""
    if folder is None or drafter is None:
        return
    what = f"drafter {folder} does not fit target {checkpoint.name}"
    remedy = "choose the drafter trained for this target"
    mine, rows = drafter.vocab_size, int(checkpoint.config["vocab_size"])
    if mine != rows and (min(mine, rows) < tokenizer.vocab_size or abs(mine - rows) >= HEAD_PADDING):
        raise DrafterMismatch(
            f"{what}: vocab_size is {mine} in the drafter and {rows} in the target; {remedy}"
        )
    if not (folder / "tokenizer.json").is_file():
        return
    theirs = kept_tokenizer(folder, partial(ChatTokenizer.from_folder, folder))
    sample = "The quick brown fox: def f(x):\n    return 12345 * x  # é 中文 🙂"
    if (
        theirs.vocab_size != tokenizer.vocab_size
        or any(theirs.id_to_bytes(i) != tokenizer.id_to_bytes(i) for i in range(tokenizer.vocab_size))
        or theirs.encode(sample) != tokenizer.encode(sample)
    ):
        raise DrafterMismatch(
            f"{what}: its tokenizer ({theirs.vocab_size} tokens) is not the target's "
            f"({tokenizer.vocab_size} tokens); {remedy}"
        )


def _limits(
    config: RuntimeConfig, checkpoint: Checkpoint, tokenizer: ChatTokenizer, drafter: DrafterConfig | None
) -> Limits:
    own = int(checkpoint.config.get("max_position_embeddings") or DEFAULT_CONTEXT)
    if config.max_seq_len is not None and config.max_seq_len > own:
        raise ConfigRejected(
            f"max_seq_len: {config.max_seq_len} is above the {own} positions {checkpoint.name} was trained for",
            "max_seq_len",
        )
    context = config.max_seq_len or min(own, DEFAULT_CONTEXT)
    reserve = max(config.max_tree_budget + 1, drafter.block_size if drafter else 1)
    return Limits(
        max_seq_len=context,
        max_tree_budget=config.max_tree_budget,
        kv_slots=config.kv_slots or full_contexts(config.max_concurrency) * (context + reserve),
        slot_reserve=reserve,
        vocab_size=min(tokenizer.vocab_size, int(checkpoint.config["vocab_size"])),
        eos_token_ids=frozenset(checkpoint.eos_token_ids),
    )


def full_contexts(max_concurrency: int) -> int:
    """How many contexts of full length the KV slots hold by default; requests beyond that wait for slots."""
    return max(2, (max_concurrency + 1) // 2)
