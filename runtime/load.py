"""Load on a server: a number of users who each wait for their answer (closed loop), or requests that come by the clock
whatever the server does (open loop, Poisson).

In open loop times count from the moment a request was due, not from the moment it could be sent, so that a server that
stalls cannot hide the wait of those who came meanwhile (no coordinated omission). All times are the event loop's.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from runtime.interface import (
    GenerateRequest,
    Mode,
    RequestFinished,
    Runtime,
    RuntimeFault,
    SamplingParams,
    TokensEmitted,
)

Prompt = Mapping[str, Any]
"""`prompt` or `messages`, as `runtime.prompt_sets` reads them."""


@dataclass(frozen=True)
class Load:
    """What is sent: by exactly one of `concurrency` and `rate`, up to `requests` or for `duration_s`, the earlier."""

    concurrency: int | None = None
    """Closed loop: users at a time."""
    rate: float | None = None
    """Open loop: mean requests per second."""
    requests: int | None = 32
    duration_s: float | None = None
    warm_up: int = 4
    """Requests before anything is measured."""
    max_tokens: int = 64
    temperature: float = 0.0
    mode: Mode | None = None
    """None: the server's own."""
    tree_budget: int | None = None
    ignore_eos: bool = False
    timeout_s: float = 600.0
    """A request that takes longer has failed."""
    seed: int = 0
    """Of the arrival times and of the first request's sampling."""

    def at(self, **changes: Any) -> Load:
        return replace(self, **changes)


@dataclass(frozen=True)
class Shot:
    """One request."""

    number: int
    prompt: Prompt
    load: Load

    @property
    def seed(self) -> int:
        return self.load.seed + self.number


@dataclass(frozen=True)
class Arrived:
    """Text of one or more tokens reached the client."""


@dataclass(frozen=True)
class Ended:
    """The end of an answer, with what the server counted; None where it does not tell."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    rounds: int | None = None
    num_correct_drafts: int | None = None


class ShotFailed(RuntimeFault):
    """A request that got no whole answer; its text is the reason, the same for the same cause."""


class Target(Protocol):
    """What answers requests."""

    def send(self, shot: Shot) -> AsyncIterator[Arrived | Ended]:
        """Sends one request; yields as its parts arrive. Raises ShotFailed."""
        ...


@dataclass(frozen=True)
class Answer:
    """One measured request. Moments in seconds since the load began."""

    number: int
    due_s: float
    """When it should have been sent."""
    sent_s: float
    first_s: float | None = None
    """First token."""
    last_s: float | None = None
    """Last token."""
    gaps_s: tuple[float, ...] = ()
    """Pauses between arrivals of text."""
    over_s: float | None = None
    """When nothing more of it could come: its end, failure or time-out."""
    chunks: int = 0
    end: Ended = Ended()
    error: str | None = None

    @property
    def ended_s(self) -> float:
        return self.sent_s if self.over_s is None else self.over_s

    @property
    def tokens(self) -> int:
        """Output tokens as the server counted them, else arrivals of text."""
        return self.chunks if self.end.output_tokens is None else self.end.output_tokens

    @property
    def longest_gap_s(self) -> float | None:
        return max(self.gaps_s, default=None)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.last_s is None else self.last_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first."""
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)


@dataclass(frozen=True)
class LoadRun:
    """All measured requests of one load."""

    load: Load
    answers: tuple[Answer, ...]
    duration_s: float
    """From the beginning to the end of the last answer."""


def arrivals(load: Load) -> Iterator[float]:
    """When requests of an open loop are due, in seconds: a Poisson process of `rate`, the same for the same seed."""
    if load.rate is None:
        raise ValueError("a load without rate has no arrival times")
    draws = random.Random(load.seed)
    at = 0.0
    for _ in itertools.count() if load.requests is None else range(load.requests):
        at += draws.expovariate(load.rate)
        if load.duration_s is not None and at >= load.duration_s:
            return
        yield at


async def run_load(
    load: Load,
    target: Target,
    prompts: Sequence[Prompt],
    progress: Callable[[str], None] = lambda _line: None,
) -> LoadRun:
    """Sends the warm-up, waits for it, then the load itself; returns when every answer has ended."""
    at_once = load.concurrency or 1
    if load.warm_up:
        progress(f"warm-up, {load.warm_up} requests")
        warm = load.at(concurrency=at_once, rate=None, requests=load.warm_up, duration_s=None)
        await _closed(_Sender(warm, target, prompts, lambda _line: None))
    sender = _Sender(load, target, prompts, progress)
    await (_closed(sender) if load.rate is None else _open(sender))
    answers = tuple(sorted(sender.answers, key=lambda each: each.number))
    return LoadRun(load, answers, max((each.ended_s for each in answers), default=0.0))


