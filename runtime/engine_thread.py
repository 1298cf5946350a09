"""The engine's thread: it loads, obeys commands between rounds, decodes, and replaces the engine under its requests.

Everything that touches an engine happens in this thread; `_call` and `_post` bring work into it from others.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from runtime.changes import recorded
from runtime.config import RuntimeConfig
from runtime.interface import (
    AppliedChange,
    Baseline,
    ChangeReport,
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
from runtime.logs import LOGGER, set_level, start_logging, unwatch_log, watch_log
from runtime.rebuild import (
    TICK_S,
    Built,
    Order,
    Outcome,
    Parked,
    build,
    build_beside,
    collect,
    go_on,
    let_finish,
    load_key,
    park,
    recovery,
    stated,
)
from runtime.telemetry import HostSampler
from runtime.watching import Watcher

if TYPE_CHECKING:
    from runtime.calibrate import Calibration
    from runtime.engine import Engine

T = TypeVar("T")

HOST_SAMPLE_SECONDS = 1.0
FINISHED_KEPT = 64
SERVING = frozenset({EngineState.READY, EngineState.DEGRADED})
"""States in which requests are taken."""
UP = SERVING | {EngineState.DRAINING, EngineState.REBUILDING}
"""States in which requests can be talked about."""
RETRY_AFTER_S = {EngineState.LOADING: 5.0, EngineState.REBUILDING: 5.0, EngineState.DRAINING: 10.0}


class EngineThread:
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
        self._measured = False
        self._calibration: str | None = None
        self._errors: tuple[str, ...] = ()
        self._engine: Engine | None = None
        self._parked: Parked | None = None
        """The requests while there is no engine for them."""
        self._order: Order | None = None
        self._rebuilding: Order | None = None
        self._generation = 0
        """How many engines were built."""
        self._up_at = 0.0
        """When the engine came up (monotonic)."""
        self._lost: str | None = None
        """Why the engine cannot decode any more."""
        self._before = config
        """The configuration before the last rebuild."""
        self._outage_s: float | None = None
        self._held = 0
        """Requests that wait for the end of a rebuild."""
        self._measurements: dict[tuple[Any, ...], tuple[Calibration, float]] = {}
        """Calibration and seconds of the last load, by what was loaded."""
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
                future.set_result(act(self._engine or self._parked))
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
        idle = not engine.busy
        if idle and not self._measured and self._commands.empty():
            self._measure_baselines(engine)
        self._obey(block=idle and self._measured)
        if engine.busy and self._order is None and not self._closing.is_set():
            self._step(engine)

    def _use(self, built: Built, config: RuntimeConfig) -> None:
        self._engine, self._up_at = built.engine, time.monotonic()
        self._generation += 1
        built.engine.models.target.watch(partial(self._heed_loss, self._generation))
        self._calibration = built.calibration.summary
        self._measurements[load_key(config)] = (built.calibration, built.seconds)
        self._baselines, self._measured = (), False

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

    def _rebuild(self, order: Order) -> None:
        """Replaces the engine as ordered; its requests go on in whichever one comes up."""
        if order.answer is not None and not order.answer.set_running_or_notify_cancel():
            return
        began = time.monotonic()
        self._rebuilding, self._outage_s = order, order.plan.outage_s
        self._set_state(EngineState.REBUILDING, f"{order.what}: running requests finish")
        left = let_finish(self._engine, order, self._drain_turn) if self._engine and not order.lost else 0
        if left:
            reason = f"{left} requests did not finish within {order.patience_s:g} s"
            outcome = Outcome(order.fallback, 0, reason)
        else:
            outcome = self._bring_up(order)
        self._rebuilding = self._outage_s = None
        if outcome.config is None:
            if self._closing.is_set():
                order.fail(RuntimeUnavailable("the runtime was closed"))
                return
            self._fail(RuntimeUnavailable(f"{order.what}: {outcome.failure}; nothing else came up either"))
            if self._parked is not None:
                self._parked.cancel_all(str(self._load_error), "error")
            order.fail(self._load_error)
            return
        report = outcome.report(order, self._revision, time.monotonic() - began)
        if report.failure is None:
            self._degraded = order.lost if order.config != self._config else None
            self._install(order)
        self._serving()
        order.reply(report.model_copy(update={"revision": self._revision}))

    def _bring_up(self, order: Order) -> Outcome:
        """Builds what is ordered, or else what was there; the requests go on in it."""
        failure = order.lost
        for config in (order.config, order.fallback):
            if self._engine is not None:
                self._parked, self._engine = park(self._engine), None
            self._lost = None
            collect()
            self._set_state(EngineState.REBUILDING, f"{order.what}: loading {config.layout}")
            known = self._measurements.get(load_key(config), (None, 0.0))[0]
            made = build_beside(partial(build, config, known, self._load_progress), self._tick)
            if isinstance(made, Built):
                self._use(made, config)
                try:
                    return Outcome(config, self._go_on(order, config), failure)
                except EngineLost as lost:
                    failure = failure or str(lost)
            else:
                failure = failure or str(made)
            del made
        if self._engine is not None:
            self._parked, self._engine = park(self._engine), None
        return Outcome(None, 0, failure)

    def _go_on(self, order: Order, config: RuntimeConfig) -> int:
        parked, self._parked = self._parked, None
        assert self._engine is not None and parked is not None
        return go_on(self._engine, parked, order, config, self._tick)

    def _install(self, order: Order, **figures: Any) -> ChangeReport:
        """Makes the configuration of `order` the one in force."""
        if order.rebuilds:
            self._before = self._config
        self._config, plan = order.config, order.plan
        set_level(self._config.log_level)
        self._revision += 1
        self._history = recorded(self._history, plan, self._revision, order.author)
        self._origins |= {each.field: f"changed by {order.author}" for each in plan.changes}
        self._set_state(self._state, self._reason)
        return ChangeReport(revision=self._revision, applied=plan.changes, summary=plan.summary, **figures)

    def _drain_turn(self) -> bool:
        """Obeys commands and decodes a round; False once there is no use in it."""
        self._obey(block=False)
        if self._engine is not None and self._engine.busy:
            self._step(self._engine)
        return self._lost is None and not self._closing.is_set()

    def _tick(self) -> None:
        self._obey(block=True, seconds=TICK_S)
        self._beat_at = time.monotonic()

    def _load_progress(self, _share: float, what: str) -> None:
        if self._closing.is_set():
            raise RuntimeUnavailable("closed while loading")

    def _measure_baselines(self, engine: Engine) -> None:
        """Measures plain and chain decoding in an idle moment; gives way to requests and changes, not to looks."""
        from runtime.calibrate import measure_baselines

        def interrupted() -> bool:
            self._beat_at = time.monotonic()
            with self._gate:
                if self._acts or self._lost is not None or self._closing.is_set():
                    return True
                self._obey(block=False)
            return False

        if not engine.modes_by_request:
            self._measured = True
            return
        try:
            measured = measure_baselines(engine, interrupted)
        except EngineLost as lost:
            self._lost, measured = str(lost), ()
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
        except EngineLost as lost:  # its requests go on in another engine
            self._lost = str(lost)
            return
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
            if block and seconds is None:
                self._beat_at = None
            while True:
                command = self._commands.get(block, seconds)
                block = False
                self._beat_at = time.monotonic()
                if command is not None:
                    command()

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
