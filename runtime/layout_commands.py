"""`ddtree layouts list | show | plan | args | record`: presets, what fits, what is predicted, what was measured."""

from __future__ import annotations

import json
import sys
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.command_options import Json, emit_json, numbers, tell

if TYPE_CHECKING:
    from layouts.host import Host
    from layouts.library import Library
    from layouts.plan import Question
    from layouts.presets import Evidence, Preset
    from layouts.shapes import ModelShape

layouts_app = typer.Typer(
    help="Parallelism layouts: presets, memory, predictions, evidence.", no_args_is_help=True
)

Named = Annotated[str, typer.Argument(metavar="NAME", help="A layout, as 'ddtree layouts list' names it.")]
Model = Annotated[
    str | None, typer.Option(metavar="NAME|PATH", help="Target; a known name or a Hugging Face folder.")
]
Drafter = Annotated[
    str | None, typer.Option(metavar="PATH", help="Drafter folder in DFlash format; none = without.")
]
Device = Annotated[
    str | None, typer.Option("--hardware", metavar="NAME", help="Plan for this hardware instead.")
]
Gpus = Annotated[int | None, typer.Option("--gpus", min=1, max=4096, help="Devices there are.")]


class Mode(StrEnum):
    """Speculation modes."""

    off = "off"
    chain = "chain"
    tree = "tree"


@layouts_app.command("list")
def list_layouts(
    model: Model = None, hardware: Device = None, gpus: Gpus = None, json_: Json = False
) -> None:
    """List all layouts, those for this host and model first."""
    library = _library()
    host = _host(library, hardware, gpus)
    shape = _shape_or_none(library, model, None, hardware)
    from layouts.plan import is_here
    from runtime.layout_text import list_lines, preset_json

    presets = [(preset, is_here(preset, host, shape)) for preset in library.presets.values()]
    presets.sort(key=lambda each: (not each[1], each[0].name))
    if json_:
        emit_json({"layouts": [preset_json(library, preset, here) for preset, here in presets]})
        return
    for line in list_lines(library, presets):
        print(line)


@layouts_app.command("show")
def show_layout(name: Named, json_: Json = False) -> None:
    """Show everything one layout says: arguments, variables, requirements, evidence with its scope."""
    library = _library()
    preset = library.preset(name)
    from runtime.layout_text import preset_json, show_lines

    if json_:
        emit_json(preset_json(library, preset, None))
        return

    for line in show_lines(preset, library.origins["presets", name].words):
        print(line)


@layouts_app.command("plan")
def plan_layouts(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Layouts; without any, those for this host."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All layouts, also those for other hardware.")] = False,
    model: Model = None,
    drafter: Drafter = None,
    hardware: Device = None,
    gpus: Gpus = None,
    concurrency: Annotated[
        str, typer.Option(metavar="N,...", help="Loads to predict, 1 to 1024; ranked by the first.")
    ] = "1,8,64,256",
    context: Annotated[int, typer.Option(min=1, max=10_000_000, help="Tokens of a sequence.")] = 1024,
    mode: Annotated[Mode | None, typer.Option(help="Speculation; without it, as the layout says.")] = None,
    tree_budget: Annotated[
        int | None, typer.Option(min=0, max=1024, help="Draft nodes, root excluded.")
    ] = None,
    accept_length: Annotated[
        float | None, typer.Option(min=1.0, help="Tokens a round, bonus token included; none = as measured.")
    ] = None,
    json_: Json = False,
) -> None:
    """Predict memory and speed of layouts and rank them; measured figures stand beside, with their scope."""
    from layouts.evidence import known_evidence
    from layouts.plan import Question, is_here, plan_all
    from runtime.config import resolve
    from runtime.layout_text import detail_lines, plan_json, plan_lines

    loads = _loads(concurrency)
    library = _library()
    host = _host(library, hardware, gpus)
    shape = _shape_or_none(library, model, drafter, hardware)
    question = Question(
        model=shape,
        concurrency=loads,
        context=context,
        mode=mode.value if mode else None,
        tree_budget=tree_budget,
        accept_length=accept_length,
    )
    if hardware is None:
        config = resolve({}).config
        budget = config.tree_budget if tree_budget is None else tree_budget
        question = question.model_copy(update={"default_mode": config.mode, "tree_budget": budget})
    known = known_evidence(library)
    if known.problem:
        tell(f"warning: {known.problem}; the records there are left out")
    chosen = [library.preset(name) for name in dict.fromkeys(names or ())]
    if not chosen:
        chosen = [
            p for p in library.presets.values() if every or _shown(p, host, hardware, question, is_here)
        ]
    plans = plan_all(library, host, question, known, chosen)
    if json_:
        emit_json({"host": host.model_dump(mode="json"), "layouts": [plan_json(plan) for plan in plans]})
    elif not plans:
        tell(f"no layout is for {host.words}; --all plans all of them")
    elif names:
        for number, plan in enumerate(plans):
            print(*([""] if number else []), *detail_lines(plan), sep="\n")
    else:
        title = shape.title if shape else "as each layout names it"
        for line in plan_lines(host, title, plans, loads, context):
            print(line)
    if names and len(plans) == 1 and plans[0].refused:
        raise typer.Exit(3)


