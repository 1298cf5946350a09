"""What runs, in words and figures: a Description of a configuration and of what was loaded for it."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

from runtime.config import RuntimeConfig
from runtime.interface import Description

if TYPE_CHECKING:
    from runtime.loader import Loaded


def describe(config: RuntimeConfig, loaded: Loaded | None) -> Description:
    """What `config` asks for, with what only loading tells where something is `loaded`."""
    asked = Description(
        engine=config.engine,
        target=config.model,
        target_digest=None,
        drafter=None,
        architecture=None,
        block_size=None,
        max_tree_budget=config.max_tree_budget,
        max_seq_len=config.max_seq_len or 0,
        max_concurrency=config.max_concurrency,
        vocab_size=None,
        dtype=None,
        device=None,
        threads=None,
        linear=None,
        host=platform.node(),
        pid=os.getpid(),
        speculation="loading",
    )
    if loaded is None:
        return asked
    target, drafter, reason = loaded.models.target, loaded.models.drafter, loaded.no_drafter_reason
    return asked.model_copy(
        update={
            "target": loaded.checkpoint.name,
            "target_digest": loaded.target_digest,
            "notes": loaded.notes,
            "drafter": str(loaded.drafter_path) if loaded.drafter_path else None,
            "architecture": str(loaded.checkpoint.config["architectures"][0]),
            "block_size": drafter.config.block_size if drafter else None,
            "max_tree_budget": loaded.limits.max_tree_budget,
            "max_seq_len": loaded.limits.max_seq_len,
            "vocab_size": loaded.limits.vocab_size,
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
            "threads": loaded.threads,
            "linear": loaded.linear
            + (f"; {loaded.rounds}" if loaded.models.target.device.type == "cuda" else ""),
            "layout": loaded.layout,
            "memory": loaded.memory.words if loaded.memory else None,
            "speculation": "ready" if reason is None else f"inactive: {reason}",
        }
    )
