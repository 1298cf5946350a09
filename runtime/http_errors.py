"""Every error of the HTTP interface as an OpenAI error object: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.interface import (
    ConfigRejected,
    JobRefused,
    RequestRejected,
    RuntimeBusy,
    RuntimeFault,
    RuntimeUnavailable,
    SnapshotUnknown,
)
from runtime.rejection import plain

LOGGER = logging.getLogger("ddtree")

RETRY_SECONDS = {429: 1, 503: 5}
"""What `Retry-After` says where nothing better is known."""
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    504: "timeout_error",
}
_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    409: "conflict",
    413: "body_too_large",
    429: "queue_full",
    500: "internal_error",
    503: "unavailable",
    504: "request_timeout",
}


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    """Field of the request that is at fault."""
    code: str | None


class ErrorReply(BaseModel):
    """Every answer that is not a success."""

    error: ErrorObject


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorReply}}
"""What the OpenAPI document says of errors."""


class ApiError(HTTPException):
    """An error a client is told: a status and one line, with the field at fault and a code where there are some."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        retry = {"retry-after": str(RETRY_SECONDS[status])} if status in RETRY_SECONDS else {}
        super().__init__(status, message, headers=retry | dict(headers or {}))
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The error object."""
        return error_body(self.status_code, self.detail, self.param, self.code)


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The error object for `message` under the HTTP status `status`."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or _CODES.get(status)}}


def unavailable(refused: RuntimeUnavailable) -> ApiError:
    """429 where a serving engine has no room for more, 503 where it does not serve; with the time to try again."""
    status = 429 if isinstance(refused, RuntimeBusy) else 503
    wait = refused.retry_after_s
    return ApiError(
        status, str(refused), headers=None if wait is None else {"retry-after": str(math.ceil(wait))}
    )


def install_error_handlers(app: FastAPI) -> None:
    """Makes every error `app` answers with an error object; nothing of a fault's inside reaches the client."""

    async def refused(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        known = error if isinstance(error, ApiError) else _of_http(error)
        return JSONResponse(known.body(), known.status_code, known.headers)

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return await refused(_, invalid_request(error.errors()))

    async def fault(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, RuntimeUnavailable):
            return await refused(request, unavailable(error))
        if isinstance(error, JobRefused):
            return await refused(request, ApiError(409, str(error), code="job_refused"))
        if isinstance(error, SnapshotUnknown):
            return await refused(request, ApiError(404, str(error), code="snapshot_unknown"))
        param = error.field if isinstance(error, RequestRejected | ConfigRejected) else None
        return await refused(request, ApiError(400, str(error), param=param))

    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(RuntimeFault, fault)


class InternalErrors:
    """ASGI middleware: a fault nobody foresaw is logged with its trace and told as a 500, and the server goes on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as failure:  # the client learns that it failed, the log why
            if started:
                raise
            error = internal(failure)
            await JSONResponse(error.body(), error.status_code)(scope, receive, send)


def internal(failure: Exception) -> ApiError:
    """Logs a fault nobody foresaw; what the client is told has nothing of its inside."""
    LOGGER.error("a request failed", exc_info=failure)
    return ApiError(500, f"the server failed on this request ({type(failure).__name__}); see its log")


def invalid_request(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """A 400 for the first of pydantic's `problems` with a request; `param` is the path of the field."""
    problem = problems[0]
    source, *path = problem["loc"] or ("body",)
    context = problem.get("ctx") or {}
    whole = context.get("field")
    param = _path([*path, whole] if whole else path)
    if param is None and source == "body":
        empty = problem["type"] == "missing"
        return ApiError(400, "the request body is empty; send a JSON object" if empty else _OBJECT_NEEDED)
    if whole:
        return ApiError(400, f"{param}: {context['reason']}", param=param)
    name = plain(param or str(source))
    if problem["type"] == "extra_forbidden":
        return ApiError(400, f"{name}: this server knows no such field; leave it out", param=param)
    if problem["type"] == "missing":
        return ApiError(400, f"{name}: it is missing", param=param)
    reason = problem["msg"].removeprefix("Value error, ").removeprefix("Input ").replace("should", "must", 1)
    return ApiError(400, f"{name} = {_shown(problem.get('input'))}: {reason}", param=param)


_OBJECT_NEEDED = "the request body is not a JSON object; send one with content-type application/json"


def _of_http(error: HTTPException) -> ApiError:
    messages = {
        404: "there is no such route; see /docs",
        405: "this route does not take that method; see /docs",
    }
    stated = error.detail if isinstance(error.detail, str) else str(error.detail)
    plain_phrase = stated in ("Not Found", "Method Not Allowed")
    message = messages.get(error.status_code, stated) if plain_phrase else stated
    return ApiError(error.status_code, message, headers=error.headers)


def _path(parts: Sequence[str | int]) -> str | None:
    """`("messages", 0, "content")` as `messages[0].content`."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return plain(text) if text else None


def _shown(value: Any) -> str:
    """A value of a request, short, as its sender wrote it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "a number out of range"
    if isinstance(value, dict | list) and value:
        return "{...}" if isinstance(value, dict) else "[...]"
    if isinstance(value, str | int | float | list | dict | None):
        return plain(json.dumps(value, ensure_ascii=False))
    return plain(repr(value))
