"""The place of one day of faults: folders of its own, a server over tiny models, clients, a console on a terminal."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pty
import select
import shutil
import socket
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGCONT, SIGKILL, Signals
from typing import Any

import psutil
import tiny_models
from fault_nursery import Child, Nursery, make_levers

PATIENCE_S = 90.0
MARK = "FAULTS_OF"
"""Variable that every process of a world carries, so that none of them can hide."""
LEFT_SCREEN = (b"\x1b[?1049l", b"\x1b[?25h", b"\x1b[?1000l")
"""What gives a terminal back: the usual screen, the cursor, no mouse."""
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "linear": "plain",
    "mode": "tree",
    "tree_budget": 8,
    "max_tokens": 24,
    "max_seq_len": 256,
    "rebuild_drain": 0,
}


@dataclass(frozen=True)
class Asked:
    """One request of the day."""

    prompt: str
    max_tokens: int = 40
    temperature: float = 0.0
    mode: str | None = None

    def body(self, **more: Any) -> bytes:
        fields = {"prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": self.temperature}
        options = {"ddtree": {"mode": self.mode}} if self.mode else {}
        return json.dumps(fields | {"seed": 7, "ignore_eos": True} | options | more).encode()

    @property
    def key(self) -> tuple[Any, ...]:
        """What its text depends on."""
        return self.prompt, self.max_tokens, self.temperature


@dataclass(frozen=True)
class Answer:
    """What came back: all of a text, the beginning of one with a visible end, or a refusal."""

    asked: Asked
    text: str = ""
    complete: bool = False
    refused: int | None = None
    broken: str = ""


def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE_S) -> None:
    """Waits until `condition` holds; what it asks may be gone at times."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError):
            if condition():
                return
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.01)


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int = 48) -> Iterator[Path | None]:
    """A file system that can be filled; None where none may be mounted."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    mounted = subprocess.run(["mount", *options], capture_output=True).returncode == 0
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)


def write_models(folder: Path) -> Path:
    """A tiny target and its drafter; every world has a copy of the drafter."""
    folder.mkdir()
    tiny_models.write_drafter(folder / "drafter", tiny_models.write_target(folder / "target"))
    return folder


@dataclass
class World:
    """Everything of one day; nothing of it is shared with another one but the models."""

    folder: Path
    models: Path
    logs: Path
    """What processes say; not on the disk that may be full."""
    nursery: Nursery
    small: bool = False
    """Whether the folder is on a disk that can be filled."""
    server: Child | None = None
    console: Console | None = None
    story: list[str] = field(default_factory=list)
    """What happened, in order."""
    children: list[Child] = field(default_factory=list)
    """All that was started; what those start carries the mark."""
    extra: dict[str, str] = field(default_factory=dict)
    """Further variables of all that is started."""
    descriptors: dict[int, int] = field(default_factory=dict)
    """How many a server had when it was idle for the first time, by its pid."""

    def __post_init__(self) -> None:
        for name in ("run", "state", "config/ddtree", "data", "cache", "tmp"):
            (self.folder / name).mkdir(parents=True)
        self.levers = make_levers(self.folder / "levers")
        self.drafter = self.folder / "drafter"
        shutil.copytree(self.models / "drafter", self.drafter)
        if self.digests.exists():
            self.cached_digests.parent.mkdir()
            shutil.copy(self.digests, self.cached_digests)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self.write_config()

    @property
    def env(self) -> dict[str, str]:
        home = self.folder
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        root = Path(__file__).parent.parent
        return kept | {
            "HOME": str(home),
            "XDG_RUNTIME_DIR": str(home / "run"),
            "XDG_STATE_HOME": str(home / "state"),
            "XDG_CONFIG_HOME": str(home / "config"),
            "XDG_DATA_HOME": str(home / "data"),
            "XDG_CACHE_HOME": str(home / "cache"),
            "TMPDIR": str(home / "tmp"),
            "TERM": "xterm-256color",
            "PYTHONPATH": f"{root}:{root / 'tests'}",
            "OMP_NUM_THREADS": "1",
            "GIT_CONFIG_NOSYSTEM": "1",
            MARK: home.name,
            **self.extra,
        }

    @property
    def digests(self) -> Path:
        """Digests of installed files as an earlier world left them, so that not every day reads all of them."""
        return self.models / "hashes.json"

    @property
    def cached_digests(self) -> Path:
        return self.folder / "cache" / "ddtree" / "hashes.json"

    @property
    def config_file(self) -> Path:
        return self.folder / "config" / "ddtree" / "config.toml"

    @property
    def store(self) -> Path:
        return self.folder / "data" / "ddtree" / "snapshots"

    @property
    def last_good(self) -> Path:
        return self.folder / "state" / "ddtree" / "last-good.toml"

    def tell(self, line: str) -> None:
        self.story.append(line)

    def write_config(self, **changes: Any) -> dict[str, Any]:
        """The configuration file; returns what it says."""
        said = {"model": str(self.models / "target"), "drafter": str(self.drafter)}
        said |= SETTINGS | changes
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in said.items()]
        self.config_file.write_text("".join(lines))
        return said

    # Commands

    def run(self, *arguments: str, seconds: float = PATIENCE_S) -> tuple[int | None, str]:
        """A command from start to end: exit status and all it said."""
        child, log = self.begin(*arguments)
        status = child.wait(seconds)
        if status is None:
            child.signal(SIGKILL)
        return status, log.read_text(errors="replace")

    def begin(self, *arguments: str) -> tuple[Child, Path]:
        log = self.logs / f"{self.folder.name}-{time.monotonic_ns()}.log"
        return self.start(arguments, log), log

    def start(self, arguments: Sequence[str], log: Path, **how: Any) -> Child:
        self.children.append(self.nursery.start(arguments, self.env, log, **how))
        return self.children[-1]

    # The server

    def start_server(self) -> None:
        arguments = ["serve", "--port", str(self.port), "--drain-seconds", "20"]
        self.server = self.start(arguments, self.server_log, levers=self.levers)
        until(lambda: self.ended or self.serves, "the server is ready")
        assert not self.ended, f"serve ended: {self.server_log.read_text(errors='replace')[-2000:]}"

    @property
    def server_log(self) -> Path:
        return self.logs / f"{self.folder.name}-serve.log"

    @property
    def serves(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.get("/ready")[0] == 200
        return False

    @property
    def ended(self) -> bool:
        return self.server is None or self.server.status() is not None

    def end_server(self, seconds: float = 60.0) -> int | None:
        """Its exit status after SIGTERM."""
        assert self.server is not None
        self.server.signal(Signals.SIGTERM)
        status, self.server = self.server.wait(seconds), None
        return status

    def get(self, path: str, key: bool = False) -> tuple[int, Any]:
        return self._call("GET", path, None, key)

    def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """A call with the operator's key."""
        return self._call("POST", path, json.dumps(body).encode(), True)

    def status(self) -> dict[str, Any]:
        code, answer = self.get("/runtime/status", key=True)
        assert code == 200, answer
        return answer  # type: ignore[no-any-return]

    def apply(self, change: Mapping[str, Any]) -> tuple[int, Any]:
        """One change from its preview to its report."""
        code, plan = self.post("/runtime/preview", {"change": change})
        if code != 200:
            return code, plan
        body = {"change": change, "revision": plan["revision"], "author": "the day"}
        return self.post("/runtime/apply", body)

    def _call(self, method: str, path: str, body: bytes | None, key: bool) -> tuple[int, Any]:
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            line.request(method, path, body, self._headers(key))
            reply = line.getresponse()
            content = reply.read()
            return reply.status, json.loads(content)
        finally:
            line.close()

    def _headers(self, key: bool) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if key:
            words = (self.folder / "run" / "ddtree" / "operator.key").read_text().strip()
            headers["authorization"] = f"Bearer {words}"
        return headers

    def ask(self, asked: Asked, leave_after: int | None = None) -> Answer:
        """Streams one answer; with `leave_after` the connection is reset after so many frames."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        text, frames = "", 0
        try:
            line.connect()
        except OSError as error:
            return Answer(asked, refused=0, broken=f"no connection: {error}")
        try:
            line.request("POST", "/v1/completions", asked.body(stream=True), self._headers(False))
            reply = line.getresponse()
            if reply.status != 200:
                reply.read()
                return Answer(asked, refused=reply.status)
            while raw := reply.readline():
                if not raw.startswith(b"data: "):
                    continue
                content = raw.removeprefix(b"data: ").strip()
                if content == b"[DONE]":
                    return Answer(asked, text, complete=True)
                frame = json.loads(content)
                if "error" in frame:
                    return Answer(asked, text, broken=frame["error"]["message"])
                text += "".join(choice["text"] for choice in frame["choices"])
                frames += 1
                if frames == leave_after:
                    self._reset(line)
                    return Answer(asked, text, broken="left")
            return Answer(asked, text, broken="the stream ended without its mark")
        except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: a frame that is cut
            return Answer(asked, text, broken=f"{type(error).__name__}: {error}")
        finally:
            line.close()

    def _reset(self, line: http.client.HTTPConnection) -> None:
        if line.sock is not None:
            line.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def ask_all(self, all_asked: Sequence[Asked]) -> list[Answer]:
        """All at once."""
        answers: list[Answer] = []
        threads = [
            threading.Thread(target=lambda each=each: answers.append(self.ask(each))) for each in all_asked
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return answers

    # What is left

    def processes(self) -> list[psutil.Process]:
        """All that run and were started here, or by what was started here."""
        started = {child.pid for child in self.children if child.status() is None}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                mine = process.pid in started or process.environ().get(MARK) == self.folder.name
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def close(self) -> None:
        """Ends whatever is left; for the end of a day, however it went."""
        if self.console is not None:
            self.console.close()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(SIGCONT)
                process.kill()


class Console:
    """A console attached to the server, on a terminal of its own whose output is read all the time."""

    def __init__(self, world: World) -> None:
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 80))
        self._slave = slave
        self.before = termios.tcgetattr(slave)
        url = f"http://127.0.0.1:{world.port}"
        nowhere = world.logs / f"{world.folder.name}-console.log"
        self.child = world.start(["console", "--attach", url], nowhere, terminal=slave)
        self.seen = b""
        self._open = True
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while self._open:
            with contextlib.suppress(OSError, ValueError):
                if select.select([self.master], [], [], 0.1)[0]:
                    self.seen += os.read(self.master, 1 << 16)

    def shows(self, name: bytes, *states: bytes) -> bool:
        return name in self.seen and any(each in self.seen for each in states)

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def hang_up(self) -> None:
        """The terminal is gone."""
        self._open = False
        self._reader.join()
        os.close(self._slave)
        os.close(self.master)
        self._slave = self.master = -1

    @property
    def sane(self) -> bool:
        """Whether the terminal is as it was before, of a console that has ended by itself."""
        if self.master < 0:
            return True
        until(
            lambda: all(each in self.seen for each in LEFT_SCREEN),
            f"it left its screen: {self.seen[-300:]!r}",
        )
        return termios.tcgetattr(self._slave) == self.before

    def close(self) -> None:
        self.child.signal(SIGKILL)
        self.child.wait(10)
        if self.master >= 0:
            self.hang_up()
