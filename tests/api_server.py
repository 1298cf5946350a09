"""A whole server for tests of its API: a runtime behind uvicorn on a loopback port, in a thread with its own loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

import uvicorn
from openai import OpenAI

from runtime.config import RuntimeConfig
from runtime.http_security import Keys
from runtime.http_server import create_app
from runtime.interface import Runtime, Status
from runtime.listener import ServerSettings
from runtime.local import LocalRuntime

T = TypeVar("T")

CONTEXT = 160
"""Context limit of the tiny model's server."""


class ApiServer:
    """Serves `config` inside a with block."""

    def __init__(self, config: RuntimeConfig, settings: ServerSettings | None = None) -> None:
        self._config = config
        self._settings = settings or ServerSettings()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._up = threading.Event()
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        self._up.wait()
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    def openai(self) -> OpenAI:
        """The official client, which says what goes wrong rather than trying again."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def run(self, act: Callable[[Runtime], Coroutine[Any, Any, T]]) -> T:
        """What `act` on the runtime returns, run in the server's loop."""
        return asyncio.run_coroutine_threadsafe(act(self._runtime), self._loop).result()

    def status(self) -> Status:
        return self.run(lambda runtime: runtime.status())

    def tasks(self) -> int:
        """Tasks in the server's loop beside those of an idle server."""

        async def count(_: Runtime) -> int:
            return len(asyncio.all_tasks()) - 1 - self._idle_tasks

        return self.run(count)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._runtime = LocalRuntime(self._config)
        try:
            await self._runtime.wait_ready()
            app = create_app(self._runtime, Keys(None, "operator-key"), self._settings)
            self._server = uvicorn.Server(
                uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=5)
            )
            serving = asyncio.create_task(self._server.serve())
            while not self._server.started:
                await asyncio.sleep(0.01)
            port = self._server.servers[0].sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
            self._idle_tasks = len(asyncio.all_tasks())
            self._up.set()
            await serving
        except BaseException as failure:
            self._failure = failure
            raise
        finally:
            await self._runtime.aclose()
            self._up.set()
