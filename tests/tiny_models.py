"""Tiny random targets and drafters as real folders: Hugging Face and DFlash checkpoints of some kilobytes."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from runtime.config import RuntimeConfig
from runtime.drafter import Drafter, DrafterConfig
from runtime.gang import RoundsSpec
from runtime.gang_target import GangTarget
from runtime.linear import PlainLinear
from runtime.models import Checkpoint, merge_experts, open_checkpoint

CPU = torch.device("cpu")
TAPS, SLOTS = (0, 2), 256
"""Tapped layers and KV slots of a target in ranks."""
END, OTHER_END, PAD, MASK = "<|end|>", "<|other_end|>", "<|pad|>", "<|mask|>"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def write_tokenizer(folder: Path, vocab_size: int) -> dict[str, int]:
    """A byte-level BPE tokenizer with `vocab_size` tokens, the last four special; returns the special ones' ids.

    Below 260 tokens only the first bytes have one, which is enough for prompts given as ids.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: vocab_size - 4]
    vocabulary = {char: token_id for token_id, char in enumerate(alphabet)}
    merges = []
    pairs = (
        "th",
        "he",
        "in",
        "er",
        "an",
        "re",
        "on",
        "at",
        "en",
        "nd",
        "ti",
        "es",
        "or",
        "te",
        "of",
        "ed",
        "is",
    )
    for pair in pairs:
        if len(vocabulary) < vocab_size - 4:
            vocabulary[pair] = len(vocabulary)
            merges.append((pair[0], pair[1]))
    while len(vocabulary) < vocab_size - 4:
        vocabulary[f"unused{len(vocabulary)}"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken(text, special=True, normalized=False) for text in (END, OTHER_END, PAD, MASK)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"chat_template": TEMPLATE, "eos_token": END, "pad_token": PAD}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return {text: vocab_size - 4 + i for i, text in enumerate((END, OTHER_END, PAD, MASK))}


def write_target(
    folder: Path,
    family: str = "llama",
    *,
    vocab_size: int = 288,
    head_rows: int | None = None,
    seed: int = 0,
    **config: Any,
) -> Path:
    """A random target whose logits have a standard deviation of about 3, as a Hugging Face folder.

    `head_rows` pads embedding and head beyond the tokenizer's `vocab_size`.
    """
    folder.mkdir(parents=True)
    special = write_tokenizer(folder, vocab_size)
    fields: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": head_rows or vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": special[END],
        "pad_token_id": special[PAD],
    }
    if family == "qwen3_moe":
        fields |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
        }
    fields |= config
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [special[END], special[OTHER_END]]})
    )
    state = split_experts(_target_state(fields, seed))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _target_state(fields: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    model = _transformers_model(fields)
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        drawn = torch.randn(value.shape, generator=generator)
        if "norm" in name:
            state[name] = 1 + 0.2 * drawn
        elif value.dim() == 1 or "embed" in name:
            state[name] = 0.5 * drawn
        else:
            state[name] = 1.5 * drawn * value.shape[-1] ** -0.5
    model.load_state_dict(state)
    if fields["tie_word_embeddings"]:
        del state["lm_head.weight"]
        return state
    with torch.inference_mode():
        tokens = torch.randint(0, int(fields["vocab_size"]), (1, 256), generator=generator)
        spread = model(tokens).logits.std()
    state["lm_head.weight"] = state["lm_head.weight"] * (3.0 / float(spread))
    return state


def split_experts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts one by one, as published folders hold them."""
    split: dict[str, Tensor] = {}
    for name, value in state.items():
        layer, _, kind = name.rpartition(".")
        if not layer.endswith(".experts"):
            split[name] = value
            continue
        for i, expert in enumerate(value):
            parts = {"down": expert}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate", "up"), expert.chunk(2), strict=True))
            for part, weight in parts.items():
                split[f"{layer}.{i}.{part}_proj.weight"] = weight.contiguous()
    return split


def _transformers_model(fields: Mapping[str, Any]) -> Any:
    import transformers

    named = {key: value for key, value in fields.items() if key != "architectures"}
    config = transformers.AutoConfig.for_model(**named)
    config._attn_implementation = "eager"
    return getattr(transformers, fields["architectures"][0])(config).eval().requires_grad_(False)


def transformers_model(folder: Path) -> Any:
    """The target in `folder` as transformers' own class with its own attention, float32."""
    model = _transformers_model(json.loads((folder / "config.json").read_text()))
    model.load_state_dict(merge_experts(load_file(folder / "model.safetensors")), strict=False)
    model.tie_weights()
    return model


def write_drafter(
    folder: Path, target: Path, *, block_size: int = 8, taps: Sequence[int] = (0, 1), **config: Any
) -> Path:
    """A random drafter for the target in `target`, in the published DFlash format; None removes a config key."""
    folder.mkdir(parents=True)
    theirs = json.loads((target / "config.json").read_text())
    fields: dict[str, Any] = {
        "hidden_size": theirs["hidden_size"],
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "vocab_size": theirs["vocab_size"],
        "block_size": block_size,
        "num_target_layers": theirs["num_hidden_layers"],
        "dflash_config": {"target_layer_ids": list(taps), "mask_token_id": theirs["pad_token_id"] + 1},
    } | config
    fields = {key: value for key, value in fields.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(fields))
    dflash = {"target_layer_ids": [0], "mask_token_id": 0} | fields["dflash_config"]
    model = Drafter(DrafterConfig.from_dict(fields | {"dflash_config": dflash}, "shape"))
    generator = torch.Generator().manual_seed(7)
    state = {}
    for name, value in model.state_dict().items():
        drawn = torch.randn(value.shape, generator=generator)
        state[name] = 1 + 0.2 * drawn if value.dim() == 1 else drawn * value.shape[1] ** -0.5
    save_file(state, folder / "model.safetensors")
    return folder


def tiny_config(target: Path, drafter: Path | str = "none", **changes: Any) -> RuntimeConfig:
    """A configuration of one thread on the CPU in float32."""
    fields: dict[str, Any] = {
        "model": str(target),
        "drafter": str(drafter),
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "linear": "plain",
        "tree_budget": 8,
        "max_tokens": 24,
    }
    return RuntimeConfig(**(fields | changes))


def prompt_of(length: int, seed: int = 0, below: int = 280) -> tuple[int, ...]:
    """A prompt of `length` token ids under `below`, the same for the same `seed`."""
    return tuple(random.Random(1000 * seed + length).randrange(below) for _ in range(length))


def gang_target(
    checkpoint: Checkpoint | Path,
    layout: str,
    dtype: torch.dtype = torch.float32,
    rounds: RoundsSpec | None = None,
    slots: int = SLOTS,
    taps: tuple[int, ...] = TAPS,
) -> GangTarget:
    """The target `checkpoint`, or that of a folder, in ranks on this CPU of one thread each."""
    return GangTarget(
        open_checkpoint(str(checkpoint)) if isinstance(checkpoint, Path) else checkpoint,
        layout,
        slots=slots,
        taps=taps,
        dtype=dtype,
        device=CPU,
        linear=PlainLinear,
        linear_setting="plain",
        draft_linear=None,
        threads=1,
        tick=lambda: None,
        rounds=rounds,
    )
