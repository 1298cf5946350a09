"""Decodes prompts on an engine, some at a time: what the measuring scripts have in common."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

from runtime.engine import Engine
from runtime.interface import GenerateRequest, RequestFinished, RoundStats, SamplingParams


def numbered(
    prompts: Iterable[dict[str, Any]], *, mode: str, budget: int, temperature: float, tokens: int
) -> list[GenerateRequest]:
    """One request a prompt, `p0`, `p1`, ...; its seed is its number, so that settings can be paired."""
    return [
        GenerateRequest(
            **prompt,
            request_id=f"p{number}",
            mode=mode,
            tree_budget=budget or None,
            reuse_prefix=False,
            sampling=SamplingParams(
                max_tokens=tokens, temperature=temperature, seed=number, top_k=0, top_p=1.0
            ),
        )
        for number, prompt in enumerate(prompts)
    ]


def decode(
    engine: Engine,
    requests: list[GenerateRequest],
    concurrency: int,
    on_round: Callable[[RoundStats, float], object],
) -> tuple[list[RequestFinished], float]:
    """The ends of all requests, in their order, and the seconds from the first submission to the last token.

    `on_round` is told of each round and the seconds of its step.
    """
    ends: dict[str, RequestFinished] = {}

    def sink(event: object) -> None:
        if isinstance(event, RequestFinished):
            ends[event.request_id] = event

    waiting = iter(requests)
    flying: list[str] = []
    began = time.perf_counter()
    while True:
        flying = [each for each in flying if each not in ends]
        started = [engine.submit(each, sink) for each in itertools.islice(waiting, concurrency - len(flying))]
        flying += started
        if not flying:
            break
        at = time.perf_counter()
        stats = engine.step()
        if stats is not None:
            on_round(stats, time.perf_counter() - at)
    seconds = time.perf_counter() - began
    return [ends[request.request_id or ""] for request in requests], seconds


def gaps(
    engine: Engine, prompt_tokens: int, mode: str, budget: int, passes: int, running: int = 4
) -> dict[str, Any]:
    """Milliseconds between rounds of `running` requests, while a prompt is computed and while none is.

    A pass lasts until the prompt has its first eight tokens, which takes it into the batch; the first pass, which may
    capture graphs, is dropped.
    """
    vocab, limit = engine.loaded.limits.vocab_size, engine.loaded.limits.max_seq_len
    busy: list[float] = []
    alone: list[float] = []
    prefill_s: list[float] = []
    for number in range(passes + 1):
        ends: list[str] = []

        def sink(event: object, ends: list[str] = ends) -> None:
            if isinstance(event, RequestFinished):
                ends.append(event.request_id)

        def ask(name: str, length: int, tokens: int, salt: int, sink: Any = sink) -> None:
            ids = tuple((7 * i * (salt + 3) + salt) % (vocab - 8) for i in range(length))
            sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            engine.submit(
                GenerateRequest(
                    prompt_token_ids=ids, request_id=name, mode=mode, tree_budget=budget or None, sampling=sampling,
                    reuse_prefix=False,
                ),
                sink,
            )  # fmt: skip

        for each in range(running):
            ask(f"r{each}", 32, limit - 32, number + each)
        while any(each.state != "decoding" for each in engine.requests()):
            engine.step()
        last = time.perf_counter()
        for _ in range(30):
            engine.step()
            now = time.perf_counter()
            alone += [now - last] if number else []
            last = now
        ask("long", prompt_tokens, 8, 100 + number)
        began = time.perf_counter()
        while "long" not in ends:
            stats = engine.step()
            if stats is None or stats.batch < running:
                raise RuntimeError(
                    "the running requests did not decode beside the prompt; ask for fewer tokens"
                )
            now = time.perf_counter()
            busy += [now - last] if number else []
            last = now
        prefill_s += [now - began] if number else []
        engine.cancel_all("measured")
    return {
        "running": running, "prompt_tokens": prompt_tokens, "prefill_chunk": engine.config.prefill_chunk,
        "mode": mode, "tree_budget": budget, "gap_ms": _spread(busy), "gap_ms_without_prompt": _spread(alone),
        "prompt_s": round(sum(prefill_s) / len(prefill_s), 4), "passes": passes,
    }  # fmt: skip


def _spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(1e3 * each for each in seconds)
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    found = {name: round(ordered[round(share * (len(ordered) - 1))], 3) for name, share in at.items()}
    return {**found, "n": len(ordered)}
