"""Loads everything an engine needs and refuses what does not fit, before memory is taken where possible."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Callable, Iterator
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
from runtime.linear import LinearFactory, choose_draft_linear, choose_linear
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
    device = device_of(config)
    with _refusals():
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
    memory = check_memory(config, pair)
    try:
        with _refusals():
            target, drafter, linear = _build(config, pair, threads, progress)
    except ValueError as refused:
        raise ConfigRejected(str(refused)) from None
    cache = KVCache(
        target.pool if isinstance(target, GangTarget) else target.geometry,
        pair.drafter_config.geometry(pair.dtype) if pair.drafter_config else None,
        pair.limits.kv_slots,
        pair.device,
        scratch=scratch_slots(pair.device),
    )
    digest = pair.checkpoint.digest() if pair.checkpoint.gguf is not None else None
    models = Models(target, drafter, cache, pair.block_size, config.draft_noise)
    graphs, rounds = graph_rounds(config, models, pair.limits, progress)
    return Loaded(
        models=models,
        graphs=graphs,
        rounds=rounds,
        checkpoint=pair.checkpoint,
        tokenizer=pair.tokenizer,
        limits=pair.limits,
        drafter_path=pair.drafter_path,
        no_drafter_reason=pair.no_drafter_reason,
        linear=linear,
        threads=threads,
        target_digest=digest,
        notes=_notes(pair.drafter_path, digest),
        memory=with_peak(memory, pair.device),
        layout=target.words if isinstance(target, GangTarget) else "1 process",
    )


def _build(
    config: RuntimeConfig, pair: Pair, threads: int, progress: Progress
) -> tuple[TargetModel, FusedDrafter | None, str]:
    """Target and drafter with their weights read, and in words which linear layers they run."""
    progress(0.5, "loading the target")
    linear, words = choose_linear(config.linear, pair.dtype, pair.device)
    draft_linear, beside = choose_draft_linear(linear, pair.dtype, pair.device)
    drafter: FusedDrafter | None = None
    if pair.drafter_path is not None and pair.drafter_config is not None:
        weights = load_drafter(pair.drafter_path, pair.drafter_config, pair.dtype, pair.device)
        drafter = FusedDrafter(weights, draft_linear)
        words += beside
    target = _target(config, pair, linear, draft_linear if drafter else None, threads, progress)
    target.limit_vocabulary(pair.tokenizer.vocab_size)
    return target, drafter, words if target.fused else f"{words}, transformers modules"


def _target(
    config: RuntimeConfig,
    pair: Pair,
    linear: LinearFactory,
    draft_linear: LinearFactory | None,
    threads: int,
    progress: Progress,
) -> TargetModel:
    """The target in this process, or split over the ranks of a layout."""
    taps = pair.drafter_config.target_layer_ids if pair.drafter_config else ()
    if config.layout == "single":
        return TargetModel(
            pair.checkpoint,
            taps=taps,
            dtype=pair.dtype,
            device=pair.device,
            linear=linear,
            draft_linear=draft_linear,
        )
    progress(0.6, f"starting the ranks of {config.layout}")
    return GangTarget(
        pair.checkpoint,
        config.layout,
        slots=pair.limits.kv_slots,
        taps=taps,
        dtype=pair.dtype,
        device=pair.device,
        linear=linear,
        linear_setting=config.linear,
        draft_linear=draft_linear,
        threads=threads,
        tick=lambda: progress(0.6, f"loading the ranks of {config.layout}"),
        variables=rank_variables(config.layout),
        rounds=rank_rounds(config, pair),
    )


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """What model and drafter files refuse, as ConfigRejected with the setting that names them."""
    try:
        yield
    except DrafterMismatch as refused:
        raise ConfigRejected(str(refused), "drafter") from None
    except CheckpointError as refused:
        raise ConfigRejected(str(refused), "model") from None


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


def device_of(config: RuntimeConfig) -> torch.device:
    """The device that is configured, "auto" settled.

    Raises:
        ConfigRejected: it is not there.
    """
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(config.device)
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
