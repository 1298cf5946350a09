"""The chooser of key `p`: native layouts, the one in force marked; what is chosen is planned and confirmed first."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

LAYOUTS: tuple[tuple[str, str], ...] = (
    ("single", "one process on one device"),
    ("tp2", "two ranks share heads and MLPs; MLPs alone where heads do not divide"),
    ("ep2", "two ranks share the experts; dense models have none"),
    ("tp2ep2", "two ranks share heads and experts"),
    ("pp2", "half of the layers on each of two ranks, trees included"),
)
"""Name and what it splits."""


class LayoutChooser(ModalScreen[str | None]):
    """Asks for a layout; None when left with Esc."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,p,ctrl+c", "leave", "Leave", tooltip="Leave without a change."),
        Binding("j", "move(1)", "down", show=False),
        Binding("k", "move(-1)", "up", show=False),
    ]

    def __init__(self, in_force: str | None) -> None:
        super().__init__()
        self._in_force = in_force

    def compose(self) -> ComposeResult:
        rows = [
            Option(f"{name:<7} {'* ' if name == self._in_force else '  '}{words}", id=name)
            for name, words in LAYOUTS
        ]
        yield Vertical(
            Static("parallelism", classes="title", markup=False),
            OptionList(*rows, id="layout_choice", markup=False),
            Static("* runs now · Enter shows the plan and asks · Esc leaves", classes="hint", markup=False),
            classes="dialog",
        )

    def on_mount(self) -> None:
        names = [name for name, _ in LAYOUTS]
        options = self.query_one(OptionList)
        options.highlighted = names.index(self._in_force) if self._in_force in names else 0
        options.focus()

    def action_leave(self) -> None:
        self.dismiss(None)

    def action_move(self, rows: int) -> None:
        options = self.query_one(OptionList)
        if rows > 0:
            options.action_cursor_down()
        else:
            options.action_cursor_up()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id)
