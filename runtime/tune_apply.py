"""Puts what a tune found in force: on a running runtime, where it is tried and taken back if slower, or in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtime.config import RuntimeConfig, validate
from runtime.interface import ConfigRejected, Runtime
from runtime.race import Arm
from runtime.tune import TunePlan, TuneReport, measure

SLOWER = 0.9
"""Share of the old speed below which the new setting is taken back: thrice the noise of a measurement."""


async def apply_to_runtime(runtime: Runtime, plan: TunePlan, report: TuneReport, author: str) -> str:
    """Applies the setting, measures it against the old one, takes it back if it is slower. Returns what was done.

    Raises ConfigRejected where the runtime does not take it.
    """
    change = _change(report)
    offered = await runtime.preview(change)
    if not offered.allowed:
        raise ConfigRejected(offered.summary)
    if not offered.changes:
        return "already in force"
    old_speed = (await measure(runtime, plan, None, 0)).value
    applied = await runtime.apply(change, offered.revision, author)
    new_speed = (await measure(runtime, plan, None, 0)).value
    if new_speed < SLOWER * old_speed:
        before = {each.field: each.old for each in applied.applied}
        await runtime.apply(before, applied.revision, author)
        return f"taken back: measured {new_speed:.1f}, the setting before {old_speed:.1f}"
    return (
        f"{applied.summary} (revision {applied.revision}; measured {new_speed:.1f}, before {old_speed:.1f})"
    )


def apply_to_file(file: Path, config: RuntimeConfig, report: TuneReport) -> str:
    """Writes mode and budget into a configuration file, made if need be; the rest of it stays as it is."""
    import tomlkit

    text = file.read_text(encoding="utf-8") if file.exists() else ""
    document = tomlkit.parse(text)
    for name, value in _change(report).items():
        document[name] = value
    validate({**config.model_dump(), **_change(report)})
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.draft")
    draft.write_text(tomlkit.dumps(document), encoding="utf-8")
    draft.replace(file)
    return f"written to {file}"


def evidence(plan: TunePlan, report: TuneReport) -> dict[str, Any]:
    """What was measured, in the form of an answer of `ddtree bench --json`, which snapshots keep."""
    figure = {"latency": "tok_s", "throughput": "total_tok_s"}.get(report.objective)
    rows = [
        {
            "mode": each.mode,
            "tree_budget": each.tree_budget,
            "temperature": plan.temperature,
            "concurrency": plan.concurrency if plan.rate is None else None,
            "tok_s": None,
            "accept_length": each.accept_length,
            **({figure: each.value} if figure is not None else {}),
        }
        for each in report.results
        if each.value is not None
    ]
    return {"schema": 1, "conditions": {"by": "ddtree tune", **report.conditions}, "results": rows}


def _change(report: TuneReport) -> dict[str, object]:
    found = Arm(report.mode, report.tree_budget)
    return {"mode": found.mode, **({"tree_budget": found.tree_budget} if found.mode == "tree" else {})}
