"""What happened to the configuration and to the line to the runtime, in words of one line."""

from __future__ import annotations

from console.formats import clean_line, clock
from runtime.interface import AppliedChange, ChangePlan, ChangeReport, RuntimeFault

ANSWER_S = 5.0
"""A status that takes longer counts as no answer."""


def refused(plan: ChangePlan) -> str:
    """Why a plan is not applied from a key; empty if it may be."""
    if not plan.allowed:
        notes = [change.note for change in plan.changes if change.effect == "refused" and change.note]
        return "; ".join(notes) or plan.summary
    rebuilds = [change.field for change in plan.changes if change.effect == "rebuild"]
    if rebuilds:
        return f"{', '.join(rebuilds)} needs a rebuild of the engine: not done on one key"
    if not any(change.old != change.new for change in plan.changes):
        return "no change: " + (plan.summary or "that is what is set")
    return ""


def done_text(plan: ChangePlan, report: ChangeReport, undo: bool) -> str:
    """One line on an applied change."""
    parts = [f"{c.field} {_value(c.old)} -> {_value(c.new)}" for c in report.applied]
    text = ("undone: " if undo else "") + (", ".join(parts) or report.summary)
    if report.outage_s is not None and any(change.effect == "rebuild" for change in report.applied):
        carried = f"{report.carried} request{'' if report.carried == 1 else 's'} carried over"
        text += f"; {report.outage_s:.1f} s without service, {carried}"
    if any(change.field == "temperature" for change in report.applied):
        text += "; acts on requests admitted from here on"
        if plan.unreached:
            text += f", {plan.unreached} running keep theirs"
    return f"{text}; {report.kept}" if report.kept and parts else text


def others_text(change: AppliedChange) -> str:
    """One line on a change that somebody else made."""
    parts = ", ".join(f"{each.field} {_value(each.old)} -> {_value(each.new)}" for each in change.changes)
    return f"{change.author} set {parts} at {clock(change.time_s)}"


def status_problem(error: BaseException) -> str:
    """One line on why there is no status; who lost its server says so itself."""
    text = describe_error(error)
    return text if text.startswith("lost since ") else f"no status from the runtime: {text}"


def _value(value: object) -> str:
    if value is None:
        return "auto"
    return f"{value:g}" if isinstance(value, float) else str(value)


def describe_error(error: BaseException) -> str:
    """One line on an exception; a runtime's own faults speak for themselves."""
    text = clean_line(str(error)) or "no reason given"
    if isinstance(error, RuntimeFault):
        return text
    if isinstance(error, TimeoutError):
        return f"no answer within {ANSWER_S:.0f} s"
    return f"{type(error).__name__}: {text}"
