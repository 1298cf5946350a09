"""Draft trees on their way from SGLang's scheduler to who looks at them: sampled, bounded, nothing while nobody looks.

SGLang's answers have room for tokens alone, so trees come as datagrams over a socket in a private folder. A file
beside it names the requests that are looked at; a scheduler's process sends some of their rounds and drops what does
not fit.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLACE = "DDTREE_SGLANG_TREES"
"""Variable of SGLang's processes with the folder; unset: no trees are sent."""
SOCKET, WANTED = "trees", "wanted"
LOOK_S = 10.0
"""A request counts as looked at so long after the last look."""
LOOKED_AT = 8
"""Most requests that are sampled, the last ones looked at."""
EVERY_S = 0.02
"""A scheduler sends at most one round in this time."""
MOST_BYTES = 1 << 20
TAKEN = 256
"""Most rounds taken at once."""


class TreeBox:
    """Where trees arrive: the engine's side. Not for several threads at once."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ddtree-trees-"))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(self.folder / SOCKET))
        self._looks: dict[str, float] = {}
        """When the look at each request ends, the last looked at last."""

    def look(self, names: Sequence[str]) -> None:
        """Has rounds of the requests `names` sent from here on, for some seconds."""
        before = list(self._looks)
        for name in names:
            self._looks.pop(name, None)
            self._looks[name] = time.monotonic() + LOOK_S
        self._tell(before)

    def take(self) -> Iterator[dict[str, Any]]:
        """Rounds that have come, each as `sent_round` says; ends looks that are over."""
        before = list(self._looks)
        for name in [name for name, end in self._looks.items() if end < time.monotonic()]:
            del self._looks[name]
        self._tell(before)
        with contextlib.suppress(BlockingIOError):
            for _ in range(TAKEN):
                yield json.loads(self._socket.recv(MOST_BYTES))

    def close(self) -> None:
        self._socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _tell(self, before: list[str]) -> None:
        """Writes down who is looked at, where that changed."""
        while len(self._looks) > LOOKED_AT:
            del self._looks[next(iter(self._looks))]
        names = sorted(self._looks)
        if names == sorted(before):
            return
        written = self.folder / f"{WANTED}.new"
        written.write_text("\n".join(names), encoding="utf-8")
        written.replace(self.folder / WANTED)


@dataclass(frozen=True)
class Sample:
    """One round of one request on its way to the host."""

    name: str
    index: int
    whole: Any
    """Int64 `[2 + 2 * block + 3 * nodes]`: see `TreeSampler._copied`."""
    log_probs: Any
    nodes: int
    arrived: Any
    """What to ask whether the copies are complete; None: they are."""


class TreeSampler:
    """Sends rounds: the side of a scheduler's process. A step waits for nothing on its account."""

    def __init__(self, folder: str) -> None:
        self._wanted = os.path.join(folder, WANTED)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._place = os.path.join(folder, SOCKET)
        self._names: frozenset[str] = frozenset()
        self._written = 0
        self._step = 0
        self._next = 0.0
        self._sample: Sample | None = None

    def step(self, requests: Sequence[Any], committed: Any, tree: Any, accepted: Any, nodes: int) -> None:
        """After a step: sends the sample that has arrived; takes another one if its time has come.

        `requests`: those of the batch (`rid`), in the order of the rows of `committed [batch]`, `tree` and `accepted`;
        `nodes`: of a tree, root included, those that count.
        """
        self._step += 1
        sample, now = self._sample, time.monotonic()
        if sample is not None:
            if sample.arrived is not None and not sample.arrived.query():
                return
            self._send(sample)
            self._sample = None
        if now < self._next or not self.looked_at():
            return
        rows = [row for row, request in enumerate(requests) if request.rid in self._names]
        if rows:
            row = rows[self._step % len(rows)]
            self._next = now + EVERY_S
            self._sample = self._copied(requests[row].rid, row, committed, tree, accepted, nodes)

    def looked_at(self) -> frozenset[str]:
        """Names of the requests whose rounds are wanted now."""
        try:
            written = os.stat(self._wanted).st_mtime_ns
        except OSError:
            return frozenset()
        if written != self._written:
            self._written = written
            with contextlib.suppress(OSError):
                self._names = frozenset(Path(self._wanted).read_text(encoding="utf-8").split("\n")) - {""}
        return self._names

    def _copied(self, name: str, row: int, committed: Any, tree: Any, accepted: Any, nodes: int) -> Sample:
        import torch

        parts = (
            committed[row : row + 1],
            accepted.lengths[row : row + 1],
            accepted.path[row],
            accepted.token_ids[row],
            tree.token_ids[row, :nodes],
            tree.parents[row, :nodes],
            tree.depths[row, :nodes],
        )
        whole, log_probs = torch.cat([part.to(torch.int64) for part in parts]), tree.log_probs[row, :nodes]
        if not whole.is_cuda:
            return Sample(name, self._step, whole, log_probs.clone(), nodes, None)
        there = [torch.empty_like(each, device="cpu", pin_memory=True) for each in (whole, log_probs)]
        for to, source in zip(there, (whole, log_probs), strict=True):
            to.copy_(source, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return Sample(name, self._step, there[0], there[1], nodes, arrived)

    def _send(self, sample: Sample) -> None:
        with contextlib.suppress(OSError):  # full, too large or gone: it is a sample
            message = json.dumps(sent_round(sample)).encode()
            self._socket.sendto(message, self._place)


def sent_round(sample: Sample) -> dict[str, Any]:
    """A round as it is sent: its request, number, root's position, emitted tokens, accepted path and drafted nodes."""
    numbers, nodes = sample.whole.tolist(), sample.nodes
    committed, length = numbers[:2]
    block = (len(numbers) - 2 - 3 * nodes) // 2
    path, emitted, rest = numbers[2:][:block], numbers[2 + block :][:block], numbers[2 + 2 * block :]
    drafted = [rest[start : start + nodes] for start in range(0, 3 * nodes, nodes)]
    return {
        "id": sample.name,
        "index": sample.index,
        "position": committed,
        "tokens": emitted[:length],
        "path": path[:length],
        "nodes": list(zip(*drafted, sample.log_probs.tolist(), strict=True)),
    }
