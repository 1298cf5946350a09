"""Writes small GGUF files for tests, straight from the specification and independently of the reader."""

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30
ALIGNMENT = 32


class Tensor(NamedTuple):
    """Shape with rows first, ggml type number, and the encoded bytes."""

    shape: tuple[int, ...]
    kind: int
    raw: bytes


def f32(array: Any) -> Tensor:
    values = np.asarray(array, "<f4")
    return Tensor(values.shape, F32, values.tobytes())


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(content: Any) -> bytes:
    """A typed metadata value: its type number, then its bytes."""
    if isinstance(content, bool):
        return struct.pack("<I?", 7, content)
    if isinstance(content, int):
        return struct.pack("<II", 4, content)
    if isinstance(content, float):
        return struct.pack("<If", 6, content)
    if isinstance(content, str):
        return struct.pack("<I", 8) + string(content)
    items = [value(each) for each in content]
    kind = items[0][:4] if items else struct.pack("<I", 8)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(each[4:] for each in items)


def gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], version: int = 3) -> bytes:
    """The bytes of a whole file."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(string(key) + value(each) for key, each in metadata.items())
    data = b""
    for name, tensor in tensors.items():
        data += b"\0" * (-len(data) % ALIGNMENT)
        head += string(name) + struct.pack("<I", len(tensor.shape))
        head += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        head += struct.pack("<IQ", tensor.kind, len(data))
        data += tensor.raw
    return head + b"\0" * (-len(head) % ALIGNMENT) + data


def llama_file(seed: int = 0, tied: bool = True, **metadata: Any) -> bytes:
    """A two-layer llama model (hidden 8, 2 heads over 1, vocabulary 4 letters and 2 specials) with a tokenizer."""
    rng = np.random.default_rng(seed)
    hidden, mlp, keys, vocab = 8, 12, 4, 6
    tensors = {
        "token_embd.weight": f32(rng.normal(size=(vocab, hidden))),
        "output_norm.weight": f32(rng.normal(size=hidden)),
    }
    if not tied:
        tensors["output.weight"] = f32(rng.normal(size=(vocab, hidden)))
    shapes = {
        "attn_norm": (hidden,),
        "attn_q": (hidden, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, hidden),
        "ffn_norm": (hidden,),
        "ffn_gate": (mlp, hidden),
        "ffn_up": (mlp, hidden),
        "ffn_down": (hidden, mlp),
    }
    for layer in range(2):
        for part, shape in shapes.items():
            tensors[f"blk.{layer}.{part}.weight"] = f32(rng.normal(size=shape))
    return gguf({**LLAMA_METADATA, **metadata}, tensors)


LLAMA_METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 12,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "ab", "abab"],
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b", "ab ab"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}
