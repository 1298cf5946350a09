"""One prompt in two modes side by side: both texts, both speeds, and whether the texts are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from console import messages
from console.comparison import Comparison
from console.conversation import Turn
from console.formats import clean_line, clean_text
from console.frame import Panel, styled
from console.transcript import AnswerText, Marks, Span, figures_text, foot_text, spans
from runtime.interface import Mode


class CompareColumn(Vertical):
    """One answer with its figures."""

    def __init__(self, mode: Mode, turn: Turn, marks: Marks) -> None:
        super().__init__(classes="compare_column")
        self.turn = turn
        self._mode = mode
        self.text = AnswerText("hidden" if mode == "off" else marks)  # nothing is drafted there
        self._scroll = VerticalScroll(self.text, can_focus=False)
        self._figures = Panel(classes="line compare_figures")
        self._foot = Panel()

    def compose(self) -> ComposeResult:
        words = {"off": "mode off: plain decoding", "chain": "mode chain", "tree": "mode tree"}
        yield Static(words[self._mode], classes="title", markup=False)
        yield self._figures
        yield self._scroll
        yield self._foot

    def on_mount(self) -> None:
        self.show()

    def append(self, parts: list[Span]) -> None:
        """Adds text; follows the end unless scrolled up."""
        follows = self._scroll.is_vertical_scroll_end
        self.text.append(parts)
        if follows:
            self._scroll.call_after_refresh(self._scroll.scroll_end, animate=False)

    def show(self) -> None:
        if self.turn.ended:
            self.text.end()
        self._figures.put(figures_text(self.turn))
        self._foot.put(foot_text(self.turn, "waits"))

    def move(self, rows: int) -> None:
        self._scroll.scroll_relative(y=rows, animate=False)


class CompareScreen(ModalScreen[None]):
    """Asks both sides, one after the other, and says what it found."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (60, "-wide")]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "leave", "close", tooltip="Close; ends what is being answered."),
        Binding("r", "again", "again", tooltip="Ask both once more."),
        Binding("m", "mode", "mode", tooltip="Chain or tree on the left; asks both once more."),
        Binding("x", "cancel", "cancel", tooltip="End what is being answered."),
        Binding("j,down", "scroll(1)", "down", show=False, tooltip="Scroll both down."),
        Binding("k,up", "scroll(-1)", "up", show=False, tooltip="Scroll both up."),
        Binding("pagedown", "scroll(10)", "down", show=False, tooltip="Scroll both down by ten."),
        Binding("pageup", "scroll(-10)", "up", show=False, tooltip="Scroll both up by ten."),
    ]

    def __init__(self, make: Callable[[Mode], Comparison], mode: Mode, marks: Marks) -> None:
        """`make` gives a comparison of one mode with plain decoding."""
        super().__init__()
        self._make = make
        self._mode: Mode = mode
        self._marks = marks
        self.comparison = make(mode)
        self._asked = 0
        """Answers asked for: left, right, then the judge's where it is needed."""

    def compose(self) -> ComposeResult:
        yield Panel(id="compare_head", classes="bar")
        yield Horizontal(id="compare_columns")
        yield Panel(id="compare_verdict", classes="bar")
        yield Footer(show_command_palette=False, compact=True)

    async def on_mount(self) -> None:
        await self._begin()

    async def _begin(self) -> None:
        both = self.query_one("#compare_columns", Horizontal)
        await both.remove_children()
        found = self.comparison
        await both.mount(
            *(
                CompareColumn(mode, turn, self._marks)
                for mode, turn in zip(found.modes, found.turns, strict=True)
            )
        )
        sampling = found.request.sampling
        asked = f"> {clean_line(found.turns[0].prompt, 200)}"
        how = "" if sampling.temperature is None else f"  T {sampling.temperature:g}"
        if not found.greedy:
            how += f" · seed {sampling.seed}"
        self.query_one("#compare_head", Panel).put(Text.assemble((asked, "bold"), (how, "dim")))
        self._asked = 0
        self._ask_next()

    # Asking

    def _ask_next(self) -> None:
        found = self.comparison
        if self._asked < 2:
            turn, request = found.turns[self._asked], found.request_of(self._asked)
        else:
            judged = found.judge_request() if self._asked == 2 else None
            if judged is None:
                self._show()
                return
            turn, request = found.judge, judged
        self._asked += 1
        self.app.post_message(messages.AnswerWanted(turn.number, request))
        self._show()

    def turn(self, number: int) -> Turn | None:
        """The turn of that number, if it is being asked here."""
        found = self.comparison
        return next((turn for turn in (*found.turns, found.judge) if turn.number == number), None)

    def took(self, turn: Turn, pieces: messages.AnswerTokens | None = None, tail: str = "") -> None:
        """Draws what came for `turn`; asks the next one when it has ended."""
        for column in self.query(CompareColumn):
            if column.turn is turn:
                if pieces is not None:
                    column.append(spans(pieces.pieces))
                if tail:
                    column.append([(clean_text(tail), True)])
                column.show()
        if turn.ended and not turn.error and self._going_on(turn):
            self._ask_next()
        elif turn.ended:
            self._stop()
        self._show()

    def _going_on(self, turn: Turn) -> bool:
        return turn.stats is None or turn.stats.finish_reason in ("stop", "length")

    def _stop(self) -> None:
        """Nothing more is asked; what was not, has ended."""
        self._asked = 3
        for turn in (*self.comparison.turns, self.comparison.judge):
            turn.ended = True

    def _show(self) -> None:
        words = self.comparison.verdict()
        style = "good" if words.startswith("Same") else "bad" if "a fault;" in words else "bold"
        self.query_one("#compare_verdict", Panel).put(styled(clean_line(words, 600), style))

    # Keys

    def action_leave(self) -> None:
        self.app.post_message(messages.AnswersUnwanted())
        self.dismiss(None)

    def action_cancel(self) -> None:
        self.app.post_message(messages.AnswersUnwanted())
        self._stop()
        self._show()

    async def action_again(self) -> None:
        self.app.post_message(messages.AnswersUnwanted())
        self.comparison = self._make(self._mode)
        await self._begin()

    async def action_mode(self) -> None:
        self._mode = "chain" if self._mode == "tree" else "tree"
        await self.action_again()

    def action_scroll(self, rows: int) -> None:
        for column in self.query(CompareColumn):
            column.move(rows)
