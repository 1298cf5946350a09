"""Server-sent events: the runtime's watch stream fanned out to many clients, and how any stream is sent.

One task watches the runtime. Every event gets a number and stays in a ring for a while, so that a client that lost
its connection resumes behind the last event it saw; each client has a bounded queue of its own and never holds up
the engine or another client. Format: WHATWG HTML, "Server-sent events".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import NamedTuple, TypeVar

from runtime.interface import (
    GenerateEvent,
    HostSample,
    JobProgress,
    LogLine,
    RequestStats,
    RoundStats,
    Runtime,
    StatusChanged,
    WatchEvent,
)

LOGGER = logging.getLogger("ddtree")
HEARTBEAT_S = 3.0
"""Longest silence of a stream; a client that hears nothing for several of these has lost the server."""
HEARTBEAT = b": heartbeat\n\n"
RING = 2048
"""Events kept for clients that come back."""
QUEUE = 512
"""Events a client may be behind by."""
WATCH_AGAIN_S = 1.0

Event = TypeVar("Event")


class Numbered(NamedTuple):
    number: int
    event: WatchEvent


class ClientQueue:
    """What waits for one client. Where it is full the oldest rounds go, then requests and log lines.

    A change of state is never dropped: a client so far behind that nothing else is left to drop is `overrun`, its
    stream ends and it has to resume.
    """

    def __init__(self, limit: int = QUEUE) -> None:
        self._limit = limit
        self._items: deque[Numbered] = deque()
        self._ready = asyncio.Event()
        self.missed = 0
        """Events dropped since the last `take`."""
        self.overrun = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Numbered) -> None:
        if isinstance(item.event, HostSample):
            self._drop_first(HostSample)  # only the last sample of the host says anything
        if isinstance(item.event, JobProgress):
            self._drop_job(item.event.job.id)
        if len(self._items) >= self._limit and not self.overrun:
            dropped = self._drop_first(RoundStats) or self._drop_first((RequestStats, LogLine))
            self.missed += dropped
            self.overrun = not dropped
        if not self.overrun:
            self._items.append(item)
        self._ready.set()

    def close(self) -> None:
        """Wakes the reader for the last time."""
        self.overrun = True
        self._ready.set()

    async def take(self, seconds: float) -> list[Numbered]:
        """All that waits; an empty list after `seconds` of nothing."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ready.wait(), seconds)
        self._ready.clear()
        items, self._items = list(self._items), deque()
        return items

    def _drop_job(self, job_id: str) -> None:
        """Drops what waits of a job: the latest word on it says everything."""
        for index, queued in enumerate(self._items):
            if isinstance(queued.event, JobProgress) and queued.event.job.id == job_id:
                del self._items[index]
                return

    def _drop_first(self, kinds: type | tuple[type, ...]) -> bool:
        for index, queued in enumerate(self._items):
            if isinstance(queued.event, kinds):
                del self._items[index]
                return True
        return False


class EventHub:
    """One runtime's events for any number of clients; used from one event loop."""

    def __init__(self, runtime: Runtime, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._runtime = runtime
        self._heartbeat_s = heartbeat_s
        self._series = secrets.token_hex(4)
        """Tells this hub's event ids from those of an earlier process."""
        self._number = 0
        self._ring: deque[Numbered] = deque(maxlen=RING)
        self._clients: list[ClientQueue] = []
        self._watching: asyncio.Task[None] | None = None
        self.closed = False

    async def stream(self, last_id: str | None = None) -> AsyncGenerator[bytes, None]:
        """Frames for one client: what it missed since `last_id`, the present state, then all that happens."""
        queue = ClientQueue()
        gap = self._replay(queue, last_id)
        self._clients.append(queue)
        if self._watching is None and not self.closed:
            self._watching = asyncio.create_task(self._watch())
        try:
            if gap:
                yield frame(_note("events between this connection and the one before are lost"))
            yield frame(await self._present(), None if last_id and not gap else self._id(self._number))
            while not self.closed:
                items = await queue.take(self._heartbeat_s)
                for item in items:
                    yield frame(item.event, self._id(item.number))
                if queue.missed:
                    yield frame(_note(f"{queue.missed} events were left out: this client reads too slowly"))
                    queue.missed = 0
                if queue.overrun:
                    return
                if not items:
                    yield HEARTBEAT
        finally:
            self._clients.remove(queue)

    async def close(self) -> None:
        """Ends every stream; a server waits for its open responses before it stops."""
        self.closed = True
        for queue in self._clients:
            queue.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    def _id(self, number: int) -> str:
        return f"{self._series}-{number}"

    def _replay(self, queue: ClientQueue, last_id: str | None) -> bool:
        """Queues what came after `last_id`; True where some of that is not kept any more."""
        if not last_id:
            return False
        series, _, text = last_id.partition("-")
        if series != self._series or not text.isdecimal():
            return True
        for item in self._ring:
            if item.number > int(text):
                queue.put(item)
        return bool(self._ring) and self._ring[0].number > int(text) + 1

    async def _present(self) -> StatusChanged:
        status = await self._runtime.status()
        return StatusChanged(state=status.state, reason=status.reason, revision=status.revision)

    async def _watch(self) -> None:
        while True:
            try:
                async for event in self._runtime.watch():
                    self._number += 1
                    item = Numbered(self._number, event)
                    self._ring.append(item)
                    for queue in self._clients:
                        queue.put(item)
            except Exception:  # clients keep their streams; the runtime may come back
                LOGGER.exception("watching the runtime failed")
            await asyncio.sleep(WATCH_AGAIN_S)


def _note(text: str) -> LogLine:
    return LogLine(time_s=time.time(), level="warning", text=text)


def frame(event: WatchEvent | GenerateEvent, event_id: str | None = None) -> bytes:
    """One event as it goes over the wire."""
    return raw_frame(event.kind, event.model_dump_json(), event_id)


def raw_frame(kind: str, data: str, event_id: str | None = None) -> bytes:
    """One event of `data` without line breaks, as JSON is."""
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}event: {kind}\ndata: {data}\n\n".encode()


async def with_heartbeats(
    events: AsyncIterator[Event], seconds: float = HEARTBEAT_S
) -> AsyncGenerator[Event | None, None]:
    """`events`, with None for every `seconds` in which none came; closing it closes `events`."""
    upcoming: asyncio.Task[Event | None] | None = None
    try:
        while True:
            if upcoming is None:
                upcoming = asyncio.ensure_future(_next(events))
            await asyncio.wait({upcoming}, timeout=seconds)
            if not upcoming.done():
                yield None
                continue
            event, upcoming = upcoming.result(), None
            if event is None:
                return
            yield event
    finally:
        if upcoming is not None and not upcoming.done():
            upcoming.cancel()  # ends `events` from within
        else:
            close = getattr(events, "aclose", None)
            if close is not None:
                await close()


async def _next(events: AsyncIterator[Event]) -> Event | None:
    return await anext(events, None)
