"""Auto mode against fixed settings on the default model of this machine: `make auto-check`, by hand, 20 minutes.

Two kinds of trace: mixed (kinds of text, temperatures, one and four users), and a load that goes from 1 user to 32 and
back. All fixed settings run once each; the fastest two then run beside auto on traces of other prompts, in turn.
On the mixed traces the lower 95 % bound of auto's speed against the best fixed setting must be above -3 %, where the
load changes above 0 against both. The machine has to be idle. Exits 1 if a bound is not kept, 3 where the machine is
busy. Stopped, it goes on with the same command. With --gpu the mixed traces have 1, 8 and 32 users throughout and
longer answers; every size that is captured is captured before anything counts.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kept_runs import KeptRuns, judge, tell

from runtime.config import RuntimeConfig
from runtime.garbage import keep_out
from runtime.load import Load, Prompt, RuntimeTarget, run_load
from runtime.local import LocalRuntime
from runtime.prompt_sets import mixed_prompts
from runtime.race import Arm, student

PAIRED = 2
"""So many fixed settings run beside auto."""
TOKENS, GPU_TOKENS = 32, 128
FIXED = (
    Arm("off", 0),
    Arm("chain", 0),
    Arm("tree", 4),
    Arm("tree", 7),
    Arm("tree", 11),
    Arm("tree", 15),
)
FIXED_GPU = (Arm("off", 0), Arm("chain", 0), *(Arm("tree", budget) for budget in (7, 15, 31, 63)))
SHORT = 48
"""So many of the shortest prompts: what is compared is decoding, and prefill is the same for all."""


@dataclass(frozen=True)
class Phase:
    users: int
    requests: int
    temperature: float


@dataclass(frozen=True)
class Kind:
    """A kind of trace, and what the lower bound of auto's gain on it has to exceed."""

    name: str
    phases: tuple[Phase, ...]
    bound: float
    pairs: int = 5
    """Traces on which auto and its rivals run in turn; where the bound is near what is expected it takes more."""
    every_rival: bool = False
    """Whether the bound is for every rival, not for the best one alone."""


MIXED = Kind("mixed", (Phase(1, 4, 0.0), Phase(1, 4, 0.7), Phase(4, 8, 0.0)), -0.03, pairs=15)
CHANGING = Kind(
    "1 to 32 to 1", (Phase(1, 3, 0.0), Phase(32, 32, 0.0), Phase(1, 3, 0.0)), 0.0, every_rival=True
)
ON_GPU = (
    Kind("mixed, 1 user", (Phase(1, 40, 0.0), Phase(1, 40, 0.7)), -0.03, pairs=8),
    Kind("mixed, 8 users", (Phase(8, 160, 0.0), Phase(8, 160, 0.7)), -0.03, pairs=8),
    Kind("mixed, 32 users", (Phase(32, 320, 0.0), Phase(32, 320, 0.7)), -0.03, pairs=8),
    Kind(
        "1 to 32 to 1",
        (Phase(1, 24, 0.0), Phase(32, 320, 0.0), Phase(1, 24, 0.0)),
        0.0,
        pairs=5,
        every_rival=True,
    ),
)


async def seconds(runtime: LocalRuntime, kind: Kind, arm: Arm | None, seed: int, tokens: int) -> float:
    """How long a trace takes with one setting; None: with auto."""
    prompts = sorted(mixed_prompts(32), key=lambda each: len(str(each)))[:SHORT]
    drawn: list[Prompt] = random.Random(seed).choices(prompts, k=sum(phase.requests for phase in kind.phases))
    total = 0.0
    for phase in kind.phases:
        mine, drawn = drawn[: phase.requests], drawn[phase.requests :]
        load = Load(
            concurrency=phase.users,
            requests=phase.requests,
            warm_up=0,
            max_tokens=tokens,
            ignore_eos=True,
            temperature=phase.temperature,
            mode=arm.mode if arm else None,
            tree_budget=arm.tree_budget if arm else None,
            seed=seed,
        )
        run = await run_load(load, RuntimeTarget(runtime, "auto-check"), mine)
        failed = [each.error for each in run.answers if each.error is not None]
        if failed:
            sys.exit(f"a request failed: {failed[0]}")
        total += run.duration_s
    return total


async def screened(runtime: LocalRuntime, kept: KeptRuns, kind: Kind, tokens: int) -> dict[Arm, float]:
    """Seconds of every fixed setting on one trace."""
    found = {}
    for arm in FIXED_GPU if kind in ON_GPU else FIXED:
        name = f"{kind.name}, {arm}, once"
        if kept.get(name) is None:
            kept.put(name, await seconds(runtime, kind, arm, 0, tokens))
        found[arm] = float(kept.get(name))
        tell(f"{name}: {found[arm]:.1f} s")
    return found


