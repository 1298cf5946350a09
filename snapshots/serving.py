"""Snapshots as a runtime of this process offers them: read, saved and rolled back to by jobs, kept before a change.

What comes in may come over HTTP: it names a snapshot and says whether to measure, and can set no file and no path.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from runtime.interface import (
    ConfigRejected,
    Frozen,
    Runtime,
    RuntimeFault,
    RuntimeUnavailable,
    SnapshotComparison,
    SnapshotPage,
    SnapshotRow,
    SnapshotUnknown,
    SnapshotView,
)
from runtime.jobs import JobContext, JobKind, Outcome
from runtime.snapshot_port import Keep
from snapshots import environment, live, rollback, saving, wording
from snapshots.content import NoteRefused, Snapshot, hardware_class
from snapshots.diff import compare
from snapshots.git import StoreFault, UnknownSnapshot
from snapshots.hardware import read_hardware
from snapshots.journal import RestoreFailed, RestoreRefused
from snapshots.message import Entry
from snapshots.rollback import Preview, RollbackOptions
from snapshots.saving import SaveRequest
from snapshots.store import Store

LOOK_S = 1.0
"""Longest that a change waits until what runs is taken down."""
LOWEST = 19
"""Niceness of a thread that takes only what nobody else wants."""
PATH_FIELDS = ("model", "drafter", "sglang_python")
LOGGER = logging.getLogger("ddtree")
T = TypeVar("T")


class SnapshotParameters(Frozen):
    """A snapshot of what runs."""

    label: str = Field(default="", max_length=120)
    note: str = Field(default="", max_length=100_000)
    """Kept byte for byte."""
    measure: bool = False
    """Take the standard bench afterwards and attach it."""
    under_load: bool = False
    """Measure also while other clients' requests run."""


class RollbackParameters(Frozen):
    """Back to the settings of a snapshot; patched files and units are restored on the host itself alone."""

    snapshot: str = Field(min_length=1, max_length=400)
    """Id, tag, commit, label, latest or latest~N."""
    measure: bool = True
    under_load: bool = False
    dry_run: bool = False
    """Only say what it would do."""


@contextlib.contextmanager
def as_faults() -> Iterator[None]:
    """Faults of the store as faults of a runtime, which cross to others."""
    try:
        yield
    except UnknownSnapshot as fault:
        raise SnapshotUnknown(str(fault)) from None
    except (StoreFault, NoteRefused, RestoreRefused, RestoreFailed) as fault:
        raise RuntimeUnavailable(str(fault)) from None


