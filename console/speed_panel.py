"""Speed, acceptance, the time split of a round and latency, as the text of the Live screen's panels."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.text import Text

from console import formats
from console.formats import NA, age, clean_line, duration, number, percent, rate
from console.frame import View
from console.latency import QUANTILES, Latency
from console.verdict import alarm, measured, verdict
from runtime.interface import STAGES, Baseline

PANEL_ROWS = 5
BAR_MAX = 40


def speed_text(view: View) -> Text:
    """Decoding and prefill apart: now, mean, peak; accept length; the verdict and the alarm; what is compared with."""
    figures, status = view.figures, view.status
    loading = status is None or status.state == "loading"
    running = status is not None and status.running > 0
    now = NA if loading or view.problem else "prefill" if running else "idle"
    text = Text()
    _row(text, "decode tok/s", now if figures.idle else rate(figures.tok_s), rate(figures.tok_s_mean))
    text.append(f" {rate(figures.tok_s_peak):>7} peak\n")
    _row(text, "prefill tok/s", rate(figures.prefill_tok_s), rate(figures.prefill_mean))
    text.append(f" {rate(figures.prefill_peak):>7} peak\n")
    _row(
        text,
        "accept length",
        now if figures.idle else number(figures.accept_length),
        number(figures.accept_mean),
    )
    text.append("  tokens per step, bonus included\n", "dim")
    baseline = measured(status.baselines, "off") if status is not None else None
    words = verdict(figures, baseline, view.description.speculation if view.description else None)
    if loading:
        words = "nothing can be decoded yet"
    elif view.problem and figures.idle:
        words = "n/a: the runtime does not tell whether it decodes"
    text.append(clean_line(words), verdict_style(words))
    if status is not None and status.auto is not None:
        text.append(f"\nauto plays {clean_line(status.auto)}")
    trouble = alarm(figures, view.config)
    if trouble is not None:
        text.append("\n")
        text.append(trouble, "bad")
    if figures.before is not None:
        before = figures.before
        text.append(f"\nbefore, with {before.setting}: ")
        text.append(f"{rate(before.tok_s)} tok/s, accept length {number(before.accept_length)}")
    text.append("\nplain baseline ")
    text.append_text(
        _baseline_text(baseline, measured(status.baselines, "chain") if status is not None else None)
    )
    return text


def _row(text: Text, name: str, now: str, mean: str) -> None:
    text.append(f"{name:<13} ")
    text.append(f"{now:>7}", "bold")
    text.append(f" now {mean:>7} mean")


def _baseline_text(plain: Baseline | None, chain: Baseline | None) -> Text:
    if plain is None:
        return Text.assemble((f"{NA}: not measured yet", "dim"))
    text = Text(f"{rate(plain.tok_s)} tok/s, chain {NA if chain is None else rate(chain.tok_s)}")
    text.append(f" ({clean_line(plain.conditions)}, {age(plain.measured_at_s, time.time())})", "dim")
    return text


def verdict_style(words: str) -> str:
    if " pays" in words:
        return "good"
    return "bad" if " loses" in words or " inactive" in words else "bold"


def histogram_title(view: View) -> str:
    total = sum(view.figures.accept_counts)
    return f"accept length of {total} steps" if total else "accept length"


def histogram_text(counts: Sequence[int], width: int) -> Text:
    """Share of steps that gave 1, 2, ... tokens."""
    total = sum(counts)
    if not total:
        return Text.assemble(("n/a: nothing decoded with this setting yet", "dim"))
    return _bars([(index, count / total) for index, count in enumerate(counts) if index], width)


def positions_text(shares: tuple[float | None, ...], width: int) -> Text:
    """Share of rounds that drafted a position in which it was accepted."""
    if not shares:
        return Text.assemble(("n/a: nothing drafted with this setting yet", "dim"))
    return _bars(list(enumerate(shares, 1)), width)


def _bars(rows: Sequence[tuple[int, float | None]], width: int) -> Text:
    """Numbered shares with bars, filled column by column."""
    columns = -(-len(rows) // PANEL_ROWS)
    column_width = max(width // columns, 9)
    text = Text()
    for row in range(min(PANEL_ROWS, len(rows))):
        if row:
            text.append("\n")
        for name, share in rows[row::PANEL_ROWS]:
            text.append(f"{name:>2} {percent(share):>5} ")
            text.append(formats.bar(share, column_width - 11), "share")
            text.append("  ")
    return text


def split_title(view: View) -> str:
    """How long a round takes and how many rows the target verifies in it, on average; idle: since the last flip."""
    figures = view.figures
    if figures.stages_s is None or figures.nodes is None:
        return "time in a round"
    when = "rounds so far" if figures.idle else "a round"
    return f"{when}: {duration(sum(figures.stages_s))}, {figures.nodes:.1f} rows verified"


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
        text.append(formats.bar(share, min(width - 23, BAR_MAX)), "stage")
    return text


def latency_title(latency: Latency) -> str:
    return f"latency, last {latency.requests} finished" if latency.requests else "latency"


def latency_text(latency: Latency) -> Text:
    """p50, p90 and p99 of what a client waits for; each from the requests that have it."""
    if not latency.requests:
        return Text.assemble(("n/a: no request has finished yet", "dim"))
    text = Text()
    text.append(" " * 10 + "".join(f"{f'p{share * 100:.0f}':>9}" for share in QUANTILES), "dim")
    rows = (
        ("TTFT", latency.ttft),
        ("TPOT", latency.tpot),
        ("end to end", latency.end_to_end),
        ("queue", latency.queue),
    )
    for name, spread in rows:
        text.append(f"\n{name:<10}" + "".join(f"{duration(value):>9}" for value in spread.values))
        if 0 < spread.count < latency.requests:
            text.append(f" of {spread.count}", "dim")
    return text
