"""What the app does for Controls, Snapshots, Bench and the palette. A part of ConsoleApp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.text import Text

from console import messages
from console.doctor_screen import DoctorScreen
from console.formats import clean_line
from runtime.interface import Job

if TYPE_CHECKING:
    from textual.app import App

    from console.bridge import Bridge
    from console.change_draft import Draft
    from console.controls_screen import ControlsScreen
    from console.frame import View
    from console.log_book import LogBook
    from console.screens import Screens
    from console.snapshots_dialogs import SaveDialog, Unsaved
    from console.snapshots_screen import SnapshotsScreen

    Base = App[Any]
else:
    Base = object

JOBS_SHOWN = 32
VERIFY_PARAMETERS: Mapping[str, Any] = {"prompts_per_kind": 1, "max_tokens": 32}
"""A check of a minute at most; `ddtree verify` is the thorough one."""


class Operations(Base):
    """Handlers and actions that more than one screen or key uses."""

    bridge: Bridge
    book: LogBook
    view: View
    _screens: Screens
    _unsaved: Unsaved = ("", "")
    """What was typed for a snapshot that was not saved."""

    def _show(self, **changes: Any) -> None:
        raise TypeError("the app draws")

    def _notice(self, text: str, bad: bool = False) -> None:
        raise TypeError("the app tells")

    @property
    def controls(self) -> ControlsScreen:
        return self._screens["Controls"]

    @property
    def snapshots(self) -> SnapshotsScreen:
        return self._screens["Snapshots"]

    # Collected changes

    def on_controls_screen_told(self, event: ControlsScreen.Told) -> None:
        self._notice(event.text, bad=event.text.startswith("refused"))

    def on_controls_screen_edit_asked(self, event: ControlsScreen.EditAsked) -> None:
        from console.field_dialog import FieldDialog

        def chosen(draft: Draft | None) -> None:
            if draft is not None:
                self.controls.edited(draft)

        self.push_screen(FieldDialog(event.name, event.draft, self.view.config), chosen)

    def on_controls_screen_plan_asked(self, event: ControlsScreen.PlanAsked) -> None:
        work = self.bridge.orders.plan(event.change)
        self.run_worker(work, name="plan", group="plan", exclusive=True, exit_on_error=False)

    def on_plan_arrived(self, event: messages.PlanArrived) -> None:
        self.controls.planned(event.change, event.plan, event.refusal)

    def on_controls_screen_apply_asked(self, event: ControlsScreen.ApplyAsked) -> None:
        from console.change_draft import disruptive, plan_lines
        from console.dialogs import ConfirmDialog

        breaks = disruptive(event.plan)
        effect = Text("\n").join(
            Text.assemble((clean_line(line), style)) for line, style in plan_lines(event.plan)
        )
        dialog = ConfirmDialog(
            "Rebuild the engine for this change?" if breaks else "Apply this change?",
            effect,
            yes="Rebuild" if breaks else "Apply",
            no="Cancel",
            harmless=not breaks,
        )

        def answered(yes: bool | None) -> None:
            if yes:
                work = self.bridge.apply(event.change, event.plan)
                self.run_worker(work, name="apply", group="change", exit_on_error=False)

        self.push_screen(dialog, answered)

    # Snapshots

    def action_save_snapshot(self) -> None:
        from console.snapshots_dialogs import SaveDialog

        def left(unsaved: Unsaved | None) -> None:
            self._unsaved = unsaved or ("", "")

        self.push_screen(SaveDialog(self.snapshots.archive, self._unsaved), left)

    def on_save_dialog_saved(self, event: SaveDialog.Saved) -> None:
        if self._unsaved == event.typed:  # else it is another one, begun while this was saved
            self._unsaved = "", ""
        self._notice(event.words)
        self.snapshots.saved()

    # Jobs

    def on_job_changed(self, event: messages.JobChanged) -> None:
        job = event.job
        before = next((each for each in self.view.jobs if each.id == job.id), None)
        if before is not None and before.over:
            return
        others = tuple(each for each in self.view.jobs if each.id != job.id)
        jobs = sorted((job, *others), key=lambda each: -each.started_at_s)[:JOBS_SHOWN]
        self._show(jobs=tuple(jobs))
        for screen in self.screen_stack:
            if isinstance(screen, DoctorScreen):
                screen.show(self.view.jobs)
        if job.over and (before is not None or job.holder == self.bridge.author):
            self._notice(end_text(job), bad=went_wrong(job))

    def on_job_not_started(self, event: messages.JobNotStarted) -> None:
        self._notice(event.reason, bad=True)
        for screen in self.screen_stack:
            if isinstance(screen, DoctorScreen) and event.kind == "doctor":
                screen.refused(event.reason)

    def start_job(self, kind: str, parameters: Mapping[str, Any]) -> None:
        work = self.bridge.orders.start_job(kind, parameters)
        self.run_worker(work, name="job", group="job", exit_on_error=False)

    def cancel_job(self, job_id: str) -> None:
        work = self.bridge.orders.cancel_job(job_id)
        self.run_worker(work, name="job", group="job", exit_on_error=False)

    def action_verify(self) -> None:
        """Starts the check that speculation changes no token."""
        self._notice("verify: started; the result comes here and stands on the Bench screen")
        self.start_job("verify", VERIFY_PARAMETERS)

    def action_doctor(self) -> None:
        """Checks the host of the runtime, which for an attached console is the server's."""
        self.push_screen(DoctorScreen(self.view.jobs, lambda: self.start_job("doctor", {})))


def went_wrong(job: Job) -> bool:
    """Whether an end is bad news."""
    return job.state != "done" or (job.result is not None and job.result.get("passed") is False)


def end_text(job: Job) -> str:
    """A job's end in words."""
    if job.state == "done":
        return f"{job.name}: {job.text}"
    return f"{job.name} {job.state}" + ("" if job.text == job.state else f": {job.text}")
