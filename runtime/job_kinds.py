"""The jobs every runtime offers: bench, verify and tune of what serves, run as a client of it, and doctor of its host.

What they measure and compare is that of the commands of these names; here the requests go through the serving runtime,
so its own queue, batching and configuration are what is measured.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from runtime.config import RuntimeConfig
from runtime.interface import (
    ConfigRejected,
    Frozen,
    GenerateRequest,
    Mode,
    RequestFinished,
    RoundStats,
    Runtime,
    RuntimeFault,
    SamplingParams,
)
from runtime.jobs import JobContext, JobKind, Outcome
from runtime.prompt_sets import bundled_prompts

if TYPE_CHECKING:
    from runtime.bench import Case, Run
    from runtime.engine import Engine
    from runtime.verify import Tally

Prompts = tuple[dict[str, Any], ...]


class Measured(Frozen):
    """What bench, verify and tune have in common."""

    tree_budgets: tuple[int, ...] = ()
    """Empty: the one in force."""
    prompts: Prompts | None = Field(default=None, min_length=1)
    """Each `{"prompt": ...}` or `{"messages": [...]}`; None: the bundled ones."""
    prompts_per_kind: int = Field(default=2, ge=1)
    """Bundled prompts of each kind: maths, code, chat."""
    max_tokens: int = Field(default=64, ge=2)
    under_load: bool = False
    """Measure also while other clients' requests run."""

    def prompt_list(self) -> Prompts:
        if self.prompts is not None:
            return self.prompts
        return tuple(prompt for kind in bundled_prompts(self.prompts_per_kind).values() for prompt in kind)


class BenchParameters(Measured):
    """Every combination of these is a case."""

    modes: tuple[Mode, ...] = Field(default=("off", "chain", "tree"), min_length=1)
    concurrency: tuple[int, ...] = Field(default=(1,), min_length=1)
    temperatures: tuple[float, ...] = Field(default=(0.0,), min_length=1)
    repetitions: int = Field(default=3, ge=1, le=100)
    duration_s: float | None = Field(default=None, gt=0.0, le=3600.0)
    """How long each case of each repetition decodes, its prompts over and over; None: every prompt once."""


class VerifyParameters(Measured):
    modes: tuple[Mode, ...] = Field(default=("chain", "tree"), min_length=1)
    temperatures: tuple[float, ...] = Field(default=(0.0, 0.7), min_length=1)
    seed: int = Field(default=7, ge=0, lt=2**64)


class TuneParameters(Measured):
    """What is sought; no budgets: those that `ddtree tune` tries."""

    objective: Literal["latency", "throughput"] = "latency"
    concurrency: int = Field(default=1, ge=1)
    temperature: float = Field(default=0.0, ge=0.0, le=2.0)
    modes: tuple[Mode, ...] = Field(default=("off", "chain", "tree"), min_length=1)
    max_tokens: int = Field(default=32, ge=2)


class DoctorParameters(Frozen):
    """A doctor has no settings: it looks and changes nothing."""


async def check_measured(runtime: Runtime, parameters: Measured) -> None:
    """Refuses what the configuration in force cannot serve, naming the field."""
    config = (await runtime.status()).config
    for budget in parameters.tree_budgets:
        most = config["max_tree_budget"]
        if not 0 <= budget <= most:
            raise ConfigRejected(
                f"tree_budgets = {budget}: must be from 0 to max_tree_budget = {most}", "tree_budgets"
            )
    for number, prompt in enumerate(parameters.prompts or (), start=1):
        if set(prompt) not in ({"prompt"}, {"messages"}):
            raise ConfigRejected(
                f'prompts, number {number}: must be {{"prompt": ...}} or {{"messages": [...]}}', "prompts"
            )
    if isinstance(parameters, BenchParameters | VerifyParameters):
        for temperature in parameters.temperatures:
            if not 0.0 <= temperature <= 2.0:
                raise ConfigRejected(
                    f"temperatures = {temperature:g}: must be a number from 0 to 2", "temperatures"
                )
    if isinstance(parameters, BenchParameters | TuneParameters):
        asked = parameters.concurrency
        for at_once in asked if isinstance(asked, tuple) else (asked,):
            most = config["max_concurrency"]
            if not 1 <= at_once <= most:
                raise ConfigRejected(
                    f"concurrency = {at_once}: must be from 1 to max_concurrency = {most}", "concurrency"
                )


