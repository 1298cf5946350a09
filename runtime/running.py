"""A request in an engine: what is kept of it beside its ticket, its figures, its last events."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from runtime.interface import FinishReason, GenerateEvent, RequestFinished, RequestStats, TokensEmitted
from runtime.scheduler import Ticket
from runtime.sequence import Speculation
from runtime.traces import RequestTraces

Sink = Callable[[GenerateEvent], None]


@dataclass(eq=False)
class Running:
    """What the engine keeps of a request beside its ticket."""

    ticket: Ticket
    sink: Sink
    traces: RequestTraces = field(default_factory=RequestTraces)
    accepts: Counter[int] = field(default_factory=Counter)
    """Decode rounds by accept length."""
    drafted: Counter[Speculation] = field(default_factory=Counter)
    """Decode rounds by how it drafted."""
    continued: str | None = None
    """Under what it goes on since it came from another engine, in words."""


def figures(running: Running, how: Speculation, reason: FinishReason | None = None) -> RequestStats:
    """Figures of a request that drafts as `how` says; `reason`: why it ended, if it did."""
    ticket, sequence = running.ticket, running.ticket.progress
    request, sampling = ticket.request, ticket.admitted.sampling
    outputs = sequence.num_outputs if sequence else 0
    rounds = sequence.rounds if sequence else 0
    decode_s = _span(ticket.first_token_at, ticket.last_token_at)
    state = "queued" if sequence is None else "decoding" if sequence.prefilled else "prefill"
    return RequestStats(
        request_id=ticket.request_id,
        client=request.client,
        workload=request.workload,
        state="finished" if reason else state,
        finish_reason=reason,
        mode=how.mode,
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
        age_s=time.perf_counter() - ticket.submitted_at,
        last_token_age_s=None if reason else _span(ticket.last_token_at, time.perf_counter()),
        queue_s=_span(ticket.submitted_at, ticket.started_at),
        ttft_s=_span(ticket.submitted_at, ticket.first_token_at),
        decode_s=decode_s,
        tok_s=(outputs - 1) / decode_s if decode_s else None,
        finished_at_s=time.time() if reason else None,
        plain_reason=how.reason,
        continued=running.continued,
    )


def end(running: Running, stats: RequestStats, error: str | None) -> None:
    """Gives a request its last events: the text still held back, then how it ended, `stats` saying why."""
    ticket, sequence = running.ticket, running.ticket.progress
    pieces, tail = ticket.stream.finish()
    if pieces:
        running.sink(TokensEmitted(request_id=ticket.request_id, pieces=tuple(pieces)))
    assert stats.finish_reason is not None
    running.sink(
        RequestFinished(
            request_id=ticket.request_id,
            reason=stats.finish_reason,
            text=ticket.stream.text,
            token_ids=tuple(sequence.token_ids[sequence.prompt_len :]) if sequence else (),
            stats=stats,
            tail=tail,
            error=error,
        )
    )


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
