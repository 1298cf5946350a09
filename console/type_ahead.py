"""Keys are taken one at a time, so that what is typed ahead lands on the screen that the key before it opened.

Textual forwards a key to whatever has the focus when the key arrives; the key that opens a dialog is still on its way
up then, and a quick hand (or a pasted macro) would type the rest into the screen below. A part of ConsoleApp.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from textual import events
from textual.app import App, ScreenStackError
from textual.message_pump import MessagePump

from console.leaving import Ending

FOLLOWED = 2
"""Times the way up is followed after the key itself: a key submits an input, whose message closes a dialog."""

LIMIT_S = 2.0
"""Longest wait for one key to be dealt with; a widget that hangs does not take the keyboard with it."""


class TypeAhead(App[Ending]):
    """An App whose next key is forwarded when the one before it has been dealt with up to the App."""

    def __init__(self, **of_the_app: Any) -> None:
        super().__init__(**of_the_app)
        self._typed: deque[events.Event] = deque()
        self._taking: object | None = None

    async def on_event(self, event: events.Event) -> None:
        """Queues keys and pasted text that arrive from the terminal; everything else goes its way."""
        if isinstance(event, events.Key | events.Paste) and not event.is_forwarded:
            self._typed.append(event)
            if self._taking is None:
                await self._take()
        else:
            await super().on_event(event)

    async def _take(self) -> None:
        event = self._typed.popleft()
        ticket = self._taking = object()
        try:
            target: MessagePump = self.focused or self.screen
        except ScreenStackError:
            self._taking = None
            return
        await super().on_event(event)
        self.set_timer(LIMIT_S, lambda: self._release(ticket))
        self._climb(target, ticket, FOLLOWED)

    def _climb(self, pump: MessagePump, ticket: object, further: int) -> None:
        """Follows the key, then what it set off, through the queues of `pump` and its ancestors, which keep order."""
        if pump is not self and pump.call_later(self._climb, pump._parent or self, ticket, further):
            return
        if further:
            self.call_later(self._again, ticket, further - 1)
        else:
            self.screen.call_after_refresh(self._release, ticket)

    def _again(self, ticket: object, further: int) -> None:
        self._climb(self.focused or self.screen, ticket, further)

    async def _release(self, ticket: object) -> None:
        if self._taking is not ticket:
            return
        self._taking = None
        if self._typed:
            await self._take()
