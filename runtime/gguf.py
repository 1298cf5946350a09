"""Reader of GGUF model files (versions 2 and 3): header by `struct`, tensors by numpy from a memory map.

Layout and block formats follow the GGUF specification of the ggml project (docs/gguf.md) and ggml's
`block_q4_0`, `block_q4_1`, `block_q8_0`. Every count, length and offset is checked against the file's size
before it is used, and nothing in the file is ever executed.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from runtime.rejection import CheckpointError as CheckpointError

_BLOCK = 32
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 16
_DEFAULT_ALIGNMENT = 32
_KEY_BYTES_MIN = 8 + 4 + 1
_TENSOR_BYTES_MIN = 8 + 4 + 8 + 4 + 8

_SCALARS: dict[int, str] = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9


class UnsupportedCheckpoint(CheckpointError):
    """An intact checkpoint of a kind that this runtime refuses."""

    exit_code = 3


@dataclass(frozen=True)
class TensorKind:
    """One ggml tensor type: elements and bytes per block, and how a run of blocks becomes float32."""

    name: str
    block_elements: int
    block_bytes: int
    decode: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies: `shape` with rows first, `offset` in bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    kind: TensorKind
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """An opened GGUF file: `metadata` as plain Python values, `tensors` by name, the bytes memory-mapped."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data: mmap.mmap = field(repr=False, compare=False)

    def load(self, name: str) -> np.ndarray:
        """Return tensor `name` dequantised to a fresh, writable float32 array of its shape."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"{self.path}: has no tensor {name!r}; the file is incomplete, fetch it again"
            )
        raw = np.frombuffer(self.data, np.uint8, tensor.size_bytes, tensor.offset)
        return tensor.kind.decode(raw).reshape(tensor.shape)


def _decode_f32(raw: np.ndarray) -> np.ndarray:
    return raw.view("<f4").astype(np.float32)


def _decode_f16(raw: np.ndarray) -> np.ndarray:
    return raw.view("<f2").astype(np.float32)


def _decode_bf16(raw: np.ndarray) -> np.ndarray:
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


_Q4_0 = np.dtype([("scale", "<f2"), ("quants", "u1", _BLOCK // 2)])
_Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("quants", "u1", _BLOCK // 2)])
_Q8_0 = np.dtype([("scale", "<f2"), ("quants", "i1", _BLOCK)])


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """`[blocks, 16]` bytes -> `[blocks, 32]` float32: low nibbles are elements 0-15, high ones 16-31."""
    out = np.empty((len(packed), _BLOCK), np.float32)
    out[:, : _BLOCK // 2] = packed & 15
    out[:, _BLOCK // 2 :] = packed >> 4
    return out


def _decode_q4_0(raw: np.ndarray) -> np.ndarray:
    blocks = raw.view(_Q4_0)
    out = _nibbles(blocks["quants"])
    out -= 8
    out *= blocks["scale"].astype(np.float32)[:, None]
    return out


def _decode_q4_1(raw: np.ndarray) -> np.ndarray:
    blocks = raw.view(_Q4_1)
    out = _nibbles(blocks["quants"])
    out *= blocks["scale"].astype(np.float32)[:, None]
    out += blocks["minimum"].astype(np.float32)[:, None]
    return out


def _decode_q8_0(raw: np.ndarray) -> np.ndarray:
    blocks = raw.view(_Q8_0)
    out = blocks["quants"].astype(np.float32)
    out *= blocks["scale"].astype(np.float32)[:, None]
    return out


_KINDS: dict[int, TensorKind] = {
    0: TensorKind("F32", 1, 4, _decode_f32),
    1: TensorKind("F16", 1, 2, _decode_f16),
    2: TensorKind("Q4_0", _BLOCK, _Q4_0.itemsize, _decode_q4_0),
    3: TensorKind("Q4_1", _BLOCK, _Q4_1.itemsize, _decode_q4_1),
    8: TensorKind("Q8_0", _BLOCK, _Q8_0.itemsize, _decode_q8_0),
    30: TensorKind("BF16", 1, 2, _decode_bf16),
}


@dataclass
class _Cursor:
    """A read position in the mapped file; each read is checked against the end first."""

    path: Path
    data: mmap.mmap
    at: int = 0

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {what} (at byte {self.at}); the file is damaged, fetch or copy it again"
        )

    def take(self, size: int, what: str) -> bytes:
        if size > len(self.data) - self.at:
            raise self.fail(f"truncated: {what} needs {size} bytes, {len(self.data) - self.at} are left")
        raw = self.data[self.at : self.at + size]
        self.at += size
        return raw

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code), what))[0]

    def count(self, what: str, smallest: int) -> int:
        """Read a 64-bit count of items of at least `smallest` bytes; refuse one that the file cannot hold."""
        count: int = self.scalar("<Q", what)
        if count * smallest > len(self.data) - self.at:
            raise self.fail(f"{what} is {count}, more than the file can hold")
        return count

    def string(self, what: str) -> str:
        raw = self.take(self.count(f"length of {what}", 1), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not valid UTF-8") from None

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what)
        raise self.fail(f"{what} has the unknown value type {kind}")

    def array(self, what: str) -> list[Any]:
        kind = self.scalar("<I", f"item type of {what}")
        if kind == _STRING:
            return [self.string(what) for _ in range(self.count(f"length of {what}", 8))]
        if kind not in _SCALARS:
            raise self.fail(f"{what} is an array of the unsupported type {kind}")
        code = _SCALARS[kind]
        count = self.count(f"length of {what}", struct.calcsize(code))
        dtype = np.dtype("?" if code == "<?" else code)
        values: list[Any] = np.frombuffer(self.take(count * dtype.itemsize, what), dtype).tolist()
        return values


def read_gguf(path: str | Path) -> GgufFile:
    """Open a GGUF file, parse and check its header; tensors are read when `GgufFile.load` asks for them.

    Raises:
        CheckpointError: missing, truncated, other format or version, impossible counts, unknown types, or a
            tensor outside the file; one line naming the file, what is wrong and the remedy.
    """
    path = Path(path)
    cursor = _Cursor(path, _map_file(path))
    if cursor.take(4, "the magic number") != b"GGUF":
        raise CheckpointError(f"{path}: not a GGUF file (it does not start with 'GGUF'); give a .gguf file")
    version = cursor.scalar("<I", "the version")
    if version not in (2, 3):
        raise UnsupportedCheckpoint(
            f"{path}: GGUF version {version} is not supported; convert it to version 3 (little-endian)"
        )
    tensor_count = cursor.count("tensor count", _TENSOR_BYTES_MIN)
    key_count = cursor.count("metadata count", _KEY_BYTES_MIN)
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} appears twice")
        metadata[key] = cursor.value(cursor.scalar("<I", f"type of {key!r}"), repr(key))
    tensors = _read_tensor_table(cursor, tensor_count, _alignment(cursor, metadata))
    return GgufFile(path, version, metadata, tensors, cursor.data)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); check the path and its permissions"
        ) from None
    except ValueError:
        raise CheckpointError(f"{path}: the file is empty; fetch or copy it again") from None


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment % 8 or not 8 <= alignment <= _MAX_ALIGNMENT:
        raise cursor.fail(f"general.alignment is {alignment!r}, not a multiple of 8 up to {_MAX_ALIGNMENT}")
    return alignment


def _read_tensor_table(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    """Read `count` tensor descriptions; their offsets count from the aligned end of this table."""
    relative: dict[str, GgufTensor] = {}
    for _ in range(count):
        tensor = _read_tensor_info(cursor, alignment)
        if tensor.name in relative:
            raise cursor.fail(f"tensor {tensor.name!r} appears twice")
        relative[tensor.name] = tensor
    base = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, tensor in relative.items():
        offset = base + tensor.offset
        end, size = offset + tensor.size_bytes, len(cursor.data)
        if end > size:
            raise cursor.fail(f"truncated: tensor {name!r} ends at byte {end}, the file at {size}")
        tensors[name] = GgufTensor(name, tensor.shape, tensor.kind, offset, tensor.size_bytes)
    return tensors


def _read_tensor_info(cursor: _Cursor, alignment: int) -> GgufTensor:
    name = cursor.string("a tensor name")
    dims = cursor.scalar("<I", f"dimensions of {name!r}")
    if not 1 <= dims <= _MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} has {dims} dimensions, 1 to {_MAX_DIMS} are possible")
    # GGUF lists the contiguous dimension first; numpy and torch list it last.
    shape = tuple(reversed(struct.unpack(f"<{dims}Q", cursor.take(8 * dims, f"shape of {name!r}"))))
    type_id = cursor.scalar("<I", f"type of {name!r}")
    offset = cursor.scalar("<Q", f"offset of {name!r}")
    kind = _KINDS.get(type_id)
    if kind is None:
        known = ", ".join(each.name for each in _KINDS.values())
        raise UnsupportedCheckpoint(
            f"{cursor.path}: tensor {name!r} has ggml type {type_id}, which is not supported;"
            f" use a file quantised as one of {known}, or a Hugging Face folder"
        )
    if 0 in shape or shape[-1] % kind.block_elements:
        raise cursor.fail(f"tensor {name!r} of type {kind.name} has the impossible shape {list(shape)}")
    if offset % alignment:
        raise cursor.fail(f"tensor {name!r} has offset {offset}, not a multiple of {alignment}")
    return GgufTensor(name, shape, kind, offset, prod(shape) // kind.block_elements * kind.block_bytes)
