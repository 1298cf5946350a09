"""Doctor: what the runtime's host lacks and what to do about each finding; looks when opened, changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.widgets import Static

from console.dialogs import ScrollDialog
from console.formats import clean_line, clock
from console.frame import styled
from runtime.interface import Job

STYLES = {"error": "bad", "warning": "fair", "info": "", "ok": "good"}
INDENT = " " * 9


class DoctorScreen(ScrollDialog[None]):
    """The findings of the last doctor job, the worst first."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,ctrl+c", "dismiss", "close", tooltip="Close."),
        Binding("r", "again", "again", tooltip="Check once more."),
        Binding("j,down", "scroll(1)", "down", show=False, tooltip="Scroll down."),
        Binding("k,up", "scroll(-1)", "up", show=False, tooltip="Scroll up."),
        Binding("pagedown,space", "scroll(10)", "down", show=False, tooltip="Scroll down by ten."),
        Binding("pageup", "scroll(-10)", "up", show=False, tooltip="Scroll up by ten."),
    ]

    def __init__(self, jobs: Sequence[Job], start: Callable[[], object]) -> None:
        """`jobs`: those that were before; `start` starts a doctor job."""
        super().__init__()
        self._start = start
        self._old = frozenset(job.id for job in jobs)

    def compose(self) -> ComposeResult:
        findings = Static(Text("checking the runtime's host", "dim"), id="findings", markup=False)
        yield Vertical(
            Static("Doctor", id="doctor_title", classes="title", markup=False),
            VerticalScroll(findings, classes="page", can_focus=True),
            Static("j/k scroll · r checks once more · Esc closes", classes="hint", markup=False),
            classes="wide_dialog",
        )

    def on_mount(self) -> None:
        self._start()

    def show(self, jobs: Sequence[Job]) -> None:
        """Shows the latest doctor job that began since this screen was opened."""
        job = next((each for each in jobs if each.name == "doctor" and each.id not in self._old), None)
        if job is None or not job.over or not self.is_mounted:
            return
        if job.result is None:
            self.refused(f"{job.id} {job.state}: {job.text}")
            return
        title = f"Doctor: {clean_line(job.text)} (at {clock(job.ended_at_s or 0.0)})"
        self.query_one("#doctor_title", Static).update(title)
        self.query_one("#findings", Static).update(findings_text(job.result))

    def refused(self, reason: str) -> None:
        self.query_one("#findings", Static).update(styled(clean_line(reason), "bad"))

    def action_again(self) -> None:
        self._start()


def findings_text(result: Mapping[str, Any]) -> Text:
    """The findings of a doctor's result, severity in words; what needs nothing done has one line."""
    text = Text()
    for number, each in enumerate(result.get("checks", ())):
        severity = str(each["severity"])
        text.append("\n" if number else "")
        text.append_text(styled(f"{clean_line(severity, 8):<9}", STYLES.get(severity, "")))
        text.append(clean_line(each["id"], 40), "bold")
        text.append(f"  {clean_line(each['found'])}")
        if severity in ("error", "warning"):
            text.append(f"\n{INDENT}expected: {clean_line(each['expected'])}")
        if each["remedy"]:
            text.append(f"\n{INDENT}do: {clean_line(each['remedy'])}")
        if each["fix"]:
            text.append(f"\n{INDENT}'ddtree doctor --fix' on that host does it and says how to undo it")
        text.append(f"\n{INDENT}read from {clean_line(each['source'])}", "dim")
    return text
