"""Replayed rounds against rounds launched step by step, on this GPU: the same texts, paths and trees.

    python scripts/gpu_parity.py --model TARGET --drafter FOLDER [--dtype float32] [--requests 40] [--seed 0]

Two engines over the same weights take the same requests, with changing batches, modes, budgets, temperatures, stop
tokens and cancelled requests. In float32 every text has to be the same; elsewhere a text may part from the other at
a near-tie, and the share that does is printed. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

import torch

from runtime.config import RuntimeConfig, validate
from runtime.engine import Engine
from runtime.interface import GenerateRequest, RequestFinished, SamplingParams
from runtime.loader import load

MODES = (("tree", 7), ("tree", 15), ("off", 0), ("tree", 31), ("chain", 0), ("tree", 11), ("tree", 63))


def make_engine(settings: dict[str, Any], backend: str) -> Engine:
    config = validate({**settings, "attention_backend": backend})
    loaded = load(config)
    print(backend, loaded.rounds, flush=True)
    return Engine(loaded, config, 15)


def run(
    engine: Engine, requests: list[GenerateRequest], flips: list[tuple[str, int]]
) -> tuple[dict[str, Any], list]:
    """Ends and rounds of all requests; the engine's mode changes every 25 rounds, every ninth request is cancelled."""
    ends: dict[str, Any] = {}
    rounds: list = []

    def sink(event: object) -> None:
        if isinstance(event, RequestFinished):
            ends[event.request_id] = (event.reason, event.token_ids, event.stats.rounds)

    waiting = list(requests)
    count = 0
    while waiting or engine.busy:
        while waiting and len(engine.requests()) < engine.config.max_concurrency + 2:
            engine.submit(waiting.pop(0), sink)
        if count % 25 == 0:
            mode, budget = flips[count // 25 % len(flips)]
            change = {"mode": mode, "tree_budget": budget or None}
            engine.config = RuntimeConfig.model_validate({**engine.config.model_dump(), **change})
        stats = engine.step()
        count += 1
        if stats is not None:
            rounds.append(stats)
        if count % 40 == 0:
            for each in engine.requests():
                if int(each.request_id[1:]) % 9 == 8 and each.output_tokens > 5:
                    engine.cancel(each.request_id)
    engine.check_integrity()
    return ends, rounds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--concurrency", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    draws = random.Random(args.seed)
    settings = {
        "model": args.model, "drafter": args.drafter, "dtype": args.dtype, "device": "cuda",
        "max_concurrency": args.concurrency, "prefix_reuse": True, "max_seq_len": 512,
        "kv_slots": 8192, "max_queue": 10_000,
    }  # fmt: skip
    engines = {backend: make_engine(settings, backend) for backend in ("sdpa", "auto")}
    vocab = engines["auto"].models.target.vocab_size
    words = (
        "Tell me about the sea. Write a function that adds two numbers. What is 12 * 17? List ten animals."
    )
    prompt = engines["auto"].loaded.tokenizer.encode(words)
    requests = [
        GenerateRequest(
            prompt_token_ids=tuple(draws.choices(prompt, k=draws.randint(4, 60))),
            request_id=f"r{i}",
            sampling=SamplingParams(
                max_tokens=draws.randint(1, args.tokens), temperature=draws.choice((0.0, 0.0, 0.7, 1.0)), seed=i,
                stop_token_ids=tuple(draws.sample(range(vocab), 2)),
            ),
            mode=draws.choice((None, None, None, "off", "tree", "chain")),
            tree_budget=draws.choice((None, 5, 15)),
        )
        for i in range(args.requests)
    ]  # fmt: skip
    found = {name: run(engine, requests, list(MODES)) for name, engine in engines.items()}
    (plain, plain_rounds), (fast, fast_rounds) = found["sdpa"], found["auto"]
    same, prefix, total, parted = 0, 0, 0, []
    for name, (reason, ids, _) in plain.items():
        other = fast[name]
        shared = next(
            (i for i, (a, b) in enumerate(zip(ids, other[1], strict=False)) if a != b),
            min(len(ids), len(other[1])),
        )
        cancelled = "cancelled" in (reason, other[0])
        equal = (reason, ids) == other[:2] or (cancelled and shared == min(len(ids), len(other[1])))
        same += equal
        prefix += shared
        total += len(ids)
        if not equal:
            parted.append([name, reason, other[0], len(ids), len(other[1]), shared])
    graphs = engines["auto"].loaded.graphs
    print(json.dumps({
        "dtype": args.dtype, "requests": len(plain), "same": same, "parted": parted[:6],
        "rounds": [len(plain_rounds), len(fast_rounds)],
        "accept": [round(sum(s.emitted for s in r) / sum(s.batch for s in r), 4) for r in (plain_rounds, fast_rounds)],
        "graphs": graphs.device.captured if graphs else 0,
        "capture_s": round(graphs.device.capture_s, 1) if graphs else 0,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
