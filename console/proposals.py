"""A change that rebuilds the engine: its plan is shown and confirmed before it is applied."""

from __future__ import annotations

from typing import Any

from textual.app import App

from console.bridge import Bridge
from console.change_draft import shown
from console.dialogs import ConfirmDialog
from console.formats import duration
from console.messages import ChangeRefused
from runtime.interface import ChangePlan


def effect_words(plan: ChangePlan) -> str:
    """What a plan would do, for a person who decides; nothing is said twice."""
    parts = [plan.summary]
    if any(change.effect == "rebuild" for change in plan.changes) and "outage" not in plan.summary:
        pause = "unknown" if plan.outage_s is None else f"about {duration(plan.outage_s)}"
        parts.append(f"expected pause: {pause}")
    parts += [
        f"{each.field}: {each.note}" for each in plan.changes if each.note and each.note not in plan.summary
    ]
    return " ".join(f"{part.rstrip('.')}." for part in parts)


async def propose(
    app: App[Any], bridge: Bridge, change: dict[str, Any], title: str, undo: bool = False
) -> None:
    """Previews `change`; if it is allowed asks with its plan, and applies it when confirmed.

    `undo`: it reverts the last change made from here.
    """
    plan = await bridge.preview(change)
    if isinstance(plan, str):
        app.post_message(ChangeRefused(plan))
        return

    def answered(yes: bool | None) -> None:
        if yes:
            work = bridge.apply(change, plan, undo)
            app.run_worker(work, name="apply", group="change", exit_on_error=False)

    app.push_screen(ConfirmDialog(title, effect_words(plan), yes="Apply", no="Cancel"), answered)


async def undo(app: App[Any], bridge: Bridge) -> None:
    """Reverts the last change made from here: at once where it acts live, else after its plan was confirmed."""
    back = await bridge.undo()
    if back is not None:
        what = ", ".join(f"{name} back to {shown(value)}" for name, value in back.items())
        await propose(app, bridge, back, f"Undo: {what}?", undo=True)
