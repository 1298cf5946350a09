"""Chooses one of the requests there are."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from console.formats import clean_line, number
from runtime.interface import RequestStats

AUTOMATIC = ""
"""In the place of an id: the newest request, whichever it is."""


class RequestDialog(ModalScreen[str | None]):
    """A filtered list; gives an id, `AUTOMATIC`, or None when left with Esc."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "leave", "Leave", tooltip="Leave the choice as it is."),
        Binding("slash", "filter", "filter", tooltip="Filter the list."),
        Binding("j", "app.simulate_key('down')", "down", show=False),
        Binding("k", "app.simulate_key('up')", "up", show=False),
    ]

    def __init__(self, requests: tuple[RequestStats, ...], chosen: str | None) -> None:
        super().__init__()
        self._requests, self._chosen = requests, chosen

    def compose(self) -> ComposeResult:
        yield Vertical(
            Static("Whose trees?", classes="title", markup=False),
            Input(placeholder="/ filters", id="filter", compact=True),
            OptionList(*self._options(""), id="choices", compact=True),
            Static("Enter chooses · / filters · Esc leaves", classes="hint", markup=False),
            classes="dialog",
        )

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()

    def _options(self, words: str) -> list[Option]:
        options = [Option(Text("the newest request, whichever it is"), id="automatic")]
        options += [
            Option(request_line(stats), id=f"request {stats.request_id}")
            for stats in self._requests
            if words.lower() in request_line(stats).plain.lower()
        ]
        return options

    def action_leave(self) -> None:
        if self.focused is self.query_one(Input):
            self.query_one(OptionList).focus()
        else:
            self.dismiss(None)

    def action_filter(self) -> None:
        self.query_one(Input).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        choices = self.query_one(OptionList)
        choices.clear_options()
        choices.add_options(self._options(event.value))
        choices.highlighted = min(1, choices.option_count - 1) if event.value else 0

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.query_one(OptionList).action_select()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        chosen = str(event.option.id)
        self.dismiss(AUTOMATIC if chosen == "automatic" else chosen.removeprefix("request "))


def request_line(stats: RequestStats) -> Text:
    """One request in one line."""
    ended = f", {stats.finish_reason}" if stats.finish_reason else ""
    return Text(
        f"{clean_line(stats.request_id, 20)}  {clean_line(stats.client, 14)}  {stats.state}{ended}  "
        f"{stats.mode} {stats.tree_budget}  {stats.output_tokens} tok  accept {number(stats.accept_length)}",
        no_wrap=True,
        overflow="ellipsis",
    )
