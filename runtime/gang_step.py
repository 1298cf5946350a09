"""One forward pass as a packed int64 message to all ranks, and what the answering rank sends back.

A message is `[op, rows, segments, moves]`, then per segment `slot_start, prefix_len, rows`, then token ids and
positions `[rows]`, then per move `start, count, sources [count]`, then the segments' masks as bits, row by row, each
padded to whole words. Moves are copies of KV slots that happened since the pass before: accepted paths that were
compacted, prefixes that were reused. Ranks decide nothing, so they cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.attention import Segment, Step
from runtime.kv_cache import Pool

PING, FORWARD = 0, 1
ANSWER, PONG, ERROR, READY = b"A", b"P", b"E", b"R"
"""First byte of a rank's message."""


@dataclass(frozen=True)
class Move:
    """Slots `sources`, ascending, are copied to `start ..`."""

    start: int
    sources: tuple[int, ...]


@dataclass(frozen=True)
class PackedStep:
    """A forward pass as a rank reads it."""

    token_ids: Tensor
    positions: Tensor
    segments: tuple[Segment, ...]
    moves: tuple[Move, ...]


class RemotePool(Pool):
    """The parent's view of KV slots that the ranks hold: it remembers which are to be copied before the next pass."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._moves: list[Move] = []

    def copy(self, source: Tensor | slice, start: int, rows: int) -> None:
        slots = range(source.start, source.stop) if isinstance(source, slice) else source.tolist()
        self._moves.append(Move(start, tuple(slots)))

    def take_moves(self) -> tuple[Move, ...]:
        """The copies since the last call."""
        moves, self._moves = tuple(self._moves), []
        return moves


def pack(token_ids: Tensor, positions: Tensor, segments: Seq[Segment], moves: Seq[Move]) -> bytes:
    """The message of one forward pass."""
    words: list[int] = [FORWARD, token_ids.shape[0], len(segments), len(moves)]
    for segment in segments:
        words += (segment.slot_start, segment.prefix_len, segment.rows)
    words += token_ids.tolist()
    words += positions.tolist()
    for move in moves:
        words += (move.start, len(move.sources), *move.sources)
    masks = [_bits(segment.mask) for segment in segments]
    return np.asarray(words, dtype=np.int64).tobytes() + b"".join(masks)


def unpack(message: bytes, device: torch.device) -> PackedStep:
    """What `pack` packed, on `device`; raises ValueError for anything else."""
    words = np.frombuffer(message, dtype=np.int64)
    op, rows, count, move_count = (int(word) for word in words[:4])
    if op != FORWARD:
        raise ValueError(f"operation {op} is unknown")
    at = 4 + 3 * count
    shapes = words[4:at].reshape(count, 3).tolist()
    token_ids, positions = (
        torch.from_numpy(words[at + i * rows : at + (i + 1) * rows].copy()) for i in (0, 1)
    )
    at += 2 * rows
    moves = []
    for _ in range(move_count):
        start, length = int(words[at]), int(words[at + 1])
        moves.append(Move(start, tuple(words[at + 2 : at + 2 + length].tolist())))
        at += 2 + length
    segments = []
    first = 0
    positions = positions.to(device)
    for slot_start, prefix_len, own in shapes:
        width = _mask_words(own)
        mask = np.unpackbits(words[at : at + width].view(np.uint8), count=own * own).reshape(own, own)
        at += width
        allowed = torch.from_numpy(mask.astype(bool)).to(device)
        segments.append(Segment(slot_start, prefix_len, own, allowed, positions[first : first + own]))
        first += own
    return PackedStep(token_ids.to(device), positions, tuple(segments), tuple(moves))


def step_of(packed: PackedStep, pools: Seq[Pool]) -> Step:
    """Makes the moves of `packed` in `pools`, the target's first, and returns its pass over that one."""
    for move in packed.moves:
        make_move(move, pools)
    return Step.of(pools[0], packed.segments)


def make_move(move: Move, pools: Seq[Pool]) -> None:
    """Copies the slots of `move` in `pools`."""
    for pool in pools:
        pool.copy(torch.tensor(move.sources, device=pool.device), move.start, len(move.sources))


def to_bytes(tensor: Tensor) -> bytes:
    """The values of a tensor of any type."""
    return tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def from_bytes(data: bytes, dtype: torch.dtype, width: int, device: torch.device) -> Tensor:
    """Values `[rows, width]` as `to_bytes` gave them."""
    return torch.frombuffer(bytearray(data), dtype=dtype).view(-1, width).to(device)


def _mask_words(rows: int) -> int:
    return -(-rows * rows // 64)


def _bits(mask: Tensor) -> bytes:
    bits = np.packbits(mask.cpu().numpy().reshape(-1))
    return bits.tobytes().ljust(8 * _mask_words(mask.shape[0]), b"\0")
