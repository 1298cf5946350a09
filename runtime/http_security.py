"""Who may call the HTTP API: two keys, compared in constant time, and the Host header on loopback.

The inference key opens `/v1`; the operator key opens control as well. Keys are shown nowhere: not in a representation,
an error or a log line.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import HTTPException, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.instance import is_loopback, read_key_file
from runtime.interface import ConfigRejected

INFERENCE_VARIABLE = "DDTREE_API_KEY"
OPERATOR_VARIABLE = "DDTREE_OPERATOR_KEY"
OPERATOR_FILE = "operator.key"
Guard = Callable[[Request], Awaitable[None]]
"""A coroutine, as FastAPI runs a plain function in a thread of its own."""


@dataclass(frozen=True)
class Keys:
    """The two keys of one server."""

    inference: str | None = field(repr=False)
    """None: `/v1` needs no key."""
    operator: str = field(repr=False)
    operator_file: Path | None = None
    """The 0600 file the operator key stands in; None when it came from the environment."""


def load_keys(env: Mapping[str, str], runtime_folder: Path) -> Keys:
    """Return the keys of `env`; an operator key that is not set is read from, or generated into, a 0600 file.

    Raises:
        ConfigRejected: a key that no header can carry, equal keys, or a key file that others may read.
    """
    inference = env.get(INFERENCE_VARIABLE) or None
    operator = env.get(OPERATOR_VARIABLE) or None
    file = None
    if operator is None:
        file = runtime_folder / OPERATOR_FILE
        operator = _kept_key(file)
    for name, key in ((INFERENCE_VARIABLE, inference), (OPERATOR_VARIABLE, operator)):
        if key is not None and not all(char.isprintable() and not char.isspace() for char in key):
            raise ConfigRejected(f"{name}: must be printable and without spaces; set another key")
    if inference is not None and same_key(inference.encode(), operator):
        raise ConfigRejected(
            f"{INFERENCE_VARIABLE} and {OPERATOR_VARIABLE} are equal: "
            "the inference key must not open control; set two different keys"
        )
    return Keys(inference, operator, file)


def _kept_key(path: Path) -> str:
    """The key in `path`, generated there first if there is none; complete in the moment the file appears."""
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        with contextlib.suppress(FileExistsError):  # another process was first: its key holds
            os.link(draft, path)
        draft.unlink()
    return read_key_file(path)


def same_key(given: bytes, key: str) -> bool:
    """Compare in constant time, whatever bytes were given."""
    return hmac.compare_digest(given, key.encode("utf-8"))


def require_inference(keys: Keys) -> Guard:
    """A dependency that lets in who has either key, and everybody where no inference key is set."""

    async def guard(request: Request) -> None:
        if keys.inference is None:
            return
        given = bearer(request)
        # Both comparisons always run, so that the time tells nothing about which key was near.
        if not (same_key(given, keys.inference) | same_key(given, keys.operator)):
            raise _unauthorized("a key", INFERENCE_VARIABLE)

    return guard


def require_operator(keys: Keys) -> Guard:
    """A dependency that lets in who has the operator key, from loopback too."""

    async def guard(request: Request) -> None:
        if not same_key(bearer(request), keys.operator):
            raise _unauthorized("the operator key", OPERATOR_VARIABLE)

    return guard


def bearer(request: Request) -> bytes:
    """The bytes after "Bearer " in the Authorization header; empty where there are none."""
    header = next((value for name, value in request.scope["headers"] if name == b"authorization"), b"")
    scheme, _, key = header.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _unauthorized(needed: str, variable: str) -> HTTPException:
    return HTTPException(
        401,
        f"this needs {needed}: send 'Authorization: Bearer KEY' with the server's {variable}",
        headers={"WWW-Authenticate": "Bearer"},
    )


class LoopbackHostCheck:
    """ASGI middleware for a server bound to loopback: refuses requests whose Host header names another machine.

    A page in the operator's browser can have its own name resolve to 127.0.0.1 (DNS rebinding); the Host header
    gives it away.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = [value for name, value in scope["headers"] if name == b"host"]
            if len(hosts) != 1 or not is_loopback(_without_port(hosts[0].decode("latin-1"))):
                message = "the Host header names another machine than this loopback server"
                error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
                await JSONResponse({"error": error}, 400)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0][1:]
    return host.partition(":")[0] if host.count(":") == 1 else host
