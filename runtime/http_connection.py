"""What lies between a connection and a route: work that ends with its client, strict bodies and their limit, the log.

Headers, queries and bodies are never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.http_errors import ApiError
from runtime.logs import ACCESS, REQUEST_ID
from runtime.rejection import plain

T = TypeVar("T")

DRAINED_BODIES = 16
"""A body over the limit is read and dropped up to this many times the limit, so that its sender reads the answer."""
ID_HEADER = b"x-request-id"
QUIET_PATHS = ("/health", "/ready", "/metrics")
"""Asked every few seconds by machines: logged at level debug unless they fail; "not ready" is no failure."""
CLIENT_LEFT = 499
"""Status where the client was gone before its answer began, a custom of nginx; the log has it, nobody receives it."""

Observe = Callable[[str, int, float], None]
"""Called with a request's route, status and seconds."""


class ClientGone(Exception):
    """The client closed its connection."""


async def while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of `work`, which is cancelled when the client leaves; raises ClientGone then."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, which end with their frames, or when the client leaves or stops reading for too long."""

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        close_source: Callable[[], Awaitable[object]],
        limit_s: float | None,
        headers: dict[str, str] | None = None,
        status_code: int = 200,
    ) -> None:
        """`close_source` frees what `frames` reads, also when not one frame was asked for; `limit_s` is the time in
        seconds after which the connection is closed whatever its client does, None = never."""
        super().__init__(
            status_code=status_code,
            headers={"cache-control": "no-store", "x-accel-buffering": "no", **(headers or {})},
        )
        del self.headers["content-length"]
        self._frames = frames
        self._close_source = close_source
        self._limit_s = limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGone, TimeoutError):
                async with asyncio.timeout(self._limit_s):
                    await while_connected(self._send(send), receive)
        finally:
            await self._close_source()

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self._frames) as frames:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class StrictRequest(Request):
    """A request whose JSON is read by the letter: UTF-8, no NaN, no lone surrogates, limited nesting."""

    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the request body is not valid JSON: {error}", code="invalid_json") from None


class StrictRoute(APIRoute):
    """A route that reads bodies as StrictRequest does."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return strict


class BodyLimit:
    """ASGI middleware: a body of more than `max_bytes`, or of two lengths, is answered with an error object.

    A body with both a declared length and chunks ends elsewhere for a proxy that believes the other one, which would
    take the rest for a request of its own (RFC 9112, section 6.3); so the connection is closed.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:
            error = ApiError(
                400,
                "the request has both Content-Length and Transfer-Encoding; send one of them",
                headers={"connection": "close"},
            )
            await JSONResponse(error.body(), error.status_code, error.headers)(scope, receive, send)
            return
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await self._drain(receive)
            await self._refuse(scope, receive, send)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                await self._drain(receive)
                raise self._error()
            return message

        await self._app(scope, limited, send)

    async def _drain(self, receive: Receive) -> None:
        left = DRAINED_BODIES * self._max_bytes
        while left > 0:
            message = await receive()
            left -= len(message.get("body", b""))
            if message["type"] == "http.disconnect" or not message.get("more_body"):
                return

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error()
        await JSONResponse(error.body(), error.status_code)(scope, receive, send)

    def _error(self) -> ApiError:
        return ApiError(
            413, f"the request body is larger than {self._max_bytes} bytes, the limit of this server"
        )


class AccessLog:
    """Gives each request an id (the client's own if it is a sane one), answers with it, and logs the outcome."""

    def __init__(self, app: ASGIApp, observe: Observe = lambda _route, _status, _seconds: None) -> None:
        self._app = app
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _given_id(scope) or secrets.token_hex(8)
        token = REQUEST_ID.set(request_id)
        started, status, complete = time.perf_counter(), CLIENT_LEFT, False

        async def answer(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                # An inference request is answered with the id under which the engine knows it.
                if not any(name.lower() == ID_HEADER for name, _ in message["headers"]):
                    message = {**message, "headers": [*message["headers"], (ID_HEADER, request_id.encode())]}
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body")

        try:
            await self._app(scope, receive, answer)
        except Exception:
            # Answered in full means stated and logged by the application; else the connection has to break.
            if not complete:
                raise
        finally:
            seconds = time.perf_counter() - started
            self._observe(_route(scope), status, seconds)
            _log(scope, status, seconds)
            REQUEST_ID.reset(token)


def _given_id(scope: Scope) -> str | None:
    value = next((value for name, value in scope["headers"] if name == ID_HEADER), b"").decode("latin-1")
    return value if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", value) else None


def _route(scope: MutableMapping[str, Any]) -> str:
    """The route's pattern, of which there are few; "none" for what has no route."""
    return getattr(scope.get("route"), "path", "none")


def _log(scope: Scope, status: int, seconds: float) -> None:
    path = plain(scope["path"])
    level = logging.DEBUG if path in QUIET_PATHS and status != 500 else logging.INFO
    client = scope.get("client")
    ACCESS.log(
        level,
        "%s %s %s",
        scope["method"],
        path,
        status,
        extra={"fields": {"seconds": round(seconds, 4), "peer": client[0] if client else None}},
    )
