"""The real runtime changes its layout under a stream, and loses a rank: text, pauses, memory, processes.

The stream is one sampled request of a fixed seed, longer than all that happens to it; its text is compared with that of
the same request undisturbed, and where they differ judged by teacher forcing in one process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from runtime.config import RuntimeConfig
from runtime.interface import EngineState, GenerateRequest, RequestFinished, SamplingParams, TokensEmitted
from runtime.local import LocalRuntime

Tell = Callable[..., None]
SEED, TEMPERATURE = 3, 0.7
EVERY = 40
"""Tokens of the stream between two changes."""
SETTLE_S = 20.0
MIB = 1 << 20
PROMPT = {"prompt": "Count from one to one thousand in words, one number a line."}


@dataclass
class Stream:
    """A request that runs on while the runtime is changed."""

    runtime: LocalRuntime
    tokens: int
    times: list[float] = field(default_factory=list)
    """When pieces came (monotonic)."""
    count: int = 0
    end: RequestFinished | None = None
    task: asyncio.Task[None] | None = None

    @property
    def request(self) -> GenerateRequest:
        sampling = SamplingParams(max_tokens=self.tokens, temperature=TEMPERATURE, seed=SEED, ignore_eos=True)
        return GenerateRequest(**PROMPT, sampling=sampling, reuse_prefix=False)

    def start(self) -> None:
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self.runtime.generate(self.request):
            if isinstance(event, TokensEmitted):
                self.times.append(time.monotonic())
                self.count += len(event.pieces)
            if isinstance(event, RequestFinished):
                self.end = event

    async def reach(self, tokens: int) -> None:
        """Waits for so many tokens; raises RuntimeError where the stream ended or stands still."""
        deadline = time.monotonic() + 90
        while self.count < tokens:
            if self.end is not None or time.monotonic() > deadline:
                ended = (
                    f"{self.end.reason} ({self.end.error})" if self.end is not None else "nothing for 90 s"
                )
                raise RuntimeError(f"the stream gave {self.count} of {tokens} tokens: {ended}")
            await asyncio.sleep(0.002)

    async def stop(self) -> RequestFinished:
        assert self.task is not None
        running = [each for each in await self.runtime.requests() if each.state != "finished"]
        for each in running:
            await self.runtime.cancel(each.request_id)
        await asyncio.wait_for(self.task, 60)
        assert self.end is not None
        return self.end

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


def used_bytes(device: str) -> list[int]:
    """Memory in use: of each GPU as its driver says; without one, resident bytes of this process."""
    if device == "cuda":
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]
    import psutil

    return [psutil.Process().memory_info().rss]


async def memory_back(device: str, before: list[int], spare: int) -> tuple[bool, list[int], float]:
    """Waits until memory is what it was, `spare` bytes more at most: (whether it is, MiB above, seconds waited)."""
    began = time.monotonic()
    while True:
        above = [now - then for now, then in zip(used_bytes(device), before, strict=True)]
        back = all(each <= spare for each in above)
        if back or time.monotonic() - began > SETTLE_S:
            return back, [round(each / MIB) for each in above], round(time.monotonic() - began, 2)
        await asyncio.sleep(0.1)


def ranks_of(runtime: LocalRuntime) -> tuple[int, ...]:
    """Processes of the layout in force; none in one process."""
    engine = runtime._engine
    gang = getattr(engine.models.target, "gang", None) if engine is not None else None
    return gang.pids if gang is not None else ()


def device_of(runtime: LocalRuntime) -> str:
    assert runtime._engine is not None
    return str(runtime._engine.models.target.device.type)


def there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


async def change(runtime: LocalRuntime, layout: str) -> Any:
    plan = await runtime.preview({"layout": layout})
    return await runtime.apply({"layout": layout}, plan.revision)


async def judge(runtime: LocalRuntime, end: RequestFinished) -> dict[str, Any]:
    """The stream's text against the same request undisturbed in the layout in force."""
    from runtime.garbage import collect
    from runtime.verify import Place, Tally, VerifyPlan

    config = runtime.config

    alone = Stream(runtime, len(end.token_ids))
    alone.start()
    assert alone.task is not None
    await alone.task
    plain = alone.end
    assert plain is not None
    plan = VerifyPlan(config, modes=(config.mode,), seed=SEED, max_tokens=len(end.token_ids))  # type: ignore[arg-type]
    tally = Tally(plan, (config.tree_budget or 0,))

    def look(engine: Any) -> Any:
        if not tally.same(plain, end):
            tally.judge(engine, PROMPT, Place(0, "flips", 0, TEMPERATURE), end)
        collect()  # what judging took is not the runtime's
        return tally.report(engine, 1)

    report = await runtime._call(look)
    shared = next(
        (i for i, (a, b) in enumerate(zip(plain.token_ids, end.token_ids, strict=False)) if a != b),
        len(end.token_ids),
    )
    return {
        "same_tokens": bool(report.identical), "tokens": len(end.token_ids), "same_until": shared,
        "near_ties": len(report.near_ties), "near_ties_allowed": report.allowed_near_ties,
        "divergences": len(report.divergences), "text_ok": report.exit_code == 0, "verdict": report.verdict,
    }  # fmt: skip


