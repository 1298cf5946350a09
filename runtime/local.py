"""LocalRuntime: the engine in a thread of this process, behind the Runtime interface.

Constructing one returns at once and imports nothing heavy: the engine's thread loads torch and the model. Callers are
asyncio code; the only things that cross are commands in a queue and events handed to the caller's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from runtime.changes import (
    builds_ahead,
    check_revision,
    held_back,
    load_key,
    no_rebuild,
    outage,
    plan_change,
    rebuild_notes,
    refusals,
)
from runtime.description import describe
from runtime.engine_thread import RETRY_AFTER_S, UP, EngineThread
from runtime.interface import (
    ChangePlan,
    ChangeReport,
    ConfigRejected,
    Description,
    EngineState,
    GenerateEvent,
    GenerateRequest,
    Job,
    RequestFinished,
    RequestStats,
    RuntimeBusy,
    RuntimeFault,
    RuntimeUnavailable,
    SnapshotComparison,
    SnapshotPage,
    Snapshots,
    SnapshotView,
    Status,
    TreeTrace,
    WatchEvent,
)
from runtime.job_kinds import JOBS
from runtime.jobs import Jobs
from runtime.last_good import LastGood
from runtime.logs import log_prompt, log_request
from runtime.rebuild import Order, Rebuilding
from runtime.rebuilder import SERVING
from runtime.samples import MEASURING
from runtime.traces import tree_traces
from runtime.watching import Watcher

if TYPE_CHECKING:
    from runtime.config import RuntimeConfig
    from runtime.scheduler import Scheduler
    from runtime.snapshot_port import Keep, Keeper

T = TypeVar("T")

BUSY_RETRY_AFTER_S = 10.0
KEEP_S = 2.0
"""Longest that the report of a change waits for the snapshot of what ran before it."""


class LocalRuntime(EngineThread):
    """Runtime over an engine thread."""

    def __init__(
        self,
        config: RuntimeConfig,
        degraded: str | None = None,
        origins: Mapping[str, str] | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        """As `EngineThread`; `keeper` keeps snapshots of it, None: nothing does."""
        self._keeper = keeper
        self._keeping: set[asyncio.Task[str]] = set()
        """Automatic snapshots being saved; a loop keeps no reference to its tasks."""
        kinds = (*JOBS, *(keeper.jobs if keeper is not None else ()))
        self.job_board = Jobs(self, kinds, self._publish, self._call)
        super().__init__(config, degraded, origins)
        self._last_good = LastGood()

    @property
    def snapshots(self) -> Snapshots:
        return NoSnapshots() if self._keeper is None else self._keeper.snapshots

    @property
    def _engaged(self) -> bool:
        return bool(self.job_board.holder)

    async def describe(self) -> Description:
        return describe(self._config, self._engine.loaded if self._engine else None)

    async def status(self) -> Status:
        engine = self._engine
        scheduler, parked = engine.scheduler if engine else None, self._parked
        config, good = self._config.model_dump(), self._last_good.recall()
        if engine is not None and config["tree_budget"] is None:
            config["tree_budget"] = engine.default_budget
        return Status(
            state=self._state,
            reason=self._reason,
            revision=self._revision,
            config=config,
            running=_running(scheduler) if scheduler else parked.running if parked else 0,
            waiting=self._held + (len(scheduler.waiting) if scheduler else parked.waiting if parked else 0),
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
            origins=self._origins,
            last_good=good.model_dump() if good else None,
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
            while not submitted:
                if self._state is EngineState.REBUILDING:
                    await self._rebuilt()
                if self._state not in SERVING:
                    raise self._unavailable()
                with contextlib.suppress(Rebuilding):
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

    async def _rebuilt(self) -> None:
        """Waits until a rebuild is over; raises RuntimeUnavailable where a request may not wait so long."""
        limit, expected = self._config.queue_timeout, self._outage_s
        if expected is not None and expected > limit or self._held >= self._config.max_queue:
            raise self._unavailable()
        self._held += 1
        try:
            async with asyncio.timeout(limit):
                while self._state is EngineState.REBUILDING:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise self._unavailable() from None
        finally:
            self._held -= 1

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
        running = await self._call(lambda engine: engine.requests(), look=True) if self._state in UP else ()
        running = tuple(each for each in running if each.client != MEASURING)
        return running + tuple(reversed(self._finished))

    async def trace(self, request_id: str, after: int = 0) -> tuple[TreeTrace, ...]:
        name, rounds = await self._call(
            lambda engine: (engine.token_name, engine.traced(request_id, after)), look=True
        )
        return await asyncio.to_thread(tree_traces, rounds, name)

    async def preview(self, change: dict[str, Any]) -> ChangePlan:
        status, config = await self.status(), self._config
        running = await self._call(lambda engine: engine.requests()) if self._state in UP else ()
        wanted = config.changed(change)
        load_s = self._measurements.get(load_key(wanted), (None, None))[1]
        captured = self._engine.within_capture(wanted) if self._engine else {}
        rebuilt = [field for field in change if field not in captured]
        refused = await refusals(config, wanted, rebuilt) if self._state in UP else {}
        if self.job_board.holder and not refused:
            refused = held_back(config, wanted, self.job_board.holder, captured)
        ahead = builds_ahead(config, wanted, self._engine)
        return plan_change(
            config,
            change,
            status.revision,
            running,
            status.config["tree_budget"],
            outage(load_s, self._engine, config, ahead, self._carry_s.get(load_key(wanted))),
            refused,
            rebuild_notes(config, wanted, ahead),
            captured,
        )

    async def apply(self, change: dict[str, Any], revision: int, author: str = "local") -> ChangeReport:
        plan = await self.preview(change)
        check_revision(revision, self._revision, self._history)
        if not plan.allowed:
            raise ConfigRejected(
                plan.summary, next((c.field for c in plan.changes if c.effect != "live"), None)
            )
        if not plan.changes:
            return ChangeReport(revision=self._revision, applied=(), summary=plan.summary)
        answer: Future[ChangeReport] = Future()
        keep = await self._look(plan)
        asking = threading.current_thread()
        await self._call(lambda _: self._take_order(plan, revision, author, answer, asking))
        if keep is None:
            return await asyncio.wrap_future(answer)
        changed = ", ".join(each.field for each in plan.changes)
        keeping = asyncio.create_task(keep(f"{changed}, changed by {author}"))
        self._keeping.add(keeping)
        keeping.add_done_callback(self._keeping.discard)
        report = await asyncio.wrap_future(answer)
        await asyncio.wait({keeping}, timeout=KEEP_S)
        kept = keeping.result() if keeping.done() else "what ran before is still being kept as a snapshot"
        return report.model_copy(update={"kept": kept})

    async def _look(self, plan: ChangePlan) -> Keep | None:
        """What runs, taken down before `plan` has it replaced; None where nothing is replaced or kept."""
        rebuilds = any(each.effect == "rebuild" for each in plan.changes)
        if self._keeper is None or not rebuilds or not self._config.auto_snapshot:
            return None
        return await self._keeper.look(self)

    def _take_order(
        self,
        plan: ChangePlan,
        revision: int,
        author: str,
        answer: Future[ChangeReport],
        asking: threading.Thread,
    ) -> None:
        """In the engine's thread, where one change is complete before the next one is looked at.

        `asking` is the thread that applies the plan: a job may rebuild while it keeps others out.
        """
        if busy := self._rebuilder():
            raise ConfigRejected(f"{busy}; apply again when that is over")
        check_revision(revision, self._revision, self._history)
        config = self._config.changed({each.field: each.new for each in plan.changes})
        order = Order(config, self._config, plan, author, answer)
        if order.rebuilds and self._state is EngineState.DRAINING:
            raise ConfigRejected("the server is draining; nothing is rebuilt any more")
        if order.rebuilds:
            with self.job_board.kept_out(asking) as holder:
                if holder:
                    raise ConfigRejected(no_rebuild(holder))
                self._order = order
        else:
            assert self._engine is not None
            self._engine.config = config
            answer.set_result(self._install(order))

    def _rebuilder(self) -> str:
        """Who has the engine rebuilt, in words; empty if nobody has."""
        busy = self._order or self._rebuilding
        return f"{busy.author} has the engine rebuilt ({busy.what}): {self._reason}" if busy else ""

    async def drain(self, seconds: float = math.inf) -> int:
        """Refuses new requests, gives accepted ones `seconds` to finish and ends the rest, saying why.

        Returns how many were ended early. The engine stays up until `aclose`.
        """
        deadline = time.monotonic() + seconds
        while self._state is EngineState.REBUILDING and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        engine = self._engine
        if engine is None or self._state not in UP:
            return 0
        limit = f" within {seconds:g} s" if math.isfinite(seconds) else ""
        self._set_state(EngineState.DRAINING, f"finishing accepted requests{limit}, taking no new ones")
        await _within(deadline, self._call(lambda _engine: None))
        while self._unfinished and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        reason = f"the server stops and its drain time of {seconds:g} s is over"
        return (
            await _within(time.monotonic() + 1.0, self._call(lambda engine: engine.cancel_all(reason))) or 0
        )

    @property
    def _unfinished(self) -> bool:
        return self._parked is not None or (self._engine is not None and self._engine.busy)

    async def start_job(
        self, kind: str, parameters: dict[str, Any] | None = None, author: str = "local"
    ) -> str:
        return await self.job_board.start(kind, parameters or {}, author, unless=self._rebuilder)

    async def cancel_job(self, job_id: str) -> bool:
        return self.job_board.cancel(job_id)

    async def jobs(self) -> tuple[Job, ...]:
        return self.job_board.all()

    async def aclose(self) -> None:
        await self.job_board.close()
        self._closing.set()
        self._commands.put(None)
        while self._thread.is_alive():
            await asyncio.sleep(0.01)
        self._obey(block=False)  # what came while the thread ended, so that no caller waits for ever
        for watcher in tuple(self._watchers):
            watcher.close()


class NoSnapshots:
    """Where nothing keeps snapshots."""

    async def page(self, words: str = "", offset: int = 0, limit: int = 50) -> SnapshotPage:
        raise self._nothing()

    async def show(self, name: str) -> SnapshotView:
        raise self._nothing()

    async def diff(self, first: str, second: str = "latest") -> SnapshotComparison:
        raise self._nothing()

    def _nothing(self) -> RuntimeFault:
        return RuntimeFault("this runtime keeps no snapshots; save them with: ddtree snapshot save")


def _running(scheduler: Scheduler) -> int:
    """Requests that run, the runtime's own measuring left out."""
    return sum(ticket.request.client != MEASURING for ticket in tuple(scheduler.running))


async def _within(deadline: float, call: Awaitable[T]) -> T | None:
    """What `call` returns by `deadline` (monotonic seconds); None where it does not."""
    with contextlib.suppress(TimeoutError, RuntimeFault):
        return await asyncio.wait_for(call, max(0.0, deadline - time.monotonic()))
    return None
