"""SGLang's environment as this side sees it: where its Python is, how the plugin gets into it, one engine process.

SGLang's pins do not go with the native engine's, so it has a virtual environment of its own and runs in a process of
its own, which never outlives its pipe. Nothing here imports SGLang or torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from multiprocessing import connection
from pathlib import Path
from typing import Any

from runtime.interface import ConfigRejected, EngineLost
from runtime.logs import LOGGER
from runtime.sglang_checks import UNTESTED
from runtime.sglang_trees import PLACE, TreeBox

SGLANG_VERSION = "0.5.18"
"""What `ddtree engine install sglang` installs."""
DISTRIBUTION = "ddtree-console"
CHECK_S = 600.0
"""A busy host may need minutes to import SGLang; `http_client.PREVIEW_S` is longer."""
LOAD_S = 3600.0
CLOSE_S = 10.0
KEPT_LINES = 60
CAUSE = re.compile(r"\w*(Error|Exception): |.*crashed with exit code")
"""Lines of SGLang's output that say why it ended."""


def environment_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Where SGLang's own environment is made."""
    home = Path(env.get("XDG_DATA_HOME", ""))
    if not home.is_absolute():
        import platformdirs

        home = platformdirs.user_data_path()
    return home / "ddtree" / "sglang"


def find_python(wanted: str) -> Path:
    """SGLang's Python, `wanted` or else the installed one; raises ConfigRejected, saying how to get one, without."""
    path = Path(wanted).expanduser() if wanted else environment_folder() / "bin" / "python"
    if os.access(path, os.X_OK) and path.is_file():
        return path.absolute()
    if wanted:
        raise ConfigRejected(f"sglang_python: {path} is no program that can be run", "sglang_python")
    raise ConfigRejected(
        f"engine: SGLang is not installed ({path.parent.parent} is not there); run: ddtree engine install sglang, or "
        "set sglang_python to the Python of an environment that has it",
        "engine",
    )


def plugin_folder(parent: Path) -> Path:
    """A folder for PYTHONPATH (or a .pth file) that brings the plugin: our packages, and their entry point.

    The packages are links to those that run here, so SGLang always has the plugin of this version.
    """
    import runtime

    try:
        version = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        version = "0"
    folder = parent / "plugin"
    information = folder / f"{DISTRIBUTION.replace('-', '_')}-{version}.dist-info"
    for other in folder.glob("*.dist-info"):
        if other != information:
            shutil.rmtree(other)
    information.mkdir(parents=True, exist_ok=True)
    link = folder / "runtime"
    source = Path(str(runtime.__file__)).parent
    if not (link.is_symlink() and link.resolve() == source.resolve()):
        link.unlink(missing_ok=True)
        link.symlink_to(source, target_is_directory=True)
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {version}\n"
    )
    (information / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nddtree_console = runtime.sglang_plugin:register\n"
    )
    return folder


@dataclass(frozen=True)
class Launch:
    """One start of SGLang: its Python, the engine's arguments and the variables of its processes."""

    python: Path
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]

    def variables(self, plugin: Path) -> dict[str, str]:
        """The environment of its processes; nothing is set in this one."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name == UNTESTED or not name.startswith("DDTREE_")
        }
        path = [str(plugin), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**kept, "PYTHONUNBUFFERED": "1", **self.environment, "PYTHONPATH": os.pathsep.join(path)}


def check(launch: Launch, folder: Path) -> None:
    """Has SGLang's parser look at the arguments; raises ConfigRejected with its words where it refuses them."""
    _checked(launch.python, json.dumps(dict(launch.arguments)), tuple(launch.environment.items()), folder)


