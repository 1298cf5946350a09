"""`ddtree bench`: compares modes and budgets on this host, or puts a measured load on a server or on this runtime.

Light on purpose, as `runtime.command_options`: the engine, and with it torch, loads when a command runs.
"""

import asyncio
import json as json_text
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.command_options import (
    ENGINE_OPTIONS,
    MODES,
    BudgetList,
    Given,
    JsonLine,
    OutputTokens,
    ProgressLine,
    PromptFile,
    PromptsPerKind,
    SloLimits,
    TemperatureList,
    budgets_of,
    config_options,
    emit_json,
    numbers,
    per_kind_of,
    tell,
    temperatures_of,
    with_room,
    words,
)
from runtime.commands import wait_ready

if TYPE_CHECKING:
    from runtime.config import RuntimeConfig
    from runtime.load import Load, Target
    from runtime.load_report import LoadReport, LoadResult, Slo

SLO_FIELDS = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}
DEFAULT_REQUESTS = 32


@config_options(*ENGINE_OPTIONS, "top_p", "top_k")
def bench(
    given: Given,
    mode: Annotated[
        str | None, typer.Option(metavar="LIST", help="Speculation modes; default: off,chain,tree.")
    ] = None,
    tree_budget: BudgetList = None,
    concurrency: Annotated[
        str | None, typer.Option(metavar="LIST", help="Requests at a time; default: 1.")
    ] = None,
    temperature: TemperatureList = "0",
    prompts: PromptFile = None,
    prompts_per_kind: PromptsPerKind = None,
    repetitions: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Interleaved repetitions of each case; default: 5.")
    ] = None,
    max_tokens: OutputTokens = 64,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Put the load on this OpenAI-compatible server.")
    ] = None,
    served_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model to ask the server for; default: its first.")
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Open loop: requests per second by the clock (Poisson)."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Requests of a load; default: 32, or --duration.")
    ] = None,
    duration: Annotated[
        float | None, typer.Option(metavar="S", min=0.1, help="Seconds in which a load sends requests.")
    ] = None,
    warm_up: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Requests before a load is measured; default: 4.")
    ] = None,
    slo: SloLimits = None,
    random_words: Annotated[
        str | None, typer.Option(metavar="LOW:HIGH", help="Prompts of so many random words.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers of a load go on to --max-tokens.")
    ] = False,
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="Of arrival times and sampling.")] = 0,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result file too.")] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of a load's result file and end.")
    ] = False,
    json: JsonLine = False,
) -> int:
    """Compare the speed of modes, budgets, loads and temperatures, or measure a server under load.

    Without --url, --rate, --requests or --duration: repetitions are interleaved on an engine of this process, figures
    are medians. With one of them: a load in closed loop (--concurrency) or open loop (--rate), with percentiles. The
    last line is one JSON object.
    """
    if schema:
        from runtime.load_report import LoadReport

        print(json_text.dumps(LoadReport.model_json_schema(by_alias=True), indent=2))
        return 0
    under_load = {"--url": url, "--rate": rate, "--requests": requests, "--duration": duration}
    only_load = {
        "--slo": slo,
        "--served-model": served_model,
        "--warm-up": warm_up,
        "--ignore-eos": ignore_eos,
    }
    if all(value is None for value in under_load.values()):
        for option, value in only_load.items():
            if value not in (None, False):
                raise typer.BadParameter("needs --url, --rate, --requests or --duration", param_hint=option)
        if random_words is not None:
            raise typer.BadParameter(
                "needs --url, --rate, --requests or --duration", param_hint="--random-words"
            )
        report: Any = _compare(
            given.resolve().config,
            mode,
            tree_budget,
            concurrency,
            temperature,
            prompts,
            prompts_per_kind,
            repetitions,
            max_tokens,
        )
        return _finish(report, output, json)
    _check_load(given, url, served_model, rate, concurrency, repetitions)
    from runtime.load import Load

    config = given.resolve().config
    plan = LoadPlan(
        base=Load(
            requests=requests if requests is not None or duration is not None else DEFAULT_REQUESTS,
            duration_s=duration,
            warm_up=4 if warm_up is None else warm_up,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            seed=seed,
        ),
        concurrency=numbers("--concurrency", concurrency or "1", int) if rate is None else (),
        rates=numbers("--rate", rate, float) if rate is not None else (),
        modes=words("--mode", mode, MODES) if mode is not None else (None,),
        budgets=budgets_of(config, tree_budget) or (None,),
        temperatures=temperatures_of(config, temperature),
        prompts=_load_prompts(prompts, prompts_per_kind, random_words, seed),
        slo=slo_of(slo),
    )
    for size in (*plan.concurrency, *plan.rates):
        if not 0 < size < float("inf"):
            option = "--rate" if plan.rates else "--concurrency"
            raise typer.BadParameter(f"{size:g} is not above 0", param_hint=option)
    key = os.environ.get("DDTREE_API_KEY") or os.environ.get("OPENAI_API_KEY")
    with ProgressLine() as progress:
        if url is not None:
            report = asyncio.run(_on_server(plan, url, served_model, key, progress))
        else:
            report = asyncio.run(_in_process(plan, config, progress))
    code = _finish(report, output, json)
    broken = [each for each in report.results if each.requests == each.failed]
    for each in broken[:1]:
        tell(f"no request got an answer: {next(iter(each.errors), 'none was sent in this time')}")
    return 1 if broken else code


