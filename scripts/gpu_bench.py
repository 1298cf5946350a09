"""The default pair on this GPU: accept length, tok/s by mode, budget, temperature and concurrency, and a profile check.

    python scripts/gpu_bench.py --model TARGET --drafter FOLDER --out FILE.jsonl SET.jsonl ... [--until SECONDS]

Each group of cells (set, temperature, concurrency) is measured with all its arms in turn, five times over, the first
dropped; its cells are then written, so that a run which is cut short keeps what it has. tok/s is all tokens of the
group over the time from the first submission to the last token. `--profile` counts launches and waits of a round.
`--gaps CHUNK ...` measures, instead of the groups, how long four running requests wait between rounds while a prompt of
7,600 tokens is computed, with each `prefill_chunk`; `gpu_steps.py --gaps` does so for an 8B model's dimensions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from decoding import decode, gaps, numbered

from runtime.config import validate
from runtime.engine import Engine
from runtime.garbage import keep_out
from runtime.interface import GenerateRequest, RequestFinished, RoundStats, SamplingParams
from runtime.loader import load
from runtime.prompt_sets import read_prompts

Arm = tuple[str, int]
ALL: tuple[Arm, ...] = (("off", 0), ("chain", 0), ("tree", 7), ("tree", 15), ("tree", 31), ("tree", 63))
FEW: tuple[Arm, ...] = (("off", 0), ("chain", 0), ("tree", 7), ("tree", 31))
REPEATS = 5


@dataclass
class Taken:
    """One pass of one arm over the prompts."""

    ends: list[RequestFinished]
    seconds: float
    rounds: int
    round_s: float
    steps: list[tuple[float, int]]
    """Seconds and tokens of each step that decoded a round and prefilled nothing."""

    @property
    def texts(self) -> list[tuple[int, ...]]:
        return [end.token_ids for end in self.ends]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def decoded(self) -> int:
        return self.tokens - len(self.ends)

    @property
    def sequence_rounds(self) -> int:
        return sum(end.stats.rounds for end in self.ends)


def take(
    engine: Engine, prompts: list[dict[str, Any]], arm: Arm, temperature: float, concurrency: int, tokens: int
) -> Taken:
    """Decodes all prompts, `concurrency` at a time; seeds are the prompts' numbers."""
    rounds: list[float] = []
    steps: list[tuple[float, int]] = []

    def count(stats: RoundStats, seconds: float) -> None:
        rounds.append(sum(stats.stage_s))
        if not stats.prefill_tokens:
            steps.append((seconds, stats.emitted))

    requests = numbered(prompts, mode=arm[0], budget=arm[1], temperature=temperature, tokens=tokens)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    ends, seconds = decode(engine, requests, concurrency, count)
    return Taken(ends, seconds, len(rounds), sum(rounds), steps)


def group(
    engine: Engine, name: str, prompts: list[dict[str, Any]], arms: tuple[Arm, ...], temperature: float,
    concurrency: int, tokens: int, repeats: int, about: dict[str, Any], out: Any,
) -> None:  # fmt: skip
    """Measures and writes the cells of one group."""
    kept: dict[Arm, list[Taken]] = {arm: [] for arm in arms}
    for repeat in range(repeats):
        for arm in arms[repeat % len(arms) :] + arms[: repeat % len(arms)]:
            taken = take(engine, prompts, arm, temperature, concurrency, tokens)
            if repeat or repeats == 1:
                kept[arm].append(taken)
    plain = kept[arms[0]]
    texts = plain[-1].texts
    for arm, runs in kept.items():
        speeds = [run.tokens / run.seconds for run in runs]
        wins = sum(
            statistics.median(run.ends[i].stats.tok_s or 0.0 for run in runs)
            > statistics.median(run.ends[i].stats.tok_s or 0.0 for run in plain)
            for i in range(len(prompts))
        )
        shared = sum(
            next((at for at, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))
            for x, y in zip(runs[-1].texts, texts, strict=True)
        )
        cell = {
            "system": "ddtree", "set": name, "mode": arm[0], "tree_budget": arm[1], "temperature": temperature,
            "concurrency": concurrency, "tok_s_median": round(statistics.median(speeds), 1),
            "tok_s_spread": [round(min(speeds), 1), round(max(speeds), 1)],
            "ms_round": round(sum(r.round_s for r in runs) / sum(r.rounds for r in runs) * 1e3, 4),
            "rounds": sum(r.rounds for r in runs) // len(runs),
            "accept_length": round(sum(r.decoded for r in runs) / sum(r.sequence_rounds for r in runs), 3),
            "prompts": len(prompts), "tokens": tokens, "repeats": len(runs), "n": len(prompts) * len(runs),
            "prompts_faster_than_off": wins, "tokens_as_off_before_parting": [shared, sum(map(len, texts))],
            **about,
        }  # fmt: skip
        print(json.dumps({k: v for k, v in cell.items() if k not in about}), flush=True)
        print(json.dumps(cell), file=out, flush=True)