async def _warm(runtime: LocalRuntime) -> None:
    """A short request, so that what is captured or cached at first use is there."""
    stream = Stream(runtime, EVERY)
    stream.start()
    assert stream.task is not None
    await stream.task


async def flips(runtime: LocalRuntime, layouts: tuple[str, ...], most: int, spare: int, tell: Tell) -> None:
    """One process -> `layouts` -> one process while a stream of at most `most` tokens runs."""
    before = used_bytes(device_of(runtime))
    stream = Stream(runtime, most)
    stream.start()
    await stream.reach(EVERY)
    pids: set[int] = set()
    for layout in (*layouts, "single"):
        at = stream.count
        report = await change(runtime, layout)
        pids |= set(ranks_of(runtime))
        await stream.reach(stream.count + EVERY)
        tell(
            kind="flip", to=layout, pause_s=report.outage_s, carried=report.carried, failure=report.failure,
            at_token=at, ok=report.failure is None and report.carried == 1,
        )  # fmt: skip
    end = await stream.stop()
    back, above, waited = await memory_back(device_of(runtime), before, spare)
    text = await judge(runtime, end)
    left = [pid for pid in pids if there(pid)]
    tell(
        kind="flips", **text, longest_gap_s=round(stream.longest_gap_s, 3), continued=end.stats.continued,
        memory_back=back, mib_above=above, memory_after_s=waited, processes_left=len(left),
        ok=text["text_ok"] and back and not left,
    )  # fmt: skip


async def kills(
    runtime: LocalRuntime, cases: tuple[tuple[str, int], ...], most: int, spare: int, tell: Tell
) -> None:
    """SIGKILL of a rank in the middle of a step, by layout and rank: how soon it is seen, and what serves then."""
    before = used_bytes(device_of(runtime))
    for layout, rank in cases:
        report = await change(runtime, layout)
        if report.failure is not None:
            tell(kind="kill", layout=layout, ok=False, failure=report.failure)
            continue
        stream = Stream(runtime, most)
        stream.start()
        await stream.reach(EVERY)
        assert runtime._engine is not None
        gang: Any = runtime._engine.models.target.gang  # type: ignore[attr-defined]
        pids = ranks_of(runtime)
        killed = time.monotonic()
        os.kill(pids[rank], signal.SIGKILL)
        while gang.lost is None:
            await asyncio.sleep(0.0005)
        seen, at = time.monotonic(), stream.count
        status = await runtime.status()
        while status.state is not EngineState.DEGRADED and time.monotonic() < seen + 120:
            if status.state is EngineState.FAILED:
                break
            await asyncio.sleep(0.005)
            status = await runtime.status()
        serving = time.monotonic()
        await stream.reach(at + EVERY)
        streaming = next((each for each in stream.times if each > seen), time.monotonic())
        end = await stream.stop()
        back, above, waited = await memory_back(device_of(runtime), before, spare)
        text = await judge(runtime, end)
        left = [pid for pid in pids if there(pid)]
        tell(
            kind="kill", layout=layout, rank=rank, cause=gang.lost, seen_s=round(seen - killed, 3),
            serving_s=round(serving - killed, 2), next_token_s=round(streaming - killed, 2), reason=status.reason,
            state=status.state.value, **text, memory_back=back, mib_above=above, memory_after_s=waited,
            processes_left=len(left), ok=text["text_ok"] and back and not left and seen - killed < 2,
        )  # fmt: skip


async def with_runtime(config: RuntimeConfig, work: Callable[[LocalRuntime], Any]) -> None:
    """Runs `work` on a runtime that has served one request, and closes it whatever happens."""
    runtime = LocalRuntime(config)
    try:
        await runtime.wait_ready()
        await _warm(runtime)
        await work(runtime)
    finally:
        await runtime.aclose()
