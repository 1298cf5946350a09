"""A gang: the ranks of one layout as child processes, watched so closely that none can die or hang unseen.

The parent decides everything and owns all requests; ranks only run forward passes. So a rank that is killed, that is
stopped, that raises or that aborts in a collective costs keys and values, which are computed anew, and no request.
One answer to every fault: all ranks are killed, and `EngineLost` names the first cause.

Ranks are forked from a server process that has imported torch and transformers once; where a variable must be set
before that, each starts anew and imports them itself. Neither can be started where stderr has no descriptor, as under
Textual, unless the resource tracker of `multiprocessing` runs already.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from runtime.interface import EngineLost
from runtime.logs import LOGGER

SLICE_S = 0.1
STALL_S = 1.2
"""Seconds in which no rank that is waited for uses or wants a processor: then it hangs, or is stopped."""
LOAD_STALL_S = 60.0
"""The same while loading, which waits for a disk."""
STEP_S, LOAD_S = 60.0, 1800.0
"""Longest pass and longest load, busy or not."""
IDLE_S = 0.4
"""An idle gang is asked so often whether it lives."""
COMPLAINT = "by peer"
"""What a rank says whose peer has gone: that it closed or reset their connection."""
PRELOADED = ["runtime.gang_rank"]
CLOSE_S = 5.0
SETTLE_S = 0.25
"""After a fault, so long for what caused it to show."""


@dataclass(frozen=True)
class RoundsSpec:
    """What a rank needs beside the target's weights to play whole rounds; as in `gpu_round.GpuRound` and `Models`."""

    drafter: str | None
    block_size: int
    draft_noise: bool
    vocab_size: int
    max_batch: int
    positions: int
    scratch: int
    """Slots beyond the allocator's."""
    chunk: int


@dataclass(frozen=True)
class RankSpec:
    """What a rank is to be. `folder` holds the rendezvous file and the ranks' output."""

    rank: int
    layout: str
    folder: str
    model: str
    dtype: str
    device: str
    slots: int
    taps: tuple[int, ...]
    linear: str
    threads: int
    variables: tuple[tuple[str, str], ...] = ()
    """Set in its environment before anything heavy is imported there."""
    rounds: RoundsSpec | None = None
    """Set where ranks play whole rounds; None: they only run the forward passes they are sent."""


def _rank(spec: RankSpec, pipe: connection.Connection) -> None:
    """In the child: what it needs is imported there, and not where it is started from."""
    _leave_the_parents_terminal(Path(spec.folder) / f"rank{spec.rank}.log")
    threading.Thread(target=_end_with_parent, args=(spec.folder,), daemon=True).start()
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **dict(spec.variables)})
    from runtime.gang_rank import rank_main

    rank_main(spec, pipe)


def _leave_the_parents_terminal(log: Path) -> None:
    """A session and an output file of its own: keys do not reach it, and nothing it prints gets on a screen."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _end_with_parent(folder: str) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _limit_sending(pipe: connection.Connection) -> None:
    """Has a message that the other end does not take within a pass raise BlockingIOError."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(STEP_S), 0))


