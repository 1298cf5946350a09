"""Tells systemd how the service is: the datagram protocol of sd_notify(3), which is documented as free to implement."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping, MutableMapping

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class Notifier:
    """Sends states to the service manager; does nothing where there is none. Never raises: the service goes on."""

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        self._address = "\0" + address[1:] if address and address.startswith("@") else address
        self.watchdog_s = watchdog_s
        """Seconds after which the manager acts when it hears no `watchdog`; None = it does not wait for any."""
        self.variables: Mapping[str, str] = {}
        """What was taken out of the environment; a program that replaces this one needs it back."""

    @classmethod
    def from_environment(cls, env: MutableMapping[str, str] = os.environ) -> Notifier:
        """Take socket and watchdog time out of `env`, so that no child process speaks for this one."""
        taken = {name: env.pop(name) for name in VARIABLES if name in env}
        period, pid = taken.get("WATCHDOG_USEC", ""), taken.get("WATCHDOG_PID", "")
        meant = period.isdecimal() and pid in ("", str(os.getpid()))
        notifier = cls(taken.get("NOTIFY_SOCKET"), int(period) / 1e6 if meant else None)
        notifier.variables = taken
        return notifier

    def ready(self, status: str) -> None:
        """Requests are served; the watchdog counts from here with its own time."""
        watchdog = (
            () if self.watchdog_s is None else (f"WATCHDOG_USEC={int(self.watchdog_s * 1e6)}", "WATCHDOG=1")
        )
        self._send("READY=1", f"STATUS={status}", *watchdog)

    def reloading(self, status: str) -> None:
        """The manager wants the time of the clock by which it orders this and the next `ready`."""
        self._send(
            "RELOADING=1",
            f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}",
            f"STATUS={status}",
        )

    def suspend_watchdog(self, seconds: float) -> None:
        """The next sign of life may take so long: this process is about to be replaced and to load anew."""
        if self.watchdog_s is not None:
            self._send(f"WATCHDOG_USEC={int(seconds * 1e6)}", "WATCHDOG=1")

    def stopping(self, status: str, seconds: float) -> None:
        """The end begins and takes up to `seconds`."""
        self._send("STOPPING=1", f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def status(self, text: str) -> None:
        self._send(f"STATUS={text}")

    def watchdog(self) -> None:
        self._send("WATCHDOG=1")

    def extend_timeout(self, seconds: float) -> None:
        """The start goes on for up to `seconds` from this moment."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        message = "\n".join(line.replace("\n", " ") for line in lines).encode("utf-8", "replace")
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.setblocking(False)
            channel.connect(self._address)
            channel.send(message)
