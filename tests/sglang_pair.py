"""A tiny target and a drafter trained on its own continuations, so that drafts are accepted; as SGLang loads them.

The drafter is taught to put another token before the right one for every fourth token id: a chain ends there, a tree
goes on through the second child, so trees must accept more than chains. For every ninth id it is taught another token
alone, so that some rounds accept nothing.

What SGLang emits in bfloat16 is judged token by token by the same target in float32, through transformers.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_models import transformers_model, write_drafter, write_target
from torch import Tensor

from runtime.drafter import load_drafter, read_drafter_config
from runtime.train_blocks import BlockTrainer

BLOCK, TAPS = 6, (0, 1)
KNOWN_TOKENS = 44
"""Tokens of each continuation that the drafter has seen."""
PROMPTS = tuple(
    tuple(random.Random(1000 * seed + length).choices(range(280), k=length))
    for length, seed in ((5, 862), (9, 117), (14, 2543), (23, 407))
)
"""Unequal lengths. In their first 44 tokens, most of them different, bfloat16 and float32 agree by 0.12 or more."""
SECOND, UNKNOWN, DECOY_SHARE = 4, 9, 0.6
"""Ids divisible by the first come second, after the next id, which has this share; by the second, not at all."""
TIE, TIES = 0.45, 0.04
"""Logits this close may be chosen either way, in so large a share of the tokens.

What bfloat16 does to this target by itself: over 3,584 tokens of its own bfloat16 text transformers' float32 disagrees
with 3.7 in 100, and the 99.9th percentile of the difference of a logit is 0.44. An untrained target has more near-ties
than a trained one, so the 1 in 100 that holds for those cannot be asked of it.
"""
EDGE = 0.05
"""The same for the mass at which a filter cuts."""
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
        loss = _taught((hidden[0] @ head.T).flatten(0, 1), wanted.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    save_file(
        {name: value.detach() for name, value in made.state_dict().items()}, drafter / "model.safetensors"
    )


def _taught(logits: Tensor, wanted: Tensor) -> Tensor:
    """The loss of `logits [rows, vocab]` against `wanted [rows]`, or against both it and the token put before it."""
    share = torch.where(wanted % SECOND == 0, DECOY_SHARE, 0.0)
    share = torch.where(wanted % UNKNOWN == 0, 1.0, share)
    decoys = (wanted + 1) % logits.shape[-1]
    right, wrong = (F.cross_entropy(logits, each, reduction="none") for each in (wanted, decoys))
    return ((1 - share) * right + share * wrong).mean()


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


class Judge:
    """The target in float32, which says how far each token of a text is from its choice."""

    def __init__(self, target: Path) -> None:
        self._model = transformers_model(target).float()

    @torch.no_grad()
    def gaps(
        self,
        prompt: tuple[int, ...],
        text: tuple[int, ...],
        temperature: float = 0.0,
        seed: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> list[float]:
        """In logits, by how much each token falls short of the best one; infinite for one that the filters leave out.

        At a temperature above 0 the noise is that of SGLang's seeded sampler. A token at a filter's edge may be in or
        out of it.
        """
        logits = self._model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
        chosen = torch.tensor(text)[:, None]
        if temperature == 0.0:
            return (logits.amax(-1) - logits.gather(1, chosen)[:, 0]).tolist()
        probs = torch.softmax(logits / temperature, -1)
        before = (probs[:, None, :] * (probs[:, None, :] > probs[:, :, None])).sum(-1)
        best = probs.amax(-1, keepdim=True)
        inside = (before <= top_p - EDGE) & (probs >= min_p * best * (1 + EDGE))
        allowed = (before <= top_p + EDGE) & (probs >= min_p * best * (1 - EDGE))
        scores = logits + temperature * torch.from_numpy(seeded_noise(seed, len(prompt) - 1, *logits.shape))
        top = scores.masked_fill(~inside, -torch.inf).amax(-1)
        short = top - scores.gather(1, chosen)[:, 0]
        return short.masked_fill(~allowed.gather(1, chosen)[:, 0], torch.inf).clamp(min=0.0).tolist()


class DraftJudge:
    """The drafter in float32 over features of the whole text, which says what a round should have drafted."""

    def __init__(self, pair: TrainedPair) -> None:
        self._model = transformers_model(pair.target).float()
        drafter = load_drafter(pair.drafter, read_drafter_config(pair.drafter), torch.float32, CPU)
        self._blocks = BlockTrainer(drafter)

    @torch.no_grad()
    def log_probs(self, text: tuple[int, ...], position: int) -> Tensor:
        """`[block - 1, vocab]` of a block whose root is `text[position]`; its context is what comes before."""
        tokens = torch.tensor([text])
        embedding, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        anchors = torch.tensor([[position]])
        hidden = self._blocks(_features(self._model, tokens), embedding.weight, tokens, anchors)[0, 0]
        return (hidden @ head.weight.T).log_softmax(-1)


def judged(judge: Any, answers: Iterable[tuple[tuple[int, ...], Any, dict[str, Any]]]) -> str:
    """Each token of each text is the float32 target's choice or a near-tie of it, and few are near-ties."""
    gaps = [gap for prompt, end, sampling in answers for gap in judge.gaps(prompt, end.token_ids, **sampling)]
    ties = sum(gap > 0 for gap in gaps)
    assert max(gaps) <= TIE and ties <= max(4, TIES * len(gaps)), (ties, max(gaps))
    return f"{len(gaps)} tokens, {ties} near-ties, the widest {max(gaps):.3f}"


def drift(judge: Any, trees: Iterable[Any], text: tuple[int, ...]) -> list[float]:
    """How far likely nodes of sampled rounds are from a drafter that sees the whole text anew.

    A drafter whose context is a position off, or of the wrong rows, still gives right texts, only slower.
    """
    found = []
    for tree in trees:
        if tree.position + 6 <= len(text):
            expected = judge.log_probs(text, tree.position)
            for node in tree.nodes[1:]:
                own = node.log_prob - tree.nodes[node.parent].log_prob
                if own > -2.0:
                    found.append(abs(own - float(expected[node.depth - 1, node.token_id])))
    return found


def seeded_noise(seed: int, first: int, rows: int, columns: int) -> np.ndarray:
    """SGLang's noise at positions `first ..` for all tokens, `[rows, columns]`: Murmur3 of seed, position, token."""
    mask = np.uint64(0xFFFFFFFF)

    def mixed(state: np.ndarray, block: np.ndarray) -> np.ndarray:
        block = block * np.uint64(0xCC9E2D51) & mask
        block = (block << np.uint64(15) | block >> np.uint64(17)) & mask
        state = state ^ (block * np.uint64(0x1B873593) & mask)
        state = (state << np.uint64(13) | state >> np.uint64(19)) & mask
        return (state * np.uint64(5) + np.uint64(0xE6546B64)) & mask

    state = np.zeros((rows, columns), np.uint64)
    positions = np.arange(first, first + rows, dtype=np.uint64)[:, None]
    for block in (seed & 0xFFFFFFFF, seed >> 32, positions, np.arange(columns, dtype=np.uint64)[None]):
        state = mixed(state, np.asarray(block, dtype=np.uint64))
    state ^= np.uint64(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        state = (state ^ state >> np.uint64(shift)) * np.uint64(factor) & mask
    uniform = state.astype(np.float64) / float(mask)
    return np.asarray(-np.log(np.maximum(-np.log(np.maximum(uniform, 1e-300)), 2.0**-32)), dtype=np.float32)
