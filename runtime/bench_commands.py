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
    Number,
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
DEFAULT_WARM_UP = 4
DEFAULT_REPETITIONS = 5
A_LOAD = "--url, --rate, --requests or --duration"
"""The options of which one makes a load out of a comparison."""

Modes = Annotated[
    str | None, typer.Option(metavar="LIST", help="Speculation modes; default: off,chain,tree.")
]
Concurrency = Annotated[str | None, typer.Option(metavar="LIST", help="Requests at a time; default: 1.")]
Repetitions = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Interleaved repetitions of each case; default: 5.")
]
ServerUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="Put the load on this OpenAI-compatible server.")
]
ServedModel = Annotated[
    str | None, typer.Option(metavar="NAME", help="Model to ask the server for; default: its first.")
]
Rates = Annotated[
    str | None, typer.Option(metavar="LIST", help="Open loop: requests per second by the clock (Poisson).")
]
Requests = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Requests of a load; default: 32, or --duration.")
]
Duration = Annotated[
    float | None, typer.Option(metavar="S", min=0.1, help="Seconds in which a load sends requests.")
]
WarmUp = Annotated[
    int | None, typer.Option(metavar="N", min=0, help="Requests before a load is measured; default: 4.")
]
RandomWords = Annotated[str | None, typer.Option(metavar="LOW:HIGH", help="Prompts of so many random words.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Answers of a load go on to --max-tokens.")]
Seed = Annotated[int, typer.Option(metavar="S", min=0, help="Of arrival times and sampling.")]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result file too.")]
Schema = Annotated[
    bool, typer.Option("--schema", help="Print the JSON schema of a load's result file and end.")
]


@config_options(*ENGINE_OPTIONS, "top_p", "top_k")
def bench(
    given: Given,
    mode: Modes = None,
    tree_budget: BudgetList = None,
    concurrency: Concurrency = None,
    temperature: TemperatureList = "0",
    prompts: PromptFile = None,
    prompts_per_kind: PromptsPerKind = None,
    repetitions: Repetitions = None,
    max_tokens: OutputTokens = 64,
    url: ServerUrl = None,
    served_model: ServedModel = None,
    rate: Rates = None,
    requests: Requests = None,
    duration: Duration = None,
    warm_up: WarmUp = None,
    slo: SloLimits = None,
    random_words: RandomWords = None,
    ignore_eos: IgnoreEos = False,
    seed: Seed = 0,
    output: Output = None,
    schema: Schema = False,
    json: JsonLine = False,
) -> int:
    """Compare the speed of modes, budgets, loads and temperatures, or measure a server under load.

    Without --url, --rate, --requests or --duration: repetitions are interleaved on an engine of this process, figures
    are medians. With one of them: a load in closed loop (--concurrency) or open loop (--rate), with percentiles. The
    last line is one JSON object.
    """
    if schema:
        _print_schema()
        return 0
    if url is None and rate is None and requests is None and duration is None:
        _refuse(f"needs {A_LOAD}", slo=slo, served_model=served_model, warm_up=warm_up)
        _refuse(f"needs {A_LOAD}", ignore_eos=ignore_eos or None, random_words=random_words)
        report: Any = _compare(
            given.resolve().config,
            modes=mode,
            budgets=tree_budget,
            concurrency=concurrency,
            temperatures=temperature,
            prompts=prompts,
            prompts_per_kind=prompts_per_kind,
            repetitions=repetitions,
            max_tokens=max_tokens,
        )
        return _finish(report, output, json)
    if url is not None:
        given.refuse_beside_url()
    if concurrency is not None:
        _refuse("a load has either a rate or a concurrency", rate=rate)
    if url is None:
        _refuse("needs --url", served_model=served_model)
    _refuse("a load is measured once; use --requests or --duration", repetitions=repetitions)
    from runtime.load import Load

    config = given.resolve().config
    plan = LoadPlan(
        base=Load(
            requests=requests if requests is not None or duration is not None else DEFAULT_REQUESTS,
            duration_s=duration,
            warm_up=DEFAULT_WARM_UP if warm_up is None else warm_up,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            seed=seed,
        ),
        concurrency=_sizes("--concurrency", concurrency or "1", int) if rate is None else (),
        rates=_sizes("--rate", rate, float) if rate is not None else (),
        modes=words("--mode", mode, MODES) if mode is not None else (None,),
        budgets=budgets_of(config, tree_budget) or (None,),
        temperatures=temperatures_of(config, temperature),
        prompts=_load_prompts(prompts, prompts_per_kind, random_words, seed),
        slo=slo_of(slo),
    )
    with ProgressLine() as progress:
        if url is not None:
            report = asyncio.run(_on_server(plan, url, served_model, progress))
        else:
            report = asyncio.run(_in_process(plan, config, progress))
    return _finish(report, output, json) or _unanswered(report)


