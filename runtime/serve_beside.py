"""The HTTP API of a console's own runtime: beside its screen, and after it as `ddtree serve` would go on."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from runtime.http_errors import ApiError
from runtime.http_security import Keys, load_keys
from runtime.instance import register, runtime_folder
from runtime.interface import ConfigRejected
from runtime.last_good import last_good_file
from runtime.listener import DEFAULT_PORT, Listener, ServerSettings, take_address, url_of
from runtime.local import LocalRuntime
from runtime.logs import LOGGER
from runtime.sd_notify import Notifier
from runtime.serve import Orders, attend, close, heed_signals

DRAIN_S = 30.0


class OwnOrders:
    """What others may order of a console's process: it ends as by SIGTERM, with or without a screen."""

    def __init__(self, runtime: LocalRuntime) -> None:
        self._runtime = runtime
        self._draining: asyncio.Task[int] | None = None

    def drain(self) -> str:
        self._draining = self._draining or asyncio.ensure_future(self._runtime.drain())
        return (
            "draining: accepted requests are finished, new ones are refused until the console is started anew"
        )

    def stop(self) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return f"stopping: accepted requests have {DRAIN_S:g} s to finish"

    def restart(self) -> str:
        raise ApiError(
            409, "a console is not restarted from elsewhere: stop it, and start it on its terminal"
        )


class ServiceBeside:
    """Serves one console's runtime; the address is taken before there is one."""

    def __init__(
        self,
        keys: Keys,
        settings: ServerSettings,
        address: socket.socket,
        on_hangup: Literal["detach", "stop"],
        fall_back: bool = True,
    ) -> None:
        self.on_hangup = on_hangup
        self._last_good = last_good_file() if fall_back else None
        self.url = url_of(settings.host, address.getsockname()[1])
        self._keys, self._settings, self._address = keys, settings, address
        self._served: tuple[LocalRuntime, Listener, Path] | None = None

    @classmethod
    def at(cls, listen: str, on_hangup: Literal["detach", "stop"], fall_back: bool = True) -> ServiceBeside:
        """Takes the address `listen`, HOST:PORT; raises ConfigRejected, or as `take_address` does."""
        settings = ServerSettings(*_address(listen))
        keys = load_keys(os.environ, runtime_folder())
        return cls(keys, settings, take_address(keys, settings), on_hangup, fall_back)

    def start(self, runtime: LocalRuntime) -> None:
        """Returns once requests for `runtime` are answered."""
        listener = Listener(runtime, self._keys, self._settings, OwnOrders(runtime), self._address)
        listener.start()
        file = register(runtime_folder(), self.url, self._keys.operator_file)
        self._served = (runtime, listener, file)

    def go_on(self, stop: bool) -> int:
        """Serves until told to stop, then drains and ends all of it; with `stop` at once. Returns the exit code."""
        if self._served is None:
            self._address.close()
            return 0
        return asyncio.run(self._go_on(*self._served, stop))

    async def _go_on(self, runtime: LocalRuntime, listener: Listener, file: Path, stop: bool) -> int:
        orders = Orders(runtime, DRAIN_S)
        heed_signals(orders, file, stopping=stop)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal may still be lost: it is needed no more
        LOGGER.info("%s without a screen", "stopping" if stop else "serving")
        if stop:
            orders.stop()
        try:
            await attend(runtime, orders, Notifier.from_environment(), self._last_good)
        finally:
            await asyncio.to_thread(listener.stop)
            await close(runtime)
            file.unlink(missing_ok=True)
        return orders.exit_code


def _address(listen: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT, HOST or PORT; a host with colons stands in brackets."""
    try:
        parts = urlsplit(f"//127.0.0.1:{listen}" if listen.isdecimal() else f"//{listen}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or "@" in listen or "/" in listen:
        raise ConfigRejected(f"listen = {listen}: must be HOST:PORT, as 127.0.0.1:{DEFAULT_PORT}", "listen")
    return host, DEFAULT_PORT if port is None else port
