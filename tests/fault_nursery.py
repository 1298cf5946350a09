"""Starts ddtree commands as processes of their own, forked from one that has imported everything: a start costs little.

Run as a script it is that process: it forks a child for every order that comes over its socket and says how one ended.
Beyond that a child is `ddtree` with a command line. Files in its `levers` folder act on it from outside: they bend its
clock, slow its GPU driver down and make a decode round fail.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import mmap
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).parent
MAX_MESSAGE = 1 << 18
CLOCK, FAIL_ROUND, SLOW_DRIVER = "clock", "fail-round", "slow-driver"
IMPORTED = (
    "console.cli",
    "console.session",
    "runtime.http_connection",
    "runtime.calibrate",
    "runtime.http_server",
    "runtime.loader",
    "runtime.metrics",
    "runtime.serve",
    "snapshots.commands",
    "snapshots.environment",
    "snapshots.live",
    "snapshots.rollback",
    "snapshots.saving",
)
PROVED_S = 0.2
"""A configuration counts as good after so long, so that a day of seconds has some."""


@dataclass(frozen=True)
class Child:
    """A process that a nursery started."""

    pid: int
    nursery: Nursery

    def status(self) -> int | None:
        """Exit status (negative: the signal that ended it), or None while it runs."""
        return self.nursery.tell(poll=self.pid)["status"]  # type: ignore[no-any-return]

    def wait(self, seconds: float) -> int | None:
        """As `status`, after at most `seconds`."""
        end = time.monotonic() + seconds
        while (status := self.status()) is None and time.monotonic() < end:
            time.sleep(0.005)
        return status

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class Nursery:
    """The client of the forking process."""

    def __init__(self) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        variables = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "fault_nursery.py"), str(theirs.fileno())],
            cwd=HERE.parent,
            env=os.environ | variables | {"PYTHONPATH": f"{HERE.parent}:{HERE}"},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._line, self._lock = mine, threading.Lock()
        assert mine.recv(MAX_MESSAGE), "the nursery did not come up"

    def start(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        *,
        levers: Path | None = None,
        terminal: int | None = None,
    ) -> Child:
        """Starts `ddtree` with `arguments`; its output goes to `log`, or to `terminal` where it has one."""
        order = {
            "arguments": list(arguments),
            "env": dict(env),
            "log": str(log),
            "levers": str(levers) if levers else None,
        }
        return Child(self.tell([] if terminal is None else [terminal], **order)["pid"], self)

    def tell(self, descriptors: Sequence[int] = (), **order: Any) -> dict[str, Any]:
        """Sends an order and returns the answer to it."""
        with self._lock:
            socket.send_fds(self._line, [json.dumps(order).encode()], list(descriptors))
            return json.loads(self._line.recv(MAX_MESSAGE))  # type: ignore[no-any-return]

    def close(self) -> None:
        self._line.close()
        self._process.wait(30)


@contextlib.contextmanager
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    try:
        yield made
    finally:
        made.close()


def bend_clock(levers: Path, seconds: float) -> None:
    """Moves the wall clock of the children of these levers by `seconds` in all, at once."""
    with (levers / CLOCK).open("r+b", buffering=0) as file:
        file.write(struct.pack("d", seconds))


def make_levers(folder: Path) -> Path:
    """A folder of levers that do nothing yet."""
    folder.mkdir()
    (folder / CLOCK).write_bytes(bytes(8))
    return folder


# In the forking process


def main() -> int:
    """Obeys until the client is gone. In a child: the whole life of the command."""
    line = socket.socket(fileno=int(sys.argv[1]))
    _import_everything()
    assert threading.active_count() == 1, "a fork takes no other thread along"
    line.send(b"{}")
    while True:
        message, descriptors, _, _ = socket.recv_fds(line, MAX_MESSAGE, 4)
        if not message:
            return 0
        order = json.loads(message)
        if "poll" in order:
            line.send(json.dumps({"status": _ended(order["poll"])}).encode())
            continue
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            line.close()
            _leave(_live(order, descriptors))
        _statuses.pop(child, None)  # of an earlier child, whose number came round again
        for each in descriptors:
            os.close(each)
        line.send(json.dumps({"pid": child}).encode())


def _import_everything() -> None:
    """What the commands load when they run; nothing that starts a thread."""
    for name in IMPORTED:
        importlib.import_module(name)
    import torch
    import transformers

    torch.set_num_threads(1)
    assert transformers.LlamaForCausalLM and transformers.LlamaConfig
    gc.freeze()


def _leave(code: int) -> NoReturn:
    """Ends a child as the interpreter would, save that it does not take what is imported apart, which costs a second.

    Threads that are to be waited for are waited for, and what was to be done at the end is done.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


_statuses: dict[int, int] = {}


def _ended(pid: int) -> int | None:
    if pid not in _statuses:
        found, status = os.waitpid(pid, os.WNOHANG)
        if not found:
            return None
        _statuses[pid] = os.waitstatus_to_exitcode(status)
    return _statuses[pid]


def _live(order: Mapping[str, Any], descriptors: Sequence[int]) -> int:
    """The life of one child, from its own session to its exit code."""
    os.setsid()
    os.environ.clear()
    os.environ.update(order["env"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, source in enumerate([descriptors[0]] * 3 if descriptors else [nothing, log, log]):
        os.dup2(source, target)
    if descriptors:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for each in (nothing, log, *descriptors):
        os.close(each)
    sys.argv = ["ddtree", *order["arguments"]]
    sys.orig_argv = [sys.executable, "-m", "console", *order["arguments"]]
    random.seed()
    if order["levers"]:
        _suffer(Path(order["levers"]))
    from console.cli import main as ddtree

    return ddtree(order["arguments"])


def _suffer(levers: Path) -> None:
    """Puts the levers in the way of the process."""
    from fake_nvml import FakeNvml

    import runtime.engine
    import runtime.serve

    with (levers / CLOCK).open("rb") as file:
        offset = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + struct.unpack_from("d", offset)[0]
    time.time_ns = lambda: now_ns() + int(struct.unpack_from("d", offset)[0] * 1e9)

    decode_round = runtime.engine.decode_round
    fail, slow = levers / FAIL_ROUND, levers / SLOW_DRIVER

    def round_that_may_fail(*given: Any) -> Any:
        if fail.exists():
            fail.unlink(missing_ok=True)
            raise RuntimeError("a fault of the day")
        return decode_round(*given)

    runtime.engine.decode_round = round_that_may_fail
    keep = runtime.serve.keep_once_proved
    runtime.serve.keep_once_proved = functools.partial(keep, seconds=PROVED_S, look_every_s=0.05)

    def utilisation(handle: int) -> Any:
        while slow.exists():
            time.sleep(0.05)
        return nvml.healthyDeviceGetUtilizationRates(handle)

    nvml = FakeNvml(2, nvmlDeviceGetUtilizationRates=utilisation)
    sys.modules["pynvml"] = nvml  # type: ignore[assignment]


if __name__ == "__main__":
    sys.exit(main())
