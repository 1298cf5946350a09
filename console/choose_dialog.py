"""Asks for one of many, with a filter, or for one line of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from console.filtering import FilterLine, wanted


class ChooseDialog(ModalScreen[int | None]):
    """Gives the number of the line that was chosen; None when left with Esc."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "dismiss", "Leave", tooltip="Leave without a choice."),
        Binding("slash", "filter", "filter", tooltip="Filter the list."),
        Binding("j", "app.simulate_key('down')", "down", show=False),
        Binding("k", "app.simulate_key('up')", "up", show=False),
    ]

    def __init__(self, title: str, lines: Sequence[str]) -> None:
        super().__init__()
        self._title_text, self._lines = title, tuple(lines)

    def compose(self) -> ComposeResult:
        yield Vertical(
            Static(self._title_text, classes="title", markup=False),
            FilterLine(self._filter, lambda: self.query_one(OptionList)),
            OptionList(*self._options(""), compact=True),
            Static("Enter chooses · / filters · Esc leaves", classes="hint", markup=False),
            classes="dialog wide",
        )

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()

    def action_filter(self) -> None:
        self.query_one(FilterLine).open()

    def _options(self, words: str) -> list[Option]:
        kept = [(number, line) for number, line in enumerate(self._lines) if wanted(words)(line)]
        return [
            Option(Text(line, no_wrap=True, overflow="ellipsis"), id=f"n{number}") for number, line in kept
        ]

    def _filter(self, words: str) -> None:
        options = self.query_one(OptionList)
        options.clear_options()
        options.add_options(self._options(words))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(int(str(event.option_id).removeprefix("n")))


class TextDialog(ModalScreen[str | None]):
    """Gives one line of text, not empty; None when left with Esc."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "dismiss", "Leave", tooltip="Leave without a text."),
    ]

    def __init__(self, title: str, value: str, note: str) -> None:
        super().__init__()
        self._title_text, self._value, self._note = title, value, note

    def compose(self) -> ComposeResult:
        yield Vertical(
            Static(self._title_text, classes="title", markup=False),
            Input(self._value, id="value", select_on_focus=True),
            Static(self._note, classes="hint", markup=False),
            Static("Enter keeps · Esc leaves", classes="hint", markup=False),
            classes="dialog",
        )

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.value.strip():
            self.dismiss(event.value.strip())
