"""Controls: every field of the configuration; edits collect into one change, shown as a plan before it is applied."""

from __future__ import annotations

from typing import Any, ClassVar

from rich.text import Text
from textual import on
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widget import Widget
from textual.widgets import DataTable

from console.change_draft import Draft, FieldRow, about, plan_lines, shown
from console.filtering import FilterLine, wanted
from console.formats import NA, clean_line, percent
from console.frame import ConsoleScreen, Panel, View, styled
from console.lists import List
from runtime.config import range_of
from runtime.interface import ChangePlan

COLUMNS = ("", "field", "value", "acts", "from")
WIDE = 110
"""Columns of the terminal from which on the list says what each field takes."""


class ControlsScreen(ConsoleScreen):
    NAME = "Controls"
    CHANGING = ("edit", "apply_draft", "drop", "drop_all", "last_good")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,e", "edit", "edit", tooltip="Edit the field; edits collect until they are applied."),
        Binding(
            "a", "apply_draft", "apply", tooltip="Apply all edits as one change, after its plan is shown."
        ),
        Binding("backspace", "drop", "drop", tooltip="Drop the edit of this field."),
        Binding("D", "drop_all", "drop all", show=False, tooltip="Drop all edits."),
        Binding("L", "last_good", "last good", tooltip="Collect what leads to the last good configuration."),
        Binding("slash", "filter", "filter", tooltip="Filter the fields."),
    ]

    class EditAsked(Message):
        """A field is to be edited beside the edits in `draft`."""

        def __init__(self, name: str, draft: Draft) -> None:
            super().__init__()
            self.name = name
            self.draft = draft

    class PlanAsked(Message):
        """The edits changed; what would they do?"""

        def __init__(self, change: dict[str, Any]) -> None:
            super().__init__()
            self.change = change

    class ApplyAsked(Message):
        def __init__(self, change: dict[str, Any], plan: ChangePlan) -> None:
            super().__init__()
            self.change = change
            self.plan = plan

    class Told(Message):
        """Something to say in one line."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self, tabs: tuple[tuple[str, str], ...]) -> None:
        super().__init__(tabs)
        self.draft = Draft()
        self.plan: ChangePlan | None = None
        self.refusal = ""
        """Why there is no plan."""
        self._view = View()
        self._words = ""
        self._drawn: tuple[object, ...] = ()
        self._revision: int | None = None

    def body(self) -> list[Widget]:
        return [
            FilterLine(self._filter, lambda: self.query_one(List)),
            List(id="fields", columns=COLUMNS),
            Panel("field", id="field"),
            Panel("change", id="plan"),
        ]

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one(List).focus()
        self.show(self._view)

    # Drawing

    def show(self, view: View) -> None:
        self._view = view
        if not self.composed:
            return
        revision = view.status.revision if view.status is not None else None
        if revision != self._revision:
            self._revision = revision
            self._changed(self.draft.on(view.config))
        self._draw_rows()
        self._draw_field()
        self._draw_plan()

    def _draw_rows(self) -> None:
        origins = self._view.status.origins if self._view.status is not None else {}
        keeps = wanted(self._words)
        rows = [row for row in self.draft.rows(self._view.config, origins) if keeps(_line(row))]
        wide = self.size.width >= WIDE
        columns = (*COLUMNS, "takes") if wide else COLUMNS
        self.query_one(List).show([(row.name, _cells(row)[: len(columns)]) for row in rows], columns)

    def _draw_field(self) -> None:
        name = self.query_one(List).chosen
        panel = self.query_one("#field", Panel)
        if name is None or name not in self._view.config:
            panel.border_title = "field"
            panel.put(Text("no field fits the filter" if self._view.config else "not known yet", style="dim"))
            return
        origins = self._view.status.origins if self._view.status is not None else {}
        panel.border_title = f"{name} = {clean_line(shown(self._view.config[name]), 60)}"
        text = Text(about(name) + "\n" if about(name) else "")
        text.append(f"takes {range_of(name)}\n")
        text.append(f"origin: {clean_line(origins.get(name, NA), 200)}", "dim")
        panel.put(text)

    def _draw_plan(self) -> None:
        panel = self.query_one("#plan", Panel)
        number = len(self.draft.edits)
        panel.border_title = f"change of {number} field{'s' if number > 1 else ''}" if number else "change"
        rebuilding = rebuild_text(self._view)
        if rebuilding is not None:
            panel.put(rebuilding)
        elif not number:
            panel.put(
                Text("no edits; Enter edits the field, L collects the last good configuration", style="dim")
            )
        elif self.plan is not None:
            lines = [styled(clean_line(line), style) for line, style in plan_lines(self.plan)]
            if self.plan.allowed:
                lines.append(Text("a applies it; nothing is changed before that", style="dim"))
            panel.put(Text("\n").join(lines))
        else:
            panel.put(
                styled(self.refusal, "bad") if self.refusal else Text("working out the plan", style="dim")
            )

    # The draft

    def edited(self, draft: Draft) -> None:
        self._changed(draft.on(self._view.config))
        self.show(self._view)

    def planned(self, change: dict[str, Any], plan: ChangePlan | None, refusal: str) -> None:
        """Shows a plan, unless the edits have changed since it was asked for."""
        if change == dict(self.draft.edits):
            self.plan, self.refusal = plan, refusal
            if self.composed:
                self._draw_plan()

    def _changed(self, draft: Draft) -> None:
        self.draft, self.plan, self.refusal = draft, None, ""
        if draft.edits:
            self.post_message(self.PlanAsked(dict(draft.edits)))

    # Keys

    def action_edit(self) -> None:
        name = self.query_one(List).chosen
        if name is not None and name in self._view.config:
            self.post_message(self.EditAsked(name, self.draft))

    def action_drop(self) -> None:
        name = self.query_one(List).chosen
        if name is not None and name in self.draft.edits:
            self.edited(self.draft.without(name))

    def action_drop_all(self) -> None:
        self.edited(Draft())

    def action_apply_draft(self) -> None:
        if not self.draft.edits:
            self.post_message(self.Told("nothing to apply: no field is edited"))
        elif self.plan is None:
            self.post_message(self.Told(self.refusal or "the plan is not there yet"))
        elif not self.plan.allowed:
            self.post_message(self.Told(f"refused: {self.plan.summary}"))
        else:
            self.post_message(self.ApplyAsked(dict(self.draft.edits), self.plan))

    def action_last_good(self) -> None:
        status = self._view.status
        if status is None or status.last_good is None:
            self.post_message(self.Told("no last good configuration is kept on the runtime's host yet"))
            return
        draft = Draft.between(status.config, status.last_good)
        if not draft.edits:
            self.post_message(self.Told("the configuration in force is the last good one"))
            return
        if self.draft.edits:
            self.post_message(self.Told(f"in place of the edits: {', '.join(self.draft.edits)}"))
        self.edited(draft)

    def action_filter(self) -> None:
        self.query_one(FilterLine).open()

    def _filter(self, words: str) -> None:
        self._words = words
        self._draw_rows()
        self._draw_field()

    @on(DataTable.RowHighlighted)
    def _move(self) -> None:
        self._draw_field()

    @on(DataTable.RowSelected)
    async def _enter(self) -> None:
        await self.run_action("edit")


def rebuild_text(view: View) -> Text | None:
    """How far a rebuild is and what clients see meanwhile; None while there is none."""
    status = view.status
    if status is None or status.state not in ("rebuilding", "draining"):
        return None
    share = f" {percent(status.load_progress)}" if status.load_progress is not None else ""
    timeout = view.config.get("queue_timeout")
    text = styled(f"{status.state}{share}: {clean_line(status.reason)}", "fair")
    if status.state == "rebuilding":
        waiting = f" {shown(timeout)} s" if timeout is not None else ""
        text.append("\nclients: open streams pause, kept alive, and go on with the text they have")
        text.append(f"\nnew requests wait up to queue_timeout{waiting}, then get 503 with Retry-After")
    return text


def _line(row: FieldRow) -> str:
    edited = "edited" if row.edited is not None else ""
    return f"{row.name} {row.value} {row.edited or ''} {row.acts} {row.origin} {edited}"


def _cells(row: FieldRow) -> tuple[Text, ...]:
    value = Text(clean_line(row.value, 40))
    if row.edited is not None:
        value = Text.assemble(value, " -> ", (clean_line(row.edited, 40), "bold"))
    return (
        Text("*" if row.edited is not None else " ", style="bold"),
        Text(row.name, style="bold" if row.edited is not None else ""),
        value,
        styled(row.acts, "good" if row.acts == "live" else "fair"),
        Text(clean_line(row.origin, 60)),
        Text(row.allowed, style="dim"),
    )
