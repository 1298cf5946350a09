"""Jobs that advise: a tune of the runtime that serves, and a doctor of the host it runs on."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Literal

from pydantic import Field

from runtime.interface import ConfigRejected, Frozen, Mode, Runtime
from runtime.job_kinds import Measured, check_measured
from runtime.jobs import JobContext, JobKind, Outcome


class TuneParameters(Measured):
    """What is sought; no budgets: those that `ddtree tune` tries."""

    objective: Literal["latency", "throughput"] = "latency"
    concurrency: int = Field(default=1, ge=1)
    temperature: float = Field(default=0.0, ge=0.0, le=2.0)
    modes: tuple[Mode, ...] = Field(default=("off", "chain", "tree"), min_length=1)
    max_tokens: int = Field(default=32, ge=2)


class DoctorParameters(Frozen):
    """A doctor has no settings: it looks and changes nothing."""


async def check_tune(runtime: Runtime, parameters: TuneParameters) -> None:
    """Refuses what the configuration in force cannot serve, naming the field."""
    await check_measured(runtime, parameters)
    config = (await runtime.status()).config
    most = config["max_concurrency"]
    if parameters.concurrency > most:
        raise ConfigRejected(
            f"concurrency = {parameters.concurrency}: must be from 1 to max_concurrency = {most}",
            "concurrency",
        )


async def run_tune(context: JobContext[TuneParameters]) -> Outcome:
    """Races the settings through the serving runtime; applies nothing."""
    from runtime.race import Arm
    from runtime.tune import BUDGETS, TunePlan, tune

    wanted = context.parameters
    plan = TunePlan(
        objective=wanted.objective,
        concurrency=wanted.concurrency,
        temperature=wanted.temperature,
        modes=wanted.modes,
        budgets=wanted.tree_budgets or BUDGETS,
        max_tokens=wanted.max_tokens,
        prompts=wanted.prompt_list(),
        under_load=True,  # requests of others are the business of the job's own guard
        client=context.job_id,
    )
    report = await tune(context.runtime, plan, None, context.report)
    gain = f", {report.over_plain[0]:.2f}x plain" if report.over_plain is not None else ""
    words = f"fastest for {report.objective}: {Arm(report.mode, report.tree_budget)}{gain}"
    return Outcome(words, report.to_json())


async def run_doctor(context: JobContext[DoctorParameters]) -> Outcome:
    """Checks the host of this process; the port is the one the command looks at."""
    from runtime.doctor import examine, to_json
    from runtime.host_probe import Sources, read_probe
    from runtime.instance import runtime_folder
    from runtime.service import unit_path

    sources = Sources(env=dict(os.environ), runtime_folder=runtime_folder(), user_unit=unit_path("user"))
    findings = examine(await asyncio.to_thread(read_probe, sources))
    troubles = [each.id for each in findings if each.severity in ("error", "warning")]
    words = f"{len(findings)} checks, {len(troubles) or 'none'} to look at"
    return Outcome(f"{words}: {', '.join(troubles)}" if troubles else words, to_json(findings))


TUNE = JobKind("tune", TuneParameters, run_tune, check_tune, measures=True)
DOCTOR = JobKind("doctor", DoctorParameters, run_doctor, exclusive=False)
ADVICE_JOBS: tuple[JobKind[Any], ...] = (TUNE, DOCTOR)
