"""A real server on a loopback port over a runtime of the test, in the test's own event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI

from runtime.http_control import Lifecycle, control_router
from runtime.http_errors import install_error_handlers
from runtime.http_events import EventHub
from runtime.http_security import Keys, LoopbackHostCheck
from runtime.interface import Runtime

OPERATOR = "operator-key-of-the-tests"
INFERENCE = "inference-key-of-the-tests"
KEYS = Keys(INFERENCE, OPERATOR)
AUTHORIZED = {"Authorization": f"Bearer {OPERATOR}"}


@asynccontextmanager
async def served(
    runtime: Runtime, port: int = 0, heartbeat_s: float = 3.0, lifecycle: Lifecycle | None = None
) -> AsyncIterator[str]:
    """Serves `runtime` inside the block; gives the URL."""
    app = FastAPI()
    hub = EventHub(runtime, heartbeat_s)
    app.include_router(control_router(runtime, KEYS, hub, lifecycle))
    install_error_handlers(app)
    app.add_middleware(LoopbackHostCheck)
    with socket.create_server(("127.0.0.1", port)) as listening:
        server = uvicorn.Server(
            uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=2)
        )
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            await hub.close()
            server.should_exit = True
            await serving
