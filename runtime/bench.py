"""Measured comparison of modes, budgets, loads and temperatures on this host.

Each case decodes the same prompts; cases take turns prompt by prompt, so that a slow moment of the host hits all; the
figures are medians over repetitions with their range. Prefixes are never reused. A larger tree often raises the accept
length and lowers tok/s, so both stand side by side and everything is compared with plain decoding.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from runtime.calibrate import calibrate
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.interface import GenerateRequest, Mode, RequestFinished, RequestStats, SamplingParams
from runtime.loader import load
from runtime.prompt_sets import bundled_prompts, read_prompts

SCHEMA = 1
SETTLE_TOKENS = 8
"""Tokens decoded before anything is timed, so that first calls are paid."""


@dataclass(frozen=True)
class BenchPlan:
    """What to compare. `budgets` empty = the configured or calibrated one; `prompts` None = the bundled ones."""

    config: RuntimeConfig
    modes: tuple[str, ...] = ("off", "chain", "tree")
    budgets: tuple[int, ...] = ()
    concurrency: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    prompts: Path | None = None
    repetitions: int = 5
    max_tokens: int = 64
    prompts_per_kind: int = 8


@dataclass(frozen=True)
class Case:
    mode: Mode
    tree_budget: int
    concurrency: int
    temperature: float


@dataclass(frozen=True)
class Part:
    """What one group of prompts took in one case: finished requests, stage seconds of each round, wall seconds."""

    finished: tuple[RequestStats, ...]
    stages: tuple[tuple[float, ...], ...]
    wall_s: float


@dataclass(frozen=True)
class Run:
    """One repetition of one case."""

    tok_s: float
    """Tokens after the first per second of decoding, per request."""
    total_tok_s: float
    """Output tokens per second of wall clock, all requests, prefill included."""
    accept_length: float
    ttft_s: float
    round_s: float
    stage_s: tuple[float, ...]

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Run:
        """All prompts together."""
        finished = [stats for part in parts for stats in part.finished]
        stages = [stage for part in parts for stage in part.stages]
        after_first = sum(stats.output_tokens - 1 for stats in finished)
        return cls(
            tok_s=after_first / sum(stats.decode_s or 0.0 for stats in finished),
            total_tok_s=sum(stats.output_tokens for stats in finished) / sum(part.wall_s for part in parts),
            accept_length=after_first / max(1, sum(stats.rounds for stats in finished)),
            ttft_s=statistics.median(stats.ttft_s or 0.0 for stats in finished),
            round_s=statistics.median(sum(stage) for stage in stages),
            stage_s=tuple(statistics.median(stage[i] for stage in stages) for i in range(5)),
        )


@dataclass(frozen=True)
class CaseResult:
    """Medians of a case over its repetitions; `tok_s_range` is the least and the most."""

    case: Case
    runs: tuple[Run, ...]
    plain_tok_s: float | None
    """Median of plain decoding at the same load and temperature, None if it was not measured."""

    def median(self, name: str) -> float:
        return statistics.median(getattr(run, name) for run in self.runs)

    @property
    def tok_s_range(self) -> tuple[float, float]:
        return min(run.tok_s for run in self.runs), max(run.tok_s for run in self.runs)

    @property
    def speed_up(self) -> float | None:
        return self.median("tok_s") / self.plain_tok_s if self.plain_tok_s else None

    def to_json(self) -> dict[str, Any]:
        low, high = self.tok_s_range
        stages = [statistics.median(run.stage_s[i] for run in self.runs) for i in range(5)]
        return {
            **asdict(self.case),
            "tok_s": self.median("tok_s"),
            "tok_s_min": low,
            "tok_s_max": high,
            "total_tok_s": self.median("total_tok_s"),
            "accept_length": self.median("accept_length"),
            "ttft_s": self.median("ttft_s"),
            "round_s": self.median("round_s"),
            "stage_s": dict(zip(("draft", "tree", "verify", "accept", "commit"), stages, strict=True)),
            "speed_up": self.speed_up,
            "repetitions": len(self.runs),
        }


@dataclass(frozen=True)
class BenchReport:
    """All cases, fastest first within each load and temperature, with the conditions they hold under."""

    conditions: dict[str, Any]
    results: tuple[CaseResult, ...]
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kind": "comparison",
            "conditions": self.conditions,
            "results": [result.to_json() for result in self.results],
            "notes": list(self.notes),
        }

    def table(self) -> str:
        """The results for people."""
        head = f"{'mode':<8}{'budget':>7}{'conc':>6}{'T':>6}{'tok/s':>9}{'range':>15}{'x plain':>9}"
        head += f"{'accept':>8}{'round ms':>10}"
        lines = [head, "-" * len(head)]
        for result in self.results:
            case, (low, high) = result.case, result.tok_s_range
            budget = str(case.tree_budget) if case.mode == "tree" else "-"
            gain = f"{result.speed_up:.2f}" if result.speed_up else "n/a"
            lines.append(
                f"{case.mode:<8}{budget:>7}{case.concurrency:>6}{case.temperature:>6.2g}"
                f"{result.median('tok_s'):>9.1f}{f'{low:.1f}-{high:.1f}':>15}{gain:>9}"
                f"{result.median('accept_length'):>8.2f}{result.median('round_s') * 1e3:>10.1f}"
            )
        lines.append(
            "tok/s: tokens after the first per second of decoding, per request; accept: tokens per round,"
        )
        lines.append("bonus token included; medians over repetitions, cases interleaved prompt by prompt.")
        return "\n".join([*lines, *self.notes])


def run_bench(plan: BenchPlan, progress: Callable[[str], None] = lambda _line: None) -> BenchReport:
    """Loads the engine and measures every case of `plan`."""
    prompts = _prompts(plan)
    engine = Engine(load(plan.config, lambda _share, what: progress(what)), plan.config, default_budget=0)
    progress("measuring this host")
    calibration = calibrate(engine)
    configured = plan.config.tree_budget
    budget = calibration.tree_budget if configured is None else configured
    cases, notes = list_cases(plan, budget, engine.loaded.no_drafter_reason)
    runs: dict[Case, list[Run]] = {case: [] for case in cases}
    groups = in_groups(prompts, max(plan.concurrency))
    _run_case(engine, cases[-1], groups[0], SETTLE_TOKENS)
    load_before = os.getloadavg()[0]
    for repetition in range(plan.repetitions):
        parts: dict[Case, list[Part]] = {case: [] for case in cases}
        for number, group in enumerate(groups):
            progress(f"repetition {repetition + 1} of {plan.repetitions}, {number + 1} of {len(groups)}")
            turn = (repetition + number) % len(cases)
            for case in (*cases[turn:], *cases[:turn]):
                parts[case].append(_run_case(engine, case, group, plan.max_tokens))
        for case in cases:
            runs[case].append(Run.of(parts[case]))
    engine.check_integrity()
    return BenchReport(
        _conditions(plan, engine, len(prompts), load_before), ranked(runs), (*notes, calibration.summary)
    )


def ranked(runs: Mapping[Case, Sequence[Run]]) -> tuple[CaseResult, ...]:
    """The results of all cases, each beside plain decoding; fastest first within each load and temperature."""
    plain = {
        (case.concurrency, case.temperature): statistics.median(run.tok_s for run in done)
        for case, done in runs.items()
        if case.mode == "off"
    }
    results = [
        CaseResult(case, tuple(done), plain.get((case.concurrency, case.temperature)))
        for case, done in runs.items()
    ]
    return tuple(sorted(results, key=lambda r: (r.case.temperature, r.case.concurrency, -r.median("tok_s"))))


def _prompts(plan: BenchPlan) -> list[dict[str, Any]]:
    if plan.prompts is not None:
        return read_prompts(plan.prompts)
    return [prompt for kind in bundled_prompts(plan.prompts_per_kind).values() for prompt in kind]


def list_cases(plan: BenchPlan, budget: int, reason: str | None) -> tuple[list[Case], list[str]]:
    """The cases to run, and a line for each that cannot be.

    `budget` is the one in force, for a plan that lists none; `reason` says why there is no speculation, if so.
    """
    budgets = plan.budgets or (budget,)
    cases: list[Case] = []
    notes = []
    for mode in plan.modes:
        if mode != "off" and reason is not None:
            notes.append(f"{mode} not measured, speculation is inactive: {reason}")
            continue
        for budget in budgets if mode == "tree" else (0,):
            cases += [
                Case("off" if mode == "tree" and budget == 0 else mode, budget, at_once, temperature)  # type: ignore[arg-type]
                for temperature in plan.temperatures
                for at_once in plan.concurrency
            ]
    return list(dict.fromkeys(cases)), notes


def in_groups(prompts: Sequence[dict[str, Any]], at_once: int) -> list[list[tuple[int, dict[str, Any]]]]:
    """Numbered prompts in the groups within which the cases take turns.

    One prompt at a time where requests come one by one: a slow moment of the host then falls on all cases alike. Under
    concurrency a group is several times as large, since its last requests do not run at full load.
    """
    size = 1 if at_once == 1 else 4 * at_once
    numbered = list(enumerate(prompts))
    return [numbered[start : start + size] for start in range(0, len(numbered), size)]


def _run_case(engine: Engine, case: Case, prompts: list[tuple[int, dict[str, Any]]], max_tokens: int) -> Part:
    """Decodes the numbered `prompts`, `case.concurrency` at a time; the number is the seed."""
    finished: list[RequestStats] = []

    def sink(event: object) -> None:
        if isinstance(event, RequestFinished):
            finished.append(event.stats)

    engine.config = engine.config.changed({"max_concurrency": case.concurrency, "max_queue": len(prompts)})
    for number, prompt in prompts:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=case.temperature, seed=number)
        engine.submit(
            GenerateRequest(
                **prompt, sampling=sampling, mode=case.mode, tree_budget=case.tree_budget, reuse_prefix=False
            ),
            sink,
        )
    stages: list[tuple[float, ...]] = []
    start = time.perf_counter()
    while engine.busy:
        stats = engine.step()
        if stats is not None and stats.stage_s is not None:
            stages.append(stats.stage_s)
    return Part(tuple(finished), tuple(stages), time.perf_counter() - start)


def _conditions(plan: BenchPlan, engine: Engine, prompts: int, load_before: float) -> dict[str, Any]:
    target = engine.models.target
    return {
        "host": platform.node(),
        "cpu": cpu_name(),
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": engine.loaded.threads,
        "linear": engine.loaded.linear,
        "torch": torch.__version__,
        "model": engine.loaded.checkpoint.name,
        "prompts": str(plan.prompts) if plan.prompts else f"bundled, {plan.prompts_per_kind} of each kind",
        "prompt_count": prompts,
        "max_tokens": plan.max_tokens,
        "repetitions": plan.repetitions,
        "load_average_before": load_before,
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def cpu_name() -> str:
    """The processor as the kernel names it; n/a where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or "n/a"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "n/a")
