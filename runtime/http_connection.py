"""Work that ends with its connection, strict reading of bodies, and the limit of their size."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.http_errors import ApiError

T = TypeVar("T")

DRAINED_BODIES = 16
"""A body over the limit is read and dropped up to this many times the limit, so that its sender reads the answer."""


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
