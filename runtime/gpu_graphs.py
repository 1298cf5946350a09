"""Rounds as CUDA graphs, one launched ahead: while the host reads a round, the next one already runs.

A round is one graph replay and one small copy to pinned memory; its results wait there until the host comes for them,
so the device never waits for Python. State on the device runs ahead of `Sequence` by the round in flight. Only when the
batch or the settings change is the round in flight collected first and the state written anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.gpu_device import Chunk, Device, HostBatch, RoundResults
from runtime.gpu_pass import MOST_ROWS
from runtime.gpu_round import ROWS, STOPS, PromptShape, Shape, batches
from runtime.noise import signed_seed
from runtime.prefill import prefill
from runtime.round import Models, NodeTable, Played, RoundResult, SequenceRound, extend_drafter
from runtime.sampling import Sampling
from runtime.sequence import OutputToken, Sequence, Speculation

FINISHES = (None, "stop", "length")
MOST_KEPT = 2**31 - 1
"""Largest top_k on the device; no vocabulary is larger."""


@dataclass(frozen=True)
class _Flight:
    """A round the device has been given."""

    shape: Shape
    rows: tuple[Sequence | None, ...]
    speculation: tuple[Speculation, ...]
    results: Callable[[], RoundResults]


class GraphRounds:
    """Plays rounds of an engine's sequences; belongs to the thread that plays them."""

    def __init__(self, models: Models, device: Device, max_batch: int) -> None:
        """`device` was made for the same models and `max_batch` sequences."""
        self._models, self.device = models, device
        self._batches = batches(max_batch)
        self._flight: _Flight | None = None
        self._rows: list[Sequence | None] = []
        self._host = HostBatch.empty(max_batch, models.target.device.type == "cuda")

    @property
    def budgets(self) -> tuple[int, ...]:
        """Tree budgets that fill a captured round; one between costs what the next larger one does."""
        return tuple(rows - 1 for rows in ROWS if rows > 1)

    def size_for(self, batch: int) -> int:
        """Sequences that the captured round for `batch` has room for; `batch` itself where there is none."""
        return next((size for size in self._batches if size >= batch), batch)

    def refusal(self, batch: Seq[Sequence], speculation: Seq[Speculation]) -> str | None:
        """Why this batch has to be decoded step by step from the host; None if it need not."""
        if len(batch) > self._batches[-1]:
            return f"more than {self._batches[-1]} sequences"
        for sequence, how in zip(batch, speculation, strict=True):
            why = _unusual(sequence)
            if why is not None:
                return why
            if _nodes(how, self.device.block) >= MOST_ROWS:
                return f"a tree of more than {MOST_ROWS - 1} nodes"
        return None

    def prepare(
        self, progress: Callable[[float], object], *, auto: bool = False, draft_noise: bool = True
    ) -> None:
        """Compiles and captures what one greedy request needs in each mode; `progress` is told the share done.

        With `auto` every size that auto mode may choose, greedy and sampled: no change of its own may hold up a round.
        Other sizes follow at their first use: a moment where the kernels are compiled, some seconds where not.
        """
        drafts = self._models.drafter is not None
        shapes: list[Shape | PromptShape] = [
            Shape(size, rows, noisy, shared=noisy and draft_noise and rows > 1, context=drafts)
            for size in (self._batches if auto else [1])
            for noisy in ((False, True) if auto else (False,))
            for rows in ROWS
            if drafts or rows == 1
        ]
        shapes += [PromptShape(rows, True, False, drafts) for rows in self.device.prefills]
        for done, shape in enumerate(shapes):
            progress(done / len(shapes))
            self.device.prepare(shape)

    def shape(self, batch: Seq[Sequence], speculation: Seq[Speculation], draft_noise: bool) -> Shape:
        """The captured size that holds this batch."""
        rows = max(_rows_for(how, self.device.block) for how in speculation)
        noisy = any(not sequence.sampling.greedy for sequence in batch)
        return Shape(
            batch=next(size for size in self._batches if size >= len(batch)),
            rows=rows,
            noisy=noisy,
            shared=noisy and draft_noise and rows > 1,
            context=any(sequence.keeps_features for sequence in batch),
            filtered=any(sequence.sampling.filtered for sequence in batch),
        )

    @torch.inference_mode()
    def play(self, batch: Seq[Sequence], speculation: Seq[Speculation], draft_noise: bool) -> Played:
        """One round. After a change of batch or settings it is the one in flight, of the sequences before."""
        shape = self.shape(batch, speculation, draft_noise)
        flight, self._flight = self._flight, None
        if flight is not None and not self._continues(flight, shape, batch, speculation):
            played = self._collect(flight, batch)
            if played.sequences:
                return played
            flight = None
        if flight is None:
            self.device.prepare(shape)
            self._upload(shape, batch, speculation)
            flight = self._launch(shape, speculation)
        if any(sequence.remaining > 1 for sequence in batch):
            # Known before the other is looked at: whatever happens there, rounds are collected in their order.
            self._flight = self._launch(shape, flight.speculation)
        return self._collect(flight, batch)

    @torch.inference_mode()
    def prefill(self, sequence: Sequence, room: int) -> tuple[OutputToken, str | None] | None:
        """As `prefill.prefill`: up to `room` more prompt tokens, and at the prompt's end the first token."""
        if _unusual(sequence) is not None:
            return prefill(self._models, sequence, room)
        sizes = self.device.prefills
        start = sequence.committed_len
        end = min(sequence.prefill_len, start + min(room, sizes[-1]))
        drafts = sequence.keeps_features and self._models.drafter is not None
        if drafts:
            extend_drafter(self._models, [sequence])
        sampling = sequence.sampling
        last = end == sequence.prefill_len and not sequence.num_outputs
        rows = next(size for size in sizes if size >= end - start)
        kept = min(sampling.top_k, MOST_KEPT)
        numbers = (start, end, sequence.extent.start, end - start, end - start - 1, end - 1, kept)
        ids = tuple(sequence.token_ids[start:end])
        shape = PromptShape(rows, last, last and not sampling.greedy, drafts, last and sampling.filtered)
        self.device.prompt(shape, Chunk(numbers, ids, signed_seed(sampling.seed), _odds(sampling)))
        sequence.committed_len = end
        if drafts:
            sequence.drafter_len = end
        if not last:
            if sequence.prefilled:
                sequence.check()
            return None
        token = OutputToken(self.device.first(), False)
        stop = token.token_id in sampling.stop_token_ids
        finish = "stop" if stop else "length" if sequence.remaining <= 1 else None
        sequence.append([token])
        sequence.check()
        return token, finish

    @torch.inference_mode()
    def drain(self, batch: Seq[Sequence]) -> Played | None:
        """The round in flight, if there is one; nothing is launched."""
        flight, self._flight = self._flight, None
        return None if flight is None else self._collect(flight, batch)

    @torch.inference_mode()
    def row_logits(self, token_ids: Seq[int], slot_start: int) -> Tensor | None:
        """Logits `[tokens, vocab]` after each of `token_ids`, one row at a time, over slots from `slot_start`.

        Rounds may be in flight meanwhile. None where the device keeps its scores.
        """
        shape = PromptShape(self.device.prefills[0], True, True, False, True)
        rows: list[Tensor] = []
        for at, token_id in enumerate(token_ids):
            self.device.prompt(
                shape, Chunk((at, at + 1, slot_start, 1, 0, at, 0), (token_id,), 0, (1.0, 1.0, 0.0))
            )
            scores = self.device.scores()
            if scores is None:
                return None
            rows.append(scores)
        return torch.stack(rows)

    @torch.inference_mode()
    def round_seconds(self, rows: int, repeats: int = 4) -> float:
        """Seconds of a greedy round of one sequence with `rows` tree rows, root included; for an idle engine.

        Each is launched before the one before is waited for, as while requests run; the rows do not count.
        """
        size = next(size for size in ROWS if size >= rows)
        shape = Shape(1, size, context=self._models.drafter is not None)
        self.drain([])
        self._rows = []
        self.device.prepare(shape)
        self._host.state.zero_()
        self.device.upload(self._host)
        self.device.launch(shape)()
        began = time.perf_counter()
        flight = self.device.launch(shape)
        for _ in range(repeats - 1):
            following = self.device.launch(shape)
            flight()
            flight = following
        flight()
        return (time.perf_counter() - began) / repeats

    def _continues(
        self, flight: _Flight, shape: Shape, batch: Seq[Sequence], speculation: Seq[Speculation]
    ) -> bool:
        """Whether the device already holds this batch with these settings, ended sequences apart."""
        held = [
            (row, how) for row, how in zip(self._rows, flight.speculation, strict=False) if row is not None
        ]
        return (
            shape == flight.shape
            and len(held) == len(batch)
            and all(row is sequence for (row, _), sequence in zip(held, batch, strict=True))
            and all(mine == how for (_, mine), how in zip(held, speculation, strict=True))
        )

    def _upload(self, shape: Shape, batch: Seq[Sequence], speculation: Seq[Speculation]) -> None:
        """Writes the state of `batch` to the device; rows beyond it are inactive."""
        extend_drafter(self._models, batch)
        block = self.device.block
        state, stops = self._host.state.numpy(), self._host.stops.numpy()
        state[:] = 0
        stops[:] = -1
        for row, (sequence, how) in enumerate(zip(batch, speculation, strict=True)):
            drafts = sequence.keeps_features and shape.rows > 1
            state[:, row] = (
                sequence.token_ids[-1],
                sequence.committed_len,
                sequence.extent.start,
                sequence.remaining,
                _nodes(how, block) if drafts else 0,
                how.mode == "chain",
                1,
                block,
                min(sequence.sampling.top_k, MOST_KEPT),
            )
            sampling = sequence.sampling
            self._host.seeds[row] = signed_seed(sampling.seed)
            self._host.odds.numpy()[:, row] = _odds(sampling)
            ids = sorted(sampling.stop_token_ids)
            stops[row, : len(ids)] = ids
        self._rows = list(batch)
        self.device.upload(self._host)

    def _launch(self, shape: Shape, speculation: Seq[Speculation]) -> _Flight:
        return _Flight(shape, tuple(self._rows), tuple(speculation), self.device.launch(shape))

    def _collect(self, flight: _Flight, live: Seq[Sequence]) -> Played:
        """Waits for a round and takes its results into the sequences that are still there."""
        results = flight.results()
        table, marks = results.table, results.stamps
        there = {id(sequence) for sequence in live}
        sequences: list[Sequence] = []
        how: list[Speculation] = []
        rounds: list[SequenceRound] = []
        nodes = 0
        for row, sequence in enumerate(flight.rows):
            if sequence is None or id(sequence) not in there:
                continue
            outcome = self._outcome(flight.shape, table[row])
            nodes += int(table[row, 3])
            self._take(sequence, outcome, flight.shape.context)
            sequence.plain_reason = flight.speculation[row].reason
            if outcome.finish is not None and row < len(self._rows) and self._rows[row] is sequence:
                self._rows[row] = None
            sequences.append(sequence)
            how.append(flight.speculation[row])
            rounds.append(outcome)
        seconds = tuple((end - start) * 1e-9 for start, end in zip(marks, marks[1:], strict=False))
        return Played(tuple(sequences), tuple(how), RoundResult(tuple(rounds), nodes, seconds))

    def _outcome(self, shape: Shape, record: np.ndarray) -> SequenceRound:
        """One sequence's part of a round from its words of the result (`accept_kernel` says which)."""
        length, kept, finish, nodes = record[:4].tolist()
        block = self.device.block
        ids = record[4 : 4 + kept].tolist()
        path = tuple(record[4 + block : 4 + block + kept].tolist())
        tokens = [OutputToken(token_id, i + 1 < length) for i, token_id in enumerate(ids)]
        columns = record[4 + 2 * block :].reshape(4, shape.rows)[:, :nodes]
        return SequenceRound(tokens, path, NodeTable(columns), FINISHES[finish])

    def _take(self, sequence: Sequence, outcome: SequenceRound, context: bool) -> None:
        sequence.committed_len += len(outcome.path)
        if context and sequence.keeps_features:
            sequence.drafter_len = sequence.committed_len
        sequence.append(outcome.tokens)
        sequence.rounds += 1
        sequence.num_correct_drafts += sum(token.drafted for token in outcome.tokens)
        sequence.check()


def _unusual(sequence: Sequence) -> str | None:
    """What of a request's settings no kernel knows; None if nothing."""
    sampling = sequence.sampling
    if sequence.logprobs is not None:
        return "logprobs"
    if sampling.counts_tokens or sampling.logit_bias or sampling.min_tokens:
        return "penalties, logit_bias or min_tokens"
    if len(sampling.stop_token_ids) > STOPS:
        return f"more than {STOPS} stop tokens"
    return None


def _odds(sampling: Sampling) -> tuple[float, float, float]:
    """Temperature (0 = greedy), top_p and min_p as the device has them."""
    return 0.0 if sampling.greedy else sampling.temperature, sampling.top_p, sampling.min_p


def _nodes(how: Speculation, block: int) -> int:
    """Draft nodes a sequence may have."""
    return 0 if how.mode == "off" else block - 1 if how.mode == "chain" else how.tree_budget


def _rows_for(how: Speculation, block: int) -> int:
    nodes = _nodes(how, block)
    return next(rows for rows in ROWS if rows > nodes)
