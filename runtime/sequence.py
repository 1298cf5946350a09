"""One request while it is in the engine (its tokens, its slots, the lengths that tie them), and a round's result.

While it decodes, `len(token_ids) == committed_len + 1`: all tokens but the last, the root of the next tree, have keys
and values. `drafter_len <= committed_len` positions have drafter keys; the features of the rest wait in `pending`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.interface import Mode
from runtime.kv_cache import Extent
from runtime.sampling import Sampling


@dataclass(frozen=True)
class Speculation:
    """How one sequence drafts in one round. `reason` says why it decodes plainly though drafting is configured."""

    mode: Mode = "off"
    tree_budget: int = 0
    reason: str | None = None


@dataclass(frozen=True)
class OutputToken:
    """One emitted token; `drafted` tells an accepted draft from the target's bonus token."""

    token_id: int
    drafted: bool
    logprob: tuple[float, tuple[tuple[int, float], ...]] | None = None


@dataclass(eq=False)
class Sequence:
    """State of one request; only the engine's thread touches it."""

    request_id: str
    token_ids: list[int]
    prompt_len: int
    sampling: Sampling
    max_new_tokens: int
    extent: Extent
    mode: str | None = None
    tree_budget: int | None = None
    logprobs: int | None = None
    keeps_features: bool = True
    """False: never drafts, so its target features are not kept."""
    committed_len: int = 0
    drafter_len: int = 0
    cached_len: int = 0
    rounds: int = 0
    num_correct_drafts: int = 0
    plain_reason: str | None = None
    admitted_at: float = field(default_factory=time.perf_counter)
    pending: list[Tensor] = field(default_factory=list)
    counts: Tensor | None = None

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Output tokens still allowed."""
        return self.max_new_tokens - self.num_outputs

    @property
    def prefill_len(self) -> int:
        """Tokens that need keys and values before a round: the prompt, later all but the root."""
        return self.prompt_len if self.num_outputs == 0 else len(self.token_ids) - 1

    @property
    def prefilled(self) -> bool:
        return self.committed_len >= self.prefill_len

    def moved(self, extent: Extent, keeps_features: bool) -> Sequence:
        """This request with its tokens at other slots, where nothing of it has been computed."""
        return replace(
            self,
            extent=extent,
            keeps_features=keeps_features,
            committed_len=0,
            drafter_len=0,
            cached_len=0,
            pending=[],
            counts=None,
        )

    def check(self) -> None:
        """Raises AssertionError where the lengths disagree."""
        assert self.drafter_len <= self.committed_len <= len(self.token_ids) <= self.extent.size
        if self.num_outputs:
            assert len(self.token_ids) == self.committed_len + 1, "the root alone has no keys and values"

    def append(self, tokens: list[OutputToken]) -> None:
        """Adds emitted tokens and counts them for the penalties."""
        ids = [token.token_id for token in tokens]
        self.token_ids.extend(ids)
        if self.counts is not None:
            self.counts.index_add_(
                0, torch.tensor(ids, device=self.counts.device), self.counts.new_ones(len(ids))
            )

    def start_counts(self, vocab_size: int, device: torch.device) -> None:
        """Token counts `[vocab]` of what stands so far, where the sampling settings need them."""
        if self.sampling.counts_tokens:
            ids = torch.tensor([token for token in self.token_ids if token < vocab_size], device=device)
            self.counts = torch.bincount(ids, minlength=vocab_size).float()


Node = tuple[int, int, int, float]
"""Token id, parent, depth and log-probability."""


class NodeTable(Seq[Node]):
    """Nodes as columns, int32 `[4, nodes]` with the log-probability's bits; made into rows when somebody looks."""

    def __init__(self, columns: np.ndarray) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return int(self._columns.shape[1])

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    @cached_property
    def _rows(self) -> tuple[Node, ...]:
        tokens, parents, depths, bits = self._columns
        return tuple(
            zip(
                tokens.tolist(),
                parents.tolist(),
                depths.tolist(),
                bits.view(np.float32).tolist(),
                strict=True,
            )
        )

    @property
    def deepest(self) -> int:
        return int(self._columns[2].max(initial=0))


@dataclass(frozen=True)
class SequenceRound:
    """What one round gave one sequence: tokens, accepted path, and its tree."""

    tokens: list[OutputToken]
    path: tuple[int, ...]
    nodes: Seq[Node]
    finish: str | None

    @property
    def draft_depth(self) -> int:
        """Deepest drafted position; 0 where nothing was drafted."""
        if isinstance(self.nodes, NodeTable):
            return self.nodes.deepest
        return max(depth for _, _, depth, _ in self.nodes)


@dataclass(frozen=True)
class RoundResult:
    sequences: tuple[SequenceRound, ...]
    nodes: int
    stage_s: tuple[float, ...]


@dataclass(frozen=True)
class Played:
    """A round with the sequences it was for, and how each drafted."""

    sequences: tuple[Sequence, ...]
    speculation: tuple[Speculation, ...]
    result: RoundResult
