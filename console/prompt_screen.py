"""Prompt: a conversation with the model, drafted and bonus tokens told apart, figures beside it."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widget import Widget
from textual.widgets import TextArea

from console import messages
from console.conversation import Conversation, History, Turn
from console.formats import clean_line, clean_text
from console.frame import ConsoleScreen, Panel, View, styled
from console.transcript import LEGEND_MARKED, LEGEND_PLAIN, Transcript, TurnView
from runtime.interface import GenerateRequest, TokenPiece

SERVING = ("ready", "degraded")
INPUT_ROWS = 5


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
        event.text = clean_text(event.text)

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


class PromptScreen(ConsoleScreen):
    NAME = "Prompt"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d", "marks", "marks", tooltip="Mark bonus tokens, or stop marking them."),
        Binding("n", "new", "new", tooltip="Begin another conversation; the present one is forgotten."),
    ]

    class Asked(Message):
        """A turn is to be answered."""

        def __init__(self, turn: int, request: GenerateRequest) -> None:
            super().__init__()
            self.turn = turn
            self.request = request

    def __init__(self, tabs: tuple[tuple[str, str], ...]) -> None:
        super().__init__(tabs)
        self.conversation = Conversation()
        self._views: dict[int, TurnView] = {}
        self._waiting: Turn | None = None
        self._state = "starting"
        self._state_words = "starting"

    def body(self) -> list[Widget]:
        return [
            Transcript(),
            Panel(id="legend", classes="bar line"),
            Panel(id="prompt_note", classes="bar"),
            PromptInput(),
        ]

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one("#legend", Panel).put(Text(LEGEND_MARKED))
        self._note("")
        self.set_focus(self.query_one(Transcript))

    # Keys

    def focus_input(self) -> None:
        self.set_focus(self.query_one(PromptInput))

    def action_leave_input(self) -> None:
        self.set_focus(self.query_one(Transcript))

    def action_marks(self) -> None:
        transcript = self.query_one(Transcript)
        transcript.toggle_marks()
        legend = LEGEND_MARKED if transcript.marked else LEGEND_PLAIN
        self.query_one("#legend", Panel).put(Text(legend))

    def action_new(self) -> None:
        if self.conversation.open_turn is not None:
            self._note("an answer is not finished; x cancels it", bad=True)
            return
        self.conversation.clear()
        self._views.clear()
        self.query_one(Transcript).clear()
        self._note("another conversation")

    # Asking

    def on_prompt_input_sent(self, event: PromptInput.Sent) -> None:
        if not event.text.strip():
            self._note("nothing to send: the prompt is empty", bad=True)
            return
        if self.conversation.open_turn is not None:
            self._note("one answer at a time: x cancels the present one; your prompt is kept", bad=True)
            return
        box = self.query_one(PromptInput)
        box.history_of_prompts.add(event.text)
        box.text = ""
        turn = self.conversation.begin(event.text)
        self._views[turn.number] = self.query_one(Transcript).begin(turn)
        self.set_focus(self.query_one(Transcript))
        self._note("")
        self._waiting = turn
        self._send_waiting()

    def _send_waiting(self) -> None:
        """Sends the waiting turn if the model can answer; says what it waits for otherwise."""
        turn = self._waiting
        if turn is None:
            return
        if self._state in SERVING:
            self._waiting = None
            self.post_message(self.Asked(turn.number, self.conversation.request(turn)))
            self._draw(turn, "prefill")
        elif self._state == "failed":
            self.fail(turn.number, f"the engine failed: {self._state_words}")
        else:
            self._draw(turn, f"{self._state_words}: the prompt is queued and sent when the model is ready")

    def withdraw(self) -> bool:
        """Takes a prompt that was not sent yet back into the input; False if there is none."""
        turn = self._waiting
        if turn is None:
            return False
        self.fail(turn.number, "withdrawn before it was sent")
        return True

    def show(self, view: View) -> None:
        if view.status is None:
            return
        self._state = str(view.status.state)
        self._state_words = view.state_words
        if self._state == "failed":
            self._state_words = clean_line(view.status.reason) or "no reason given"
        self._send_waiting()

    # Answers

    def admitted(self, event: messages.AnswerAdmitted) -> None:
        turn = self.conversation.turn(event.turn)
        if turn is not None:
            turn.request_id = event.request_id
            turn.prompt_tokens, turn.cached_tokens = event.prompt_tokens, event.cached_tokens

    def tokens(self, event: messages.AnswerTokens) -> None:
        turn = self.conversation.turn(event.turn)
        if turn is None or turn.ended:
            return
        turn.pieces.extend(event.pieces)
        turn.rounds, turn.decode_s = event.rounds, event.decode_s
        self._view(turn).append(spans(event.pieces))
        self._draw(turn)

    def finished(self, event: messages.AnswerFinished) -> None:
        turn = self.conversation.turn(event.turn)
        if turn is None or turn.ended:
            return
        turn.ended, turn.stats, turn.tail = True, event.finished.stats, event.finished.tail
        turn.error = event.finished.error or ""
        if turn.tail:
            self._view(turn).append([(clean_text(turn.tail), True)])
        self._draw(turn)

    def fail(self, number: int, reason: str) -> None:
        """Ends a turn that broke; without a token it leaves the transcript, its prompt goes to the input."""
        turn = self.conversation.turn(number)
        if turn is None or turn.ended:
            return
        turn.ended = True
        if self._waiting is turn:
            self._waiting = None
        self._note(reason, bad=True)
        if turn.pieces:
            turn.error = reason
            self._draw(turn)
            return
        self.conversation.drop(turn)
        self._views.pop(number, None)
        self.query_one(Transcript).forget(turn)
        box = self.query_one(PromptInput)
        if not box.text:
            box.replace_with(turn.prompt)

    def _view(self, turn: Turn) -> TurnView:
        return self._views[turn.number]

    def _draw(self, turn: Turn, waiting: str = "") -> None:
        view = self._views.get(turn.number)
        if view is not None:
            view.show(waiting)

    def _note(self, text: str, bad: bool = False) -> None:
        note = self.query_one("#prompt_note", Panel)
        note.display = bool(text)
        note.put(styled(clean_line(text), "bad" if bad else "bold"))


def spans(pieces: tuple[TokenPiece, ...]) -> list[tuple[str, bool]]:
    """Cleaned text of pieces; neighbours of the same origin are joined."""
    joined: list[tuple[str, bool]] = []
    for piece in pieces:
        text = clean_text(piece.text)
        if joined and joined[-1][1] == piece.drafted:
            joined[-1] = (joined[-1][0] + text, piece.drafted)
        elif text:
            joined.append((text, piece.drafted))
    return joined
