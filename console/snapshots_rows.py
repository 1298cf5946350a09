"""Rows of the list of snapshots: the history as a small graph, figures, and whether the host is the same."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from console.archive import Here
from console.formats import NA, clean_line, clean_text, fitted, number, rate

if TYPE_CHECKING:
    from snapshots.diff import SnapshotDiff
    from snapshots.message import Entry

MARKS = {"save": "●", "auto": "○", "rollback": "↩", "import": "↓", "merge": "┬", "measure": "·"}
MAX_LANES = 3
"""Most rollbacks drawn side by side; further ones have their mark and the words only."""
FIXED = 51
"""Columns of a row beside graph and label."""
MIN_LABEL = 8
PAGE_CHARS = 200_000


def graph(entries: Sequence[Entry]) -> tuple[str, ...]:
    """One cell text a row, newest first: its mark, and a line from each rollback down to what it restored."""
    place = {entry.commit: row for row, entry in enumerate(entries)}
    lanes: list[list[tuple[int, int]]] = []
    for row, entry in enumerate(entries):
        if entry.kind != "rollback" or not entry.source:
            continue
        span = row, place.get(entry.source, len(entries))
        free = next((lane for lane in lanes if lane[-1][1] < span[0]), None)
        if free is not None:
            free.append(span)
        elif len(lanes) < MAX_LANES:
            lanes.append([span])
    return tuple(_cells(row, entry, lanes) for row, entry in enumerate(entries))


def _cells(row: int, entry: Entry, lanes: list[list[tuple[int, int]]]) -> str:
    cells, joined = [MARKS.get(entry.kind, "●")], 0
    for number_, lane in enumerate(lanes, start=1):
        cell = " "
        for first, last in lane:
            if first <= row <= last:
                cell = "╮" if row == first else "╯" if row == last else "│"
        if cell in "╮╯":
            joined = number_
        cells.append(cell)
    drawn = cells[0]
    for number_, cell in enumerate(cells[1:], start=1):
        drawn += (
            "─" if cell == " " and number_ < joined else "┼" if cell == "│" and number_ < joined else cell
        )
    return drawn


def host_mark(entry: Entry, here: Here) -> str:
    """Whether a snapshot's figures hold here: "same" or "other" hardware, n/a where that is not known."""
    hardware = entry.trailers.get("hardware") or NA
    if here.hardware is None or NA in (hardware, here.hardware):
        return "same" if here.host is not None and entry.trailers.get("host") == here.host else NA
    return "same" if hardware == here.hardware else "other"


def heading(width: int, graph_width: int) -> Text:
    """The names of the columns."""
    label = label_width(width, graph_width)
    row = (
        f"{'':{graph_width + 2}} {'time (UTC)':<11} {'label':<{label}} {'layout':<8} {'mode':<5} {'budg':>4}"
    )
    return Text(f"{row} {'acc':>5} {'tok/s':>6} host", style="dim")


def label_width(width: int, graph_width: int) -> int:
    return max(width - FIXED - graph_width, MIN_LABEL)


def row_text(entry: Entry, cells: str, marked: bool, here: Here, width: int, graph_width: int) -> Text:
    """One snapshot on one line of `width` cells."""
    trailers = entry.trailers
    label = entry.label or (entry.note.strip().splitlines() or [entry.id])[0]
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("*" if marked else " ", "bold")
    text.append(f"{cells:<{graph_width}} ", "stage" if entry.kind == "rollback" else "")
    text.append(f" {time.strftime('%m-%d %H:%M', time.gmtime(entry.time_s))} ", "dim")
    text.append(fitted(label, label_width(width, graph_width)))
    text.append(f" {fitted(trailers.get('layout', ''), 8)} {fitted(trailers.get('mode', ''), 5)}")
    text.append(f" {fitted(trailers.get('tree-budget', ''), 4, right=True)}")
    text.append(f" {number(entry.accept_length):>5} {rate(entry.tok_s):>6} ", "bold")
    mark = host_mark(entry, here)
    text.append(mark, "fair" if mark == "other" else "dim" if mark == NA else "")
    return text


