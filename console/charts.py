"""Charts of a figure over time: textual-plotext behind a widget that copes with any size and with holes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.app import RenderResult
from textual_plotext import PlotextPlot

MIN_WIDTH, MIN_HEIGHT = 12, 3
"""Cells under which no axes fit; the chart is then blank, its title remains."""


class TimeChart(PlotextPlot):
    """One value per second up to the present; None is a hole, not a zero. The vertical axis starts at 0."""

    def __init__(self, title: str, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._title = title
        self.border_title = title
        self._values: tuple[float | None, ...] = ()
        self._level: float | None = None

    def show(
        self,
        values: Sequence[float | None],
        level: float | None = None,
        key: str = "",
        title: str | None = None,
    ) -> None:
        """Draws `values`, and `level` as a flat line for comparison; `key` says in the title what that is."""
        kept = tuple(values)
        self._title = self._title if title is None else title
        # The last second is still going on: it is drawn when the next one begins.
        if kept[:-1] == self._values[:-1] and len(kept) == len(self._values) > 1 and level == self._level:
            return
        holes_only = not any(value is not None for value in (*kept, *self._values))
        self._values, self._level = kept, level
        self.border_title = f"{self._title}, {self._seconds} s{key}"
        if not holes_only:
            self.refresh()

    def render(self) -> RenderResult:
        width, height = self.size
        if width < MIN_WIDTH or height < MIN_HEIGHT:
            return Text("")
        if not any(value is not None for value in self._values):
            return Text("nothing in the last minutes", style="dim", no_wrap=True)
        self._draw(self._seconds)
        return super().render()

    @property
    def _seconds(self) -> int:
        """Seconds shown: two a cell, which is what braille dots resolve."""
        return max(60, self.size.width * 2)

    def _draw(self, seconds: int) -> None:
        plot = self.plt
        values = self._values[-seconds:]
        first, start = 1 - seconds, 1 - len(values)
        top = max(value for value in (*values, self._level, 1e-9) if value is not None) * 1.1
        plot.clear_figure()
        for run in _runs(values):
            xs = [start + index for index in run]
            plot.plot(xs, [values[index] for index in run], marker="braille", color="cyan")
        if self._level is not None:
            plot.plot([first, 0], [self._level, self._level], marker="braille", color="orange")
        plot.xlim(first, 0)
        plot.ylim(0, top)
        plot.xaxes(False, False)
        plot.xticks([])
        plot.yaxes(True, False)
        label = top / 1.1
        plot.yticks([0, label], ["0", f"{label:.0f}" if label >= 10 else f"{label:.1f}"])


def _runs(values: Sequence[float | None]) -> list[list[int]]:
    """Indices of unbroken stretches; a lone value is drawn as a dot of its own."""
    runs: list[list[int]] = []
    for index, value in enumerate(values):
        if value is None:
            continue
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs
