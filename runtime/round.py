"""One DDTree decode round, top to bottom. Read this file first.

    decode_round
      draft_block    the drafter gives a distribution for each of the next `draft_horizon` positions, in one pass
      build_tree     the `tree_budget` paths of highest probability become one tree under the root
      verify_tree    the target runs once over all nodes; each node sees the committed prefix and its ancestors
      accept_path    from the root, follow the target's own choice at each node while the tree has it
      commit_path    the accepted nodes' keys and values move to the end of the prefix; the rest is forgotten

The text is the target's own whatever the tree holds: every emitted token is what the target chooses at its node.
Plain decoding is the same loop with `tree_budget = 0`, a tree of the root alone; the chain is a tree of one path.

Invariants, asserted by `Sequence.check`:
  - the tokens so far are the `committed_len` that have keys and values, and one more, the root (the bonus token of
    the round before, or the first token after prefill);
  - the root stands at position `committed_len`, a node at `committed_len + depth`;
  - a parent's index is smaller than its child's;
  - a round adds `accept_length` tokens: the accepted drafts and the bonus token, fewer only at a stop token or cap.

`build_tree` and `accept_path` are pure and stand in `runtime/tree.py`; the target's choice in `runtime/sampling.py`.

Sources: DDTree (best-first trees from block-diffusion marginals, one-pass verification), DFlash (the drafter).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.attention import Segment, Step, full_mask
from runtime.fused import FusedDrafter
from runtime.kv_cache import KVCache
from runtime.noise import gumbel_rows, signed_seed
from runtime.sampling import RowContext, choose_tokens, token_logprobs
from runtime.sequence import (
    NodeTable,
    OutputToken,
    Played,
    RoundResult,
    Sequence,
    SequenceRound,
    Speculation,
)
from runtime.stage_clock import StageClock
from runtime.target import TargetModel
from runtime.tree import DraftTree, accept_path, ancestor_mask, build_tree

__all__ = [
    "DraftTree",
    "Models",
    "NodeTable",
    "Played",
    "RoundResult",
    "SequenceRound",
    "accept_path",
    "ancestor_mask",
    "build_tree",
    "commit_path",
    "decode_round",
    "draft_block",
    "drafter_logits",
    "extend_drafter",
    "verify_tree",
]


@dataclass(frozen=True)
class Models:
    """Target, drafter (None: nothing is drafted) and the slots of both."""

    target: TargetModel
    drafter: FusedDrafter | None
    cache: KVCache
    block_size: int = 1
    """Tokens of a draft block in use, root included; at most the drafter's own."""
    draft_noise: bool = True
    propose: Callable[[Models, Seq[Sequence]], Tensor] | None = None
    """Draft logits from elsewhere than the drafter (tests); None = `drafter_logits`."""

    @property
    def draft_horizon(self) -> int:
        return self.block_size - 1 if self.drafter is not None else 0


@torch.inference_mode()
def decode_round(models: Models, batch: Seq[Sequence], speculation: Seq[Speculation]) -> RoundResult:
    """Decodes one round of every sequence in `batch`; `speculation[i]` says how sequence i drafts."""
    clock = StageClock(models.target.device)
    budgets = [
        _usable_budget(models, sequence, how) for sequence, how in zip(batch, speculation, strict=True)
    ]
    noise = _noise_rows(models, batch, budgets)
    log_probs = _draft_batch(models, batch, speculation, budgets, noise)
    clock.lap("draft")

    ranks = None if any(how.mode == "tree" for how in speculation) else 1
    tree = build_tree(log_probs, max(budgets), _root_ids(batch, models.target.device), ranks)
    sizes = [min(size, budget + 1) for size, budget in zip(tree.sizes.tolist(), budgets, strict=True)]
    clock.lap("tree")

    hidden, features = verify_tree(models, batch, tree, sizes)
    choices, logits = _choose_batch(models, batch, tree, sizes, hidden, noise)
    clock.lap("verify")

    paths = accept_path(tree, choices, sizes)
    clock.lap("accept")

    results = []
    for i, sequence in enumerate(batch):
        tokens, path, finish = emit(sequence, choices[i], paths[i], logits[i])
        commit_path(models, sequence, path, features[i])
        sequence.append(tokens)
        sequence.rounds += 1
        sequence.num_correct_drafts += sum(token.drafted for token in tokens)
        sequence.plain_reason = speculation[i].reason
        sequence.check()
        results.append(SequenceRound(tokens, tuple(path), _nodes(tree, i, sizes[i]), finish))
    clock.lap("commit")
    return RoundResult(tuple(results), sum(sizes), clock.seconds())


def draft_block(models: Models, batch: Seq[Sequence], noise: Seq[Tensor | None]) -> Tensor:
    """Log-probabilities `[batch, draft_horizon, vocab]` of the tokens after each root.

    At temperature > 0 the noise the target will add at each position is added here too (`draft_noise`): which tokens
    are proposed changes, which are emitted does not.
    """
    logits = (models.propose or drafter_logits)(models, batch)
    for row, sequence in enumerate(batch):
        if not sequence.sampling.greedy:
            logits[row] /= sequence.sampling.temperature
    log_probs = logits.log_softmax(-1)
    if models.draft_noise:
        for row, rows in enumerate(noise):
            if rows is not None:
                log_probs[row] = (log_probs[row] + rows[: log_probs.shape[1]]).log_softmax(-1)
    return log_probs


