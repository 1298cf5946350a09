"""The life of a headless runtime: come up or fall back, say so, serve, and drain before the end.

The main thread waits for orders (signals, or `ddtree ctl` over HTTP), tells the service manager how things stand and
keeps the configuration once it has proved itself. The engine and the HTTP server have threads of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from runtime.config import EFFECTS, RuntimeConfig, effect_of
from runtime.garbage import keep_out
from runtime.interface import EngineState, RoundStats, RuntimeFault, Status
from runtime.last_good import PROOF_SECONDS, keep, last_good_file, recall
from runtime.listener import Listener, ServerSettings, take_address
from runtime.local import LocalRuntime
from runtime.logs import LOGGER
from runtime.sd_notify import Notifier
from runtime.snapshot_port import Keeper

TICK_S = 1.0
RATE_WINDOW_S = 10.0
"""Throughput is told of so many seconds."""
IDLE_S = 1.0
"""A gap between rounds that counts as idleness and is no part of any rate."""
CLOSE_S = 5.0
"""Seconds the engine's thread has to end; one that hangs is left behind."""
LOAD_STEP_S = 600.0
"""Longest step of loading that a service manager with a limit has to bear."""
RESTART_S = 3600.0
"""Longest time from a restart to its first sign of life."""
DONE, INTERRUPTED = 0, 130


@dataclass(frozen=True)
class ServeOptions:
    """How a runtime is served; none of it is a setting of the runtime."""

    server: ServerSettings = field(default_factory=ServerSettings)
    drain_seconds: float = 30.0
    fall_back: bool = True
    """Try the last good configuration when the one asked for does not come up."""
    degraded: str | None = None
    """Why this is not the configuration that was asked for, if it is not."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Field of the configuration to where its value came from."""
    keeper: Keeper | None = None
    """What keeps snapshots of the runtime."""


class Orders:
    """What the process was told to do, by signals or over HTTP, from any thread; made in the loop that obeys them."""

    def __init__(self, runtime: LocalRuntime, drain_seconds: float) -> None:
        self._runtime = runtime
        self.drain_seconds = drain_seconds
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[int] | None = None
        self.over = asyncio.Event()
        """Set once the process is to drain and end."""
        self.again = False
        """Start anew afterwards."""
        self.exit_code = DONE

    def drain(self) -> str:
        self._loop.call_soon_threadsafe(self._drain)
        return "draining: accepted requests are finished, new ones are refused until a restart"

    def stop(self) -> str:
        self._loop.call_soon_threadsafe(self.over.set)
        return f"stopping: accepted requests have {self.drain_seconds:g} s to finish"

    def restart(self) -> str:
        self._loop.call_soon_threadsafe(self._restart)
        return f"restarting: accepted requests have {self.drain_seconds:g} s to finish"

    def _drain(self) -> None:
        self._draining = self._draining or self._loop.create_task(self._runtime.drain())

    def _restart(self) -> None:
        self.again = True
        self.over.set()


def serve(config: RuntimeConfig, options: ServeOptions, reread: Callable[[], RuntimeConfig]) -> int:
    """Serves `config` until told to stop; returns the exit code.

    `reread` resolves the configuration anew, for when SIGHUP asks.

    Raises:
        RuntimeFault: it does not come up, for want of an address, a configuration or an engine.
    """
    notifier = Notifier.from_environment()
    orders = asyncio.run(_serve(config, options, reread, notifier))
    if orders.again:
        _start_anew(notifier)
    return orders.exit_code


async def _serve(
    config: RuntimeConfig, options: ServeOptions, reread: Callable[[], RuntimeConfig], notifier: Notifier
) -> Orders:
    from runtime.http_security import load_keys
    from runtime.instance import registered, runtime_folder

    folder = runtime_folder()
    keys = load_keys(os.environ, folder)
    address = take_address(keys, options.server)
    runtime = LocalRuntime(config, options.degraded, options.origins, options.keeper)
    orders = Orders(runtime, options.drain_seconds)
    listener = Listener(runtime, keys, options.server, orders, address)
    try:
        listener.start()
        LOGGER.info("listening on %s, loading %s", listener.url, config.model)
        with registered(folder, listener.url, keys.operator_file) as file:
            heed_signals(orders, file)
            _reload_on_hangup(runtime, reread, notifier)
            await attend(runtime, orders, notifier, last_good_file() if options.fall_back else None)
    finally:
        await asyncio.to_thread(listener.stop)
        await close(runtime)
    return orders


