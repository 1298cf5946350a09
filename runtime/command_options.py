"""What the commands share: configuration options, machine-readable answers, progress on a terminal.

Light on purpose: `ddtree --help` imports it, so pydantic and everything heavier loads inside functions.
"""

import functools
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import typer

if TYPE_CHECKING:
    from runtime.config import ResolvedConfig, RuntimeConfig

SCHEMA = 1
"""Version of the shape of every `--json` answer."""

Number = TypeVar("Number", int, float)


class ConfigOption(NamedTuple):
    metavar: str
    help: str


CONFIG_OPTIONS: Mapping[str, ConfigOption] = {
    "model": ConfigOption("NAME|PATH", "Target: an embedded model, a .gguf file or a Hugging Face folder."),
    "drafter": ConfigOption(
        "PATH", "Drafter folder in DFlash format; auto = the model's own; none = no drafter."
    ),
    "mode": ConfigOption("off|chain|tree|auto", "Speculation mode."),
    "tree_budget": ConfigOption(
        "N", "Most draft nodes in a tree, root excluded; auto = calibrated; 0 = plain."
    ),
    "block_size": ConfigOption("N", "Tokens in a draft block, root included; auto = as trained."),
    "temperature": ConfigOption("T", "Sampling temperature, 0 to 2; 0 = greedy."),
    "top_p": ConfigOption("P", "Keep the likeliest tokens that reach this probability."),
    "top_k": ConfigOption("K", "Keep the K likeliest tokens; 0 = no limit."),
    "max_tokens": ConfigOption("N", "Most output tokens."),
    "threads": ConfigOption("N", "CPU threads; auto = physical cores."),
    "device": ConfigOption("NAME", "auto, cpu, cuda or cuda:N."),
    "dtype": ConfigOption(
        "auto|float32|bfloat16", "Number format; auto = float32 on a CPU, bfloat16 on a GPU."
    ),
    "max_seq_len": ConfigOption("N", "Context limit in tokens, prompt and output."),
    "max_concurrency": ConfigOption("N", "Requests decoded together."),
    "max_tree_budget": ConfigOption("N", "Largest budget a live change may set."),
    "max_queue": ConfigOption("N", "Requests that may wait; more are turned away."),
    "queue_timeout": ConfigOption("SECONDS", "Longest wait of a request for its turn."),
}
"""Configuration fields that have a command-line option, named after the field. All values pass as text to
`runtime.config.resolve`, so that an option, a variable and a line of the file are read and refused alike."""

ENGINE_OPTIONS = (
    "model",
    "drafter",
    "block_size",
    "threads",
    "device",
    "dtype",
    "max_seq_len",
    "max_concurrency",
    "max_tree_budget",
)
MODES = ("off", "chain", "tree")

Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]
Url = Annotated[
    str | None, typer.Option(metavar="URL", help="The server; without it: the one running instance here.")
]
JsonLine = Annotated[bool, typer.Option("--json", help="Only the JSON line.")]
PromptFile = Annotated[
    Path | None, typer.Option("--prompts", metavar="FILE", help="Prompts (JSON lines); default: built in.")
]
PromptsPerKind = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Built-in prompts of each kind; default: 8.")
]
BudgetList = Annotated[
    str | None, typer.Option(metavar="LIST", help="Tree budgets; default: the configured or calibrated one.")
]
TemperatureList = Annotated[str, typer.Option(metavar="LIST", help="Temperatures.")]
OutputTokens = Annotated[int, typer.Option(metavar="N", min=1, help="Output tokens of each request.")]
SloLimits = Annotated[
    str | None,
    typer.Option(
        "--slo", metavar="LIST", help="What a good answer keeps to, as ttft=500ms,tpot=50ms,e2e=10s."
    ),
]

SAMPLING_OPTIONS = ("mode", "tree_budget", "temperature", "top_p", "top_k", "max_tokens")


