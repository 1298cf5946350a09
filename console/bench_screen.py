"""Bench: a load for the runtime, how far its measuring is, results as table and charts, kept and compared."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

from rich.text import Text
from textual import on
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.message import Message
from textual.widget import Widget
from textual.widgets import DataTable

from console import formats
from console.bench_load import Load
from console.bench_results import Bench, NotABench, against, case_key, case_name, differing, verdict
from console.filtering import FilterLine, wanted
from console.formats import NA, clean_line, clock, duration, number, percent, rate
from console.frame import ConsoleScreen, Panel, View, entitle, styled
from console.lists import List, Row
from console.sweep_chart import SweepChart
from runtime.interface import Job

COLUMNS = ("case", "at once", "T", "tok/s", "range", "x plain", "accept", "TTFT")


class BenchScreen(ConsoleScreen):
    NAME = "Bench"
    CHANGING = ("start", "verify", "cancel_job")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r,enter", "start", "run", tooltip="Run the bench; other requests make it stop."),
        Binding(
            "e", "load", "load", tooltip="Edit the load: modes, budgets, concurrency, prompts, duration."
        ),
        Binding("x", "cancel_job", "cancel", tooltip="Cancel the job that runs, after asking."),
        Binding("v", "app.verify", "verify", tooltip="Check that speculation changes no token."),
        Binding("w", "keep", "keep", tooltip="Keep these results as a JSON file in the data folder."),
        Binding(
            "E", "export", "CSV", show=False, tooltip="Export these results as a CSV file in the data folder."
        ),
        Binding("o", "open", "open", tooltip="Open results that were kept."),
        Binding(
            "c", "compare", "compare", tooltip="Compare with results that were kept; again: stop comparing."
        ),
        Binding("slash", "filter", "filter", show=False, tooltip="Filter the cases."),
    ]

    class Ordered(Message):
        """Something is to be done that needs a dialog, a file or the runtime."""

        def __init__(self, what: str, bench: Bench | None = None) -> None:
            super().__init__()
            self.what = what
            self.bench = bench

    def __init__(self, tabs: tuple[tuple[str, str], ...]) -> None:
        super().__init__(tabs)
        self.load = Load()
        self.bench: Bench | None = None
        self.other: Bench | None = None
        """What the results are compared with."""
        self._view = View()
        self._taken: set[str] = set()
        self._words = ""

    def body(self) -> list[Widget]:
        return [
            Panel("load", id="load"),
            Panel("job", id="job"),
            FilterLine(self._filter, lambda: self.query_one(List)),
            List(id="cases", columns=COLUMNS),
            Panel(id="verdict", classes="bar"),
            Horizontal(
                SweepChart("tok/s", id="speed_chart", classes="panel"),
                SweepChart("accept length", id="length_chart", classes="panel"),
                id="sweeps",
            ),
        ]

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one(List).focus()
        self.show(self._view)

    # Drawing

    def show(self, view: View) -> None:
        self._view = view
        self._take_results(view.jobs)
        if not self.composed:
            return
        self.query_one("#load", Panel).put(Text(clean_lines(self.load.words())))
        job = self.query_one("#job", Panel)
        title, text = job_text(view.jobs, time.time(), max(job.content_size.width, 20))
        entitle(job, title)
        job.put(text)
        self._draw_results()

    def _take_results(self, jobs: tuple[Job, ...]) -> None:
        """The latest bench that ended with results becomes what is shown."""
        for job in reversed(jobs):
            if job.name == "bench" and job.result is not None and job.id not in self._taken:
                self._taken.add(job.id)
                try:
                    self.bench = Bench.of(job.id, job.result)
                except NotABench as wrong:
                    self.bench = None
                    self.post_message(self.Ordered(f"tell {wrong}"))

    def _draw_results(self) -> None:
        bench, rows = self.bench, self._rows()
        self.query_one(List).show(rows, (*COLUMNS, "than kept") if self.other is not None else COLUMNS)
        self._draw_verdict()
        key = self._chosen()
        results = bench.results if bench is not None and key is not None else ()
        load = [each for each in results if key is not None and case_key(each)[2:] == key[2:]]
        self.query_one("#speed_chart", SweepChart).show(load, "tok_s")
        self.query_one("#length_chart", SweepChart).show(load, "accept_length")

    def _rows(self) -> list[Row]:
        if self.bench is None:
            return []
        others = self.other.by_case() if self.other is not None else None
        keeps = wanted(self._words)
        return [
            (str(case_key(each)), _cells(each, others)) for each in self.bench.results if keeps(_line(each))
        ]

    def _chosen(self) -> tuple[str, int, int, float] | None:
        chosen = self.query_one(List).chosen
        found = (case_key(each) for each in (self.bench.results if self.bench is not None else ()))
        return next((key for key in found if str(key) == chosen), None)

    def _draw_verdict(self) -> None:
        panel = self.query_one("#verdict", Panel)
        key, bench = self._chosen(), self.bench
        if bench is None or key is None:
            panel.put(
                Text("no results yet; r runs the bench, o opens kept ones" if bench is None else "", "dim")
            )
            return
        words = verdict(bench, bench.by_case()[key])
        text = Text.assemble(
            (clean_line(words), "good" if "; pays" in words else "bad" if "; loses" in words else "")
        )
        text.append(f"\n{clean_line(bench.label, 40)}: {_conditions(bench)}", "dim")
        for note in bench.notes[:2]:
            text.append(f"\n{clean_line(note)}", "dim")
        if self.other is not None:
            apart = differing(bench, self.other)
            text.append(f"\nthan kept: {clean_line(self.other.label, 40)}")
            text.append_text(
                styled(f"; conditions differ: {clean_line(apart)}", "fair") if apart else Text("")
            )
        panel.put(text)

    # Keys

    def action_start(self) -> None:
        self.post_message(self.Ordered("start"))

    def action_load(self) -> None:
        self.post_message(self.Ordered("load"))

    def action_cancel_job(self) -> None:
        self.post_message(self.Ordered("cancel"))

    def action_keep(self) -> None:
        self._with_results("keep")

    def action_export(self) -> None:
        self._with_results("export")

    def action_open(self) -> None:
        self.post_message(self.Ordered("open"))

    def action_compare(self) -> None:
        if self.other is not None:
            self.compare(None)
        else:
            self._with_results("compare")

    def _with_results(self, what: str) -> None:
        if self.bench is None:
            self.post_message(self.Ordered(f"tell nothing to {what}: there are no results yet"))
        else:
            self.post_message(self.Ordered(what, self.bench))

    def action_filter(self) -> None:
        self.query_one(FilterLine).open()

    def compare(self, other: Bench | None) -> None:
        self.other = other
        self.show(self._view)

    def present(self, bench: Bench) -> None:
        """Shows results that were kept."""
        self.bench = bench
        self.show(self._view)

    def use(self, load: Load) -> None:
        self.load = load
        self.show(self._view)

    def _filter(self, words: str) -> None:
        self._words = words
        self._draw_results()

    @on(DataTable.RowHighlighted)
    def _move(self) -> None:
        self._draw_results()

    @on(DataTable.RowSelected)
    async def _enter(self) -> None:
        await self.run_action("start")


def job_text(jobs: tuple[Job, ...], now_s: float, width: int) -> tuple[str, Text]:
    """Title and text on the job that runs, else on the last one that ended."""
    running = next((job for job in jobs if not job.over), None)
    if running is not None:
        spent = max(now_s - running.started_at_s, 0.0)
        share = running.progress
        left = f"about {duration(spent * (1 - share) / share)}" if share else NA
        bar = formats.bar(share, max(min(width - 50, 40), 0))
        text = Text.assemble(
            "▕", (bar, "stage"), f"▏ {percent(share)} · {duration(spent)} so far · left: {left}\n"
        )
        text.append(clean_line(running.text or "starting", 200))
        return f"{running.id} runs, started by {clean_line(running.holder, 40)}; x cancels", text
    if not jobs:
        return "job", Text("no job has run yet; r runs the bench, v verifies", style="dim")
    last = jobs[0]
    wrong = last.state != "done" or (last.result is not None and last.result.get("passed") is False)
    text = styled(clean_line(last.text, 200), "bad" if wrong else "good")
    ended = clock(last.ended_at_s) if last.ended_at_s is not None else NA
    return f"{last.id} {last.state} at {ended}", text


def clean_lines(text: str) -> str:
    return "\n".join(clean_line(line) for line in text.split("\n"))


def _line(result: Mapping[str, Any]) -> str:
    key = case_key(result)
    return f"{case_name(key)} concurrency {key[2]} T {key[3]:g}"


def _cells(result: Mapping[str, Any], others: Mapping[Any, Mapping[str, Any]] | None) -> tuple[Text, ...]:
    key = case_key(result)
    gain = result.get("speed_up")
    style = (
        "good" if gain is not None and gain >= 1.02 else "bad" if gain is not None and gain <= 0.98 else ""
    )
    apart = f"{rate(result.get('tok_s_min'))}-{rate(result.get('tok_s_max'))}"
    cells = (
        Text(clean_line(case_name(key), 20), style="bold"),
        Text(str(key[2]), justify="right"),
        Text(f"{key[3]:g}", justify="right"),
        Text(rate(result["tok_s"]), style="bold", justify="right"),
        Text(apart, justify="right"),
        Text.assemble((number(gain), style), justify="right"),
        Text(number(result.get("accept_length")), justify="right"),
        Text(duration(result.get("ttft_s")), justify="right"),
    )
    return cells if others is None else (*cells, Text(against(result, others.get(key)), justify="right"))


def _conditions(bench: Bench) -> str:
    """What the figures hold under, in one line."""
    known = bench.conditions
    parts = [str(known[name]) for name in ("model", "host", "device", "dtype") if known.get(name)]
    for name, unit in (("threads", "thread"), ("prompt_count", "prompt"), ("max_tokens", "token")):
        if known.get(name) is not None:
            parts.append(f"{known[name]} {unit}{'' if known[name] == 1 else 's'}")
    return clean_line(", ".join([*parts, str(known.get("measured_at", ""))]), 300)