def drafter_logits(models: Models, batch: Seq[Sequence]) -> Tensor:
    """Logits `[batch, draft_horizon, vocab]` of one drafter pass over `[root, mask, mask, ...]` of each sequence.

    The drafter's context is exactly the committed positions: the root has no features yet and is block position 0.
    The block's own keys and values stay in scratch slots and are overwritten.
    """
    drafter, cache, target = models.drafter, models.cache, models.target
    assert drafter is not None and cache.drafter is not None
    extend_drafter(models, batch)
    size, device = models.block_size, target.device
    block_ids = torch.full((len(batch), size), drafter.config.mask_token_id, device=device)
    block_ids[:, 0] = _root_ids(batch, device)
    starts = torch.tensor([sequence.committed_len for sequence in batch], device=device)
    positions = starts.unsqueeze(1) + torch.arange(size, device=device)
    mask = full_mask(size, device)
    segments = [
        Segment(sequence.extent.start, sequence.committed_len, size, mask, positions[i])
        for i, sequence in enumerate(batch)
    ]
    step = Step.of(cache.drafter, segments)
    hidden = drafter.forward(target.embed(block_ids.flatten()), positions.flatten(), step)
    return target.draft_logits(hidden.view(len(batch), size, -1)[:, 1:])


def verify_tree(
    models: Models, batch: Seq[Sequence], tree: DraftTree, sizes: Seq[int]
) -> tuple[Tensor, list[Tensor | None]]:
    """One target forward over the first `sizes[i]` nodes of every sequence.

    Returns final hidden states of all nodes `[sum of sizes, hidden]` and per sequence the target features
    `[nodes, taps * hidden]` (None where nothing is ever drafted). Keys and values of node i are left at scratch
    position `committed_len + i`.
    """
    segments = tuple(
        Segment(
            sequence.extent.start,
            sequence.committed_len,
            size,
            tree.ancestor_mask[i, :size, :size],
            sequence.committed_len + tree.depths[i, :size],
        )
        for i, (sequence, size) in enumerate(zip(batch, sizes, strict=True))
    )
    token_ids = torch.cat([tree.token_ids[i, :size] for i, size in enumerate(sizes)])
    positions = torch.cat([segment.positions for segment in segments])
    output = models.target.forward(token_ids, positions, Step.of(models.cache.target, segments))
    features = output.features
    return output.hidden, [None] * len(batch) if features is None else list(features.split(list(sizes)))


def commit_path(models: Models, sequence: Sequence, path: list[int], features: Tensor | None) -> None:
    """Keeps the rows of `path` (root first) as the next committed positions and hands their features over."""
    models.cache.keep_path(sequence.extent, sequence.committed_len, path)
    sequence.committed_len += len(path)
    if features is not None and sequence.keeps_features:
        sequence.pending.append(features[path])


def extend_drafter(models: Models, batch: Seq[Sequence]) -> None:
    """Gives the drafter keys and values of all committed positions whose target features are pending."""
    drafter, cache = models.drafter, models.cache
    late = [sequence for sequence in batch if sequence.pending]
    if drafter is None or cache.drafter is None or not late:
        return
    lengths = [sequence.committed_len - sequence.drafter_len for sequence in late]
    features = torch.cat([part for sequence in late for part in sequence.pending])
    positions = torch.cat(
        [
            torch.arange(sequence.drafter_len, sequence.committed_len, device=features.device)
            for sequence in late
        ]
    )
    for layer, (keys, values) in enumerate(drafter.context(features, positions)):
        row = 0
        for sequence, length in zip(late, lengths, strict=True):
            here = slice(row, row + length)
            cache.drafter.write(
                layer, sequence.extent.start + sequence.drafter_len, keys[:, here], values[:, here]
            )
            row += length
    for sequence in late:
        sequence.drafter_len = sequence.committed_len
        sequence.pending.clear()


def _usable_budget(models: Models, sequence: Sequence, how: Speculation) -> int:
    """Draft nodes worth verifying: none where nothing may be drafted or no draft could be emitted any more."""
    if (
        how.mode == "off"
        or models.draft_horizon == 0
        or sequence.remaining < 2
        or not sequence.keeps_features
    ):
        return 0
    return min(models.draft_horizon, sequence.remaining - 1) if how.mode == "chain" else how.tree_budget