class Given(NamedTuple):
    """What the command line says of the configuration."""

    options: Mapping[str, str | None]
    file: Path | None

    def resolve(self) -> "ResolvedConfig":
        """Put it together with variables and file; warnings go to stderr. Raises ConfigRejected."""
        from runtime.config import resolve

        resolved = resolve(self.options, os.environ, self.file)
        for warning in resolved.warnings:
            tell(f"warning: {warning}")
        return resolved

    def refuse_beside_url(self) -> None:
        """Raises a usage error where engine options stand beside the address of a server."""
        own = next((name for name, value in self.options.items() if value is not None), None)
        if own is not None:
            option = "--" + own.replace("_", "-")
            raise typer.BadParameter("is the server's own setting with --url", param_hint=option)


def config_options(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command `--config` and the options of `names`; it receives them resolved as its argument `resolved`.

    What was set wrongly raises ConfigRejected before the command runs; warnings go to stderr. A command that has an
    argument `given` instead receives them as they are and resolves them itself.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        taken = inspect.signature(command).parameters
        own = [each for each in taken.values() if each.name not in ("given", "resolved")]

        @functools.wraps(command)
        def run(config: Path | None = None, **arguments: Any) -> Any:
            given = Given({name: arguments.pop(name, None) for name in names}, config)
            if "given" in taken:
                return command(given=given, **arguments)
            return command(resolved=given.resolve(), **arguments)

        added = [("config", Path | None, typer.Option(metavar="FILE", help="Configuration file (TOML)."))]
        added += [(name, str | None, typer.Option(**CONFIG_OPTIONS[name]._asdict())) for name in names]
        parameters = own + [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
            )
            for name, kind, option in added
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def numbers(option: str, text: str, kind: type[Number]) -> tuple[Number, ...]:
    """Parse a list such as "0,8,16", repeated values once; raises a usage error naming `option`."""
    try:
        values = dict.fromkeys(kind(each) for each in text.split(","))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise typer.BadParameter(f"{text!r} is not a list of {what} such as 0,1", param_hint=option) from None
    return tuple(values)


def words(option: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    """Parse a list such as "off,tree", repeated values once; raises a usage error naming `option`."""
    values = dict.fromkeys(each.strip() for each in text.split(","))
    for each in values:
        if each not in known:
            raise typer.BadParameter(f"{each!r} is not one of {', '.join(known)}", param_hint=option)
    return tuple(values)


def budgets_of(config: "RuntimeConfig", text: str | None) -> tuple[int, ...]:
    """The listed budgets, each within what a configuration allows; () = the configured or calibrated one."""
    budgets = () if text is None else numbers("--tree-budget", text, int)
    for budget in budgets:
        config.changed({"max_tree_budget": budget, "tree_budget": budget})
    return budgets


def temperatures_of(config: "RuntimeConfig", text: str) -> tuple[float, ...]:
    temperatures = numbers("--temperature", text, float)
    for temperature in temperatures:
        config.changed({"temperature": temperature})
    return temperatures


def per_kind_of(prompts: Path | None, number: int | None) -> int:
    if prompts is not None and number is not None:
        raise typer.BadParameter(
            "counts built-in prompts; leave it out with --prompts", param_hint="--prompts-per-kind"
        )
    return 8 if number is None else number


def with_room(config: "RuntimeConfig", budgets: tuple[int, ...]) -> "RuntimeConfig":
    return config.changed({"max_tree_budget": max(config.max_tree_budget, *budgets)}) if budgets else config


def read_only() -> bool:
    """Whether the variable that refuses changes is set."""
    return os.environ.get("DDTREE_READ_ONLY", "").lower() not in ("", "0", "false", "no", "off")


def tell(message: str) -> None:
    """Write one message for the person, apart from the results on stdout."""
    print(f"ddtree: {message}", file=sys.stderr, flush=True)


def emit_json(answer: Mapping[str, Any]) -> None:
    """Write one answer as one line of JSON on stdout; figures that are not finite become null."""
    print(json.dumps(_finite({"schema": SCHEMA, **answer}), allow_nan=False), flush=True)


class ProgressLine:
    """One line on stderr that is rewritten in place; silent where stderr is no terminal."""

    def __init__(self) -> None:
        self._shown = False
        self._active = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def __call__(self, text: str) -> None:
        if self._active:
            width = os.get_terminal_size(sys.stderr.fileno()).columns
            print(f"\r\x1b[K{text[: max(width - 1, 0)]}", end="", file=sys.stderr, flush=True)
            self._shown = True

    def clear(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = False

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.clear()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value
