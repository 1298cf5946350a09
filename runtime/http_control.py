"""Control over HTTP: the Runtime interface under `/runtime`, for those who have the operator key.

Errors are raised as the interface raises them and turned into error objects by `runtime.http_errors`; an old revision
is 409. Nothing here may name a file of the server: model and drafter paths are refused.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Header, Query
from pydantic import AfterValidator, Field

from runtime.config import DEFAULT_MODEL
from runtime.http_connection import EventStream, StrictRoute
from runtime.http_errors import ApiError, error_body
from runtime.http_events import (
    HEARTBEAT,
    EventHub,
    frame,
    raw_frame,
    with_heartbeats,
)
from runtime.http_security import Keys, require_operator
from runtime.interface import (
    ChangePlan,
    ChangeReport,
    ConfigRejected,
    Description,
    Frozen,
    GenerateEvent,
    GenerateRequest,
    Job,
    RequestRejected,
    RequestStats,
    Runtime,
    RuntimeFault,
    RuntimeUnavailable,
    SnapshotComparison,
    SnapshotPage,
    SnapshotView,
    Status,
    TreeTrace,
)
from runtime.rejection import plain

LOGGER = logging.getLogger("ddtree")
FIRST_EVENT_S = 1.0
"""A refusal within this time is an HTTP status; a later one is the last event of the stream."""
PATH_FIELDS = ("model", "drafter")
NEVER_SET = ("sglang_python",)
"""Fields that name a program to be run."""
MOST_ROWS = 500
"""Snapshots of one page."""
NAME_HELP = "Id, tag, commit, label, latest or latest~N."


class Lifecycle(Protocol):
    """What the process around a runtime does when asked to; each answers one line and goes on in the background."""

    def drain(self) -> str: ...

    def stop(self) -> str: ...

    def restart(self) -> str: ...


class ChangeBody(Frozen):
    change: dict[str, Any] = Field(max_length=64)
    """Field to value, or to its text."""


class ApplyBody(ChangeBody):
    revision: int
    """The revision the change was previewed at."""
    author: Annotated[str, AfterValidator(plain)] = "http"
    """Who makes the change, as others are told."""


class CancelBody(Frozen):
    request_id: str


class Cancelled(Frozen):
    cancelled: bool
    """False: no such request was running or waiting."""


class Requests(Frozen):
    requests: tuple[RequestStats, ...]


class Rounds(Frozen):
    rounds: tuple[TreeTrace, ...]


class Accepted(Frozen):
    summary: str


class JobBody(Frozen):
    kind: str
    """bench, verify, ..."""
    parameters: dict[str, Any] = Field(default_factory=dict, max_length=64)
    author: Annotated[str, AfterValidator(plain)] = "http"
    """Who starts the job, as others are told."""


class JobStarted(Frozen):
    id: str


class JobList(Frozen):
    jobs: tuple[Job, ...]


def control_router(
    runtime: Runtime, keys: Keys, hub: EventHub, lifecycle: Lifecycle | None = None
) -> APIRouter:
    """All routes under `/runtime`; every one needs the operator key, from loopback too.

    Args:
        lifecycle: None where the process around the runtime takes no orders.
    """
    router = APIRouter(
        prefix="/runtime",
        tags=["control"],
        dependencies=[Depends(require_operator(keys))],
        route_class=StrictRoute,
    )
    _add_reading(router, runtime, hub)
    _add_changing(router, runtime)
    _add_jobs(router, runtime)
    _add_lifecycle(router, lifecycle)
    return router


def _add_reading(router: APIRouter, runtime: Runtime, hub: EventHub) -> None:
    @router.get("", summary="What runs")
    @router.get("/describe", summary="What runs")
    async def describe() -> Description:
        return await runtime.describe()

    @router.get("/status", summary="State, configuration and its revision, load")
    async def status() -> Status:
        return await runtime.status()

    @router.get("/requests", summary="Requests that run, then those that ended lately")
    async def requests() -> Requests:
        return Requests(requests=await runtime.requests())

    @router.get("/trace/{request_id}", summary="Draft trees of a request's last rounds")
    async def trace(
        request_id: str,
        after: Annotated[int, Query(ge=0, description="Only rounds with an index above it.")] = 0,
    ) -> Rounds:
        return Rounds(rounds=await runtime.trace(request_id, after))

    @router.get(
        "/events",
        summary="Rounds, requests, host samples, changes and log lines as they happen",
        response_class=EventStream,
    )
    async def events(last_event_id: Annotated[str | None, Header()] = None) -> EventStream:
        if hub.closed:
            raise RuntimeUnavailable("the server is stopping")
        frames = hub.stream(last_event_id)
        return EventStream(frames, frames.aclose, None)


def _add_changing(router: APIRouter, runtime: Runtime) -> None:
    @router.post("/preview", summary="What a change would do")
    async def preview(body: ChangeBody) -> ChangePlan:
        _refuse_paths(body.change)
        return await runtime.preview(body.change)

    @router.post(
        "/apply", summary="Apply a change previewed at a revision; 409 if that is not the current one"
    )
    async def apply(body: ApplyBody) -> ChangeReport:
        _refuse_paths(body.change)
        try:
            return await runtime.apply(body.change, body.revision, body.author)
        except ConfigRejected as refused:
            if refused.field == "revision":
                raise ApiError(409, str(refused), param="revision", code="revision_conflict") from None
            raise

    @router.post("/cancel", summary="End one request")
    async def cancel(body: CancelBody) -> Cancelled:
        return Cancelled(cancelled=await runtime.cancel(body.request_id))

    @router.post(
        "/generate",
        summary="One request as the events of the Runtime interface",
        response_class=EventStream,
    )
    async def generate(body: GenerateRequest) -> EventStream:
        events = with_heartbeats(runtime.generate(body), FIRST_EVENT_S)
        first = await anext(events)  # raises what refuses the request, before anything is sent
        return EventStream(_generate_frames(first, events), events.aclose, None)


def _add_jobs(router: APIRouter, runtime: Runtime) -> None:
    @router.get("/jobs", summary="Jobs that run, then those that ended lately")
    async def jobs() -> JobList:
        return JobList(jobs=await runtime.jobs())

    @router.post(
        "/jobs",
        summary="Start a job; 409 while another one or other requests stand in its way",
        status_code=202,
    )
    async def start_job(body: JobBody) -> JobStarted:
        return JobStarted(id=await runtime.start_job(body.kind, body.parameters, body.author))

    @router.delete("/jobs/{job_id}", summary="Ask a job to end")
    async def cancel_job(job_id: str) -> Cancelled:
        return Cancelled(cancelled=await runtime.cancel_job(job_id))


def _add_lifecycle(router: APIRouter, lifecycle: Lifecycle | None) -> None:
    def ask(act: Callable[[Lifecycle], str]) -> Accepted:
        if lifecycle is None:
            raise ApiError(409, "this server is run by another program; ask that one")
        return Accepted(summary=act(lifecycle))

    @router.post("/drain", summary="Take no more requests, finish those that run", status_code=202)
    async def drain() -> Accepted:
        return ask(lambda each: each.drain())

    @router.post("/stop", summary="Drain, then end the process", status_code=202)
    async def stop() -> Accepted:
        return ask(lambda each: each.stop())

    @router.post("/restart", summary="Drain, then start anew", status_code=202)
    async def restart() -> Accepted:
        return ask(lambda each: each.restart())


def snapshots_router(runtime: Runtime, keys: Keys) -> APIRouter:
    """Reading the snapshots kept on this host, with the operator key; they are made and restored by jobs."""
    router = APIRouter(
        prefix="/snapshots", tags=["snapshots"], dependencies=[Depends(require_operator(keys))]
    )

    @router.get("", summary="Snapshots, newest first")
    async def page(
        words: Annotated[str, Query(max_length=400, description="Only those that hold all words.")] = "",
        offset: Annotated[int, Query(ge=0, le=10**9, description="Leave out the newest.")] = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = 50,
    ) -> SnapshotPage:
        return await runtime.snapshots.page(words, offset, limit)

    @router.get("/diff", summary="What differs between two: settings, results, host, patches, units")
    async def diff(
        first: Annotated[str, Query(max_length=400, description=NAME_HELP)],
        second: Annotated[str, Query(max_length=400, description=NAME_HELP)] = "latest",
    ) -> SnapshotComparison:
        return await runtime.snapshots.diff(first, second)

    @router.get("/show", summary="One snapshot: what it holds, and its page")
    async def show(
        name: Annotated[str, Query(max_length=400, description=NAME_HELP)] = "latest",
    ) -> SnapshotView:
        return await runtime.snapshots.show(name)

    return router


async def _generate_frames(
    first: GenerateEvent | None, events: AsyncIterator[GenerateEvent | None]
) -> AsyncGenerator[bytes, None]:
    """The events of one request; a fault after the first byte is an event `fault` with an error object."""
    try:
        yield HEARTBEAT if first is None else frame(first)
        async for event in events:
            yield HEARTBEAT if event is None else frame(event)
    except RuntimeFault as fault:
        yield raw_frame("fault", json.dumps(fault_body(fault)))
    except Exception as error:  # the client is told that it failed, the log why
        LOGGER.exception("a stream failed")
        body = error_body(500, f"the stream failed ({type(error).__name__}); see the server's log")
        yield raw_frame("fault", json.dumps(body))


def fault_body(fault: RuntimeFault) -> dict[str, Any]:
    """The error object of a fault that comes when the status line is long gone."""
    status = 503 if isinstance(fault, RuntimeUnavailable) else 400
    field = fault.field if isinstance(fault, RequestRejected | ConfigRejected) else None
    return error_body(status, str(fault), field)


def _is_path(value: str) -> bool:
    """Also the bare name of what lies in the working folder, which a configuration file may use as a path."""
    if value in (DEFAULT_MODEL, "none", "auto"):
        return False
    return "/" in value or "\\" in value or value.startswith((".", "~")) or os.path.lexists(value)


def _refuse_paths(change: dict[str, Any]) -> None:
    for name in PATH_FIELDS:
        value = change.get(name)
        if isinstance(value, str) and _is_path(value):
            raise ConfigRejected(
                f"{name}: a path is not set over HTTP; set it in the configuration of the server", name
            )
    for name in NEVER_SET:
        if name in change:
            raise ConfigRejected(
                f"{name}: it is not set over HTTP; set it in the configuration of the server", name
            )
