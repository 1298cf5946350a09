"""The requests of a runtime as a table, running ones first; what is chosen opens its tree or is cancelled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import DataTable

from console.filtering import wanted
from console.formats import clean_line, duration, fitted, number, rate, temperature
from console.frame import entitle
from runtime.interface import RequestStats

COLUMNS = (
    ("id", 12),
    ("state", 15),
    ("age", 8),
    ("prompt", 6),
    ("out", 5),
    ("mode", 8),
    ("accept", 6),
    ("last token", 10),
    ("client", 12),
    ("tok/s", 7),
    ("TTFT", 8),
    ("T", 4),
    ("workload", 12),
    ("plain because", 40),
)
"""Heading and width, the most asked for first; left and right show the others where there is no room."""
COLUMN = "request"
MOST_ROWS = 200


@dataclass(frozen=True, slots=True)
class Row:
    """One request as it is shown, its figures as text."""

    key: str
    request_id: str
    cells: tuple[str, ...]
    active: bool


def rows_of(requests: Iterable[RequestStats]) -> tuple[Row, ...]:
    """Rows in the order given; a request id that occurs again keeps a key of its own."""
    seen: dict[str, int] = {}
    rows = []
    for stats in requests:
        again = seen[stats.request_id] = seen.get(stats.request_id, -1) + 1
        key = f"{stats.request_id}\n{again}"
        rows.append(Row(key, stats.request_id, _cells(stats), stats.state != "finished"))
    return tuple(rows[:MOST_ROWS])


def _cells(stats: RequestStats) -> tuple[str, ...]:
    done = stats.state == "finished"
    mode = f"tree {stats.tree_budget}" if stats.mode == "tree" else stats.mode
    return (
        clean_line(stats.request_id, 12),
        f"done: {stats.finish_reason}" if done else stats.state,
        duration(stats.age_s),
        str(stats.prompt_tokens),
        str(stats.output_tokens),
        mode,
        number(stats.accept_length),
        "" if done else duration(stats.last_token_age_s),
        clean_line(stats.client, 12),
        rate(stats.tok_s),
        duration(stats.ttft_s),
        temperature(stats.temperature),
        clean_line(stats.workload, 12) if stats.workload else "",
        clean_line(stats.plain_reason, 40) if stats.plain_reason else "",
    )


class RequestTable(DataTable[Text]):
    """The table; it is filled anew only where rows come, go or change places."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "cursor_down", "down", show=False, tooltip="Next request."),
        Binding("k", "cursor_up", "up", show=False, tooltip="Request before."),
        Binding("g", "scroll_top", "top", show=False, tooltip="First request."),
        Binding("G", "scroll_bottom", "bottom", show=False, tooltip="Last request."),
        Binding("x", "end", "cancel", tooltip="Cancel the chosen request; asks first."),
        Binding("escape", "leave", "leave", show=False, tooltip="Back to scrolling the screen."),
    ]

    class Opened(Message):
        """Enter on a request."""

        def __init__(self, request_id: str) -> None:
            super().__init__()
            self.request_id = request_id

    class Ended(Message):
        """x on a request that is not finished."""

        def __init__(self, request_id: str) -> None:
            super().__init__()
            self.request_id = request_id

    def __init__(self) -> None:
        super().__init__(cursor_type="row", zebra_stripes=False, id="requests", classes="panel")
        self.border_title = "requests"
        self._rows: tuple[Row, ...] = ()
        self._shown: tuple[Row, ...] = ()
        self._filter = ""

    def on_mount(self) -> None:
        self.show_cursor = False
        head = _line(tuple(title for title, _ in COLUMNS))
        # One cell a row: every cell is drawn anew when a figure of its row changes, also those out of sight.
        self.add_column(Text(head), width=len(head), key=COLUMN)

    def put(self, requests: Sequence[RequestStats]) -> None:
        """Shows `requests`, running ones first."""
        self._rows = rows_of(requests)
        self._draw()

    def filter(self, text: str) -> None:
        """Shows the rows that have these words in one of their cells."""
        self._filter = text
        self._draw()

    def _draw(self) -> None:
        holds = wanted(self._filter)
        rows = tuple(row for row in self._rows if holds(" ".join(row.cells)))
        running = sum(row.active for row in self._rows)
        title = f"requests: {running} running or waiting, {len(self._rows) - running} finished"
        entitle(
            self, title + (f"; {len(rows)} with {clean_line(self._filter, 40)!r}" if self._filter else "")
        )
        if [row.key for row in rows] == [row.key for row in self._shown]:
            for before, row in zip(self._shown, rows, strict=True):
                if before != row:
                    self.update_cell(row.key, COLUMN, _text(row))
        else:
            self._fill(rows)
        self._shown = rows

    def _fill(self, rows: tuple[Row, ...]) -> None:
        chosen = self._chosen()
        x, y = self.scroll_offset
        self.clear()
        for row in rows:
            self.add_row(_text(row), key=row.key)
        place = next((i for i, row in enumerate(rows) if chosen is not None and row.key == chosen.key), None)
        if place is not None:
            self.move_cursor(row=place, scroll=self.has_focus)
        self.scroll_to(x, y, animate=False)

    def _chosen(self) -> Row | None:
        return self._shown[self.cursor_row] if 0 <= self.cursor_row < len(self._shown) else None

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        event.stop()
        chosen = self._chosen()
        if chosen is not None:
            self.post_message(self.Opened(chosen.request_id))

    def action_end(self) -> None:
        chosen = self._chosen()
        if chosen is None:
            self.notify_of("there is no request to cancel")
        elif not chosen.active:
            self.notify_of(f"request {clean_line(chosen.request_id, 40)} has ended already")
        else:
            self.post_message(self.Ended(chosen.request_id))

    class Said(Message):
        """One line for the notice bar."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def notify_of(self, text: str) -> None:
        self.post_message(self.Said(text))

    def action_leave(self) -> None:
        self.screen.set_focus(None)

    def on_focus(self, event: events.Focus) -> None:
        self.show_cursor = True

    def on_blur(self, event: events.Blur) -> None:
        self.show_cursor = False


def _text(row: Row) -> Text:
    return Text(_line(row.cells), style="" if row.active else "dim", no_wrap=True)


def _line(cells: Sequence[str]) -> str:
    """The cells of a row, or their headings, under each other."""
    return "  ".join(fitted(cell, width) for cell, (_, width) in zip(cells, COLUMNS, strict=True))
