"""Measuring snapshots again: whether the figures of one still hold, and between which two they fell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runtime.interface import Runtime
from snapshots import diff, live
from snapshots.annotate import headline, shown
from snapshots.content import Figure, HostIdentity, Snapshot, hardware_class
from snapshots.diff import Difference
from snapshots.git import StoreRefused, UnknownSnapshot
from snapshots.message import Entry
from snapshots.store import Store

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Verified:
    """A snapshot measured again."""

    entry: Entry
    then: Figure | None
    now: Figure
    holds: bool | None
    """None where the two cannot be compared."""
    verdict: str


@dataclass(frozen=True)
class Bisected:
    """Where a figure fell."""

    good: Entry
    bad: Entry
    """The first snapshot with the lower figure; `good` is the one before it."""
    settings: tuple[Difference, ...]
    others: tuple[str, ...]
    """What else differs: host, patches, units."""
    measured: tuple[tuple[Entry, Figure], ...]
    skipped: tuple[tuple[Entry, str], ...]
    verdict: str


async def verify(
    store: Store,
    name: str,
    runtime: Runtime | None,
    under_load: bool = False,
    progress: Progress = lambda _line: None,
) -> Verified:
    """Measure a snapshot's configuration and compare with what it holds.

    With a runtime that runs another configuration it is refused: rolling back is for changing it.
    """
    entry, snapshot = await asyncio.to_thread(store.load, name)
    if runtime is not None:
        seen = await live.observed(runtime)
        other = [
            each for each in diff.settings(seen.config, snapshot.config) if each.after not in ("auto", "n/a")
        ]
        if other:
            first = other[0]
            raise StoreRefused(
                f"the runtime runs another configuration ({first.name} {first.before} instead of {first.after}); "
                f"first: ddtree snapshot rollback {entry.id}"
            )
    now = await measured(snapshot.config, runtime, under_load, progress)
    hardware = await asyncio.to_thread(_hardware_here, snapshot)
    holds, verdict = diff.verdict(headline(snapshot), now, hardware)
    return Verified(entry, headline(snapshot), now, holds, verdict)


async def bisect(
    store: Store,
    good: str,
    bad: str,
    runtime: Runtime | None,
    under_load: bool = False,
    progress: Progress = lambda _line: None,
) -> Bisected:
    """Measure `good`, `bad` and midpoints between them until two neighbours are left between which tok/s fell.

    A running runtime is put through the configurations and back to its own at the end; without one each is started in
    this process.

    Raises:
        UnknownSnapshot: `good` does not come before `bad`.
        StoreRefused: `bad` is not slower than `good` when both are measured here.
    """
    entries = await asyncio.to_thread(_between, store, good, bad)
    own = (await live.observed(runtime)).config if runtime is not None else None
    found: dict[str, Figure] = {}
    skipped: list[tuple[Entry, str]] = []

    async def speed(entry: Entry) -> float | None:
        progress(f"measuring {entry.label or entry.id}")
        _, snapshot = await asyncio.to_thread(store.load, entry.commit)
        try:
            figure = await measured(snapshot.config, runtime, under_load, progress, change=True)
        except _NotHere as reason:
            skipped.append((entry, str(reason)))
            return None
        found[entry.commit] = figure
        return figure.tok_s

    try:
        ends = [await speed(entries[0]), await speed(entries[-1])]
        if ends[0] is None or ends[1] is None:
            raise StoreRefused(f"cannot bisect: {skipped[0][0].id} cannot be measured here: {skipped[0][1]}")
        if ends[1] >= ends[0] * (1 - diff.TOK_S_TOLERANCE):
            raise StoreRefused(
                f"nothing fell: {entries[0].id} gives {shown(ends[0])} tok/s here and {entries[-1].id} {shown(ends[1])}"
            )
        line = (ends[0] + ends[1]) / 2
        low, high = 0, len(entries) - 1
        while untried := [
            each for each in range(low + 1, high) if entries[each] not in [one for one, _ in skipped]
        ]:
            middle = untried[len(untried) // 2]
            value = await speed(entries[middle])
            if value is not None:
                low, high = (middle, high) if value >= line else (low, middle)
    finally:
        if runtime is not None and own is not None:
            await live.put_back(runtime, own, "ddtree snapshot bisect")
    return await asyncio.to_thread(_named, store, entries[low], entries[high], entries, found, tuple(skipped))


class _NotHere(Exception):
    """This configuration cannot be measured with the runtime at hand."""


async def measured(
    config: dict[str, Any],
    runtime: Runtime | None,
    under_load: bool,
    progress: Progress,
    change: bool = False,
) -> Figure:
    """The standard bench of `config`: through `runtime` (with `change` put through it), else in this process."""
    if runtime is None:
        from runtime.config import validate
        from runtime.connect import open_runtime

        started = await open_runtime(validate(config))
        try:
            progress("starting the engine")
            await live.wait_ready(started)
            return await live.standard_bench(started, progress=progress)
        finally:
            await started.aclose()
    if change:
        status = await live.wait_ready(runtime)
        now = Snapshot(config=status.config).config
        wanted = {name: value for name, value in config.items() if name in now and now[name] != value}
        plan = await runtime.preview(wanted)
        if not plan.allowed:
            raise _NotHere(plan.summary)
        if plan.changes:
            report = await runtime.apply(wanted, plan.revision, "ddtree snapshot bisect")
            if report.failure is not None:
                raise _NotHere(report.failure)
            await live.wait_ready(runtime)
    return await live.standard_bench(runtime, under_load, progress)


def _between(store: Store, good: str, bad: str) -> list[Entry]:
    """Snapshots from `good` to `bad`, oldest first."""
    first, last = store.entry(good), store.entry(bad)
    found: list[Entry] = []
    offset = 0
    while True:
        page = store.list(offset=offset, limit=500)
        for entry in page.entries:
            if found or entry.commit == last.commit:
                found.append(entry)
            if found and entry.commit == first.commit:
                if len(found) > 1:
                    return found[::-1]
                raise UnknownSnapshot("good and bad are the same snapshot; name two")
        if not page.more:
            raise UnknownSnapshot(
                f"{first.id} does not come before {last.id}; name the older, good one first"
            )
        offset += 500


def _named(
    store: Store,
    good: Entry,
    bad: Entry,
    entries: list[Entry],
    found: dict[str, Figure],
    skipped: tuple[tuple[Entry, str], ...],
) -> Bisected:
    before, after = store.load(good.commit)[1], store.load(bad.commit)[1]
    changes = diff.compare(before, after)
    fields = (
        ", ".join(f"{each.name} {each.before} -> {each.after}" for each in changes.settings) or "no setting"
    )
    others = [
        f"{len(part)} {name}"
        for name, part in (
            ("differences of the host", changes.host),
            ("patched files", changes.patches),
            ("units", changes.units),
        )
        if part
    ]
    speeds = f"{shown(found[good.commit].tok_s)} -> {shown(found[bad.commit].tok_s)} tok/s"
    left_out = f"; {len(skipped)} could not be measured" if skipped else ""
    return Bisected(
        good=good,
        bad=bad,
        settings=changes.settings,
        others=tuple(others),
        measured=tuple((entry, found[entry.commit]) for entry in entries if entry.commit in found),
        skipped=skipped,
        verdict=f"tok/s fell at {bad.label or bad.id} ({bad.id}): {speeds}; changed: {fields}{left_out}",
    )


def _hardware_here(snapshot: Snapshot) -> tuple[str, str]:
    from snapshots import environment

    here = HostIdentity(hardware=hardware_class(environment.capture(None, None).hardware))
    return snapshot.host.hardware, here.hardware
