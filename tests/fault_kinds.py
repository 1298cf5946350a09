"""What is done to a day: each fault strikes in the middle of a step and is mended before the next one."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from signal import SIGCONT, SIGHUP, SIGKILL, SIGSTOP, SIGTERM

import psutil
from fault_day import BAD_FILES, FULL, KILLED, LOST_RANK, LOST_SCREEN, RAISED, TRACKED, Day
from fault_nursery import FAIL_ROUND, SLOW_DRIVER, bend_clock
from fault_world import until

Mend = Callable[[], list[str]]
FREE = b"\0" * (1 << 16)


@dataclass(frozen=True)
class Fault:
    """One kind of fault; `strike` returns what undoes it and says what is wrong then."""

    name: str
    strike: Callable[[Day], Mend | None]
    hurts: str | None = None
    """The excuse it gives to the step."""
    small_disk: bool = False
    ranks: bool = False
    """Only where a layout of several processes may run."""


def kill_server(day: Day) -> Mend | None:
    """kill -9, and a start anew with the same command line."""
    server = day.world.server
    if server is None:
        return None
    server.signal(SIGKILL)
    return _nothing


def kill_server_and_spoil_configuration(day: Day) -> Mend | None:
    """kill -9, and the file is wrong at the next start: the last good configuration is served, and it says so."""
    world = day.world
    if world.server is None or not world.last_good.exists() or day.step == "stop":
        return None
    good = world.config_file.read_bytes()
    world.server.signal(SIGKILL)
    world.config_file.write_bytes(good + b"mode = 'trree'\n")

    def mend() -> list[str]:
        world.server.wait(10.0)
        world.start_server()
        status = world.status()
        kept = {name: value for name, value in status["config"].items() if name in TRACKED}
        world.config_file.write_bytes(good)
        world.server.signal(SIGKILL)
        world.server.wait(10.0)
        if status["state"] != "degraded" or kept not in day.good:
            return [f"not the last good configuration: {status['state']} {kept}, good were {day.good}"]
        return []

    return mend


def freeze_server(day: Day) -> Mend | None:
    """SIGSTOP for a while."""
    server = day.world.server
    if server is None:
        return None
    server.signal(SIGSTOP)
    time.sleep(day.rng.uniform(0.05, 0.4))
    server.signal(SIGCONT)
    return _nothing


def fail_round(day: Day) -> Mend:
    """An exception in a decode round."""
    lever = day.world.levers / FAIL_ROUND
    lever.touch()

    def mend() -> list[str]:
        lever.unlink(missing_ok=True)
        return []

    return mend


def slow_driver(day: Day) -> Mend:
    """A GPU driver that does not answer."""
    lever = day.world.levers / SLOW_DRIVER
    lever.touch()

    def mend() -> list[str]:
        lever.unlink(missing_ok=True)
        return []

    return mend


def jump_clock(day: Day) -> Mend:
    """The wall clock jumps, by hours or by years, and stays there."""
    hours = day.rng.choice((-87_600, -24, -1, 1, 24, 87_600))
    bend_clock(day.world.levers, 3600.0 * hours)
    return _nothing


def fill_disk(day: Day) -> Mend:
    """Every byte of the disk is taken."""
    filler = day.world.folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(FREE)

    def mend() -> list[str]:
        filler.unlink(missing_ok=True)
        return []

    return mend


def reset_connections(day: Day) -> Mend:
    """Connections that end in the middle of a request's head or body, or send what is no HTTP."""
    pieces = (
        b'POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 500\r\n\r\n{"prompt": "a',
        b"GET /ready HT",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nffffff\r\nab",
        b"",
    )
    for piece in pieces:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", day.world.port), 5) as line:
            line.sendall(piece)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    return _nothing


def lose_terminal(day: Day) -> Mend | None:
    """The console's terminal goes, with or without a signal, or the console is told to end, or is killed."""
    console = day.world.console
    if console is None or console.child.status() is not None:
        return None
    how = day.rng.choice(("hang up", "SIGTERM", "SIGKILL"))
    day.world.tell(f"  the console: {how}")
    if how == "hang up":
        console.hang_up()
    else:
        console.child.signal(SIGTERM if how == "SIGTERM" else SIGKILL)

    def mend() -> list[str]:
        day.world.console = None
        status = console.child.wait(20.0)
        problems = [] if status is not None else ["the console outlives its terminal"]
        if how == "SIGTERM" and not console.sane:
            problems.append("the terminal is not as it was after SIGTERM")
        console.close()
        return problems

    return mend


