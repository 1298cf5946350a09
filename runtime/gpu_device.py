"""One device's side of decode rounds: captured graphs, the buffers between host and device, and what is in flight.

`gpu_graphs.GraphRounds` decides what is played and keeps the sequences; a `RoundDevice` only plays it. So the same
device can stand in another process, where it is one rank of several (`gang_rounds.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from runtime.gpu_round import CHUNK, STAMPS, STOPS, GpuRound, PromptShape, Shape
from runtime.round import Models

RING = 3
"""Host buffers: one being read, one in flight, one to spare."""


@dataclass(frozen=True)
class HostBatch:
    """What the device is told of a batch, one entry a sequence; rows as `GpuRound` names them."""

    state: Tensor
    seeds: Tensor
    odds: Tensor
    stops: Tensor

    @staticmethod
    def empty(max_batch: int, pinned: bool) -> HostBatch:
        def make(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=pinned)

        return HostBatch(
            make((9, max_batch), torch.int32),
            make((max_batch,), torch.int64),
            make((3, max_batch), torch.float32),
            make((max_batch, STOPS), torch.int32),
        )

    def parts(self) -> tuple[Tensor, ...]:
        return self.state, self.seeds, self.odds, self.stops


@dataclass(frozen=True)
class Chunk:
    """A chunk of a prompt: `numbers` as `GpuRound.prompt` names them, the tokens, and how the first one is chosen
    (`odds` as in `GpuRound`)."""

    numbers: tuple[int, ...]
    token_ids: tuple[int, ...]
    seed: int
    odds: tuple[float, float, float]


@dataclass(frozen=True)
class RoundResults:
    """Results `[batch, words]` of a round, int32 (`accept_kernel` says which), and the device's clock by stage, ns."""

    table: np.ndarray
    stamps: tuple[int, ...]


class Device(Protocol):
    """What plays rounds; calls return before the device has finished, unless they say otherwise."""

    @property
    def block(self) -> int:
        """Positions of a draft block, root included."""

    @property
    def prefills(self) -> tuple[int, ...]:
        """Sizes of captured prompt chunks."""

    @property
    def captured(self) -> int:
        """Graphs captured so far."""

    @property
    def capture_s(self) -> float:
        """Seconds spent compiling and capturing so far."""

    def prepare(self, shape: Shape | PromptShape) -> None:
        """Compiles and captures `shape`, if it is not yet; the device must have nothing in flight."""

    def upload(self, batch: HostBatch) -> None:
        """The state of the batch that later rounds play."""

    def launch(self, shape: Shape) -> Callable[[], RoundResults]:
        """Plays one round; what is returned waits for its results."""

    def prompt(self, shape: PromptShape, chunk: Chunk) -> None:
        """Plays a chunk of a prompt."""

    def first(self) -> int:
        """Waits for the token that the last chunk chose."""

    def scores(self) -> Tensor | None:
        """Scores `[vocab]` that the last filtered chunk chose from, noise apart; None where they are out of reach."""


class RoundDevice:
    """`Device` in this process; belongs to one thread."""

    def __init__(self, models: Models, max_batch: int, positions: int, chunk: int = CHUNK) -> None:
        """`positions`: most positions of a sequence, slots kept in reserve included; `chunk` as in `GpuRound`."""
        self._cuda = models.target.device.type == "cuda"
        self._round = GpuRound(models, max_batch, positions, timed=self._cuda, chunk=chunk)
        self.block, self.prefills = self._round.block, self._round.prefills
        self._graphs: dict[Shape | PromptShape, Callable[[], object]] = {}
        self._launches = 0
        self._ring = [self._pinned(self._round.out.numel(), torch.int32) for _ in range(RING)]
        self._stamps = [self._pinned(STAMPS, torch.int64) for _ in range(RING)]
        self._numbers = self._pinned(self._round.prompt_state.numel(), torch.int32)
        self._odds = self._pinned((3, 1), torch.float32)
        self._prompt_ids = self._pinned(self.prefills[-1], torch.int32)
        self._first = self._pinned(1, torch.int32)
        self._prompt_read: Callable[[], object] = _nothing
        """Waits until the device has read the last prompt chunk's host buffers."""
        self._capture_s = 0.0

    @property
    def captured(self) -> int:
        return len(self._graphs)

    @property
    def capture_s(self) -> float:
        return self._capture_s

    @torch.inference_mode()
    def prepare(self, shape: Shape | PromptShape) -> None:
        self._graph(shape)

    @torch.inference_mode()
    def upload(self, batch: HostBatch) -> None:
        there = (self._round.state, self._round.seeds, self._round.odds, self._round.stops)
        for device, host in zip(there, batch.parts(), strict=True):
            device.copy_(host, non_blocking=True)

    @torch.inference_mode()
    def launch(self, shape: Shape) -> Callable[[], RoundResults]:
        self._graph(shape)()
        place = self._launches % RING
        self._launches += 1
        results = self._round.results(shape)
        host = self._ring[place][: results.numel()].view(results.shape)
        host.copy_(results, non_blocking=True)
        stamps = self._stamps[place]
        if self._cuda:
            stamps.copy_(self._round.stamps, non_blocking=True)
        done = self._mark()

        def results_of() -> RoundResults:
            done()
            return RoundResults(host.numpy().copy(), tuple(stamps.tolist()))

        return results_of

    @torch.inference_mode()
    def prompt(self, shape: PromptShape, chunk: Chunk) -> None:
        graph, device = self._graph(shape), self._round
        self._prompt_read()
        self._numbers.numpy()[:] = chunk.numbers
        self._odds.numpy()[:, 0] = chunk.odds
        self._prompt_ids.numpy()[: len(chunk.token_ids)] = chunk.token_ids
        device.prompt_state.copy_(self._numbers, non_blocking=True)
        device.prompt_ids[: shape.rows].copy_(self._prompt_ids[: shape.rows], non_blocking=True)
        if shape.last:
            device.prompt_seed.fill_(chunk.seed)
            device.prompt_odds.copy_(self._odds, non_blocking=True)
        self._prompt_read = self._mark()
        graph()

    @torch.inference_mode()
    def first(self) -> int:
        self._first.copy_(self._round.prompt_choice, non_blocking=True)
        self._mark()()
        return int(self._first[0])

    @torch.inference_mode()
    def scores(self) -> Tensor | None:
        return self._round.scores.clone()

    def _graph(self, shape: Shape | PromptShape) -> Callable[[], object]:
        """Replays a round or a prompt chunk; captured at first use, on idle rows, so that no state is touched."""
        if shape not in self._graphs:
            began = time.perf_counter()

            def enqueue() -> None:
                if isinstance(shape, PromptShape):
                    self._round.enqueue_prompt(shape)
                else:
                    self._round.enqueue(shape)

            self._graphs[shape] = self._captured(enqueue) if self._cuda else enqueue
            self._capture_s += time.perf_counter() - began
        return self._graphs[shape]

    def _captured(self, enqueue: Callable[[], None]) -> Callable[[], object]:
        device = self._round
        held = device.state.clone()
        device.rest()
        enqueue()  # compiles what is new; nothing may compile under capture
        graph = torch.cuda.CUDAGraph()
        # Thread-local: a watchdog of a process group may ask the driver for events meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            enqueue()
        device.state.copy_(held)
        return graph.replay

    def _mark(self) -> Callable[[], object]:
        """Waits, when called, for what has been given to the device until now."""
        if not self._cuda:
            return _nothing
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def _pinned(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=self._cuda)


def _nothing() -> None:
    """A CPU has finished when the call returns."""
