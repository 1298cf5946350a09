"""Runs the choices of one API request on a runtime and puts them together: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from runtime.http_errors import ApiError, internal, unavailable
from runtime.http_reply import (
    ChatReply,
    CompletionReply,
    DdtreeReport,
    Format,
    finish_reason,
    report,
    total,
    usage,
)
from runtime.interface import (
    GenerateEvent,
    GenerateRequest,
    RequestAdmitted,
    RequestFinished,
    RequestRejected,
    Runtime,
    RuntimeUnavailable,
    TokenPiece,
    TokensEmitted,
)

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
QUIET_S = 60.0
"""How often a request that is answered whole looks at nothing having come."""
NO_RETRY = {"x-should-retry": "false"}
"""Tells the official clients that sending the same request again is no use."""

ChoiceEvent = tuple[int, GenerateEvent] | None
"""Index of a choice and what came for it; None: nothing came for a while."""


@dataclass(frozen=True)
class Job:
    """One API request as it is run."""

    id: str
    created: int
    """Unix time, seconds."""
    model: str
    shape: Format
    requests: tuple[GenerateRequest, ...]
    """One for each choice; the choices of a prompt stand together."""
    choices_per_prompt: int
    include_usage: bool
    names: dict[str, str]
    """Fields of a runtime's request under the names the client gave them."""


async def choice_events(
    runtime: Runtime, job: Job, pause_s: float, limit_s: float | None
) -> AsyncGenerator[ChoiceEvent, None]:
    """What comes for all choices, as it comes; leaving early cancels them all.

    Raises ApiError: a choice was refused, ended without a result, or `limit_s` seconds passed.
    """
    loop = asyncio.get_running_loop()
    deadline = None if limit_s is None else loop.time() + limit_s
    arrived: asyncio.Queue[tuple[int, GenerateEvent] | Exception] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_follow(runtime, index, request, arrived))
        for index, request in enumerate(job.requests)
    ]
    open_choices = len(tasks)
    try:
        while open_choices:
            left = pause_s if deadline is None else min(pause_s, deadline - loop.time())
            if left <= 0:
                raise ApiError(504, f"the request took longer than {limit_s:g} s", headers=NO_RETRY)
            try:
                async with asyncio.timeout(left):
                    item = await arrived.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(item, Exception):
                raise _told(item, job)
            event = item[1]
            if isinstance(event, RequestFinished):
                open_choices -= 1
                _check_ended_by_itself(event)
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(
    runtime: Runtime,
    index: int,
    request: GenerateRequest,
    arrived: asyncio.Queue[tuple[int, GenerateEvent] | Exception],
) -> None:
    try:
        async with aclosing(runtime.generate(request)) as events:  # type: ignore[type-var]
            async for event in events:
                arrived.put_nowait((index, event))
    except Exception as failure:  # whatever it is, the client is told, not left waiting
        arrived.put_nowait(failure)


def _told(failure: Exception, job: Job) -> Exception:
    """A runtime's refusal as the client is told it, under the client's own names."""
    if isinstance(failure, RequestRejected):
        field = failure.field
        return ApiError(400, str(failure), param=None if field is None else job.names.get(field, field))
    if isinstance(failure, RuntimeUnavailable):
        return unavailable(failure)
    return failure


def _check_ended_by_itself(finished: RequestFinished) -> None:
    """Raises ApiError for a text that was cut off, which is never passed on as a complete one."""
    if finished.reason == "error":
        raise ApiError(500, finished.error or "the engine failed on this request", code="engine_error")
    if finished.reason == "cancelled" and finished.error:
        raise ApiError(503, f"the request was ended: {finished.error}", code="cancelled")
    if finished.reason == "cancelled":
        raise ApiError(503, "the request was cancelled by the operator", code="cancelled", headers=NO_RETRY)


class _Gathered:
    """What came for the choices of a job so far."""

    def __init__(self, job: Job) -> None:
        self._job = job
        count = len(job.requests)
        self.pieces: list[list[TokenPiece]] = [[] for _ in range(count)]
        self.offsets = [0] * count
        """Characters sent of each choice."""
        self._seeds = [0] * count
        self._finished: list[RequestFinished | None] = [None] * count

    def admitted(self, index: int, event: RequestAdmitted) -> None:
        self._seeds[index] = event.seed

    def ended(self, index: int, event: RequestFinished) -> None:
        self._finished[index] = event

    @property
    def finished(self) -> list[RequestFinished]:
        return [each for each in self._finished if each is not None]

    def report(self, index: int) -> DdtreeReport:
        finished = self._finished[index]
        assert finished is not None
        return report(finished.stats, self._seeds[index])

    def total(self) -> DdtreeReport:
        return total([self.report(index) for index in range(len(self._seeds))], self.finished)


