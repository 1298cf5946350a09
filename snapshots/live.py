"""A snapshot of a running runtime: its settings, the figures of the last minutes, and a short standard bench.

Everything goes through the `Runtime` interface, so an engine in this process and one behind a URL are alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from runtime.interface import (
    Description,
    EngineState,
    GenerateRequest,
    RequestFinished,
    RequestStats,
    Runtime,
    RuntimeFault,
    RuntimeUnavailable,
    SamplingParams,
    Status,
)
from snapshots.content import Figure, HostIdentity, Measurements, Snapshot
from snapshots.git import StoreFault, StoreRefused

WINDOW_S = 300.0
"""Requests that ended within this time are what was observed."""
CLIENT = "ddtree-snapshot"
"""Client of the requests that measure; they are not traffic."""
PROMPTS = (
    "List the numbers from one to thirty in words.",
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Name ten animals that live in the sea, one a line.",
)
BENCH_TOKENS = 48
ROUNDS = 3
READY_WAIT_S = 900.0


class TrafficArrived(StoreRefused):
    """Other clients' requests run: a measurement would disturb them and be wrong."""


def here() -> str:
    """The name of this host, as a runtime on it gives it."""
    return platform.node()


def now() -> float:
    """Unix time."""
    return time.time()


async def observed(
    runtime: Runtime, label: str = "", note: str = "", limit_s: float | None = None
) -> Snapshot:
    """What runs at this moment, with the figures of the last minutes; disturbs no request.

    Without an environment: that is known only on the host it runs on. After `limit_s` seconds it goes without what a
    busy engine has not told yet.
    """
    status = await runtime.status()
    description: Description | None = None
    requests: tuple[RequestStats, ...] = ()
    with contextlib.suppress(RuntimeUnavailable, TimeoutError):
        async with asyncio.timeout(limit_s):
            description = await runtime.describe()
            requests = await runtime.requests()
    return Snapshot(
        config=status.config,
        measurements=measurements(status, requests),
        note=note,
        label=label,
        host=HostIdentity(name=description.host if description else here()),
        taken_at_s=time.time(),
    )


def not_running(config: dict[str, Any], label: str = "", note: str = "") -> Snapshot:
    """The settings a runtime would start with here."""
    return Snapshot(
        config=config,
        measurements=Measurements(state="not running, not measured"),
        note=note,
        label=label,
        host=HostIdentity(name=here()),
        taken_at_s=time.time(),
    )


def measurements(status: Status, requests: Sequence[RequestStats], now: float | None = None) -> Measurements:
    """Figures of the requests that ended in the last `WINDOW_S` seconds, by mode, budget and temperature."""
    now = time.time() if now is None else now
    recent = [
        each
        for each in requests
        if each.client != CLIENT and each.finished_at_s is not None and now - each.finished_at_s <= WINDOW_S
    ]
    results = (*_live_rows(recent, now), *_baseline_rows(status))
    if any(row.source == "live" for row in results):
        state = f"{status.state}, {len(recent)} requests in the last {WINDOW_S:.0f} s"
    else:
        state = f"{status.state}, no traffic in the last {WINDOW_S:.0f} s"
    return Measurements(state=state, results=results)


def _live_rows(requests: Sequence[RequestStats], now: float) -> Iterator[Figure]:
    groups: dict[tuple[str, int, float], list[RequestStats]] = {}
    for each in requests:
        if each.output_tokens > 0:
            groups.setdefault((each.mode, each.tree_budget, each.temperature), []).append(each)
    for (mode, budget, temperature), rows in sorted(groups.items()):
        begun = min(
            (each.finished_at_s or now) - (each.ttft_s or 0.0) - (each.decode_s or 0.0) for each in rows
        )
        rounds = sum(each.rounds for each in rows)
        decoded = sum(each.output_tokens - 1 for each in rows)
        yield Figure(
            source="live",
            mode=mode,
            tree_budget=budget,
            temperature=temperature,
            requests=len(rows),
            output_tokens=sum(each.output_tokens for each in rows),
            window_s=round(now - begun, 3),
            tok_s=_median(each.tok_s for each in rows),
            accept_length=decoded / rounds if rounds else None,
            ttft_s=_median(each.ttft_s for each in rows),
            tpot_s=_median(
                each.decode_s / (each.output_tokens - 1) if each.decode_s and each.output_tokens > 1 else None
                for each in rows
            ),
            measured_at_s=now,
            conditions="live traffic, requests as they came",
        )


