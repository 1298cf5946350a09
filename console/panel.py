"""A titled block of text of which only the rows that differ are drawn again."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Self

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from rich.text import Span, Text
from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip
from textual.style import Style as VisualStyle
from textual.widgets import Static

MOST_STYLES = 2000
"""Of pieces of text that a panel keeps."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a text with its own spans."""

    plain: str
    spans: tuple[Span, ...]
    style: str | Style
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

    _only_title = False
    """The border alone is to be drawn again."""

    def __init__(self, title: str = "", **options: Any) -> None:
        super().__init__(markup=False, classes=options.pop("classes", "panel"), **options)
        self.border_title = self._title_text = title
        self.auto_links = False  # there are none, and to look for them costs
        self._drawn = Text("")
        self._content: Content | None = None
        """`_drawn` as Textual takes it, once it is asked for."""
        self._rows: tuple[Row, ...] = ()
        self._widest = 0
        """Cells of the widest of `_rows`."""
        self._strips: dict[int, Strip] = {}
        """Rows of `_rows` as they were drawn, with the styles of pieces by place, all for `_drawn_as`."""
        self._styles: dict[tuple[object, ...], Style] = {}
        self._drawn_as: VisualStyle | None = None

    def put(self, text: Text) -> None:
        """Draws `text`; only another number of lines has the whole screen laid out again."""
        if self._rows and text == self._drawn and text.spans == self._drawn.spans:
            return
        rows, before, by_row = rows_of(text), self._rows, self._by_row
        self._drawn, self._content, self._rows = text, None, rows
        self._widest = max(cell_len(row.plain) for row in rows)
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

    def entitle(self, title: str) -> None:
        """Gives the border a title; the text below is not drawn again for it."""
        if title != self._title_text:
            self._title_text, self._only_title = title, bool(self.size)
            self.border_title = title
            self._only_title = False

    def refresh(
        self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False
    ) -> Self:
        if self._only_title:
            regions = (Region(-self.content_offset.x, -1, self.outer_size.width, 1),)
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)

    @property
    def _by_row(self) -> bool:
        """Whether each line of the text stands on a row of its own."""
        return self.styles.text_wrap == "nowrap" or self._widest <= self.content_size.width

    def _fits(self) -> bool:
        """Whether the text takes as many rows as there are."""
        width = self.styles.width
        if not self.content_size or width is None or width.is_auto:
            return False
        plain = self._drawn.plain
        if self._by_row and plain and not plain.endswith("\n"):
            rows = len(self._rows)
        else:
            rows = self.render().get_height(self.styles, self.content_size.width)
        return self.room(rows) == self.content_size.height

    def room(self, rows: int) -> int:
        """How many rows a text of `rows` is given."""
        return rows

    def notify_style_update(self) -> None:
        self._content = None  # the colours of named styles are in it, and in what was drawn
        self._drawn_as = None
        super().notify_style_update()

    def render(self) -> Content:
        if self._content is None:
            self._content = Content.from_rich_text(self._drawn, console=self.app.console)
        return self._content

    def render_line(self, y: int) -> Strip:
        width = self.content_size.width
        if (
            self.text_selection is not None
            or y >= len(self._rows)
            or not self._by_row
            or cell_len(self._rows[y].plain) > width
        ):
            return super().render_line(y)
        if self._drawn_as != self.visual_style:
            self._drawn_as = self.visual_style
            self._strips.clear()
            self._styles.clear()
        if y not in self._strips:
            self._strips[y] = self._strip(self._rows[y], y)
        return self._strips[y]

    def _strip(self, row: Row, y: int) -> Strip:
        """What Textual makes of a row that need not be cut, from styles that were made for the text before."""
        borders = sorted({0, len(row.plain), *(edge for span in row.spans for edge in span[:2])})
        pieces = []
        for left, right in pairwise(borders):
            names = tuple(span.style for span in row.spans if span.start <= left and right <= span.end)
            pieces.append(Segment(row.plain[left:right], self._style((row.style, *names), left, y)))
        return Strip(pieces, cell_len(row.plain))

    def _style(self, names: tuple[str | Style, ...], x: int, y: int) -> Style:
        """Of a piece that begins at column `x` of line `y`, by which the mouse selects text."""
        key = (names, x, y)
        if key not in self._styles:
            if len(self._styles) > MOST_STYLES:
                self._styles.clear()
            style = self.visual_style
            for name in names:
                if name:
                    named = self.app.console.get_style(name, default="")
                    style += VisualStyle.from_rich_style(named, self.app.ansi_theme)
            self._styles[key] = style.rich_style_with_offset(x, y)
        return self._styles[key]
