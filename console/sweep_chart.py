"""The results of a bench as a chart: textual-plotext behind a widget that copes with any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text
from textual.app import RenderResult
from textual_plotext import PlotextPlot

from console.charts import MIN_WIDTH
from console.formats import bar
from console.frame import entitle

ORDER = {"off": 0, "chain": 1, "tree": 2}
FLAT = {"off": "plain", "chain": "chain"}
"""Modes without a budget, drawn as flat lines, and what they are called."""
CURVE_HEIGHT = 8
"""Cells under which a curve over the tree budget says less than bars."""


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
        flat = [name for mode, name in FLAT.items() if any(mode == each for each, _, _ in cases)]
        lines = f"; line{'s' if len(flat) > 1 else ''}: {', '.join(flat)}" if flat else ""
        entitle(self, f"{self._title} by budget{lines}" if self._has_curve else self._title)

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
