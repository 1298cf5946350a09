"""`ddtree serve` as a child process over tiny models, with folders and a service manager's socket of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent
PATIENCE_S = 120.0
"""Loading torch takes long on a busy machine."""


@dataclass
class Served:
    """A running child."""

    process: subprocess.Popen[bytes]
    home: Path
    log: Path
    _client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=30.0, trust_env=False))

    @property
    def text(self) -> str:
        """What it wrote to stdout and stderr."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def key(self) -> dict[str, str]:
        key = (self.home / "run" / "ddtree" / "operator.key").read_text().strip()
        return {"Authorization": f"Bearer {key}"}

    @property
    def instance_file(self) -> Path:
        return self.home / "run" / "ddtree" / f"instance-{self.process.pid}.json"

    def url(self) -> str:
        """Its address, once it listens."""
        until(lambda: self.instance_file.exists(), self)
        return str(json.loads(self.instance_file.read_text())["url"])

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self._client.get(self.url() + path, **options)

    def post(self, path: str, body: Mapping[str, Any] | None = None, **options: Any) -> httpx.Response:
        return self._client.post(self.url() + path, json=body, **options)

    def wait_ready(self) -> None:
        until(lambda: self.get("/ready").status_code == 200, self)

    def stream(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The frames of a streamed completion, the end mark left out."""
        with self._client.stream(
            "POST", self.url() + "/v1/completions", json={**body, "stream": True}
        ) as reply:
            assert reply.status_code == 200
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    def wait_end(self, seconds: float = 60.0) -> int:
        return self.process.wait(seconds)


def until(condition: Any, served: Served | None = None, seconds: float = PATIENCE_S) -> None:
    """Waits until `condition` holds; fails after `seconds`, or when the child has ended."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except httpx.TransportError:
            pass
        ended = served is not None and served.process.poll() is not None
        if ended or time.monotonic() > deadline:
            raise AssertionError("did not happen: " + (served.text if served else "no child"))
        time.sleep(0.02)


@contextmanager
def serving(home: Path, *options: str, **variables: str) -> Iterator[Served]:
    """Starts a child on a free port with its folders under `home`; ends it if the test did not."""
    log = home / f"log-{time.monotonic_ns()}"
    environment = {
        **os.environ,
        "XDG_STATE_HOME": str(home / "state"),
        "XDG_RUNTIME_DIR": str(home / "run"),
        "XDG_CONFIG_HOME": str(home / "config"),
        **variables,
    }
    (home / "run").mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "console", "serve", "--threads", "1", "--port", "0", *options],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    served = Served(process, home, log)
    try:
        yield served
    finally:
        served._client.close()
        process.kill()
        process.wait()


class Manager:
    """A service manager's notification socket in the abstract namespace, or at a path."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + name[1:] if name.startswith("@") else name)
        self._socket.setblocking(False)
        self.messages: list[dict[str, str]] = []

    def heard(self) -> list[dict[str, str]]:
        """All messages so far, each as its variables."""
        while True:
            try:
                message = self._socket.recv(4096).decode()
            except BlockingIOError:
                return self.messages
            self.messages.append(dict(line.split("=", 1) for line in message.splitlines()))

    def close(self) -> None:
        self._socket.close()