async def run_bench(context: JobContext[BenchParameters]) -> Outcome:
    """Measures every case, repetitions interleaved."""
    from runtime.bench import SETTLE_TOKENS, BenchPlan, BenchReport, list_cases, ranked

    wanted = context.parameters
    prompts = wanted.prompt_list()
    status = await context.runtime.status()
    description = await context.runtime.describe()
    plan = BenchPlan(
        RuntimeConfig.model_validate(status.config),
        modes=wanted.modes,
        budgets=wanted.tree_budgets,
        concurrency=wanted.concurrency,
        temperatures=wanted.temperatures,
    )
    inactive = description.speculation.removeprefix("inactive: ")
    reason = inactive if inactive != description.speculation else None
    cases, notes = list_cases(plan, status.config["tree_budget"] or 0, reason)
    if not cases:
        raise RuntimeFault("nothing to measure: " + "; ".join(notes))
    runs: dict[Case, list[Run]] = {case: [] for case in cases}
    conditions = await _conditions(context, len(prompts))
    settling = wanted.model_copy(update={"max_tokens": SETTLE_TOKENS, "duration_s": None})
    async with _rounds(context.runtime) as rounds:
        await _run_case(context, cases[-1], prompts[:1], settling, rounds)
        total = wanted.repetitions * len(cases)
        for done, (repetition, case) in enumerate(itertools.product(range(wanted.repetitions), cases)):
            budget = f" {case.tree_budget}" if case.mode == "tree" else ""
            context.report(
                done / total,
                f"repetition {repetition + 1} of {wanted.repetitions}: {case.mode}{budget}, "
                f"{case.concurrency} at once, T {case.temperature:g}",
            )
            runs[case].append(await _run_case(context, case, prompts, wanted, rounds))
    report = BenchReport(conditions, ranked(runs), tuple(notes))
    best = max(report.results, key=lambda each: each.median("tok_s"))
    gain = f", {best.speed_up:.2f}x plain" if best.speed_up else ""
    budget = f" {best.case.tree_budget}" if best.case.mode == "tree" else ""
    text = f"fastest: {best.case.mode}{budget}, {best.median('tok_s'):.1f} tok/s{gain}; {len(cases)} cases"
    return Outcome(text, report.to_json())


async def run_verify(context: JobContext[VerifyParameters]) -> Outcome:
    """Compares speculative with plain texts; what differs is judged on the engine itself."""
    from runtime.verify import Place, Tally, VerifyPlan

    wanted = context.parameters
    if context.with_engine is None:
        raise RuntimeFault("verify needs the engine in this process to judge texts that differ")
    prompts = wanted.prompt_list()
    config = (await context.runtime.status()).config
    plan = VerifyPlan(
        RuntimeConfig.model_validate(config),
        modes=wanted.modes,
        temperatures=wanted.temperatures,
        seed=wanted.seed,
        max_tokens=wanted.max_tokens,
    )
    tally = Tally(plan, wanted.tree_budgets or (config["tree_budget"] or 0,))
    variants: list[tuple[Mode, int]] = [("off", 0), *tally.variants]
    total = len(prompts) * len(plan.temperatures) * len(variants)
    done = 0
    for (number, prompt), temperature in itertools.product(enumerate(prompts), plan.temperatures):
        plain: RequestFinished | None = None
        for mode, budget in variants:
            context.report(done / total, f"prompt {number + 1} of {len(prompts)}, T {temperature:g}: {mode}")
            done += 1
            sampling = SamplingParams(max_tokens=plan.max_tokens, temperature=temperature, seed=plan.seed)
            text = await _answer(context, prompt, sampling, mode, budget)
            if plain is None:
                plain = text
            elif not tally.same(plain, text):
                place = Place(number, mode, budget, temperature)
                await context.with_engine(_judging(tally, prompt, place, text))
    report = await context.with_engine(lambda engine: tally.report(engine, len(prompts)))
    words = f"{report.verdict}: {report.identical} of {report.texts} texts have exactly the plain tokens"
    passed = report.exit_code == 0
    return Outcome(words, {**report.to_json(), "passed": passed, "findings": report.table()})


def _judging(tally: Tally, prompt: dict[str, Any], place: Any, text: RequestFinished) -> Any:
    def act(engine: Engine) -> None:
        tally.judge(engine, prompt, place, text)

    return act