def _baseline_rows(status: Status) -> Iterator[Figure]:
    for each in status.baselines:
        yield Figure(
            source="baseline",
            mode=each.mode,
            tree_budget=each.tree_budget,
            concurrency=1,
            tok_s=each.tok_s,
            measured_at_s=each.measured_at_s,
            conditions=each.conditions,
        )


async def standard_bench(
    runtime: Runtime, under_load: bool = False, progress: Callable[[str], None] = lambda _line: None
) -> Figure:
    """The configured mode, measured: the same prompts one after another, medians; about a dozen short requests.

    Raises:
        TrafficArrived: other clients' requests run, or came while it measured, and not `under_load`.
    """
    status = await runtime.status()
    finished: list[RequestStats] = []
    begun = time.time()
    for turn in range(ROUNDS + 1):
        for number, prompt in enumerate(PROMPTS, start=1):
            if not under_load:
                await _refuse_traffic(runtime)
            progress(f"measuring: round {turn} of {ROUNDS}, prompt {number} of {len(PROMPTS)}")
            stats = await ask(runtime, prompt, BENCH_TOKENS)
            if turn > 0:  # the first round warms up
                finished.append(stats)
        if not under_load:
            await _refuse_traffic(runtime)
    rounds = sum(each.rounds for each in finished)
    decoded = sum(each.output_tokens - 1 for each in finished)
    budget = finished[0].tree_budget
    return Figure(
        source="bench",
        mode=finished[0].mode,
        tree_budget=budget,
        temperature=float(status.config.get("temperature") or 0.0),
        concurrency=1,
        requests=len(finished),
        output_tokens=sum(each.output_tokens for each in finished),
        window_s=round(time.time() - begun, 3),
        tok_s=_median(each.tok_s for each in finished),
        accept_length=decoded / rounds if rounds else None,
        ttft_s=_median(each.ttft_s for each in finished),
        tpot_s=_median(
            each.decode_s / (each.output_tokens - 1) if each.decode_s else None for each in finished
        ),
        measured_at_s=time.time(),
        conditions=f"standard bench: {len(PROMPTS)} prompts x {ROUNDS}, {BENCH_TOKENS} tokens"
        + (", beside other requests" if under_load else ""),
    )


async def ask(runtime: Runtime, prompt: str, max_tokens: int) -> RequestStats:
    """One measuring request in the configured mode, without cached prefixes; raises StoreFault where it fails."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=7, ignore_eos=True)
    request = GenerateRequest(
        prompt=prompt, raw=True, sampling=sampling, reuse_prefix=False, client=CLIENT, workload="snapshot"
    )
    async for event in runtime.generate(request):
        if isinstance(event, RequestFinished):
            if event.reason == "error" or event.stats.output_tokens == 0:
                raise StoreFault(f"the probe request failed: {event.error or 'no token came'}")
            return event.stats
    raise StoreFault("the probe request ended without an answer")


async def wait_ready(runtime: Runtime, limit_s: float = READY_WAIT_S) -> Status:
    """The status once the engine serves; raises StoreFault where it failed or does not within `limit_s`."""
    end = time.monotonic() + limit_s
    while True:
        status = await runtime.status()
        if status.state in (EngineState.READY, EngineState.DEGRADED):
            return status
        if status.state is EngineState.FAILED:
            raise StoreFault(f"the engine failed: {status.reason}")
        if time.monotonic() >= end:
            raise StoreFault(f"the engine is still {status.state} after {limit_s:g} s: {status.reason}")
        await asyncio.sleep(0.1)


async def put_back(runtime: Runtime, config: dict[str, Any], author: str) -> str:
    """Return to `config` after a failed change; one line on how that went."""
    try:
        status = await wait_ready(runtime)
        change = {name: value for name, value in config.items() if status.config.get(name) != value}
        if not change:
            return "what ran before still runs"
        report = await runtime.apply(change, status.revision, author)
        if report.failure is not None:
            return f"and what ran before could not be put back: {report.failure}"
        await wait_ready(runtime)
    except (RuntimeFault, StoreFault) as fault:
        return f"and what ran before could not be put back: {fault}"
    return "what ran before runs again"


async def _refuse_traffic(runtime: Runtime) -> None:
    others = [each for each in await runtime.requests() if each.client != CLIENT and each.state != "finished"]
    if others:
        raise TrafficArrived(
            f"not measured: {len(others)} other request{'s' if len(others) > 1 else ''} in flight; "
            "wait for them or use --under-load"
        )


def _median(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
