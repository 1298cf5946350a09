"""The target's choice of one token: penalties, temperature, top-k, top-p, min-p, noise, argmax, in this order.

One rule serves plain decoding, the chain and the tree, so a mode can never change what is chosen. Logits, filters and
noise are float32; every sort and argmax breaks ties to the lowest token id.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

GREEDY_BELOW = 1e-4
"""Temperatures below this choose the likeliest token; one threshold for draft, verify and API."""


SMALL_SORT = 2048
"""Up to so many scores, sorting integer keys costs less than asking for ties."""
BLOCK = 32
"""Neighbouring scores that are looked at together by their largest."""


@dataclass(frozen=True)
class Sampling:
    """One request's resolved sampling settings; field meanings as in `interface.SamplingParams`."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        """True if some tokens are never drawn from."""
        return not self.greedy and bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def counts_tokens(self) -> bool:
        """True if the choice depends on which tokens came before."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def is_plain_argmax(self) -> bool:
        """True if the choice is the likeliest token of the untouched logits."""
        return self.greedy and not (self.counts_tokens or self.logit_bias or self.min_tokens)


@dataclass(frozen=True)
class RowContext:
    """What the rows to choose from stand on.

    `counts [vocab]` are float occurrences in prompt and output (None unless `counts_tokens`), `path_tokens`
    `[rows, depth]` each node's drafted ancestors and itself, padded with -1, `outputs_before [rows]` the output tokens
    that precede each row's choice.
    """

    outputs_before: Tensor
    counts: Tensor | None = None
    path_tokens: Tensor | None = None


def ordered_top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest along the last dimension, best first, ties to the lowest index; which of -inf come is left open.

    `torch.topk` promises no order among equal values. On a CPU candidates are taken wide enough to hold all that tie
    at the boundary and then put in order; where too many tie, and on a GPU (where asking would wait for the device),
    distinct integer keys of value and index decide. Returns values and indices `[..., k]`.
    """
    if scores.device.type == "cpu" and k < scores.shape[-1] and scores.shape[-1] > SMALL_SORT:
        candidates = _top_candidates(scores, k)
        if candidates is not None:
            values = scores.gather(-1, candidates)
            order = _order_keys(values, candidates).topk(k, dim=-1).indices
            return values.gather(-1, order), candidates.gather(-1, order)
    indices = torch.arange(scores.shape[-1], device=scores.device)
    picked = _order_keys(scores, indices).topk(k, dim=-1).indices
    return scores.gather(-1, picked), picked


def _top_candidates(scores: Tensor, k: int) -> Tensor | None:
    """Indices `[..., n]` that hold the `k` largest and all that tie with the last of them; None where too many tie.

    The `k` largest lie in the `k` blocks whose own largest score is largest, so only those maxima are sorted.
    """
    if scores.shape[-1] % BLOCK or scores.shape[-1] <= k * BLOCK:
        return _widened_top(scores, k)
    blocks = _widened_top(scores.unflatten(-1, (-1, BLOCK)).amax(-1), k)
    if blocks is None:
        return None
    return (blocks.unsqueeze(-1) * BLOCK + torch.arange(BLOCK)).flatten(-2)


def _widened_top(scores: Tensor, k: int) -> Tensor | None:
    """Indices of the `k` largest and of all that tie with the last of them; None where too many tie."""
    values, indices = scores.topk(k, dim=-1)
    least = values[..., -1:]
    tied = (scores >= least).sum(-1).masked_fill(least.squeeze(-1) == -torch.inf, k)
    width = int(tied.max())
    if width <= k:
        return indices
    return scores.topk(width, dim=-1).indices if width <= 4 * k else None


def _order_keys(values: Tensor, indices: Tensor) -> Tensor:
    """int64 keys that sort like (value, -index) for float32 `values`; -0.0 equals 0.0."""
    bits = (values + 0.0).contiguous().view(torch.int32)
    ordered = (bits ^ (bits >> 31 & 0x7FFFFFFF)).to(torch.int64)
    return (ordered << 32) - indices


