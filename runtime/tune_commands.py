"""`ddtree tune`: finds the fastest mode and tree budget, or layout too, for this host and load; applies on request.

Light on purpose, as `runtime.command_options`: the engine, and with it torch, loads when the command runs.
"""

import asyncio
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layouts.user_files import user_home
from runtime.command_options import (
    ENGINE_OPTIONS,
    MODES,
    Given,
    JsonLine,
    ProgressLine,
    PromptFile,
    SloLimits,
    budgets_of,
    config_options,
    emit_json,
    numbers,
    per_kind_of,
    read_only,
    tell,
    with_room,
    words,
)
from runtime.commands import wait_ready

if TYPE_CHECKING:
    from runtime.config import RuntimeConfig
    from runtime.interface import Runtime
    from runtime.tune import TunePlan, TuneReport

REFUSED = 3
SLOWER = 0.9
"""Share of the old speed below which the new setting is taken back: thrice the noise of a measurement."""


class Objective(StrEnum):
    """What is sought."""

    latency = "latency"
    throughput = "throughput"
    goodput = "goodput"


@config_options(*ENGINE_OPTIONS, "mode", "tree_budget")
def tune(
    given: Given,
    objective: Annotated[
        Objective,
        typer.Option(help="Speed of one user, of all users, or answers per second that keep to the SLO."),
    ] = Objective.latency,
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, help="Users at a time.")] = 1,
    rate: Annotated[
        float | None, typer.Option(metavar="R", min=0.001, help="Requests per second instead of users.")
    ] = None,
    slo: SloLimits = None,
    temperature: Annotated[float, typer.Option(metavar="T", min=0.0, max=2.0, help="Temperature.")] = 0.0,
    modes: Annotated[
        str, typer.Option(metavar="LIST", help="Modes to try; plain decoding is always compared with.")
    ] = "off,chain,tree",
    budgets: Annotated[str | None, typer.Option(metavar="LIST", help="Tree budgets to try.")] = None,
    layouts: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Layouts to try too, by a rebuild each; what was is put back."),
    ] = None,
    prompts: PromptFile = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=2, help="Output tokens of a request.")] = 32,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Tune this running server; default: an engine of its own."),
    ] = None,
    under_load: Annotated[
        bool, typer.Option("--under-load", help="Measure although requests of others run.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Do not go on with measurements of a tune that was stopped.")
    ] = False,
    apply: Annotated[
        bool,
        typer.Option("--apply", help="Put it in force: on the server, or in the configuration file."),
    ] = False,
    snapshot: Annotated[
        bool,
        typer.Option(
            "--snapshot/--no-snapshot", help="Keep what --apply did with its evidence as a snapshot."
        ),
    ] = True,
    json: JsonLine = False,
) -> int:
    """Find the fastest mode and tree budget, by few interleaved measurements.

    Nothing but the layout, with --layouts, is changed while measuring. Stopped, it goes on with the same command within
    an hour.
    """
    if (apply or (layouts is not None and url is not None)) and read_only():
        tell("refused: DDTREE_READ_ONLY is set")
        return REFUSED
    plan = _plan(
        given, objective, concurrency, rate, slo, temperature, modes, budgets, prompts, max_tokens, under_load
    )
    tried = _layouts(layouts, url)
    report = asyncio.run(_tune(given, plan, url, tried, fresh, apply))
    if apply and snapshot:
        _keep(given, plan, report, url)
    if not json:
        print(report.table(), flush=True)
    emit_json(report.to_json())
    return 0


def _layouts(text: str | None, url: str | None) -> tuple[str, ...]:
    """The layouts to try; those of another host are known there."""
    from layouts.library import load_library

    if text is None:
        return ()
    return words(
        "--layouts", text, load_library().presets if url is None else text.replace(" ", "").split(",")
    )


def _plan(
    given: Given,
    objective: Objective,
    concurrency: int,
    rate: float | None,
    slo: str | None,
    temperature: float,
    modes: str,
    budgets: str | None,
    prompts: Path | None,
    max_tokens: int,
    under_load: bool,
) -> "TunePlan":
    from runtime.bench_commands import slo_of
    from runtime.prompt_sets import mixed_prompts, read_prompts
    from runtime.tune import BUDGETS, TunePlan

    if (objective is Objective.goodput) != (slo is not None):
        raise typer.BadParameter("the objective goodput and --slo need each other", param_hint="--slo")
    if rate is not None and objective is not Objective.goodput:
        raise typer.BadParameter("goes with --objective goodput only", param_hint="--rate")
    return TunePlan(
        objective=objective.value,
        concurrency=concurrency,
        rate=rate,
        slo=slo_of(slo),
        temperature=temperature,
        modes=words("--modes", modes, MODES),  # type: ignore[arg-type]
        budgets=BUDGETS if budgets is None else numbers("--budgets", budgets, int),
        max_tokens=max_tokens,
        prompts=tuple(
            read_prompts(prompts) if prompts is not None else mixed_prompts(per_kind_of(None, None))
        ),
        under_load=under_load,
    )


