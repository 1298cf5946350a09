"""Charts of a figure over time: textual-plotext behind a widget that copes with any size and with holes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text
from textual.app import RenderResult
from textual_plotext import PlotextPlot

from console.formats import bar
from console.frame import entitle

CELL_S = 2
"""Seconds in a cell of a chart over time, which is what braille dots resolve; it is drawn anew as often."""
MIN_WIDTH, MIN_HEIGHT = 12, 3
"""Cells under which no axes fit; the chart is then blank, its title remains."""


ORDER = {"off": 0, "chain": 1, "tree": 2}
CURVE_HEIGHT = 8
"""Cells under which a curve over the tree budget says less than bars."""


class TimeChart(PlotextPlot):
    """One value per second up to the present; None is a hole, not a zero. The vertical axis starts at 0."""

    def __init__(self, title: str, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._title = title
        self.border_title = title
        self._values: tuple[float | None, ...] = ()
        self._level: float | None = None
        self._drawn: tuple[object, ...] = ()
        self._picture: RenderResult = ""
        """What was made of `_drawn`: plotting takes many times longer than showing."""

    def show(
        self,
        values: Sequence[float | None],
        level: float | None = None,
        key: str = "",
        title: str | None = None,
    ) -> None:
        """Draws `values`, and `level` as a flat line for comparison; `key` says in the title what that is."""
        kept = tuple(values)
        title, before = self._title if title is None else title, self._title
        if self._is_like(kept) and (level, title) == (self._level, before):
            return
        self._title = title
        holes_only = not any(value is not None for value in (*kept, *self._values))
        self._values, self._level = kept, level
        entitle(self, f"{self._title}, {self._seconds} s{key}")
        if not holes_only:
            self.refresh()

    def _is_like(self, values: tuple[float | None, ...]) -> bool:
        """Whether `values` are those shown, moved by less than a cell; the last second is still going on."""
        shown = self._values
        return len(values) == len(shown) > CELL_S and any(
            values[: -1 - moved] == shown[moved:-1] for moved in range(CELL_S)
        )

    def render(self) -> RenderResult:
        width, height = self.size
        if width < MIN_WIDTH or height < MIN_HEIGHT:
            return Text("")
        if not any(value is not None for value in self._values):
            return Text("nothing in the last minutes", style="dim", no_wrap=True)
        drawn = (self._values, self._level, self.size, self.app.theme)
        if drawn != self._drawn:
            self._draw(self._seconds)
            self._drawn, self._picture = drawn, super().render()
        return self._picture

    @property
    def _seconds(self) -> int:
        return max(60, self.size.width * CELL_S)

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


class SweepChart(PlotextPlot):
    """One figure of the cases of one load: over the tree budget where several were measured, else as bars."""

    def __init__(self, title: str, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._title = title
        self.border_title = title
        self._cases: tuple[tuple[str, int, float], ...] = ()

    def show(self, results: Sequence[Mapping[str, Any]], figure: str) -> None:
        """Draws `figure` of results that differ in mode and tree budget alone."""
        cases = tuple(
            (str(each["mode"]), int(each["tree_budget"]), float(each[figure]))
            for each in results
            if isinstance(each.get(figure), int | float)
        )
        if cases != self._cases:
            self._cases = cases
            self.refresh()
        over = " by tree budget; lines: plain, chain" if self._has_curve else ""
        entitle(self, f"{self._title}{over}")

    @property
    def _trees(self) -> list[tuple[int, float]]:
        return sorted((budget, value) for mode, budget, value in self._cases if mode == "tree")

    @property
    def _has_curve(self) -> bool:
        return len(self._trees) > 1 and self.size.height >= CURVE_HEIGHT

    def render(self) -> RenderResult:
        width, height = self.size
        if not self._cases or width < MIN_WIDTH or height < 1:
            return Text("")
        if not self._has_curve:
            return self._bars(width)
        self._draw()
        return super().render()

    def _bars(self, width: int) -> Text:
        most = max(value for _, _, value in self._cases)
        text = Text(no_wrap=True)
        for mode, budget, value in sorted(self._cases, key=lambda case: (ORDER.get(case[0], 9), case[1])):
            name = f"tree {budget}" if mode == "tree" else mode
            shown = f"{value:.1f}" if value >= 10 else f"{value:.2f}"
            text.append(f"{name:<9}{shown:>7} ")
            text.append(bar(value / most if most > 0 else None, max(width - 18, 0)), "share")
            text.append("\n")
        return text

    def _draw(self) -> None:
        plot, trees = self.plt, self._trees
        budgets, values = [budget for budget, _ in trees], [value for _, value in trees]
        plot.clear_figure()
        for mode, colour in (("off", "orange"), ("chain", "green")):
            for level in (value for name, _, value in self._cases if name == mode):
                plot.plot([budgets[0], budgets[-1]], [level, level], marker="braille", color=colour)
        plot.plot(budgets, values, marker="braille", color="cyan")
        plot.scatter(budgets, values, marker="dot", color="cyan")
        plot.ylim(0, max(value for _, _, value in self._cases) * 1.1)
        plot.xticks(budgets, [str(budget) for budget in budgets])
        plot.xaxes(True, False)
        plot.yaxes(True, False)
