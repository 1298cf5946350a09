"""What a rebuild would mean, worked out before it is ordered: whether it can be, how it goes, how long it takes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.config import EFFECTS, FIXED_UNDER_SGLANG, RuntimeConfig, effect_of
from runtime.interface import ConfigRejected
from runtime.native_layouts import late_variables

if TYPE_CHECKING:
    from runtime.engine import Engine

SPARE = 1.5
"""Memory that must be free to build an engine beside another one, as a multiple of what that one takes."""
CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Where limit and use of memory stand in a container, version 2 and 1."""


async def refusals(config: RuntimeConfig, wanted: RuntimeConfig, change: Iterable[str]) -> dict[str, str]:
    """Fields of `change` that cannot take their wanted values, as far as files tell, with the reason."""
    rebuilds = [name for name in change if effect_of(name, wanted) == "rebuild"]
    rebuilds = [name for name in rebuilds if getattr(config, name) != getattr(wanted, name)]
    if not rebuilds:
        return {}

    def look() -> dict[str, str]:
        try:
            if wanted.engine == "sglang":
                from runtime.sglang_engine import inspect_sglang

                inspect_sglang(wanted)
            else:
                from runtime.loader import inspect

                inspect(wanted)
        except ConfigRejected as refused:
            return {refused.field if refused.field in rebuilds else rebuilds[0]: str(refused)}
        return {}

    return await asyncio.to_thread(look)


def no_rebuild(holder: str) -> str:
    """Why nothing is rebuilt while the job that `holder` names runs."""
    return f"no rebuild now: {holder}; wait for it or cancel it"


def held_back(config: RuntimeConfig, wanted: RuntimeConfig, holder: str) -> dict[str, str]:
    """Fields that a running job keeps from being changed, with the reason."""
    differing = [name for name in EFFECTS if getattr(config, name) != getattr(wanted, name)]
    return {name: no_rebuild(holder) for name in differing if effect_of(name, wanted) == "rebuild"}


def builds_ahead(config: RuntimeConfig, wanted: RuntimeConfig, engine: Engine | None) -> bool:
    """Whether the engine of `wanted` is built while that of `config` goes on serving.

    So it is where both are of one model on a CPU and memory holds both; a GPU is left to one engine at a time.
    """
    if "sglang" in (config.engine, wanted.engine):
        return False
    if engine is None or not config.rebuild_ahead or engine.models.target.device.type != "cpu":
        return False
    rebuilt = [name for name in EFFECTS if EFFECTS[name] == "rebuild"]
    differing = [name for name in rebuilt if getattr(config, name) != getattr(wanted, name)]
    return differing == ["layout"] and _holds_another()


def _holds_another() -> bool:
    """Whether enough memory is free for as much again as this process and its children take."""
    try:
        psutil = importlib.import_module("psutil")
    except ImportError:
        return False
    me = psutil.Process()
    taken = 0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            taken += process.memory_info().rss
    free = psutil.virtual_memory().available
    for limit, used in CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or no limit
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return bool(free > SPARE * taken)


def outage(
    load_s: float | None,
    engine: Engine | None,
    config: RuntimeConfig,
    ahead: bool = False,
    token_s: float | None = None,
) -> float | None:
    """Expected seconds without service: finishing, loading, computing the tokens of carried requests anew.

    None where `load_s` is unknown. `ahead`: requests are served while the other engine is loaded, which counts as time
    to finish in. `token_s`: what a token took the other engine when it last did that; None: as in this one's prefill.
    """
    if load_s is None and not ahead:
        return None
    loading, patience = load_s or 0.0, config.rebuild_drain
    if ahead:
        loading, patience = 0.0, 0.0 if load_s is None else max(0.0, patience - load_s)
    running = [ticket.progress for ticket in engine.scheduler.running] if engine else []
    if engine is None or not running:
        return loading
    tokens = sum(len(each.token_ids) for each in running if each is not None)
    if token_s is None:
        token_s = engine.prefill_s / engine.prefilled_tokens if engine.prefilled_tokens else 0.0
    return patience + loading + tokens * token_s


def rebuild_notes(config: RuntimeConfig, wanted: RuntimeConfig, ahead: bool) -> dict[str, str]:
    """Field to what its rebuild means beyond the pause."""
    if config.layout == wanted.layout:
        return {}
    parts = ["the engine is built while the one before it serves" if ahead else "the engine is rebuilt"]
    late = late_variables(wanted.layout) if wanted.engine == "native" else None
    return {"layout": "; ".join([*parts, late] if late else parts)}


def load_key(config: RuntimeConfig) -> tuple[Any, ...]:
    """What a measured load time and budget hold for."""
    fields: Mapping[str, Any] = config.model_dump()
    names: tuple[str, ...] = (
        "engine",
        "model",
        "drafter",
        "layout",
        "dtype",
        "device",
        "threads",
        "linear",
        "block_size",
        "max_tree_budget",
    )
    if config.engine == "sglang":
        names += tuple(sorted(FIXED_UNDER_SGLANG))
    return tuple(fields[name] for name in names)