async def _tune(
    given: Given, plan: "TunePlan", url: str | None, layouts: tuple[str, ...], fresh: bool, apply: bool
) -> "TuneReport":
    from runtime.connect import attach, author, open_runtime
    from runtime.garbage import keep_out
    from runtime.tune import Ledger, TuneReport
    from runtime.tune import tune as race
    from runtime.tune_layouts import tune_layouts

    if url is not None:
        given.refuse_beside_url()
    resolved = given.resolve()
    runtime: Runtime = (
        attach(url) if url is not None else await open_runtime(_roomy(resolved.config, plan), fall_back=False)
    )
    try:
        if url is None:
            await wait_ready(runtime)  # type: ignore[arg-type]
            keep_out()
        kept = user_home("state") / "tune"
        with ProgressLine() as line:

            def progress(_share: float | None, text: str) -> None:
                line(text)

            report: TuneReport
            if layouts:
                report = await tune_layouts(
                    runtime, plan, layouts, author("tune"), kept, fresh=fresh, progress=progress
                )
            else:
                report = await race(runtime, plan, Ledger(kept, fresh=fresh), progress)
        if not apply:
            return report
        if not report.worth_it:
            done = "nothing: the setting in force is as good"
        elif url is not None:
            done = await apply_to_runtime(runtime, plan, report, author("tune"))
        else:
            done = apply_to_file(_config_file(given), resolved.config, report)
        tell(f"applied: {done}")
        return report.model_copy(update={"applied": done})
    finally:
        await runtime.aclose()


def _roomy(config: "RuntimeConfig", plan: "TunePlan") -> "RuntimeConfig":
    """The configuration with room for what is tried."""
    budgets = budgets_of(config, ",".join(map(str, plan.budgets)))
    roomy = with_room(config, budgets)
    return roomy.changed({"max_concurrency": max(roomy.max_concurrency, plan.concurrency)})


def _keep(given: Given, plan: "TunePlan", report: "TuneReport", url: str | None) -> None:
    """Has `ddtree snapshot save` keep the settings in force with the evidence; says so if that fails."""
    import json
    import subprocess
    import sys
    import tempfile

    from runtime.race import Arm

    layout = f"{report.layout}, " if report.layout is not None else ""
    label = f"tune for {report.objective}: {layout}{Arm(report.mode, report.tree_budget)}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "evidence.json"
        file.write_text(json.dumps(evidence(plan, report)) + "\n", encoding="utf-8")
        words = ["--label", label, "--note", report.table(), "--bench", str(file), "--no-fetch-originals"]
        config = _config_file(given).absolute()
        where = ["--url", url] if url is not None else ["--config", str(config)] if config.exists() else []
        done = subprocess.run(
            [sys.executable, "-m", "console", "snapshot", "save", *words, *where],
            cwd=Path(__file__).parent.parent,  # where the packages of this command lie
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    tell(said[-1].removeprefix("ddtree: ") if said else f"no snapshot was saved (exit {done.returncode})")


def _config_file(given: Given) -> Path:
    from runtime.config import default_file

    named = given.file or (Path(os.environ["DDTREE_CONFIG"]) if os.environ.get("DDTREE_CONFIG") else None)
    return (named or default_file()).expanduser()


async def apply_to_runtime(runtime: "Runtime", plan: "TunePlan", report: "TuneReport", author: str) -> str:
    """Applies the setting, measures it against the old one, takes it back if it is slower. Returns what was done.

    Raises ConfigRejected where the runtime does not take it.
    """
    from runtime.interface import ConfigRejected
    from runtime.tune import measure

    change = _change(report)
    offered = await runtime.preview(change)
    if not offered.allowed:
        raise ConfigRejected(offered.summary)
    if not offered.changes:
        return "already in force"
    old_speed = (await measure(runtime, plan, None, 0)).value
    applied = await runtime.apply(change, offered.revision, author)
    if applied.failure is not None:
        return f"taken back: {applied.failure}"
    new_speed = (await measure(runtime, plan, None, 0)).value
    if new_speed < SLOWER * old_speed:
        before = {each.field: each.old for each in applied.applied}
        await runtime.apply(before, applied.revision, author)
        return f"taken back: measured {new_speed:.1f}, the setting before {old_speed:.1f}"
    return (
        f"{applied.summary} (revision {applied.revision}; measured {new_speed:.1f}, before {old_speed:.1f})"
    )


def apply_to_file(file: Path, config: "RuntimeConfig", report: "TuneReport") -> str:
    """Writes what was found into a configuration file, made if need be; the rest of it stays as it is."""
    import tomlkit

    from runtime.config import validate

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


def evidence(plan: "TunePlan", report: "TuneReport") -> dict[str, Any]:
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


def _change(report: "TuneReport") -> dict[str, object]:
    from runtime.race import Arm

    found = Arm(report.mode, report.tree_budget)
    return {
        "mode": found.mode,
        **({"tree_budget": found.tree_budget} if found.mode == "tree" else {}),
        **({"layout": report.layout} if report.layout is not None else {}),
    }
