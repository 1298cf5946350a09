"""KV slots of target and drafter: where every committed token's keys and values live.

A slot is the place of one token over all layers; target and drafter use the same slot numbers. A request owns one
*extent* of consecutive slots, so its prefix is a view and never gathered. Extents are taken first-fit and given back
whole: free + owned = all, which `check_integrity` proves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """Shape of one model's keys and values."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_slot(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class Extent:
    """`size` consecutive slots from `start`."""

    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


class Pool:
    """Keys and values `[layers, kv_heads, slots, head_dim]` of one model."""

    def __init__(self, geometry: Geometry, slots: int, device: torch.device) -> None:
        self.device = device
        shape = (geometry.layers, geometry.kv_heads, slots, geometry.head_dim)
        # Zeros are written, so that memory is taken here at once and not page by page while requests run.
        self.keys = torch.empty(shape, dtype=geometry.dtype, device=device).zero_()
        self.values = torch.empty(shape, dtype=geometry.dtype, device=device).zero_()

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Stores `[kv_heads, rows, head_dim]` at slots `start ..`."""
        rows = keys.shape[-2]
        self.keys[layer, :, start : start + rows] = keys
        self.values[layer, :, start : start + rows] = values

    def view(self, layer: int, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[kv_heads, length, head_dim]` from slot `start`, without a copy."""
        return self.keys[layer, :, start : start + length], self.values[layer, :, start : start + length]

    def copy(self, source: Tensor | slice, start: int, rows: int) -> None:
        """Copies slots `source` (ascending) to `start ..`, over all layers."""
        self.keys[:, :, start : start + rows] = self.keys[:, :, source].clone()
        self.values[:, :, start : start + rows] = self.values[:, :, source].clone()


class KVCache:
    """The slot allocator and the two pools it is for. `drafter` is None where nothing is drafted."""

    def __init__(
        self,
        target: Geometry | Pool,
        drafter: Geometry | None,
        slots: int,
        device: torch.device,
        scratch: int = 0,
    ) -> None:
        """`target`: a pool where other processes hold the target's slots. `scratch` more belong to nobody: rows that do
        not count are written there (`gpu_round.py`).
        """
        self.slots = slots
        self.target = target if isinstance(target, Pool) else Pool(target, slots + scratch, device)
        self.drafter = Pool(drafter, slots + scratch, device) if drafter else None
        self._free: list[Extent] = [Extent(0, slots)]

    @property
    def free_slots(self) -> int:
        return sum(extent.size for extent in self._free)

    def allocate(self, size: int) -> Extent | None:
        """The first free run of `size` slots, or None if there is none that long."""
        for index, run in enumerate(self._free):
            if run.size >= size:
                rest = Extent(run.start + size, run.size - size)
                self._free[index : index + 1] = [rest] if rest.size else []
                return Extent(run.start, size)
        return None

    def free(self, extent: Extent) -> None:
        """Gives an extent back and joins it with its free neighbours."""
        merged: list[Extent] = []
        for run in sorted([*self._free, extent], key=lambda run: run.start):
            if merged and merged[-1].end > run.start:
                raise ValueError(f"slots {run.start} to {merged[-1].end - 1} freed twice")
            if merged and merged[-1].end == run.start:
                merged[-1] = Extent(merged[-1].start, merged[-1].size + run.size)
            else:
                merged.append(run)
        self._free = merged

    def shrink(self, extent: Extent, size: int) -> Extent:
        """Frees all but the first `size` slots of an extent and returns what is left."""
        if size >= extent.size:
            return extent
        self.free(Extent(extent.start + size, extent.size - size))
        return Extent(extent.start, size)

    def copy_prefix(self, source: Extent, destination: Extent, length: int) -> None:
        """Copies the first `length` slots of one extent to another, target and drafter."""
        for pool in self._pools():
            pool.copy(slice(source.start, source.start + length), destination.start, length)

    def keep_path(self, extent: Extent, committed_len: int, path: list[int]) -> None:
        """Compacts the target's scratch rows: node `path[i]` of the tree moves to position `committed_len + i`.

        Tree rows stand at `committed_len + node`; path indices ascend, and node `path[i] >= i`, so rows move down.
        """
        if path == list(range(len(path))):
            return
        base = extent.start + committed_len
        source = torch.tensor([base + node for node in path], device=self.target.device)
        self.target.copy(source, base, len(path))

    def check_integrity(self, owned: Iterable[Extent]) -> None:
        """Raises AssertionError unless free and `owned` extents tile all slots exactly once."""
        position = 0
        for run in sorted([*self._free, *owned], key=lambda run: run.start):
            assert run.start == position, f"slots leak or overlap at slot {min(run.start, position)}"
            position = run.end
        assert position == self.slots, f"{self.slots - position} slots are neither free nor owned"

    def _pools(self) -> list[Pool]:
        return [self.target] if self.drafter is None else [self.target, self.drafter]
