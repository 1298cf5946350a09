"""Live: speed against plain decoding, acceptance, a round's time, latency, host and GPUs, requests, events."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
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
        self._table.focus()

    def action_filter(self) -> None:
        self._filter.open()

    def action_everything(self) -> None:
        self._everything = not self._shows_everything(self._view)
        self.show(self._view)

    def _shows_everything(self, view: View) -> bool:
        if self._everything is not None:
            return self._everything
        return view.host is not None and (len(view.host.gpus) <= FEW_GPUS or self.has_class("-broad"))

    def show(self, view: View) -> None:
        self._view = view
        figures = view.figures
        self.query_one("#speed", Panel).put(speed_text(view))
        host = self.query_one("#host", Panel)
        entitle(host, host_title(view, self._shows_everything(view)))
        host.put(host_text(view, host.content_size.width, self._shows_everything(view)))
        self._show_charts(view)
        broad = self.has_class("-broad")
        events = view.events[-(EVENT_LINES_BROAD if broad else EVENT_LINES) :]
        self.query_one("#events", Panel).put(events_text(events))
        histogram = self.query_one("#histogram", Panel)
        entitle(histogram, histogram_title(view))
        histogram.put(histogram_text(figures.accept_counts, histogram.content_size.width))
        positions = self.query_one("#positions", Panel)
        positions.put(positions_text(figures.by_position, positions.content_size.width))
        split = self.query_one("#split", Panel)
        entitle(split, split_title(view))
        split.put(split_text(view, split.content_size.width))
        latency = self.query_one("#latency", Panel)
        entitle(latency, latency_title(view.latency))
        latency.put(latency_text(view.latency))
        self._table.put(view.requests)

    def _show_charts(self, view: View) -> None:
        baseline = measured(view.status.baselines, "off") if view.status is not None else None
        level = baseline.tok_s if baseline is not None else None
        key = "" if level is None else f", plain {rate(level)}"
        self.query_one("#tok_s_chart", TimeChart).show(view.figures.tok_s_series, level, key)
        self.query_one("#accept_chart", TimeChart).show(view.figures.accept_series)
        self.query_one("#busy_chart", TimeChart).show(view.busy.series, title=view.busy.words)


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
