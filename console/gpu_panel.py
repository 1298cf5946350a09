"""The host and its GPUs as text: a table that shows what fits, or everything on two lines a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from rich.text import Text

from console import formats
from console.formats import NA, clean_line, number, percent, used_of
from console.frame import View
from runtime.interface import GpuSample, HostSample

STALE_S = 5.0
"""A host sample older than this is shown with its age."""
STALE_VALUE_S = 4.0
STALE_RARE_S = 15.0
"""For readings that are made every few seconds only."""
RARE = ("power_limit_w", "pcie_rx_b_s", "processes")
HARMFUL = ("too hot", "hardware", "power brake")
NAME_CHARS = 20


@dataclass(frozen=True, slots=True)
class Column:
    """One value of a GPU: its heading, how wide it is, how it is printed, the field whose age counts."""

    title: str
    width: int
    text: Callable[[GpuSample], str]
    field: str
    left: bool = False


def _power(gpu: GpuSample) -> str:
    if gpu.power_w is None:
        return NA
    return f"{gpu.power_w:.0f}" + ("" if gpu.power_limit_w is None else f"/{gpu.power_limit_w:.0f}") + " W"


def _traffic(received: float | None, sent: float | None) -> str:
    """Bytes per second in and out, in one unit."""
    if received is None or sent is None:
        return NA
    unit, scale = "B", 1.0
    for bigger in ("KiB", "MiB", "GiB"):
        if max(received, sent) < 1000 * scale:
            break
        unit, scale = bigger, scale * 1024
    return f"{received / scale:.1f}/{sent / scale:.1f} {unit}/s"


def _processes(gpu: GpuSample) -> str:
    if gpu.processes is None:
        return NA
    ours = [each for each in gpu.processes if each.ours]
    if not ours:
        return f"0 of {len(gpu.processes)}"
    held = [each.memory_used for each in ours if each.memory_used is not None]
    return f"{len(ours)} of {len(gpu.processes)}" + (f", {formats.size(sum(held))}" if held else "")


def _throttle(gpu: GpuSample) -> str:
    return NA if gpu.throttle is None else ", ".join(gpu.throttle) or "none"


COLUMNS = (
    Column("util", 5, lambda gpu: percent(gpu.utilisation), "utilisation"),
    Column("memory", 16, lambda gpu: used_of(gpu.memory_used, gpu.memory_total), "memory_used"),
    Column("power", 9, _power, "power_w"),
    Column(
        "temp",
        5,
        lambda gpu: NA if gpu.temperature_c is None else f"{gpu.temperature_c:.0f} °C",
        "temperature_c",
    ),
    Column("SM MHz", 6, lambda gpu: formats.count(gpu.sm_clock_mhz), "sm_clock_mhz"),
    Column("throttled by", 18, _throttle, "throttle", left=True),
    Column("mem MHz", 7, lambda gpu: formats.count(gpu.memory_clock_mhz), "memory_clock_mhz"),
    Column("PCIe in/out", 17, lambda gpu: _traffic(gpu.pcie_rx_b_s, gpu.pcie_tx_b_s), "pcie_rx_b_s"),
    Column("NVLink in/out", 17, lambda gpu: _traffic(gpu.nvlink_rx_b_s, gpu.nvlink_tx_b_s), "nvlink_rx_b_s"),
    Column("our processes", 16, _processes, "processes", left=True),
)
"""The most important ones first: the others go to a second line, or out, where there is no room."""
LABEL_CHARS = 5
AGE_CHARS = 7


def fitting(width: int) -> int:
    """How many of the COLUMNS stand on one line of `width` cells behind the label and before the age."""
    left, fit = width - LABEL_CHARS - AGE_CHARS, 0
    for column in COLUMNS:
        left -= column.width + 1
        if left < 0:
            break
        fit += 1
    return fit


def gpus_text(gpus: Sequence[GpuSample], width: int, everything: bool, host_age_s: float | None) -> Text:
    """The table; `everything` puts on a second line what does not fit."""
    fit = fitting(width)
    head = " ".join(_aligned(column.title, column) for column in COLUMNS[:fit])
    text = Text(f"{'GPU':<{LABEL_CHARS}}{head} {'age':>{AGE_CHARS - 1}}", style="")
    text.stylize("dim")
    same = _one_name(gpus) is not None
    for gpu in gpus:
        text.append("\n")
        text.append_text(gpu_text(gpu, width, host_age_s or 0.0, everything, named=not same))
    return text


def gpu_text(gpu: GpuSample, width: int, host_age_s: float, everything: bool, named: bool) -> Text:
    """One GPU: a line of values, or of why there are none; then its name, the other values, what is wrong with it."""
    fit = fitting(width)
    label = f"{gpu.index}" if gpu.instance is None else f"{gpu.index}:{gpu.instance}"
    text = Text(f"{label:<{LABEL_CHARS}}")
    if gpu.state.startswith("lost"):
        text.append(clean_line(f"{gpu.state}  {gpu.name}"), "bad")
        return text
    # Cells of one style are one piece: every piece takes its time to draw.
    cells = (_cell(gpu, column, host_age_s) for column in COLUMNS[:fit])
    for style, run in groupby(cells, key=itemgetter(1)):
        text.append("".join(f"{cell} " for cell, _ in run), style)
    freshest = min(gpu.ages.values(), default=None)
    # Tenths would have the whole table drawn again at every look.
    age = NA if freshest is None else _seconds(freshest + host_age_s)
    text.append(f"{age:>{AGE_CHARS - 1}}", "dim")
    indent = "\n" + " " * LABEL_CHARS
    more = [clean_line(gpu.name, NAME_CHARS)] if named else []
    if everything:
        more += [f"{column.title} {clean_line(column.text(gpu))}" for column in COLUMNS[fit:]]
    for line in _lines(more, width - LABEL_CHARS):
        text.append(indent + line, "dim")
    if gpu.state != "ok":
        text.append(indent)
        text.append(clean_line(gpu.state), "bad")
    old = [f"{each.title} {gpu.ages[each.field]:.0f} s" for each in COLUMNS if _old(gpu, each)]
    for line in _lines([f"old: {', '.join(old)}"] if old else [], width - LABEL_CHARS):
        text.append(indent + line, "fair")
    return text


def _seconds(age_s: float) -> str:
    return "<1 s" if age_s < 1 else f"{age_s:.0f} s"


def _lines(parts: Sequence[str], width: int) -> list[str]:
    """`parts` on as few lines of `width` as they need."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + 3 <= width:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return lines


