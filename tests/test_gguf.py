"""The GGUF reader: block formats by the specification's formulas, and refusal of every kind of damaged file."""

import struct
from pathlib import Path

import gguf_files
import numpy as np
import pytest
from gguf_files import BF16, F16, Q4_0, Q4_1, Q8_0, Tensor, f32, gguf
from hypothesis import given
from hypothesis import strategies as st

from runtime.gguf import CheckpointError, UnsupportedCheckpoint, read_gguf


def write(folder: Path, content: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return path


def half(number: float) -> float:
    return struct.unpack("<e", struct.pack("<e", number))[0]


def blocks(seed: int, count: int, numbers: int, quants: int) -> list[tuple[list[float], bytes]]:
    rng = np.random.default_rng(seed)
    return [
        ([half(each) for each in rng.normal(size=numbers)], rng.integers(0, 256, quants, np.uint8).tobytes())
        for _ in range(count)
    ]


def pack(parts: list[tuple[list[float], bytes]]) -> bytes:
    return b"".join(struct.pack(f"<{len(numbers)}e", *numbers) + quants for numbers, quants in parts)


def nibbles(quants: bytes) -> list[int]:
    return [each & 15 for each in quants] + [each >> 4 for each in quants]


def test_quantised_blocks_follow_the_specification(tmp_path: Path) -> None:
    four_0, four_1, eight = blocks(1, 6, 1, 16), blocks(2, 6, 2, 16), blocks(3, 6, 1, 32)
    tensors = {
        "four_0": Tensor((3, 64), Q4_0, pack(four_0)),
        "four_1": Tensor((3, 64), Q4_1, pack(four_1)),
        "eight": Tensor((3, 64), Q8_0, pack(eight)),
    }
    file = read_gguf(write(tmp_path, gguf({}, tensors)))
    expected = {
        "four_0": [d * (q - 8) for (d,), quants in four_0 for q in nibbles(quants)],
        "four_1": [d * q + m for (d, m), quants in four_1 for q in nibbles(quants)],
        "eight": [d * q for (d,), quants in eight for q in struct.unpack("<32b", quants)],
    }
    for name, values in expected.items():
        loaded = file.load(name)
        assert loaded.dtype == np.float32 and loaded.shape == (3, 64)
        np.testing.assert_allclose(loaded.ravel(), values, rtol=1e-6, atol=1e-6)


def test_float_tensors_and_metadata_come_back_as_written(tmp_path: Path) -> None:
    values = np.array([[1.5, -2.0, 0.25], [3.0, 0.0, -0.125]], np.float32)
    bf16 = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    tensors = {
        "f32": f32(values),
        "f16": Tensor((2, 3), F16, values.astype("<f2").tobytes()),
        "bf16": Tensor((2, 3), BF16, bf16),
    }
    metadata = {"a": 7, "b": 0.5, "c": "ü", "d": ["x", "é"], "e": [1, 2, 3], "f": True, "g": []}
    for version in (2, 3):
        file = read_gguf(write(tmp_path, gguf(metadata, tensors, version)))
        assert file.metadata == metadata
        for name in tensors:
            np.testing.assert_array_equal(file.load(name), values)
        assert file.load("f32").flags.writeable


def test_each_defect_is_refused_in_one_line(tmp_path: Path) -> None:
    good = gguf({"k": 1}, {"t": f32([1.0, 2.0])})
    huge = 1 << 62
    defects = {
        "empty": b"",
        "not a GGUF": b"PK\x03\x04" + good[4:],
        "version 1 ": good[:4] + struct.pack("<I", 1) + good[8:],
        "tensor count is": good[:8] + struct.pack("<Q", huge) + good[16:],
        "metadata count is": good[:16] + struct.pack("<Q", huge) + good[24:],
        "length of a metadata key": good[:24] + struct.pack("<Q", huge) + good[32:],
        "unknown value type 99": good.replace(struct.pack("<II", 4, 1), struct.pack("<II", 99, 1)),
        "not valid UTF-8": gguf({"key": 1}, {}).replace(b"key", b"\xff\xfeA"),
        "ggml type 12": gguf({}, {"t": Tensor((256,), 12, b"\0" * 144)}),
        "impossible shape [33]": gguf({}, {"t": Tensor((33,), Q8_0, b"\0" * 68)}),
        "impossible shape [0]": gguf({}, {"t": Tensor((0,), 0, b"")}),
        "general.alignment is 3": gguf({"general.alignment": 3}, {"t": f32([1.0])}),
        "truncated: tensor 't'": good[:-4],
        "appears twice": gguf({"a": 1, "b": 1}, {}).replace(gguf_files.string("b"), gguf_files.string("a")),
    }
    for words, content in defects.items():
        with pytest.raises(CheckpointError) as refused:
            read_gguf(write(tmp_path, content))
        message = str(refused.value)
        assert words in message and "model.gguf" in message and "\n" not in message, (words, message)


def test_unknown_quantisation_names_the_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="F32, F16, Q4_0, Q4_1, Q8_0, BF16"):
        read_gguf(write(tmp_path, gguf({}, {"t": Tensor((256,), 14, b"\0" * 210)})))


def test_tensor_offset_outside_the_file_or_unaligned_is_refused(tmp_path: Path) -> None:
    good = gguf({}, {"t": f32([1.0, 2.0])})
    end_of_table = good.index(struct.pack("<QIQ", 2, 0, 0)) + 20
    for offset, words in (
        (1 << 40, "ends at byte"),
        (7, "not a multiple of 32"),
        ((1 << 64) - 32, "ends at byte"),
    ):
        moved = good[: end_of_table - 8] + struct.pack("<Q", offset) + good[end_of_table:]
        with pytest.raises(CheckpointError, match=words):
            read_gguf(write(tmp_path, moved))


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_gguf(path)


@given(data=st.data())
def test_damage_anywhere_in_the_header_never_escapes_as_another_error(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(gguf_files.llama_file())
    header = content.index(b"output_norm")
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(content))))
    path = tmp_path_factory.mktemp("damaged") / "model.gguf"
    path.write_bytes(content[:cut])
    try:
        file = read_gguf(path)
        for name in file.tensors:
            file.load(name)
    except CheckpointError as refused:
        assert "\n" not in str(refused)
