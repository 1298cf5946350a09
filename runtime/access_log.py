"""One line in the log for each HTTP request, and an id by which its other lines are found.

ASGI middleware around the whole application. Neither headers, query nor body are logged.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.logs import ACCESS, REQUEST_ID
from runtime.rejection import plain

HEADER = b"x-request-id"
QUIET_PATHS = ("/health", "/ready", "/metrics")
"""Asked every few seconds by machines: logged at level debug unless they fail; "not ready" is no failure."""
CLIENT_LEFT = 499
"""Logged where the client was gone before the answer began; a custom of nginx."""

Observe = Callable[[str, int, float], None]
"""Called with a request's route, status and seconds."""


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
                if not any(name.lower() == HEADER for name, _ in message["headers"]):
                    message = {**message, "headers": [*message["headers"], (HEADER, request_id.encode())]}
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
    value = next((value for name, value in scope["headers"] if name == HEADER), b"").decode("latin-1")
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
