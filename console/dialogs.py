"""Dialogs over a screen: choose a value, confirm, help made from the bindings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen, ScreenResultType
from textual.widgets import Button, Input, Static

from console.formats import clean_line


class ScrollDialog(ModalScreen[ScreenResultType]):
    """A dialog over text that may be longer than the screen; its keys call `scroll`."""

    def action_scroll(self, rows: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=rows, animate=False)


@dataclass(frozen=True, slots=True)
class Asked:
    """A number to ask for."""

    name: str
    value: float | None
    low: float
    high: float
    step: float
    note: str


class ValueDialog(ModalScreen[float | None]):
    """Asks for one number; None when left with Esc."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "leave", "Leave", tooltip="Leave without a change."),
        Binding("up", "step(1)", "more", show=False, tooltip="One step up."),
        Binding("down", "step(-1)", "less", show=False, tooltip="One step down."),
    ]

    def __init__(self, asked: Asked) -> None:
        super().__init__()
        self._asked = asked

    def compose(self) -> ComposeResult:
        asked = self._asked
        yield Vertical(
            Static(f"{asked.name}, {asked.low:g} to {asked.high:g}", classes="title", markup=False),
            Input("" if asked.value is None else f"{asked.value:g}", id="value", select_on_focus=True),
            Static(asked.note, classes="hint", markup=False),
            Static("", id="wrong", markup=False),
            Static("Enter applies · up/down step · Esc leaves", classes="hint", markup=False),
            classes="dialog",
        )

    def action_leave(self) -> None:
        self.dismiss(None)

    def action_step(self, direction: int) -> None:
        box = self.query_one(Input)
        value = self._parsed(box.value)
        if value is None:
            value = self._asked.value if self._asked.value is not None else self._asked.low
        value = round(value + direction * self._asked.step, 6)
        box.value = f"{min(max(value, self._asked.low), self._asked.high):g}"
        box.cursor_position = len(box.value)

    def _parsed(self, text: str) -> float | None:
        try:
            value = float(text)
        except ValueError:
            return None
        return value if self._asked.low <= value <= self._asked.high else None

    def on_input_submitted(self, event: Input.Submitted) -> None:
        value = self._parsed(event.value)
        if value is None:
            allowed = f"{self._asked.low:g} to {self._asked.high:g}"
            wrong = f"{clean_line(event.value, 30)!r} is not a number from {allowed}"
            self.query_one("#wrong", Static).update(Text.assemble((wrong, "bad")))
        else:
            self.dismiss(value)


class ConfirmDialog(ModalScreen[bool]):
    """Asks before something is done; the safe button has the focus, unless nothing is lost by it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,n,ctrl+c", "answer(False)", "Cancel", tooltip="Leave everything as it is."),
        Binding("y", "answer(True)", "Yes", tooltip="Do it."),
        Binding("left,right", "app.focus_next", "other", show=False, tooltip="To the other button."),
    ]

    def __init__(self, title: str, effect: str | Text, yes: str, no: str, harmless: bool = False) -> None:
        super().__init__()
        self._title_text, self._effect, self._yes, self._no = title, effect, yes, no
        self._first = "#yes" if harmless else "#no"

    def compose(self) -> ComposeResult:
        yield Vertical(
            Static(self._title_text, classes="title", markup=False),
            VerticalScroll(Static(self._effect, markup=False), classes="effect", can_focus=False),
            Horizontal(
                Button(f"{self._no} (Esc)", id="no", variant="primary"),
                Button(f"{self._yes} (y)", id="yes", variant="error"),
                classes="buttons",
            ),
            classes="dialog",
        )

    def on_mount(self) -> None:
        self.query_one(self._first, Button).focus()

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")


Leaving = Literal["detach", "stop"]


class LeaveDialog(ModalScreen[Leaving | None]):
    """Asks what becomes of a runtime that serves others too; to stay has the focus, None is to stay."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,n,ctrl+c", "answer('stay')", "Stay", tooltip="Leave everything as it is."),
        Binding("d", "answer('detach')", "Detach", tooltip="Drop the screen, go on serving."),
        Binding("s", "answer('stop')", "Stop", tooltip="Finish what runs, then end."),
        Binding("right", "app.focus_next", "next", show=False, tooltip="To the next button."),
        Binding("left", "app.focus_previous", "previous", show=False, tooltip="To the button before."),
    ]

    def __init__(self, served_at: str, unfinished: str) -> None:
        super().__init__()
        self._served_at, self._unfinished = served_at, unfinished

    def compose(self) -> ComposeResult:
        yield Vertical(
            Static("Leave the screen?", classes="title", markup=False),
            Static(
                f"This process serves {self._served_at}. Detach: it goes on without a screen. "
                f"Stop: it finishes what runs and ends. {self._unfinished}",
                markup=False,
            ),
            Horizontal(
                Button("Stay (Esc)", id="stay", variant="primary"),
                Button("Detach (d)", id="detach"),
                Button("Stop (s)", id="stop", variant="error"),
                classes="buttons",
            ),
            classes="dialog",
        )

    def on_mount(self) -> None:
        self.query_one("#stay", Button).focus()

    def action_answer(self, choice: str) -> None:
        self.dismiss("detach" if choice == "detach" else "stop" if choice == "stop" else None)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.action_answer(str(event.button.id))


HelpGroup = tuple[str, tuple[tuple[str, str], ...]]
"""A heading and its (keys, meaning) rows."""

MEANINGS: HelpGroup = (
    "What the figures count",
    (
        ("tok/s", "Output tokens of decode rounds per second of decoding, over all running requests."),
        ("accept length", "Tokens per verify step: accepted drafts plus the bonus token."),
        ("by position", "Share of rounds that drafted position k in which it was accepted."),
        ("plain baseline", "Plain decoding of one request, measured on this host when it was last idle."),
        ("mean, peak", "Since the last flip of mode or budget, at most 5 minutes; peak: the best second."),
        ("KV slots", "Token slots of the KV cache: used by requests, kept for reuse, all."),
    ),
)


class HelpScreen(ScrollDialog[None]):
    """Every key of the screen below, from its bindings."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,ctrl+c", "dismiss", "Close", tooltip="Close the help."),
        Binding("j", "scroll(1)", "down", show=False),
        Binding("k", "scroll(-1)", "up", show=False),
        Binding("g", "scroll(-100000)", "top", show=False),
        Binding("G", "scroll(100000)", "end", show=False),
        Binding("space", "scroll(15)", "page down", show=False),
    ]

    def __init__(self, groups: tuple[HelpGroup, ...]) -> None:
        super().__init__()
        self._groups = groups

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="help", can_focus=True):
            for title, rows in (*self._groups, MEANINGS):
                table = Table.grid(padding=(0, 2))
                table.add_column(no_wrap=True)
                table.add_column()
                for keys, meaning in rows:
                    table.add_row(Text(keys, style="bold"), Text(meaning))
                yield Static(Text(title, style="bold underline"))
                yield Static(table, classes="help_rows")
            yield Static("j/k, space, g/G scroll · Esc closes this", classes="hint", markup=False)


def help_rows(bindings: Iterable[tuple[Binding, str]]) -> tuple[tuple[str, str], ...]:
    """(keys, meaning) of bindings given with the display of their key; keys of one action share a row."""
    keys: dict[str, list[str]] = {}
    meanings: dict[str, str] = {}
    for binding, display in bindings:
        meaning = binding.tooltip or binding.description
        if not meaning:
            continue
        keys.setdefault(binding.action, []).append(display)
        meanings.setdefault(binding.action, meaning)
    return tuple((" ".join(shown), meanings[action]) for action, shown in keys.items())
