"""A tiny target and a drafter trained on its own continuations, so that drafts are accepted; as SGLang loads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_models import prompt_of, transformers_model, write_drafter, write_target
from torch import Tensor

from runtime.drafter import load_drafter, read_drafter_config
from runtime.train_blocks import BlockTrainer

BLOCK, TAPS = 6, (0, 1)
PROMPTS = tuple(prompt_of(length, seed=3) for length in (5, 9, 14, 23))
"""Unequal lengths."""
KNOWN_TOKENS = 72
"""Tokens of each continuation that the drafter has seen."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class TrainedPair:
    target: Path
    drafter: Path


def write_trained_pair(folder: Path, steps: int = 600) -> TrainedPair:
    """Writes the pair in bfloat16. The drafter is trained until it is often right, not always."""
    target = write_target(
        folder / "target",
        "llama",
        hidden_size=64,
        intermediate_size=96,
        head_dim=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    _round(target)
    drafter = write_drafter(
        folder / "drafter",
        target,
        block_size=BLOCK,
        taps=TAPS,
        head_dim=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=96,
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        layer_types=["full_attention"],
        hidden_act="silu",
        max_position_embeddings=512,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
    )
    _train(target, drafter, steps)
    _round(drafter)
    return TrainedPair(target, drafter)


def _round(folder: Path) -> None:
    """SGLang runs this pair in bfloat16; so are its weights."""
    path = folder / "model.safetensors"
    state = {name: value.bfloat16() for name, value in load_file(path).items()}
    save_file(state, path, metadata={"format": "pt"})


def _train(target: Path, drafter: Path, steps: int) -> None:
    torch.manual_seed(0)
    model = transformers_model(target).float()
    texts = [_continued(model, prompt) for prompt in PROMPTS]
    made = load_drafter(drafter, read_drafter_config(drafter), torch.float32, CPU).train()
    made.requires_grad_(True)
    trainer = BlockTrainer(made)
    optimiser = torch.optim.AdamW(made.parameters(), lr=3e-3, weight_decay=0.0)
    embedding = model.get_input_embeddings().weight.detach()
    head = model.get_output_embeddings().weight.detach()
    for step in range(steps):
        tokens, start = texts[step % len(texts)]
        features = _features(model, tokens)
        last = tokens.shape[1] - BLOCK
        anchors = torch.randint(start - 1, last, (1, 16))
        hidden = trainer(features, embedding, tokens, anchors)
        wanted = tokens[0][anchors[0][:, None] + torch.arange(1, BLOCK)]
        loss = F.cross_entropy((hidden[0] @ head.T).flatten(0, 1), wanted.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    save_file(
        {name: value.detach() for name, value in made.state_dict().items()}, drafter / "model.safetensors"
    )


@torch.no_grad()
def _continued(model: torch.nn.Module, prompt: tuple[int, ...]) -> tuple[Tensor, int]:
    """The target's own greedy text after `prompt`, `[1, tokens]`, and where it begins."""
    tokens = torch.tensor([prompt])
    for _ in range(KNOWN_TOKENS):
        tokens = torch.cat((tokens, model(tokens).logits[:, -1:].argmax(-1)), 1)
    return tokens, len(prompt)


@torch.no_grad()
def _features(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    found = model.model(input_ids=tokens, output_hidden_states=True)
    return torch.cat([found.hidden_states[tap + 1] for tap in TAPS], dim=-1)