def _old(gpu: GpuSample, column: Column) -> bool:
    """Whether a value was older in its sample than its reading should let it become."""
    limit = STALE_RARE_S if column.field in RARE else STALE_VALUE_S
    return gpu.ages.get(column.field, 0.0) > limit


def _cell(gpu: GpuSample, column: Column, host_age_s: float) -> tuple[str, str]:
    """A value on the width of its column, and its style."""
    value = clean_line(column.text(gpu), column.width)
    old = host_age_s > STALE_S or _old(gpu, column)
    style = "dim" if old or value == NA else ""
    if column.field == "throttle" and gpu.throttle and not old:
        style = "bad" if any(word in value for word in HARMFUL) else "" if "idle" in value else "fair"
    return _aligned(value, column), style


def _aligned(value: str, column: Column) -> str:
    return f"{value:<{column.width}}" if column.left else f"{value:>{column.width}}"


def _one_name(gpus: Sequence[GpuSample]) -> str | None:
    names = {gpu.name for gpu in gpus if gpu.instance is None}
    return names.pop() if len(names) == 1 and all(gpu.instance is None for gpu in gpus) else None


def host_title(view: View, everything: bool) -> str:
    """The host by name, how old its figures are, its GPUs by name or why there is none."""
    if view.host is None:
        return "host"
    title = f"host {clean_line(view.host.host, 60)}"
    if view.place.attached_to is not None:
        title += " (of the server)"
    if view.host_age_s is not None and view.host_age_s > STALE_S:
        title += f", {view.host_age_s:.0f} s old"
    name = _one_name(view.host.gpus)
    if name is not None:
        title += f"; {len(view.host.gpus)} x {clean_line(name, 40)}"
    if view.host.gpus and not everything:
        title += "; v: all values"
    return f"{title}; {clean_line(view.host.gpu_note)}" if view.host.gpu_note else title


def host_text(view: View, width: int, everything: bool) -> Text:
    """Requests and slots, CPU and memory, the GPUs."""
    text = Text()
    status = view.status
    if status is None:
        text.append("requests and slots n/a")
    else:
        text.append("as last told: " if view.problem else "")
        text.append(f"{status.running} running · {status.waiting} waiting · KV slots ")
        text.append(f"{status.slots_used} used, {status.slots_cached} kept, of {status.slots_total}")
    text.append("\n")
    text.append(_cpu_text(view.host) if view.host is not None else "CPU and memory n/a")
    if view.host is not None and view.host.gpus:
        text.append("\n")
        text.append_text(gpus_text(view.host.gpus, width, everything, view.host_age_s))
    return text


def _cpu_text(host: HostSample) -> str:
    cores = f" of {host.cpu_count} cores" if host.cpu_count is not None else ""
    return (
        f"CPU {percent(host.cpu)}{cores} · load {number(host.load_1m)} · "
        f"memory {used_of(host.memory_used, host.memory_total)} · runtime {formats.size(host.process_memory)}"
    )
