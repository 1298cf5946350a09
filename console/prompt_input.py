"""The box prompts are typed into."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import TextArea

from console.conversation import History
from console.formats import pasted_text


class PromptInput(TextArea):
    """A prompt of one or more lines: Enter sends it, up and down walk through earlier ones at the edges."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "send", "send", tooltip="Send the prompt."),
        Binding("ctrl+j,shift+enter", "newline", "newline", show=False, tooltip="Start another line."),
        Binding("escape", "screen.leave_input", "leave", tooltip="Leave the input; the text stays."),
    ]

    class Sent(Message):
        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self) -> None:
        super().__init__(
            id="prompt", compact=True, highlight_cursor_line=False, placeholder="i: type a prompt here"
        )
        self.history_of_prompts = History()

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.prevent_default()  # The text area would insert a line break and end the key's way.

    async def _on_paste(self, event: events.Paste) -> None:
        event.text = pasted_text(event.text)

    def action_send(self) -> None:
        self.post_message(self.Sent(self.text))

    def action_newline(self) -> None:
        self.insert("\n")

    def action_cursor_up(self, select: bool = False) -> None:
        if select or not self.cursor_at_first_line:
            super().action_cursor_up(select)
        else:
            self.replace_with(self.history_of_prompts.older(self.text))

    def action_cursor_down(self, select: bool = False) -> None:
        if select or not self.cursor_at_last_line:
            super().action_cursor_down(select)
        else:
            self.replace_with(self.history_of_prompts.newer())

    def replace_with(self, text: str | None) -> None:
        """Shows `text` with the cursor at its end; None leaves everything as it is."""
        if text is not None:
            self.text = text
            self.move_cursor(self.document.end)