class StoreReader:
    """The store of this host's user, read in threads."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._hardware: str | None = None

    async def page(self, words: str = "", offset: int = 0, limit: int = 50) -> SnapshotPage:
        def read() -> SnapshotPage:
            store = Store.at(self._folder)
            page = store.list(words, offset, limit)
            return SnapshotPage(
                snapshots=tuple(map(row_of, page.entries)),
                offset=offset,
                more=page.more,
                remote=page.remote,
                not_pushed=page.unpushed,
                store=store.place.words,
                host=live.here(),
                hardware=self._hardware_here(),
            )

        with as_faults():
            return await asyncio.to_thread(read)

    async def show(self, name: str) -> SnapshotView:
        def read() -> SnapshotView:
            store = Store.at(self._folder)
            entry, snapshot = store.load(name)
            files = store.files(entry.commit)
            content = snapshot.model_dump(mode="json", exclude={"patches", "note", "label"})
            patches = [
                each.model_dump(mode="json", exclude={"content", "original"}) for each in snapshot.patches
            ]
            return SnapshotView(
                snapshot=row_of(entry),
                content={**content, "patches": patches},
                page=files.get("README.md", b"").decode("utf-8", "replace"),
                files=tuple(sorted(files)),
            )

        with as_faults():
            return await asyncio.to_thread(read)

    async def diff(self, first: str, second: str = "latest") -> SnapshotComparison:
        def read() -> SnapshotComparison:
            store = Store.at(self._folder)
            (one, before), (other, after) = store.load(first), store.load(second)
            found = wording.diff_json(compare(before, after))
            return SnapshotComparison(before=row_of(one), after=row_of(other), **found)

        with as_faults():
            return await asyncio.to_thread(read)

    def _hardware_here(self) -> str:
        if self._hardware is None:
            self._hardware = hardware_class(read_hardware())
        return self._hardware


class StoreKeeper:
    """Keeps snapshots of a runtime of this process in a store of this host."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: of the store, the default one if None."""
        self._folder = folder
        self._reading: threading.Thread | None = None
        self.snapshots = StoreReader(folder)
        self.jobs: tuple[JobKind[Any], ...] = (
            JobKind("snapshot", SnapshotParameters, self._save, check_saved, exclusive=False),
            JobKind("rollback", RollbackParameters, self._roll_back, self._check_known),
        )

    async def look(self, runtime: Runtime) -> Keep:
        """As `Keeper.look`."""
        try:
            seen: Snapshot | Exception = await live.observed(runtime, limit_s=LOOK_S)
        except Exception as fault:  # the change is made, whatever becomes of its snapshot
            seen = fault

        async def keep(change: str) -> str:
            try:
                if isinstance(seen, Exception):
                    raise seen
                running = seen
                entry = await asyncio.to_thread(
                    lambda: saving.keep_before(Store.at(self._folder), running, change, newest=2)
                )
                self._read_models(running.config)
            except Exception as fault:
                LOGGER.warning("no automatic snapshot: %s", fault)
                return f"what ran before was not kept as a snapshot: {' '.join(str(fault).split())}"
            return f"what ran before is kept as {entry.id}"

        return keep

    def _read_models(self, config: dict[str, Any]) -> None:
        """Has model files too large to be read while saving read beside what runs, so that the next save knows them."""
        if self._reading is not None and self._reading.is_alive():
            return

        def read() -> None:
            with contextlib.suppress(OSError):  # they stay unknown
                if sys.platform == "linux":  # elsewhere a thread has no niceness of its own
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
                environment.hash_models(*saving.model_files(config))

        self._reading = threading.Thread(target=read, name="ddtree-hashes", daemon=True)
        self._reading.start()

    async def _save(self, context: JobContext[SnapshotParameters]) -> Outcome:
        wanted = context.parameters
        context.report(None, "saving")
        with as_faults():
            store = await asyncio.to_thread(Store.at, self._folder)
            request = SaveRequest(label=wanted.label, note=wanted.note)
            entry, cancelled = await _unbroken(saving.save_running(store, context.runtime, request))
            self._read_models((await context.runtime.status()).config)
            said = f"saved {entry.id} {entry.label}".rstrip()
            if wanted.measure:
                if cancelled:
                    raise asyncio.CancelledError(f"{said}, not measured")
                try:
                    progress = _progress(context)
                    await saving.measure(store, entry, context.runtime, wanted.under_load, progress)
                except asyncio.CancelledError:
                    raise asyncio.CancelledError(f"{said}, not measured") from None
                except (StoreFault, RuntimeFault) as fault:
                    said = f"{said}; {fault}"
            entry = await asyncio.to_thread(store.entry, entry.commit)
        return Outcome(said, {"snapshot": row_of(entry).model_dump(mode="json")})

    async def _roll_back(self, context: JobContext[RollbackParameters]) -> Outcome:
        wanted, runtime, progress = context.parameters, context.runtime, _progress(context)
        options = RollbackOptions(
            patches=False, measure=wanted.measure, under_load=wanted.under_load, author=context.author
        )
        progress("looking at what it would do")
        with as_faults():
            store = await asyncio.to_thread(Store.at, self._folder)
            plan = await rollback.preview(store, wanted.snapshot, runtime, options)
            refused = (*plan.refusals, *_paths_of_others(plan))
            result: dict[str, Any] = {
                "snapshot": row_of(plan.entry).model_dump(mode="json"),
                "change": plan.change,
                "lines": [*plan.text(), *(f"refused: {line}" for line in refused[len(plan.refusals) :])],
                "refused": list(refused),
            }
            if wanted.dry_run:
                what = "; ".join(refused) or (plan.plan.summary if plan.plan else "nothing to change")
                return Outcome(f"rollback to {plan.entry.id} would: {what}", result)
            if refused:
                raise RuntimeFault("; ".join(refused))
            done, cancelled = await _unbroken(rollback.carry_out(store, plan, runtime, progress))
            said = f"rolled back to {plan.entry.id} as {done.entry.id}"
            try:
                if cancelled:
                    raise asyncio.CancelledError
                outcome = await rollback.judge(store, plan, done, runtime, progress)
            except asyncio.CancelledError:
                raise asyncio.CancelledError(f"{said}, not measured") from None
        more = [outcome.verdict, *outcome.notes, *([outcome.kept] if outcome.kept else [])]
        result |= {
            "commit": row_of(outcome.entry).model_dump(mode="json"),
            "applied": outcome.applied,
            "back": outcome.back,
            "verdict": outcome.verdict,
            "notes": list(outcome.notes),
            "kept": outcome.kept,
            "figure": outcome.figure and outcome.figure.model_dump(mode="json"),
        }
        return Outcome("; ".join((said, *more)), result)

    async def _check_known(self, _runtime: Runtime, parameters: RollbackParameters) -> None:
        with as_faults():
            await asyncio.to_thread(lambda: Store.at(self._folder).entry(parameters.snapshot))


