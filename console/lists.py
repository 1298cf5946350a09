"""A list of rows under the cursor keys, drawn again only where it differs, the chosen row kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widgets import DataTable

Row = tuple[str, tuple[Text, ...]]
"""Key and cells."""


class List(DataTable[Text]):
    """Rows with keys; Enter selects one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "cursor_down", "down", show=False, tooltip="Down a row."),
        Binding("k", "cursor_up", "up", show=False, tooltip="Up a row."),
        Binding("g,home", "scroll_top", "first", show=False, tooltip="To the first row."),
        Binding("G,end", "scroll_bottom", "last", show=False, tooltip="To the last row."),
    ]

    def __init__(self, *, id: str, columns: Sequence[str]) -> None:
        super().__init__(id=id, cursor_type="row", zebra_stripes=False, cell_padding=1)
        self._titles = tuple(columns)
        self._widths = _widths(self._titles, [])
        self._shown: list[Row] = []

    def on_mount(self) -> None:
        self._head()

    def _head(self) -> None:
        """Adds the columns; rows may be shown before this list hears that it is mounted."""
        if not self.columns:
            for title, width in zip(self._titles, self._widths, strict=True):
                # Textual measures columns some time after it may have drawn, and kept, rows without a width.
                self.add_column(Text(title, style="bold"), width=width)

    @property
    def chosen(self) -> str | None:
        """Key of the row under the cursor."""
        if not self._shown:
            return None
        return self._shown[min(max(self.cursor_row, 0), len(self._shown) - 1)][0]

    def show(self, rows: list[Row], columns: tuple[str, ...] | None = None) -> None:
        """Shows `rows` under `columns`; the cursor stays on its row, or where it was if that is gone."""
        chosen, before, shown = self.chosen, self.cursor_row, self._shown
        self._shown = rows
        titles = self._titles if columns is None else columns
        least = self._widths if titles == self._titles else ()
        widths = _widths(titles, rows, least)
        if (titles, widths) != (self._titles, self._widths):
            self._titles, self._widths = titles, widths
            self.clear(columns=True)
        elif [key for key, _ in rows] == [key for key, _ in shown]:
            self._update(shown)
            return
        else:
            self.clear()
        self._head()
        for key, cells in rows:
            self.add_row(*cells, key=key)
        place = next((index for index, (key, _) in enumerate(rows) if key == chosen), before)
        self.move_cursor(row=min(place, max(len(rows) - 1, 0)), animate=False)

    def _update(self, before: list[Row]) -> None:
        columns = [column.key for column in self.ordered_columns]
        for (key, cells), (_, old) in zip(self._shown, before, strict=True):
            for column, cell, was in zip(columns, cells, old, strict=True):
                if cell != was or cell.spans != was.spans:
                    self.update_cell(key, column, cell)

    def action_scroll_top(self) -> None:
        self.move_cursor(row=0)

    def action_scroll_bottom(self) -> None:
        self.move_cursor(row=len(self._shown) - 1)


def _widths(titles: Sequence[str], rows: Sequence[Row], least: Sequence[int] = ()) -> tuple[int, ...]:
    """Cells of each column's widest entry; columns do not become narrower than `least`."""
    columns = [[title, *(cells[at].plain for _, cells in rows)] for at, title in enumerate(titles)]
    needed = [max(map(cell_len, column)) for column in columns]
    return tuple(max(pair) for pair in zip(needed, least or needed, strict=True))
