"""A drafter constructed to be right often enough that trees are walked, and the reference it is constructed from.

A random drafter is never accepted, so nothing behind acceptance would run. The constructed one returns the target's own
logits along the target's own continuation, computed by transformers without a KV cache, plus seeded noise.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import reference_sampler
import torch
from reference_sampler import Array, Rule
from tiny_models import transformers_model
from torch import Tensor

from runtime import sequence as request_state
from runtime.round import Models, extend_drafter


@dataclass(frozen=True)
class Request:
    """One request of a test below the engine."""

    name: str
    prompt: tuple[int, ...]
    new_tokens: int = 24
    rule: Rule = Rule()
    logprobs: int | None = None
    chunk: int = 64


@dataclass(frozen=True)
class Script:
    """What the target says to one request: all token ids, and logits `[positions, vocab]` of each position's token.

    `drafts` are the logits with the tokens that the request's filters drop made unlikely.
    """

    prompt_len: int
    token_ids: tuple[int, ...]
    logits: Tensor
    drafts: Tensor

    @property
    def outputs(self) -> tuple[int, ...]:
        return self.token_ids[self.prompt_len :]


class Reference:
    """The target in transformers' classes, run over whole texts without a KV cache."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.model = transformers_model(folder)
        self.vocab_size = vocab_size

    @torch.inference_mode()
    def logits(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Logits `[texts, longest, vocab]` after each token; texts are padded at the end, where nothing looks."""
        longest = max(map(len, texts))
        padded = torch.tensor([[*text, *([0] * (longest - len(text)))] for text in texts])
        return self.model(padded, use_cache=False).logits[..., : self.vocab_size]

    def scripts(self, requests: Sequence[Request]) -> dict[str, Script]:
        """The continuation of each request, token by token, chosen by the second sampling implementation."""
        texts = [list(request.prompt) for request in requests]
        dropped: list[list[Array]] = [[] for _ in requests]
        for _ in range(max(request.new_tokens for request in requests)):
            logits = self.logits(texts)
            for row, (request, text) in enumerate(zip(requests, texts, strict=True)):
                prompt, outputs = text[: len(request.prompt)], text[len(request.prompt) :]
                table = logits[row, len(text) - 1].numpy()
                scores = reference_sampler.scores(table, request.rule, prompt, outputs)
                text.append(int(np.argmax(scores)))
                dropped[row].append(np.isneginf(scores))
        after = self.logits(texts)
        before = torch.cat((after.new_zeros(len(texts), 1, self.vocab_size), after), 1)
        scripts = {}
        for row, (request, text) in enumerate(zip(requests, texts, strict=True)):
            start, end = len(request.prompt), len(request.prompt) + request.new_tokens
            drafts = before[row, :end].clone()
            drafts[start:] -= 10.0 * torch.from_numpy(np.stack(dropped[row][: request.new_tokens]))
            scripts[request.name] = Script(start, tuple(text[:end]), before[row], drafts)
        return scripts


@dataclass(frozen=True)
class ConstructedDrafter:
    """`Models.propose`: the scripts' own logits plus noise of standard deviation `spread`, now and then noise alone."""

    scripts: Mapping[str, Script]
    spread: float = 1.2
    blind_share: float = 0.05

    def __call__(self, models: Models, batch: Sequence[request_state.Sequence]) -> Tensor:
        extend_drafter(models, batch)
        return torch.stack([self._draft(sequence, models.draft_horizon) for sequence in batch])

    def _draft(self, sequence: request_state.Sequence, horizon: int) -> Tensor:
        script, first = self.scripts[sequence.request_id], sequence.committed_len + 1
        generator = torch.Generator().manual_seed(zlib.crc32(repr((script.token_ids, first)).encode()))
        blind = float(torch.rand((), generator=generator)) < self.blind_share
        noise = torch.randn(horizon, script.drafts.shape[1], generator=generator)
        own = script.drafts[first : first + horizon]
        if blind:
            return 4.0 * noise
        drafted = self.spread * noise
        drafted[: len(own)] += own
        return drafted
