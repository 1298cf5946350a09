"""What a configuration change would do, worked out before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.config import EFFECTS, RuntimeConfig
from runtime.interface import ChangePlan, FieldChange, RequestStats


def plan_change(
    config: RuntimeConfig,
    change: Mapping[str, Any],
    revision: int,
    running: Sequence[RequestStats],
    budget_in_use: int | None,
) -> ChangePlan:
    """The plan of `change` to `config`; raises ConfigRejected where a field or value is wrong.

    `budget_in_use` stands in for a tree budget the configuration leaves to calibration.
    """
    changed = config.changed(change)
    changes = []
    for field in change:
        old, new = getattr(config, field), getattr(changed, field)
        if old == new:
            continue
        shown = budget_in_use if field == "tree_budget" and old is None else old
        effect = EFFECTS[field]
        note = "" if effect == "live" else "takes effect at the next start"
        changes.append(FieldChange(field=field, old=shown, new=new, effect=effect, note=note))
    rebuilds = [each.field for each in changes if each.effect == "rebuild"]
    moves = any(each.field == "temperature" for each in changes)
    unreached = len(running) if moves else 0
    return ChangePlan(
        revision=revision,
        changes=tuple(changes),
        allowed=not rebuilds,
        requests_running=len(running),
        unreached=unreached,
        outage_s=None if rebuilds else 0.0,
        summary=_summary(changes, rebuilds, unreached),
    )


def undo_note(plan: ChangePlan, author: str) -> str:
    """Who changed what, for those whose change came too late."""
    return f"{author} set " + ", ".join(f"{each.field} = {each.new}" for each in plan.changes)


def _summary(changes: Sequence[FieldChange], rebuilds: Sequence[str], unreached: int) -> str:
    if not changes:
        return "nothing to change"
    if rebuilds:
        names = ", ".join(rebuilds)
        return f"{names}: cannot change while the engine runs; restart ddtree with the value wanted"
    text = ", ".join(f"{each.field} {each.old} -> {each.new}" for each in changes)
    if unreached:
        text += f"; {unreached} running request{'s' if unreached > 1 else ''} keep the temperature they began with"
    return text
