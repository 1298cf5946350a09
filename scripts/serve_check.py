"""Checks of what serving costs on this machine: `make serve-check`, by hand, about five minutes.

One process runs the default model and its HTTP server; requests come in process and over loopback in turn. Then
twenty clients send 500 short requests, half of which leave in the middle, while resident memory is read.
Prints one line a check and one JSON line, exits 1 if a check fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import numpy as np
import psutil
from bench_check import Check

from runtime.config import RuntimeConfig
from runtime.http_security import load_keys
from runtime.interface import GenerateRequest, RequestFinished, SamplingParams, TokensEmitted
from runtime.listener import Listener, ServerSettings, take_address
from runtime.local import LocalRuntime
from runtime.prompt_sets import bundled_prompts

REPETITIONS = 5
TOKENS = 64
SHARE = 0.95
REQUESTS, CLIENTS, SHORT = 500, 20, 8
SLOPE_BYTES = 1 << 20
"""Growth allowed per 100 requests."""


class NoOrders:
    """This process is not steered from outside."""

    def drain(self) -> str:
        return "not done"

    stop = restart = drain


async def in_process(runtime: LocalRuntime, prompt: str) -> float:
    """tok/s of one answer: tokens after the first per second between the first and the last."""
    request = GenerateRequest(
        prompt=prompt,
        sampling=SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True),
        reuse_prefix=False,
    )
    arrivals: list[tuple[float, int]] = []
    async for event in runtime.generate(request):
        if isinstance(event, TokensEmitted):
            arrivals.append((time.perf_counter(), len(event.pieces)))
        elif isinstance(event, RequestFinished):
            assert event.reason == "length", event
    return _rate(arrivals, TOKENS)


async def over_http(client: httpx.AsyncClient, prompt: str) -> float:
    """As `in_process`, of a streamed chat completion; one chunk holds one round's text."""
    arrivals: list[tuple[float, int]] = []
    total = 0
    async for chunk in stream(client, prompt, TOKENS):
        if chunk.get("usage"):
            total = chunk["usage"]["completion_tokens"]
        elif chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
            arrivals.append((time.perf_counter(), 0))
    return _rate(arrivals, total)


async def stream(client: httpx.AsyncClient, prompt: str, tokens: int) -> AsyncIterator[dict[str, object]]:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def _rate(arrivals: list[tuple[float, int]], total: int) -> float:
    return (total - 1) / (arrivals[-1][0] - arrivals[0][0])


async def overhead(runtime: LocalRuntime, client: httpx.AsyncClient) -> Check:
    """Interleaved, one request at a time; the median ratio over six prompts and all repetitions."""
    prompts = [str(one["prompt"]) for kind in bundled_prompts(2).values() for one in kind]
    local: list[float] = []
    served: list[float] = []
    for repetition in range(REPETITIONS + 1):
        for prompt in prompts:
            pair = await in_process(runtime, prompt), await over_http(client, prompt)
            if repetition:  # the first one warms up
                local.append(pair[0])
                served.append(pair[1])
    share = statistics.median(http / own for own, http in zip(local, served, strict=True))
    print(
        f"      in process {statistics.median(local):.1f} tok/s, over HTTP {statistics.median(served):.1f} tok/s, "
        f"{len(local)} pairs",
        file=sys.stderr,
    )
    return Check("generate over HTTP against in process", share >= SHARE, f"{share:.3f} x", f">= {SHARE} x")


async def memory_slope(_: LocalRuntime, client: httpx.AsyncClient) -> Check:
    """Growth of resident memory per 100 requests, fitted over the last four fifths."""
    process = psutil.Process()
    seen: list[int] = []
    waiting = list(range(REQUESTS))

    async def one_client(number: int) -> None:
        chance = random.Random(number)
        while waiting:
            waiting.pop()
            leave = chance.random() < 0.5
            async for _ in stream(
                client, f"Say something about the number {chance.randrange(10**6)}.", SHORT
            ):
                if leave:
                    break
            seen.append(process.memory_info().rss)

    await asyncio.gather(*(one_client(number) for number in range(CLIENTS)))
    late = np.array(seen[len(seen) // 5 :], dtype=float)
    slope = float(np.polyfit(np.arange(len(late)), late, 1)[0]) * 100
    return Check(
        f"memory growth per 100 of {REQUESTS} requests",
        slope < SLOPE_BYTES,
        f"{slope / 2**20:.2f} MiB",
        f"< {SLOPE_BYTES / 2**20:g} MiB",
    )


async def measure(
    check: Callable[[LocalRuntime, httpx.AsyncClient], Awaitable[Check]], config: RuntimeConfig
) -> Check:
    """What `check` finds of a server of its own."""
    with tempfile.TemporaryDirectory() as folder:
        keys = load_keys(os.environ, Path(folder))
        settings = ServerSettings(port=0)
        runtime = LocalRuntime(config)
        listener = Listener(runtime, keys, settings, NoOrders(), take_address(keys, settings))
        listener.start()
        await runtime.wait_ready()
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(
            base_url=listener.url, timeout=300, trust_env=False, limits=limits
        ) as client:
            found = await check(runtime, client)
        await asyncio.to_thread(listener.stop)
        await runtime.aclose()
    return found


def main() -> int:
    checks = [
        asyncio.run(measure(overhead, RuntimeConfig())),
        asyncio.run(measure(memory_slope, RuntimeConfig())),
    ]
    for check in checks:
        print(check.line())
    print(json.dumps({"schema": 1, "checks": [vars(check) for check in checks]}))
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
