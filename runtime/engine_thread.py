"""The engine's thread: it loads, obeys commands between rounds, decodes, and replaces the engine under its requests.

Everything that touches an engine happens in this thread; `_call` and `_post` bring work into it from others.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from runtime.changes import load_key
from runtime.config import RuntimeConfig
from runtime.idle import IdleClock
from runtime.interface import (
    AppliedChange,
    Baseline,
    EngineLost,
    EngineState,
    LogLine,
    RequestStats,
    RuntimeFault,
    RuntimeUnavailable,
    StatusChanged,
    WatchEvent,
)
from runtime.last_good import PROOF_SECONDS
from runtime.logs import LOGGER, start_logging, unwatch_log, watch_log
from runtime.rebuild import Built, Order, Parked, build, recovery, stated
from runtime.rebuilder import SERVING, Rebuilder
from runtime.telemetry import HostSampler
from runtime.watching import Watcher

if TYPE_CHECKING:
    from runtime.calibrate import Calibration
    from runtime.engine import Engine

T = TypeVar("T")

HOST_SAMPLE_SECONDS = 1.0
FINISHED_KEPT = 64
UP = SERVING | {EngineState.DRAINING, EngineState.REBUILDING}
"""States in which requests can be talked about."""
RETRY_AFTER_S = {EngineState.LOADING: 5.0, EngineState.REBUILDING: 5.0, EngineState.DRAINING: 10.0}


class EngineThread(Rebuilder):
    """An engine in a thread of its own: it loads, obeys commands between rounds, decodes, and is rebuilt."""

    def __init__(
        self, config: RuntimeConfig, degraded: str | None = None, origins: Mapping[str, str] | None = None
    ) -> None:
        """`degraded`: why `config` is not the configuration that was asked for, if it is not.

        `origins`: field to where its value came from, as far as that is known.
        """
        self._config = config
        self._origins = dict(origins or {})
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        """Held while a command is added, so that what waits can be told to be looks alone."""
        self._acts = 0
        """Waiting commands that are more than looks."""
        self._watchers: list[Watcher] = []
        self._finished: deque[RequestStats] = deque(maxlen=FINISHED_KEPT)
        self._state, self._reason = EngineState.LOADING, "starting"
        self._degraded = degraded
        self._progress = 0.0
        self._beat_at: float | None = time.monotonic()
        self._revision = 1
        self._history: tuple[AppliedChange, ...] = ()
        self._baselines: tuple[Baseline, ...] = ()
        self._idle = IdleClock()
        self._calibration: str | None = None
        self._errors: tuple[str, ...] = ()
        self._engine: Engine | None = None
        self._parked: Parked | None = None
        self._order: Order | None = None
        self._rebuilding: Order | None = None
        self._generation = 0
        """How many engines were built."""
        self._up_at = 0.0
        """When the engine came up (monotonic)."""
        self._lost: str | None = None
        self._before = config
        self._outage_s: float | None = None
        self._held = 0
        """Requests that wait for the end of a rebuild."""
        self._measurements: dict[tuple[Any, ...], tuple[Calibration, float]] = {}
        self._carry_s: dict[tuple[Any, ...], float] = {}
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
        self._origins = dict.fromkeys(type(config).model_fields, "last good configuration")
        self._settled.clear()
        self._set_progress(0.0, "starting with another configuration")
        self._thread = self._engine_thread()

    def _engine_thread(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="ddtree-engine", daemon=True)
        thread.start()
        return thread

    def _unavailable(self) -> RuntimeUnavailable:
        return RuntimeUnavailable(
            f"the engine is {self._state.value}: {self._reason}",
            self._outage_s or RETRY_AFTER_S.get(self._state),
        )

    async def _call(self, act: Callable[[Any], T], look: bool = False) -> T:
        """Runs `act` in the engine's thread between two rounds and returns its result.

        `look`: it only reads, so that measuring in an idle moment need not give way to it.
        """
        if self._closing.is_set():
            raise RuntimeUnavailable("the runtime is closed")
        if self._state not in UP:
            raise self._unavailable()
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                held = self._engine or self._parked
                if held is None:
                    raise self._unavailable()
                future.set_result(act(held))
            except Exception as failure:  # handed to the caller, who raises it
                future.set_exception(failure)

        self._add(command, look)
        return await asyncio.wrap_future(future)

    def _post(self, act: Callable[[Any], object]) -> None:
        """Like `_call`, without waiting."""
        self._add(lambda: (held := self._engine or self._parked) and act(held), look=False)

    def _add(self, command: Callable[[], object], look: bool) -> None:
        def counted() -> None:
            with self._gate:
                self._acts -= 1
            command()

        with self._gate:
            self._acts += not look
            self._commands.put(command if look else counted)

    def _run(self) -> None:
        """The engine's thread: load, then commands and steps until closed."""
        start_logging(self._config.log_level)
        watched = watch_log(self._publish)
        try:
            self._work()
        except Exception as failure:  # nobody foresaw it: it is said, and nobody is left waiting for ever
            self._give_up(stated(failure))
        finally:
            unwatch_log(watched)

    def _work(self) -> None:
        try:
            self._use(build(self._config, None, self._set_progress), self._config)
        except Exception as failure:  # whatever it is, it is stated and ends the engine
            self._fail(stated(failure))
            return
        self._serving()
        self._settled.set()
        while self._engine is not None and not self._closing.is_set():
            self._turn()
        self._obey(block=False)
        ended = self._engine or self._parked
        if ended is not None:
            ended.cancel_all("the runtime was closed")
        if self._engine is not None:
            self._engine.loaded.close()

    def _turn(self) -> None:
        """Measures in an idle moment, obeys commands, decodes a round; or carries out a rebuild."""
        order, self._order = self._order, None
        if order is None and self._lost is not None:
            self._say_error(f"{self._config.layout}: {self._lost}")
            proved = time.monotonic() - self._up_at >= PROOF_SECONDS
            order = recovery(self._config, self._before, self._lost, self._revision, proved)
        if order is not None:
            self._rebuild(order)
            return
        engine = self._engine
        assert engine is not None
        if engine.busy:
            self._obey(block=False)
        else:
            if self._rest_s <= 0 and self._commands.empty():
                self._measure_baselines(engine)
            self._rest()
        if engine.busy and self._order is None and not self._closing.is_set():
            self._step(engine)

    def _use(self, built: Built, config: RuntimeConfig) -> None:
        self._engine, self._up_at = built.engine, time.monotonic()
        self._generation += 1
        built.engine.models.target.watch(partial(self._heed_loss, self._generation))
        self._calibration = built.calibration.summary
        self._measurements[load_key(config)] = (built.calibration, built.seconds)
        self._baselines, self._idle = (), IdleClock()

    def _heed_loss(self, generation: int, cause: str) -> None:
        """From any thread: the engine of `generation` cannot decode any more."""

        def note() -> None:
            if generation == self._generation and self._engine is not None:
                self._lost = self._lost or cause

        self._commands.put(note)

    def _serving(self) -> None:
        if self._degraded:
            self._set_state(EngineState.DEGRADED, self._degraded)
        else:
            self._set_state(EngineState.READY, "serving")

    @property
    def _engaged(self) -> bool:
        """Whether somebody wants the engine for longer than its requests tell."""
        return False

    @property
    def _rest_s(self) -> float:
        """Seconds until the baselines may be measured."""
        if self._state not in SERVING:
            return math.inf
        return self._idle.rest_s(time.monotonic(), self._config.baseline_interval, self._engaged)

    def _rest(self) -> None:
        """Waits for a command, or until the baselines may be measured."""
        seconds = self._rest_s
        if seconds <= 0:
            self._obey(block=False)
            return
        self._beat_at = None
        self._obey(block=True, seconds=seconds if seconds < threading.TIMEOUT_MAX else None)

    def _measure_baselines(self, engine: Engine) -> None:
        """Measures plain and chain decoding in an idle moment; gives way to requests and changes, not to looks."""
        from runtime.calibrate import measure_baselines

        began = time.monotonic()

        def interrupted() -> bool:
            self._beat_at = time.monotonic()
            with self._gate:
                if self._acts or self._lost is not None or self._closing.is_set():
                    return True
                self._obey(block=False)
            return False

        if not engine.modes_by_request:
            self._idle.failed()
            return
        try:
            measured = measure_baselines(engine, interrupted)
        except EngineLost as lost:
            self._lost, measured = str(lost), ()
        except Exception as failure:  # speculation has nothing to be compared with then; serving goes on
            self._survive(engine, "measuring plain decoding", failure)
            measured = ()
        now = time.monotonic()
        if measured is None:
            self._idle.gave_way(now)
        elif measured:
            self._idle.measured(now, now - began, self._config.baseline_interval)
            self._baselines = measured
            self._set_state(self._state, self._reason)
        else:
            self._idle.failed()

    def _step(self, engine: Engine) -> None:
        try:
            stats = engine.step()
        except EngineLost as lost:  # its requests go on in another engine
            self._lost = str(lost)
            return
        except (
            Exception
        ) as failure:  # a fault of one step ends its requests with the reason, never the engine's thread
            self._survive(engine, "a decode step", failure)
            return
        self._beat_at = self._idle.worked_at = time.monotonic()
        if stats is not None:
            self._publish(stats)

    def _survive(self, engine: Engine, what: str, failure: Exception) -> None:
        """Ends all requests with the reason why `what` failed, and says it; the engine's thread goes on."""
        LOGGER.error("%s failed", what, exc_info=failure, extra={"watched": False})
        reason = " ".join(f"{what} failed: {type(failure).__name__}: {failure}".split())
        self._say_error(reason)
        engine.cancel_all(reason, "error")

    def _say_error(self, text: str) -> None:
        self._errors = (*self._errors[-9:], text)
        self._publish(LogLine(time_s=time.time(), level="error", text=text))

    def _obey(self, block: bool, seconds: float | None = None) -> None:
        """Runs waiting commands; with `block`, waits for one, `seconds` at most."""
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get(block, seconds)
                block = False
                self._beat_at = time.monotonic()
                if command is not None:
                    command()

    def _give_up(self, error: RuntimeFault) -> None:
        """Ends everything with `error`: the engine's thread cannot go on."""
        self._fail(error)
        for order in (self._rebuilding, self._order):
            if order is not None and order.answer is not None and not order.answer.done():
                order.fail(error)
        for held in (self._engine, self._parked):
            with contextlib.suppress(Exception):
                if held is not None:
                    held.cancel_all(str(error), "error")
        if self._engine is not None:
            with contextlib.suppress(Exception):
                self._engine.loaded.close()
        self._engine = self._parked = self._order = self._rebuilding = None
        with contextlib.suppress(Exception):
            self._obey(block=False)  # so that no caller waits for ever

    def _fail(self, error: RuntimeFault) -> None:
        self._load_error = error
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
