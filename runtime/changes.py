"""What a configuration change would mean, worked out before anything is touched: the plan, and how a rebuild goes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.config import EFFECTS, FIXED_UNDER_SGLANG, RuntimeConfig, effect_of
from runtime.interface import AppliedChange, ChangePlan, ConfigRejected, FieldChange, RequestStats
from runtime.native_layouts import late_variables

if TYPE_CHECKING:
    from runtime.engine import Engine

NOTHING: Mapping[str, str] = {}
SPARE = 1.5
"""Memory that must be free to build an engine beside another one, as a multiple of what that one takes."""
CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", ""),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Where limit and use of memory stand in a container, version 2 and 1, and how its `memory.stat` names totals."""


def plan_change(
    config: RuntimeConfig,
    change: Mapping[str, Any],
    revision: int,
    running: Sequence[RequestStats],
    budget_in_use: int | None,
    outage_s: float | None = None,
    refused: Mapping[str, str] = NOTHING,
    notes: Mapping[str, str] = NOTHING,
    captured: Mapping[str, str] = NOTHING,
) -> ChangePlan:
    """The plan of `change` to `config`; raises ConfigRejected where a field or value is wrong.

    `budget_in_use` stands in for a tree budget the configuration leaves to calibration, `outage_s` is what a rebuild
    is expected to take, `refused` has the reasons why fields cannot take their new values, `notes` what else there is
    to say of a rebuild, `captured` the fields that need none for once, with what that costs.
    """
    changed = config.changed(change)
    changes = []
    for field in change:
        old, new = getattr(config, field), getattr(changed, field)
        if old == new:
            continue
        shown = budget_in_use if field == "tree_budget" and old is None else old
        effect = "refused" if field in refused else "live" if field in captured else effect_of(field, changed)
        plain = captured.get(field, "") if effect == "live" else notes.get(field, "the engine is rebuilt")
        note = refused.get(field, plain)
        changes.append(FieldChange(field=field, old=shown, new=new, effect=effect, note=note))
    rebuilds = any(each.effect == "rebuild" for each in changes)
    reasons = [each.note for each in changes if each.effect == "refused"]
    moves = any(each.field == "temperature" for each in changes)
    unreached = len(running) if moves else 0
    return ChangePlan(
        revision=revision,
        changes=tuple(changes),
        allowed=not reasons,
        requests_running=len(running),
        unreached=unreached,
        outage_s=outage_s if rebuilds else 0.0,
        summary="; ".join(reasons) or _summary(changes, outage_s if rebuilds else 0.0, running, unreached),
    )


HISTORY_KEPT = 16


def recorded(
    history: tuple[AppliedChange, ...], plan: ChangePlan, revision: int, author: str
) -> tuple[AppliedChange, ...]:
    """`history` with the change of `plan`, which led to `revision`, as its last entry."""
    entry = AppliedChange(revision=revision, author=author, time_s=time.time(), changes=plan.changes)
    return (*history, entry)[-HISTORY_KEPT:]


def described(change: AppliedChange) -> str:
    """Who changed what and when, in one line."""
    what = ", ".join(f"{each.field} {_shown(each.old)} -> {_shown(each.new)}" for each in change.changes)
    return f"{change.author} set {what} at {time.strftime('%H:%M:%S', time.localtime(change.time_s))}"


def reverting(history: Sequence[AppliedChange], revision: int | None) -> AppliedChange | str:
    """The change that led to `revision` (None: the last one) if it can be undone, else why not."""
    if not history:
        return "nothing was changed since the server started"
    found = next((each for each in history if each.revision == revision), None)
    chosen = history[-1] if revision is None else found
    if chosen is None:
        kept = ", ".join(str(each.revision) for each in history)
        return f"no change led to revision {revision}; those that can be undone led to {kept}"
    fields = {each.field for each in chosen.changes}
    for later in history:
        again = fields & {each.field for each in later.changes}
        if later.revision > chosen.revision and again:
            return f"{', '.join(sorted(again))} was changed again since: {described(later)}"
    return chosen


def check_revision(given: int, current: int, history: Sequence[AppliedChange]) -> None:
    """Raises ConfigRejected, field "revision", for a change that was made for another revision than the current one."""
    if given != current:
        since = f" ({described(history[-1])})" if history else ""
        raise ConfigRejected(
            f"revision: the change was made for revision {given}, the configuration is at {current}{since}; "
            "look at it and apply again",
            "revision",
        )


def _summary(
    changes: Sequence[FieldChange], outage_s: float | None, running: Sequence[RequestStats], unreached: int
) -> str:
    if not changes:
        return "nothing to change"
    text = ", ".join(f"{each.field} {_shown(each.old)} -> {_shown(each.new)}" for each in changes)
    text += "".join(f"; live: {each.note}" for each in changes if each.effect == "live" and each.note)
    if unreached:
        text += f"; {unreached} running request{'s' if unreached > 1 else ''} keep the temperature they began with"
    if outage_s is None or outage_s > 0.0:
        text += "; the engine is rebuilt, expected outage " + (
            "unknown" if outage_s is None else f"{outage_s:.1f} s"
        )
        if running:
            text += (
                f"; {len(running)} request{'s' if len(running) > 1 else ''} in flight: accepted text is kept"
            )
    return text


def _shown(value: Any) -> str:
    return "auto" if value is None else str(value)


async def refusals(config: RuntimeConfig, wanted: RuntimeConfig, change: Iterable[str]) -> dict[str, str]:
    """Fields of `change`, those that are rebuilt, that cannot take their wanted values, with the reason."""
    rebuilds = [name for name in change if effect_of(name, wanted) == "rebuild"]
    rebuilds = [name for name in rebuilds if getattr(config, name) != getattr(wanted, name)]
    if not rebuilds:
        return {}

    def look() -> dict[str, str]:
        try:
            if wanted.engine == "sglang":
                from runtime.sglang_arguments import inspect_sglang

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


def held_back(
    config: RuntimeConfig, wanted: RuntimeConfig, holder: str, captured: Mapping[str, str] = NOTHING
) -> dict[str, str]:
    """Fields that a running job keeps from being changed, with the reason; those of `captured` need no rebuild."""
    differing = [name for name in EFFECTS if getattr(config, name) != getattr(wanted, name)]
    rebuilt = [name for name in differing if name not in captured and effect_of(name, wanted) == "rebuild"]
    return dict.fromkeys(rebuilt, no_rebuild(holder))


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
    free = available_memory()
    if free is None:
        return False
    psutil = importlib.import_module("psutil")
    me = psutil.Process()
    taken = 0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            taken += process.memory_info().rss
    return free > SPARE * taken


def available_memory() -> int | None:
    """Bytes that the host, or the container this runs in, can still give; None where nothing tells."""
    try:
        psutil = importlib.import_module("psutil")
    except ImportError:
        return None
    free = int(psutil.virtual_memory().available)
    for folder, limit, used, prefix in CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or no limit
            room = int((folder / limit).read_text()) - int((folder / used).read_text())
            free = min(free, room + _file_pages(folder, prefix))
    return free


def _file_pages(folder: Path, prefix: str) -> int:
    """Bytes of files that a container's use counts and its kernel gives up when they are wanted; 0 where it does not
    tell."""
    with contextlib.suppress(OSError, ValueError):
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    return 0


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
