"""LocalRuntime: the engine in a thread of this process, behind the Runtime interface.

Constructing one returns at once and imports nothing heavy: the engine's thread loads torch and the model. Callers are
asyncio code; the only things that cross are commands in a queue and events handed to the caller's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from runtime.changes import check_revision, plan_change, recorded
from runtime.config import RuntimeConfig
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
    RuntimeFault,
    RuntimeUnavailable,
    Status,
    StatusChanged,
    TreeTrace,
    WatchEvent,
)
from runtime.logs import LOGGER, log_file, start_logging
from runtime.telemetry import HostSampler

if TYPE_CHECKING:
    from runtime.engine import Engine

T = TypeVar("T")

HOST_SAMPLE_SECONDS = 1.0
WATCH_QUEUE = 512
"""Events a watcher may be behind by; older ones are dropped, never waited for."""
FINISHED_KEPT = 64


class _Watcher:
    """A bounded queue from the engine's thread into one asyncio loop; wakes the loop once however many events wait."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[WatchEvent] = deque(maxlen=WATCH_QUEUE)
        self._ready = asyncio.Event()
        self._woken = False

    def post(self, event: WatchEvent) -> None:
        self._events.append(event)
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the watcher's loop has closed
                self._loop.call_soon_threadsafe(self._ready.set)

    async def next(self) -> list[WatchEvent]:
        await self._ready.wait()
        self._ready.clear()
        self._woken = False
        return [self._events.popleft() for _ in range(len(self._events))]