def _context(anew: bool) -> Any:
    if anew:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class Gang:
    """Ranks that have loaded; `forward` is one pass of all of them."""

    def __init__(
        self, specs: Sequence[RankSpec], tick: Callable[[], object] = lambda: None, anew: bool = False
    ) -> None:
        """Starts the ranks of `specs`, all in one folder, and returns when all have loaded.

        `tick` is called meanwhile and may raise. `anew`: each rank is a process that has imported nothing. Raises
        EngineLost where a rank does not come up.
        """
        self._folder = Path(specs[0].folder)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.lost: str | None = None
        """The first fault, if there was one."""
        self._on_lost: Callable[[str], object] = lambda _cause: None
        weakref.finalize(self, shutil.rmtree, self._folder, True)
        context = _context(anew)
        self._pipes: list[connection.Connection] = []
        self._ranks: list[Any] = []
        try:
            for spec in specs:
                self._start(context, spec)
            told = self._collect(range(len(specs)), b"R", LOAD_STALL_S, LOAD_S, tick)
        except BaseException:
            self.close()
            raise
        counts = [tuple(map(int, each.split())) for each in told.values()]
        self.held = tuple(held for held, _ in counts)
        """Parameters of the decoder layers and embedding on each rank."""
        self.whole = counts[0][1]
        """Parameters of the same in one process; under a pipeline, those of the first stage."""
        self._watcher = threading.Thread(target=self._watch, name="ddtree-gang", daemon=True)
        self._watcher.start()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(rank.pid for rank in self._ranks)

    def watch(self, on_lost: Callable[[str], object]) -> None:
        """`on_lost` is called with the cause, in another thread, when a rank is lost while nobody waits for it."""
        with self._lock:
            self._on_lost = on_lost
        if self.lost is not None:
            on_lost(self.lost)

    def forward(self, message: bytes, answers: int, stall_s: float = STALL_S) -> bytes:
        """Sends `message` to all ranks; returns what rank `answers` sends back. Raises EngineLost.

        `stall_s`: longer where a rank may wait for a compiler, which is another process.
        """
        with self._lock:
            if self.lost is not None or self._closing.is_set():
                raise EngineLost(self.lost or "the ranks were ended")
            self._send(message)
            return self._collect([answers], b"A", stall_s, STEP_S)[answers]

    def tell(self, message: bytes) -> None:
        """Sends `message`, which is not answered, to all ranks. Raises EngineLost."""
        with self._lock:
            if self.lost is not None or self._closing.is_set():
                raise EngineLost(self.lost or "the ranks were ended")
            self._send(message)

    def close(self) -> None:
        """Ends all ranks; returns when they are gone, and their files with them."""
        self._closing.set()
        for rank in self._ranks:
            if rank.is_alive():
                rank.kill()
        for rank in self._ranks:
            rank.join(CLOSE_S)
        for pipe in self._pipes:
            pipe.close()
        watcher = getattr(self, "_watcher", None)
        if watcher is not None and watcher is not threading.current_thread():
            watcher.join()
        for rank in self._ranks:
            with contextlib.suppress(ValueError):  # it outlived SIGKILL: the kernel holds it
                rank.close()
        self._ranks, self._pipes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, context: Any, spec: RankSpec) -> None:
        mine, theirs = context.Pipe()
        _limit_sending(mine)
        rank = context.Process(
            target=_rank, args=(spec, theirs), name=f"ddtree rank {spec.rank}", daemon=True
        )
        self._pipes.append(mine)
        try:
            rank.start()
        finally:
            theirs.close()
        self._ranks.append(rank)

    def _send(self, message: bytes) -> None:
        for index, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(message)
            except BlockingIOError:
                cause = f"rank {index} hangs or is stopped: it took no message for {STEP_S:g} s"
                raise self._fault(None, cause) from None
            except OSError:
                raise self._fault(index, "") from None

    def _collect(
        self,
        wanted: Collection[int],
        kind: bytes,
        stall_s: float,
        limit_s: float,
        tick: Callable[[], object] = lambda: None,
    ) -> dict[int, bytes]:
        """One message of `kind` from each rank of `wanted`; raises EngineLost when any rank is lost."""
        told: dict[int, bytes] = {}
        patience = _Patience(self.pids, stall_s, limit_s)
        sentinels = {rank.sentinel: index for index, rank in enumerate(self._ranks)}
        pipes = {pipe: index for index, pipe in enumerate(self._pipes)}
        while not told.keys() >= set(wanted):
            ready = connection.wait([*pipes, *sentinels], SLICE_S)
            for each in ready:
                if each not in pipes:
                    continue
                index = pipes[each]
                try:
                    message = self._pipes[index].recv_bytes()
                except (EOFError, OSError):
                    raise self._fault(index, "") from None
                if message[:1] == b"E":
                    raise self._fault(index, message[1:].decode(errors="replace"))
                if message[:1] == kind:
                    told[index] = message[1:]
            ended = [sentinels[each] for each in ready if each in sentinels]
            if ended and not any(each in pipes for each in ready):
                raise self._fault(ended[0], "")
            if not ready and patience.over():
                late = ", ".join(str(index) for index in wanted if index not in told)
                raise self._fault(
                    None, f"rank {late} hangs or is stopped: no answer for {patience.waited_s:.1f} s"
                )
            tick()
        return told

    def _fault(self, index: int | None, text: str) -> EngineLost:
        """Ends the gang after a fault of rank `index`, or of none in particular; the error names the first cause."""
        cause = text if index is None else self._cause(index, text)
        self.lost = self.lost or cause
        self._log_output()
        for rank in self._ranks:
            if rank.is_alive():
                rank.kill()
        return EngineLost(cause)

    def _cause(self, index: int, text: str) -> str:
        """What happened first: a rank that was killed, else the error of a rank, else what its peer complains of."""
        said = {index: text or self._last_words(index)}
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            for number, rank in enumerate(self._ranks):
                if rank.exitcode is not None and rank.exitcode < 0:
                    return f"rank {number} was ended by {signal.Signals(-rank.exitcode).name}"
            if said[index] and COMPLAINT not in said[index].lower():
                break
            connection.wait([rank.sentinel for rank in self._ranks if rank.exitcode is None], 0.02)
        said |= {other: self._last_words(other) for other in range(len(self._ranks)) if other != index}
        for number, words in sorted(said.items(), key=lambda each: COMPLAINT in each[1].lower()):
            if words:
                return f"rank {number}: {words}"
        return f"rank {index} ended"

    def _last_words(self, index: int) -> str:
        """The error a rank sent before it ended; empty if it sent none."""
        with contextlib.suppress(EOFError, OSError):
            while self._pipes[index].poll():
                message = self._pipes[index].recv_bytes()
                if message[:1] == b"E":
                    return message[1:].decode(errors="replace")
        return ""

    def _log_output(self) -> None:
        for path in sorted(self._folder.glob("rank*.log")):
            with contextlib.suppress(OSError):
                lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
                for line in lines:
                    LOGGER.warning("%s: %s", path.stem, line)

    def _watch(self) -> None:
        """Asks an idle gang whether it lives; a step finds faults by itself."""
        sentinels = [rank.sentinel for rank in self._ranks]
        while not self._closing.is_set():
            died = connection.wait(sentinels, IDLE_S)
            if self._closing.is_set():
                return
            if not self._lock.acquire(timeout=SLICE_S):
                continue
            try:
                if self._closing.is_set():
                    return
                if self.lost is not None:
                    raise EngineLost(self.lost)
                if died:
                    raise self._fault(sentinels.index(died[0]), "")
                self._send((0).to_bytes(8, "little"))
                self._collect(range(len(self._ranks)), b"P", STALL_S, STEP_S)
            except EngineLost as lost:
                self._on_lost(str(lost))
                return
            except OSError:
                return  # closed meanwhile
            finally:
                self._lock.release()