async def paired(
    runtime: LocalRuntime, kept: KeptRuns, kind: Kind, rivals: Sequence[Arm], number: int, tokens: int
) -> dict[str, float]:
    """Seconds of auto and of the rivals on one trace; kept once all of them have run."""
    name = f"{kind.name}, pair {number}, {', '.join(map(str, rivals))}"
    if kept.get(name) is None:
        arms: list[Arm | None] = [None, *rivals]
        turned = [arms[(at + number) % len(arms)] for at in range(len(arms))]
        found = {str(arm or "auto"): await seconds(runtime, kind, arm, number, tokens) for arm in turned}
        kept.put(name, found)
        tell(f"{name}: {_words(found)}; auto plays {(await runtime.status()).auto}")
    return dict(kept.get(name))


async def judged(runtime: LocalRuntime, kept: KeptRuns, kind: Kind, tokens: int) -> dict[str, Any]:
    once = await screened(runtime, kept, kind, tokens)
    rivals = sorted(once, key=once.__getitem__)[:PAIRED]
    await seconds(runtime, kind, None, 0, tokens)  # auto learns what this load costs, as a server would have
    pairs = [await paired(runtime, kept, kind, rivals, number, tokens) for number in range(1, kind.pairs + 1)]
    gains = {}
    for rival in rivals:
        logs = [math.log(pair[str(rival)] / pair["auto"]) for pair in pairs]
        mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
        gains[str(rival)] = {
            "gain": math.expm1(mean),
            "lower_95": math.expm1(mean - student(0.95, len(logs) - 1) * error),
        }
    best = min(gains, key=lambda name: sum(pair[name] for pair in pairs))
    counted = list(gains) if kind.every_rival else [best]
    passed = all(gains[name]["lower_95"] > kind.bound for name in counted)
    for name, gain in gains.items():
        verdict = "    " if name not in counted else "ok  " if gain["lower_95"] > kind.bound else "FAIL"
        print(
            f"{verdict}  {kind.name}: auto against {name}{' (best)' * (name == best)}: "
            f"{gain['gain']:+.1%}, lower 95 % bound {gain['lower_95']:+.1%}"
            + (f", wanted above {kind.bound:+.0%}" if name in counted else ""),
            flush=True,
        )
    return {
        "trace": kind.name,
        "passed": passed,
        "best_fixed": best,
        "gains": gains,
        "pairs": pairs,
        "once_s": {str(arm): value for arm, value in once.items()},
    }


async def check(given: argparse.Namespace) -> dict[str, Any]:
    kinds, tokens = (ON_GPU, GPU_TOKENS) if given.gpu else ((MIXED, CHANGING), TOKENS)
    config = RuntimeConfig(
        model=given.model, drafter=given.drafter, device="cuda" if given.gpu else "auto",
        mode="auto", max_concurrency=32, max_seq_len=512, baseline_interval=0,
    )  # fmt: skip
    kept = KeptRuns("auto", {"config": config.model_dump(), "tokens": tokens, "short": SHORT}, given.fresh)
    tell(f"measurements are kept in {kept.file}")
    runtime = LocalRuntime(config)
    try:
        await runtime.wait_ready()
        keep_out()
        about = await runtime.describe()
        if given.gpu:
            for kind in kinds:
                await seconds(runtime, kind, None, 0, tokens)
            tell("every size of prompt is captured too")
        results = [await judged(runtime, kept, kind, tokens) for kind in kinds]
    finally:
        await runtime.aclose()
    names = ("target", "drafter", "host", "device", "dtype", "threads", "linear")
    return {
        "schema": 1,
        "check": "auto",
        "passed": all(each["passed"] for each in results),
        "results": results,
        "conditions": {name: getattr(about, name) for name in names} | {"max_tokens": tokens},
    }


def _words(found: dict[str, float]) -> str:
    return ", ".join(
        f"{name} {value:.1f} s" for name, value in sorted(found.items(), key=lambda each: each[1])
    )


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", action="store_true", help="the longer traces, on the first GPU")
    parser.add_argument("--model", default=RuntimeConfig().model, help="the default model, or its file")
    parser.add_argument(
        "--drafter", help="the drafter's folder; the shipped one is found by the model's name"
    )


if __name__ == "__main__":
    sys.exit(judge("Auto mode against fixed settings on the default model.", check, options))
