"""The transcript of a conversation: prompts, answers with bonus tokens marked, figures beside them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import ClassVar, Literal

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.geometry import Size
from textual.widgets import Static

from console.conversation import Turn
from console.formats import clean_line, clean_text, duration, number, rate
from console.frame import Panel, styled
from runtime.interface import TokenPiece

BLOCK_CHARS = 300
"""A longer block of an answer ends at its next line break, so that only a short one is wrapped again."""
MAX_BLOCK_CHARS = 20_000
GROWTH_ROWS = 4
"""By which an answer grows on the screen: each time everything is laid out and drawn again, beside the engine."""
FIGURES_S = 1.0
"""Between two drawings of an answer's figures, which stand far from the place where its text grows."""
MAX_TURNS = 100
"""Older turns leave the screen; the conversation keeps them."""
Marks = Literal["underlined", "quoted", "hidden"]
LEGENDS: dict[Marks, str] = {
    "underlined": "plain: drafted · underlined: bonus token, the target's own · d: ‹in quotes›",
    "quoted": "plain: drafted · ‹in quotes›: bonus token, the target's own · d hides",
    "hidden": "d marks drafted and bonus tokens",
}
"""How bonus tokens are marked, in the order in which `d` goes on, and what is said about it."""

Span = tuple[str, bool]
"""Cleaned text and whether it was drafted."""


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