@dataclass(frozen=True)
class LoadPlan:
    """All loads of one command: each of `modes`, `budgets` and `temperatures` at each concurrency or rate."""

    base: "Load"
    concurrency: Sequence[int]
    rates: Sequence[float]
    modes: Sequence[str | None]
    budgets: Sequence[int | None]
    temperatures: Sequence[float]
    prompts: Sequence[Mapping[str, Any]]
    slo: "Slo | None"

    def loads(self) -> "list[Load]":
        sizes: list[dict[str, Any]] = [{"concurrency": each} for each in self.concurrency]
        sizes += [{"rate": each} for each in self.rates]
        return [
            # A budget is a tree's; chain and plain decoding have none.
            self.base.at(mode=mode, tree_budget=budget, temperature=temperature, **size)
            for temperature, size, mode in product(self.temperatures, sizes, self.modes)
            for budget in (self.budgets if mode in ("tree", None) else (None,))
        ]


def _compare(
    config: "RuntimeConfig",
    mode: str | None,
    tree_budget: str | None,
    concurrency: str | None,
    temperature: str,
    prompts: Path | None,
    prompts_per_kind: int | None,
    repetitions: int | None,
    max_tokens: int,
) -> Any:
    budgets = budgets_of(config, tree_budget)
    at_once = numbers("--concurrency", concurrency or "1", int)
    for count in at_once:
        config.changed({"max_concurrency": count})
    temperatures = temperatures_of(config, temperature)
    modes = words("--mode", mode or ",".join(MODES), MODES)
    per_kind = per_kind_of(prompts, prompts_per_kind)
    roomy = config.changed({"max_concurrency": max(config.max_concurrency, *at_once)})
    from runtime.bench import BenchPlan, run_bench

    plan = BenchPlan(
        config=with_room(roomy, budgets),
        modes=modes,
        budgets=budgets,
        concurrency=at_once,
        temperatures=temperatures,
        prompts=prompts,
        prompts_per_kind=per_kind,
        repetitions=5 if repetitions is None else repetitions,
        max_tokens=max_tokens,
    )
    with ProgressLine() as progress:
        return run_bench(plan, progress=progress)


def _finish(report: Any, output: Path | None, json: bool) -> int:
    answer = report.to_json()
    if output is not None:
        draft = output.with_name(f".{output.name}.draft")
        draft.write_text(json_text.dumps(answer, indent=1) + "\n", encoding="utf-8")
        draft.replace(output)
    if not json:
        print(report.table(), flush=True)
    emit_json(answer)
    return 0


async def _on_server(
    plan: LoadPlan, url: str, model: str | None, key: str | None, progress: ProgressLine
) -> "LoadReport":
    from runtime.http_load import OpenAiTarget

    target = OpenAiTarget(url, model, key)
    try:
        name = await target.open()
        return await _measure(plan, target, {"url": target.url, "model": name}, target.local, progress)
    finally:
        await target.aclose()