@functools.lru_cache(maxsize=8)  # a preview and the change after it ask for the same
def _checked(python: Path, arguments: str, environment: tuple[tuple[str, str], ...], folder: Path) -> None:
    launch = Launch(python, {}, dict(environment))
    try:
        done = subprocess.run(
            [str(launch.python), "-m", "runtime.sglang_child", "check"],
            input=arguments,
            capture_output=True,
            text=True,
            timeout=CHECK_S,
            env=launch.variables(plugin_folder(folder)),
            cwd=folder,
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise ConfigRejected(
            f"engine: SGLang's parser gave no answer within {CHECK_S:g} s", "engine"
        ) from None
    except ValueError:
        words = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigRejected(f"engine: {launch.python} cannot run SGLang: {words}", "engine") from None
    if answer["refused"] is not None:
        raise ConfigRejected(f"engine: SGLang refuses the arguments: {answer['refused']}", "engine")


class SglangProcess:
    """The process that owns `sglang.Engine`, with a thread that reads its answers and one that reads what it prints."""

    def __init__(self, launch: Launch, folder: Path, tick: Callable[[], object]) -> None:
        """Starts it and returns when the engine is up; `tick` is called meanwhile and may raise.

        Raises EngineLost: it did not come up.
        """
        self.lost: str | None = None
        self._on_lost: Callable[[str], object] = lambda _cause: None
        self._closing = threading.Event()
        self._answers: deque[dict[str, Any]] = deque()
        self._arrived = threading.Event()
        self._printed: deque[str] = deque(maxlen=KEPT_LINES)
        self._write = threading.Lock()
        self.trees = TreeBox()
        mine, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [str(launch.python), "-m", "runtime.sglang_child", "serve", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=launch.variables(plugin_folder(folder)) | {PLACE: str(self.trees.folder)},
                cwd=folder,
                start_new_session=True,
            )
        except OSError as failure:
            self.trees.close()
            raise EngineLost(f"{launch.python} cannot be started: {failure.strerror}") from None
        finally:
            theirs.close()
        self._pipe = connection.Connection(mine.detach())
        self._reader: threading.Thread | None = None
        self._logger = threading.Thread(target=self._log, name="sglang-log", daemon=True)
        self._logger.start()
        try:
            self._send(b"S", dict(launch.arguments))
            self.info = self._await_ready(tick)
        except BaseException:
            self.close()
            raise
        self._reader = threading.Thread(target=self._read, name="sglang-answers", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, on_lost: Callable[[str], object]) -> None:
        """`on_lost` is called once with the cause, from another thread, when the process is gone."""
        self._on_lost = on_lost
        if self.lost is not None:
            on_lost(self.lost)

    def add(self, name: str, input_ids: list[int], sampling: Mapping[str, Any]) -> None:
        """Hands a request over. Raises EngineLost."""
        self._send(b"N", {"id": name, "input_ids": input_ids, "sampling": dict(sampling)})

    def set_budget(self, budget: int) -> None:
        """Asks for another tree budget; an answer with `budget` and `taken` comes of it. Raises EngineLost."""
        self._send(b"B", {"id": f"budget {budget}", "budget": budget})

    def cancel(self, name: str) -> None:
        """Ends a request there; what it still sends is for nobody."""
        with contextlib.suppress(EngineLost):
            self._send(b"X", {"id": name})

    def take(self, seconds: float) -> list[dict[str, Any]]:
        """Answers that have come, waiting up to `seconds` for the first. Raises EngineLost once there are no more."""
        self._arrived.wait(seconds)
        self._arrived.clear()
        taken: list[dict[str, Any]] = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._answers.popleft())
        if not taken and self.lost is not None:
            raise EngineLost(self.lost)
        return taken

    def close(self) -> None:
        """Ends the process and all it started; returns when they are gone."""
        self._closing.set()
        deadline = time.monotonic() + CLOSE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1)
            if self._process.returncode is not None and not _group_lives(self._process.pid):
                break
        for thread in (self._logger, self._reader):
            if thread is not None and thread is not threading.current_thread():
                thread.join(CLOSE_S)
        with contextlib.suppress(OSError):
            self._pipe.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self.trees.close()

    def _send(self, kind: bytes, value: Any) -> None:
        try:
            with self._write:
                self._pipe.send_bytes(kind + json.dumps(value).encode())
        except (OSError, ValueError):
            raise EngineLost(self.lost or "SGLang's process is gone") from None

    def _await_ready(self, tick: Callable[[], object]) -> dict[str, Any]:
        deadline = time.monotonic() + LOAD_S
        while time.monotonic() < deadline:
            tick()
            if not self._pipe.poll(0.1):
                continue
            try:
                message = self._pipe.recv_bytes()
            except (EOFError, OSError):
                raise EngineLost(f"SGLang did not come up: {self._last_words()}") from None
            if message[:1] == b"E":
                raise EngineLost(f"SGLang did not come up: {message[1:].decode(errors='replace')}")
            return dict(json.loads(message[1:]))
        raise EngineLost(f"SGLang did not come up within {LOAD_S:g} s")

    def _read(self) -> None:
        cause = ""
        try:
            while True:
                message = self._pipe.recv_bytes()
                if message[:1] == b"E":
                    cause = message[1:].decode(errors="replace")
                elif message[:1] == b"A":
                    self._answers.extend(json.loads(message[1:]))
                    self._arrived.set()
        except (EOFError, OSError, TypeError):
            pass
        if not self._closing.is_set():
            words = self._last_words()
            self.lost = f"SGLang ended: {cause or words}"
            self._on_lost(self.lost)
        self._arrived.set()

    def _log(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode(errors="replace").rstrip()
            if text:
                self._printed.append(text)
                LOGGER.debug("sglang: %s", text)

    def _last_words(self) -> str:
        """What it printed last that tells of an error, else how it ended; what is left of it is ended first."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._logger.join(2.0)
        told = [line for line in self._printed if CAUSE.match(line)]
        for line in self._printed:
            LOGGER.warning("sglang: %s", line)
        return told[-1].strip() if told else f"exit code {self._process.returncode}"


def _group_lives(group: int) -> bool:
    """True while a process of the group runs; one that has ended and waits to be reaped does not."""
    psutil = importlib.import_module("psutil")  # it has no types

    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
    return False
