"""Charts of a figure over time, in braille dots: one second a dot, at any size and with holes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.text import Text

from console.frame import entitle
from console.panel import Panel

CELL_S = 2
"""Seconds in a cell of a chart over time, which is what braille dots resolve."""
DRAW_S = 2 * CELL_S
"""Seconds by which a curve moves at a time: to draw it costs more than all figures of a screen."""
MIN_WIDTH, MIN_HEIGHT = 12, 2
"""Cells under which no axis fits; the chart is then blank, its title remains."""
LABEL_CHARS = 6
"""Of the vertical axis with its numbers."""
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille cell by column and row (Unicode, Braille Patterns)."""

Values = tuple[float | None, ...]


class TimeChart(Panel):
    """One value per second up to the present; None is a hole, not a zero. The vertical axis starts at 0."""

    def __init__(self, title: str, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(title, id=id, classes=classes)
        self._title = title
        self._values: Values = ()
        self._level: float | None = None
        self._key = ""

    def show(
        self,
        values: Sequence[float | None],
        level: float | None = None,
        key: str = "",
        title: str | None = None,
    ) -> None:
        """Draws `values`, and `level` as a flat line for comparison; `key` says in the title what that is."""
        kept = tuple(values)
        title = self._title if title is None else title
        if self._is_like(kept) and (level, key, title) == (self._level, self._key, self._title):
            return
        self._values, self._level, self._key, self._title = kept, level, key, title
        self._plot()

    def on_resize(self) -> None:
        self._plot()

    def _plot(self) -> None:
        entitle(
            self,
            f"{self._title}, {self._seconds} s{self._key}" if self._seconds else f"{self._title}{self._key}",
        )
        self.put(self._curve())

    def _fits(self) -> bool:
        return True  # its height is given, whatever it shows

    def _is_like(self, values: Values) -> bool:
        """Whether `values` are those shown, moved by less than DRAW_S; the last second is still going on."""
        shown = self._values
        return len(values) == len(shown) > DRAW_S and any(
            values[: -1 - moved] == shown[moved:-1] for moved in range(DRAW_S)
        )

    @property
    def _seconds(self) -> int:
        return max(self.size.width - LABEL_CHARS, 0) * CELL_S

    def _curve(self) -> Text:
        width, height = self.size
        if width < MIN_WIDTH or height < MIN_HEIGHT:
            return Text("")
        values = self._values[-self._seconds :]
        known = [value for value in values if value is not None]
        if not known:
            return Text.assemble(("nothing in the last minutes", "dim"), no_wrap=True)
        top = max(*known, self._level or 0.0, 1e-9)
        holes = (None,) * (self._seconds - len(values))
        curve = dots((*holes, *values), top, height)
        level = dots((self._level,) * self._seconds, top, height)
        text = Text(no_wrap=True)
        for row in range(height):
            label = _figure(top) if row == 0 else "0" if row == height - 1 else ""
            text.append(f"{label:>{LABEL_CHARS - 1}}{'┤' if label else '│'}", "dim")
            cells = zip(curve[row], level[row], strict=True)
            for mine, run in groupby(cells, key=lambda cell: bool(cell[0])):
                drawn = "".join(chr(0x2800 + (a or b)) if a or b else " " for a, b in run)
                text.append(drawn, "stage" if mine else "fair" if drawn.strip() else "")
            text.append("\n" if row < height - 1 else "")
        return text


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def dots(values: Values, top: float, height: int) -> list[list[int]]:
    """Braille bits of each cell by row, the highest row first: neighbours are joined, holes stay open."""
    cells = [[0] * (-(-len(values) // 2)) for _ in range(height)]
    last = height * 4 - 1
    before: int | None = None
    for column, value in enumerate(values):
        if value is None:
            before = None
            continue
        at = last - round(min(max(value / top, 0.0), 1.0) * last)
        start = at if before is None else before + (at > before) - (at < before)
        for y in range(min(start, at), max(start, at) + 1):
            cells[y // 4][column // 2] |= DOTS[column % 2][y % 4]
        before = at
    return cells
