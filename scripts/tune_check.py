"""Tune against exhaustive search on the default model of this machine: `make tune-check`, by hand, about ten minutes.

Every setting is measured in five blocks, interleaved; then tune runs five times from the beginning. Each must find a
setting within 3 % of the best one by the exhaustive search, in under a third of its measurements. The machine has to be
idle. Exits 1 if one does not, 3 where the machine is busy. Stopped, it goes on with the same command.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from typing import Any

from kept_runs import KeptRuns, judge, tell

from runtime.config import RuntimeConfig
from runtime.garbage import keep_out
from runtime.local import LocalRuntime
from runtime.prompt_sets import mixed_prompts
from runtime.race import FULL_BLOCKS, Arm
from runtime.tune import PROMPTS_PER_BLOCK, SLOWEST, TunePlan, arms_to_try, current_setting, measure, tune

TUNES = 5
TOLERANCE = 0.03
CONFIG = RuntimeConfig(baseline_interval=0)
PLAN = TunePlan(prompts=tuple(mixed_prompts(8)), max_tokens=20)


async def exhaustive(runtime: LocalRuntime, kept: KeptRuns) -> dict[Arm, float]:
    """Speed of each setting: geometric mean over the blocks, in each of which all were measured."""
    about, status = await runtime.describe(), await runtime.status()
    arms = arms_to_try(PLAN, about.max_tree_budget, False, current_setting(status.config))
    logs: dict[Arm, list[float]] = {arm: [] for arm in arms}
    for block in range(FULL_BLOCKS):
        found = kept.get(f"block {block}")
        if found is None:
            turned = [arms[(at + block) % len(arms)] for at in range(len(arms))]
            found = {str(arm): (await measure(runtime, PLAN, arm, block)).value for arm in turned}
            kept.put(f"block {block}", found)
        tell(f"block {block + 1} of {FULL_BLOCKS}: {_words(found)}")
        for arm in arms:
            logs[arm].append(math.log(found[str(arm)]))
    return {arm: math.exp(statistics.fmean(values)) for arm, values in logs.items()}


async def tuned(runtime: LocalRuntime, kept: KeptRuns, number: int) -> dict[str, Any]:
    """What one tune found, and by how many measurements."""
    found = kept.get(f"tune {number}")
    if found is None:
        report = await tune(runtime, PLAN)
        found = {
            "setting": str(Arm(report.mode, report.tree_budget)),
            "measurements": report.measurements,
            "exhaustive": report.exhaustive,
            "why_ended": report.why_ended,
            "conditions": report.conditions,
        }
        kept.put(f"tune {number}", found)
    return dict(found)


async def check(given: argparse.Namespace) -> dict[str, Any]:
    asked = {"prompts": list(PLAN.prompts), "per_block": PROMPTS_PER_BLOCK, "cut": SLOWEST}
    conditions = {"config": CONFIG.model_dump(), "max_tokens": PLAN.max_tokens, **asked}
    kept = KeptRuns("tune", conditions, given.fresh)
    tell(f"measurements are kept in {kept.file}")
    runtime = LocalRuntime(CONFIG)
    try:
        await runtime.wait_ready()
        keep_out()
        await measure(runtime, PLAN, Arm("tree", 11), 0)  # the first calls are paid
        speeds = await exhaustive(runtime, kept)
        best = max(speeds, key=speeds.__getitem__)
        named = {str(arm): speed for arm, speed in speeds.items()}
        tunes = []
        for number in range(1, TUNES + 1):
            found = await tuned(runtime, kept, number)
            share = named[found["setting"]] / speeds[best]
            passed = share >= 1 - TOLERANCE and 3 * found["measurements"] < found["exhaustive"]
            tunes.append({**found, "share_of_best": share, "passed": passed})
            print(
                f"{'ok  ' if passed else 'FAIL'}  tune {number}: {found['setting']}, {share:.3f} of the best, "
                f"{found['measurements']} of {found['exhaustive']} measurements; {found['why_ended']}",
                flush=True,
            )
    finally:
        await runtime.aclose()
    print(f"      exhaustive search, tok/s: {_words(named)}; best: {best}")
    host = tunes[0].pop("conditions")
    for each in tunes[1:]:
        each.pop("conditions")
    return {
        "schema": 1,
        "check": "tune",
        "passed": all(each["passed"] for each in tunes),
        "exhaustive_tok_s": named,
        "best": str(best),
        "tunes": tunes,
        "conditions": host,
    }


def _words(speeds: dict[str, float]) -> str:
    ranked = sorted(speeds.items(), key=lambda each: -each[1])
    return ", ".join(f"{name} {speed:.1f}" for name, speed in ranked)


if __name__ == "__main__":
    sys.exit(judge("Tune against exhaustive search on the default model.", check))
