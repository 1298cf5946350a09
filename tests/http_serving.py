"""A real server on a loopback port over a runtime of the test, in the test's own event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn

from runtime.http_control import Lifecycle
from runtime.http_events import EventHub
from runtime.http_security import Keys
from runtime.http_server import create_app
from runtime.interface import Runtime
from runtime.listener import ServerSettings

OPERATOR = "operator-key-of-the-tests"
INFERENCE = "inference-key-of-the-tests"
KEYS = Keys(INFERENCE, OPERATOR)
AUTHORIZED = {"Authorization": f"Bearer {OPERATOR}"}


@asynccontextmanager
async def served(
    runtime: Runtime,
    port: int = 0,
    heartbeat_s: float = 3.0,
    lifecycle: Lifecycle | None = None,
    settings: ServerSettings | None = None,
    keys: Keys = KEYS,
) -> AsyncIterator[str]:
    """Serves `runtime` inside the block; gives the URL."""
    hub = EventHub(runtime, heartbeat_s)
    app = create_app(runtime, keys, settings or ServerSettings(), hub=hub, lifecycle=lifecycle)
    with socket.create_server(("127.0.0.1", port)) as listening:
        config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=2)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            await hub.close()
            server.should_exit = True
            await serving
