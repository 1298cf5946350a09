"""Prefill: a sequence's prompt goes through the target in chunks until its first token is chosen."""

from __future__ import annotations

import torch

from runtime.attention import Segment, Step, causal_mask
from runtime.noise import position_noise
from runtime.round import Models, choose_after, emit, extend_drafter
from runtime.sequence import OutputToken, Sequence
from runtime.tree import root_tree


@torch.inference_mode()
def hand_over(models: Models, sequence: Sequence) -> None:
    """Completes the drafter's context of a sequence that ends, so that its slots can be reused as a prefix."""
    extend_drafter(models, [sequence])


@torch.inference_mode()
def prefill(models: Models, sequence: Sequence, chunk: int) -> tuple[OutputToken, str | None] | None:
    """Runs up to `chunk` more prompt tokens; at the prompt's end returns the first token and its finish reason.

    One that has output already, from another engine, gets keys and values for it and no token.
    """
    start = sequence.committed_len
    end = min(sequence.prefill_len, start + chunk)
    device = models.target.device
    positions = torch.arange(start, end, device=device)
    segment = Segment(sequence.extent.start, start, end - start, causal_mask(end - start, device), positions)
    token_ids = torch.tensor(sequence.token_ids[start:end], device=device)
    output = models.target.forward(token_ids, positions, Step.of(models.cache.target, (segment,)))
    sequence.committed_len = end
    if output.features is not None and sequence.keeps_features:
        sequence.pending.append(output.features)
        extend_drafter(models, [sequence])
    if end < sequence.prefill_len:
        return None
    sequence.start_counts(models.target.vocab_size, device)
    if sequence.num_outputs:
        sequence.check()
        return None
    logits = models.target.logits(output.hidden[-1:])
    noise = None
    if not sequence.sampling.greedy:
        noise = position_noise(sequence.sampling.seed, end, 1, models.target.vocab_size, device)
    choice = choose_after(sequence, root_tree(token_ids[-1:]), 0, logits, noise)
    tokens, _, finish = emit(sequence, choice, [0], logits)
    sequence.append(tokens)
    sequence.check()
    return tokens[0], finish
