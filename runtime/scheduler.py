"""Who runs: the waiting queue, the running requests, and the slots and kept prefixes between them.

Clients take turns, and each client's own requests run in the order they came (start-time fair queueing, every
request at the same cost). A request that does not fit yet keeps those behind it waiting, so a long prompt cannot
starve. Every extent is owned by a running request or by a kept prefix, which `check_integrity` proves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from runtime.admission import Admitted
from runtime.interface import GenerateRequest
from runtime.kv_cache import Extent, KVCache
from runtime.output import TextStream
from runtime.sequence import Sequence


@dataclass(eq=False)
class Prefix:
    """`len(token_ids)` committed tokens; the first `drafter_len` have drafter keys and values too."""

    token_ids: tuple[int, ...]
    drafter_len: int
    extent: Extent


class PrefixCache:
    """Finished requests' prefixes, kept in their slots until those are needed; the least recently used goes first."""

    def __init__(self) -> None:
        self._entries: list[Prefix] = []

    @property
    def slots(self) -> int:
        return sum(entry.extent.size for entry in self._entries)

    def extents(self) -> list[Extent]:
        """Slots this cache owns."""
        return [entry.extent for entry in self._entries]

    def add(self, entry: Prefix) -> list[Prefix]:
        """Keeps `entry`; returns the entries it makes useless (their tokens begin it), for their slots to be freed."""
        covered = [old for old in self._entries if entry.token_ids[: len(old.token_ids)] == old.token_ids]
        self._entries = [old for old in self._entries if old not in covered] + [entry]
        return covered

    def match(self, token_ids: Seq[int], with_drafter: bool) -> tuple[Prefix, int] | None:
        """The entry with the longest common beginning, and its length; marks it as used.

        At least one token of `token_ids` is left to compute, since the next token's logits come from it.
        """
        best: tuple[Prefix, int] | None = None
        for entry in self._entries:
            limit = min(len(entry.token_ids), len(token_ids) - 1)
            if with_drafter:
                limit = min(limit, entry.drafter_len)
            length = 0
            while length < limit and entry.token_ids[length] == token_ids[length]:
                length += 1
            if length and (best is None or length > best[1]):
                best = (entry, length)
        if best is not None:
            self._entries.remove(best[0])
            self._entries.append(best[0])
        return best

    def evict(self, keep: Prefix | None = None) -> Prefix | None:
        """Drops the least recently used entry other than `keep`; None if there is none."""
        for entry in self._entries:
            if entry is not keep:
                self._entries.remove(entry)
                return entry
        return None

    def clear(self) -> list[Prefix]:
        """Drops and returns all entries."""
        dropped, self._entries = self._entries, []
        return dropped


@dataclass(eq=False)
class Ticket:
    """One request in the engine, from submission to its last event."""

    request_id: str
    request: GenerateRequest
    admitted: Admitted
    stream: TextStream
    turn: int = 0
    """Place in the queue among the clients, lowest first."""
    submitted_at: float = field(default_factory=time.perf_counter)
    sequence: Sequence | None = None
    carried: Sequence | None = None
    """Its tokens so far where it comes from another engine and waits for slots in this one."""
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def progress(self) -> Sequence | None:
        """Its tokens so far, whether it runs or is to run on; None before it has started."""
        return self.sequence or self.carried