async def attend(runtime: LocalRuntime, orders: Orders, notifier: Notifier, last_good: Path | None) -> None:
    """Stays with a runtime from loading until it is drained.

    `last_good` is where the last good configuration lies; None neither tries nor keeps one.

    Raises:
        RuntimeFault: it did not come up.
    """
    throughput = Throughput()
    async with _beside(_count(runtime, throughput), _report(runtime, notifier, throughput)):
        over = asyncio.create_task(orders.over.wait())
        coming = asyncio.create_task(come_up(runtime, last_good))
        async with _beside(over, coming):
            await asyncio.wait({over, coming}, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                coming.result()
                notifier.ready(status_line(await runtime.status(), None))
                LOGGER.info("%s: %s", *_state(await runtime.status()))
                keep_out()
                async with _beside(*([keep_once_proved(runtime, last_good)] if last_good else [])):
                    await over
        await _finish(runtime, orders, notifier)


async def come_up(runtime: LocalRuntime, last_good: Path | None) -> None:
    """Returns when requests are served, with the last good configuration if need be; raises RuntimeFault if not."""
    try:
        await runtime.wait_ready()
    except RuntimeFault as failed:
        other = recall(last_good) if last_good is not None else None
        if other is None or other == runtime.config:
            raise
        LOGGER.error("%s; trying the last good configuration, %s", failed, last_good)
        runtime.fall_back(
            other, f"the last good configuration is served, because the one asked for failed: {failed}"
        )
        await runtime.wait_ready()


async def look_after(runtime: LocalRuntime, last_good: Path) -> None:
    """Falls back and keeps the last good configuration for a runtime on a screen, which shows a failure itself."""
    with contextlib.suppress(RuntimeFault):
        await come_up(runtime, last_good)
        await keep_once_proved(runtime, last_good)


async def keep_once_proved(
    runtime: LocalRuntime, file: Path, seconds: float = PROOF_SECONDS, look_every_s: float = TICK_S
) -> None:
    """Keeps each configuration that has served for `seconds` without failure as the last good one."""
    kept: RuntimeConfig | None = None
    proving: tuple[Any, ...] = ()
    since = time.monotonic()
    while True:
        status = await runtime.status()
        current = (runtime.config, status.state, status.errors)
        if current != proving:
            proving, since = current, time.monotonic()
        proved = status.state is EngineState.READY and time.monotonic() - since >= seconds
        if proved and runtime.config != kept:
            kept = runtime.config
            try:
                keep(kept, file)
                LOGGER.info("kept as the last good configuration: %s", file)
            except OSError as error:
                LOGGER.warning("the last good configuration cannot be kept in %s: %s", file, error.strerror)
        await asyncio.sleep(look_every_s)


async def close(runtime: LocalRuntime) -> None:
    """Ends the engine; one that hangs is left behind."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(runtime.aclose(), CLOSE_S)


def status_line(status: Status, tok_s: float | None) -> str:
    """State, mode, budget and speed in one line for the service manager."""
    if status.state is EngineState.LOADING:
        return f"loading {status.load_progress or 0:.0%}: {status.reason}"
    mode, budget = status.config["mode"], status.config["tree_budget"]
    how = f"{mode}, budget {budget}" if mode == "tree" else mode
    speed = "idle" if tok_s is None and not status.running else f"{tok_s:.1f} tok/s" if tok_s else "n/a tok/s"
    return f"{status.state}: {how}, {speed}, {status.running} running, {status.waiting} waiting"


async def _finish(runtime: LocalRuntime, orders: Orders, notifier: Notifier) -> None:
    """Gives accepted requests their time."""
    words = "restarting" if orders.again else "stopping"
    if orders.again:
        notifier.reloading(words)
        notifier.suspend_watchdog(RESTART_S)
    else:
        notifier.stopping(words, orders.drain_seconds + 2 * CLOSE_S)
    LOGGER.info("%s: accepted requests have %g s to finish", words, orders.drain_seconds)
    ended = await runtime.drain(orders.drain_seconds)
    if ended:
        LOGGER.warning("%d requests did not finish in time and were ended", ended)


class Throughput:
    """Output tokens per second of the work at hand: counts tokens, not rounds, of the last uninterrupted decoding."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, int]] = deque()

    def add(self, stats: RoundStats) -> None:
        if self._rounds and stats.time_s - self._rounds[-1][0] > IDLE_S:
            self._rounds.clear()
        self._rounds.append((stats.time_s, stats.emitted))
        while stats.time_s - self._rounds[0][0] > RATE_WINDOW_S:
            self._rounds.popleft()

    def tok_s(self, now_s: float) -> float | None:
        """Tokens per second; None when idle or before there are two rounds. `now_s` is Unix time."""
        if len(self._rounds) < 2 or now_s - self._rounds[-1][0] > IDLE_S:
            return None
        # The first round's tokens came before the window began.
        tokens = sum(emitted for _, emitted in self._rounds) - self._rounds[0][1]
        return tokens / max(self._rounds[-1][0] - self._rounds[0][0], 1e-9)


async def _count(runtime: LocalRuntime, throughput: Throughput) -> None:
    async for event in runtime.watch():
        if isinstance(event, RoundStats):
            throughput.add(event)


async def _report(runtime: LocalRuntime, notifier: Notifier, throughput: Throughput) -> None:
    """Tells the service manager how things stand. The watchdog lives on decoding that goes on, or on idleness."""
    patience = notifier.watchdog_s
    pause = TICK_S if patience is None else min(TICK_S, patience / 4)
    said = ""
    while True:
        status = await runtime.status()
        if status.state is EngineState.LOADING and runtime.stalled_s < 2 * pause:
            notifier.extend_timeout(LOAD_STEP_S)
        if patience is not None and runtime.stalled_s < patience / 2:
            notifier.watchdog()
        line = status_line(status, throughput.tok_s(time.time()))
        if line != said:
            said = line
            notifier.status(line)
        await asyncio.sleep(pause)


@contextlib.asynccontextmanager
async def _beside(*work: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> AsyncIterator[None]:
    """Runs `work` beside the block and ends it with the block."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def heed_signals(orders: Orders, instance_file: Path, stopping: bool = False) -> None:
    """The first SIGTERM or SIGINT drains and ends the process, a second one ends it at once.

    `stopping`: it was told to end already, so that the next one counts as the second.
    """
    loop = asyncio.get_running_loop()
    heard: list[signal.Signals] = [signal.SIGTERM] if stopping else []

    def heed(number: signal.Signals) -> None:
        if heard:
            LOGGER.warning("%s again: leaving at once", number.name)
            instance_file.unlink(missing_ok=True)
            os._exit(128 + number)
        heard.append(number)
        orders.exit_code = INTERRUPTED if number == signal.SIGINT else DONE
        LOGGER.info("%s", number.name)
        orders.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, heed, number)


def _reload_on_hangup(runtime: LocalRuntime, reread: Callable[[], RuntimeConfig], notifier: Notifier) -> None:
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()

    def heed() -> None:
        task = loop.create_task(reload(runtime, reread, notifier))
        running.add(task)
        task.add_done_callback(running.discard)

    loop.add_signal_handler(signal.SIGHUP, heed)


async def reload(runtime: LocalRuntime, reread: Callable[[], RuntimeConfig], notifier: Notifier) -> None:
    """Applies what changed in the configuration and can be changed live; a bad one changes nothing."""
    notifier.reloading("reading the configuration anew")
    try:
        wanted = reread()
        changed = [name for name in EFFECTS if getattr(wanted, name) != getattr(runtime.config, name)]
        live = {name: getattr(wanted, name) for name in changed if effect_of(name, wanted) == "live"}
        plan = await runtime.preview(live)
        report = await runtime.apply(live, plan.revision, "SIGHUP")
        LOGGER.info("configuration read anew: %s", report.summary)
        waiting = [name for name in changed if name not in live]
        if waiting:
            LOGGER.warning("%s: changed, but takes effect at the next start", ", ".join(waiting))
    except RuntimeFault as refused:
        LOGGER.error("configuration not changed: %s", refused)
    notifier.ready(status_line(await runtime.status(), None))


def _state(status: Status) -> tuple[str, str]:
    return status.state.value, status.reason


def _start_anew(notifier: Notifier) -> NoReturn:
    """Replaces this process by one with the same command line, which keeps its pid."""
    LOGGER.info("starting anew")
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **notifier.variables})
