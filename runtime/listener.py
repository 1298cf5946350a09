"""The HTTP API over a runtime, served by uvicorn in a thread of its own.

In its own thread uvicorn leaves signals alone, and neither a screen nor the keeper of the service waits for a request.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from runtime.interface import Runtime, RuntimeFault, RuntimeUnavailable
from runtime.logs import LOGGER, adopt, mask

if TYPE_CHECKING:
    import uvicorn

    from runtime.http_control import Lifecycle
    from runtime.http_security import Keys

DEFAULT_PORT = 8642
CLOSE_S = 3.0
"""Seconds that open connections have once the server stops; requests have been drained before."""


@dataclass(frozen=True)
class ServerSettings:
    """Address, limits and origins of one HTTP server."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """0: any free port."""
    cors_origins: tuple[str, ...] = ()
    """Web origins whose pages may call this server; none by default."""
    max_body_bytes: int = 2 * 1024 * 1024
    request_timeout_s: float | None = 3600.0
    """Longest time of one inference request, waiting included; None = no limit."""
    keep_alive_s: float = 10.0
    """A stream that has nothing to say sends a comment this often."""


class BindRefused(RuntimeFault):
    """An address that must not be served as things stand."""

    exit_code = 3


class AddressFault(RuntimeFault):
    """An address that cannot be served."""

    exit_code = 1


class Listener:
    """Serves `runtime` from `start` to `stop`; the runtime stays the caller's to drain and close."""

    def __init__(
        self,
        runtime: Runtime,
        keys: Keys,
        settings: ServerSettings,
        lifecycle: Lifecycle | None = None,
        address: socket.socket | None = None,
    ) -> None:
        """`address` is what `take_address` gave; None takes the address of `settings`, raising as that does."""
        self._socket = address or take_address(keys, settings)
        self._settings = replace(settings, port=self._socket.getsockname()[1])
        self._runtime, self._keys, self._lifecycle = runtime, keys, lifecycle
        self._settled = threading.Event()
        self._fault: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="ddtree-http", daemon=True)

    @property
    def url(self) -> str:
        """Where this host reaches the server."""
        return url_of(self._settings.host, self._settings.port)

    def start(self) -> None:
        """Returns once requests are answered; raises RuntimeUnavailable where the server does not come up."""
        self._thread.start()
        self._settled.wait()
        if self._fault is not None:
            raise RuntimeUnavailable(f"the HTTP server did not start: {self._fault}")

    def stop(self) -> None:
        """Ends event streams, gives open connections a moment and closes them; returns when all is over."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
        if self._thread.ident is not None:
            self._thread.join(2 * CLOSE_S)
        self._socket.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as fault:  # also the SystemExit by which uvicorn reports a failed start
            LOGGER.exception("the HTTP server failed")
            self._fault = fault
        finally:
            self._settled.set()

    async def _serve(self) -> None:
        import uvicorn

        from runtime.http_connection import AccessLog
        from runtime.http_events import EventHub
        from runtime.http_server import create_app
        from runtime.metrics import Metrics

        self._loop = asyncio.get_running_loop()
        hub, metrics = EventHub(self._runtime), Metrics(self._runtime)
        app = create_app(
            self._runtime, self._keys, self._settings, hub=hub, lifecycle=self._lifecycle, metrics=metrics
        )
        server = uvicorn.Server(
            uvicorn.Config(
                AccessLog(app, metrics.http_request),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=int(CLOSE_S),
            )
        )
        adopt("uvicorn")
        mask(self._keys.inference, self._keys.operator)
        counting = asyncio.create_task(metrics.run())
        serving = asyncio.create_task(server.serve(sockets=[self._socket]))
        try:
            await self._until_started(server, serving)
            stopping = asyncio.create_task(self._stopping.wait())
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            await hub.close()
            server.should_exit = True
            await serving
        finally:
            counting.cancel()
            await asyncio.gather(counting, return_exceptions=True)

    async def _until_started(self, server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        if server.started:
            self._settled.set()


def url_of(host: str, port: int) -> str:
    """Where this host reaches a server that listens on `host`, which may be every address."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host).strip("[]")
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def take_address(keys: Keys, settings: ServerSettings) -> socket.socket:
    """The listening socket for `settings`, taken before anything is loaded; connections wait in it.

    Raises:
        BindRefused: another address than loopback, and no inference key is set.
        AddressFault: the address is in use or is none of this host's.
    """
    from runtime.http_security import INFERENCE_VARIABLE
    from runtime.instance import is_loopback

    if keys.inference is None and not is_loopback(settings.host):
        raise BindRefused(
            f"host {settings.host} can be reached from other machines and no key is set: set {INFERENCE_VARIABLE}, "
            "or serve 127.0.0.1"
        )
    return _bind(settings.host, settings.port)


def _bind(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=512)
    except socket.gaierror as error:
        raise AddressFault(
            f"host {host} is not known: {error.strerror}; give an address of this host"
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressFault(
                f"port {port} on {host} is in use; stop what uses it or choose another one "
                "with --port (a console: --listen)"
            ) from None
        raise AddressFault(f"{host} port {port} cannot be served: {error.strerror}") from None
