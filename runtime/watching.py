"""What lies between the engine's thread and one watcher: a bounded queue that never makes the engine wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from runtime.interface import WatchEvent

WATCH_QUEUE = 4096
"""Events a watcher may be behind by; older ones are dropped, never waited for."""


class Watcher:
    """A bounded queue from any thread into one asyncio loop; wakes the loop once however many events wait."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[WatchEvent] = deque(maxlen=WATCH_QUEUE)
        self._ready = asyncio.Event()
        self._woken = False
        self._closed = False

    def post(self, event: WatchEvent) -> None:
        self._events.append(event)
        self._wake()

    def close(self) -> None:
        """Ends the iteration once what waits has been read."""
        self._closed = True
        self._wake()

    async def events(self) -> AsyncIterator[WatchEvent]:
        """Yields events until closed."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            self._woken = False
            for _ in range(len(self._events)):
                yield self._events.popleft()
            if self._closed and not self._events:
                return

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the watcher's loop has closed
                self._loop.call_soon_threadsafe(self._ready.set)