async def whole(runtime: Runtime, job: Job, limit_s: float | None) -> ChatReply | CompletionReply:
    """The complete reply; raises ApiError."""
    gathered = _Gathered(job)
    async with aclosing(choice_events(runtime, job, QUIET_S, limit_s)) as events:
        async for item in events:
            match item:
                case (index, RequestAdmitted() as event):
                    gathered.admitted(index, event)
                case (index, TokensEmitted(pieces=pieces)):
                    gathered.pieces[index].extend(pieces)
                case (index, RequestFinished() as event):
                    gathered.ended(index, event)
    choices = [
        {
            "index": index,
            **job.shape.whole(finished.text),
            "logprobs": job.shape.logprobs(gathered.pieces[index], 0),
            "finish_reason": finish_reason(finished.reason),
            "ddtree": gathered.report(index),
        }
        for index, finished in enumerate(gathered.finished)
    ]
    return job.shape.reply.model_validate(
        {
            "id": job.id,
            "created": job.created,
            "model": job.model,
            "choices": choices,
            "usage": usage(gathered.finished, job.choices_per_prompt),
            "ddtree": gathered.total(),
        }
    )


async def opening_events(events: AsyncIterator[ChoiceEvent], job: Job) -> list[ChoiceEvent]:
    """The events up to the first of every prompt, by which each is known to be accepted, or up to a pause.

    Raises ApiError for what is refused before the first byte of a stream.
    """
    awaited = set(range(0, len(job.requests), job.choices_per_prompt))
    opening: list[ChoiceEvent] = []
    async for item in events:
        opening.append(item)
        if item is None:
            break
        awaited.discard(item[0])
        if not awaited:
            break
    return opening


async def frames(
    job: Job, opening: Sequence[ChoiceEvent], events: AsyncIterator[ChoiceEvent]
) -> AsyncGenerator[bytes, None]:
    """The frames of a stream. What goes wrong midway is an error frame, after which nothing follows."""
    gathered = _Gathered(job)
    try:
        for item in opening:
            for frame in _frames_of(job, gathered, item):
                yield frame
        async for item in events:
            for frame in _frames_of(job, gathered, item):
                yield frame
    except Exception as failure:  # the status line is long gone
        error = failure if isinstance(failure, ApiError) else internal(failure)
        yield _frame(error.body())
        return
    if job.include_usage:
        used = usage(gathered.finished, job.choices_per_prompt)
        yield _frame(_chunk(job, [], usage=used, ddtree=gathered.total()))
    yield DONE


def _frames_of(job: Job, gathered: _Gathered, item: ChoiceEvent) -> Iterable[bytes]:
    match item:
        case None:
            yield KEEP_ALIVE
        case (index, RequestAdmitted() as event):
            gathered.admitted(index, event)
            first = job.shape.opening()
            if first is not None:
                yield _frame(_chunk(job, [_choice(index, first)]))
        case (index, TokensEmitted(pieces=pieces)):
            text = "".join(piece.text for piece in pieces)
            logprobs = job.shape.logprobs(pieces, gathered.offsets[index])
            gathered.offsets[index] += len(text)
            if text or logprobs is not None:
                yield _frame(_chunk(job, [_choice(index, job.shape.delta(text), logprobs)]))
        case (index, RequestFinished() as event):
            gathered.ended(index, event)
            if event.tail:
                yield _frame(_chunk(job, [_choice(index, job.shape.delta(event.tail))]))
            last = _choice(index, job.shape.closing(), reason=finish_reason(event.reason))
            yield _frame(_chunk(job, [last], ddtree=gathered.report(index)))


def _choice(
    index: int, fields: dict[str, Any], logprobs: object = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, **fields, "logprobs": logprobs, "finish_reason": reason}


def _chunk(job: Job, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    head = {"id": job.id, "object": job.shape.chunk_object, "created": job.created, "model": job.model}
    asked = {"usage": None} if job.include_usage else {}
    return head | {"choices": choices} | asked | more


def _frame(content: dict[str, Any]) -> bytes:
    return b"data: " + to_json(content, inf_nan_mode="null") + b"\n\n"