def adjust_logits(logits: Tensor, sampling: Sampling, context: RowContext) -> Tensor:
    """Logits `[rows, vocab]` after penalties, logit bias and the ban on stop tokens before `min_tokens`."""
    if sampling.counts_tokens:
        assert context.counts is not None
        counts = context.counts.expand_as(logits).clone()
        if context.path_tokens is not None and context.path_tokens.numel():
            present = (context.path_tokens >= 0).to(counts.dtype)
            counts.scatter_add_(1, context.path_tokens.clamp_min(0), present)
        seen = counts > 0
        if sampling.repetition_penalty != 1:
            scaled = torch.where(
                logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty
            )
            logits = torch.where(seen, scaled, logits)
        logits = (
            logits - sampling.frequency_penalty * counts - sampling.presence_penalty * seen.to(logits.dtype)
        )
    if sampling.logit_bias:
        logits = logits.clone()
        for token_id, bias in sampling.logit_bias:
            logits[:, token_id] += bias
    if sampling.min_tokens and sampling.stop_token_ids:
        early = context.outputs_before < sampling.min_tokens
        logits = logits.clone()
        for token_id in sampling.stop_token_ids:
            logits[:, token_id] = logits[:, token_id].masked_fill(early, -torch.inf)
    return logits


def _candidates(scores: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Scores and token ids `[rows, kept]` that pass top-k, top-p and min-p, best first; others are -inf."""
    vocab = scores.shape[-1]
    width = min(sampling.top_k, vocab) if sampling.top_k else min(1024, vocab)
    while True:
        values, ids = ordered_top(scores, width)
        if sampling.top_k:
            probs = values.softmax(-1)
            break
        # One formula whatever the width, which depends on the other rows: a row's own result must not.
        probs = (values - scores.logsumexp(-1, keepdim=True)).exp()
        reached = probs.sum(-1).min() >= min(sampling.top_p, 1.0) if sampling.top_p < 1 else False
        tail_out = probs[:, -1].max() < sampling.min_p * probs[:, 0].min() if sampling.min_p else False
        if reached or tail_out or width == vocab:
            break
        width = min(8 * width, vocab)
    keep = (
        probs.cumsum(-1, dtype=torch.float64) - probs < sampling.top_p
        if sampling.top_p < 1
        else torch.ones_like(probs, dtype=torch.bool)
    )
    if sampling.min_p:
        keep &= probs >= sampling.min_p * probs[:, :1]
    keep[:, 0] = True
    return values.masked_fill(~keep, -torch.inf), ids


def choice_scores(logits: Tensor, sampling: Sampling, context: RowContext, noise: Tensor | None) -> Tensor:
    """Scores `[rows, vocab]` whose argmax is the choice; filtered tokens are -inf. Used to judge near-ties."""
    logits = adjust_logits(logits, sampling, context)
    if sampling.greedy:
        return logits
    assert noise is not None
    scores = logits / sampling.temperature
    if sampling.filtered:
        values, ids = _candidates(scores, sampling)
        scores = torch.full_like(scores, -torch.inf).scatter(1, ids, values)
    return scores + noise


def choose_tokens(logits: Tensor, sampling: Sampling, context: RowContext, noise: Tensor | None) -> Tensor:
    """Token ids `[rows]` the target chooses from `logits [rows, vocab]` (float32).

    `noise [rows, vocab]` is the Gumbel noise of each row's position; None when greedy.
    """
    if sampling.filtered:
        assert noise is not None
        scores = adjust_logits(logits, sampling, context) / sampling.temperature
        values, ids = _candidates(scores, sampling)
        noisy = values + noise.gather(1, ids)
        best = noisy.max(-1, keepdim=True).values
        return torch.where(noisy == best, ids, logits.shape[-1]).min(-1).values
    return choice_scores(logits, sampling, context, noise).argmax(-1)


def token_logprobs(logits: Tensor, chosen: Seq[int], top: int) -> list[tuple[float, list[tuple[int, float]]]]:
    """Per row of `logits [rows, vocab]`: the chosen token's log-probability and the `top` likeliest (id, value)."""
    table = logits.float().log_softmax(-1)
    rows: list[tuple[float, list[tuple[int, float]]]] = []
    for row, token_id in zip(table, chosen, strict=True):
        likeliest: list[tuple[int, float]] = []
        if top:
            values, ids = ordered_top(row.unsqueeze(0), top)
            likeliest = list(zip(ids[0].tolist(), values[0].tolist(), strict=True))
        rows.append((float(row[token_id]), likeliest))
    return rows
