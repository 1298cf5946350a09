"""Jobs: long work beside serving, such as a bench, with progress and an end; one that needs the engine at a time.

A job runs in a thread of its own with its own event loop and uses the runtime as any client does, so that serving goes
on. A job that measures gives way to other clients' requests unless it was told to run under load.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, get_args

from pydantic import ValidationError

from runtime.interface import (
    ConfigRejected,
    EngineState,
    Frozen,
    Job,
    JobName,
    JobProgress,
    JobRefused,
    JobState,
    Runtime,
    RuntimeFault,
    RuntimeUnavailable,
)
from runtime.logs import LOGGER
from runtime.rejection import nearest, plain, rejection

KEPT = 32
"""Jobs that are remembered after their end."""
LOOK_S = 0.2
"""How often a measuring job looks for requests of others."""
REPORT_S = 0.1
"""Progress is told at most this often; an end is told always."""
CLOSE_S = 3.0

T = TypeVar("T")
Parameters = TypeVar("Parameters", bound=Frozen)


class WithEngine(Protocol):
    """Runs a function in the engine's thread, between two rounds, and returns what it returns."""

    def __call__(self, act: Callable[[Any], T], /) -> Awaitable[T]: ...


@dataclass(frozen=True)
class Outcome:
    """What a job found: one line for a person and plain values."""

    text: str
    result: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JobContext(Generic[Parameters]):
    """What a running job has to work with."""

    job_id: str
    """Also the client name of its requests."""
    parameters: Parameters
    runtime: Runtime
    report: Callable[[float | None, str], None]
    """Tells progress (0 to 1, None where unknown) and what is being done."""
    stopping: threading.Event
    """Set when the job is to end; for work in threads, which cannot be cancelled."""
    with_engine: WithEngine | None = None
    author: str = "local"
    """Who started it."""


@dataclass(frozen=True)
class JobKind(Generic[Parameters]):
    """One kind of job, as a runtime offers it."""

    name: JobName
    parameters: type[Parameters]
    run: Callable[[JobContext[Parameters]], Awaitable[Outcome]]
    check: Callable[[Runtime, Parameters], Awaitable[None]] | None = None
    """Raises ConfigRejected for parameters that this runtime cannot serve."""
    exclusive: bool = True
    """At most one such job runs at a time."""
    measures: bool = False
    """Other clients' requests stop it; its parameters have a field `under_load` that allows them."""


class _Running:
    """One job that has not ended: its value, and how to stop it from any thread."""

    def __init__(self, job: Job, kind: JobKind[Any], parameters: Any, known: frozenset[str]) -> None:
        """`known`: requests that had ended before it began."""
        self.job = job
        self.kind = kind
        self.parameters = parameters
        self.known = known
        self.why = "cancelled"
        self.stopping = threading.Event()
        self.thread: threading.Thread | None = None
        self.told_at = 0.0
        self._stop: Callable[[], object] | None = None

    def begin(self, work: asyncio.Task[Outcome]) -> None:
        loop = asyncio.get_running_loop()
        self._stop = lambda: loop.call_soon_threadsafe(work.cancel)
        if self.stopping.is_set():
            work.cancel()

    def stop(self, why: str) -> None:
        if not self.stopping.is_set():
            self.why = why
            self.stopping.set()
        if self._stop is not None:
            with contextlib.suppress(RuntimeError):  # its loop has just closed
                self._stop()


