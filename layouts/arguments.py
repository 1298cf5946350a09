"""What a preset is started with: SGLang's command line, the native engine's settings, variables of engine processes."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from layouts.checks import refusals, tree_refusal
from layouts.presets import Preset
from layouts.shapes import ModelShape
from layouts.values import LayoutRefused, Mode

CHAIN_ALGORITHM, TREE_ALGORITHM = "DFLASH", "DDTREE_CONSOLE"
MODEL_PLACEHOLDER, DRAFTER_PLACEHOLDER = '"$MODEL"', '"$DRAFTER"'


@dataclass(frozen=True)
class Launch:
    """How to start a preset by hand."""

    command: str | None
    """SGLang's command line for a POSIX shell; None for the native engine."""
    settings: dict[str, str | int]
    """Configuration fields of `ddtree` that select the same."""
    environment: dict[str, str]
    """Variables of the engine's processes alone; a value with $NAME in front keeps what is there."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ChildEnvironment:
    """Variables for an engine's processes, and which of them need processes that have imported nothing yet."""

    set: dict[str, str]
    needs_new_process: tuple[str, ...]

    @property
    def note(self) -> str:
        if not self.needs_new_process:
            return ""
        return f"needs a new process: {', '.join(self.needs_new_process)} must be set before anything is imported"


def launch(
    preset: Preset,
    shape: ModelShape | None,
    *,
    model: str | None = None,
    drafter: str | None = None,
    mode: Mode | None = None,
    tree_budget: int | None = None,
    host: str | None = None,
    port: int | None = None,
) -> Launch:
    """What starts `preset`; `model` and `drafter` are paths, `mode` takes the place of the preset's.

    Raises:
        LayoutRefused: the degrees cannot run, among them SGLang's pipelines with speculation.
    """
    wanted = mode or preset.speculation.mode or "off"
    reasons = refusals(shape, preset.degrees, preset.engine, wanted)
    if reasons:
        raise LayoutRefused(f"{preset.name}: {reasons[0]}")
    notes = list(preset.notes)
    environment = {
        name: _spelled(name, each.value, each.prepend) for name, each in preset.environment.items()
    }
    if preset.engine == "native":
        chosen = mode or preset.speculation.mode
        settings: dict[str, str | int] = {"engine": "native", "layout": preset.field_value}
        settings |= {"model": model} if model else {}
        settings |= {"drafter": drafter} if drafter else {}
        settings |= {"mode": chosen} if chosen else {}
        budget = preset.speculation.tree_budget if tree_budget is None else tree_budget
        settings |= {"tree_budget": budget} if budget is not None else {}
        return Launch(None, settings, environment, tuple(notes))
    parts = ["python", "-m", "sglang.launch_server"]
    parts += ["--model-path", shlex.quote(model) if model else MODEL_PLACEHOLDER]
    degrees = preset.degrees
    parts += ["--tp-size", str(degrees.tp)]
    for name, degree in (("ep", degrees.ep), ("pp", degrees.pp), ("dp", degrees.dp)):
        parts += [f"--{name}-size", str(degree)] if degree > 1 else []
    parts += ["--host", shlex.quote(host)] if host else []
    parts += ["--port", str(port)] if port else []
    parts += [] if preset.graphs else ["--disable-cuda-graph"]
    for argument, value in preset.arguments.items():
        if value is True:
            parts.append(f"--{argument}")
        elif value is not False:
            parts += [f"--{argument}", shlex.quote(str(value))]
    parts += _speculation(preset, shape, wanted, drafter, tree_budget)
    if wanted == "off" and degrees.pp > 1:
        notes.append("speculation is off: SGLang refuses it with a pipeline")
    placeholders = [name for name in ("$MODEL", "$DRAFTER") if any(name in part for part in parts)]
    if placeholders:
        notes.append(
            f"set {' and '.join(name[1:] for name in placeholders)} to the folders of target and drafter"
        )
    settings = {"engine": "sglang", "layout": preset.field_value}
    return Launch(" ".join(parts), settings, environment, tuple(dict.fromkeys(notes)))


def _speculation(
    preset: Preset, shape: ModelShape | None, mode: Mode, drafter: str | None, tree_budget: int | None
) -> list[str]:
    """SGLang's arguments of a mode: a chain verifies the block, a tree its budget and the root."""
    if mode == "off":
        return []
    block = preset.speculation.block_size or (shape.drafter.block_size if shape and shape.drafter else None)
    if block is None:
        raise LayoutRefused(
            f"{preset.name}: mode = {mode} needs the drafter's block_size, which nothing here says; "
            "give --drafter, or --mode off"
        )
    width = block
    if mode == "tree":
        budget = preset.speculation.tree_budget if tree_budget is None else tree_budget
        budget = block - 1 if budget is None else budget
        narrow = tree_refusal(budget, block)
        if narrow:
            raise LayoutRefused(f"{preset.name}: {narrow}")
        width = budget + 1
    # What trees were tested with; a layout's own arguments come before and are not repeated.
    tested = {"attention-backend": "triton", "sampling-backend": "pytorch"} if mode == "tree" else {}
    backends = [
        part
        for name, value in tested.items()
        if name not in preset.arguments
        for part in (f"--{name}", value)
    ]
    return [
        *backends,
        "--speculative-algorithm",
        CHAIN_ALGORITHM if mode == "chain" else TREE_ALGORITHM,
        "--speculative-draft-model-path",
        shlex.quote(drafter) if drafter else DRAFTER_PLACEHOLDER,
        "--speculative-dflash-block-size",
        str(block),
        "--speculative-num-draft-tokens",
        str(width),
    ]


def child_environment(preset: Preset, current: dict[str, str], *, fresh: bool) -> ChildEnvironment:
    """The variables of an engine's processes, given those it would inherit; nothing is set in this process.

    `fresh`: the processes import everything anew; otherwise (the engine in this process, or ranks from a preloaded
    server) a variable that is read at import and has another value there needs a new process.
    """
    wanted = {
        name: f"{each.value}:{current[name]}" if each.prepend and current.get(name) else each.value
        for name, each in preset.environment.items()
    }
    late = [
        name
        for name, each in preset.environment.items()
        if not fresh and each.before == "import" and current.get(name) != wanted[name]
    ]
    return ChildEnvironment(wanted, tuple(late))


def _spelled(name: str, value: str, prepend: bool) -> str:
    return f"{value}:${name}" if prepend else value


def shell_line(result: Launch) -> str:
    """The command with its variables in front, as one line for a shell."""
    assert result.command is not None
    variables = [f"{name}={_quoted(value)}" for name, value in result.environment.items()]
    return " ".join([*(["env", *variables] if variables else []), result.command])


def _quoted(value: str) -> str:
    """Quoted so that only a $NAME the value ends with is expanded."""
    head, dollar, tail = value.partition(":$")
    return f'{shlex.quote(head)}:"${tail}"' if dollar else shlex.quote(value)
