"""Carries out a rebuild in the engine's thread: another engine is built, before or after the present one has gone.

A part of `EngineThread`. Where memory allows, the next engine is built while the present one serves, so that requests
wait only until their tokens are computed in it; else the present one is ended first.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any

from runtime.changes import builds_ahead, load_key, recorded
from runtime.config import RuntimeConfig
from runtime.garbage import collect
from runtime.interface import (
    AppliedChange,
    ChangeReport,
    EngineLost,
    EngineState,
    RuntimeFault,
    RuntimeUnavailable,
)
from runtime.logs import set_level
from runtime.rebuild import (
    TICK_S,
    Built,
    Order,
    Outcome,
    Parked,
    borrowed,
    build,
    build_beside,
    go_on,
    let_finish,
    park,
)

if TYPE_CHECKING:
    from runtime.calibrate import Calibration
    from runtime.engine import Engine

SERVING = frozenset({EngineState.READY, EngineState.DEGRADED})
"""States in which requests are taken."""


class Rebuilder(ABC):
    """What a rebuild needs of the engine's thread, and how it goes."""

    _config: RuntimeConfig
    _origins: dict[str, str]
    _state: EngineState
    _reason: str
    _degraded: str | None
    _beat_at: float | None
    _revision: int
    _history: tuple[AppliedChange, ...]
    _engine: Engine | None
    _parked: Parked | None
    """The requests while there is no engine for them."""
    _order: Order | None
    _rebuilding: Order | None
    _lost: str | None
    """Why the engine cannot decode any more."""
    _before: RuntimeConfig
    """The configuration before the last rebuild."""
    _outage_s: float | None
    _measurements: dict[tuple[Any, ...], tuple[Calibration, float]]
    """Calibration and seconds of the last load, by what was loaded."""
    _carry_s: dict[tuple[Any, ...], float]
    """Seconds that each token of carried requests took to be computed anew, by what was loaded."""
    _load_error: RuntimeFault
    _closing: threading.Event

    @abstractmethod
    def _use(self, built: Built, config: RuntimeConfig) -> None:
        """Serves with the engine that was built."""

    @abstractmethod
    def _step(self, engine: Engine) -> None:
        """One step of the engine, with what is told of it."""

    @abstractmethod
    def _obey(self, block: bool, seconds: float | None = None) -> None:
        """Does what commands ask."""

    @abstractmethod
    def _set_state(self, state: EngineState, reason: str) -> None:
        """Tells a state to all who listen."""

    @abstractmethod
    def _serving(self) -> None:
        """Tells that requests are served, or served with something missing."""

    @abstractmethod
    def _fail(self, error: RuntimeFault) -> None:
        """Tells that nothing can be served, and why."""

    def _rebuild(self, order: Order) -> None:
        """Replaces the engine as ordered; its requests go on in whichever one comes up."""
        if order.answer is not None and not order.answer.set_running_or_notify_cancel():
            return
        self._rebuilding, ordered = order, time.monotonic()
        ready = self._build_ahead(order)
        if isinstance(ready, RuntimeFault):
            self._rebuilding = None
            if self._state in SERVING:
                self._serving()
            order.reply(Outcome(order.fallback, 0, str(ready)).report(order, self._revision, 0.0))
            return
        began = time.monotonic()
        self._outage_s = order.plan.outage_s
        self._set_state(EngineState.REBUILDING, f"{order.words}: running requests finish")
        left = 0
        if self._engine is not None and not order.lost:
            left = let_finish(self._engine, order, self._drain_turn, began - ordered)
        if left:
            reason = f"{left} requests did not finish within {order.patience_s:g} s"
            outcome = Outcome(order.fallback, 0, reason)
        else:
            outcome = self._bring_up(order, ready)
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
        if ready is not None:
            del ready
            collect()

    def _build_ahead(self, order: Order) -> Built | RuntimeFault | None:
        """The engine of `order`, built while the present one serves; None where that one has to go first."""
        if order.lost or not builds_ahead(order.fallback, order.config, self._engine):
            return None
        self._set_state(self._state, f"{order.words}: loading {order.config.layout}; {self._reason}")
        make = partial(build, order.config, self._known(order.config), self._load_progress)
        made = build_beside(make, self._serve_turn)
        if isinstance(made, Built) and self._leaving:
            made.engine.loaded.close()
            return RuntimeUnavailable(self._leaving)
        return made

    def _serve_turn(self) -> None:
        """One turn of an engine that serves while another one is built."""
        engine = self._engine
        assert engine is not None
        serves = engine.busy and self._lost is None and not self._closing.is_set()
        self._obey(block=not serves, seconds=TICK_S)
        self._beat_at = time.monotonic()
        if serves:
            self._step(engine)

    @property
    def _leaving(self) -> str:
        """Why nothing is to be built any more; empty if it may."""
        if self._closing.is_set():
            return "closed while loading"
        drains = self._state is EngineState.DRAINING
        return "the server is draining; nothing is rebuilt any more" if drains else ""

    def _known(self, config: RuntimeConfig) -> Calibration | None:
        """What was measured of `config`, or else of it under the present layout."""
        now = self._config.layout
        alike = config.engine == self._config.engine
        for each in (config, config.changed({"layout": now})) if alike else (config,):
            found = self._measurements.get(load_key(each))
            if found is not None:
                return found[0] if each.layout == config.layout else borrowed(found[0], now)
        return None

    def _bring_up(self, order: Order, ready: Built | None) -> Outcome:
        """Takes `ready` or builds what is ordered, or else what was there; the requests go on in it."""
        failure = order.lost
        for config in (order.config, order.fallback):
            if self._engine is not None:
                self._parked, self._engine = park(self._engine), None
            self._lost = None
            made: Built | RuntimeFault | None = ready
            ready = None
            if made is None:
                collect()
                self._set_state(EngineState.REBUILDING, f"{order.words}: loading {config.layout}")
                make = partial(build, config, self._known(config), self._load_progress)
                made = build_beside(make, self._tick)
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
        tokens, began = parked.tokens, time.monotonic()
        carried = go_on(self._engine, parked, order, config, self._tick)
        if tokens:
            self._carry_s[load_key(config)] = (time.monotonic() - began) / tokens
        return carried

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
        if self._leaving:
            raise RuntimeUnavailable(self._leaving)