class _Sender:
    """Sends single requests and keeps what came back."""

    def __init__(
        self, load: Load, target: Target, prompts: Sequence[Prompt], progress: Callable[[str], None]
    ) -> None:
        self.load = load
        self.answers: list[Answer] = []
        self._target = target
        self._prompts = prompts
        self._progress = progress
        self._clock = asyncio.get_running_loop().time
        self._start = self._clock()

    def now(self) -> float:
        return self._clock() - self._start

    async def send(self, number: int, due_s: float) -> None:
        shot = Shot(number, self._prompts[number % len(self._prompts)], self.load)
        answer = Answer(number, due_s, self.now())
        gaps: list[float] = []
        try:
            async with asyncio.timeout(self.load.timeout_s):
                async for event in self._target.send(shot):
                    now = self.now()
                    if isinstance(event, Arrived) and answer.last_s is not None:
                        gaps.append(now - answer.last_s)
                    answer = _after(answer, event, now)
        except TimeoutError:
            answer = replace(answer, error=f"no whole answer within {self.load.timeout_s:g} s")
        except ShotFailed as failed:
            answer = replace(answer, error=str(failed))
        if answer.error is None and answer.first_s is None:
            answer = replace(answer, error="an answer without text")
        self.answers.append(replace(answer, over_s=self.now(), gaps_s=tuple(gaps)))
        failed_ones = sum(each.error is not None for each in self.answers)
        of = f" of {self.load.requests}" if self.load.requests is not None else ""
        self._progress(f"{len(self.answers)}{of} answers, {failed_ones} failed, {self.now():.1f} s")


def _after(answer: Answer, event: Arrived | Ended, now_s: float) -> Answer:
    if isinstance(event, Ended):
        return replace(answer, end=event)
    first = now_s if answer.first_s is None else answer.first_s
    return replace(answer, first_s=first, last_s=now_s, chunks=answer.chunks + 1)


async def _closed(sender: _Sender) -> None:
    """`concurrency` users, each of whom sends the next request when the answer to the last one has ended."""
    load = sender.load
    numbers = itertools.count() if load.requests is None else iter(range(load.requests))

    async def user() -> None:
        for number in numbers:
            now = sender.now()
            if load.duration_s is not None and now >= load.duration_s:
                return
            await sender.send(number, now)

    async with asyncio.TaskGroup() as users:
        for _ in range(load.concurrency or 1):
            users.create_task(user())


async def _open(sender: _Sender) -> None:
    """Requests by the clock; none waits for another."""
    async with asyncio.TaskGroup() as sent:
        for number, due in enumerate(arrivals(sender.load)):
            await asyncio.sleep(max(0.0, due - sender.now()))
            sent.create_task(sender.send(number, due))


class RuntimeTarget:
    """A runtime as the target of a load, without HTTP in between."""

    def __init__(self, runtime: Runtime, client: str = "bench") -> None:
        self._runtime = runtime
        self._client = client

    async def send(self, shot: Shot) -> AsyncIterator[Arrived | Ended]:
        load = shot.load
        request = GenerateRequest(
            **shot.prompt,
            sampling=SamplingParams(
                max_tokens=load.max_tokens,
                temperature=load.temperature,
                seed=shot.seed,
                ignore_eos=load.ignore_eos,
            ),
            mode=load.mode,
            tree_budget=load.tree_budget,
            reuse_prefix=False,
            client=self._client,
        )
        try:
            async with aclosing(self._runtime.generate(request)) as events:  # type: ignore[type-var]
                async for event in events:
                    if isinstance(event, TokensEmitted):
                        yield Arrived()
                    elif isinstance(event, RequestFinished):
                        if event.reason in ("error", "cancelled"):
                            raise ShotFailed(event.error or event.reason)
                        stats = event.stats
                        yield Ended(
                            stats.prompt_tokens, stats.output_tokens, stats.rounds, stats.num_correct_drafts
                        )
        except ShotFailed:
            raise
        except RuntimeFault as fault:
            raise ShotFailed(str(fault)) from None
