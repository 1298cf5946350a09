"""The pairs that layouts are tried with: the default one, and random ones in real sizes, written in seconds.

A few *frequent* tokens have rows in the head ten times the size of the others, so that a text keeps to them whatever
the context, while the layers decide which one comes next. So a random drafter, which has the target's head, is right
now and then, and everything behind acceptance runs; and two candidates are a near-tie less often than among 150,000.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.models import DEFAULT_MODEL, Checkpoint, open_checkpoint, shipped_drafter
from runtime.prompt_sets import mixed_prompts

SPREAD = 3.0
"""Standard deviation of the logits of frequent tokens."""
RARE = 0.1
"""Size of the other tokens' logits against theirs."""
FREQUENT = 16
SHARP = 3.0
"""Weights of the norms of queries and keys multiply to this, so that attention is about something."""
WRITERS = 8
PROMPT = 96
"""Tokens of a prompt for a random pair."""
DENSE, MIXED = ("single", "tp2", "pp2"), ("single", "tp2", "ep2", "pp2", "tp2ep2")
NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
Draw = Callable[[], Tensor]


@dataclass(frozen=True)
class Dimensions:
    """A target and its drafter by their sizes; `experts` 0 = a dense model, `tied`: the head is the embedding."""

    family: str
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    taps: tuple[int, ...]
    experts: int = 0
    per_token: int = 2
    draft_layers: int = 5
    block: int = 16
    tied: bool = False

    def config(self) -> dict[str, Any]:
        """`config.json` of the target."""
        fields: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family, "hidden_size": self.hidden, "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "vocab_size": self.vocab,
            "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960,
            "tie_word_embeddings": self.tied, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
        }  # fmt: skip
        if self.experts:
            fields |= {
                "num_experts": self.experts, "num_experts_per_tok": self.per_token,
                "moe_intermediate_size": self.mlp, "norm_topk_prob": True,
            }  # fmt: skip
        return fields

    def drafter_config(self) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden, "intermediate_size": self.mlp * max(1, self.per_token * bool(self.experts)),
            "num_hidden_layers": self.draft_layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "rms_norm_eps": 1e-6,
            "rope_theta": 1e6, "vocab_size": self.vocab, "block_size": self.block, "num_target_layers": self.layers,
            "dflash_config": {"target_layer_ids": list(self.taps), "mask_token_id": self.vocab - 1},
        }  # fmt: skip


