"""What a report tells of snapshots: headline figures side by side, then each with all its figures and conditions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from runtime.report import Block, Heading, Plot, Sentence, Table, seconds
from runtime.report_plots import Bar, bars
from snapshots.annotate import headline
from snapshots.content import UNKNOWN, Figure, Snapshot
from snapshots.message import Entry

Found = tuple[Entry, Snapshot]
PACKAGES = ("torch", "transformers", "sglang", "flashinfer-python", "triton")


def snapshot_blocks(found: Sequence[Found]) -> list[Block]:
    """The part of a page over these snapshots; empty without any."""
    if not found:
        return []
    blocks: list[Block] = [Heading("Snapshots", 2)]
    if len(found) > 1:
        blocks += _side_by_side(found)
    for entry, snapshot in found:
        blocks += _one(entry, snapshot)
    return blocks


def _side_by_side(found: Sequence[Found]) -> Iterator[Block]:
    """The headline figure of each; drawn together only where host class, kind of figure and load are the same."""
    groups: dict[tuple[str, ...], list[tuple[Entry, Figure]]] = {}
    rows = []
    for entry, snapshot in found:
        figure = headline(snapshot)
        rows.append(
            (
                entry.id,
                entry.label,
                snapshot.host.hardware,
                UNKNOWN if figure is None else figure.source,
                UNKNOWN if figure is None else _setting(figure),
                _shown(None if figure is None else figure.tok_s, ".1f"),
                _shown(None if figure is None else figure.accept_length, ".2f"),
            )
        )
        if figure is not None and figure.tok_s is not None:
            at = f"T {_shown(figure.temperature, 'g')}, users {_shown(figure.concurrency, 'd')}"
            groups.setdefault((snapshot.host.hardware, figure.source, at), []).append((entry, figure))
    for where, members in groups.items():
        if len(members) > 1:
            title = f"tok/s a user by snapshot; {', '.join(where)}"
            drawn = [
                Bar(entry.id, figure.tok_s or 0.0, _bar_text(entry, figure)) for entry, figure in members
            ]
            yield Plot(bars(title, drawn), title)
    yield Table(
        ("snapshot", "label", "hardware", "figure from", "setting", "tok/s a user", "accept length"),
        tuple(rows),
    )
    if len(groups) > 1:
        yield Sentence(
            "Figures of other hardware, of another source (live traffic, bench, baseline) or under another load are "
            "not drawn together: they do not compare."
        )


def _one(entry: Entry, snapshot: Snapshot) -> Iterator[Block]:
    yield Heading(f"{entry.id} {entry.label}".strip(), 3)
    if snapshot.note.strip():
        yield Sentence(snapshot.note)
    figures = snapshot.measurements.results
    if not figures:
        yield Sentence(f"No figures: {snapshot.measurements.state}.")
    drawn = [
        Bar(f"{figure.source} {_setting(figure)}", figure.tok_s, f"{figure.tok_s:.1f}")
        for figure in figures
        if figure.tok_s is not None
    ]
    if len(drawn) > 1:
        title = f"tok/s a user in {entry.id}, each under its own conditions"
        yield Plot(bars(title, drawn), title)
    if figures:
        yield Table(
            (
                "from",
                "setting",
                "T",
                "users",
                "requests",
                "tokens",
                "tok/s a user",
                "tok/s in all",
                "accept length",
            )
            + ("TTFT", "TPOT", "over", "measured", "conditions"),
            tuple(
                (
                    figure.source,
                    _setting(figure),
                    _shown(figure.temperature, "g"),
                    _shown(figure.concurrency, "d"),
                    _shown(figure.requests, "d"),
                    _shown(figure.output_tokens, "d"),
                    _shown(figure.tok_s, ".1f"),
                    _shown(figure.total_tok_s, ".1f"),
                    _shown(figure.accept_length, ".2f"),
                    seconds(figure.ttft_s),
                    seconds(figure.tpot_s),
                    seconds(figure.window_s),
                    _moment(figure.measured_at_s),
                    figure.conditions or UNKNOWN,
                )
                for figure in figures
            ),
        )
        yield Sentence(f"State when it was taken: {snapshot.measurements.state}.")
    yield Table(("", ""), tuple(_conditions(entry, snapshot)))


def _conditions(entry: Entry, snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """Host, software and every setting."""
    hardware, software = snapshot.environment.hardware, snapshot.environment.software
    yield "taken", _moment(entry.time_s)
    yield "commit", entry.commit[:12]
    yield "host", snapshot.host.name
    yield "hardware", snapshot.host.hardware
    yield "driver", hardware.driver or UNKNOWN
    yield "python", software.python or UNKNOWN
    for name in PACKAGES:
        if software.packages.get(name):
            yield name, str(software.packages[name])
    yield "settings", ", ".join(f"{name} {value}" for name, value in snapshot.config.items())
    yield "patched files", str(len(snapshot.patches))


def _setting(figure: Figure) -> str:
    return f"tree {_shown(figure.tree_budget, 'd')}" if figure.mode == "tree" else figure.mode


def _bar_text(entry: Entry, figure: Figure) -> str:
    return f"{figure.tok_s:.1f} {_setting(figure)} {entry.label}".strip()


def _moment(time_s: float | None) -> str:
    return UNKNOWN if not time_s else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time_s))


def _shown(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)
