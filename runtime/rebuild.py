"""Replacing the engine under its requests: they finish or are parked, another engine is built, they go on in it.

A request that goes on keeps its tokens and its seed, and the noise of sampling depends on seed and position alone, so
its text is the one it would have had. Its keys and values are computed anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from runtime.config import RuntimeConfig, effect_of
from runtime.interface import (
    ChangePlan,
    ChangeReport,
    FieldChange,
    FinishReason,
    GenerateRequest,
    RequestStats,
    RuntimeFault,
    RuntimeUnavailable,
)
from runtime.logs import LOGGER, log_place

if TYPE_CHECKING:
    from runtime.calibrate import Calibration
    from runtime.engine import Engine
    from runtime.running import Running, Sink
    from runtime.traces import TracedRound

FINISH_FIRST = frozenset({"model", "max_seq_len", "kv_slots"})
"""Fields whose change a request cannot live through: those accepted before finish under the old value."""
ROUNDING = frozenset({"engine", "layout", "dtype", "device", "attention_backend", "linear", "threads"})
"""Fields whose change may round the same sums otherwise."""
TICK_S = 0.05
MEASURED_UNDER = "; measured under "

Progress = Callable[[float, str], None]


class Rebuilding(RuntimeUnavailable):
    """There is no engine at this moment; another one is being built."""


@dataclass(frozen=True)
class Order:
    """One engine in the place of another."""

    config: RuntimeConfig
    fallback: RuntimeConfig
    """Built where `config` does not come up."""
    plan: ChangePlan
    author: str
    answer: Future[ChangeReport] | None
    """None: nobody asked, the engine was lost."""
    lost: str | None = None
    """Why there is nothing to finish requests with."""

    @property
    def what(self) -> str:
        changed = (f"{each.field} {_word(each.old)} -> {_word(each.new)}" for each in self.plan.changes)
        return ", ".join(changed) or f"{self.config.engine} lost"

    @property
    def words(self) -> str:
        """What is ordered and, where anybody did, by whom."""
        return self.what if self.answer is None else f"{self.what} for {self.author}"

    @property
    def rebuilds(self) -> bool:
        return any(each.effect == "rebuild" for each in self.plan.changes)

    @property
    def finishes_first(self) -> bool:
        return any(each.field in FINISH_FIRST for each in self.plan.changes)

    @property
    def patience_s(self) -> float:
        """Seconds for running requests to finish."""
        return self.fallback.queue_timeout if self.finishes_first else self.fallback.rebuild_drain

    def reply(self, report: ChangeReport) -> None:
        if self.answer is not None:
            self.answer.set_result(report)

    def fail(self, fault: RuntimeFault) -> None:
        if self.answer is not None:
            self.answer.set_exception(fault)


@dataclass(frozen=True)
class Outcome:
    """How a rebuild ended: the configuration in force (None: nothing came up) and why it is not the one ordered."""

    config: RuntimeConfig | None
    carried: int
    failure: str | None

    def report(self, order: Order, revision: int, outage_s: float) -> ChangeReport:
        """`revision`: the one before it, at which a change that failed leaves the configuration."""
        taken_back = self.config is not order.config
        requests = f"{self.carried} request{'' if self.carried == 1 else 's'}"
        summary = f"{order.what}; {outage_s:.1f} s without service, {requests} carried over"
        if taken_back:
            since = "again" if outage_s else "on"
            summary = f"{order.what} failed: {self.failure}; the configuration before it serves {since}"
        return ChangeReport(
            revision=revision,
            applied=() if taken_back else order.plan.changes,
            summary=summary,
            outage_s=outage_s,
            carried=self.carried,
            failure=self.failure if taken_back else None,
        )


@dataclass(frozen=True)
class Built:
    """An engine that gave its first tokens, and how long it took to get there."""

    engine: Engine
    calibration: Calibration
    seconds: float


def build(config: RuntimeConfig, known: Calibration | None, progress: Progress) -> Built:
    """Loads `config` and lets the engine prove itself; `known` stands in for measuring this host again.

    Raises RuntimeFault: it does not fit, or does not come up.
    """
    progress(0.01, "importing torch")
    if config.engine == "sglang":
        from runtime.sglang_engine import build_sglang

        began = time.monotonic()
        return Built(*build_sglang(config, progress), time.monotonic() - began)
    from runtime.calibrate import calibrate, prove
    from runtime.engine import Engine
    from runtime.loader import load

    began = time.monotonic()
    loaded = load(config, progress)
    try:
        engine = Engine(loaded, config, default_budget=0)
        progress(0.9, "measuring this host" if known is None else "decoding the first tokens")
        calibration = known or calibrate(engine)
        engine.default_budget = calibration.tree_budget
        prove(engine)
    except BaseException:
        loaded.close()
        raise
    return Built(engine, calibration, time.monotonic() - began)


def stated(failure: BaseException) -> RuntimeFault:
    """`failure` of a load as a fault of one line; one that nobody foresaw is logged with its trace."""
    if not isinstance(failure, RuntimeFault):
        LOGGER.error("the engine failed to load", exc_info=failure)
        text = f"the engine failed to load: {type(failure).__name__}: {failure} (details: {log_place()})"
        return RuntimeUnavailable(" ".join(text.split()))
    # Tracebacks would keep what was loaded until then in memory.
    failure.__context__ = None
    return failure.with_traceback(None)


def build_beside(make: Callable[[], Built], tick: Callable[[], object]) -> Built | RuntimeFault:
    """Runs `make` in a thread and `tick` meanwhile, so that what is parked can be asked and cancelled."""
    made: Future[Built] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as failure:  # stated below, whatever it is
            made.set_exception(stated(failure))

    thread = threading.Thread(target=run, name="ddtree-build", daemon=True)
    thread.start()
    while thread.is_alive():
        tick()
    thread.join()
    failure = made.exception()
    if failure is None:
        return made.result()
    assert isinstance(failure, RuntimeFault)
    return failure


def let_finish(engine: Engine, order: Order, turn: Callable[[], bool], had_s: float = 0.0) -> int:
    """Steps running requests for as long as they have; returns how many are left that must not be left.

    `had_s`: seconds they had since the order.
    """
    engine.starts = order.finishes_first
    deadline = time.monotonic() + order.patience_s - had_s

    def left() -> int:
        waiting = len(engine.scheduler.waiting) if order.finishes_first else 0
        return len(engine.scheduler.running) + waiting

    while left() and time.monotonic() < deadline and turn():
        pass
    engine.starts = True
    return left() if order.finishes_first else 0


class Parked:
    """Requests between two engines; they can be looked at and cancelled as in an engine."""

    def __init__(self, engine: Engine) -> None:
        self.serial = engine.serial
        stats = {each.request_id: each for each in engine.requests()}
        self._requests = {running.ticket.request_id: running for running in engine.release()}
        self._stats = {name: stats[name] for name in self._requests}

    @property
    def running(self) -> int:
        return sum(each.ticket.progress is not None for each in self._requests.values())

    @property
    def waiting(self) -> int:
        return len(self._requests) - self.running

    @property
    def tokens(self) -> int:
        """Tokens of those that run."""
        return sum(
            len(each.ticket.progress.token_ids) for each in self._requests.values() if each.ticket.progress
        )

    def take(self) -> list[Running]:
        """The requests that are left, in the order they are to run."""
        taken = list(self._requests.values())
        self._requests.clear()
        return taken

    def submit(self, request: GenerateRequest, sink: Sink) -> str:
        raise Rebuilding("the engine is being rebuilt")

    def requests(self) -> tuple[RequestStats, ...]:
        return tuple(self._stats[name] for name in self._requests)

    def traced(self, request_id: str, after: int = 0) -> tuple[TracedRound, ...]:
        return ()

    def token_name(self, token_id: int) -> str:
        return ""

    def withdraw(self, request_id: str) -> bool:
        running = self._requests.get(request_id)
        return running is not None and running.ticket.progress is None and self.cancel(request_id)

    def cancel(self, request_id: str, reason: FinishReason = "cancelled", error: str | None = None) -> bool:
        from runtime.running import end

        running = self._requests.pop(request_id, None)
        if running is None:
            return False
        ended = {"state": "finished", "finish_reason": reason}
        end(running, self._stats[request_id].model_copy(update=ended), error)
        return True

    def cancel_all(self, error: str, reason: FinishReason = "cancelled") -> int:
        return sum(self.cancel(request_id, reason, error) for request_id in tuple(self._requests))


def park(engine: Engine) -> Parked:
    """Takes the requests out of an engine and ends it; the caller forgets it, so that its memory goes."""
    parked = Parked(engine)
    engine.loaded.close()
    return parked


def go_on(
    engine: Engine, parked: Parked, order: Order, config: RuntimeConfig, tick: Callable[[], object]
) -> int:
    """Gives `engine`, built for `config`, what is parked, and computes its tokens; returns how many had some.

    Raises EngineLost: the requests are in the engine then.
    """
    requests = parked.take()
    carried = sum(each.ticket.progress is not None for each in requests)
    engine.adopt(requests, continued(order, config), parked.serial)
    engine.catch_up(tick)
    return carried


def recovery(config: RuntimeConfig, before: RuntimeConfig, lost: str, revision: int, proved: bool) -> Order:
    """What to build when the engine of `config` is lost; `proved`: it had served for a while.

    Of the native engine the layout `before`, or one process, or the same again. SGLang that had proved itself, or was
    the first, is started again as it was; else what was `before` comes back.
    """
    if config.engine == "sglang":
        again = proved or before == config
        changes = () if again else _differences(config, before, lost)
        wanted, degraded = (
            (config, lost) if again else (before, f"{lost}; the configuration before it serves")
        )
        plan = ChangePlan(
            revision=revision, changes=changes, allowed=True, requests_running=0, unreached=0, summary=lost
        )
        return Order(wanted, before, plan, "ddtree", None, degraded)
    layout = before.layout if (before.layout, before.engine) != (config.layout, config.engine) else "single"
    layout = layout if before.engine == config.engine else "single"
    wanted = config.changed({"layout": layout})
    change = FieldChange(field="layout", old=config.layout, new=layout, effect="rebuild", note=lost)
    plan = ChangePlan(
        revision=revision,
        changes=(change,) if layout != config.layout else (),
        allowed=True,
        requests_running=0,
        unreached=0,
        summary=lost,
    )
    degraded = f"{lost}; {layout} serves in place of {config.layout}"
    return Order(wanted, config, plan, "ddtree", None, degraded)


def _differences(config: RuntimeConfig, wanted: RuntimeConfig, note: str) -> tuple[FieldChange, ...]:
    old, new = config.model_dump(), wanted.model_dump()
    return tuple(
        FieldChange(field=name, old=old[name], new=new[name], effect=effect_of(name, wanted), note=note)
        for name in old
        if old[name] != new[name]
    )


def borrowed(calibration: Calibration, layout: str) -> Calibration:
    """`calibration`, measured under `layout`, for another one, which is not measured while requests wait for it."""
    if MEASURED_UNDER in calibration.summary:
        return calibration
    return replace(calibration, summary=f"{calibration.summary}{MEASURED_UNDER}{layout}")


def continued(order: Order, config: RuntimeConfig) -> str:
    """What a request is told that goes on under `config`, one of the two configurations of `order`."""
    if config is order.fallback and config is not order.config:
        return f"continued under {config.layout} after {order.what} failed"
    new = {each.field: each.new for each in order.plan.changes if each.effect == "rebuild"}
    differs = bool(ROUNDING & new.keys())
    layout = new.pop("layout", None)
    words = [str(layout)] if layout is not None else []
    words += [f"{field} {_word(value)}" for field, value in new.items()]
    words = words or [f"{config.engine}, started again"]
    note = ": near-ties may differ" if differs else ""
    if config.engine != order.fallback.engine:
        note = ": near-ties may differ, and sampled text goes on with the noise of this engine"
    return f"continued under {', '.join(words)}" + note


def _word(value: Any) -> str:
    return "auto" if value is None else str(value)
