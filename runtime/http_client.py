"""HttpRuntime: the Runtime interface over HTTP, for consoles and commands that steer a runtime in another process.

It loads no engine. While the server does not answer, calls raise RuntimeUnavailable saying since when, `watch` says
so too and attaches again by itself. Closing it never touches the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import quote, urlencode, urlsplit

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from runtime.interface import (
    ChangePlan,
    ChangeReport,
    ConfigRejected,
    Description,
    GenerateEvent,
    GenerateRequest,
    Job,
    JobRefused,
    LogLine,
    RequestFinished,
    RequestRejected,
    RequestStats,
    RuntimeBusy,
    RuntimeFault,
    RuntimeUnavailable,
    SnapshotComparison,
    SnapshotPage,
    SnapshotUnknown,
    SnapshotView,
    Status,
    TreeTrace,
    WatchEvent,
)

CONNECT_S = 3.0
READ_S = 5.0
APPLY_S = 1800.0
"""A change may have an engine built; a server that ends meanwhile closes the connection."""
PREVIEW_S = 660.0
"""Before a change to SGLang its own parser looks at the arguments, which takes a process and its imports."""
SNAPSHOTS_S = 30.0
"""A long history is filtered, or the server's disk is busy."""
SILENCE_S = 10.0
"""A stream that is silent for longer, heartbeats included, has lost its server."""
RETRY_FIRST_S, RETRY_MOST_S = 0.25, 5.0

Value = TypeVar("Value", bound=BaseModel)
_GENERATED: TypeAdapter[GenerateEvent] = TypeAdapter(GenerateEvent)
_WATCHED: TypeAdapter[WatchEvent] = TypeAdapter(WatchEvent)
_REQUESTS: TypeAdapter[tuple[RequestStats, ...]] = TypeAdapter(tuple[RequestStats, ...])
_JOBS: TypeAdapter[tuple[Job, ...]] = TypeAdapter(tuple[Job, ...])
_ROUNDS: TypeAdapter[tuple[TreeTrace, ...]] = TypeAdapter(tuple[TreeTrace, ...])


class AccessRefused(RuntimeFault):
    """The server does not take the operator key, or none is known for it."""

    exit_code = 3


class RevisionRefused(ConfigRejected):
    """Somebody else changed the configuration in between."""

    exit_code = 3


class ServerSentEvent(NamedTuple):
    kind: str
    data: str
    event_id: str | None