class Scheduler:
    """Queues, slots and kept prefixes of one engine."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.waiting: deque[Ticket] = deque()
        self.running: list[Ticket] = []
        self.prefixes = PrefixCache()
        self._turn = 0
        """Turn of the request that started last."""

    @property
    def slots_used(self) -> int:
        """Slots of running requests."""
        return self.cache.slots - self.cache.free_slots - self.prefixes.slots

    def enqueue(self, ticket: Ticket) -> None:
        """Queues a request behind its client's own, in turn with those of other clients.

        Turns never lie before the one that started last, so nobody can be passed over for ever.
        """
        client = ticket.request.client
        own = (each.turn for each in self.waiting if each.request.client == client)
        ticket.turn = max(own, default=self._turn) + 1
        later = (place for place, each in enumerate(self.waiting) if each.turn > ticket.turn)
        self.waiting.insert(next(later, len(self.waiting)), ticket)

    def adopt(self, ticket: Ticket) -> None:
        """Queues a request of another engine last; they are given in the order in which they are to run."""
        ticket.carried, ticket.sequence = ticket.progress, None
        if ticket.carried is not None:
            self._turn = max(self._turn, ticket.turn)
        elif not self.waiting:
            self._turn = ticket.turn - 1
        self.waiting.append(ticket)

    def schedule(self, max_running: int, reuse: bool, drafts: bool) -> list[Ticket]:
        """Starts waiting requests while there is room and returns them."""
        started: list[Ticket] = []
        while self.waiting and len(self.running) < max_running:
            ticket = self.waiting[0]
            sequence = self._place(ticket, reuse and ticket.request.reuse_prefix, drafts)
            if sequence is None:
                break
            ticket.sequence = sequence
            ticket.started_at = ticket.started_at or time.perf_counter()
            self._turn = ticket.turn
            self.running.append(self.waiting.popleft())
            started.append(ticket)
        return started

    def finish(self, ticket: Ticket, keep: bool) -> None:
        """Ends a running request; its committed tokens stay as a reusable prefix if `keep`."""
        self.running.remove(ticket)
        sequence = ticket.sequence
        assert sequence is not None
        if not keep or sequence.committed_len == 0:
            self.cache.free(sequence.extent)
            return
        extent = self.cache.shrink(sequence.extent, sequence.committed_len)
        tokens = tuple(sequence.token_ids[: sequence.committed_len])
        for covered in self.prefixes.add(Prefix(tokens, sequence.drafter_len, extent)):
            self.cache.free(covered.extent)

    def drop_prefixes(self) -> None:
        """Forgets all kept prefixes."""
        for entry in self.prefixes.clear():
            self.cache.free(entry.extent)

    def check_integrity(self) -> None:
        """Raises AssertionError unless free, running and kept slots are all slots, each once."""
        running = [ticket.sequence.extent for ticket in self.running if ticket.sequence is not None]
        self.cache.check_integrity([*running, *self.prefixes.extents()])

    def _place(self, ticket: Ticket, reuse: bool, drafts: bool) -> Sequence | None:
        """A sequence with slots for `ticket`, its longest kept prefix copied in; None if there is no room yet."""
        request, admitted = ticket.request, ticket.admitted
        may_draft = drafts and request.mode != "off"
        carried = ticket.carried
        known = admitted.prompt if carried is None else carried.token_ids[: carried.prefill_len]
        found = self.prefixes.match(known, may_draft) if reuse else None
        extent = self._allocate(admitted.slots, found[0] if found else None)
        if extent is None and found is not None:
            found = None
            extent = self._allocate(admitted.slots, None)
        if extent is None:
            return None
        if carried is not None:
            sequence, ticket.carried = carried.moved(extent, may_draft), None
        else:
            sequence = Sequence(
                request_id=ticket.request_id,
                token_ids=list(admitted.prompt),
                prompt_len=len(admitted.prompt),
                sampling=admitted.sampling,
                max_new_tokens=admitted.max_new_tokens,
                extent=extent,
                mode=request.mode,
                tree_budget=request.tree_budget,
                logprobs=request.sampling.logprobs,
                keeps_features=may_draft,
            )
        if found is not None:
            entry, length = found
            self.cache.copy_prefix(entry.extent, extent, length)
            sequence.committed_len = sequence.cached_len = length
            sequence.drafter_len = min(length, entry.drafter_len)
        return sequence

    def _allocate(self, size: int, keep: Prefix | None) -> Extent | None:
        """Slots, making room by dropping kept prefixes other than `keep`."""
        while True:
            extent = self.cache.allocate(size)
            if extent is not None:
                return extent
            dropped = self.prefixes.evict(keep)
            if dropped is None:
                return None
            self.cache.free(dropped.extent)
