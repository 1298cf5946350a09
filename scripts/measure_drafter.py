"""Measures a drafter by the real decode loop: accept length by prompt set, mode, budget and temperature.

    python scripts/measure_drafter.py --model TARGET --drafter FOLDER --out FILE.json SET.jsonl ...

Prints a table and writes one JSON file with every figure, per position too, and the conditions they hold under.
At temperature 1 the same prompts and seeds run with and without the shared noise in the drafter's scores; the texts
are the same, so the rounds are paired, and the ratio comes with a bootstrap interval.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from decoding import decode, numbered

from runtime.config import validate
from runtime.engine import Engine
from runtime.interface import RoundStats
from runtime.loader import load
from runtime.prompt_sets import read_prompts


@dataclass(frozen=True)
class Cell:
    """Figures of one prompt set under one setting."""

    outputs: list[int]
    rounds: list[int]
    by_position: list[float | None]
    """Share of the rounds that drafted a position in which it was accepted; None where none did."""
    texts: list[tuple[int, ...]]
    seconds: float

    @property
    def accept_length(self) -> float:
        """Tokens per decode round, bonus token included, over all rounds of the set."""
        return (sum(self.outputs) - len(self.outputs)) / sum(self.rounds)


def run_cell(
    engine: Engine, prompts: list[dict], *, mode: str, budget: int, temperature: float, tokens: int
) -> Cell:
    """Decodes every prompt once; seeds are the prompt's number, so settings are paired."""
    drafted = [0] * engine.models.draft_horizon
    accepted = [0] * engine.models.draft_horizon

    def count(stats: RoundStats, _seconds: float) -> None:
        for length, depth in zip(stats.accept_lengths, stats.draft_depths, strict=True):
            for position in range(depth):
                drafted[position] += 1
                accepted[position] += length > position + 1

    requests = numbered(prompts, mode=mode, budget=budget, temperature=temperature, tokens=tokens)
    order, seconds = decode(engine, requests, len(requests), count)
    return Cell(
        outputs=[len(event.token_ids) for event in order],
        rounds=[event.stats.rounds for event in order],
        by_position=[a / d if d else None for a, d in zip(accepted, drafted, strict=True)],
        texts=[event.token_ids for event in order],
        seconds=seconds,
    )


def paired_ratio(with_noise: Cell, without: Cell, repeats: int = 2000) -> tuple[float, float, float]:
    """Accept length with noise over without, and its 95 % bootstrap interval over prompts."""
    generator = random.Random(0)
    indices = range(len(with_noise.rounds))

    def ratio(sample: list[int]) -> float:
        def mean(cell: Cell) -> float:
            return sum(cell.outputs[i] - 1 for i in sample) / max(1, sum(cell.rounds[i] for i in sample))

        return mean(with_noise) / mean(without)

    draws = sorted(ratio(generator.choices(indices, k=len(indices))) for _ in range(repeats))
    return ratio(list(indices)), draws[int(0.025 * repeats)], draws[int(0.975 * repeats)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sets", nargs="+", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--budgets", default="7,11,15,31,63")
    parser.add_argument("--noise-budgets", default="11")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()

    torch.backends.cuda.matmul.allow_tf32 = False
    slots = args.batch * (512 + args.tokens + 65)
    config = validate(
        {
            "model": args.model,
            "drafter": args.drafter,
            "dtype": args.dtype,
            "device": args.device,
            "max_concurrency": args.batch,
            "max_seq_len": 2048,
            "kv_slots": slots,
            "prefill_chunk": 2048,
            "max_queue": 10_000,
        }
    )
    loaded = load(config)
    engine = Engine(loaded, config, 11)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
    report: dict = {
        "schema": 1,
        "conditions": {
            "device": device,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "dtype": args.dtype,
            "prompts_per_set": args.prompts,
            "new_tokens": args.tokens,
            "batch": args.batch,
            "block_size": engine.models.block_size,
            "drafter": str(args.drafter),
            "measured": time.strftime("%Y-%m-%d"),
        },
        "sets": {},
    }
    budgets = [int(b) for b in args.budgets.split(",") if b]
    for path in args.sets:
        prompts = read_prompts(path, args.prompts)
        cells: dict[str, dict] = {}
        for name, mode, budget in [("chain", "chain", 0), *((f"tree{b}", "tree", b) for b in budgets)]:
            cell = run_cell(engine, prompts, mode=mode, budget=budget, temperature=0.0, tokens=args.tokens)
            cells[name] = {
                "accept_length": cell.accept_length,
                "by_position": cell.by_position,
                "outputs": sum(cell.outputs),
                "rounds": sum(cell.rounds),
            }
            print(path.stem, name, f"{cell.accept_length:.3f}", f"{cell.seconds:.1f} s", flush=True)
        for budget in [int(b) for b in args.noise_budgets.split(",") if b]:
            pair = {}
            for noisy in (False, True):
                engine.config = engine.config.changed({"draft_noise": noisy})
                pair[noisy] = run_cell(
                    engine, prompts, mode="tree", budget=budget, temperature=1.0, tokens=args.tokens
                )
            engine.config = engine.config.changed({"draft_noise": True})
            value, low, high = paired_ratio(pair[True], pair[False])
            same = sum(a == b for a, b in zip(pair[True].texts, pair[False].texts, strict=True))
            cells[f"noise_T1_tree{budget}"] = {
                "accept_length_without": pair[False].accept_length,
                "accept_length_with": pair[True].accept_length,
                "ratio": value,
                "ci95": [low, high],
                "by_position_without": pair[False].by_position,
                "by_position_with": pair[True].by_position,
                "same_texts": f"{same} of {len(prompts)}",
            }
            interval = f"{value:.3f} [{low:.3f}, {high:.3f}]"
            print(path.stem, f"T=1 tree{budget} noise {interval}, same texts {same}", flush=True)
        report["sets"][path.stem] = cells
        engine.check_integrity()
        args.out.write_text(json.dumps(report, indent=1))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