class LocalRuntime:
    """Runtime over an engine thread. `config` is what it was started with."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._config = config
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._watchers: list[_Watcher] = []
        self._finished: deque[RequestStats] = deque(maxlen=FINISHED_KEPT)
        self._state, self._reason = EngineState.LOADING, "starting"
        self._progress = 0.0
        self._revision = 1
        self._history: tuple[AppliedChange, ...] = ()
        self._baselines: tuple[Baseline, ...] = ()
        self._calibration: str | None = None
        self._errors: tuple[str, ...] = ()
        self._engine: Engine | None = None
        self._started_at = time.time()
        self._closing = threading.Event()
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddtree-engine", daemon=True)
        self._sampler = threading.Thread(target=self._sample_host, name="ddtree-host", daemon=True)
        self._thread.start()
        self._sampler.start()

    async def wait_ready(self) -> None:
        """Returns when the engine serves; raises RuntimeUnavailable or ConfigRejected when it failed to load."""
        while not self._settled.is_set():
            await asyncio.sleep(0.02)
        if self._state is EngineState.FAILED:
            raise self._load_error

    async def describe(self) -> Description:
        config, engine = self._config, self._engine
        loaded = engine.loaded if engine else None
        drafter = loaded.models.drafter if loaded else None
        return Description(
            engine=config.engine,
            target=loaded.checkpoint.name if loaded else config.model,
            target_digest=None,
            drafter=str(loaded.drafter_path) if loaded and loaded.drafter_path else None,
            architecture=str(loaded.checkpoint.config["architectures"][0]) if loaded else None,
            block_size=drafter.config.block_size if drafter else None,
            max_tree_budget=loaded.limits.max_tree_budget if loaded else config.max_tree_budget,
            max_seq_len=loaded.limits.max_seq_len if loaded else config.max_seq_len or 0,
            max_concurrency=config.max_concurrency,
            vocab_size=loaded.limits.vocab_size if loaded else None,
            dtype=str(loaded.models.target.dtype).removeprefix("torch.") if loaded else None,
            device=str(loaded.models.target.device) if loaded else None,
            threads=loaded.threads if loaded else None,
            linear=loaded.linear if loaded else None,
            host=platform.node(),
            pid=os.getpid(),
            speculation="loading"
            if loaded is None
            else "ready"
            if loaded.no_drafter_reason is None
            else f"inactive: {loaded.no_drafter_reason}",
        )

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
            calibration=self._calibration,
            errors=self._errors,
            history=self._history,
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[GenerateEvent] = asyncio.Queue()

        def sink(event: GenerateEvent) -> None:
            if isinstance(event, RequestFinished):
                self._finished.append(event.stats)
                self._publish(event.stats)
            with contextlib.suppress(RuntimeError):  # the caller's loop has closed
                loop.call_soon_threadsafe(events.put_nowait, event)

        submitted: list[str] = []
        finished = False
        try:
            await self._call(lambda engine: submitted.append(engine.submit(request, sink)))
            while not finished:
                event = await events.get()
                finished = isinstance(event, RequestFinished)
                yield event
        finally:
            # A caller may leave before the engine has taken the request: what was submitted is known only there.
            if not finished:
                self._post(lambda engine: [engine.cancel(request_id) for request_id in submitted])

    async def cancel(self, request_id: str) -> bool:
        return await self._call(lambda engine: engine.cancel(request_id))

    async def watch(self) -> AsyncIterator[WatchEvent]:
        watcher = _Watcher(asyncio.get_running_loop())
        self._watchers.append(watcher)
        try:
            while True:
                for event in await watcher.next():
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
        self._revision += 1
        self._history = recorded(self._history, plan, self._revision, author)
        self._set_state(self._state, self._reason)
        return ChangeReport(revision=self._revision, applied=plan.changes, summary=plan.summary)

    async def aclose(self) -> None:
        self._closing.set()
        self._commands.put(None)
        while self._thread.is_alive():
            await asyncio.sleep(0.01)

    async def _call(self, act: Callable[[Engine], T]) -> T:
        """Runs `act` in the engine's thread between two rounds and returns its result."""
        if self._state is not EngineState.READY:
            raise RuntimeUnavailable(f"the engine is {self._state.value}: {self._reason}")
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
            reason = f"the engine failed to load: {type(failure).__name__}: {failure} (details: {log_file()})"
            self._fail(RuntimeUnavailable(" ".join(reason.split())))
            return
        engine = self._engine
        assert engine is not None
        while not self._closing.is_set():
            idle = not engine.busy
            if idle and not self._baselines and self._commands.empty():
                self._measure_baselines(engine)
            self._obey(block=idle and bool(self._baselines))
            if engine.busy and not self._closing.is_set():
                self._step(engine)
        for stats in engine.requests():
            engine.cancel(stats.request_id, "cancelled", "the runtime was closed")

    def _load(self) -> None:
        self._set_progress(0.01, "importing torch")
        from runtime.calibrate import calibrate
        from runtime.engine import Engine
        from runtime.loader import load

        loaded = load(self._config, self._set_progress)
        engine = Engine(loaded, self._config, default_budget=0)
        self._set_progress(0.9, "measuring this host")
        calibration = calibrate(engine)
        engine.default_budget = calibration.tree_budget
        self._calibration = calibration.summary
        self._engine = engine
        self._set_state(EngineState.READY, "serving")
        self._settled.set()

    def _measure_baselines(self, engine: Engine) -> None:
        """Measures plain and chain decoding in an idle moment; gives way as soon as a command comes."""
        from runtime.calibrate import measure_baselines

        self._baselines = measure_baselines(engine, lambda: not self._commands.empty()) or ()
        if self._baselines:
            self._set_state(self._state, self._reason)

    def _step(self, engine: Engine) -> None:
        try:
            stats = engine.step()
        except (
            Exception
        ) as failure:  # a fault of one step ends its requests with the reason, never the engine's thread
            LOGGER.exception("a decode step failed")
            reason = " ".join(f"a decode step failed: {type(failure).__name__}: {failure}".split())
            self._errors = (*self._errors[-9:], reason)
            for running in engine.requests():
                engine.cancel(running.request_id, "error", reason)
            self._publish(LogLine(time_s=time.time(), level="error", text=reason))
            return
        if stats is not None:
            self._publish(stats)

    def _obey(self, block: bool) -> None:
        """Runs waiting commands; with `block`, waits for one."""
        try:
            command = self._commands.get(block=block)
            while command is not None:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _fail(self, error: RuntimeFault) -> None:
        self._load_error = error
        self._set_state(EngineState.FAILED, str(error))
        self._settled.set()

    def _set_progress(self, share: float, what: str) -> None:
        if self._closing.is_set():
            raise RuntimeUnavailable("closed while loading")
        self._progress = share
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
