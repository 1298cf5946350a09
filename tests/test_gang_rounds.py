"""What a rank is told of whole rounds is what the parent said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed")

import torch  # noqa: E402

from runtime.gang_rounds import GangDevice, RankRounds  # noqa: E402
from runtime.gang_step import RemotePool  # noqa: E402
from runtime.gpu_device import Chunk, HostBatch, RoundResults  # noqa: E402
from runtime.gpu_round import STAMPS, PromptShape, Shape  # noqa: E402
from runtime.kv_cache import Geometry, Pool  # noqa: E402

CPU = torch.device("cpu")
BATCH = 3


@dataclass
class Recorder:
    """Notes what it is given; results of a launch carry its number."""

    block: int = 4
    prefills: tuple[int, ...] = (32,)
    captured: int = 0
    capture_s: float = 0.0
    heard: list[Any] = field(default_factory=list)

    def prepare(self, shape: Shape | PromptShape) -> None:
        self.heard.append(("prepare", shape))

    def upload(self, batch: HostBatch) -> None:
        self.heard.append(("upload", [part.clone() for part in batch.parts()]))

    def launch(self, shape: Shape) -> Callable[[], RoundResults]:
        self.heard.append(("launch", shape))
        number = len(self.heard)
        table = np.arange(shape.batch * 5, dtype=np.int32).reshape(shape.batch, 5) + number
        return lambda: RoundResults(table, tuple(range(number, number + STAMPS)))

    def prompt(self, shape: PromptShape, chunk: Chunk) -> None:
        self.heard.append(("prompt", shape, chunk))

    def first(self) -> int:
        return 151_935


class Wire:
    """In the place of a gang: both ranks get every message, the first one answers."""

    def __init__(self, ranks: list[RankRounds]) -> None:
        self.ranks = ranks

    def tell(self, message: bytes) -> None:
        assert all(rank.run(message) is None for rank in self.ranks)

    def forward(self, message: bytes, answers: int, stall_s: float = 0.0) -> bytes:
        said = [rank.run(message) for rank in self.ranks]
        assert said[answers] is not None
        return said[answers]


@pytest.fixture
def wired() -> tuple[GangDevice, RemotePool, list[Recorder], list[list[Pool]]]:
    recorders = [Recorder(), Recorder()]
    pools = [[Pool(Geometry(2, 1, 4, torch.float32), 64, CPU) for _ in range(2)] for _ in recorders]
    ranks = [
        RankRounds(device, own, BATCH, pinned=False) for device, own in zip(recorders, pools, strict=True)
    ]
    remote = RemotePool(CPU)
    return GangDevice(Wire(ranks), remote, 4, (32,)), remote, recorders, pools  # type: ignore[arg-type]


def test_every_operation_reaches_both_ranks_as_it_was_said(wired: Any) -> None:
    device, _, recorders, _ = wired
    round_shape, chunk_shape = Shape(2, 16, noisy=True, filtered=True), PromptShape(32, True, False, True)
    batch = HostBatch.empty(BATCH, pinned=False)
    batch.state.copy_(torch.arange(batch.state.numel()).view_as(batch.state))
    batch.seeds.copy_(torch.tensor([-(2**63), 2**63 - 1, 7]))
    batch.odds.copy_(torch.tensor([[0.0, 0.7, 1.3], [1.0, 0.9, 0.5], [0.0, 0.1, 0.2]]))
    batch.stops.fill_(-1)
    chunk = Chunk((3, 9, 40, 6, 5, 8, 50), (11, 0, 151_935), -5, (0.1, 0.9, 0.05))
    device.prepare(round_shape)
    device.prepare(round_shape)
    device.prepare(chunk_shape)
    device.upload(batch)
    device.prompt(chunk_shape, chunk)
    assert device.first() == 151_935
    for recorder in recorders:
        assert [each[0] for each in recorder.heard] == ["prepare", "prepare", "upload", "prompt"]
        assert recorder.heard[0][1] == round_shape
        assert recorder.heard[1][1] == chunk_shape
        parts = zip(recorder.heard[2][1], batch.parts(), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in parts)
        assert recorder.heard[3][1:] == (chunk_shape, chunk)


def test_rounds_launched_ahead_are_collected_in_their_order(wired: Any) -> None:
    device, _, recorders, _ = wired
    shape = Shape(2, 8)
    waiting = [device.launch(shape), device.launch(shape)]
    found = [wait() for wait in waiting]
    assert [each.table[0, 0] for each in found] == [1, 2]
    assert [each.table.shape for each in found] == [(2, 5)] * 2
    assert found[1].stamps == tuple(range(2, 2 + STAMPS))
    assert all(len(each.heard) == 2 for each in recorders)


def test_slots_are_moved_on_every_rank_before_the_next_operation(wired: Any) -> None:
    device, remote, _, pools = wired
    expected = []
    for own in pools:
        for pool in own:
            pool.keys.random_(0, 1000)
            kept = Pool(Geometry(2, 1, 4, torch.float32), 64, CPU)
            kept.keys.copy_(pool.keys)
            kept.copy(slice(10, 16), 30, 6)
            kept.copy(torch.tensor([31, 34]), 32, 2)
            expected.append(kept.keys)
    remote.copy(slice(10, 16), 30, 6)
    remote.copy(torch.tensor([31, 34]), 32, 2)
    device.launch(Shape(1, 1))
    device.launch(Shape(1, 1))
    found = [pool.keys for own in pools for pool in own]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