class HttpRuntime:
    """The runtime behind `url` (scheme, host and port), steered with its operator key."""

    def __init__(self, url: str, operator_key: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigRejected(f"url = {url}: must be http://HOST:PORT or https://HOST:PORT", "url")
        self.url = url.rstrip("/")
        self.lost_since_s: float | None = None
        """Unix time of the first call that found no server; None while it answers."""
        self._answered = False
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={b"Authorization": b"Bearer " + operator_key.encode("utf-8")},
            timeout=httpx.Timeout(READ_S, connect=CONNECT_S),
            # A proxy of the environment must not see what stays on this machine.
            trust_env=parts.hostname not in ("localhost", "127.0.0.1", "::1"),
        )

    async def describe(self) -> Description:
        return _checked(Description, await self._call("GET", "/runtime/describe"))

    async def status(self) -> Status:
        return _checked(Status, await self._call("GET", "/runtime/status"))

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        body = request.model_dump(mode="json", exclude_defaults=True)
        async with self._stream("POST", "/runtime/generate", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise self._fault(response, RequestRejected)
            self._heard()
            async for sent in _events(response):
                if sent.kind == "fault":
                    raise _stream_fault(sent.data)
                event = _parsed(_GENERATED, sent.data)
                yield event
                if isinstance(event, RequestFinished):
                    return
        raise RuntimeUnavailable(f"{self.url} ended the stream before the answer was complete")

    async def cancel(self, request_id: str) -> bool:
        answer = await self._call("POST", "/runtime/cancel", {"request_id": request_id})
        return bool(answer["cancelled"])

    async def watch(self) -> AsyncIterator[WatchEvent]:
        last_id, failures = None, 0
        while True:
            try:
                headers = {"Last-Event-ID": last_id} if last_id else {}
                async with self._stream("GET", "/runtime/events", headers=headers) as response:
                    if response.status_code != 200:
                        await response.aread()
                        raise self._fault(response, ConfigRejected)
                    self._heard()
                    if failures:
                        yield _line("info", f"attached to {self.url} again")
                    failures = 0
                    async for sent in _events(response):
                        last_id = sent.event_id or last_id
                        yield _parsed(_WATCHED, sent.data)
                raise self._lost(None)
            except RuntimeUnavailable as lost:
                failures += 1
                if failures == 1:
                    yield _line("error", str(lost))
            await asyncio.sleep(_backoff(failures))

    async def requests(self) -> tuple[RequestStats, ...]:
        return _checked(_REQUESTS, (await self._call("GET", "/runtime/requests"))["requests"])

    async def trace(self, request_id: str, after: int = 0) -> tuple[TreeTrace, ...]:
        answer = await self._call("GET", f"/runtime/trace/{quote(request_id, safe='')}?after={after}")
        return _checked(_ROUNDS, answer["rounds"])

    async def preview(self, change: dict[str, Any]) -> ChangePlan:
        body = {"change": change}
        return _checked(ChangePlan, await self._call("POST", "/runtime/preview", body, PREVIEW_S))

    async def apply(self, change: dict[str, Any], revision: int, author: str = "local") -> ChangeReport:
        body = {"change": change, "revision": revision, "author": author}
        return _checked(ChangeReport, await self._call("POST", "/runtime/apply", body, APPLY_S))

    async def start_job(
        self, kind: str, parameters: dict[str, Any] | None = None, author: str = "local"
    ) -> str:
        body = {"kind": kind, "parameters": parameters or {}, "author": author}
        return str((await self._call("POST", "/runtime/jobs", body))["id"])

    async def cancel_job(self, job_id: str) -> bool:
        answer = await self._call("DELETE", f"/runtime/jobs/{quote(job_id, safe='')}")
        return bool(answer["cancelled"])

    async def jobs(self) -> tuple[Job, ...]:
        return _checked(_JOBS, (await self._call("GET", "/runtime/jobs"))["jobs"])

    @property
    def snapshots(self) -> HttpSnapshots:
        """Those of the server."""
        return HttpSnapshots(self._call)

    async def order(self, what: str) -> str:
        """Ask the process around the runtime for `drain`, `stop` or `restart`; returns its one-line answer."""
        return str((await self._call("POST", f"/runtime/{what}"))["summary"])

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _call(self, method: str, path: str, body: Any = None, seconds: float = READ_S) -> Any:
        """One request and its answer as plain values."""
        timeout = httpx.Timeout(seconds, connect=CONNECT_S)
        try:
            response = await self._client.request(method, path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise self._lost(error) from None
        self._heard()
        if not response.is_success:
            raise self._fault(response, ConfigRejected)
        try:
            return response.json()
        except ValueError:
            raise RuntimeFault(f"{self.url} does not speak this API; is it a ddtree server?") from None

    @contextlib.asynccontextmanager
    async def _stream(self, method: str, path: str, **options: Any) -> AsyncIterator[httpx.Response]:
        """A response to be read as it comes; what breaks it is raised as RuntimeUnavailable."""
        timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
        try:
            async with self._client.stream(method, path, timeout=timeout, **options) as response:
                yield response
        except httpx.HTTPError as error:
            raise self._lost(error) from None

    def _lost(self, error: Exception | None) -> RuntimeUnavailable:
        if self.lost_since_s is None:
            self.lost_since_s = time.time()
        since = time.strftime("%H:%M:%S", time.localtime(self.lost_since_s))
        match error:
            case httpx.ConnectError():
                reason = "it refuses connections or cannot be reached"
            case httpx.TimeoutException():
                reason = "it does not answer in time"
            case _:
                reason = "the connection broke"
        if not self._answered:
            return RuntimeUnavailable(f"no answer from {self.url} since {since}: {reason}")
        return RuntimeUnavailable(f"lost since {since}: {self.url}: {reason}")

    def _heard(self) -> None:
        self.lost_since_s = None
        self._answered = True

    def _fault(
        self, response: httpx.Response, refusal: type[RequestRejected] | type[ConfigRejected]
    ) -> RuntimeFault:
        """What the server refused, as the interface raises it; `refusal` for what is wrong with the call itself."""
        message, field, code = _error_of(response)
        match response.status_code:
            case 401 | 403:
                return AccessRefused(
                    f"{self.url} refuses the operator key; set DDTREE_OPERATOR_KEY to the one of that server"
                )
            case 409:
                if code == "job_refused":
                    return JobRefused(message)
                return RevisionRefused(message, field) if field == "revision" else Refused(message)
            case 404 if code == "snapshot_unknown":
                return SnapshotUnknown(message)
            case 400 | 413 | 422:
                return refusal(message, field)
            case 429:
                return RuntimeBusy(message, _retry_after(response))
            case 502 | 503 | 504:
                return RuntimeUnavailable(message, _retry_after(response))
        return RuntimeFault(f"{self.url} answered {response.status_code}: {message}")


class HttpSnapshots:
    """Reads the snapshots of the server; `call` is `HttpRuntime._call`."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call

    async def page(self, words: str = "", offset: int = 0, limit: int = 50) -> SnapshotPage:
        return await self._read(SnapshotPage, "", words=words, offset=offset, limit=limit)

    async def show(self, name: str) -> SnapshotView:
        return await self._read(SnapshotView, "/show", name=name)

    async def diff(self, first: str, second: str = "latest") -> SnapshotComparison:
        return await self._read(SnapshotComparison, "/diff", first=first, second=second)

    async def _read(self, kind: type[Value], route: str, **asked: str | int) -> Value:
        answer = await self._call(
            "GET", f"/snapshots{route}?{urlencode(asked, errors='replace')}", None, SNAPSHOTS_S
        )
        return cast(Value, _checked(kind, answer))


class Refused(RuntimeFault):
    """The server cannot do that, and says why."""

    exit_code = 3


async def _events(response: httpx.Response) -> AsyncIterator[ServerSentEvent]:
    """Reads server-sent events; lines end with LF alone, since JSON may hold other characters that split text."""
    rest = b""
    fields: dict[str, str] = {}
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            name, _, value = line.decode("utf-8").partition(":")
            if line and name:
                fields[name] = value.removeprefix(" ")
            elif not line and fields:
                yield ServerSentEvent(fields.get("event", ""), fields.get("data", ""), fields.get("id"))
                fields = {}


def _checked(kind: type[Value] | TypeAdapter[Any], answer: Any) -> Any:
    """`answer` as the value it stands for; a server of another version may send what this one does not know."""
    try:
        if isinstance(kind, TypeAdapter):
            return kind.validate_python(answer)
        return kind.model_validate(answer)
    except ValidationError as error:
        raise _other_version(error) from None


def _parsed(kind: TypeAdapter[Any], data: str) -> Any:
    try:
        return kind.validate_json(data)
    except ValidationError as error:
        raise _other_version(error) from None


def _other_version(error: ValidationError) -> RuntimeFault:
    place = ".".join(map(str, error.errors(include_url=False)[0]["loc"]))
    return RuntimeFault(
        f"the server's answer is not understood ({place}); client and server need one version"
    )


def _error_of(response: httpx.Response) -> tuple[str, str | None, str | None]:
    """(message, field, code) of an error object; the status in words where there is none."""
    try:
        error = response.json()["error"]
        return str(error["message"]), error.get("param"), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{response.status_code} {response.reason_phrase}", None, None


def _stream_fault(data: str) -> RuntimeFault:
    error: Mapping[str, Any] = json.loads(data)["error"]
    if error["type"] == "invalid_request_error":
        return RequestRejected(error["message"], error["param"])
    return RuntimeUnavailable(error["message"])


def _retry_after(response: httpx.Response) -> float | None:
    with contextlib.suppress(ValueError):
        return float(response.headers.get("retry-after", ""))
    return None


def _line(level: str, text: str) -> LogLine:
    return LogLine(time_s=time.time(), level=level, text=text)


def _backoff(failures: int) -> float:
    """Seconds until the next attempt: doubling, with jitter, so that many consoles do not come back in one moment."""
    most = min(RETRY_FIRST_S * 2 ** min(failures - 1, 10), RETRY_MOST_S)
    return random.uniform(0.5, 1.0) * most