def _draft_batch(
    models: Models,
    batch: Seq[Sequence],
    speculation: Seq[Speculation],
    budgets: Seq[int],
    noise: Seq[Tensor | None],
) -> Tensor:
    """Log-probabilities `[batch, horizon, vocab]`; -inf for what may not be drafted.

    That is every token of a sequence that drafts nothing, depths that could never be emitted, and in a chain every
    token but the likeliest of each depth.
    """
    drafting = [i for i, budget in enumerate(budgets) if budget > 0]
    if not drafting:
        return torch.empty(len(batch), 0, models.target.vocab_size, device=models.target.device)
    drafted = draft_block(models, [batch[i] for i in drafting], [noise[i] for i in drafting])
    for row, i in enumerate(drafting):
        drafted[row, batch[i].remaining - 1 :] = -torch.inf
        if speculation[i].mode == "chain":
            best = drafted[row].argmax(-1, keepdim=True)
            kept = drafted[row].gather(-1, best)
            drafted[row] = torch.full_like(drafted[row], -torch.inf).scatter_(-1, best, kept)
    if len(drafting) == len(batch):
        return drafted
    log_probs = drafted.new_full((len(batch), *drafted.shape[1:]), -torch.inf)
    log_probs[drafting] = drafted
    return log_probs


def _noise_rows(models: Models, batch: Seq[Sequence], budgets: Seq[int]) -> list[Tensor | None]:
    """Noise `[depths, vocab]` of each sequence for the positions this round can choose; None where it is greedy.

    Row d is for the token after depth d.
    """
    wanted = [
        0 if sequence.sampling.greedy else models.block_size if budget else 1
        for sequence, budget in zip(batch, budgets, strict=True)
    ]
    if not any(wanted):
        return [None] * len(batch)
    seeds: list[int] = []
    positions: list[int] = []
    for sequence, rows in zip(batch, wanted, strict=True):
        seeds += [signed_seed(sequence.sampling.seed)] * rows
        positions += range(sequence.committed_len + 1, sequence.committed_len + 1 + rows)
    device = models.target.device
    noise = gumbel_rows(
        torch.tensor(seeds, device=device), torch.tensor(positions, device=device), models.target.vocab_size
    )
    return [part if len(part) else None for part in noise.split(wanted)]


def _root_ids(batch: Seq[Sequence], device: torch.device) -> Tensor:
    return torch.tensor([sequence.token_ids[-1] for sequence in batch], device=device)


def _choose_batch(
    models: Models,
    batch: Seq[Sequence],
    tree: DraftTree,
    sizes: Seq[int],
    hidden: Tensor,
    noise: Seq[Tensor | None],
) -> tuple[Tensor, Seq[Tensor | None]]:
    """The target's choice after each node: token ids `[batch, nodes]`, 0 beyond a sequence's size.

    Also each sequence's logits `[nodes, vocab]` (float32), None where nothing but the likeliest token is asked for.
    """
    if all(sequence.sampling.is_plain_argmax and sequence.logprobs is None for sequence in batch):
        chosen = list(models.target.likeliest(hidden).split(list(sizes)))
        return torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True), [None] * len(batch)
    logits = models.target.logits(hidden).split(list(sizes))
    chosen = [choose_after(sequence, tree, i, logits[i], noise[i]) for i, sequence in enumerate(batch)]
    return torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True), logits


def choose_after(
    sequence: Sequence, tree: DraftTree, row: int, logits: Tensor, noise: Tensor | None
) -> Tensor:
    """The target's choice `[nodes]` after each of the first nodes of one tree, from their `logits [nodes, vocab]`."""
    size = logits.shape[0]
    depths = tree.depths[row, :size]
    path_tokens = None
    if sequence.counts is not None:
        seen = tree.ancestor_mask[row, :size, :size].clone()
        seen[:, 0] = False
        path_tokens = torch.where(seen, tree.token_ids[row, :size], -1)
    context = RowContext(sequence.num_outputs + depths, sequence.counts, path_tokens)
    return choose_tokens(logits, sequence.sampling, context, None if noise is None else noise[depths])


def emit(
    sequence: Sequence, choices: Tensor, path: list[int], logits: Tensor | None
) -> tuple[list[OutputToken], list[int], str | None]:
    """Tokens of an accepted path, cut at the first stop token or at the cap, with the part of the path they need."""
    ids = choices[path].tolist()
    finish = None
    for i, token_id in enumerate(ids):
        if token_id in sequence.sampling.stop_token_ids:
            ids, finish = ids[: i + 1], "stop"
            break
    if finish is None and len(ids) >= sequence.remaining:
        ids, finish = ids[: sequence.remaining], "length"
    logprobs: list[tuple[float, tuple[tuple[int, float], ...]] | None] = [None] * len(ids)
    if sequence.logprobs is not None and logits is not None:
        table = token_logprobs(logits[path[: len(ids)]], ids, sequence.logprobs)
        logprobs = [(value, tuple(top)) for value, top in table]
    tokens = [OutputToken(token_id, i + 1 < len(path), logprobs[i]) for i, token_id in enumerate(ids)]
    return tokens, path[: len(ids)], finish


def _nodes(tree: DraftTree, row: int, size: int) -> tuple[tuple[int, int, int, float], ...]:
    columns = (tree.token_ids, tree.parents, tree.depths, tree.log_probs)
    return tuple(zip(*(column[row, :size].tolist() for column in columns), strict=True))