async def check_saved(_runtime: Runtime, parameters: SnapshotParameters) -> None:
    """Refuses a label or a note that cannot be kept, or that looks like a secret."""
    for name in ("label", "note"):
        try:
            saving.check_words(SaveRequest(**{name: getattr(parameters, name)}))
        except (StoreFault, NoteRefused) as refused:
            raise ConfigRejected(str(refused), name) from None


def row_of(entry: Entry) -> SnapshotRow:
    """A snapshot of a list as the value that crosses to others."""
    return SnapshotRow(**wording.entry_json(entry))


def entry_of(row: SnapshotRow) -> Entry:
    """What `row_of` made a row of, as far as a list shows it."""
    told = {
        "restores": row.source if row.kind == "rollback" else None,
        "origin": row.source if row.kind == "import" else None,
        "host": row.host,
        "hardware": row.hardware,
        "model": row.model,
        "layout": row.layout,
        "mode": row.mode,
        "tree-budget": row.tree_budget,
        "temperature": row.temperature,
        "accept-length": row.accept_length,
        "tok-s": row.tok_s,
        "figure-source": row.figure_source,
        "measured": row.measured,
        "patched-files": row.patched_files,
        "units": row.units,
    }
    return Entry(
        commit=row.commit,
        parents=row.parents,
        kind=row.kind,  # type: ignore[arg-type]
        id=row.id,
        label=row.label,
        note=row.note,
        time_s=row.time_s,
        author=row.author,
        trailers={name: str(value) for name, value in told.items() if value is not None},
        foreign=row.foreign,
        annotation=row.annotation,
        tags=row.tags,
    )


def snapshot_of(view: SnapshotView) -> Snapshot:
    """The snapshot of a view; its patched files have no content."""
    return Snapshot(**view.content, note=view.snapshot.note, label=view.snapshot.label)


def _progress(context: JobContext[Any]) -> Any:
    return lambda line: context.report(None, line)


def _paths_of_others(plan: Preview) -> Iterator[str]:
    """Paths that another host wrote into a snapshot are not taken over by a job, which anybody remote may start."""
    if not plan.entry.foreign:
        return
    for name in PATH_FIELDS:
        value = str(plan.change.get(name, ""))
        if "/" in value or "\\" in value or value.startswith((".", "~")):
            yield (
                f"{name}: {value} is a path of a snapshot that was not made on this host; roll back there with: "
                f"ddtree snapshot rollback {plan.entry.id}"
            )


async def _unbroken(work: Coroutine[Any, Any, T]) -> tuple[T, bool]:
    """What `work` gives, brought to its end even if the job is cancelled meanwhile; and whether it was."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    return task.result(), cancelled
