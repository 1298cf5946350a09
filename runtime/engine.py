"""The engine: one `step` starts requests, prefills a chunk and decodes one round, and tells each request what it got.

Everything that decodes goes through `Engine.step`: console, commands, bench, verify and tests. An engine belongs to
the thread that calls it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from runtime.admission import admit
from runtime.auto_play import AutoPlay
from runtime.config import RuntimeConfig
from runtime.interface import (
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    Mode,
    RequestAdmitted,
    RequestFinished,
    RequestRejected,
    RequestStats,
    RoundStats,
    RuntimeBusy,
    TokensEmitted,
    TreeNode,
    TreeTrace,
)
from runtime.loader import Loaded
from runtime.output import TextStream
from runtime.round import Models, RoundResult, SequenceRound, decode_round, hand_over, prefill
from runtime.scheduler import Scheduler, Ticket
from runtime.sequence import OutputToken, Sequence, Speculation

TRACES_KEPT = 64
"""Rounds whose trees are kept for a request."""

Sink = Callable[[GenerateEvent], None]


@dataclass(eq=False)
class _Running:
    """What the engine keeps of a request beside its ticket."""

    ticket: Ticket
    sink: Sink
    traces: deque[tuple[int, int, SequenceRound, int]]
    accepts: Counter[int] = field(default_factory=Counter)
    """Decode rounds by accept length."""


class Engine:
    """One loaded target with its drafter, serving many requests by continuous batching."""

    def __init__(self, loaded: Loaded, config: RuntimeConfig, default_budget: int) -> None:
        self.loaded = loaded
        self.config = config
        self.default_budget = default_budget
        """Tree budget in use where neither request nor configuration names one."""
        self.scheduler = Scheduler(loaded.models.cache)
        self.rounds = 0
        self.auto = AutoPlay(loaded)
        self._requests: dict[str, _Running] = {}
        self._serial = 0

    @property
    def models(self) -> Models:
        return self.loaded.models

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def submit(self, request: GenerateRequest, sink: Sink) -> str:
        """Queues a request, whose events go to `sink`; returns its id.

        Raises RequestRejected for a request that can never run and RuntimeBusy when the queue is full.
        """
        waiting, running = len(self.scheduler.waiting), len(self.scheduler.running)
        if waiting >= self.config.max_queue + max(0, self.config.max_concurrency - running):
            raise RuntimeBusy(
                f"{running} requests run and {waiting} wait already (max_concurrency = {self.config.max_concurrency}, "
                f"max_queue = {self.config.max_queue}); try later"
            )
        admitted = admit(request, self.config, self.loaded.limits, self.loaded.tokenizer)
        self._serial += 1
        request_id = request.request_id or f"r{self._serial}"
        if request_id in self._requests:
            raise RequestRejected(f"request_id: {request_id} is in use by a running request", "request_id")
        stream = TextStream(self.loaded.tokenizer, request.sampling.stop, admitted.stop_token_ids)
        ticket = Ticket(request_id, request, admitted, stream)
        self._requests[request_id] = _Running(ticket, sink, deque(maxlen=TRACES_KEPT))
        self.scheduler.enqueue(ticket)
        return request_id

    def cancel_all(self, error: str, reason: FinishReason = "cancelled") -> int:
        """Ends every request, waiting or running, saying why; returns how many there were."""
        return sum(self.cancel(request_id, reason, error) for request_id in tuple(self._requests))

    def withdraw(self, request_id: str) -> bool:
        """Ends a request that still waits; False if it runs or has ended."""
        running = self._requests.get(request_id)
        return running is not None and running.ticket.sequence is None and self.cancel(request_id)

    def cancel(self, request_id: str, reason: FinishReason = "cancelled", error: str | None = None) -> bool:
        """Ends a request now, freeing its slots; False if it is not here."""
        running = self._requests.get(request_id)
        if running is None:
            return False
        if running.ticket in self.scheduler.waiting:
            self.scheduler.waiting.remove(running.ticket)
            self._close(running, reason, error)
        else:
            self._finish(running, reason, error)
        return True

    def step(self) -> RoundStats | None:
        """Starts what fits, prefills a chunk, decodes one round; returns the round's figures if there was one."""
        drafts = self.models.draft_horizon > 0
        for ticket in self.scheduler.schedule(self.config.max_concurrency, self.config.prefix_reuse, drafts):
            self._announce(self._requests[ticket.request_id])
        self._prefill()
        batch = [running for running in self._active() if running.ticket.sequence.prefilled]  # type: ignore[union-attr]
        if not batch:
            return None
        sequences = [_sequence(running.ticket) for running in batch]
        following = sum(self.follows_auto(sequence.mode) for sequence in sequences)
        self.auto.choose(following)
        speculation = [self.speculation(sequence.mode, sequence.tree_budget) for sequence in sequences]
        models = replace(self.models, draft_noise=self.config.draft_noise)
        positions = [sequence.committed_len for sequence in sequences]
        result = decode_round(models, sequences, speculation)
        self.rounds += 1
        if following == len(batch):
            self.auto.learn(result)
        emitted: list[int] = []
        for running, outcome, how, position in zip(
            batch, result.sequences, speculation, positions, strict=True
        ):
            running.traces.append((self.rounds, position, outcome, how.tree_budget))
            emitted.append(self._deliver(running, outcome.tokens, outcome.finish))
        return self._round_stats(result, emitted)

    def follows_auto(self, mode: str | None) -> bool:
        """Whether a request that asks for `mode` leaves it to auto mode."""
        return mode is None and self.config.mode == "auto" and self.loaded.no_drafter_reason is None

    def speculation(self, mode: str | None, tree_budget: int | None) -> Speculation:
        """How a request that asks for `mode` and `tree_budget` (None: the configured ones) drafts in the next round."""
        if self.follows_auto(mode):
            return self.auto.speculation()
        wanted = mode or self.config.mode
        budget = tree_budget if tree_budget is not None else self.config.tree_budget
        budget = min(self.default_budget if budget is None else budget, self.loaded.limits.max_tree_budget)
        if wanted == "off":
            return Speculation()
        if self.loaded.no_drafter_reason is not None:
            return Speculation(reason=self.loaded.no_drafter_reason)
        if wanted == "chain":
            return Speculation("chain", self.models.draft_horizon)
        if budget == 0:
            return Speculation(reason="tree_budget is 0")
        return Speculation("tree", budget)

    def requests(self) -> tuple[RequestStats, ...]:
        """Figures of all waiting and running requests."""
        return tuple(self._stats(running, None) for running in self._requests.values())

    def trace(self, request_id: str) -> tuple[TreeTrace, ...]:
        """Draft trees of the last rounds of a running request, oldest first."""
        running = self._requests.get(request_id)
        return () if running is None else tuple(self._tree(*trace) for trace in running.traces)

    def check_integrity(self) -> None:
        """Raises AssertionError if a slot leaked: free + used + kept = all."""
        self.scheduler.check_integrity()
        if not self.busy:
            assert self.scheduler.slots_used == 0, f"{self.scheduler.slots_used} slots used by no request"

    def _active(self) -> list[_Running]:
        return [self._requests[ticket.request_id] for ticket in self.scheduler.running]

    def _announce(self, running: _Running) -> None:
        sequence = _sequence(running.ticket)
        running.sink(
            RequestAdmitted(
                request_id=running.ticket.request_id,
                seed=sequence.sampling.seed,
                prompt_tokens=sequence.prompt_len,
                cached_tokens=sequence.cached_len,
            )
        )

    def _prefill(self) -> None:
        """Prefills up to `prefill_chunk` prompt tokens, first come first served."""
        room = self.config.prefill_chunk
        for running in self._active():
            sequence = _sequence(running.ticket)
            if sequence.prefilled:
                continue
            before = sequence.committed_len
            first = prefill(self.models, sequence, room)
            room -= sequence.committed_len - before
            if first is not None:
                self._deliver(running, [first[0]], first[1])
            if room <= 0:
                return

    def _deliver(self, running: _Running, tokens: list[OutputToken], finish: str | None) -> int:
        """Sends what new tokens add to the text; returns how many count, fewer where a stop string ended the text."""
        ticket = running.ticket
        now = time.perf_counter()
        ticket.first_token_at = ticket.first_token_at or now
        ticket.last_token_at = now
        pieces, match = ticket.stream.push(tokens)
        count = len(tokens)
        if match is not None:
            count, finish = match.index + 1, "stop"
            self._drop_tokens(_sequence(ticket), tokens[count:])
        if _sequence(ticket).rounds:
            running.accepts[count] += 1
        if pieces:
            running.sink(TokensEmitted(request_id=ticket.request_id, pieces=tuple(pieces)))
        if finish is not None:
            self._finish(running, "stop" if finish == "stop" else "length")
        return count

    def _drop_tokens(self, sequence: Sequence, dropped: list[OutputToken]) -> None:
        """Takes back tokens behind a stop string, before they enter any count."""
        if dropped:
            del sequence.token_ids[-len(dropped) :]
            sequence.num_correct_drafts -= sum(token.drafted for token in dropped)
            sequence.committed_len = len(sequence.token_ids) - 1
            sequence.drafter_len = min(sequence.drafter_len, sequence.committed_len)
            sequence.pending.clear()

    def _finish(self, running: _Running, reason: FinishReason, error: str | None = None) -> None:
        ticket = running.ticket
        keep = self.config.prefix_reuse and ticket.request.reuse_prefix and reason != "error"
        pieces, tail = ticket.stream.finish()
        if pieces:
            running.sink(TokensEmitted(request_id=ticket.request_id, pieces=tuple(pieces)))
        if keep:
            hand_over(self.models, _sequence(ticket))
        self.scheduler.finish(ticket, keep)
        self._close(running, reason, error, tail)

    def _close(self, running: _Running, reason: FinishReason, error: str | None, tail: str = "") -> None:
        ticket = running.ticket
        del self._requests[ticket.request_id]
        sequence = ticket.sequence
        outputs = tuple(sequence.token_ids[sequence.prompt_len :]) if sequence else ()
        running.sink(
            RequestFinished(
                request_id=ticket.request_id,
                reason=reason,
                text=ticket.stream.text,
                token_ids=outputs,
                stats=self._stats(running, reason),
                tail=tail,
                error=error,
            )
        )

    def _stats(self, running: _Running, reason: FinishReason | None) -> RequestStats:
        ticket, sequence = running.ticket, running.ticket.sequence
        request, sampling = ticket.request, ticket.admitted.sampling
        how = self.speculation(request.mode, request.tree_budget)
        outputs = sequence.num_outputs if sequence else 0
        rounds = sequence.rounds if sequence else 0
        decode_s = _span(ticket.first_token_at, ticket.last_token_at)
        state = "queued" if sequence is None else "decoding" if sequence.prefilled else "prefill"
        return RequestStats(
            request_id=ticket.request_id,
            client=request.client,
            workload=request.workload,
            state="finished" if reason else state,  # type: ignore[arg-type]
            finish_reason=reason,
            mode=_mode(how.mode),
            tree_budget=how.tree_budget,
            temperature=sampling.temperature,
            prompt_tokens=len(ticket.admitted.prompt),
            cached_tokens=sequence.cached_len if sequence else 0,
            output_tokens=outputs,
            rounds=rounds,
            num_correct_drafts=sequence.num_correct_drafts if sequence else 0,
            accept_length=(outputs - 1) / rounds if rounds else None,
            accept_counts=tuple(
                running.accepts[length] for length in range(max(running.accepts, default=-1) + 1)
            ),
            queue_s=_span(ticket.submitted_at, ticket.started_at),
            ttft_s=_span(ticket.submitted_at, ticket.first_token_at),
            decode_s=decode_s,
            tok_s=(outputs - 1) / decode_s if decode_s else None,
            plain_reason=how.reason,
        )

    def _round_stats(self, result: RoundResult, emitted: list[int]) -> RoundStats:
        how = self.speculation(None, None)
        return RoundStats(
            index=self.rounds,
            time_s=time.time(),
            mode=_mode(how.mode),
            tree_budget=how.tree_budget,
            batch=len(emitted),
            nodes=result.nodes,
            emitted=sum(emitted),
            accept_lengths=tuple(emitted),
            draft_depths=tuple(outcome.draft_depth for outcome in result.sequences),
            stage_s=result.stage_s,  # type: ignore[arg-type]
            slots_used=self.scheduler.slots_used,
            slots_total=self.models.cache.slots,
        )

    def _tree(self, index: int, position: int, outcome: SequenceRound, budget: int) -> TreeTrace:
        name = self.loaded.tokenizer.decode
        path = set(outcome.path)
        bonus = outcome.tokens[-1].token_id
        return TreeTrace(
            round_index=index,
            position=position,
            nodes=tuple(
                TreeNode(
                    token_id=token_id,
                    text=name([token_id], skip_special=False),
                    parent=parent,
                    depth=depth,
                    log_prob=log_prob,
                    accepted=i in path,
                )
                for i, (token_id, parent, depth, log_prob) in enumerate(outcome.nodes)
            ),
            bonus_token_id=bonus,
            bonus_text=name([bonus], skip_special=False),
            tree_budget=budget,
        )


def _sequence(ticket: Ticket) -> Sequence:
    assert ticket.sequence is not None
    return ticket.sequence


def _mode(name: str) -> Mode:
    return "tree" if name == "tree" else "chain" if name == "chain" else "off"


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
