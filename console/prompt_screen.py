"""Prompt: a conversation with the model, drafted and bonus tokens told apart, figures beside it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widget import Widget

from console import messages
from console.ask_dialogs import SettingsDialog, TokensDialog, TranscriptDialog
from console.ask_settings import AskSettings
from console.compare_screen import CompareScreen
from console.comparison import Comparison
from console.conversation import Conversation, Turn
from console.copying import copy, short
from console.dialogs import ConfirmDialog
from console.formats import clean_line, clean_text
from console.frame import ConsoleScreen, Panel, View, styled
from console.prompt_input import PromptInput
from console.transcript import LEGENDS, Transcript, TurnView, spans
from console.transcript_file import default_path, save
from runtime.interface import Mode, TokenPiece

SERVING = ("ready", "degraded")


class PromptScreen(ConsoleScreen):
    NAME = "Prompt"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("o", "settings", "options", tooltip="System prompt, temperature, seed, stop and the like."),
        Binding("b", "both", "both", tooltip="The prompt in two modes side by side: same text? how fast?"),
        Binding("l", "tokens", "tokens", show=False, tooltip="Tokens of the last answer, one by one."),
        Binding(
            "d",
            "marks",
            "marks",
            show=False,
            tooltip="How bonus tokens are marked.",
        ),
        Binding("y", "copy", "copy", show=False, tooltip="Copy the last answer."),
        Binding("w", "save", "save", show=False, tooltip="Save the conversation to a file."),
        Binding(
            "n",
            "new",
            "new",
            show=False,
            tooltip="Begin another conversation; asks, the present one is forgotten.",
        ),
    ]

    def __init__(self, tabs: tuple[tuple[str, str], ...]) -> None:
        super().__init__(tabs)
        self.conversation = Conversation()
        self.settings = AskSettings()
        self._config: dict[str, Any] = {}
        self._facts: dict[str, Any] = {}
        self._dtype: str | None = None
        self._comparing: CompareScreen | None = None
        self._views: dict[int, TurnView] = {}
        self._waiting: Turn | None = None
        self._undrawn: list[TokenPiece] = []
        """Of the open turn, which is the last one."""
        self._state = "starting"
        self._state_words = "starting"

    def body(self) -> list[Widget]:
        return [
            Transcript(),
            Panel(id="legend", classes="bar line"),
            Panel(id="prompt_settings", classes="bar line"),
            Panel(id="prompt_note", classes="bar"),
            PromptInput(),
        ]

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one("#legend", Panel).put(Text(LEGENDS[self.query_one(Transcript).marks]))
        self._note("")
        self._show_settings()
        self.set_focus(self.query_one(Transcript))

    # Keys

    def focus_input(self) -> None:
        self.set_focus(self.query_one(PromptInput))

    def action_leave_input(self) -> None:
        self.set_focus(self.query_one(Transcript))

    def action_marks(self) -> None:
        transcript = self.query_one(Transcript)
        transcript.next_marks()
        self.query_one("#legend", Panel).put(Text(LEGENDS[transcript.marks]))

    def action_new(self) -> None:
        turns = len(self.conversation.turns)
        if self.conversation.open_turn is not None:
            self._note("an answer is not finished; x cancels it", bad=True)
        elif not turns:
            self._note("the conversation is empty already")
        else:
            effect = f"It has {turns} answer{'' if turns == 1 else 's'}; w saves it to a file."
            dialog = ConfirmDialog("Forget this conversation?", effect, yes="Begin another", no="Keep it")
            self.app.push_screen(dialog, lambda yes: self._begin_anew() if yes else None)

    def _begin_anew(self) -> None:
        self.conversation.clear()
        self._views.clear()
        self.query_one(Transcript).clear()
        self._note("another conversation")

    def action_settings(self) -> None:
        def chosen(settings: AskSettings | None) -> None:
            if settings is not None:
                self.settings = settings
                self._show_settings()

        self.app.push_screen(SettingsDialog(self.settings, self._config), chosen)

    def _show_settings(self) -> None:
        line = self.query_one("#prompt_settings", Panel)
        words = self.settings.summary
        line.display = bool(words)
        line.put(Text.assemble(("asked with ", "dim"), clean_line(words)))

    def action_tokens(self) -> None:
        turn = next((turn for turn in reversed(self.conversation.turns) if turn.pieces), None)
        if turn is None:
            self._note("no tokens yet: ask something first", bad=True)
        else:
            self.app.push_screen(TokensDialog(turn))

    def action_copy(self) -> None:
        turn = next((turn for turn in reversed(self.conversation.turns) if turn.text), None)
        if turn is None:
            self._note("nothing to copy: there is no answer yet", bad=True)
        else:
            self._note(*copy(self.app, turn.text, "the last answer"))

    def action_save(self) -> None:
        if not self.conversation.turns:
            self._note("nothing to save: the conversation is empty", bad=True)
        else:
            self.app.push_screen(TranscriptDialog(default_path(time.time())), self._save)

    def _save(self, path: Path | None) -> None:
        if path is not None:
            self.run_worker(self._write(path), name="save", exit_on_error=False)

    async def _write(self, path: Path) -> None:
        turns = tuple(self.conversation.turns)
        try:
            await asyncio.to_thread(save, path, turns, self.settings, self._facts)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self._note(f"not saved: {path}: {reason}", bad=True)
        else:
            self._note(f"saved to {short(path)}")

    def action_both(self) -> None:
        box = self.query_one(PromptInput)
        turns = self.conversation.turns
        prompt = box.text.strip() or (turns[-1].prompt if turns else "")
        if not prompt:
            self._note("nothing to compare: type a prompt first, or ask one", bad=True)
            return
        if self.conversation.open_turn is not None:
            self._note("one answer at a time: x cancels the present one", bad=True)
            return
        if self._state not in SERVING:
            self._note(f"not now: the engine is {self._state_words}", bad=True)
            return
        before = Conversation(turns if box.text.strip() else turns[:-1], self.conversation)

        def make(mode: Mode) -> Comparison:
            return Comparison.of(before, prompt, self.settings, mode, self._config, self._dtype)

        mode: Mode = "chain" if self._config.get("mode") == "chain" else "tree"
        self._comparing = CompareScreen(make, mode, self.query_one(Transcript).marks)
        self.app.push_screen(self._comparing)

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
            request = self.conversation.request(turn, self.settings)
            self.app.post_message(messages.AnswerWanted(turn.number, request))
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
        self._config = view.config
        self._facts = facts(view)
        self._dtype = view.description.dtype if view.description is not None else None
        self._state = str(view.status.state)
        self._state_words = view.state_words
        if self._state == "failed":
            self._state_words = clean_line(view.status.reason) or "no reason given"
        self._send_waiting()

    # Answers

    def admitted(self, event: messages.AnswerAdmitted) -> None:
        turn = self._turn(event.turn)
        if turn is not None:
            turn.request_id, turn.seed = event.request_id, event.seed
            turn.prompt_tokens, turn.cached_tokens = event.prompt_tokens, event.cached_tokens

    def tokens(self, event: messages.AnswerTokens) -> None:
        turn = self._turn(event.turn)
        if turn is None or turn.ended:
            return
        turn.pieces.extend(event.pieces)
        turn.rounds, turn.decode_s = event.rounds, event.decode_s
        if turn.number not in self._views:
            self._compared(turn, event)
            return
        self._undrawn.extend(event.pieces)
        if self in self.app.screen_stack:
            self._draw(turn)

    def finished(self, event: messages.AnswerFinished) -> None:
        turn = self._turn(event.turn)
        if turn is None or turn.ended:
            return
        turn.ended, turn.stats, turn.tail = True, event.finished.stats, event.finished.tail
        turn.error = event.finished.error or ""
        if turn.number not in self._views:
            self._compared(turn, tail=turn.tail)
            return
        self._draw(turn)
        if turn.tail:
            self._views[turn.number].append([(clean_text(turn.tail), True)])
            self._draw(turn)  # the tail may have begun a block

    def fail(self, number: int, reason: str) -> None:
        """Ends a turn that broke; without a token it leaves the transcript, its prompt goes to the input."""
        turn = self._turn(number)
        if turn is None or turn.ended:
            return
        turn.ended = True
        if number not in self._views:
            turn.error = reason
            self._compared(turn)
            return
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

    def _turn(self, number: int) -> Turn | None:
        turn = self.conversation.turn(number)
        if turn is None and self._comparing is not None:
            turn = self._comparing.turn(number)
        return turn

    def _compared(self, turn: Turn, event: messages.AnswerTokens | None = None, tail: str = "") -> None:
        if self._comparing is not None and self._comparing.is_attached:
            self._comparing.took(turn, event, tail)

    def _draw(self, turn: Turn, waiting: str = "") -> None:
        view = self._views.get(turn.number)
        if view is not None:
            if self._undrawn:
                view.append(spans(tuple(self._undrawn)))
                self._undrawn.clear()
            view.show(waiting)

    def on_screen_resume(self) -> None:
        """Draws what came while another screen was seen."""
        if self._undrawn and self.conversation.turns:
            self._draw(self.conversation.turns[-1])

    def _note(self, text: str, bad: bool = False) -> None:
        note = self.query_one("#prompt_note", Panel)
        note.display = bool(text)
        note.put(styled(clean_line(text), "bad" if bad else "bold"))


def facts(view: View) -> dict[str, Any]:
    """What a saved conversation says of what answered it."""
    found = {name: view.config.get(name) for name in ("model", "drafter", "engine", "mode", "temperature")}
    if view.description is not None:
        found |= {
            "target": view.description.target,
            "dtype": view.description.dtype,
            "host": view.description.host,
        }
    return {name: value for name, value in found.items() if value is not None} | {
        "tree_budget": view.tree_budget
    }