DIMENSIONS = {
    "qwen3-8b": Dimensions("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, (1, 9, 17, 25, 33)),
    "random-moe-2b": Dimensions("qwen3_moe", 2048, 768, 12, 32, 4, 128, 32768, (1, 5, 9), experts=32),
    "tiny-dense": Dimensions("qwen3", 64, 128, 4, 4, 2, 16, 512, (0, 2), draft_layers=2, block=8),
    "tiny-moe": Dimensions("qwen3_moe", 64, 32, 4, 4, 2, 16, 512, (0, 2), 8, draft_layers=2, block=8),
}
"""By the name of the folder, which evidence knows the model by."""


@dataclass(frozen=True)
class Pair:
    """A target and its drafter; `name` is what evidence calls it."""

    name: str
    model: str
    drafter: str
    real: bool
    """Its drafter was trained for it."""

    @property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(self.model, allow_fetch=True)

    @property
    def layouts(self) -> tuple[str, ...]:
        return MIXED if self.checkpoint.config.get("num_experts") else DENSE


def real_pair(model: str, drafter: str | None) -> Pair:
    """The default pair, by name or as files."""
    found = drafter or str(shipped_drafter(DEFAULT_MODEL))
    return Pair(DEFAULT_MODEL, model, found, True)


def random_pair(name: str, root: Path, device: torch.device) -> Pair:
    target, drafter = write_pair(name, root, device)
    return Pair(name, str(target), str(drafter), False)


def prompts_of(pair: Pair, count: int, below: int) -> list[dict[str, Any]]:
    """`count` prompts: bundled texts for a real pair, else token ids."""
    if pair.real:
        texts = mixed_prompts(-(-count // 3))
        return [texts[i % len(texts)] for i in range(count)]
    draws = random.Random(0)
    return [{"prompt_token_ids": tuple(draws.choices(range(below - 1), k=PROMPT))} for _ in range(count)]


@torch.inference_mode()
def write_pair(name: str, root: Path, device: torch.device) -> tuple[Path, Path]:
    """Folders of target and drafter below `root`, made unless they are there; weights in bfloat16."""
    size, target, drafter = DIMENSIONS[name], root / name, root / f"{name}-drafter"
    if not (drafter / "config.json").is_file():
        _write_folder(target, _target_parts(size, device), size.config())
        _write_tokenizer(target, size.vocab)
        _write_folder(drafter, _drafter_parts(size, device), size.drafter_config())
    return target, drafter


def roomy_folder(need: int) -> Path:
    """A folder in memory with `need` bytes free, made larger where that is allowed; else one for temporary files."""
    shared = Path("/dev/shm")
    if shared.is_dir() and free_bytes(shared) < need:
        resize = ["mount", "-o", f"remount,size={2 * need}", str(shared)]
        subprocess.run(resize, check=False, stderr=subprocess.DEVNULL)
    base = (
        shared if shared.is_dir() and free_bytes(shared) >= need else Path(os.environ.get("TMPDIR", "/tmp"))
    )
    return base / "ddtree-two"


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _target_parts(size: Dimensions, device: torch.device) -> Iterator[list[tuple[str, Tensor, Draw]]]:
    """Shards of (name, placeholder, what draws it): one a layer, one for the rest."""
    import transformers

    config = size.config()
    with torch.device("meta"):
        named = transformers.AutoConfig.for_model(**{k: v for k, v in config.items() if k != "architectures"})
        empty = getattr(transformers, config["architectures"][0])(named).state_dict()
    shards: dict[str, list[tuple[str, Tensor, Draw]]] = {}
    for name, value in empty.items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        shards.setdefault(layer, []).append((name, value, _drawer(name, value, device)))
    yield from shards.values()


def _drafter_parts(size: Dimensions, device: torch.device) -> Iterator[list[tuple[str, Tensor, Draw]]]:
    from runtime.drafter import Drafter, DrafterConfig

    with torch.device("meta"):
        empty = Drafter(DrafterConfig.from_dict(size.drafter_config(), "random")).state_dict()
    yield [(name, value, _drawer(f"draft.{name}", value, device)) for name, value in empty.items()]


def _drawer(name: str, empty: Tensor, device: torch.device) -> Draw:
    """Draws one weight, the same for the same name: outputs of a product are about as large as its inputs."""

    def draw() -> Tensor:
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        value = torch.randn(empty.shape, generator=generator, device=device, dtype=torch.bfloat16)
        if value.dim() == 1:
            sharp = SHARP**0.5 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
            return sharp * (1 + 0.1 * value)
        if name.endswith("embed_tokens.weight"):
            return 0.5 * value
        value *= empty.shape[-1] ** -0.5
        if name == "lm_head.weight":
            value *= SPREAD * RARE
            value[:: max(1, empty.shape[0] // FREQUENT)] /= RARE
        return value

    return draw


def _write_folder(
    folder: Path, shards: Iterator[list[tuple[str, Tensor, Draw]]], config: dict[str, Any]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    parts = list(shards)
    paths = [folder / f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(_write_shard, paths, parts))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _write_shard(path: Path, parts: list[tuple[str, Tensor, Draw]]) -> None:
    """A safetensors file, weight by weight, so that memory holds one of them (format: its README, "Format")."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, empty, _ in parts:
        end = at + empty.numel() * torch.bfloat16.itemsize
        header[name] = {
            "dtype": NAMES[torch.bfloat16],
            "shape": list(empty.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, draw in parts:
            file.write(draw().contiguous().cpu().view(torch.uint8).numpy().data)


def _write_tokenizer(folder: Path, vocab: int) -> None:
    """A tokenizer of bytes, filled up to `vocab` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [f"unused{i}" for i in range(len(alphabet), vocab)]
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words[:vocab])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    template = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(template), encoding="utf-8")