def profile_rounds(engine: Engine, prompt: dict[str, Any]) -> dict[str, Any]:
    """Runtime calls a round, in the middle of one request: launches, copies, waits; and kernels."""
    from torch.profiler import ProfilerActivity, profile

    sampling = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    engine.submit(
        GenerateRequest(**prompt, mode="tree", tree_budget=31, sampling=sampling), lambda _event: None
    )
    for _ in range(10):
        engine.step()
    rounds = 0
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        while rounds < 20:
            rounds += engine.step() is not None
    torch.cuda.synchronize()
    counts: dict[str, int] = {}
    for event in seen.events():
        if event.name.startswith(("cuda", "cu")):
            counts[event.name] = counts.get(event.name, 0) + 1
    engine.cancel_all("profiled")
    return {name: round(count / rounds, 2) for name, count in sorted(counts.items())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sets", nargs="*", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--until", type=float, default=480.0, help="starts no new group after so many seconds"
    )
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--gaps", nargs="*", type=int, default=[], metavar="CHUNK")
    parser.add_argument("--steps", nargs="+", default=["1", "accept", "8", "32"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    args = parser.parse_args()
    import transformers
    import triton

    began = time.perf_counter()
    config = validate(
        {
            "model": args.model, "drafter": args.drafter, "device": "cuda", "dtype": "bfloat16",
            "max_concurrency": 32, "max_seq_len": 8192 if args.gaps else 1024, "kv_slots": 50_000,
            "prefill_chunk": 2048, "max_queue": 10_000, "prefix_reuse": False, "max_tree_budget": 63,
        }
    )  # fmt: skip
    loaded = load(config)
    engine = Engine(loaded, config, 31)
    keep_out()
    about = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "transformers": transformers.__version__,
        },
        "dtype": "bfloat16",
        "rounds_by": loaded.rounds,
    }
    print(json.dumps(about), f"loaded in {time.perf_counter() - began:.1f} s", flush=True)
    sets = {path.stem: read_prompts(path) for path in args.sets}
    with args.out.open("a") as out:
        if args.profile:
            calls = {"profile": profile_rounds(engine, next(iter(sets.values()))[0])}
            print(json.dumps(calls), flush=True)
            print(json.dumps(calls), file=out, flush=True)
        for chunk in args.gaps:
            engine.config = engine.config.changed({"prefill_chunk": chunk})
            for mode, budget in (("off", 0), ("tree", 31)):
                cell = {"shape": "default pair", **gaps(engine, 7600, mode, budget, 12), **about}
                print(json.dumps(cell), flush=True)
                print(json.dumps(cell), file=out, flush=True)
        if args.gaps:
            return
        plan: list[tuple[str, float]] = [(step, t) for t in args.temperatures for step in args.steps]
        for step, temperature in plan:
            for name, prompts in sets.items():
                if time.perf_counter() - began > args.until:
                    print("stopped by the clock", flush=True)
                    return
                if step == "accept":
                    some, arms, at, tokens, repeats = prompts[:64], ALL, 32, 256, 1
                elif step == "1":
                    some, arms, at, tokens, repeats = prompts[:16], ALL, 1, 128, REPEATS
                else:
                    some, arms, at, tokens, repeats = prompts[:64], FEW, int(step), 128, REPEATS
                group(engine, name, some, arms, temperature, at, tokens, repeats, about, out)
        print(f"graphs {loaded.graphs.device.captured if loaded.graphs else 0}, "
              f"capture {loaded.graphs.device.capture_s if loaded.graphs else 0:.1f} s, "
              f"memory {loaded.memory.words if loaded.memory else 'n/a'}, "
              f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