def bad_configuration(day: Day) -> Mend | None:
    """The configuration file is no TOML, and the server is told to read it."""
    world = day.world
    if world.server is None or day.step in ("start", "stop"):
        return None
    good = world.config_file.read_bytes()
    broken = (b"mode = \xff", b"mode = 'trree'\n", b"a = " + b"[" * 3000, b"tree_budget = 1" + b"0" * 5000)
    world.config_file.write_bytes(day.rng.choice(broken))
    refused = b"configuration not changed"
    before = world.server_log.read_bytes().count(refused)
    world.server.signal(SIGHUP)

    def mend() -> list[str]:
        # Restored only after it was looked at, or the good one would be read, which takes live changes back.
        until(lambda: world.server_log.read_bytes().count(refused) > before, "the file is refused", 60.0)
        world.config_file.write_bytes(good)
        return []

    return mend


def bad_caches(day: Day) -> Mend:
    """What is remembered between starts is garbage."""
    home = day.world.folder
    for path in (
        home / "cache" / "ddtree" / "hashes.json",
        home / "state" / "ddtree" / "console.json",
        home / "run" / "ddtree" / "instance-1.json",
    ):
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_bytes(
                day.rng.choice((b"", b"{", b"[" * 5000, b"\xff\xfe\x00", b"[]", b'{"a": 1e999}'))
            )
            path.chmod(0o600)
    return _nothing


def bad_store(day: Day) -> Mend | None:
    """Left-overs in the store as kills leave them, and an announcement that is garbage."""
    store = day.world.store
    if not (store / "HEAD").exists():
        return None
    (store / "ddtree").mkdir(exist_ok=True)
    with contextlib.suppress(OSError):
        (store / "ddtree" / "pending.draft").write_bytes(b'{"locks": ["refs/he')
        if day.rng.random() < 0.5:
            (store / "ddtree" / "pending.json").write_bytes(
                day.rng.choice((b"", b"{", b'{"locks": 1, "moves": []}', b"[" * 5000))
            )
        (store / "objects" / "ab").mkdir(exist_ok=True)
        (store / "objects" / "ab" / "tmp_obj_fault").write_bytes(b"x")
    return _nothing


def bad_weights(day: Day) -> Mend | None:
    """The drafter's configuration is broken on disk: a rebuild is refused and what serves goes on."""
    path = day.world.drafter / "config.json"
    good = path.read_bytes()
    draft = path.with_suffix(".new")
    draft.write_bytes(day.rng.choice((good[: len(good) // 2], b"{}", b"\0" * 64, b"[" * 5000)))
    os.replace(draft, path)

    def mend() -> list[str]:
        draft.write_bytes(good)
        os.replace(draft, path)
        return []

    return mend


def kill_rank(day: Day) -> Mend | None:
    """One of the engine's processes is killed, or stopped for good."""
    server = day.world.server
    ranks = [each for each in _below(server.pid) if _is_rank(each)] if server else []
    if not ranks:
        return None
    victim, number = day.rng.choice(ranks), day.rng.choice((SIGKILL, SIGSTOP))
    day.world.tell(f"  a rank: {number.name}")
    with contextlib.suppress(psutil.Error):
        victim.send_signal(number)

    def mend() -> list[str]:
        time.sleep(0.5)  # so that it is noticed
        world = day.world
        until(
            lambda: world.ended or world.status()["state"] in ("ready", "degraded"),
            "another engine is up",
        )
        if not world.ended:
            day.begins()
        return []

    return mend


FAULTS = (
    Fault("kill -9 the server", kill_server, KILLED),
    Fault("kill -9, then a bad configuration", kill_server_and_spoil_configuration, KILLED),
    Fault("SIGSTOP the server", freeze_server),
    Fault("an exception in a round", fail_round, RAISED),
    Fault("a slow driver", slow_driver),
    Fault("the clock jumps", jump_clock),
    Fault("the disk is full", fill_disk, FULL, small_disk=True),
    Fault("connections are reset", reset_connections),
    Fault("the terminal is lost", lose_terminal, LOST_SCREEN),
    Fault("a bad configuration file", bad_configuration),
    Fault("bad caches", bad_caches),
    Fault("debris in the store", bad_store, BAD_FILES),
    Fault("bad drafter files", bad_weights, BAD_FILES),
    Fault("a rank is lost", kill_rank, LOST_RANK, ranks=True),
)


def _nothing() -> list[str]:
    return []


def _below(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def _is_rank(process: psutil.Process) -> bool:
    """Ranks are forked from a server process, itself a child of ours."""
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        return parent is not None and "forkserver" in " ".join(parent.cmdline())
    return False
