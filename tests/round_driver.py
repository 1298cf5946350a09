"""Drives rounds without an engine: sequences with slots of their own, prefilled and decoded as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from constructed import ConstructedDrafter, Request
from torch import Tensor

from runtime import sequence as request_state
from runtime.kv_cache import Extent, Pool
from runtime.prefill import prefill
from runtime.round import Models, SequenceRound, decode_round, extend_drafter
from runtime.sampling import Sampling
from runtime.sequence import Speculation


@dataclass
class Decoded:
    """What one request got, and its rounds."""

    token_ids: tuple[int, ...] = ()
    finish: str | None = None
    rounds: list[SequenceRound] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


def start(models: Models, request: Request) -> request_state.Sequence:
    """A sequence for `request` with slots of its own; nothing is prefilled."""
    rule = request.rule
    extent = models.cache.allocate(len(request.prompt) + request.new_tokens + 72)
    assert extent is not None
    return request_state.Sequence(
        request_id=request.name,
        token_ids=list(request.prompt),
        prompt_len=len(request.prompt),
        sampling=Sampling(
            temperature=rule.temperature,
            top_p=rule.top_p,
            top_k=rule.top_k,
            min_p=rule.min_p,
            seed=rule.seed,
            presence_penalty=rule.presence_penalty,
            frequency_penalty=rule.frequency_penalty,
            repetition_penalty=rule.repetition_penalty,
            logit_bias=tuple(sorted(rule.logit_bias.items())),
            min_tokens=rule.min_tokens,
            stop_token_ids=rule.stop_token_ids,
        ),
        max_new_tokens=request.new_tokens,
        extent=extent,
        logprobs=request.logprobs,
    )


def run_prefill(models: Models, sequence: request_state.Sequence, chunk: int = 64) -> Decoded:
    """Prefills `sequence`; its first token is in the result."""
    while True:
        first = prefill(models, sequence, chunk)
        if first is not None:
            token, finish = first
            return Decoded((token.token_id,), finish, logprobs=[token.logprob])


def decode(models: Models, requests: Sequence[Request], how: Sequence[Speculation]) -> list[Decoded]:
    """Decodes `requests` as one batch, which shrinks as they finish; all slots are given back."""
    sequences = [start(models, request) for request in requests]
    results = [run_prefill(models, seq, req.chunk) for seq, req in zip(sequences, requests, strict=True)]
    while active := [i for i, result in enumerate(results) if result.finish is None]:
        outcome = decode_round(models, [sequences[i] for i in active], [how[i] for i in active])
        for i, one in zip(active, outcome.sequences, strict=True):
            results[i].token_ids += tuple(token.token_id for token in one.tokens)
            results[i].logprobs += [token.logprob for token in one.tokens]
            results[i].finish = one.finish
            results[i].rounds.append(one)
    for sequence in sequences:
        models.cache.free(sequence.extent)
    models.cache.check_integrity([])
    return results


@dataclass
class Slots:
    """Starts sequences and gives their slots back at the end of the test."""

    models: Models
    taken: list[Extent] = field(default_factory=list)

    def begin(self, request: Request) -> request_state.Sequence:
        """A prefilled sequence."""
        sequence = start(self.models, request)
        self.taken.append(sequence.extent)
        run_prefill(self.models, sequence, request.chunk)
        return sequence

    def fresh(self, like: request_state.Sequence) -> request_state.Sequence:
        """A sequence with the committed text of `like`, prefilled at once, and the same root."""
        text = tuple(like.token_ids[: like.committed_len])
        sequence = self.begin(Request(like.request_id, text, 64, chunk=1024))
        sequence.token_ids[-1] = like.token_ids[-1]
        return sequence

    def assert_same_state(self, sequence: request_state.Sequence) -> None:
        """Target and drafter slots of `sequence` equal those of a fresh prefill of its text."""
        with torch.inference_mode():
            extend_drafter(self.models, [sequence])
        other = self.fresh(sequence)
        length = sequence.committed_len
        assert sequence.drafter_len == other.committed_len == other.drafter_len == length
        assert self.models.cache.drafter is not None
        for pool in (self.models.cache.target, self.models.cache.drafter):
            mine, theirs = contents(pool, sequence.extent, length), contents(pool, other.extent, length)
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)

    def close(self) -> None:
        """Gives all slots back."""
        for extent in self.taken:
            self.models.cache.free(extent)
        self.models.cache.check_integrity([])


def contents(pool: Pool, extent: Extent, length: int) -> Tensor:
    """Keys and values `[2, layers, kv_heads, length, head_dim]`."""
    here = slice(extent.start, extent.start + length)
    return torch.stack((pool.keys[:, :, here], pool.values[:, :, here]))


def with_draft(models: Models, drafter: ConstructedDrafter | None, block_size: int = 8) -> Models:
    """`models` with the constructed drafter in the place of its own."""
    return replace(models, propose=drafter, block_size=block_size)


@dataclass
class Tally:
    """Counts over tree rounds the shares that say whether a suite tests what it means to test."""

    rounds: int = 0
    tokens: int = 0
    sideways: int = 0
    empty: int = 0

    def add(self, rounds: Sequence[SequenceRound]) -> None:
        for one in rounds:
            if len(one.nodes) == 1:
                continue
            parents = [node[1] for node in one.nodes]
            self.rounds += 1
            self.tokens += len(one.tokens)
            self.empty += len(one.path) == 1
            self.sideways += any(parents.index(parents[node], 1) != node for node in one.path[1:])

    @property
    def accept_length(self) -> float:
        return self.tokens / self.rounds

    def __str__(self) -> str:
        return (
            f"{self.rounds} rounds, accept length {self.accept_length:.2f}, "
            f"sideways {self.sideways / self.rounds:.1%}, nothing {self.empty / self.rounds:.1%}"
        )