@layouts_app.command("args")
def layout_arguments(
    name: Named,
    model: Annotated[str | None, typer.Option(metavar="PATH", help="Folder of the target.")] = None,
    drafter: Annotated[str | None, typer.Option(metavar="PATH", help="Folder of the drafter.")] = None,
    mode: Annotated[Mode | None, typer.Option(help="Speculation; without it, as the layout says.")] = None,
    tree_budget: Annotated[
        int | None, typer.Option(min=0, max=1024, help="Draft nodes, root excluded.")
    ] = None,
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Address SGLang listens on.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port SGLang listens on.")] = None,
    json_: Json = False,
) -> None:
    """Print what starts a layout: SGLang's command line, or the native engine's settings."""
    from layouts.arguments import launch, shell_line

    library = _library()
    preset = library.preset(name)
    shape = _shape_of_paths(library, preset, model, drafter)
    made = launch(
        preset,
        shape,
        model=model,
        drafter=drafter,
        mode=mode.value if mode else None,
        tree_budget=tree_budget,
        host=host,
        port=port,
    )
    late = [each for each, variable in preset.environment.items() if variable.before == "import"]
    if json_:
        emit_json(
            {
                "name": preset.name,
                "engine": preset.engine,
                "command": made.command,
                "settings": made.settings,
                "environment": made.environment,
                "needs_new_process": late,
                "notes": list(made.notes),
            }
        )
        return
    if made.command is not None:
        print(shell_line(made))
    else:
        for field, value in made.settings.items():
            print(f"{field} = {json.dumps(value)}")
        for variable, value in made.environment.items():
            print(f"# {variable}={value}: set in the engine's own processes")
    if late:
        tell(f"{', '.join(late)}: read at import; an engine in a running process needs a new process for it")
    for note in made.notes:
        tell(note)


@layouts_app.command("record")
def record_evidence(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE|FOLDER",
            help="Answer of 'ddtree bench --json' (- = stdin) or a snapshot's folder.",
        ),
    ],
    layout: Annotated[str, typer.Option(metavar="NAME", help="The layout it ran under.")] = "single",
    json_: Json = False,
) -> None:
    """Add what a bench or a snapshot measured to this user's evidence, with the scope it holds for."""
    from layouts.evidence import append_evidence, evidence_file

    library = _library()
    records = _measured(library, source, library.preset(layout))
    path = evidence_file()
    added = append_evidence(path, records)
    if json_:
        emit_json({"path": str(path), "found": len(records), "added": added})
        return
    scopes = sorted({record.scope.words for record in records})
    print(f"{added} of {len(records)} records added to {path}; scope: {'; '.join(scopes) or 'n/a'}")


def _library() -> Library:
    from layouts.library import load_library

    library = load_library()
    for problem in library.problems:
        tell(f"warning: {problem}; this file is left out")
    return library