def details_text(entry: Entry, here: Here) -> Text:
    """What the row has no room for."""
    trailers = entry.trailers
    text = Text()
    text.append(f"{clean_line(entry.id)}  {entry.commit[:10]}  {entry.kind}")
    if entry.foreign:
        text.append("  not made on this host", "fair")
    if entry.tags:
        text.append(f"  tags: {clean_line(', '.join(entry.tags), 80)}")
    figure = trailers.get("figure-source")
    text.append(f"\n{clean_line(trailers.get('measured', NA), 200)}")
    text.append(f"; figures: {clean_line(figure)}" if figure else "; no figures")
    hardware = (trailers.get("hardware", NA), here.hardware or NA)
    where = f"{trailers.get('host', NA)}, {hardware[0]}"
    text.append(
        f"\n{clean_line(where, 120)}: {host_mark(entry, here)} {'host' if NA in hardware else 'hardware'}"
    )
    patched = trailers.get("patched-files", "0")
    text.append(f"; patched files: {clean_line(patched, 8)}")
    note = entry.note.strip() or entry.annotation.strip()
    text.append(f"\n{clean_line(note, 300)}" if note else "\nno note", "" if note else "dim")
    return text


def page_text(page: str) -> Text:
    """A page of a snapshot as text only, cut where it is far too long to be read."""
    shown = clean_text(page[:PAGE_CHARS])
    return Text(shown if len(page) <= PAGE_CHARS else f"{shown}\n(cut here: the page is longer)")


def results_text(found: SnapshotDiff, width: int) -> Text:
    """Two snapshots beside each other: settings, results with their conditions, host, patched files, units."""
    text = Text(no_wrap=True, overflow="ellipsis")
    name = max(min(24, width // 4), 10)
    side = max((width - name - 2) // 2, 10)

    def line(title: str, before: str, after: str, style: str = "") -> None:
        cells = f"{fitted(title, name)} {fitted(before, side)} {fitted(after, side)}"
        text.append(cells.rstrip() + "\n", style)

    text.append("settings\n", "bold underline")
    for each in found.settings:
        line(each.name, each.before, each.after)
    text.append("" if found.settings else "the same\n", "dim")
    text.append("results\n", "bold underline")
    for row in found.results:
        sides = (row.before, row.after)
        text.append(f"{clean_line(row.name, width)}", "bold")
        text.append("\n" if row.comparable or None in sides else "  (not measured alike)\n", "fair")
        rates, lengths, firsts, conditions = [], [], [], []
        for figure in sides:
            rates.append(rate(figure.tok_s if figure else None))
            lengths.append(number(figure.accept_length if figure else None))
            firsts.append(number(figure.ttft_s if figure else None, 3))
            conditions.append(f"{figure.source}: {figure.conditions}" if figure else NA)
        line("  tok/s", rates[0], f"{rates[1]}{_change(row.before, row.after)}")
        line("  accept length", *lengths)
        line("  TTFT s", *firsts)
        line("  measured", *conditions, style="dim")
    text.append("" if found.results else "none on either side\n", "dim")
    units = [(each.name, *_presence(each.before, each.after)) for each in found.units]
    for title, rows in (
        ("host", [(each.name, each.before, each.after) for each in found.host]),
        ("patched files", [(each.name, each.before, each.after) for each in found.patches]),
        ("units", units),
    ):
        text.append(f"{title}\n", "bold underline")
        for cells in rows:
            line(*cells)
        text.append("" if rows else "the same\n", "dim")
    return text


def _presence(before: str, after: str) -> tuple[str, str]:
    """Unit files in a word a side; their texts are in the pages."""
    if NA in (before, after):
        return ("absent", "there") if before == NA else ("there", "absent")
    return "there", "differs"


def _change(before: object, after: object) -> str:
    """By how much tok/s differs, in words, where both sides have it."""
    then, now = getattr(before, "tok_s", None), getattr(after, "tok_s", None)
    if not then or now is None:
        return ""
    share = round((now - then) / then * 100)
    return f"  {abs(share)} % {'faster' if share > 0 else 'slower'}" if share else "  the same"
