"""Going back to a snapshot: what it would do, then a new commit, the change, a probe, a bench and a verdict.

Nothing is touched before the preview; what ran before is kept as an automatic snapshot; a change that fails is taken
back, patched files included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from runtime.interface import ChangePlan, Runtime, RuntimeFault
from snapshots import diff, fresh, live, patches, restore, saving, services
from snapshots.annotate import headline
from snapshots.content import Environment, Figure, HostIdentity, Snapshot, hardware_class
from snapshots.diff import SnapshotDiff
from snapshots.git import StoreFault, StoreRefused
from snapshots.installed import Elsewhere
from snapshots.message import Entry
from snapshots.originals import Originals
from snapshots.restore import RestorePlan
from snapshots.services import UnitChange
from snapshots.store import Store


class RollbackFailed(StoreFault):
    """The change failed after the commit; the line says what runs now."""


@dataclass(frozen=True)
class RollbackOptions:
    """What a rollback may touch beside the runtime's settings."""

    patches: bool = True
    units: bool = False
    trust: str | None = None
    """The commit whose patches and units are trusted though it was not made here."""
    measure: bool = True
    under_load: bool = False
    author: str = "local"


@dataclass(frozen=True)
class Preview:
    """What a rollback would do; nothing has been touched."""

    entry: Entry
    snapshot: Snapshot
    before: Snapshot
    """What runs, or was saved last."""
    changes: SnapshotDiff
    """From `before` to the snapshot."""
    change: dict[str, Any]
    """Settings to apply."""
    plan: ChangePlan | None
    """The runtime's answer; None without a runtime."""
    patches: RestorePlan | None
    units: tuple[UnitChange, ...]
    trusted: bool
    options: RollbackOptions
    hardware_here: str

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why it cannot be done; empty if it can."""
        found = []
        if self.plan is not None and not self.plan.allowed:
            found.append(self.plan.summary)
        if self.options.patches and self.trusted and self.patches is not None:
            found += [f"{line} (--no-patches rolls back the settings alone)" for line in self.patches.refused]
        if self.options.units and self.trusted:
            found += [each.refused for each in self.units if each.refused and each.is_needed]
        return tuple(found)

    @property
    def same_hardware(self) -> bool:
        return self.snapshot.host.hardware == self.hardware_here

    def text(self) -> Iterator[str]:
        """The preview for people."""
        title = self.entry.label or self.entry.id
        yield f"rollback to {title} ({self.entry.id}, commit {self.entry.commit[:10]})"
        if not self.same_hardware:
            yield f"taken on other hardware: {self.snapshot.host.hardware}; here: {self.hardware_here}"
        yield from diff.text(self.changes)
        yield "runtime:"
        yield f"  {self.plan.summary if self.plan else 'none is running; nothing is applied'}"
        yield from self._patch_lines()
        for unit in self.units:
            if unit.is_needed:
                written = (
                    "written" if self.options.units and self.trusted else "shown only, --units writes it"
                )
                yield f"unit {unit.path} ({written}):"
                yield from (f"  {line}" for line in unit.diff.splitlines())
        yield from (f"refused: {line}" for line in self.refusals)

    def _patch_lines(self) -> Iterator[str]:
        if self.patches is None:
            return
        lines = self.patches.lines
        if not lines:
            return
        yield (
            "patched files:" if self.options.patches and self.trusted else "patched files (left as they are):"
        )
        yield from (f"  {line}" for line in lines)
        if not self.trusted:
            yield (
                "  this snapshot was not made on this host: look at its files, then allow them with "
                f"--trust {self.entry.commit}"
            )


@dataclass(frozen=True)
class Carried:
    """A rollback that is carried out and not measured yet."""

    entry: Entry
    """The new commit."""
    applied: str
    kept: str | None = None
    """How what ran before was kept, or why not; None where nothing was replaced or it is switched off."""
    files: tuple[str, ...] = ()
    patched: bool = False
    """Whether patched files are among them."""


@dataclass(frozen=True)
class Outcome:
    """What a rollback did."""

    entry: Entry
    """The new commit."""
    applied: str
    verdict: str
    back: bool | None
    """None where it cannot be told."""
    figure: Figure | None = None
    files: tuple[str, ...] = ()
    """Patched files and units written."""
    notes: tuple[str, ...] = field(default=())
    kept: str | None = None
    """How what ran before was kept."""


async def preview(
    store: Store,
    name: str,
    runtime: Runtime | None = None,
    options: RollbackOptions | None = None,
    config: dict[str, Any] | None = None,
) -> Preview:
    """What going back to the snapshot called `name` would do.

    Args:
        config: the settings in force where no runtime runs.

    Raises:
        UnknownSnapshot: there is no such snapshot.
        StoreRefused: `options.trust` names another commit.
    """
    options = options or RollbackOptions()
    entry, snapshot = await asyncio.to_thread(store.load, name)
    trusted = _trusted(entry, options.trust)
    seen = (
        await live.observed(runtime) if runtime is not None else live.not_running(config or snapshot.config)
    )
    here, restoring, units = await asyncio.to_thread(_look, store, snapshot, seen)
    before = seen.model_copy(
        update={
            "environment": here,
            "host": HostIdentity(name=seen.host.name, hardware=hardware_class(here.hardware)),
            "patches": restoring[1],
        }
    )
    change = {
        difference.name: snapshot.config[difference.name]
        for difference in diff.settings(before.config, snapshot.config)
        if difference.name in snapshot.config and difference.name in before.config
    }
    return Preview(
        entry=entry,
        snapshot=snapshot,
        before=before,
        changes=diff.compare(before, snapshot),
        change=change,
        plan=await runtime.preview(change) if runtime is not None else None,
        patches=restoring[0],
        units=units,
        trusted=trusted,
        options=options,
        hardware_here=before.host.hardware,
    )


async def perform(
    store: Store,
    plan: Preview,
    runtime: Runtime | None = None,
    progress: Callable[[str], None] = lambda _line: None,
) -> Outcome:
    """Do what `plan` says, and measure: `carry_out` and `judge`."""
    return await judge(store, plan, await carry_out(store, plan, runtime, progress), runtime, progress)


async def carry_out(
    store: Store,
    plan: Preview,
    runtime: Runtime | None = None,
    progress: Callable[[str], None] = lambda _line: None,
) -> Carried:
    """Do what `plan` says, and probe.

    Raises:
        StoreRefused: it is refused; nothing was touched.
        RollbackFailed: the change failed; what ran before runs again, or the line says why not.
    """
    if plan.refusals:
        raise StoreRefused("; ".join(plan.refusals))
    kept = await asyncio.to_thread(_keep, store, plan, runtime is not None)
    written, patched = await asyncio.to_thread(_restore_files, plan)
    title = f"rollback to {plan.entry.label or plan.entry.id}"[:120].rstrip()
    back_to = plan.snapshot.model_copy(update={"label": title, "taken_at_s": live.now()})
    entry = await asyncio.to_thread(
        store.save, back_to, "rollback", {"Restores": plan.entry.commit}, plan.entry.commit
    )
    if runtime is None:
        return Carried(entry, "no runtime is running: nothing was applied", kept, written, patched)
    progress("applying")
    try:
        applied = await _apply(plan, runtime)
        await live.ask(runtime, live.PROMPTS[0], 4)
    except (RuntimeFault, StoreFault, OSError) as fault:
        raise RollbackFailed(await _take_back(store, plan, runtime, fault)) from None
    return Carried(entry, applied, kept, written, patched)


async def judge(
    store: Store,
    plan: Preview,
    done: Carried,
    runtime: Runtime | None = None,
    progress: Callable[[str], None] = lambda _line: None,
) -> Outcome:
    """Measure what a rollback led to and say whether the figures are back.

    Patched files are looked at and measured by a fresh interpreter, which says what it loaded; settings alone are
    measured through the runtime.
    """
    notes: tuple[str, ...] = ()
    figure, how, wrong = None, "", ""
    try:
        if done.patched and plan.patches is not None:
            progress("starting a fresh interpreter")
            found = await fresh.look(plan.patches, _measured_config(plan), progress)
            figure, how, wrong, notes = found.figure, found.words, found.wrong, found.notes
            if figure is not None:
                await asyncio.to_thread(saving.attach, store, done.entry, figure)
        elif runtime is not None and plan.options.measure:
            figure = await saving.measure(store, done.entry, runtime, plan.options.under_load, progress)
            how = "measured through the runtime"
    except (StoreFault, RuntimeFault) as fault:
        notes = (*notes, str(fault))
    verdict, back = _told(plan, figure)
    if wrong:
        verdict, back = f"not back: {wrong}", False
    verdict = f"{verdict} ({how})" if how else verdict
    return Outcome(done.entry, done.applied, verdict, back, figure, done.files, notes, done.kept)


def _measured_config(plan: Preview) -> dict[str, Any] | None:
    """The configuration that a fresh interpreter starts; None where only what it loads is asked for."""
    ours = plan.patches is not None and any(
        not each.environment for each in plan.patches.packages if each.writes
    )
    return plan.snapshot.config if plan.options.measure and ours else None


def _keep(store: Store, plan: Preview, runs: bool) -> str | None:
    """Keep what is about to be replaced; one line on how that went, for a rollback does not wait for it to succeed."""
    writes = plan.options.patches and plan.trusted and plan.patches is not None and bool(plan.patches.writes)
    if not plan.before.config.get("auto_snapshot", True) or not (writes or (runs and plan.change)):
        return None
    try:
        words = f"rollback to {plan.entry.label or plan.entry.id}"
        touched = [each.package for each in plan.patches.packages] if writes and plan.patches else ()
        kept = saving.keep_before(store, plan.before, words, touched)
    except (StoreFault, OSError) as fault:
        return f"what ran before was not kept as a snapshot: {' '.join(str(fault).split())}"
    return f"what ran before is kept as {kept.id}"


def _trusted(entry: Entry, trust: str | None) -> bool:
    if trust is not None and not (len(trust) >= 8 and entry.commit.startswith(trust)):
        raise StoreRefused(f"--trust {trust} is not the commit of this snapshot, which is {entry.commit}")
    return not entry.foreign or trust is not None


def _look(
    store: Store, snapshot: Snapshot, seen: Snapshot
) -> tuple[Environment, tuple[RestorePlan | None, tuple[Any, ...]], tuple[UnitChange, ...]]:
    """This host's side: its environment, what restoring patches would do, what units would change."""
    from snapshots import environment

    local = seen.host.name == live.here()
    other = _sglang(snapshot, seen) if local else None
    here = environment.capture(*saving.model_files(snapshot.config), sglang=other) if local else Environment()
    examined = [each for each in snapshot.packages if each.install == "wheel"]
    if not local or not (examined or snapshot.patches):
        return here, (None, ()), services.changes(snapshot.services) if local else ()
    earlier = saving.earlier_contents(store)
    kept = Originals(earlier=earlier, fetch=False)
    restoring = restore.plan_all(examined, snapshot.patches, other, originals=kept)
    if restoring.refused:  # a wheel may have to be downloaded for it
        restoring = restore.plan_all(examined, snapshot.patches, other, originals=Originals(earlier=earlier))
    now = patches.examine_all([each.package for each in restoring.packages], other, originals=kept)
    return here, (restoring, now.patches), services.changes(snapshot.services)


