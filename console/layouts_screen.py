"""Layouts: presets for this host first, whether they fit, what was measured, a predicted ranking, apply with a plan."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.message import Message
from textual.widget import Widget

from console.formats import clean_line
from console.frame import ConsoleScreen, Panel, View
from console.layouts_view import (
    CONTEXT,
    Asked,
    Ranking,
    evidence_text,
    make_ranking,
    memory_text,
    prediction_text,
    ranking_text,
)
from console.verdict import measured
from layouts.plan import LayoutPlan

LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_LOAD = Binding.Group("load", compact=True)
ROWS_SHORT, ROWS_TALL = 5, 12


class LayoutsScreen(ConsoleScreen):
    NAME = "Layouts"
    CHANGING = ("choose",)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "move(1)", "down", show=False, tooltip="The next layout."),
        Binding("k,up", "move(-1)", "up", show=False, tooltip="The layout before."),
        Binding("g,home", "move(-10000)", "first", show=False, tooltip="The first layout."),
        Binding("G,end", "move(10000)", "last", show=False, tooltip="The last layout."),
        Binding("pagedown,space", "scroll(1)", "details", show=False, tooltip="Scroll the details down."),
        Binding("pageup", "scroll(-1)", "details", show=False, tooltip="Scroll the details up."),
        Binding("plus,equals_sign", "load(1)", "more", group=_LOAD, tooltip="Rank at a higher concurrency."),
        Binding("minus", "load(-1)", "less", group=_LOAD, tooltip="Rank at a lower concurrency."),
        Binding("o", "others", "others", tooltip="Layouts for other hardware too, or only this host's."),
        Binding("a,enter", "choose", "apply", tooltip="Apply this layout: shows the plan and asks."),
    ]

    class Chosen(Message):
        """The operator wants a layout; `change` is what to set."""

        def __init__(self, change: dict[str, object], title: str) -> None:
            super().__init__()
            self.change = change
            self.title = title

    class Unable(Message):
        """A key could not be obeyed, and why."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self, tabs: tuple[tuple[str, str], ...]) -> None:
        super().__init__(tabs)
        self._view = View()
        self._ranking: Ranking | None = None
        self._working: Asked | None = None
        self._failure = ""
        self._load = 0
        self._every = False
        self._accept: tuple[str, float] | None = None
        """Mode and the accept length measured in it when the ranking was asked for."""
        self._titles: dict[str, str] = {}
        self._chosen = ""
        """The selected layout; empty: none was chosen yet."""

    def body(self) -> list[Widget]:
        return [
            Panel("layouts", id="ranking"),
            VerticalScroll(
                Panel("predicted", id="prediction"),
                Panel("memory of the fullest rank", id="memory"),
                Panel("measured", id="evidence"),
                id="layout_detail",
                can_focus=False,
            ),
        ]

    @property
    def plan(self) -> LayoutPlan | None:
        """The plan of the selected layout."""
        if self._ranking is None or not self._ranking.plans:
            return None
        return self._ranking.plans[self._index]

    @property
    def _index(self) -> int:
        return 0 if self._ranking is None else self._ranking.index_of(self._chosen)

    def show(self, view: View) -> None:
        self._view = view
        asked = self._asked()
        if asked is not None and asked != self._working:
            self._working = asked
            self.run_worker(self._rank(asked), group="ranking", exclusive=True, exit_on_error=False)
        self._paint()

    def _asked(self) -> Asked | None:
        """What is to be ranked for; None while the runtime has not said what it is."""
        view = self._view
        config, host = view.config, view.host
        if not config or host is None:
            return None
        accept = self._accept_length(str(config.get("mode")), view.figures.accept_mean)
        described = view.description
        threads = described.threads if described is not None else config.get("threads")
        setting = view.figures.setting
        baseline = measured(view.status.baselines, "off") if view.status is not None else None
        on_cpu = str(config.get("device", "auto")) == "cpu"
        return Asked(
            model=str(config.get("model")),
            drafter=config.get("drafter"),
            mode=config.get("mode", "off"),
            tree_budget=view.tree_budget if setting is None or config.get("mode") == "tree" else None,
            threads=threads,
            gpus=() if on_cpu else tuple((gpu.name, gpu.memory_total) for gpu in host.gpus),
            memory=host.memory_total,
            accept_length=accept,
            concurrency=LOADS[self._load],
            context=CONTEXT,
            every=self._every,
            layout=str(config.get("layout")),
            plain_tok_s=baseline.tok_s if baseline is not None else None,
            attached=view.place.attached_to is not None,
        )

    def _accept_length(self, mode: str, measured: float | None) -> float | None:
        """The one measured in `mode` when it was first needed, so that a ranking does not move with every round."""
        if self._accept is not None and self._accept[0] != mode:
            self._accept = None
        if self._accept is None and measured is not None and mode != "off":
            self._accept = mode, round(measured, 1)
        return self._accept[1] if self._accept is not None else None

    async def _rank(self, asked: Asked) -> None:
        try:
            self._ranking = await asyncio.to_thread(make_ranking, asked)
            self._failure = ""
        except Exception as error:  # a damaged file or a full disk is told on the screen
            self._failure = clean_line(str(error) or type(error).__name__)
        if self._ranking is not None and not self._chosen and self._ranking.plans:
            self._chosen = self._ranking.plans[0].preset.name
        self._paint()

    def _paint(self) -> None:
        ranking, panel = self._ranking, self.query_one("#ranking", Panel)
        width = panel.content_size.width or self.size.width - 2
        if ranking is None:
            panel.put(
                Text(self._failure or "working out what fits here", style="bad" if self._failure else "dim")
            )
            return
        rows = ROWS_TALL if self.has_class("-tall") else ROWS_SHORT
        rows = max(1, min(rows, len(ranking.plans)))
        first = min(max(self._index - rows // 2, 0), max(len(ranking.plans) - rows, 0))
        self._put_title(panel, self._title(ranking))
        now = str(self._view.config.get("layout", ""))
        text = ranking_text(ranking, self._index, first, rows, width, now)
        for problem in (*ranking.problems, *([self._failure] if self._failure else [])):
            text.append(f"\nleft out: {clean_line(problem)}", "bad")
        panel.put(text)
        plan = self.plan
        if plan is None:
            return
        prediction = self.query_one("#prediction", Panel)
        self._put_title(prediction, f"{plan.preset.name}: {plan.preset.title} ({plan.origin})")
        prediction.put(prediction_text(plan, ranking.asked.concurrency))
        self.query_one("#memory", Panel).put(memory_text(plan, width))
        self.query_one("#evidence", Panel).put(evidence_text(plan))

    def _put_title(self, panel: Panel, title: str) -> None:
        """Titles a panel with text from files, which must not count as markup; only if it differs."""
        title = clean_line(title)
        if self._titles.get(str(panel.id)) != title:
            self._titles[str(panel.id)] = title
            panel.border_title = Text(title)  # type: ignore[assignment]

    def _title(self, ranking: Ranking) -> str:
        which = "all layouts" if self._every else "layouts for this host"
        asked = ranking.asked
        title = (
            f"{which}: predicted tok/s at concurrency {asked.concurrency}, {asked.context} tokens each; "
            f"{ranking.host.words}"
        )
        return clean_line(title, max(self.size.width - 6, 20))

    def action_move(self, rows: int) -> None:
        if self._ranking is not None and self._ranking.plans:
            index = min(max(self._index + rows, 0), len(self._ranking.plans) - 1)
            self._chosen = self._ranking.plans[index].preset.name
            self.query_one("#layout_detail", VerticalScroll).scroll_home(animate=False)
            self._paint()

    def action_scroll(self, pages: int) -> None:
        detail = self.query_one("#layout_detail", VerticalScroll)
        detail.scroll_relative(y=pages * max(detail.size.height - 1, 1), animate=False)

    def action_load(self, direction: int) -> None:
        self._load = min(max(self._load + direction, 0), len(LOADS) - 1)
        self._accept = None
        self.show(self._view)

    def action_others(self) -> None:
        self._every = not self._every
        self._accept = None
        self.show(self._view)

    def action_choose(self) -> None:
        """Asks the app for the selected layout; says why where it is refused or in force."""
        plan = self.plan
        if plan is None:
            self.post_message(self.Unable("no layout is selected"))
        elif plan.refused:
            self.post_message(self.Unable(f"{plan.preset.name} is refused: {plan.refused[0]}"))
        elif not plan.here:
            self.post_message(
                self.Unable(f"{plan.preset.name} is for {plan.machine}, not for this host and model")
            )
        elif plan.preset.field_value == self._view.config.get("layout"):
            self.post_message(self.Unable(f"{plan.preset.name} is what runs"))
        else:
            self.post_message(self.Chosen(self._change(plan), f"Change the layout to {plan.label}?"))

    def _change(self, plan: LayoutPlan) -> dict[str, object]:
        change: dict[str, object] = {"layout": plan.preset.field_value}
        if plan.preset.engine != self._view.config.get("engine"):
            change["engine"] = plan.preset.engine
        return change
