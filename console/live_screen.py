"""Live: speed against plain decoding, acceptance, a round's time, latency, host and GPUs, requests, events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widget import Widget

from console.charts import TimeChart
from console.filtering import FilterLine
from console.formats import clean_line, clock, rate
from console.frame import ConsoleScreen, Panel, View, entitle
from console.gpu_panel import host_text, host_title
from console.request_list import RequestTable
from console.speed_panel import (
    histogram_text,
    histogram_title,
    latency_text,
    latency_title,
    positions_text,
    speed_text,
    split_text,
    split_title,
)
from console.verdict import measured
from runtime.interface import LogLine

EVENT_LINES, EVENT_LINES_BROAD = 6, 20
FEW_GPUS = 2
CALM_S = 1.5
"""Least time between two drawings of what is not in `AT_ONCE`, which makes it every other look."""


class LiveScreen(ConsoleScreen):
    NAME = "Live"
    AUTO_FOCUS = ""
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (70, "-wide"), (160, "-broad")]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "scroll(1)", "down", show=False, tooltip="Scroll the screen down."),
        Binding("k,up", "scroll(-1)", "up", show=False, tooltip="Scroll the screen up."),
        Binding(
            "r",
            "requests",
            "requests",
            tooltip="To the list of requests: Enter opens, x cancels, Esc leaves.",
        ),
        Binding("slash", "filter", "filter", show=False, tooltip="Filter the list of requests."),
        Binding(
            "v",
            "everything",
            "values",
            show=False,
            tooltip="All values of each GPU, or what fits on one line.",
        ),
    ]

    def __init__(self, tabs: tuple[tuple[str, str], ...]) -> None:
        super().__init__(tabs)
        self._everything: bool | None = None
        """None: all values where the GPUs are few."""
        self._table = RequestTable()
        self._filter = FilterLine(self._table.filter, lambda: self._table)
        self._view = View()
        self._undrawn: set[str] = set()
        """Parts that do not show `_view` yet."""
        self._all_drawn_s = -CALM_S

    def body(self) -> list[Widget]:
        left = Vertical(
            Panel("speed", id="speed"),
            Panel("host", id="host"),
            Horizontal(
                TimeChart("tok/s", id="tok_s_chart", classes="panel"),
                TimeChart("accept length", id="accept_chart", classes="panel"),
                TimeChart("CPU %", id="busy_chart", classes="panel"),
                classes="beside",
                id="charts",
            ),
            Panel("events", id="events"),
            id="live_left",
        )
        right = Vertical(
            Horizontal(
                Panel("accept length", id="histogram"),
                Panel("accepted, by position", id="positions"),
                classes="beside",
            ),
            Horizontal(
                Panel("time in a round", id="split"), Panel("latency", id="latency"), classes="beside"
            ),
            self._table,
            self._filter,
            id="live_right",
        )
        return [VerticalScroll(Horizontal(left, right, id="live_columns"), id="live", can_focus=False)]

    def action_scroll(self, rows: int) -> None:
        self.query_one("#live", VerticalScroll).scroll_relative(y=rows, animate=False)

    def action_requests(self) -> None:
        self._draw("requests")
        self._table.focus()

    def action_filter(self) -> None:
        self._draw("requests")
        self._filter.open()

    def action_everything(self) -> None:
        self._everything = not self._shows_everything(self._view)
        self.show(self._view)

    def _shows_everything(self, view: View) -> bool:
        if self._everything is not None:
            return self._everything
        return view.host is not None and (len(view.host.gpus) <= FEW_GPUS or self.has_class("-broad"))

    def on_mount(self) -> None:
        super().on_mount()
        self.screen_layout_refresh_signal.subscribe(self, lambda _screen: self._draw_in_sight())

    def on_resize(self, event: events.Resize) -> None:
        super().on_resize(event)
        self._all_drawn_s = -CALM_S
        self.call_after_refresh(lambda: self.show(self._view))

    def show(self, view: View) -> None:
        happened = _circumstances(view) != _circumstances(self._view)
        self._view = view
        if happened or time.monotonic() - self._all_drawn_s >= CALM_S:
            self._all_drawn_s = time.monotonic()
            self._undrawn = set(PARTS)
        else:
            self._undrawn |= AT_ONCE
        self._draw_in_sight()

    def _draw_in_sight(self) -> None:
        """Draws the parts in sight that show an earlier view; the others when they are scrolled to."""
        window = self.query_one("#live", VerticalScroll).region
        for name in tuple(self._undrawn):
            part = self.query_one(f"#{name}", Widget)
            # One that has no place yet takes the room that its content needs.
            if not part.size or part.region.overlaps(window):
                self._draw(name)

    def _draw(self, name: str) -> None:
        self._undrawn.discard(name)
        PARTS[name](self, self._view)

    def _show_speed(self, view: View) -> None:
        self.query_one("#speed", Panel).put(speed_text(view))

    def _show_host(self, view: View) -> None:
        host, everything = self.query_one("#host", Panel), self._shows_everything(view)
        entitle(host, host_title(view, everything))
        host.put(host_text(view, host.content_size.width, everything))

    def _show_events(self, view: View) -> None:
        lines = EVENT_LINES_BROAD if self.has_class("-broad") else EVENT_LINES
        self.query_one("#events", Panel).put(events_text(view.events[-lines:]))

    def _show_histogram(self, view: View) -> None:
        histogram = self.query_one("#histogram", Panel)
        entitle(histogram, histogram_title(view))
        histogram.put(histogram_text(view.figures.accept_counts, histogram.content_size.width))

    def _show_positions(self, view: View) -> None:
        positions = self.query_one("#positions", Panel)
        positions.put(positions_text(view.figures.by_position, positions.content_size.width))

    def _show_split(self, view: View) -> None:
        split = self.query_one("#split", Panel)
        entitle(split, split_title(view))
        split.put(split_text(view, split.content_size.width))

    def _show_latency(self, view: View) -> None:
        latency = self.query_one("#latency", Panel)
        entitle(latency, latency_title(view.latency))
        latency.put(latency_text(view.latency))

    def _show_requests(self, view: View) -> None:
        self._table.put(view.requests)

    def _show_tok_s(self, view: View) -> None:
        baseline = measured(view.status.baselines, "off") if view.status is not None else None
        level = baseline.tok_s if baseline is not None else None
        key = "" if level is None else f", plain {rate(level)}"
        self.query_one("#tok_s_chart", TimeChart).show(view.figures.tok_s_series, level, key)

    def _show_accept(self, view: View) -> None:
        self.query_one("#accept_chart", TimeChart).show(view.figures.accept_series)

    def _show_busy(self, view: View) -> None:
        self.query_one("#busy_chart", TimeChart).show(view.busy.series, title=view.busy.words)


def _circumstances(view: View) -> tuple[object, ...]:
    """What changes by an event, whose effect is to be seen on every part at once."""
    status = view.status
    state = None if status is None else (status.state, status.revision, status.baselines)
    return view.figures.setting, view.problem, state, view.host is None, len(view.requests)


PARTS: Mapping[str, Callable[[LiveScreen, View], None]] = {
    "speed": LiveScreen._show_speed,
    "host": LiveScreen._show_host,
    "tok_s_chart": LiveScreen._show_tok_s,
    "accept_chart": LiveScreen._show_accept,
    "busy_chart": LiveScreen._show_busy,
    "events": LiveScreen._show_events,
    "histogram": LiveScreen._show_histogram,
    "positions": LiveScreen._show_positions,
    "split": LiveScreen._show_split,
    "latency": LiveScreen._show_latency,
    "requests": LiveScreen._show_requests,
}
"""What draws each part of the screen, by the part's id."""
AT_ONCE = frozenset(("speed", "events", "latency"))
"""Parts that are drawn at every look: what is watched while a setting is flipped, and what seldom changes."""


def events_text(lines: tuple[LogLine, ...]) -> Text:
    """Newest first, so that the latest is seen on a low screen."""
    text = Text()
    for index, line in enumerate(reversed(lines)):
        if index:
            text.append("\n")
        bad = line.level in ("error", "critical")
        text.append(f"{clock(line.time_s)} ", "dim")
        if line.level != "info":
            text.append(f"{line.level} ", "bad" if bad else "bold")
        text.append(clean_line(line.text))
    return text if lines else Text.assemble(("none yet", "dim"))