def _sglang(snapshot: Snapshot, seen: Snapshot) -> Elsewhere | None:
    """SGLang's environment on this host: as the settings in force name it, else as the snapshot does."""
    return saving.sglang_environment(seen.config) or saving.sglang_environment(snapshot.config)


async def _apply(plan: Preview, runtime: Runtime) -> str:
    if not plan.change or plan.plan is None:
        return "the runtime runs these settings already"
    report = await runtime.apply(plan.change, plan.plan.revision, plan.options.author)
    if report.failure is not None:  # the runtime has gone back by itself
        raise StoreFault(report.failure)
    await live.wait_ready(runtime)
    return report.summary


def _restore_files(plan: Preview) -> tuple[tuple[str, ...], bool]:
    """The files written, and whether patched files are among them."""
    patched: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    if plan.trusted and plan.options.patches and plan.patches is not None and plan.patches.writes:
        patched = restore.run(plan.patches).written
    if plan.trusted and plan.options.units:
        units = services.restore(plan.snapshot.services)
    return patched + units, bool(patched)


async def _take_back(store: Store, plan: Preview, runtime: Runtime, fault: Exception) -> str:
    """Return to what ran before; one line on the fault and on what runs now."""
    told = await live.put_back(runtime, plan.before.config, plan.options.author)
    reason = " ".join(str(fault).split())

    def record() -> None:
        if plan.trusted and plan.options.patches and plan.patches is not None and plan.patches.writes:
            other = _sglang(plan.snapshot, plan.before)
            restore.run(restore.plan_all(plan.snapshot.packages, plan.before.patches, other))
        label = f"back to what ran before: rollback to {plan.entry.id} failed"
        store.save(plan.before.model_copy(update={"label": label, "note": reason, "taken_at_s": live.now()}))

    await asyncio.to_thread(record)
    return f"the rollback to {plan.entry.id} failed: {reason}; {told}"


def _told(plan: Preview, figure: Figure | None) -> tuple[str, bool | None]:
    hardware = (plan.snapshot.host.hardware, plan.hardware_here)
    back, line = diff.verdict(headline(plan.snapshot), figure, hardware)
    return line, back
