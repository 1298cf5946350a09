"""The snapshots of the server a console is attached to: read over its API, saved and rolled back to by its jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from console.archive import Archive, Done, Foreseen, Here, Loaded
from console.frame import Place
from runtime.interface import Job, Runtime, RuntimeFault, SnapshotRow

if TYPE_CHECKING:
    from snapshots.history import Page
    from snapshots.message import Entry

LOOK_S = 0.2
"""How often a job is looked at."""


def archive_of(place: Place, runtime: Callable[[], Runtime | None]) -> Archive:
    """The snapshots that a console at `place` shows: this host's, or those of the server it is attached to."""
    return Archive(runtime) if place.attached_to is None else ServedArchive(runtime)


class ServedArchive(Archive):
    """As `Archive`, over what the server keeps; nothing is read from or written to the store of this host."""

    def __init__(self, runtime: Callable[[], Runtime | None]) -> None:
        super().__init__(runtime)
        self._where, self._here = "", Here()

    async def page(self, words: str = "", offset: int = 0) -> Page:
        from snapshots.history import Page
        from snapshots.serving import entry_of

        page = await self._running().snapshots.page(words, offset)
        self._where = f"of the server {page.host}: {page.store}"
        self._here = Here(page.host, page.hardware, True)
        return Page(
            tuple(map(entry_of, page.snapshots)), page.offset, page.more, page.not_pushed, page.remote
        )

    async def where(self) -> str:
        return self._where

    async def here(self) -> Here:
        """The server's host, which is where figures hold or do not."""
        return self._here

    async def load(self, name: str) -> Loaded:
        from snapshots.serving import entry_of, snapshot_of

        view = await self._running().snapshots.show(name)
        return Loaded(entry_of(view.snapshot), snapshot_of(view), view.page)

    async def save(self, label: str, note: str) -> Entry:
        from snapshots.serving import entry_of

        async with self._acting:
            ended = await self._job("snapshot", {"label": label, "note": note}, "console")
        return entry_of(SnapshotRow.model_validate((ended.result or {})["snapshot"]))

    async def preview(self, entry: Entry, author: str) -> Foreseen:
        asked = {"snapshot": entry.commit, "dry_run": True}
        result = (await self._job("rollback", asked, author)).result or {}
        allowed = frozenset(() if result["refused"] else ("settings",))
        return Foreseen(entry, tuple(result["lines"]), allowed)

    async def roll_back(
        self, seen: Foreseen, choice: str, author: str, progress: Callable[[str], None]
    ) -> Done:
        async with self._acting:
            ended = await self._job("rollback", {"snapshot": seen.entry.commit}, author, progress)
        result = ended.result or {}
        return Done(result["verdict"], result["back"], tuple(result["notes"]))

    async def _job(
        self,
        kind: str,
        parameters: dict[str, Any],
        author: str,
        progress: Callable[[str], None] = lambda _words: None,
    ) -> Job:
        """Has the server do it; returns the job that is done, raises RuntimeFault with its reason if it is not."""
        runtime = self._running()
        job_id = await runtime.start_job(kind, parameters, author)
        while True:
            job = next((each for each in await runtime.jobs() if each.id == job_id), None)
            if job is None:
                raise RuntimeFault(f"the server knows nothing of {job_id} any more; look at its log")
            if job.over:
                break
            progress(job.text)
            await asyncio.sleep(LOOK_S)
        if job.state != "done":
            raise RuntimeFault(job.text)
        return job