class AnswerBlock(Panel):
    """A stretch of an answer. While it is written it has room for rows to come, by GROWTH_ROWS at a time."""

    def __init__(self) -> None:
        super().__init__(classes="answer_block")
        self._is_open = True

    def close(self) -> None:
        """Gives back the room that it does not need."""
        if self._is_open:
            self._is_open = False
            self.refresh(layout=True)

    def room(self, rows: int) -> int:
        return -(-rows // GROWTH_ROWS) * GROWTH_ROWS if self._is_open else rows

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self.room(super().get_content_height(container, viewport, width))


class AnswerText(Vertical):
    """Streamed text in blocks; only the last block changes."""

    def __init__(self, marks: Marks) -> None:
        super().__init__(classes="answer_text")
        self._marks = marks
        self._blocks: list[list[Span]] = [[]]
        self._panels = [AnswerBlock()]
        """One a block, also before they are on the screen."""
        self._on_screen = False

    def compose(self) -> ComposeResult:
        yield from self._panels
        self._on_screen = True

    def append(self, spans: Iterable[Span]) -> None:
        """Adds text at the end."""
        for text, drafted in spans:
            while text:
                room = self._room(text)
                if room:
                    self._blocks[-1].append((text[:room], drafted))
                text = text[room:]
                if text:
                    self._close_block()
        self._draw(len(self._blocks) - 1)

    def _room(self, text: str) -> int:
        """Characters of `text` that still belong into the last block."""
        length = sum(len(part) for part, _ in self._blocks[-1])
        at = text.find("\n", max(BLOCK_CHARS - length, 0))
        limit = max(MAX_BLOCK_CHARS - length, 0)
        return min(at if at >= 0 else len(text), limit)

    def _close_block(self) -> None:
        self._draw(len(self._blocks) - 1)
        self._panels[-1].close()
        self._blocks.append([])
        self._panels.append(AnswerBlock())
        if self._on_screen:
            self.mount(self._panels[-1])

    def end(self) -> None:
        """The answer is complete."""
        self._panels[-1].close()

    def mark(self, marks: Marks) -> None:
        """Draws everything again with other marks of bonus tokens."""
        self._marks = marks
        for index in range(len(self._blocks)):
            self._draw(index)

    def _draw(self, index: int) -> None:
        text = Text(overflow="fold")
        for part, drafted in self._blocks[index]:
            bare = part.strip()
            if drafted or self._marks == "hidden" or not bare:
                text.append(part)
                continue
            start = part.index(bare)
            text.append(part[:start])
            if self._marks == "quoted":
                text.append(f"‹{bare}›")
            else:
                text.append(bare, "bonus")
            text.append(part[start + len(bare) :])
        if index and text.plain.startswith("\n"):
            text = text[1:]
        self._panels[index].put(text)


class TurnView(Vertical):
    """One prompt, its answer and the answer's figures."""

    def __init__(self, turn: Turn, marks: Marks) -> None:
        super().__init__(classes="turn")
        self.turn = turn
        self._text = AnswerText(marks)
        self._figures = Panel(classes="answer_figures line")
        self._figures_drawn_s = float("-inf")
        self._foot = Panel(classes="answer_foot")

    def compose(self) -> ComposeResult:
        yield Static(Text("> " + clean_text(self.turn.prompt), style="bold"), classes="asked")
        yield Horizontal(self._text, self._figures, classes="answer")
        yield self._foot

    def append(self, spans: Iterable[Span]) -> None:
        self._text.append(spans)

    def mark(self, marks: Marks) -> None:
        self._text.mark(marks)

    def show(self, waiting: str) -> None:
        """Draws the figures; `waiting` says why there is no token yet."""
        now_s = time.monotonic()
        if self.turn.ended:
            self._text.end()
        if self.turn.ended or now_s - self._figures_drawn_s >= FIGURES_S:
            self._figures_drawn_s = now_s
            self._figures.put(figures_text(self.turn))
        foot = foot_text(self.turn, waiting)
        self._foot.display = bool(foot)
        self._foot.put(foot)


def figures_text(turn: Turn) -> Text:
    tokens = turn.stats.output_tokens if turn.stats is not None else len(turn.pieces)
    rounds = turn.stats.rounds if turn.stats is not None else turn.rounds
    text = Text(f"accept {number(turn.accept_length)}\n")
    text.append(f"{rate(turn.tok_s)} tok/s\n")
    text.append(f"{tokens} tok, {rounds} rounds\n", "dim")
    if turn.stats is not None:
        text.append(f"TTFT {duration(turn.stats.ttft_s)}", "dim")
    return text


GREEDY_BELOW = 1e-4
"""Temperatures below it need no seed."""
FINISH_WORDS = {"length": "ended at the token limit", "cancelled": "cancelled", "error": "failed"}


def foot_text(turn: Turn, waiting: str) -> Text:
    """What is worth saying under an answer: why it waits, how it ended, why it was decoded plainly."""
    parts: list[str] = []
    if not turn.ended and not turn.pieces:
        parts.append(waiting)
    if turn.stats is not None:
        if turn.stats.finish_reason in FINISH_WORDS:
            parts.append(FINISH_WORDS[turn.stats.finish_reason])
        if turn.stats.plain_reason:
            parts.append(f"decoded plainly: {turn.stats.plain_reason}")
        if turn.stats.continued:
            parts.append(turn.stats.continued)
        if turn.stats.temperature >= GREEDY_BELOW and turn.seed is not None:
            parts.append(f"seed {turn.seed}")
        if turn.stats.cached_tokens:
            parts.append(f"{turn.stats.cached_tokens} of {turn.stats.prompt_tokens} prompt tokens reused")
    if turn.error:
        parts.append(turn.error)
    return styled(clean_line(" · ".join(parts)), "bad" if turn.error else "dim italic")


class Transcript(VerticalScroll):
    """All turns; follows the end unless scrolled up."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", "down", show=False, tooltip="Scroll down."),
        Binding("k", "scroll_up", "up", show=False, tooltip="Scroll up."),
        Binding("g", "scroll_home", "top", show=False, tooltip="To the beginning."),
        Binding("G", "scroll_end", "end", show=False, tooltip="To the end, and follow it."),
    ]

    def __init__(self) -> None:
        super().__init__(id="transcript")
        self.marks: Marks = "underlined"

    def compose(self) -> ComposeResult:
        yield Static(
            "Ask the model something: i goes to the input, Enter sends, Esc leaves it.",
            id="empty",
            markup=False,
        )

    def on_mount(self) -> None:
        self.anchor()

    def begin(self, turn: Turn) -> TurnView:
        self.query_one("#empty").display = False
        shown = list(self.query(TurnView))
        for old in shown[: max(len(shown) + 1 - MAX_TURNS, 0)]:
            old.remove()
        view = TurnView(turn, self.marks)
        self.mount(view)
        self.anchor()
        return view

    def forget(self, turn: Turn) -> None:
        for view in self.query(TurnView):
            if view.turn is turn:
                view.remove()

    def clear(self) -> None:
        self.query(TurnView).remove()
        self.query_one("#empty").display = True

    def next_marks(self) -> None:
        kinds = list(LEGENDS)
        self.marks = kinds[(kinds.index(self.marks) + 1) % len(kinds)]
        for view in self.query(TurnView):
            view.mark(self.marks)
