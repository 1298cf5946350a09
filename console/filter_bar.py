"""`/` filters a list: a one-line input that shows up when asked for and goes when left empty."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Input


class FilterBar(Input):
    """Words that a row must hold, all of them; one that begins with `!` it must not hold."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "clear", "clear", tooltip="Show all rows again."),
        Binding("down", "done", "list", show=False, tooltip="To the list."),
    ]

    class Sought(Message):
        """The words have changed, or the list shall have the focus again."""

        def __init__(self, words: str, leave: bool) -> None:
            super().__init__()
            self.words = words
            self.leave = leave

    def __init__(self) -> None:
        super().__init__(placeholder="filter: words, !word leaves out", compact=True, classes="filter")
        self.display = False

    def open(self) -> None:
        self.display = True
        self.focus()

    def action_clear(self) -> None:
        self.value = ""
        self._leave()

    def action_done(self) -> None:
        self._leave()

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self.post_message(self.Sought(self.value, leave=False))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._leave()

    def _leave(self) -> None:
        self.display = bool(self.value)
        self.post_message(self.Sought(self.value, leave=True))


def matches(words: str, text: str) -> bool:
    """Whether `text` holds what `words` ask for, letter case aside."""
    lowered = text.lower()
    return all(
        (word[1:] not in lowered) if word.startswith("!") and len(word) > 1 else word in lowered
        for word in words.lower().split()
    )
