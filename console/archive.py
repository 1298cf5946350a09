"""The console's line to the store of snapshots: every git run happens in a worker thread, one act at a time.

The store and git are imported at the first use, which keeps them out of the console's start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from console.formats import clean_line
from runtime.interface import Runtime, RuntimeUnavailable

if TYPE_CHECKING:
    from snapshots.content import Snapshot
    from snapshots.history import Page
    from snapshots.message import Entry
    from snapshots.rollback import Preview
    from snapshots.store import Store


@dataclass(frozen=True, slots=True)
class Here:
    """What a snapshot's host is compared with."""

    host: str | None = None
    hardware: str | None = None
    """Class of hardware; None where the runtime runs on another host."""
    is_settled: bool = False
    """Whether the runtime has said where it runs; until then it is taken for this host."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """One snapshot whole, with its page."""

    entry: Entry
    snapshot: Snapshot
    page: str


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What a rollback would do, to be shown and answered."""

    entry: Entry
    lines: tuple[str, ...]
    allowed: frozenset[str]
    """Which of "all" and "settings" (patched files stay) may be chosen."""
    plan: Preview | None = None
    """None where the server carries it out."""


@dataclass(frozen=True, slots=True)
class Done:
    """How a rollback ended."""

    verdict: str
    back: bool | None
    """Whether the figures are back; None where that cannot be told."""
    notes: tuple[str, ...] = ()


class Archive:
    """The store of this host, and the runtime whose configuration goes into it and comes back from it."""

    def __init__(self, runtime: Callable[[], Runtime | None], folder: Path | None = None) -> None:
        """`folder`: of the store, the default one if None."""
        self._runtime = runtime
        self._folder = folder
        self._acting = asyncio.Lock()

    def _store(self) -> Store:
        from snapshots.store import Store

        return Store.at(self._folder)

    def _running(self) -> Runtime:
        runtime = self._runtime()
        if runtime is None:
            raise RuntimeUnavailable("the runtime has not started yet")
        return runtime

    @property
    def is_acting(self) -> bool:
        """Whether a save, a rollback or a measurement runs."""
        return self._acting.locked()

    async def page(self, words: str = "", offset: int = 0) -> Page:
        """Snapshots newest first that hold all of `words`."""
        return await asyncio.to_thread(lambda: self._store().list(words, offset))

    async def where(self) -> str:
        """Where the store is, for people."""
        return await asyncio.to_thread(lambda: self._store().place.words)

    async def here(self) -> Here:
        """This host, or the host of an attached runtime, of which the class of hardware is not known."""
        from snapshots.content import hardware_class
        from snapshots.hardware import read_hardware
        from snapshots.live import here

        runtime = self._runtime()
        host = None
        if runtime is not None:
            try:
                host = (await runtime.describe()).host
            except RuntimeUnavailable:
                host = None
        if host is not None and host != here():
            return Here(host, None, True)
        hardware = await asyncio.to_thread(lambda: hardware_class(read_hardware()))
        return Here(here(), hardware, host is not None)

    async def load(self, name: str) -> Loaded:
        """One snapshot with the page that its commit has."""

        def work() -> Loaded:
            store = self._store()
            entry, snapshot = store.load(name)
            page = store.files(entry.commit).get("README.md", b"").decode("utf-8", "replace")
            return Loaded(entry, snapshot, page)

        return await asyncio.to_thread(work)

    async def save(self, label: str, note: str) -> Entry:
        """Commits what runs now, with the figures of the last minutes; no request is disturbed."""
        from snapshots.saving import SaveRequest, save_running

        async with self._acting:
            return await save_running(self._store(), self._running(), SaveRequest(label=label, note=note))

    async def preview(self, entry: Entry, author: str) -> Foreseen:
        """What going back to a snapshot would do."""
        from snapshots import rollback

        options = rollback.RollbackOptions(author=author)
        whole = await rollback.preview(self._store(), entry.commit, self._running(), options)
        allowed = {
            name for name, plan in (("all", whole), ("settings", without_patches(whole))) if not plan.refusals
        }
        if whole.patches is None or not whole.patches.writes:
            allowed.discard("settings" if "all" in allowed else "")
        return Foreseen(entry, tuple(whole.text()), frozenset(allowed), whole)

    async def roll_back(
        self, seen: Foreseen, choice: str, author: str, progress: Callable[[str], None]
    ) -> Done:
        """Does what was foreseen, probes, measures, and tells whether the figures are back."""
        from snapshots import rollback

        assert seen.plan is not None
        plan = seen.plan if choice == "all" else without_patches(seen.plan)
        async with self._acting:
            outcome = await rollback.perform(self._store(), plan, self._running(), progress)
        return Done(outcome.verdict, outcome.back, outcome.notes)

    async def verify(self, name: str, progress: Callable[[str], None]) -> tuple[bool | None, str]:
        """Measures what runs; whether a snapshot's figures are back, None where that cannot be told, and one line.

        Raises:
            StoreRefused: other settings run, or other clients' requests do.
        """
        from snapshots import diff, live
        from snapshots.annotate import headline
        from snapshots.git import StoreRefused

        async with self._acting:
            runtime, loaded = self._running(), await self.load(name)
            config = (await runtime.status()).config
            differing = [
                f"{each.name} {each.before} here, {each.after} there"
                for each in diff.settings(config, loaded.snapshot.config)
                if each.name in config and each.name in loaded.snapshot.config and each.after != "auto"
            ]
            if differing:
                raise StoreRefused(
                    f"not verified, other settings run: {'; '.join(differing)}; roll back first"
                )
            figure = await live.standard_bench(runtime, progress=progress)
            here = (await self.here()).hardware
            hardware = (loaded.snapshot.host.hardware, here) if here is not None else None
            return diff.verdict(headline(loaded.snapshot), figure, hardware)


def without_patches(plan: Preview) -> Preview:
    """The same rollback with patched files left as they are."""
    return replace(plan, options=replace(plan.options, patches=False))


def explain(error: BaseException) -> str:
    """One line on what went wrong; faults raised on purpose speak for themselves."""
    text = clean_line(str(error)) or "no reason given"
    own = type(error).__module__.partition(".")[0] in ("console", "runtime", "snapshots")
    if own:
        return text
    if isinstance(error, OSError) and error.strerror:
        return clean_line(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
    return f"{type(error).__name__}: {text}"