class Jobs:
    """The jobs of one runtime. `publish` may be called from any thread."""

    def __init__(
        self,
        runtime: Runtime,
        kinds: Iterable[JobKind[Any]],
        publish: Callable[[JobProgress], object],
        with_engine: WithEngine | None = None,
    ) -> None:
        self._runtime = runtime
        self._kinds = {kind.name: kind for kind in kinds}
        self._publish = publish
        self._with_engine = with_engine
        self._running: dict[str, _Running] = {}
        self._over: deque[Job] = deque(maxlen=KEPT)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = False

    def register(self, kind: JobKind[Any]) -> None:
        """Offers one more kind of job."""
        self._kinds[kind.name] = kind

    @property
    def holder(self) -> str:
        """The job that keeps others out, in words; empty if there is none, or to what that job does itself."""
        return self._holder(threading.current_thread())

    def _holder(self, asker: threading.Thread) -> str:
        """As `holder`, to what runs in the thread `asker`."""
        running = next((each for each in tuple(self._running.values()) if each.kind.exclusive), None)
        if running is None or running.thread is asker:
            return ""
        held = running.job
        since = time.strftime("%H:%M:%S", time.localtime(held.started_at_s))
        return f"{held.id}, started by {plain(held.holder)} at {since}, is running"

    @contextlib.contextmanager
    def kept_out(self, asker: threading.Thread) -> Iterator[str]:
        """Within, no job begins; gives `holder` as it is to what runs in the thread `asker`."""
        with self._lock:
            yield self._holder(asker)

    def all(self) -> tuple[Job, ...]:
        """Those that run, then those that ended lately, the latest first."""
        with self._lock:
            return (*(each.job for each in self._running.values()), *reversed(self._over))

    async def start(
        self, name: str, values: Mapping[str, Any], author: str, unless: Callable[[], str] = lambda: ""
    ) -> str:
        """Begins a job and returns its id; raises as `Runtime.start_job` says.

        `unless` gives, in words, who keeps jobs that need the engine out; empty if nobody does.
        """
        kind = self._kind(name)
        try:
            parameters = kind.parameters.model_validate(dict(values))
        except ValidationError as error:
            refused = rejection(error, kind.parameters)
            raise ConfigRejected(refused.line(f"{name} job"), refused.field) from None
        if kind.check is not None:
            await kind.check(self._runtime, parameters)
        known = await self._undisturbed(name, parameters) if kind.measures else frozenset()
        with self._lock:
            if self._closed:
                raise RuntimeUnavailable("the runtime is closed")
            if kind.exclusive and self.holder:
                raise JobRefused(f"{name} does not start: {self.holder}; wait for it or cancel it")
            if kind.exclusive and (busy := unless()):
                raise JobRefused(f"{name} does not start: {busy}; start it again when that is over")
            job = Job(
                id=f"{name}-{next(self._numbers)}",
                name=kind.name,
                holder=author,
                parameters=parameters.model_dump(mode="json", exclude_defaults=True),
                started_at_s=time.time(),
            )
            running = self._running[job.id] = _Running(job, kind, parameters, known)
            running.thread = threading.Thread(
                target=lambda: asyncio.run(self._drive(running)), name=f"ddtree-{job.id}", daemon=True
            )
        self._publish(JobProgress(job=job))
        running.thread.start()
        return job.id

    def cancel(self, job_id: str) -> bool:
        """Asks a job to end; False if it has ended or never was."""
        running = self._running.get(job_id)
        if running is not None:
            running.stop("cancelled")
        return running is not None

    async def close(self) -> None:
        """Ends all jobs and waits for them, a short time."""
        with self._lock:
            self._closed = True
            left = tuple(self._running.values())
        for each in left:
            each.stop("the runtime was closed")
        end = time.monotonic() + CLOSE_S
        while any(each.thread and each.thread.is_alive() for each in left) and time.monotonic() < end:
            await asyncio.sleep(0.01)

    def _kind(self, name: str) -> JobKind[Any]:
        if name in self._kinds:
            return self._kinds[name]
        offered = ", ".join(sorted(self._kinds))
        known = name in get_args(JobName)
        reason = (
            f"this runtime does not offer it; it offers {offered}" if known else f"must be one of {offered}"
        )
        raise ConfigRejected(
            f"kind = {plain(name)}: {reason}{'' if known else nearest(name, self._kinds)}", "kind"
        )

    async def _undisturbed(self, name: str, parameters: Any) -> frozenset[str]:
        """Ids of requests that have ended; raises where one runs, or nothing can."""
        status = await self._runtime.status()
        if status.state not in (EngineState.READY, EngineState.DEGRADED):
            raise RuntimeUnavailable(f"{name} needs a serving engine; it is {status.state}: {status.reason}")
        requests = await self._runtime.requests()
        others = sum(each.state != "finished" for each in requests)
        if others and not parameters.under_load and not self.holder:
            raise JobRefused(
                f"{name} does not start: {others} request{'s' if others > 1 else ''} of other clients "
                f"run{'' if others > 1 else 's'}; wait for them or set under_load"
            )
        return frozenset(each.request_id for each in requests)

    async def _drive(self, running: _Running) -> None:
        """A job from its begin to its end, in its own thread."""
        context: JobContext[Any] = JobContext(
            job_id=running.job.id,
            parameters=running.parameters,
            runtime=self._runtime,
            report=lambda progress, text: self._report(running, progress, text),
            stopping=running.stopping,
            with_engine=self._with_engine,
            author=running.job.holder,
        )
        self._change(running, state="running")
        work = asyncio.ensure_future(running.kind.run(context))
        guard = asyncio.ensure_future(self._guard(running))
        running.begin(work)
        try:
            outcome = await work
            self._end(running, "done", outcome.text, outcome.result)
        except asyncio.CancelledError as ended:
            self._end(running, "cancelled", "; ".join((running.why, *map(str, ended.args))))
        except RuntimeFault as fault:
            self._end(running, "failed", str(fault))
        except Exception as failure:  # told as the job's end; the runtime goes on
            LOGGER.exception("job %s failed", running.job.id)
            self._end(running, "failed", " ".join(f"{type(failure).__name__}: {failure}".split()))
        finally:
            guard.cancel()

    async def _guard(self, running: _Running) -> None:
        """Stops a measuring job when somebody else sends requests."""
        if not running.kind.measures or running.parameters.under_load:
            return
        while True:
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(RuntimeFault):  # the job meets it too and says so
                requests = await self._runtime.requests()
                others = {
                    each.request_id
                    for each in requests
                    if each.client != running.job.id and each.request_id not in running.known
                }
                if others:
                    running.stop(
                        f"stopped for {len(others)} request{'s' if len(others) > 1 else ''} of other clients; "
                        "under_load measures beside them"
                    )

    def _report(self, running: _Running, progress: float | None, text: str) -> None:
        now = time.monotonic()
        quiet = now - running.told_at < REPORT_S
        running.told_at = running.told_at if quiet else now
        self._change(running, tell=not quiet, progress=progress, text=text)

    def _end(
        self, running: _Running, state: JobState, text: str, result: dict[str, Any] | None = None
    ) -> None:
        progress = 1.0 if state == "done" else running.job.progress
        with self._lock:
            self._running.pop(running.job.id)
            running.job = running.job.model_copy(
                update={
                    "state": state,
                    "text": text,
                    "result": result,
                    "progress": progress,
                    "ended_at_s": time.time(),
                }
            )
            self._over.append(running.job)
        self._publish(JobProgress(job=running.job))

    def _change(self, running: _Running, tell: bool = True, **changes: Any) -> None:
        running.job = running.job.model_copy(update=changes)
        if tell:
            self._publish(JobProgress(job=running.job))
