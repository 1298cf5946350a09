"""A titled block of text of which only the rows that differ are drawn again."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rich.cells import cell_len
from rich.text import Span, Text
from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip
from textual.visual import Visual
from textual.widgets import Static


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a text with its own spans."""

    plain: str
    spans: tuple[Span, ...]
    style: Any
    """Of the whole text."""


def rows_of(text: Text) -> tuple[Row, ...]:
    """The lines of `text`."""
    lines = text.plain.split("\n")
    starts = list(accumulate((len(line) + 1 for line in lines), initial=0))
    spans: list[list[Span]] = [[] for _ in lines]
    for start, end, style in text.spans:
        for row in range(bisect_right(starts, start) - 1, len(lines)):
            if starts[row] >= end:
                break
            left, right = max(start - starts[row], 0), min(end - starts[row], len(lines[row]))
            if left < right:
                spans[row].append(Span(left, right, style))
    return tuple(Row(line, tuple(own), text.style) for line, own in zip(lines, spans, strict=True))


class Panel(Static):
    """A titled block of text that is drawn again only where its text differs."""

    def __init__(self, title: str = "", **options: Any) -> None:
        super().__init__(markup=False, classes=options.pop("classes", "panel"), **options)
        self.border_title = title
        self._drawn = Text("")
        self._content: Content | None = None
        """`_drawn` as Textual takes it, once it is asked for."""
        self._rows: tuple[Row, ...] = ()
        self._strips: dict[int, Strip] = {}
        """Rows of `_rows` as they were drawn for `_drawn_for`."""
        self._drawn_for: tuple[object, ...] = ()

    def put(self, text: Text) -> None:
        """Draws `text`; only another number of lines has the whole screen laid out again."""
        if self._rows and text == self._drawn and text.spans == self._drawn.spans:
            return
        rows, before, by_row = rows_of(text), self._rows, self._by_row
        self._drawn, self._content, self._rows = text, None, rows
        differing = [
            number for number, row in enumerate(rows) if number >= len(before) or row != before[number]
        ]
        for number in differing:
            self._strips.pop(number, None)
        if not self._fits():
            self.refresh(layout=True)
        elif by_row and self._by_row and len(rows) == len(before):
            width = self.content_size.width
            self.refresh(*(Region(0, number, width, 1) for number in differing))
        else:
            self.refresh()

    @property
    def _by_row(self) -> bool:
        """Whether each line of the text stands on a row of its own."""
        if self.styles.text_wrap == "nowrap":
            return True
        width = self.content_size.width
        return all(cell_len(row.plain) <= width for row in self._rows)

    def _fits(self) -> bool:
        """Whether the text takes as many rows as there are."""
        width = self.styles.width
        if not self.content_size or width is None or width.is_auto:
            return False
        plain = self._drawn.plain
        if self._by_row and plain and not plain.endswith("\n"):
            return len(self._rows) == self.content_size.height
        return self.render().get_height(self.styles, self.content_size.width) == self.content_size.height

    def notify_style_update(self) -> None:
        self._content = None  # the colours of named styles are in it, and in what was drawn
        self._strips.clear()
        super().notify_style_update()

    def render(self) -> Content:
        if self._content is None:
            self._content = Content.from_rich_text(self._drawn, console=self.app.console)
        return self._content

    def render_line(self, y: int) -> Strip:
        if self.text_selection is not None or y >= len(self._rows) or not self._by_row:
            return super().render_line(y)
        width = self.content_size.width
        drawn_for = (width, self.visual_style)
        if drawn_for != self._drawn_for:
            self._strips.clear()
            self._drawn_for = drawn_for
        if y not in self._strips:
            row = self._rows[y]
            text = Text(row.plain, row.style, spans=list(row.spans))
            content = Content.from_rich_text(text, console=self.app.console)
            strips = Visual.to_strips(self, content, width, 1, self.visual_style)
            # The place of each piece, by which the mouse selects text.
            self._strips[y] = strips[0].apply_offsets(0, y) if strips else Strip.blank(width)
        return self._strips[y]
