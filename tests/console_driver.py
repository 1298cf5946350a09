"""The console under test: its keys, what stands on its screens, waiting for what should come true."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fake_runtime import ANSWER, FakeRuntime
from textual.pilot import Pilot

from console.app import ConsoleApp
from console.prompt_input import PromptInput

GIVE_UP_S = 60.0
LONG = ANSWER * 20


class Driven:
    """An app under test, its runtime and its keys."""

    def __init__(self, app: ConsoleApp, runtime: FakeRuntime, pilot: Pilot[int]) -> None:
        self.app, self.runtime, self.pilot = app, runtime, pilot

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + GIVE_UP_S
        while not holds():
            assert self.app._exception is None, "the app failed"
            assert time.monotonic() < end, (
                f"never came true: {what}; notice {self.app.view.notice!r}\n{self.shown()}"
            )
            await self.pilot.pause(0.01)

    async def ask(self, prompt: str) -> None:
        await self.press("i")
        self.app.prompt.query_one(PromptInput).insert(prompt)
        await self.press("enter")

    async def answered(self) -> None:
        await self.until(lambda: self.app.prompt.conversation.open_turn is None, "answered")
        await self.pilot.pause()

    async def streaming(self) -> None:
        await self.until(lambda: len(self.turn.pieces) > 3, "streaming")

    @property
    def running(self) -> int:
        """Requests the last status told of; none before the first one came."""
        status = self.app.view.status
        return 0 if status is None else status.running

    @property
    def turn(self):
        return self.app.prompt.conversation.turns[-1]

    def text(self, selector: str) -> str:
        for screen in self.app.screen_stack:
            for widget in screen.query(selector):
                return str(widget.render())
        raise AssertionError(f"no {selector}")

    def shown(self) -> str:
        """The whole screen as plain text."""
        strips = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text for strip in strips)


@asynccontextmanager
async def console(
    runtime: FakeRuntime | None = None, *, size: tuple[int, int] = (100, 30), read_only: bool = False
) -> AsyncIterator[Driven]:
    runtime = runtime or FakeRuntime()
    app = ConsoleApp(runtime, read_only=read_only)
    async with app.run_test(size=size) as pilot:
        driven = Driven(app, runtime, pilot)
        await driven.until(lambda: app.view.status is not None, "a status arrived")
        yield driven
        app.exit(0)
        await pilot.pause()
