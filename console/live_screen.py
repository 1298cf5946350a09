"""Live: speed against plain decoding, acceptance, the round's time split, host and GPUs, events."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widget import Widget

from console import formats
from console.charts import TimeChart
from console.figures import plain_baseline, verdict
from console.formats import NA, clean_line, clock, duration, number, percent, rate, used_of
from console.frame import ConsoleScreen, Panel, View
from runtime.interface import STAGES, Baseline, GpuSample, HostSample

STALE_S = 5.0
"""A host sample older than this is shown with its age."""
POSITION_ROWS = 5
EVENT_LINES = 50


class LiveScreen(ConsoleScreen):
    NAME = "Live"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "scroll(1)", "down", show=False, tooltip="Scroll the screen down."),
        Binding("k,up", "scroll(-1)", "up", show=False, tooltip="Scroll the screen up."),
    ]

    def body(self) -> list[Widget]:
        return [
            VerticalScroll(
                Panel("speed", id="speed"),
                Horizontal(
                    TimeChart("tok/s", id="tok_s_chart", classes="panel"),
                    TimeChart("accept length", id="accept_chart", classes="panel"),
                    id="charts",
                ),
                Horizontal(
                    Panel("accepted, by position", id="positions"),
                    Panel("time in a round", id="split"),
                    id="rounds",
                ),
                Panel("host", id="host"),
                Panel("events", id="events"),
                id="live",
                can_focus=False,
            )
        ]

    def action_scroll(self, rows: int) -> None:
        self.query_one("#live", VerticalScroll).scroll_relative(y=rows, animate=False)

    def show(self, view: View) -> None:
        figures = view.figures
        baseline = plain_baseline(view.status.baselines) if view.status is not None else None
        self.query_one("#speed", Panel).put(speed_text(view, baseline))
        level = baseline.tok_s if baseline is not None else None
        charts = self.query_one("#tok_s_chart", TimeChart), self.query_one("#accept_chart", TimeChart)
        charts[0].show(figures.tok_s_series, level, "" if level is None else f"; line: plain {rate(level)}")
        charts[1].show(figures.accept_series)
        positions = self.query_one("#positions", Panel)
        positions.put(positions_text(figures.by_position, positions.content_size.width))
        split = self.query_one("#split", Panel)
        split.border_title = split_title(view)
        split.put(split_text(view, split.content_size.width))
        host = self.query_one("#host", Panel)
        host.border_title = host_title(view)
        host.put(host_text(view))
        self.query_one("#events", Panel).put(events_text(view))


def speed_text(view: View, baseline: Baseline | None) -> Text:
    """tok/s and accept length: now, mean, peak; the verdict in words; what it is compared with."""
    figures = view.figures
    running = view.status is not None and view.status.running > 0
    loading = view.status is None or view.status.state == "loading"
    now = NA if loading else "prefill" if running else "idle"
    text = Text()
    text.append("tok/s  ")
    text.append(f"{now if figures.idle else rate(figures.tok_s):>7}", "bold")
    text.append(f" now {rate(figures.tok_s_mean):>7} mean {rate(figures.tok_s_peak):>7} peak")
    text.append("  output tokens/s of decoding\n", "dim")
    text.append("accept ")
    text.append(f"{now if figures.idle else number(figures.accept_length):>7}", "bold")
    text.append(f" now {number(figures.accept_mean):>7} mean             ")
    text.append("  tokens/step, bonus included\n", "dim")
    words = verdict(figures, baseline, view.description.speculation if view.description else None)
    if loading:
        words = "nothing can be decoded yet"
    text.append(clean_line(words), verdict_style(words))
    if figures.before is not None:
        before = figures.before
        text.append(f"\nbefore, with {before.setting}: ")
        text.append(f"{rate(before.tok_s)} tok/s, accept length {number(before.accept_length)}")
    text.append("\nplain baseline ")
    if baseline is None:
        text.append(f"{NA}: not measured yet", "dim")
    else:
        text.append(f"{rate(baseline.tok_s)} tok/s ")
        text.append(f"({clean_line(baseline.conditions)}, {clock(baseline.measured_at_s)})", "dim")
    return text


def verdict_style(words: str) -> str:
    if " pays" in words:
        return "good"
    return "bad" if " loses" in words or " inactive" in words else "bold"


def positions_text(shares: tuple[float | None, ...], width: int) -> Text:
    """Share of rounds that drafted a position in which it was accepted; filled column by column."""
    if not shares:
        return Text("n/a: nothing drafted with this setting yet", style="dim")
    columns = -(-len(shares) // POSITION_ROWS)
    column_width = max(width // columns, 9)
    text = Text()
    for row in range(min(POSITION_ROWS, len(shares))):
        if row:
            text.append("\n")
        for column in range(columns):
            index = column * POSITION_ROWS + row
            if index >= len(shares):
                continue
            text.append(f"{index + 1:>2} {percent(shares[index]):>5} ")
            text.append(formats.bar(shares[index], column_width - 11), "share")
            text.append("  ")
    return text


def split_title(view: View) -> str:
    """How long a round takes and how many rows the target verifies in it, on average."""
    figures = view.figures
    if figures.stages_s is None or figures.nodes is None:
        return "time in a round"
    return f"a round: {duration(sum(figures.stages_s))}, {figures.nodes:.1f} rows verified"


def split_text(view: View, width: int) -> Text:
    """Mean time of each stage of a decode round, in ms and as a share."""
    stages = view.figures.stages_s
    text = Text()
    total = sum(stages) if stages else 0.0
    for index, name in enumerate(STAGES):
        if index:
            text.append("\n")
        seconds = stages[index] if stages else None
        share = seconds / total if seconds is not None and total > 0 else None
        text.append(f"{name:<7}{duration(seconds):>8} {percent(share):>5} ")
        text.append(formats.bar(share, min(width - 23, 40)), "stage")
    return text


def host_title(view: View) -> str:
    """The host by name, how old its figures are, why there is no GPU row."""
    if view.host is None:
        return "host"
    title = f"host {clean_line(view.host.host, 60)}"
    if view.place.attached_to is not None:
        title += " (of the server)"
    if view.host_age_s is not None and view.host_age_s > STALE_S:
        title += f", {view.host_age_s:.0f} s old"
    return f"{title}; {clean_line(view.host.gpu_note)}" if view.host.gpu_note else title


def host_text(view: View) -> Text:
    """Requests and slots, CPU and memory, one row a GPU."""
    text = Text()
    status = view.status
    if status is None:
        text.append("requests and slots n/a")
    else:
        text.append(f"{status.running} running · {status.waiting} waiting · KV slots ")
        text.append(f"{status.slots_used} used, {status.slots_cached} kept, of {status.slots_total}")
    text.append("\n")
    text.append(_cpu_text(view.host) if view.host is not None else "CPU and memory n/a")
    for gpu in view.host.gpus if view.host is not None else ():
        text.append("\n")
        text.append_text(gpu_text(gpu))
    return text


def _cpu_text(host: HostSample) -> str:
    cores = f" of {host.cpu_count} cores" if host.cpu_count is not None else ""
    return (
        f"CPU {percent(host.cpu)}{cores} · load {number(host.load_1m)} · "
        f"memory {used_of(host.memory_used, host.memory_total)} · runtime {formats.size(host.process_memory)}"
    )


def gpu_text(gpu: GpuSample) -> Text:
    """One GPU in one row; a reading the device does not give is n/a."""
    text = Text(f"GPU {gpu.index} {clean_line(gpu.name, 18):<18}")
    text.append(f" {percent(gpu.utilisation):>5}  {used_of(gpu.memory_used, gpu.memory_total)}")
    limit = f"/{gpu.power_limit_w:.0f}" if gpu.power_limit_w is not None else ""
    text.append(f"  {NA if gpu.power_w is None else f'{gpu.power_w:.0f}{limit} W'}")
    text.append(f"  {NA if gpu.temperature_c is None else f'{gpu.temperature_c:.0f} °C'}")
    text.append(f"  {clean_line(gpu.state)}", "" if gpu.state == "ok" else "bad")
    return text


def events_text(view: View) -> Text:
    """Newest first, so that the latest is seen on a low screen."""
    text = Text()
    for index, line in enumerate(reversed(view.lines[-EVENT_LINES:])):
        if index:
            text.append("\n")
        bad = line.level in ("error", "critical")
        text.append(f"{clock(line.time_s)} ", "dim")
        if line.level != "info":
            text.append(f"{line.level} ", "bad" if bad else "bold")
        text.append(clean_line(line.text))
    return text if view.lines else Text("none yet", style="dim")
