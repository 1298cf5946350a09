"""One console from its first paint to the end of its process, which with `--listen` is not the end of its screen."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from types import FrameType
from typing import Literal, Protocol

from console.app import ConsoleApp, Ending, no_color
from console.bridge import RuntimeOpener
from console.frame import Place
from console.preferences import PreferenceFile
from console.terminal import Deadline, Terminal
from runtime.interface import Runtime

EXIT_CODES = {Ending.INTERRUPTED: 130}
SWITCH_S = 0.00005
"""Longest that drawing keeps the engine's thread from going on, once that asks for the interpreter; 5 ms by default.

The engine asks after every operation of the target: what it waits each time is what the console takes from it."""


class Service(Protocol):
    """What serves a console's runtime to others, beside the screen and after it."""

    url: str
    on_hangup: Literal["detach", "stop"]

    def start(self, runtime: Runtime) -> None:
        """Serves `runtime` from another thread; returns when it answers."""

    def go_on(self, stop: bool) -> int:
        """Serves until told to stop, then drains and closes the runtime; with `stop` at once. Returns the exit code."""


def run_console(
    opener: RuntimeOpener,
    *,
    read_only: bool = False,
    attached_to: str | None = None,
    service: Service | None = None,
    author: str = "console",
    preferences: PreferenceFile | None = None,
) -> int:
    """Runs a console over the runtime that `opener` gives; returns the exit code. There must be a terminal.

    0 left, SIGTERM or SIGHUP, 1 the console failed, 130 SIGINT. With a `service` the runtime outlives the screen where
    the operator detaches, or the terminal is lost and `on_hangup` says so; else it drains.
    """
    if not no_color():
        os.environ.pop("NO_COLOR", None)  # Textual turns colour off for an empty value too.
    if attached_to is None:
        from multiprocessing import resource_tracker

        # An engine may have to start processes while Textual holds stderr, when this cannot be started any more.
        resource_tracker.ensure_running()
        sys.setswitchinterval(SWITCH_S)
    place = Place(attached_to, service.url if service else None)
    with Terminal() as terminal:
        app = ConsoleApp(
            _serving(opener, service),
            read_only=read_only,
            terminal=terminal,
            place=place,
            author=author,
            preferences=preferences,
        )
        with Deadline(terminal) as deadline:
            ending = asyncio.run(_drive(app, deadline if service is None else None))
        lost = terminal.is_lost()
    if lost:
        _leave_terminal()
    if app.return_code:
        print(f"ddtree: the console failed: {terminal.last_line()}", file=sys.stderr)
        ending = Ending.LOST
    if service is not None:
        return _without_screen(service, ending, lost)
    return 1 if app.return_code else EXIT_CODES.get(ending, 0)


def _serving(opener: RuntimeOpener, service: Service | None) -> RuntimeOpener:
    """`opener`, whose runtime is served to others from the moment it is there."""
    if service is None:
        return opener

    async def opened() -> Runtime:
        runtime = await opener()
        await asyncio.to_thread(service.start, runtime)
        return runtime

    return opened


def _without_screen(service: Service, ending: Ending, lost: bool) -> int:
    goes_on = ending is Ending.DETACH or (ending is Ending.LOST and service.on_hangup == "detach")
    if goes_on and not lost:
        print(
            f"ddtree: the screen is closed, pid {os.getpid()} goes on serving\n"
            f"  attach  ddtree console --attach {service.url}\n"
            f"  stop    ddtree ctl stop --url {service.url}",
            flush=True,
        )
    return service.go_on(stop=not goes_on)


async def _drive(app: ConsoleApp, deadline: Deadline | None) -> Ending:
    """The app until its end, and with a deadline the runtime's too, both within it of the first sign to stop."""
    loop = asyncio.get_running_loop()
    endings = {
        signal.SIGTERM: Ending.QUIT,
        signal.SIGHUP: Ending.LOST,
        signal.SIGINT: Ending.INTERRUPTED,
    }
    asked: list[Ending] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        if deadline is not None:
            deadline.begin()
        asked.append(endings[signal.Signals(number)])
        with contextlib.suppress(RuntimeError):  # the screen has just closed
            loop.call_soon_threadsafe(app.exit, asked[-1])

    for number in endings:
        signal.signal(number, stop)
    left = await app.run_async() or Ending.QUIT
    for number in (signal.SIGTSTP, signal.SIGCONT):  # Textual's own handlers would open the screen again
        signal.signal(number, signal.SIG_DFL)
    if deadline is not None:
        deadline.begin()
        await app.bridge.close()
    # A signal to end counts also where it came while the screen was closing for another reason.
    return next((each for each in asked if each is not Ending.LOST), left)


def _leave_terminal() -> None:
    """Lets go of a terminal that is gone: whatever writes to it later must not fail."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
