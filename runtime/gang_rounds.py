"""Whole rounds played by a gang: what the parent tells its ranks, and how a rank does it.

A message is `[op, moves, numbers, words]` in int64, `numbers` numbers of the operation, the moves of KV slots that
happened since the message before (`start, count, sources`; `words` words in all), then its arrays as bytes. All ranks
get all messages in one order and play the same graphs, so their collectives meet; rank 0 answers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from runtime.gang import LOAD_STALL_S, STALL_S, Gang
from runtime.gang_step import Move, RemotePool, make_move
from runtime.gpu_device import RING, Chunk, Device, HostBatch, RoundResults
from runtime.gpu_round import STAMPS, PromptShape, Shape
from runtime.kv_cache import Pool

PREPARE, UPLOAD, LAUNCH, COLLECT, PROMPT, FIRST = range(2, 8)
"""Operations; 0 and 1 are those of `gang_step`."""
_ROUND, _CHUNK = 0, 1
CHUNK_FIELDS = 6
"""Numbers that tell a prompt chunk's size."""


class GangDevice:
    """`gpu_device.Device` over the ranks of a gang."""

    def __init__(self, gang: Gang, pool: RemotePool, block: int, prefills: tuple[int, ...]) -> None:
        """`block` and `prefills`: as the ranks' own devices have them."""
        self.block, self.prefills = block, prefills
        self._gang, self._pool = gang, pool
        self._prepared: set[Shape | PromptShape] = set()
        self._capture_s = 0.0

    @property
    def captured(self) -> int:
        return len(self._prepared)

    @property
    def capture_s(self) -> float:
        return self._capture_s

    def prepare(self, shape: Shape | PromptShape) -> None:
        if shape not in self._prepared:
            began = time.perf_counter()
            self._ask(PREPARE, _fields(shape), LOAD_STALL_S)
            self._prepared.add(shape)
            self._capture_s += time.perf_counter() - began

    def upload(self, batch: HostBatch) -> None:
        self._tell(UPLOAD, [], *(part.numpy() for part in batch.parts()))

    def launch(self, shape: Shape) -> Callable[[], RoundResults]:
        self._tell(LAUNCH, _fields(shape))

        def results_of() -> RoundResults:
            data = self._ask(COLLECT, [])
            stamps = np.frombuffer(data, dtype=np.int64, count=STAMPS)
            table = np.frombuffer(data, dtype=np.int32, offset=stamps.nbytes)
            return RoundResults(table.reshape(shape.batch, -1), tuple(stamps.tolist()))

        return results_of

    def prompt(self, shape: PromptShape, chunk: Chunk) -> None:
        self.prepare(shape)
        given = (*chunk.numbers, chunk.seed)
        odds, ids = np.asarray(chunk.odds, dtype=np.float64), np.asarray(chunk.token_ids, dtype=np.int64)
        self._tell(PROMPT, [*_fields(shape), *given], odds, ids)

    def first(self) -> int:
        return int.from_bytes(self._ask(FIRST, []), "little")

    def scores(self) -> None:
        """Ranks keep theirs."""

    def _tell(self, op: int, numbers: Seq[int], *arrays: np.ndarray) -> None:
        self._gang.tell(_message(op, numbers, self._pool.take_moves(), arrays))

    def _ask(self, op: int, numbers: Seq[int], stall_s: float = STALL_S) -> bytes:
        message = _message(op, numbers, self._pool.take_moves(), ())
        return self._gang.forward(message, answers=0, stall_s=stall_s)


class RankRounds:
    """A rank's side: plays what it is told on its own device."""

    def __init__(self, device: Device, pools: Seq[Pool], max_batch: int, pinned: bool) -> None:
        self._device, self._pools = device, pools
        self._host = HostBatch.empty(max_batch, pinned)
        self._flights: deque[Callable[[], RoundResults]] = deque(maxlen=RING)

    def run(self, message: bytes) -> bytes | None:
        """Does one operation; the answer of those that have one. Raises ValueError for an unknown one."""
        op, moves, count, words = np.frombuffer(message, dtype=np.int64, count=4).tolist()
        given = np.frombuffer(message, dtype=np.int64, count=count + words, offset=32).tolist()
        numbers, rest = given[:count], given[count:]
        for _ in range(moves):
            start, size = rest[:2]
            make_move(Move(start, tuple(rest[2 : 2 + size])), self._pools)
            rest = rest[2 + size :]
        body = message[8 * (4 + count + words) :]
        if op == PREPARE:
            self._device.prepare(_shape(numbers))
            return b"done"
        if op == UPLOAD:
            self._read_batch(body)
            self._device.upload(self._host)
            return None
        if op == LAUNCH:
            self._flights.append(self._device.launch(_round_shape(numbers)))
            return None
        if op == COLLECT:
            results = self._flights.popleft()()
            return np.asarray(results.stamps, dtype=np.int64).tobytes() + results.table.tobytes()
        if op == PROMPT:
            *fields, seed = numbers
            shape, places = _prompt_shape(fields[:CHUNK_FIELDS]), tuple(fields[CHUNK_FIELDS:])
            temperature, top_p, min_p = np.frombuffer(body, dtype=np.float64, count=3).tolist()
            ids = tuple(np.frombuffer(body, dtype=np.int64, offset=24).tolist())
            self._device.prompt(shape, Chunk(places, ids, seed, (temperature, top_p, min_p)))
            return None
        if op == FIRST:
            return self._device.first().to_bytes(8, "little")
        raise ValueError(f"operation {op} is unknown")

    def _read_batch(self, body: bytes) -> None:
        at = 0
        for part in self._host.parts():
            there = part.numpy()
            there[...] = np.frombuffer(body, dtype=there.dtype, count=there.size, offset=at).reshape(
                there.shape
            )
            at += there.nbytes


def _message(op: int, numbers: Seq[int], moves: Seq[Move], arrays: Seq[np.ndarray]) -> bytes:
    flat = [word for move in moves for word in (move.start, len(move.sources), *move.sources)]
    head = np.asarray([op, len(moves), len(numbers), len(flat), *numbers, *flat], dtype=np.int64)
    return head.tobytes() + b"".join(array.tobytes() for array in arrays)


def _fields(shape: Shape | PromptShape) -> list[int]:
    if isinstance(shape, PromptShape):
        return [_CHUNK, shape.rows, shape.last, shape.noisy, shape.context, shape.filtered]
    return [_ROUND, shape.batch, shape.rows, shape.noisy, shape.shared, shape.context, shape.filtered]


def _shape(fields: Seq[int]) -> Shape | PromptShape:
    return _prompt_shape(fields) if fields[0] == _CHUNK else _round_shape(fields)


def _round_shape(fields: Seq[int]) -> Shape:
    _, batch, rows, *flags = fields
    noisy, shared, context, filtered = map(bool, flags)
    return Shape(batch, rows, noisy, shared, context, filtered)


def _prompt_shape(fields: Seq[int]) -> PromptShape:
    _, rows, *flags = fields
    last, noisy, context, filtered = map(bool, flags)
    return PromptShape(rows, last, noisy, context, filtered)