def _host(library: Library, hardware: str | None, gpus: int | None) -> Host:
    """The host asked for, else this one."""
    from layouts.host import Device as Gpu
    from layouts.host import cpu_name, cpu_threads, given_host, host_of

    if hardware is not None:
        return given_host(library, hardware, gpus or (1 if library.device(hardware).device == "cpu" else 8))
    from runtime.config import resolve
    from runtime.telemetry import HostSampler

    sample = HostSampler().sample()
    config = resolve({}).config
    found = (
        [] if config.device == "cpu" else [Gpu(name=gpu.name, memory=gpu.memory_total) for gpu in sample.gpus]
    )
    threads = config.threads or cpu_threads()
    host = host_of(library, found, cpu=cpu_name(), threads=threads, memory=sample.memory_total)
    return host if gpus is None else host.model_copy(update={"devices": gpus})


def _shape_or_none(
    library: Library, model: str | None, drafter: str | None, hardware: str | None
) -> ModelShape | None:
    """Dimensions of the model asked for, else of the configured one; None for other hardware without a model."""
    from layouts.host import shape_of
    from layouts.values import LayoutError
    from runtime.config import resolve

    if model is not None:
        return shape_of(library, model, drafter)
    if hardware is not None:
        return None
    config = resolve({}).config
    try:
        return shape_of(library, config.model, drafter or config.drafter)
    except LayoutError as problem:
        tell(f"warning: {problem}; nothing is predicted for it")
        return None


def _shape_of_paths(
    library: Library, preset: Preset, model: str | None, drafter: str | None
) -> ModelShape | None:
    """Dimensions to check arguments with: of the given folder, else of the model the preset names."""
    from layouts.host import shape_of

    if model is not None and (Path(model).is_dir() or model in library.models):
        return shape_of(library, model, drafter if drafter and Path(drafter).is_dir() else None)
    if preset.model is None:
        return None
    return shape_of(library, preset.model, drafter if drafter and Path(drafter).is_dir() else None)


def _shown(preset: Preset, host: Host, hardware: str | None, question: Question, is_here: Any) -> bool:
    if hardware is not None and question.model is None:
        return preset.hardware == hardware
    return bool(is_here(preset, host, question.model)) or (
        preset.hardware == "host" and preset.engine == "native"
    )


def _loads(text: str) -> tuple[int, ...]:
    loads = numbers("--concurrency", text, int)
    wrong = [each for each in loads if not 1 <= each <= 1024]
    if wrong:
        raise typer.BadParameter(f"{wrong[0]} is not from 1 to 1024", param_hint="--concurrency")
    return loads


def _measured(library: Library, source: Path, preset: Preset) -> tuple[Evidence, ...]:
    """The records in a bench answer or a snapshot's folder."""
    from layouts.evidence import bench_scope, from_bench, from_snapshot
    from layouts.values import LayoutError

    label = preset.degrees.label
    if source.is_dir():
        config = tomllib.loads(_text(source / "config.toml"))
        environment = tomllib.loads(_text(source / "environment.toml"))
        measurements = _object(_text(source / "measurements.json"), str(source / "measurements.json"))
        return from_snapshot(config, environment, measurements, label, f"snapshot {source.resolve().name}")
    text = sys.stdin.read() if str(source) == "-" else _text(source)
    report = _object((text.strip().splitlines() or [""])[-1], str(source))
    conditions = report.get("conditions")
    device = str(conditions.get("device", "cpu")) if isinstance(conditions, dict) else "cpu"
    if device.startswith("cpu"):
        scope = bench_scope(report, None, 1, "gloo")
    else:
        host = _host(library, None, None)
        if host.hardware.device == "cpu":
            raise LayoutError(
                f"{source}: it ran on {device}, and this host has no GPU to take its scope from"
            )
        scope = bench_scope(
            report, host.hardware.class_name, preset.degrees.ranks, host.hardware.interconnect
        )
    return from_bench(report, scope, label, "ddtree bench")


def _text(path: Path) -> str:
    from layouts.values import LayoutError

    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise LayoutError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise LayoutError(f"{path}: not UTF-8") from None


def _object(text: str, place: str) -> dict[str, Any]:
    from layouts.values import LayoutError

    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise LayoutError(f"{place}: no JSON object; give what 'ddtree bench --json' printed")
    return found
