"""Asks for the value of one field: a list where it has few values, else a line of text that is checked at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Input, OptionList, Static

from console.change_draft import Draft, about, shown
from console.formats import clean_line
from runtime.config import EFFECTS, choices_of, range_of
from runtime.interface import ConfigRejected


class FieldDialog(ModalScreen[Draft | None]):
    """Gives the draft with the edit in it; None when left with Esc."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "dismiss", "Leave", tooltip="Leave the field as it is."),
        Binding("j", "app.simulate_key('down')", "down", show=False),
        Binding("k", "app.simulate_key('up')", "up", show=False),
    ]

    def __init__(self, name: str, draft: Draft, config: Mapping[str, Any]) -> None:
        super().__init__()
        self._field = name
        self._draft = draft
        self._config = config

    def compose(self) -> ComposeResult:
        effect = "acts at once" if EFFECTS[self._field] == "live" else "needs a rebuild of the engine"
        yield Vertical(
            Static(f"{self._field}: {range_of(self._field)}", classes="title", markup=False),
            self._asking(),
            Static(f"{about(self._field)} It {effect}.".strip(), classes="hint", markup=False),
            Static("", id="wrong", markup=False),
            Static(
                "Enter keeps the edit; it is applied with all others · Esc leaves",
                classes="hint",
                markup=False,
            ),
            classes="dialog",
        )

    def _asking(self) -> Widget:
        value = shown(self._draft.edits.get(self._field, self._config[self._field]))
        choices = choices_of(self._field)
        if not choices:
            return Input(value, id="value", select_on_focus=True)
        options = OptionList(*(Text(choice) for choice in choices), compact=True)
        options.highlighted = choices.index(value) if value in choices else 0
        return options

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._keep(event.value.strip())

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self._keep(choices_of(self._field)[event.option_index])

    def _keep(self, value: str) -> None:
        try:
            draft = self._draft.with_edit(self._config, self._field, value)
        except ConfigRejected as refused:
            self.query_one("#wrong", Static).update(Text.assemble((clean_line(str(refused)), "bad")))
        else:
            self.dismiss(draft)