async def _in_process(plan: LoadPlan, config: "RuntimeConfig", progress: ProgressLine) -> "LoadReport":
    from runtime.connect import open_runtime
    from runtime.load import RuntimeTarget
    from runtime.rebuild import keep_out

    budgets = tuple(each for each in plan.budgets if each is not None)
    config = with_room(config, budgets)
    config = config.changed({"max_concurrency": max(config.max_concurrency, *plan.concurrency, 1)})
    runtime = await open_runtime(config, fall_back=False)
    try:
        await wait_ready(runtime)  # type: ignore[arg-type]
        keep_out()
        about = await runtime.describe()
        fields = ("device", "dtype", "threads", "linear", "drafter", "speculation", "max_concurrency")
        facts = {"model": about.target, **{name: getattr(about, name) for name in fields}}
        return await _measure(plan, RuntimeTarget(runtime), facts, True, progress)
    finally:
        await runtime.aclose()


async def _measure(
    plan: LoadPlan, target: "Target", facts: Mapping[str, Any], local: bool, progress: ProgressLine
) -> "LoadReport":
    """Runs all loads one after another; the energy counted is this host's, so only of what runs on it."""
    from runtime.load import run_load
    from runtime.load_report import LoadReport, conditions, summarise
    from runtime.nvml_probe import EnergyMeter

    before = conditions(facts, len(plan.prompts))
    results: list[LoadResult] = []
    for number, load in enumerate(plan.loads(), start=1):
        of = f"load {number} of {len(plan.loads())}"
        meter = EnergyMeter() if local else None

        def told(line: str, of: str = of) -> None:
            progress(f"{of}: {line}")

        run = await run_load(load, target, plan.prompts, told)
        results.append(summarise(run, plan.slo, meter.joules() if meter is not None else None))
    return LoadReport(conditions=before, results=tuple(results))


def _check_load(
    given: Given,
    url: str | None,
    served_model: str | None,
    rate: str | None,
    concurrency: str | None,
    repetitions: int | None,
) -> None:
    """Refuses options that would be ignored beside others."""
    if url is not None:
        given.refuse_beside_url()
    if rate is not None and concurrency is not None:
        raise typer.BadParameter("a load has either a rate or a concurrency", param_hint="--rate")
    if served_model is not None and url is None:
        raise typer.BadParameter("needs --url", param_hint="--served-model")
    if repetitions is not None:
        raise typer.BadParameter(
            "a load is measured once; use --requests or --duration", param_hint="--repetitions"
        )


def _load_prompts(
    prompts: Path | None, per_kind: int | None, random_words: str | None, seed: int
) -> list[dict[str, Any]]:
    from runtime.prompt_sets import mixed_prompts, random_prompts, read_prompts

    if random_words is None:
        count = per_kind_of(prompts, per_kind)
        return read_prompts(prompts) if prompts is not None else mixed_prompts(count)
    if prompts is not None or per_kind is not None:
        raise typer.BadParameter("takes the place of other prompts", param_hint="--random-words")
    low, _, high = random_words.partition(":")
    if not (low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high)):
        raise typer.BadParameter(f"{random_words!r} is not LOW:HIGH as 20:200", param_hint="--random-words")
    return random_prompts(int(low), int(high), 256, seed)


def slo_of(text: str | None) -> "Slo | None":
    """The limits named by `--slo`; raises a usage error."""
    if text is None:
        return None
    limits = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        scale = 1e-3 if value.endswith("ms") else 1.0
        try:
            seconds = float(value.removesuffix("ms").removesuffix("s")) * scale
            limits[SLO_FIELDS[name]] = seconds
        except (KeyError, ValueError):
            seconds = 0.0
        if not seconds > 0:
            raise typer.BadParameter(
                f"{part.strip()!r} is not one of ttft=, tpot=, e2e= with a time as 500ms or 2s",
                param_hint="--slo",
            )
    from runtime.load_report import Slo

    return Slo(**limits)
