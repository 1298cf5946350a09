"""Tree: the draft tree of one round of a request, what the target accepted of it and with what it went on."""

from __future__ import annotations

import time
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widget import Widget

from console import draft_tree
from console.copying import copy
from console.draft_tree import accept_length, rounds_strip, row_text, summary, tree_rows
from console.formats import clean_line, number
from console.frame import ConsoleScreen, Panel, View, styled
from console.messages import Told
from console.request_dialog import AUTOMATIC, RequestDialog
from console.tree_feed import TreesArrived, Wanted
from runtime.interface import RequestStats, TreeTrace

HISTORY = 256
"""Rounds to step through; older ones leave."""
MAX_ROWS = 600
LARGE_NODES, LARGE_S = 200, 1.0
"""A tree of more nodes is drawn anew no more often than that."""
ASK_FIRST = (
    "No request yet. Ask something on the Prompt screen (i), or through the API; its trees stand here."
)


class TreeScroll(VerticalScroll):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", "down", show=False, tooltip="Scroll down."),
        Binding("k", "scroll_up", "up", show=False, tooltip="Scroll up."),
        Binding("g", "scroll_home", "top", show=False, tooltip="To the root."),
        Binding("G", "scroll_end", "end", show=False, tooltip="To the last row."),
    ]

    def compose(self) -> ComposeResult:
        yield Panel(id="tree_rows", classes="line")


