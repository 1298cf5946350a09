"""Replayed rounds against rounds launched step by step, on this GPU: the same texts over many rounds.

    python scripts/gpu_parity.py --model TARGET --drafter FOLDER [--dtype float32] [--rounds 2000] [--seconds 480]

Two engines over the same weights take the same requests, in waves, with changing batches, modes, budgets, temperatures,
filters, stop tokens, stop strings and cancelled requests. A text that is not the other's is fed through the plain path:
each of its tokens has to be the plain choice or a near-tie (`ddtree verify` has the rule). One line for each text that
differs and for each wave; the last line is the result, exit code 1 where a token is neither or near-ties are too many.
Without a GPU the replayed rounds run in Triton's interpreter: a dry run in float32, with a tiny pair and few rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from runtime.admission import admit
from runtime.config import validate
from runtime.engine import Engine
from runtime.gpu_device import RoundDevice
from runtime.gpu_graphs import GraphRounds
from runtime.gpu_pass import MOST_ROWS
from runtime.interface import GenerateRequest, RequestFinished, RoundStats, SamplingParams
from runtime.kv_cache import KVCache
from runtime.loader import load
from runtime.prompt_sets import bundled_prompts
from runtime.sampling import Sampling
from runtime.verify import TOKENS_PER_NEAR_TIE, judge_tokens, near_tie_gap

FLIPS = (("tree", 7), ("tree", 15), ("off", 0), ("tree", 31), ("chain", 0), ("tree", 11), ("tree", 63))
FLIP_AFTER = 25
"""Rounds under one mode and budget."""
FILTERS: tuple[dict[str, Any], ...] = (
    {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.95},
    {"top_k": 8, "top_p": 0.8, "min_p": 0.02},
)  # fmt: skip
GPU = torch.cuda.is_available()


@dataclass
class Side:
    """One engine and what it has done."""

    engine: Engine
    rounds: int = 0
    decoded: int = 0
    sequence_rounds: int = 0
    ends: dict[str, RequestFinished] = field(default_factory=dict)

    def saw(self, stats: RoundStats) -> None:
        self.rounds += 1
        self.decoded += stats.emitted
        self.sequence_rounds += stats.batch


@dataclass
class Found:
    """Texts compared so far."""

    texts: int = 0
    same: int = 0
    tokens: int = 0
    near_ties: int = 0
    divergences: int = 0
    taus: dict[float, float] = field(default_factory=dict)


def make_sides(settings: dict[str, Any]) -> tuple[Side, Side]:
    """Rounds from the host, and replayed ones."""
    if GPU:
        plain, fast = (_engine({**settings, "attention_backend": name}) for name in ("sdpa", "auto"))
        if fast.loaded.graphs is None:
            sys.exit(f"nothing to compare: {fast.loaded.rounds}")
        return Side(plain), Side(fast)
    plain = _engine({**settings, "linear": "plain"})
    models, limits = plain.models, plain.loaded.limits
    assert models.drafter is not None
    geometry = models.drafter.config.geometry(models.target.dtype)
    cache = KVCache(
        models.target.geometry, geometry, limits.kv_slots, models.target.device, scratch=MOST_ROWS
    )
    own = replace(models, cache=cache)
    positions = limits.max_seq_len + limits.slot_reserve + MOST_ROWS
    most = plain.config.max_concurrency
    graphs = GraphRounds(own, RoundDevice(own, most, positions, chunk=64), most)
    loaded = replace(plain.loaded, models=own, graphs=graphs, rounds="rounds in Triton's interpreter")
    return Side(plain), Side(Engine(loaded, plain.config, 15))


def _engine(settings: dict[str, Any]) -> Engine:
    config = validate(settings)
    return Engine(load(config), config, 15)


def prompts_of(engine: Engine) -> list[tuple[int, ...]]:
    """Prompts that the drafter does well on: the bundled ones, or those that the tests' tiny pair was trained with."""
    limits = engine.loaded.limits
    if limits.vocab_size < 1000:
        sizes = ((5, 862), (9, 117), (14, 2543), (23, 407))
        return [tuple(random.Random(1000 * s + n).choices(range(280), k=n)) for n, s in sizes]
    bundled = [each for kind in bundled_prompts(16).values() for each in kind]
    admitted = (
        admit(GenerateRequest(**each), engine.config, limits, engine.loaded.tokenizer) for each in bundled
    )
    return [each.prompt for each in admitted if len(each.prompt) < limits.max_seq_len // 2]


def draw_requests(
    engine: Engine, draws: random.Random, wave: int, count: int, tokens: int
) -> list[GenerateRequest]:
    """Requests of every kind; one in nine is cancelled on its way."""
    vocab, known = engine.loaded.limits.vocab_size, prompts_of(engine)
    requests = []
    for i in range(count):
        temperature = draws.choice((0.0, 0.0, 0.7, 1.0, 1.3))
        filters = (
            draws.choice(FILTERS) if temperature and draws.random() < 0.6 else {"top_k": 0, "top_p": 1.0}
        )
        sampling = SamplingParams(
            max_tokens=draws.randint(1, tokens), temperature=temperature, seed=draws.randrange(2**64),
            stop_token_ids=tuple(draws.sample(range(vocab), 2)), stop=draws.choice(((), (), ("e t",), ("\n\n", "q"))),
            **{"top_k": 0, "top_p": 1.0, **filters},
        )  # fmt: skip
        requests.append(
            GenerateRequest(
                prompt_token_ids=_prompt(known, draws, vocab),
                request_id=f"w{wave}r{i}",
                sampling=sampling,
                mode=draws.choice((None, None, None, "off", "tree", "chain")),
                tree_budget=draws.choice((None, 5, 15)),
            )
        )
    return requests


def _prompt(known: list[tuple[int, ...]], draws: random.Random, vocab: int) -> tuple[int, ...]:
    """Mostly one of `known`, else tokens without sense."""
    if draws.random() < 0.75:
        return draws.choice(known)
    return tuple(draws.choices(range(vocab), k=draws.randint(4, 60)))


def play(side: Side, requests: list[GenerateRequest], concurrency: int, flip: int, cancel_after: int) -> None:
    """Decodes a wave; mode and budget change every `FLIP_AFTER` rounds, every ninth request is cancelled."""

    def sink(event: object) -> None:
        if isinstance(event, RequestFinished):
            side.ends[event.request_id] = event

    engine, waiting, count = side.engine, list(requests), 0
    doomed = {request.request_id for request in requests[8::9]}
    engine.config = engine.config.changed({"max_concurrency": concurrency})
    while waiting or engine.busy:
        while waiting and len(engine.requests()) < concurrency + 2:
            engine.submit(waiting.pop(0), sink)
        if count % FLIP_AFTER == 0:
            mode, budget = FLIPS[(flip + count // FLIP_AFTER) % len(FLIPS)]
            engine.config = engine.config.changed({"mode": mode, "tree_budget": budget or None})
        stats = engine.step()
        count += 1
        if stats is not None:
            side.saw(stats)
        for each in engine.requests():
            if each.request_id in doomed and each.output_tokens > cancel_after:
                engine.cancel(each.request_id)
    engine.check_integrity()


def compare(plain: Side, fast: Side, request: GenerateRequest, found: Found) -> None:
    """Counts one text; prints what differs."""
    name = request.request_id or ""
    theirs, mine = plain.ends[name], fast.ends[name]
    found.texts += 1
    found.tokens += len(mine.token_ids)
    cancelled = "cancelled" in (theirs.reason, mine.reason)
    shared = min(len(theirs.token_ids), len(mine.token_ids))
    equal = theirs.token_ids == mine.token_ids and theirs.text == mine.text and theirs.reason == mine.reason
    if equal or (cancelled and theirs.token_ids[:shared] == mine.token_ids[:shared]):
        found.same += 1
        return
    asked = request.sampling
    temperature = asked.temperature or 0.0
    sampling = Sampling(
        temperature, asked.top_p or 1.0, asked.top_k or 0, asked.min_p, asked.seed or 0,
        stop_token_ids=frozenset(asked.stop_token_ids),
    )  # fmt: skip
    prompt = request.prompt_token_ids or ()
    if temperature not in found.taus:
        known = tuple(random.Random(0).choices(range(plain.engine.loaded.limits.vocab_size), k=96))
        found.taus[temperature] = near_tie_gap(fast.engine, temperature, known)
    tau = found.taus[temperature]
    parted = judge_tokens(plain.engine, prompt, mine.token_ids, sampling, tau)
    near = sum(margin <= tau for _, _, margin in parted)
    found.near_ties += near
    # A text may also part where every token is the plain choice: then the other one has the near-tie, or a bug.
    other = judge_tokens(plain.engine, prompt, theirs.token_ids, sampling, tau)
    wrong = len(parted) - near + (not parted and not any(margin <= tau for _, _, margin in other))
    found.divergences += wrong
    at = next((i for i in range(shared) if theirs.token_ids[i] != mine.token_ids[i]), shared)
    print(json.dumps({
        "request": name, "kind": "DIVERGENCE" if wrong else "near-tie", "temperature": temperature,
        "filters": [sampling.top_k, sampling.top_p, sampling.min_p], "mode": request.mode, "parted_at": at,
        "ends": [theirs.reason, mine.reason], "tokens": [len(theirs.token_ids), len(mine.token_ids)],
        "margins": [round(margin, 5) for _, _, margin in parted[:5]], "tau": round(tau, 5),
        "margins_of_host": [round(margin, 5) for _, _, margin in other[:5]],
    }), flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=2000, help="replayed rounds to reach")
    parser.add_argument(
        "--seconds", type=float, default=480.0, help="starts no new wave after so many seconds"
    )
    parser.add_argument("--wave", type=int, default=24, help="requests at a time")
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--concurrency", type=int, default=6)
    parser.add_argument("--max-seq-len", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not GPU and args.dtype != "float32":
        sys.exit(f"dtype: Triton's interpreter cannot multiply {args.dtype}; use float32 without a GPU")
    began = time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = False
    draws = random.Random(args.seed)
    plain, fast = make_sides({
        "model": args.model, "drafter": args.drafter, "dtype": args.dtype, "device": "cuda" if GPU else "cpu",
        "max_concurrency": args.concurrency, "prefix_reuse": True, "max_seq_len": args.max_seq_len,
        "kv_slots": 16 * args.max_seq_len, "max_queue": 10_000, "max_tree_budget": 63,
    })  # fmt: skip
    print(json.dumps({"host": plain.engine.loaded.rounds, "device": fast.engine.loaded.rounds}), flush=True)
    found, wave = Found(), 0
    while fast.rounds < args.rounds and time.perf_counter() - began < args.seconds:
        requests = draw_requests(plain.engine, draws, wave, args.wave, args.tokens)
        concurrency, flip = draws.randint(1, args.concurrency), draws.randrange(len(FLIPS))
        for side in (plain, fast):
            play(side, requests, concurrency, flip, cancel_after=5)
        for request in requests:
            compare(plain, fast, request, found)
        wave += 1
        line = {"wave": wave, "rounds": fast.rounds, "same": found.same, "texts": found.texts}
        print(json.dumps({**line, "seconds": round(time.perf_counter() - began, 1)}), flush=True)
    assert fast.engine.loaded.graphs is not None
    device = fast.engine.loaded.graphs.device
    allowed = max(1, found.tokens // TOKENS_PER_NEAR_TIE[plain.engine.models.target.dtype])
    failed = found.divergences > 0 or found.near_ties > allowed
    print(json.dumps({
        "dtype": args.dtype, "gpu": torch.cuda.get_device_name() if GPU else "none",
        "rounds": [plain.rounds, fast.rounds],
        "texts": found.texts, "same": found.same, "tokens": found.tokens, "near_ties": found.near_ties,
        "near_ties_allowed": allowed, "divergences": found.divergences,
        "taus": {temperature: round(tau, 5) for temperature, tau in found.taus.items()},
        "accept": [round(side.decoded / max(1, side.sequence_rounds), 4) for side in (plain, fast)],
        "graphs": device.captured, "capture_s": round(device.capture_s, 1),
        "seconds": round(time.perf_counter() - began, 1), "seed": args.seed, "result": "failed" if failed else "passed",
    }), flush=True)  # fmt: skip
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
