"""What `ddtree ctl` prints for people: 80 columns, "n/a" for unknown, no control characters of others' making."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import Any

from runtime.changes import described
from runtime.interface import (
    ChangePlan,
    Description,
    HostSample,
    JobProgress,
    LogLine,
    RequestStats,
    RoundStats,
    Status,
    StatusChanged,
    WatchEvent,
)
from runtime.rejection import plain

WIDTH = 80
ERRORS_SHOWN = 3


def clip(line: str) -> str:
    """`line` in at most `WIDTH` columns, a cut marked, with nothing in it that a terminal would obey."""
    safe = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)
    return safe if len(safe) <= WIDTH else safe[: WIDTH - 3] + "..."


def status_lines(
    url: str, description: Description | None, status: Status, requests: Sequence[RequestStats]
) -> Iterator[str]:
    """The state of a runtime on one screen."""
    where = f"host {description.host}  pid {description.pid}  " if description else ""
    yield clip(f"{url}  {where}up {_span(status.started_at_s)}")
    progress = "" if status.load_progress is None else f" {status.load_progress:.0%}"
    yield clip(f"state        {status.state.value}{progress}{': ' if status.reason else ''}{status.reason}")
    yield from _what_runs(description, status.config)
    yield clip(
        f"requests     {status.running} running  {status.waiting} waiting  "
        f"of {status.config.get('max_concurrency', 'n/a')} at once"
    )
    yield clip(f"KV slots     {status.slots_used} used  {status.slots_cached} kept  of {status.slots_total}")
    if description is not None and description.memory is not None:
        lines = textwrap.wrap(description.memory, WIDTH - 13)
        yield from (clip(f"{'' if at else 'memory':<13}{line}") for at, line in enumerate(lines))
    if status.auto is not None:
        yield clip(f"auto         {status.auto}")
    for each in status.baselines:
        budget = f" {each.tree_budget}" if each.mode == "tree" else ""
        yield clip(
            f"baseline     {each.mode}{budget} {each.tok_s:.1f} tok/s "
            f"({each.conditions}; {_span(each.measured_at_s)} ago)"
        )
    last = next((each for each in requests if each.state == "finished"), None)
    if last is not None:
        yield clip(
            f"last answer  {last.finish_reason}  {last.output_tokens} tokens  {_figure(last.tok_s)} tok/s  "
            f"accept length {_figure(last.accept_length, 2)}  TTFT {_seconds(last.ttft_s)}"
        )
    latest = f"  {described(status.history[-1])}" if status.history else ""
    yield clip(f"revision     {status.revision}{latest}")
    for error in status.errors[-ERRORS_SHOWN:]:
        yield clip(f"error        {error}")


def _what_runs(description: Description | None, config: dict[str, Any]) -> Iterator[str]:
    model = description.target if description else config.get("model")
    layout = (description.layout if description else None) or config.get("layout", "n/a")
    yield clip(f"model        {plain(str(model))}  layout {layout}")
    if description is not None:
        threads = f"  {description.threads} threads" if description.threads else ""
        yield clip(
            f"engine       {description.engine}  {description.dtype or 'n/a'} on {description.device or 'n/a'}"
            f"{threads}  context {description.max_seq_len or 'n/a'}"
        )
        yield clip(f"drafter      block {description.block_size or 'n/a'}  {description.speculation}")
    budget = config.get("tree_budget")
    yield clip(
        f"speculation  mode {config.get('mode')}  tree_budget {'auto' if budget is None else budget}  "
        f"(at most {config.get('max_tree_budget')} live)"
    )
    yield clip(
        f"sampling     temperature {config.get('temperature')}  top_p {config.get('top_p')}  "
        f"top_k {config.get('top_k')}  max_tokens {config.get('max_tokens')}"
    )


def plan_lines(plan: ChangePlan) -> Iterator[str]:
    """What a change would do, field by field, and what it means for requests."""
    for change in plan.changes:
        note = f": {change.note}" if change.note else ""
        yield clip(f"{change.field}  {_setting(change.old)} -> {_setting(change.new)}  {change.effect}{note}")
    outage = "unknown" if plan.outage_s is None else f"{plan.outage_s:g} s"
    yield clip(f"revision {plan.revision}  {plan.requests_running} requests run  expected pause {outage}")


def request_lines(requests: Sequence[RequestStats]) -> Iterator[str]:
    """A table of requests."""
    yield f"{'ID':<20} {'CLIENT':<12} {'STATE':<10} {'MODE':<9} {'IN':>6} {'OUT':>6} {'ACC':>5} {'TOK/S':>5}"
    for each in requests:
        mode = f"{each.mode} {each.tree_budget}" if each.mode == "tree" else each.mode
        state = each.finish_reason or each.state
        yield clip(
            f"{plain(each.request_id)[:20]:<20} {plain(each.client)[:12]:<12} {state:<10} {mode:<9} "
            f"{each.prompt_tokens:>6} {each.output_tokens:>6} {_figure(each.accept_length, 2):>5} "
            f"{_figure(each.tok_s):>5}"
        )


def watch_line(event: WatchEvent) -> str | None:
    """One line on an event; None for rounds and host samples, which `RoundMeter` and nobody shows."""
    match event:
        case StatusChanged():
            reason = f": {event.reason}" if event.reason else ""
            return clip(f"{_clock(time.time())} {event.state.value}{reason} (revision {event.revision})")
        case LogLine():
            return clip(f"{_clock(event.time_s)} {event.level} {event.text}")
        case RequestStats(state="finished"):
            return clip(
                f"{_clock(time.time())} request {plain(event.request_id)} {event.finish_reason}: "
                f"{event.output_tokens} tokens, {_figure(event.tok_s)} tok/s, "
                f"accept length {_figure(event.accept_length, 2)}"
            )
        case JobProgress(job=job):
            share = "" if job.progress is None or job.over else f" {job.progress:.0%}"
            return clip(f"{_clock(time.time())} job {plain(job.id)} {job.state}{share}: {plain(job.text)}")
        case RoundStats() | HostSample() | RequestStats():
            return None


class RoundMeter:
    """Adds rounds up to one line a second."""

    def __init__(self) -> None:
        self._rounds: list[RoundStats] = []

    def add(self, event: RoundStats) -> str | None:
        """A line on the last second of rounds, once one is over."""
        self._rounds.append(event)
        first = self._rounds[0]
        seconds = event.time_s - first.time_s
        if seconds < 1.0:
            return None
        counted, self._rounds = self._rounds[1:], [event]
        sequences = sum(len(each.accept_lengths) for each in counted)
        emitted = sum(each.emitted for each in counted)
        accept = sum(sum(each.accept_lengths) for each in counted) / sequences if sequences else None
        setting = f"{event.mode} {event.tree_budget}" if event.mode == "tree" else event.mode
        setting = f"auto, {setting}" if event.auto else f"{setting} and others" if event.mixed else setting
        # A pause between two requests is no decoding.
        busy = f"{emitted / seconds:.1f}" if seconds < 2.0 else "n/a"
        return clip(
            f"{_clock(event.time_s)} {setting}: {busy} tok/s, accept length {_figure(accept, 2)}, "
            f"batch {event.batch}"
        )


def _figure(value: float | None, digits: int = 1) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _setting(value: Any) -> str:
    return "auto" if value is None else plain(str(value))


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def _span(since_s: float | None) -> str:
    if since_s is None:
        return "n/a"
    minutes = int(max(time.time() - since_s, 0) // 60)
    days, hours = minutes // 1440, minutes // 60 % 24
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"
