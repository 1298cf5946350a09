"""What a configuration change would do, worked out before anything is touched."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.config import RuntimeConfig, effect_of
from runtime.interface import AppliedChange, ChangePlan, ConfigRejected, FieldChange, RequestStats

NOTHING: Mapping[str, str] = {}


def plan_change(
    config: RuntimeConfig,
    change: Mapping[str, Any],
    revision: int,
    running: Sequence[RequestStats],
    budget_in_use: int | None,
    outage_s: float | None = None,
    refused: Mapping[str, str] = NOTHING,
    notes: Mapping[str, str] = NOTHING,
) -> ChangePlan:
    """The plan of `change` to `config`; raises ConfigRejected where a field or value is wrong.

    `budget_in_use` stands in for a tree budget the configuration leaves to calibration, `outage_s` is what a rebuild
    is expected to take, `refused` has the reasons why fields cannot take their new values, `notes` what else there is
    to say of a rebuild.
    """
    changed = config.changed(change)
    changes = []
    for field in change:
        old, new = getattr(config, field), getattr(changed, field)
        if old == new:
            continue
        shown = budget_in_use if field == "tree_budget" and old is None else old
        effect = "refused" if field in refused else effect_of(field, changed)
        note = refused.get(field, "" if effect == "live" else notes.get(field, "the engine is rebuilt"))
        changes.append(FieldChange(field=field, old=shown, new=new, effect=effect, note=note))
    rebuilds = any(each.effect == "rebuild" for each in changes)
    refusals = [each.note for each in changes if each.effect == "refused"]
    moves = any(each.field == "temperature" for each in changes)
    unreached = len(running) if moves else 0
    return ChangePlan(
        revision=revision,
        changes=tuple(changes),
        allowed=not refusals,
        requests_running=len(running),
        unreached=unreached,
        outage_s=outage_s if rebuilds else 0.0,
        summary="; ".join(refusals) or _summary(changes, outage_s if rebuilds else 0.0, running, unreached),
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
