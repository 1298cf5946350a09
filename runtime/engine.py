"""The engine: one `step` starts requests, prefills a chunk and decodes one round, and tells each request what it got.

Everything that decodes goes through `Engine.step`: console, commands, bench, verify and tests. An engine belongs to
the thread that calls it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from runtime.admission import admit, readmit
from runtime.auto_play import AutoPlay
from runtime.config import RuntimeConfig
from runtime.interface import (
    FinishReason,
    GenerateRequest,
    RequestAdmitted,
    RequestRejected,
    RequestStats,
    RoundStats,
    RuntimeBusy,
    TokensEmitted,
    TreeTrace,
)
from runtime.loader import Loaded
from runtime.output import TextStream
from runtime.prefill import hand_over, prefill
from runtime.round import Models, Played, RoundResult, decode_round
from runtime.running import Running, Sink, end, figures
from runtime.samples import MEASURING
from runtime.scheduler import Scheduler, Ticket
from runtime.sequence import OutputToken, Sequence, Speculation
from runtime.traces import EndedTraces, RequestTraces, TracedRound, tree_traces

logger = logging.getLogger("ddtree")


class Engine:
    """One loaded target with its drafter, serving many requests by continuous batching."""

    modes_by_request = True
    """Each request, and each round, may have its own mode and budget."""

    def __init__(self, loaded: Loaded, config: RuntimeConfig, default_budget: int) -> None:
        self.loaded = loaded
        self.config = config
        self.default_budget = default_budget
        """Tree budget in use where neither request nor configuration names one."""
        self.scheduler = Scheduler(loaded.models.cache)
        self.rounds = 0
        self.auto = AutoPlay(loaded)
        self.starts = True
        """False: what waits is not started."""
        self.stepwise: str | None = None
        """Why the last round was launched step by step though there are graphs; None if it was not."""
        self._requests: dict[str, Running] = {}
        self._ended = EndedTraces()
        self._serial = 0
        self.prefilled_tokens, self.prefill_s = 0, 0.0
        """Prompt tokens computed so far, and the seconds that took."""
        self._told_prefill = (0, 0.0)
        """Of these, what the rounds so far have told."""

    @property
    def models(self) -> Models:
        return self.loaded.models

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def release(self) -> list[Running]:
        """Takes all requests out, tokens included, in the order they are to run; their slots are of no more use."""
        order = [*self.scheduler.running, *self.scheduler.waiting]
        released = [self._requests[ticket.request_id] for ticket in order]
        self._requests.clear()
        return released

    def adopt(self, released: Iterable[Running], continued: str, serial: int) -> None:
        """Goes on with the requests of an engine that gave out `serial` ids; `continued` says so to their clients.

        One that does not fit in here is ended, saying why.
        """
        self._serial = max(self._serial, serial)
        for running in released:
            ticket = running.ticket
            self._requests[ticket.request_id] = running
            running.traces = RequestTraces()  # rounds are counted anew, tokens may have other names
            if ticket.progress is not None:
                running.continued = continued
            try:
                self._check_sampling(ticket.request)
                ticket.admitted = readmit(ticket.admitted, self.loaded.limits)
            except RequestRejected as refused:
                self._close(running, "error", str(refused))
            else:
                self.scheduler.adopt(ticket)

    @property
    def serial(self) -> int:
        """How many ids were given out."""
        return self._serial

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
        self._check_sampling(request)
        admitted = admit(request, self.config, self.loaded.limits, self.loaded.tokenizer)
        request_id = request.request_id or self._own_name()
        if request_id in self._requests:
            raise RequestRejected(f"request_id: {request_id} is in use by a running request", "request_id")
        stream = TextStream(self.loaded.tokenizer, request.sampling.stop, admitted.stop_token_ids)
        ticket = Ticket(request_id, request, admitted, stream)
        self._requests[request_id] = Running(ticket, sink)
        self.scheduler.enqueue(ticket)
        return request_id

    def _own_name(self) -> str:
        """A request id that nobody who still runs has chosen."""
        while True:
            self._serial += 1
            name = f"r{self._serial}"
            if name not in self._requests:
                return name

    def _check_sampling(self, request: GenerateRequest) -> None:
        """Raises RequestRejected for settings this engine does not offer; it offers all."""

    def cancel_all(self, error: str, reason: FinishReason = "cancelled") -> int:
        """Ends every request, waiting or running, saying why; returns how many there were."""
        return sum(self.cancel(request_id, reason, error) for request_id in tuple(self._requests))

    def withdraw(self, request_id: str) -> bool:
        """Ends a request that still waits; False if it runs or has ended."""
        running = self._requests.get(request_id)
        return running is not None and running.ticket.progress is None and self.cancel(request_id)

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
        self._start()
        self._prefill()
        batch = [running for running in self._active() if _sequence(running.ticket).prefilled]
        if not batch:
            return None
        sequences = [_sequence(running.ticket) for running in batch]
        following = sum(self.auto.follows(sequence.mode, self.config) for sequence in sequences)
        self.auto.choose(following)
        speculation = [self.speculation(sequence.mode, sequence.tree_budget) for sequence in sequences]
        played = self._play(sequences, speculation)
        if not played.sequences:
            return None
        result = played.result
        self.rounds += 1
        if following == len(batch) == len(played.sequences) and self.stepwise is None:
            self.auto.learn(result, played.speculation)
        owners = {id(_sequence(running.ticket)): running for running in batch}
        emitted: list[int] = []
        for sequence, outcome, how in zip(
            played.sequences, result.sequences, played.speculation, strict=True
        ):
            running, position = owners[id(sequence)], sequence.committed_len - len(outcome.path)
            count = self._deliver(running, outcome.tokens, outcome.finish)
            emitted.append(count)
            running.drafted[how] += 1
            ended = running.ticket.request_id not in self._requests
            running.traces.add(TracedRound(self.rounds, position, outcome, how, count, ended))
        return self._round_stats(result, emitted, played.speculation, auto=2 * following > len(batch))

    def _play(self, sequences: list[Sequence], speculation: list[Speculation]) -> Played:
        """One round: replayed on the device where the batch allows it, else launched from here step by step."""
        graphs, noise = self.loaded.graphs, self.config.draft_noise
        if graphs is not None:
            refusal = graphs.refusal(sequences, speculation)
            if refusal != self.stepwise and refusal is not None:
                logger.info("rounds are launched step by step, which is slower: %s", refusal)
            self.stepwise = refusal
            if refusal is None:
                return graphs.play(sequences, speculation, noise)
            in_flight = graphs.drain(sequences)
            if in_flight is not None:
                return in_flight
        result = decode_round(replace(self.models, draft_noise=noise), sequences, speculation)
        return Played(tuple(sequences), tuple(speculation), result)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Rounds decoded within enter no figure: they are nobody's traffic."""
        rounds = self.rounds
        try:
            yield
        finally:
            self.rounds, self._told_prefill = rounds, (self.prefilled_tokens, self.prefill_s)

    def catch_up(self, tick: Callable[[], object]) -> None:
        """Computes keys and values of all requests that run; `tick` is called after each chunk."""
        self._start()
        while not all(_sequence(running.ticket).prefilled for running in self._active()):
            self._prefill()
            tick()
            self._start()

    def within_capture(self, _wanted: RuntimeConfig) -> dict[str, str]:
        """Fields that take their values in `_wanted` without a rebuild, though graphs were captured; with the cost."""
        return {}

    def speculation(self, mode: str | None, tree_budget: int | None) -> Speculation:
        """How a request that asks for `mode` and `tree_budget` (None: the configured ones) drafts in the next round."""
        if self.auto.follows(mode, self.config):
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
        return tuple(self.stats(running) for running in self._requests.values())

    def trace(self, request_id: str, after: int = 0) -> tuple[TreeTrace, ...]:
        """Draft trees of the last rounds, with an index above `after`, of a request that runs or ended lately."""
        return tree_traces(self.traced(request_id, after), self.token_name)

    def traced(self, request_id: str, after: int = 0) -> tuple[TracedRound, ...]:
        """What `trace` is made of; cheap, and shaped elsewhere than in the engine's thread."""
        running = self._requests.get(request_id)
        traces = self._ended.get(request_id) if running is None else running.traces
        return () if traces is None else traces.since(after)

    def token_name(self, token_id: int) -> str:
        """The text of one token, special tokens by name."""
        return self.loaded.tokenizer.decode([token_id], skip_special=False)

    def check_integrity(self) -> None:
        """Raises AssertionError if a slot leaked: free + used + kept = all."""
        self.scheduler.check_integrity()
        if not self.busy:
            assert self.scheduler.slots_used == 0, f"{self.scheduler.slots_used} slots used by no request"

    def _start(self) -> None:
        drafts = self.models.draft_horizon > 0
        room = self.config.max_concurrency if self.starts else 0
        for ticket in self.scheduler.schedule(room, self.config.prefix_reuse, drafts):
            self._announce(self._requests[ticket.request_id])

    def _active(self) -> list[Running]:
        return [self._requests[ticket.request_id] for ticket in self.scheduler.running]

    def _announce(self, running: Running) -> None:
        sequence = _sequence(running.ticket)
        if running.continued is not None:
            return
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
            before, began = sequence.committed_len, time.perf_counter()
            graphs = self.loaded.graphs
            first = graphs.prefill(sequence, room) if graphs else prefill(self.models, sequence, room)
            room -= sequence.committed_len - before
            self.prefilled_tokens += sequence.committed_len - before
            self.prefill_s += time.perf_counter() - began
            if first is not None:
                self._deliver(running, [first[0]], first[1])
            if room <= 0:
                return

    def _deliver(self, running: Running, tokens: list[OutputToken], finish: str | None) -> int:
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

    def _finish(self, running: Running, reason: FinishReason, error: str | None = None) -> None:
        ticket = running.ticket
        keep = self.config.prefix_reuse and ticket.request.reuse_prefix and reason != "error"
        if keep:
            hand_over(self.models, _sequence(ticket))
        self.scheduler.finish(ticket, keep)
        self._close(running, reason, error)

    def _close(self, running: Running, reason: FinishReason, error: str | None) -> None:
        del self._requests[running.ticket.request_id]
        if running.ticket.request.client != MEASURING:
            self._ended.keep(running.ticket.request_id, running.traces)
        stats = self.stats(running, reason)
        if running.drafted:
            most = running.drafted.most_common(1)[0][0]
            used = {"mode": most.mode, "tree_budget": most.tree_budget, "plain_reason": most.reason}
            stats = stats.model_copy(update=used)
        end(running, stats, error)

    def stats(self, running: Running, reason: FinishReason | None = None) -> RequestStats:
        """Figures of a request; `reason`: why it ended, if it did."""
        request = running.ticket.request
        return figures(running, self.speculation(request.mode, request.tree_budget), reason)

    def _round_stats(
        self, result: RoundResult, emitted: list[int], speculation: Iterable[Speculation], auto: bool
    ) -> RoundStats:
        drafted = Counter((how.mode, how.tree_budget) for how in speculation)
        mode, tree_budget = drafted.most_common(1)[0][0]
        tokens, seconds = self._told_prefill
        self._told_prefill = self.prefilled_tokens, self.prefill_s
        return RoundStats(
            index=self.rounds,
            time_s=time.time(),
            mode=mode,
            tree_budget=tree_budget,
            mixed=len(drafted) > 1,
            auto=auto,
            batch=len(emitted),
            nodes=result.nodes,
            emitted=sum(emitted),
            accept_lengths=tuple(emitted),
            draft_depths=tuple(outcome.draft_depth for outcome in result.sequences),
            stage_s=result.stage_s,
            slots_used=self.scheduler.slots_used,
            slots_total=self.models.cache.slots,
            prefill_tokens=self.prefilled_tokens - tokens,
            prefill_s=self.prefill_s - seconds,
        )


def _sequence(ticket: Ticket) -> Sequence:
    assert ticket.sequence is not None
    return ticket.sequence
