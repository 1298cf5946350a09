"""Events of a busy engine reach the console in order, all of them, without a waking for each."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from console.gather import gathered
from runtime.interface import LogLine
from runtime.watching import Watcher

PERIOD_S = 0.1


class Counted:
    """The running loop, which counts how often another thread wakes it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.wakings = 0

    def call_soon_threadsafe(self, act: Callable[[], None]) -> None:
        self.wakings += 1
        self._loop.call_soon_threadsafe(act)


async def test_a_burst_of_events_arrives_whole_with_few_wakings():
    counted = Counted()
    watcher = Watcher(counted)  # type: ignore[arg-type]

    async def read() -> list[str]:
        return [event.text async for event in gathered(watcher.events(), PERIOD_S)]

    reading = asyncio.create_task(read())
    began = time.monotonic()
    for number in range(300):
        watcher.post(LogLine(time_s=0.0, level="info", text=str(number)))
        await asyncio.sleep(0.002)
    watcher.close()
    assert await reading == [str(number) for number in range(300)]
    # Some a period, however many events come in it.
    assert counted.wakings <= 4 * (time.monotonic() - began) / PERIOD_S + 4


async def test_a_reader_that_takes_its_time_is_not_kept_from_what_is_there_already():
    async def stream() -> AsyncIterator[int]:
        for number in range(20):
            yield number

    seen = []
    async with asyncio.timeout(60):
        async for number in gathered(stream(), 1000.0):
            time.sleep(0.005)
            seen.append(number)
    assert seen == list(range(20))


async def test_a_stream_is_closed_where_its_reader_is_cancelled_while_events_gather():
    closed = []

    async def stream() -> AsyncIterator[int]:
        try:
            await asyncio.sleep(0.01)
            yield 1
            yield 2
        finally:
            closed.append(True)

    seen = asyncio.Event()

    async def read() -> None:
        async with contextlib.aclosing(gathered(stream(), 3600.0)) as events:
            async for _ in events:
                seen.set()

    reading = asyncio.create_task(read())
    await seen.wait()
    await asyncio.sleep(0.01)
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    assert closed
