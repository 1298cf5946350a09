"""The `/` filter of lists and logs: words that must occur, `!word` that must not, and the line they are typed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import Input


def wanted(filter_text: str) -> Callable[[str], bool]:
    """Whether a line has every word of `filter_text` and none of its `!words`, whatever their case."""
    words = filter_text.lower().split()
    must = [word for word in words if not word.startswith("!")]
    must_not = [word[1:] for word in words if len(word) > 1 and word.startswith("!")]

    def holds(line: str) -> bool:
        lowered = line.lower()
        return all(word in lowered for word in must) and not any(word in lowered for word in must_not)

    return holds


class FilterLine(Input):
    """One line that is there while a filter is typed or in force; `apply` gets each change of it at once."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "give_up", "no filter", tooltip="Drop the filter and leave its line."),
        Binding("ctrl+c", "give_up", "no filter", show=False, tooltip="Drop the filter and leave its line."),
    ]

    def __init__(self, apply: Callable[[str], object], target: Callable[[], Widget | None]) -> None:
        """`target`: what gets the focus when the line is left; None: nothing."""
        super().__init__(
            placeholder="filter: words, !not this; Enter keeps it, Esc drops it",
            classes="filter",
            compact=True,
        )
        self._apply = apply
        self._target = target
        self.display = False

    def open(self) -> None:
        """Shows the line and lets it take the keys."""
        self.display = True
        self.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._apply(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._leave()

    def action_give_up(self) -> None:
        self.value = ""
        self._apply("")
        self._leave()

    def _leave(self) -> None:
        self.display = bool(self.value)
        target = self._target()
        if target is None:
            self.screen.set_focus(None)
        else:
            target.focus()
