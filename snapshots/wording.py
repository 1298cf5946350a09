"""Snapshots as `ddtree snapshot` shows them: rows for people, objects for programs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from snapshots.annotate import shown
from snapshots.content import UNKNOWN
from snapshots.diff import SnapshotDiff
from snapshots.history import Page
from snapshots.message import Entry
from snapshots.place import Place

HEAD = (
    f"{'id':<20} {'time (UTC)':<11} {'layout':<7} {'mode':<5} {'budget':>6} {'accept':>6} {'tok/s':>7}  host"
)


def plain(text: str) -> str:
    """`text` on one line that cannot steer a terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def lines_of(text: str) -> Iterator[str]:
    """Several lines that cannot steer a terminal."""
    return (plain(line) for line in text.splitlines())


def list_lines(page: Page, place: Place, hardware_here: str) -> Iterator[str]:
    """A page of the history, a row and a line of words for each snapshot."""
    yield f"{place.words}{_remote_words(page)}"
    if not page.entries:
        yield "no snapshot here" if page.offset == 0 else "no more snapshots"
        return
    yield HEAD
    for entry in page.entries:
        yield row(entry, hardware_here)
        yield f"    {_words(entry)}"
    if page.more:
        yield f"older ones: --offset {page.offset + len(page.entries)}"


def row(entry: Entry, hardware_here: str) -> str:
    """One snapshot on one line of 80 columns."""
    told = entry.trailers
    return plain(
        f"{entry.id:<20} {time.strftime('%m-%d %H:%M', time.gmtime(entry.time_s)):<11} "
        f"{told.get('layout', UNKNOWN)[:7]:<7} {told.get('mode', UNKNOWN)[:5]:<5} "
        f"{told.get('tree-budget', UNKNOWN)[:6]:>6} {shown(entry.accept_length, digits=2):>6} "
        f"{shown(entry.tok_s):>7}  {host_mark(entry, hardware_here)}"
    )


def host_mark(entry: Entry, hardware_here: str) -> str:
    """Whether it was taken on this class of hardware, in a word."""
    there = entry.trailers.get("hardware", UNKNOWN)
    if UNKNOWN in (there, hardware_here):
        return UNKNOWN
    return "same" if there == hardware_here else "other"


def entry_json(entry: Entry) -> dict[str, Any]:
    """One snapshot of a list."""
    told = entry.trailers
    return {
        "id": entry.id,
        "commit": entry.commit,
        "kind": entry.kind,
        "label": entry.label,
        "note": entry.note,
        "annotation": entry.annotation,
        "tags": list(entry.tags),
        "time_s": entry.time_s,
        "author": entry.author,
        "host": _known(told.get("host")),
        "hardware": _known(told.get("hardware")),
        "foreign": entry.foreign,
        "source": entry.source,
        "parents": list(entry.parents),
        "model": told.get("model"),
        "layout": told.get("layout"),
        "mode": told.get("mode"),
        "tree_budget": _number(told.get("tree-budget")),
        "temperature": _number(told.get("temperature")),
        "accept_length": entry.accept_length,
        "tok_s": entry.tok_s,
        "figure_source": told.get("figure-source"),
        "measured": told.get("measured"),
        "patched_files": _number(told.get("patched-files")),
        "units": _number(told.get("units")),
    }


def diff_json(changes: SnapshotDiff) -> dict[str, Any]:
    """A difference for programs."""
    return {
        "settings": [asdict(each) for each in changes.settings],
        "results": [
            {
                "name": row.name,
                "before": row.before and row.before.model_dump(),
                "after": row.after and row.after.model_dump(),
                "comparable": row.comparable,
            }
            for row in changes.results
        ],
        "host": [asdict(each) for each in changes.host],
        "patches": [asdict(each) for each in changes.patches],
        "units": [asdict(each) for each in changes.units],
    }


def told(lines: Iterable[str]) -> None:
    """Print lines that may hold text of commits, models and files."""
    for line in lines:
        print(plain(line))


def _words(entry: Entry) -> str:
    marks = [
        word for word, wanted in ((entry.kind, entry.kind != "save"), ("foreign", entry.foreign)) if wanted
    ]
    marks += [f"tag {tag}" for tag in entry.tags]
    first = next((line.strip() for line in entry.note.splitlines() if line.strip()), "")
    text = " - ".join(part for part in (entry.label, first) if part) or "(no label)"
    return plain(f"{text}{' [' + ', '.join(marks) + ']' if marks else ''}")[:120]


def _remote_words(page: Page) -> str:
    if page.remote is None:
        return ""
    unpushed = "n/a" if page.unpushed is None else str(page.unpushed)
    return f"; remote {page.remote}; not pushed: {unpushed}"


def _number(text: str | None) -> float | int | str | None:
    if text is None:
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _known(text: str | None) -> str | None:
    return None if text == UNKNOWN else text