def _print_schema() -> None:
    from runtime.load_report import LoadReport

    print(json_text.dumps(LoadReport.model_json_schema(by_alias=True), indent=2))


def _refuse(reason: str, **options: object) -> None:
    """Raises a usage error for the first of `options` that was given: it would be ignored."""
    for name, value in options.items():
        if value is not None:
            raise typer.BadParameter(reason, param_hint="--" + name.replace("_", "-"))


def _sizes(option: str, text: str, kind: type[Number]) -> tuple[Number, ...]:
    sizes = numbers(option, text, kind)
    for size in sizes:
        if not 0 < size < float("inf"):
            raise typer.BadParameter(f"{size:g} is not above 0", param_hint=option)
    return sizes


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
    *,
    modes: str | None,
    budgets: str | None,
    concurrency: str | None,
    temperatures: str,
    prompts: Path | None,
    prompts_per_kind: int | None,
    repetitions: int | None,
    max_tokens: int,
) -> Any:
    """Runs every case on an engine of this process; the lists are as the command line has them."""
    nodes = budgets_of(config, budgets)
    at_once = numbers("--concurrency", concurrency or "1", int)
    for count in at_once:
        config.changed({"max_concurrency": count})
    levels = temperatures_of(config, temperatures)
    chosen = words("--mode", modes or ",".join(MODES), MODES)
    per_kind = per_kind_of(prompts, prompts_per_kind)
    roomy = config.changed({"max_concurrency": max(config.max_concurrency, *at_once)})
    from runtime.bench import BenchPlan, run_bench

    plan = BenchPlan(
        config=with_room(roomy, nodes),
        modes=chosen,
        budgets=nodes,
        concurrency=at_once,
        temperatures=levels,
        prompts=prompts,
        prompts_per_kind=per_kind,
        repetitions=DEFAULT_REPETITIONS if repetitions is None else repetitions,
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


def _unanswered(report: "LoadReport") -> int:
    """The exit code: 1 where no request of some load got an answer, which is told."""
    broken = [each for each in report.results if each.requests == each.failed]
    for each in broken[:1]:
        tell(f"no request got an answer: {next(iter(each.errors), 'none was sent in this time')}")
    return 1 if broken else 0


async def _on_server(plan: LoadPlan, url: str, model: str | None, progress: ProgressLine) -> "LoadReport":
    from runtime.http_load import OpenAiTarget

    key = os.environ.get("DDTREE_API_KEY") or os.environ.get("OPENAI_API_KEY")
    target = OpenAiTarget(url, model, key)
    try:
        name = await target.open()
        return await _measure(plan, target, {"url": target.url, "model": name}, target.local, progress)
    finally:
        await target.aclose()


async def _in_process(plan: LoadPlan, config: "RuntimeConfig", progress: ProgressLine) -> "LoadReport":
    from runtime.connect import open_runtime
    from runtime.garbage import keep_out
    from runtime.load import RuntimeTarget

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
