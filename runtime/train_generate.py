"""Batched text generation by the target for training data: rows over a static cache, finished ones replaced.

Every row holds one prompt; the host looks at the rows only every few steps, so a decode step needs no host sync.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.train_target import CompactTarget, KeyValueCache, TransformersTarget, choose_tokens

_PREFILL_LENGTHS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_PREFILL_TOKENS = 1 << 16


@dataclass(frozen=True)
class Job:
    """One text to generate: prompt ids, temperature (0 is greedy), token limit and the caller's own key."""

    prompt: np.ndarray
    temperature: float
    max_new: int
    key: int


@dataclass(frozen=True)
class Generated:
    """The tokens of a job, the stop token included; `finished` is False where the clock ended it."""

    job: Job
    tokens: np.ndarray
    finished: bool


class _Rows:
    """Device state of all rows: next token, its position, and what was generated so far."""

    def __init__(self, count: int, max_new: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.tokens, self.positions, self.counts, self.limits = (zeros(count) for _ in range(4))
        self.heat = zeros(count, dtype=torch.float32)
        self.done = torch.ones(count, dtype=torch.bool, device=device)
        self.out = zeros(count, max_new, dtype=torch.int32)
        self.every = torch.arange(count, device=device)

    def advance(self, chosen: Tensor, stop_ids: Tensor) -> None:
        """Appends `chosen [rows]` to every unfinished row and ends rows on a stop token or at their limit."""
        running = ~self.done
        slot = self.counts.clamp(max=self.out.shape[1] - 1)
        kept = self.out[self.every, slot]
        self.out[self.every, slot] = torch.where(running, chosen.to(torch.int32), kept)
        self.counts += running
        self.positions += running
        self.tokens = torch.where(running, chosen, self.tokens)
        self.done |= (chosen[:, None] == stop_ids).any(dim=1) | (self.counts >= self.limits)


def generate(
    target: CompactTarget,
    jobs: Iterable[Job],
    *,
    rows: int,
    length: int,
    max_new: int,
    stop_ids: tuple[int, ...],
    deadline: float,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
    check_every: int = 16,
) -> Iterator[Generated]:
    """Yields jobs as they finish; at `deadline` (`time.monotonic`) what runs is yielded unfinished.

    Jobs longer than `length - max_new` prompt tokens are left out. `progress` is called with texts and tokens so far.
    """
    device = target.device
    state = _Rows(rows, max_new, device)
    cache = target.new_cache(rows, length)
    stops = torch.tensor(stop_ids, device=device)
    noise = torch.Generator(device).manual_seed(seed)
    waiting = iter(jobs)
    owners: list[Job | None] = [None] * rows
    texts = tokens = 0
    longest = np.zeros(rows, dtype=np.int64)
    while True:
        over = time.monotonic() >= deadline
        done = np.ones(rows, dtype=bool) if over else state.done.cpu().numpy()
        ended = [int(row) for row in np.flatnonzero(done) if owners[row] is not None]
        for each in _harvest(state, owners, ended):
            texts, tokens = texts + 1, tokens + len(each.tokens)
            yield each
        if progress is not None:
            progress(texts, tokens)
        if over:
            return
        free = [int(row) for row in np.flatnonzero(done)]
        placed = _place(target, cache, state, owners, free, waiting, length - max_new)
        for row, job in placed:
            longest[row] = len(job.prompt)
        active = [row for row in range(rows) if owners[row] is not None]
        if not active:
            return
        longest[active] += check_every
        bound = int(min(length, 64 * -(-int(longest[active].max() + 1) // 64)))
        for _ in range(check_every):
            hidden = target.decode(state.tokens, state.positions, cache, bound)
            state.advance(choose_tokens(hidden, target.head, state.heat, noise), stops)


def _harvest(state: _Rows, owners: list[Job | None], ended: list[int]) -> Iterator[Generated]:
    if not ended:
        return
    index = torch.tensor(ended, device=state.done.device)
    out, counts = state.out[index].cpu().numpy(), state.counts[index].cpu().numpy()
    finished = state.done[index].cpu().numpy()
    for at, row in enumerate(ended):
        job = owners[row]
        owners[row] = None
        if job is not None:
            yield Generated(job, out[at, : counts[at]].copy(), bool(finished[at]))


def _place(
    target: CompactTarget,
    cache: KeyValueCache,
    state: _Rows,
    owners: list[Job | None],
    free: list[int],
    waiting: Iterator[Job],
    max_prompt: int,
) -> list[tuple[int, Job]]:
    """Puts waiting jobs into free rows; all but a prompt's last token are prefilled, that one is decoded next."""
    placed: list[tuple[int, Job]] = []
    for job in waiting if free else ():
        if 1 <= len(job.prompt) <= max_prompt:
            row = free[len(placed)]
            owners[row] = job
            placed.append((row, job))
            if len(placed) == len(free):
                break
    if not placed:
        return placed
    device = state.done.device
    rows, jobs = [row for row, _ in placed], [job for _, job in placed]
    index = torch.tensor(rows, device=device)

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    state.tokens[index] = column([int(job.prompt[-1]) for job in jobs], torch.int64)
    state.positions[index] = column([len(job.prompt) - 1 for job in jobs], torch.int64)
    state.counts[index] = 0
    state.limits[index] = column([min(job.max_new, state.out.shape[1]) for job in jobs], torch.int64)
    state.heat[index] = column([job.temperature for job in jobs], torch.float32)
    state.done[index] = False
    order = sorted(range(len(jobs)), key=lambda at: len(jobs[at].prompt))
    for start, end, width in prefill_groups([len(jobs[at].prompt) - 1 for at in order]):
        ids = np.zeros((end - start, width), dtype=np.int64)
        for at, which in enumerate(order[start:end]):
            prompt = jobs[which].prompt[:-1]
            ids[at, : len(prompt)] = prompt
        group = torch.tensor([rows[which] for which in order[start:end]], device=device)
        fits = min(width, cache.length)
        target.prefill(torch.from_numpy(ids[:, :fits]).to(device), cache, group)
    return placed


def prefill_groups(lengths: list[int]) -> list[tuple[int, int, int]]:
    """Splits ascending `lengths` into `(start, end, padded length)` runs of about 65k tokens; zero lengths drop out."""
    groups = []
    start = sum(1 for each in lengths if each == 0)
    while start < len(lengths):
        width = next((w for w in _PREFILL_LENGTHS if w >= lengths[start]), lengths[-1])
        most = start + max(1, _PREFILL_TOKENS // width)
        end = start
        while end < min(len(lengths), most) and lengths[end] <= width:
            end += 1
        groups.append((start, end, width))
        start = end
    return groups


def generate_slowly(
    target: TransformersTarget, jobs: Iterable[Job], *, rows: int, stop_ids: tuple[int, ...], deadline: float
) -> Iterator[Generated]:
    """`generate` for architectures without a compact forward: fixed batches through transformers."""
    device = target.embedding.device
    waiting = list(jobs)
    heats = sorted({job.temperature for job in waiting})
    for heat in heats:
        same = [job for job in waiting if job.temperature == heat]
        for start in range(0, len(same), rows):
            if time.monotonic() >= deadline:
                return
            batch = same[start : start + rows]
            width = max(len(job.prompt) for job in batch)
            ids = torch.full((len(batch), width), stop_ids[0], device=device)
            mask = torch.zeros_like(ids)
            for at, job in enumerate(batch):
                ids[at, width - len(job.prompt) :] = torch.from_numpy(job.prompt.astype(np.int64)).to(device)
                mask[at, width - len(job.prompt) :] = 1
            sampling = (
                {"do_sample": True, "temperature": heat, "top_k": 0} if heat > 0 else {"do_sample": False}
            )
            out = target.model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max(job.max_new for job in batch),
                eos_token_id=list(stop_ids),
                pad_token_id=stop_ids[0],
                **sampling,
            )
            for job, row in zip(batch, out[:, width:].cpu().numpy().astype(np.int32), strict=True):
                ends = np.flatnonzero(np.isin(row, stop_ids))
                cut = int(ends[0]) + 1 if len(ends) else len(row)
                yield Generated(job, row[: min(cut, job.max_new)], True)
