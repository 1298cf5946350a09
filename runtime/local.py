"""LocalRuntime: the engine in a thread of this process, behind the Runtime interface.

Constructing one returns at once and imports nothing heavy: the engine's thread loads torch and the model. Callers are
asyncio code; the only things that cross are commands in a queue and events handed to the caller's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from runtime.changes import check_revision, plan_change, recorded
from runtime.config import RuntimeConfig
from runtime.description import describe
from runtime.interface import (
    AppliedChange,
    Baseline,
    ChangePlan,
    ChangeReport,
    ConfigRejected,
    Description,
    EngineState,
    GenerateEvent,
    GenerateRequest,
    LogLine,
    RequestFinished,
    RequestStats,
    RuntimeBusy,
    RuntimeFault,
    RuntimeUnavailable,
    Status,
    StatusChanged,
    TreeTrace,
    WatchEvent,
)
from runtime.logs import LOGGER, log_place, log_prompt, log_request, set_level, start_logging
from runtime.telemetry import HostSampler
from runtime.watching import Watcher

if TYPE_CHECKING:
    from runtime.engine import Engine

T = TypeVar("T")

HOST_SAMPLE_SECONDS = 1.0
FINISHED_KEPT = 64
SERVING = frozenset({EngineState.READY, EngineState.DEGRADED})
"""States in which requests are taken."""
UP = SERVING | {EngineState.DRAINING}
"""States in which there is an engine to talk to."""
BUSY_RETRY_AFTER_S = 10.0
RETRY_AFTER_S = {EngineState.LOADING: 5.0, EngineState.REBUILDING: 5.0, EngineState.DRAINING: 10.0}


class LocalRuntime:
    """Runtime over an engine thread."""

    def __init__(self, config: RuntimeConfig, degraded: str | None = None) -> None:
        """`degraded`: why `config` is not the configuration that was asked for, if it is not."""
        self._config = config
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._watchers: list[Watcher] = []
        self._finished: deque[RequestStats] = deque(maxlen=FINISHED_KEPT)
        self._state, self._reason = EngineState.LOADING, "starting"
        self._degraded = degraded
        self._progress = 0.0
        self._beat_at: float | None = time.monotonic()
        self._revision = 1
        self._history: tuple[AppliedChange, ...] = ()
        self._baselines: tuple[Baseline, ...] = ()
        self._measured = False
        self._calibration: str | None = None
        self._errors: tuple[str, ...] = ()
        self._engine: Engine | None = None
        self._started_at = time.time()
        self._closing = threading.Event()
        self._settled = threading.Event()
        self._thread = self._engine_thread()
        self._sampler = threading.Thread(target=self._sample_host, name="ddtree-host", daemon=True)
        self._sampler.start()

    @property
    def config(self) -> RuntimeConfig:
        """The configuration in force."""
        return self._config

    @property
    def stalled_s(self) -> float:
        """Seconds since the engine last got on with its work; 0 while it has none."""
        at = self._beat_at
        return 0.0 if at is None else time.monotonic() - at

    async def wait_ready(self) -> None:
        """Returns when the engine serves; raises RuntimeUnavailable or ConfigRejected when it failed to load."""
        while not self._settled.is_set():
            await asyncio.sleep(0.02)
        if self._state is EngineState.FAILED:
            raise self._load_error

    def fall_back(self, config: RuntimeConfig, reason: str) -> None:
        """After a failed load: loads `config` instead, and serves it as degraded with `reason`."""
        self._thread.join()
        self._config, self._degraded = config, reason
        self._settled.clear()
        self._set_progress(0.0, "starting with another configuration")
        self._thread = self._engine_thread()

    async def describe(self) -> Description:
        return describe(self._config, self._engine.loaded if self._engine else None)

    async def status(self) -> Status:
        engine = self._engine
        scheduler = engine.scheduler if engine else None
        config = self._config.model_dump()
        if engine is not None and config["tree_budget"] is None:
            config["tree_budget"] = engine.default_budget
        return Status(
            state=self._state,
            reason=self._reason,
            revision=self._revision,
            config=config,
            running=len(scheduler.running) if scheduler else 0,
            waiting=len(scheduler.waiting) if scheduler else 0,
            slots_used=scheduler.slots_used if scheduler else 0,
            slots_cached=scheduler.prefixes.slots if scheduler else 0,
            slots_total=scheduler.cache.slots if scheduler else 0,
            started_at_s=self._started_at,
            load_progress=self._progress if self._state is EngineState.LOADING else None,
            baselines=self._baselines,
            auto=engine.auto.told if engine and self._config.mode == "auto" else None,
            calibration=self._calibration,
            errors=self._errors,
            history=self._history,
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        loop = asyncio.get_running_loop()
        asked_by = log_prompt(request)
        events: asyncio.Queue[GenerateEvent] = asyncio.Queue()

        def sink(event: GenerateEvent) -> None:
            if isinstance(event, RequestFinished):
                self._finished.append(event.stats)
                self._publish(event.stats)
                log_request(event.stats, event.error, asked_by)
            with contextlib.suppress(RuntimeError):  # the caller's loop has closed
                loop.call_soon_threadsafe(events.put_nowait, event)

        submitted: list[str] = []
        finished = False
        try:
            if self._state not in SERVING:
                raise self._unavailable()
            await self._call(lambda engine: submitted.append(engine.submit(request, sink)))
            event = await self._first(events, submitted[0])
            while not finished:
                finished = isinstance(event, RequestFinished)
                yield event
                if not finished:
                    event = await events.get()
        finally:
            # A caller may leave before the engine has taken the request: what was submitted is known only there.
            if not finished:
                self._post(lambda engine: [engine.cancel(request_id) for request_id in submitted])

    async def _first(self, events: asyncio.Queue[GenerateEvent], request_id: str) -> GenerateEvent:
        """The first event of a request; raises RuntimeUnavailable where it ended before its turn came."""
        limit = self._config.queue_timeout
        try:
            event = await asyncio.wait_for(events.get(), limit)
        except TimeoutError:
            if await self._call(lambda engine: engine.withdraw(request_id)):
                reason = f"the request waited {limit:g} s for its turn (queue_timeout); try later"
                raise RuntimeBusy(reason, BUSY_RETRY_AFTER_S) from None
            event = await events.get()
        if isinstance(event, RequestFinished) and event.error:
            raise RuntimeUnavailable(event.error, RETRY_AFTER_S.get(self._state))
        return event

    async def cancel(self, request_id: str) -> bool:
        return await self._call(lambda engine: engine.cancel(request_id))

    async def watch(self) -> AsyncIterator[WatchEvent]:
        watcher = Watcher(asyncio.get_running_loop())
        self._watchers.append(watcher)
        try:
            async for event in watcher.events():
                yield event
        finally:
            self._watchers.remove(watcher)

    async def requests(self) -> tuple[RequestStats, ...]:
        running = await self._call(lambda engine: engine.requests()) if self._engine else ()
        return running + tuple(reversed(self._finished))

    async def trace(self, request_id: str) -> tuple[TreeTrace, ...]:
        return await self._call(lambda engine: engine.trace(request_id))

    async def preview(self, change: dict[str, Any]) -> ChangePlan:
        status = await self.status()
        running = await self._call(lambda engine: engine.requests()) if self._engine else ()
        return plan_change(self._config, change, self._revision, running, status.config["tree_budget"])

    async def apply(self, change: dict[str, Any], revision: int, author: str = "local") -> ChangeReport:
        plan = await self.preview(change)
        check_revision(revision, self._revision, self._history)
        if not plan.allowed:
            raise ConfigRejected(
                plan.summary, next((c.field for c in plan.changes if c.effect != "live"), None)
            )
        if not plan.changes:
            return ChangeReport(revision=self._revision, applied=(), summary=plan.summary)
        return await self._call(lambda engine: self._install(engine, plan, revision, author))

    def _install(self, engine: Engine, plan: ChangePlan, revision: int, author: str) -> ChangeReport:
        """In the engine's thread, where one change is complete before the next one is looked at."""
        check_revision(revision, self._revision, self._history)
        engine.config = self._config = self._config.changed({each.field: each.new for each in plan.changes})
        set_level(self._config.log_level)
        self._revision += 1
        self._history = recorded(self._history, plan, self._revision, author)
        self._set_state(self._state, self._reason)
        return ChangeReport(revision=self._revision, applied=plan.changes, summary=plan.summary)

    async def drain(self, seconds: float = math.inf) -> int:
        """Refuses new requests, gives accepted ones `seconds` to finish and ends the rest, saying why.

        Returns how many were ended early. The engine stays up until `aclose`.
        """
        engine = self._engine
        if engine is None or self._state not in UP:
            return 0
        deadline = time.monotonic() + seconds
        limit = f" within {seconds:g} s" if math.isfinite(seconds) else ""
        self._set_state(EngineState.DRAINING, f"finishing accepted requests{limit}, taking no new ones")
        await _within(deadline, self._call(lambda _engine: None))
        while engine.busy and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        reason = f"the server stops and its drain time of {seconds:g} s is over"
        return (
            await _within(time.monotonic() + 1.0, self._call(lambda engine: engine.cancel_all(reason))) or 0
        )

    async def aclose(self) -> None:
        self._closing.set()
        self._commands.put(None)
        while self._thread.is_alive():
            await asyncio.sleep(0.01)
        self._obey(block=False)  # what came while the thread ended, so that no caller waits for ever
        for watcher in tuple(self._watchers):
            watcher.close()

    def _engine_thread(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="ddtree-engine", daemon=True)
        thread.start()
        return thread

    def _unavailable(self) -> RuntimeUnavailable:
        return RuntimeUnavailable(
            f"the engine is {self._state.value}: {self._reason}", RETRY_AFTER_S.get(self._state)
        )

    async def _call(self, act: Callable[[Engine], T]) -> T:
        """Runs `act` in the engine's thread between two rounds and returns its result."""
        if self._closing.is_set():
            raise RuntimeUnavailable("the runtime is closed")
        if self._state not in UP:
            raise self._unavailable()
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                assert self._engine is not None
                future.set_result(act(self._engine))
            except Exception as failure:  # handed to the caller, who raises it
                future.set_exception(failure)

        self._commands.put(command)
        return await asyncio.wrap_future(future)

    def _post(self, act: Callable[[Engine], object]) -> None:
        """Like `_call`, without waiting."""
        self._commands.put(lambda: act(self._engine) if self._engine else None)  # type: ignore[arg-type, return-value]

    def _run(self) -> None:
        """The engine's thread: load, then commands and steps until closed."""
        start_logging(self._config.log_level)
        try:
            self._load()
        except RuntimeFault as refused:
            self._fail(refused)
            return
        except (
            Exception
        ) as failure:  # any other fault of loading is stated, logged with its trace, and ends the engine
            LOGGER.exception("the engine failed to load")
            reason = (
                f"the engine failed to load: {type(failure).__name__}: {failure} (details: {log_place()})"
            )
            self._fail(RuntimeUnavailable(" ".join(reason.split())))
            return
        engine = self._engine
        assert engine is not None
        while not self._closing.is_set():
            idle = not engine.busy
            if idle and not self._measured and self._commands.empty():
                self._measure_baselines(engine)
            self._obey(block=idle and self._measured)
            if engine.busy and not self._closing.is_set():
                self._step(engine)
        self._obey(block=False)
        engine.cancel_all("the runtime was closed")

    def _load(self) -> None:
        self._set_progress(0.01, "importing torch")
        from runtime.calibrate import calibrate
        from runtime.engine import Engine
        from runtime.loader import load
        from runtime.proof import prove

        loaded = load(self._config, self._set_progress)
        engine = Engine(loaded, self._config, default_budget=0)
        self._set_progress(0.9, "measuring this host")
        calibration = calibrate(engine)
        engine.default_budget = calibration.tree_budget
        self._calibration = calibration.summary
        prove(engine)
        self._engine = engine
        if self._degraded:
            self._set_state(EngineState.DEGRADED, self._degraded)
        else:
            self._set_state(EngineState.READY, "serving")
        self._settled.set()

    def _measure_baselines(self, engine: Engine) -> None:
        """Measures plain and chain decoding in an idle moment; gives way as soon as a command comes."""
        from runtime.calibrate import measure_baselines

        def interrupted() -> bool:
            self._beat_at = time.monotonic()
            return not self._commands.empty()

        try:
            measured = measure_baselines(engine, interrupted)
        except Exception as failure:  # speculation has nothing to be compared with then; serving goes on
            self._survive(engine, "measuring plain decoding", failure)
            measured = ()
        self._measured = measured is not None
        if measured:
            self._baselines = measured
            self._set_state(self._state, self._reason)

    def _step(self, engine: Engine) -> None:
        try:
            stats = engine.step()
        except (
            Exception
        ) as failure:  # a fault of one step ends its requests with the reason, never the engine's thread
            self._survive(engine, "a decode step", failure)
            return
        self._beat_at = time.monotonic()
        if stats is not None:
            self._publish(stats)

    def _survive(self, engine: Engine, what: str, failure: Exception) -> None:
        """Ends all requests with the reason why `what` failed, and says it; the engine's thread goes on."""
        LOGGER.error("%s failed", what, exc_info=failure)
        reason = " ".join(f"{what} failed: {type(failure).__name__}: {failure}".split())
        self._errors = (*self._errors[-9:], reason)
        engine.cancel_all(reason, "error")
        self._publish(LogLine(time_s=time.time(), level="error", text=reason))

    def _obey(self, block: bool) -> None:
        """Runs waiting commands; with `block`, waits for one."""
        with contextlib.suppress(queue.Empty):
            if block:
                self._beat_at = None
            while True:
                command = self._commands.get(block=block)
                block = False
                self._beat_at = time.monotonic()
                if command is not None:
                    command()

    def _fail(self, error: RuntimeFault) -> None:
        # Tracebacks would keep what was loaded until then in memory.
        error.__context__ = None
        self._load_error = error.with_traceback(None)
        self._set_state(EngineState.FAILED, str(error))
        self._settled.set()

    def _set_progress(self, share: float, what: str) -> None:
        if self._closing.is_set():
            raise RuntimeUnavailable("closed while loading")
        self._progress = share
        self._beat_at = time.monotonic()
        self._set_state(EngineState.LOADING, what)

    def _set_state(self, state: EngineState, reason: str) -> None:
        self._state, self._reason = state, reason
        self._publish(StatusChanged(state=state, reason=reason, revision=self._revision))

    def _publish(self, event: WatchEvent) -> None:
        for watcher in tuple(self._watchers):
            watcher.post(event)

    def _sample_host(self) -> None:
        sampler = HostSampler()
        while not self._closing.wait(HOST_SAMPLE_SECONDS):
            self._publish(sampler.sample())


async def _within(deadline: float, call: Awaitable[T]) -> T | None:
    """What `call` returns by `deadline` (monotonic seconds); None where it does not."""
    with contextlib.suppress(TimeoutError, RuntimeFault):
        return await asyncio.wait_for(call, max(0.0, deadline - time.monotonic()))
    return None