async def _answer(
    context: JobContext[Any], prompt: dict[str, Any], sampling: SamplingParams, mode: Mode, budget: int
) -> RequestFinished:
    """One request of this job, to its end."""
    request = GenerateRequest(
        **prompt,
        sampling=sampling,
        mode=mode,
        tree_budget=budget,
        reuse_prefix=False,
        client=context.job_id,
        workload="job",
    )
    async with aclosing(context.runtime.generate(request)) as events:  # type: ignore[type-var]
        async for event in events:
            if isinstance(event, RequestFinished):
                if event.reason in ("cancelled", "error"):
                    raise RuntimeFault(event.error or f"a request of this job was {event.reason}")
                return event
    raise RuntimeFault("a request of this job ended without an answer")


async def _run_case(
    context: JobContext[BenchParameters],
    case: Case,
    prompts: Prompts,
    wanted: BenchParameters,
    rounds: list[RoundStats],
) -> Run:
    """Decodes the prompts, `case.concurrency` at a time."""
    from runtime.bench import Part, Run

    finished: list[RequestFinished] = []
    rounds.clear()
    start = time.perf_counter()
    work = _work(prompts, None if wanted.duration_s is None else start + wanted.duration_s)

    async def client() -> None:
        for number, prompt in work:
            sampling = SamplingParams(
                max_tokens=wanted.max_tokens, temperature=case.temperature, seed=number % len(prompts)
            )
            finished.append(await _answer(context, prompt, sampling, case.mode, case.tree_budget))

    await _together(client() for _ in range(case.concurrency))
    wall = time.perf_counter() - start
    stages = tuple(each.stage_s for each in rounds if each.stage_s is not None)
    if rounds and not stages:
        raise RuntimeFault(
            "this engine does not tell where the time of a round goes; measure it from outside: ddtree bench --url"
        )
    part = Part(tuple(event.stats for event in finished), stages, wall)
    if not part.stages or not any(stats.decode_s for stats in part.finished):
        raise RuntimeFault(
            "nothing was decoded after the first token; ask for longer answers or other prompts"
        )
    return Run.of([part])


def _work(prompts: Prompts, until: float | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every prompt once, or over and over until a moment of `time.perf_counter`."""
    if until is None:
        yield from enumerate(prompts)
        return
    for number in itertools.count():
        yield number, prompts[number % len(prompts)]
        if time.perf_counter() >= until:
            return


async def _together(work: Any) -> None:
    """Awaits all; the first failure ends the others and is raised as it is."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _rounds(runtime: Runtime) -> AsyncIterator[list[RoundStats]]:
    """The decode rounds of the runtime from now on, in a list that grows."""
    rounds: list[RoundStats] = []

    async def watch() -> None:
        async for event in runtime.watch():
            if isinstance(event, RoundStats):
                rounds.append(event)

    watching = asyncio.ensure_future(watch())
    try:
        yield rounds
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _conditions(context: JobContext[BenchParameters], prompts: int) -> dict[str, Any]:
    import torch

    from runtime.bench import cpu_name

    wanted, description = context.parameters, await context.runtime.describe()
    bundled = f"bundled, {wanted.prompts_per_kind} of each kind"
    return {
        "host": description.host,
        "cpu": cpu_name(),
        "device": description.device,
        "dtype": description.dtype,
        "threads": description.threads,
        "linear": description.linear,
        "torch": torch.__version__,
        "model": description.target,
        "prompts": bundled if wanted.prompts is None else "given with the job",
        "prompt_count": prompts,
        "max_tokens": wanted.max_tokens,
        "repetitions": wanted.repetitions,
        "duration_s": wanted.duration_s,
        "under_load": wanted.under_load,
        "through": "the serving runtime",
        "load_average_before": os.getloadavg()[0],
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


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


BENCH = JobKind("bench", BenchParameters, run_bench, check_measured, measures=True)
VERIFY = JobKind("verify", VerifyParameters, run_verify, check_measured, measures=True)
TUNE = JobKind("tune", TuneParameters, run_tune, check_measured, measures=True)
DOCTOR = JobKind("doctor", DoctorParameters, run_doctor, exclusive=False)
JOBS: tuple[JobKind[Any], ...] = (BENCH, VERIFY, TUNE, DOCTOR)