class _Patience:
    """How long to wait for processes: as long as they work, within a limit, and not while this process was stopped."""

    def __init__(self, pids: Sequence[int], stall_s: float, limit_s: float) -> None:
        self._pids, self._stall_s, self._limit_s = pids, stall_s, limit_s
        self._used = self._processor_s()
        self._at = time.monotonic()
        self._idle_s = self._stopped_s = 0.0
        self.waited_s = 0.0

    def over(self) -> bool:
        """Called after each slice without a sign of life; True once it is no use to wait on."""
        now = time.monotonic()
        # A longer slice means that this process was stopped, and with it most likely the ranks.
        passed = min(now - self._at, 2 * SLICE_S)
        self._at = now
        self.waited_s += passed
        used, states = self._processor_s(), self._states()
        # A rank could go on if other processes left it a processor, or waits for a disk.
        wants = bool(states & set("RD"))
        self._idle_s = self._idle_s + passed if used == self._used and not wants else 0.0
        # Its peer spins in a collective on a GPU, and is never idle.
        self._stopped_s = self._stopped_s + passed if states & set("Tt") else 0.0
        self._used = used
        return max(self._idle_s, self._stopped_s) >= self._stall_s or self.waited_s >= self._limit_s

    def _states(self) -> set[str]:
        """States of all ranks as `proc(5)` letters them."""
        states = set()
        for pid in self._pids:
            with contextlib.suppress(OSError):
                states.add(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
        return states

    def _processor_s(self) -> float | None:
        """Processor time of all ranks so far, as far as the system tells."""
        total = 0.0
        for pid in self._pids:
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                return None
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return total


def new_folder() -> str:
    """A folder for one gang's rendezvous and output; never used twice."""
    return tempfile.mkdtemp(prefix="ddtree-gang-")