class TreeScreen(ConsoleScreen):
    NAME = "Tree"
    _STEP = Binding.Group("round", compact=True)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("h,left", "step(-1)", "back", group=_STEP, priority=True, tooltip="One round back; pauses."),
        Binding("l,right", "step(1)", "on", group=_STEP, priority=True, tooltip="One round on."),
        Binding(
            "space", "pause", "pause", show=False, tooltip="Stay at this round, or follow the newest again."
        ),
        Binding("f", "follow", "follow", show=False, tooltip="Follow the newest round."),
        Binding("r", "request", "request", tooltip="Choose the request."),
        Binding("e", "expand", "rows", show=False, tooltip="A row for every node, or runs joined in one."),
        Binding("y", "copy", "copy", show=False, tooltip="Copy this tree as text."),
    ]

    def __init__(self, tabs: tuple[tuple[str, str], ...]) -> None:
        super().__init__(tabs)
        self._chosen: str | None = None
        """None: the newest request, whichever it is."""
        self._request_id: str | None = None
        self._requests: tuple[RequestStats, ...] = ()
        self._rounds: list[TreeTrace] = []
        self._accepts: list[int] = []
        """Tokens that each of `_rounds` gave."""
        self._paused_at: TreeTrace | None = None
        self._compact = True
        self._drawn: TreeTrace | None = None
        self._drawn_s = 0.0
        """When a tree was last drawn, monotonic seconds."""
        self._state = "starting"

    def body(self) -> list[Widget]:
        return [
            Panel(id="tree_request", classes="bar line"),
            Panel(id="tree_rounds", classes="bar line"),
            Panel(id="tree_summary", classes="bar"),
            TreeScroll(id="tree_scroll"),
            Panel(id="tree_legend", classes="bar line"),
        ]

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one("#tree_legend", Panel).put(Text(draft_tree.LEGEND))
        self.set_focus(self.query_one(TreeScroll))
        self._draw()

    # What is watched

    def wanted(self) -> Wanted | None:
        """What the feed looks for; None while nobody sees this screen."""
        return Wanted(self._chosen) if self.composed and self in self.app.screen_stack else None

    def follow(self, request_id: str | None) -> None:
        """Shows the newest rounds of one request; None: of the newest request."""
        self._chosen, self._paused_at = request_id, None
        self._begin(request_id)
        self._draw()

    @property
    def shown(self) -> TreeTrace | None:
        """The round on the screen."""
        return self._paused_at or (self._rounds[-1] if self._rounds else None)

    def arrived(self, event: TreesArrived) -> None:
        """Takes the news; a paused screen stays at its round, and at its request where that was chosen by itself."""
        self._requests = event.requests
        if event.request_id != self._request_id:
            if self._paused_at is not None:
                self._chosen = self._request_id
                return
            self._begin(event.request_id)
        if event.anew:
            self._rounds, self._accepts = [], []
        self._rounds = [*self._rounds, *event.traces][-HISTORY:]
        self._accepts = [*self._accepts, *map(accept_length, event.traces)][-HISTORY:]
        large = self.shown is not None and len(self.shown.nodes) > LARGE_NODES
        if not large or time.monotonic() - self._drawn_s > LARGE_S:
            self._draw()

    def _begin(self, request_id: str | None) -> None:
        if request_id != self._request_id:
            self._request_id, self._rounds, self._accepts = request_id, [], []

    def show(self, view: View) -> None:
        late = self.shown is not self._drawn and time.monotonic() - self._drawn_s > LARGE_S
        if self.shown is None or late or view.state_words != self._state:
            self._state = view.state_words
            self._draw()

    # Keys

    def action_step(self, by: int) -> None:
        at = self._at()
        if at is None:
            return
        to = at + by
        if to >= len(self._rounds):
            self._paused_at = None
        elif to >= 0:
            self._paused_at = self._rounds[to]
        self._draw()

    def action_pause(self) -> None:
        self._paused_at = self.shown if self._paused_at is None else None
        self._draw()

    def action_follow(self) -> None:
        self._paused_at = None
        self._draw()

    def action_expand(self) -> None:
        self._compact = not self._compact
        self._draw()

    def action_request(self) -> None:
        def chosen(request_id: str | None) -> None:
            if request_id is not None:
                self.follow(None if request_id == AUTOMATIC else request_id)

        self.app.push_screen(RequestDialog(self._requests, self._chosen), chosen)

    def action_copy(self) -> None:
        if self.shown is not None:
            self.app.post_message(Told(*copy(self.app, draft_tree.as_text(self.shown), "the tree")))

    # Drawing

    def _at(self) -> int | None:
        """Place of the shown round among the kept ones; the oldest where it has left them."""
        shown = self.shown
        if shown is None or not self._rounds:
            return None
        found = (i for i, each in enumerate(self._rounds) if each.round_index >= shown.round_index)
        return next(found, len(self._rounds) - 1)

    def on_resize(self, event: events.Resize) -> None:
        super().on_resize(event)
        self.call_after_refresh(self._draw)

    def _draw(self) -> None:
        if not self.composed or self not in self.app.screen_stack:
            return
        self.query_one("#tree_request", Panel).put(self._request_text())
        trace = self._drawn = self.shown
        self._drawn_s = time.monotonic()
        rounds, words = self.query_one("#tree_rounds", Panel), self.query_one("#tree_summary", Panel)
        tree = self.query_one("#tree_rows", Panel)
        if trace is None:
            rounds.put(Text(""))
            words.put(Text(""))
            tree.put(Text(self._nothing()))
            return
        rounds.put(self._rounds_text(trace, rounds.size.width))
        words.put(Text(summary(trace)))
        width = max(self.query_one(TreeScroll).scrollable_content_region.width, 20)
        tree.put(rows_text(trace, self._compact, width))

    def _request_text(self) -> Text:
        if self._request_id is None:
            return Text("no request", style="dim")
        stats = next((each for each in self._requests if each.request_id == self._request_id), None)
        text = Text.assemble("request ", (clean_line(self._request_id, 24), "bold"))
        if stats is not None:
            how = f"mode {stats.mode}"
            if stats.mode == "tree":
                how += f" {stats.tree_budget}"
            text.append(f" of {clean_line(stats.client, 16)} · {stats.state} · {how} · ")
            text.append(f"{stats.output_tokens} tok · accept {number(stats.accept_length)}")
        text.append(" · r chooses" if self._chosen else " · the newest; r chooses", "dim")
        return text

    def _rounds_text(self, trace: TreeTrace, width: int) -> Text:
        at = self._at()
        text = Text(no_wrap=True)
        if self._paused_at is None:
            text.append_text(styled("following", "good"))
            text.append(", space pauses", "dim")
        else:
            newer = len(self._rounds) - 1 - at if at is not None else 0
            text.append_text(styled("paused", "fair"))
            text.append(f", {newer} newer" if newer else ", the newest")
        text.append(f" · round {trace.round_index} at position {trace.position} · tokens a round: ")
        if at is not None:
            text.append_text(rounds_strip(self._accepts, at, max(width - text.cell_len, 3)))
        return text

    def _nothing(self) -> str:
        if self._state.startswith(("loading", "starting")):
            return f"The engine is {self._state}: there are no trees before it serves."
        if self._request_id is None:
            return ASK_FIRST
        stats = next((each for each in self._requests if each.request_id == self._request_id), None)
        if stats is None or stats.state == "finished":
            return "No tree is kept of this request: it decoded no round, or it ended long ago."
        return f"No round yet: the request is in {stats.state}."


def rows_text(trace: TreeTrace, compact: bool, width: int) -> Text:
    """All rows of a tree in `width` cells."""
    rows = tree_rows(trace, width if compact else None)
    text = Text("\n").join(row_text(row, width) for row in rows[:MAX_ROWS])
    if len(rows) > MAX_ROWS:
        text.append(f"\n… {len(rows) - MAX_ROWS} more rows", "dim")
    return text
