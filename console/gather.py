"""What comes often is taken together: each waking of the console's loop takes the interpreter from the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Generic, TypeVar

AT_ONCE_S = 0.002
"""Within it comes what was there already."""

Item = TypeVar("Item")


class Batch(Generic[Item]):
    """Joins items into one call of `emit` at most every `period_s`; nothing is dropped, order is kept."""

    def __init__(self, period_s: float, emit: Callable[[tuple[Item, ...]], object]) -> None:
        self._period_s = period_s
        self._emit = emit
        self._items: list[Item] = []
        self._timer: asyncio.TimerHandle | None = None
        self._next_s = 0.0
        """When the next call may be (the loop's time)."""

    def add(self, item: Item) -> None:
        self._items.append(item)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(self._next_s, loop.time()), self._pass_on)

    def _pass_on(self) -> None:
        self._next_s = asyncio.get_running_loop().time() + self._period_s
        self.flush()

    def flush(self) -> None:
        """Emits what waits, at once."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        items, self._items = tuple(self._items), []
        if items:
            self._emit(items)


async def gathered(stream: AsyncIterator[Item], period_s: float) -> AsyncGenerator[Item, None]:
    """The items of `stream` as they come; after one that had to be waited for, others gather for `period_s` in it.

    It closes `stream` when it ends itself: what is cancelled while items gather is not inside of it.
    """
    loop = asyncio.get_running_loop()
    asked_s = loop.time()
    try:
        async for item in stream:
            waited_s = loop.time() - asked_s
            yield item
            if waited_s > AT_ONCE_S:
                await asyncio.sleep(period_s)
            asked_s = loop.time()
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()
