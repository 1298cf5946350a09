"""The command `ddtree`: its commands, and the one place where errors become a line on stderr and an exit code.

Importing this module loads typer and nothing heavier; sub-commands of other modules load when they are called.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from console import __version__
from runtime import commands
from runtime.command_options import ENGINE_OPTIONS, SAMPLING_OPTIONS, Given, config_options, tell

if TYPE_CHECKING:
    from runtime.config import ResolvedConfig
    from runtime.interface import Runtime

ELSEWHERE = {
    "layouts": ("runtime.layout_commands", "layouts_app", "Parallelism layouts: presets, fit, evidence."),
    "model": ("runtime.model_commands", "model_app", "List, fetch and convert models."),
    "serve": ("runtime.serve_commands", "serve", "Serve without a screen: API, metrics, control."),
    "service": ("runtime.serve_commands", "service_app", "Install and manage the systemd unit of serve."),
    "ctl": ("runtime.ctl_commands", "ctl_app", "Steer a running runtime: status, changes, drain, stop."),
    "bench": (
        "runtime.bench_commands",
        "bench",
        "Compare modes and budgets, or measure a server under load.",
    ),
    "doctor": ("runtime.doctor_commands", "doctor", "Check driver, CUDA, packages and host."),
    "tune": (
        "runtime.tune_commands",
        "tune",
        "Find the fastest mode and tree budget for this host and load.",
    ),
    "engine": ("runtime.engine_commands", "engine_app", "Install SGLang beside the native engine, check it."),
    "report": (
        "snapshots.report_commands",
        "report",
        "Write one page from results of bench and tune, and from snapshots.",
    ),
    "snapshot": (
        "snapshots.commands",
        "snapshot_app",
        "Commit working configurations, compare them, go back to one.",
    ),
    "train-drafter": ("runtime.train_commands", "train_drafter", "Train a drafter for a target."),
}
"""Commands of modules that load only when called: module, name in it, help."""

OWN_PACKAGES = ("console", "layouts", "runtime", "snapshots")
"""Their exceptions carry one line made for a person."""

DEFAULT_ADDRESS = "127.0.0.1:8642"

DONE, FAILED, WRONG_USAGE, REFUSED, INTERRUPTED = 0, 1, 2, 3, 130


class LazyGroup(TyperGroup):
    """A group that lists the commands of `ELSEWHERE` from their help text and imports one when it is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (_, _, words) in ELSEWHERE.items():
            self.add_command(TyperCommand(name, help=words))

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, _load(name) if name in ELSEWHERE else command, rest


def _load(name: str) -> Any:
    module, attribute, _ = ELSEWHERE[name]
    found = getattr(import_module(module), attribute)
    holder = typer.Typer(rich_markup_mode=None, add_completion=False)
    holder.callback()(lambda: None)
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
    else:
        holder.command(name)(found)
    return get_command(holder).commands[name]


app = typer.Typer(
    cls=LazyGroup,
    invoke_without_command=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"ddtree {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Run and watch a DDTree speculative-decoding runtime. Without a command: open the console."""
    if context.invoked_subcommand is None:
        raise typer.Exit(console())


class OnHangup(StrEnum):
    """What a console that serves does when its terminal is lost."""

    detach = "detach"
    stop = "stop"


class ConsoleCommand(TyperCommand):
    """The console's command, whose `--listen` may stand without an address."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        for at, argument in enumerate(args):
            if argument == "--listen" and (at + 1 == len(args) or args[at + 1].startswith("-")):
                args = [*args[:at], f"--listen={DEFAULT_ADDRESS}", *args[at + 1 :]]
        return super().parse_args(ctx, args)


@app.command(cls=ConsoleCommand)
@config_options(*ENGINE_OPTIONS, *SAMPLING_OPTIONS)
def console(
    given: Given,
    attach: Annotated[
        str | None, typer.Option(metavar="URL", help="Show and steer the server at URL; loads no engine.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:PORT]", help=f"Serve the HTTP API as well; without a value {DEFAULT_ADDRESS}."
        ),
    ] = None,
    on_hangup: Annotated[
        OnHangup | None,
        typer.Option(help="With --listen, when the terminal is lost: go on serving (default), or stop."),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Watch only; DDTREE_READ_ONLY=1 is the same.")
    ] = False,
    no_fallback: Annotated[
        bool, typer.Option("--no-fallback", help="Never try the last good configuration if this one fails.")
    ] = False,
) -> int:
    """Open the console: live figures and controls."""
    _check_together(given, attach, listen, on_hangup)
    resolved = given.resolve() if attach is None else None
    missing = _missing_terminal()
    if missing:
        tell(
            f"the console needs a terminal, but {missing}; without one use: ddtree serve, ddtree generate PROMPT"
        )
        return REFUSED
    import gc
    from functools import partial

    gc.disable()  # what a start imports stays; the app enables it again after its first paint
    from console.preferences import PreferenceFile, preference_path
    from console.session import run_console
    from runtime.connect import author, opened

    shown = partial(
        run_console, author=author(f"console {os.getpid()}"), preferences=PreferenceFile(preference_path())
    )
    read_only = read_only or _is_set("DDTREE_READ_ONLY")
    if resolved is None:
        return shown(opened(str(attach)), read_only=read_only, attached_to=attach)
    service = None
    if listen is not None:
        from runtime.serve_beside import ServiceBeside

        service = ServiceBeside.at(listen, (on_hangup or OnHangup.detach).value, not no_fallback)
    opener = partial(_opened, resolved, not no_fallback)
    return shown(opener, read_only=read_only, service=service)


def _check_together(given: Given, attach: str | None, listen: str | None, on_hangup: OnHangup | None) -> None:
    """Refuses options that would be ignored beside others."""
    own = [name for name, value in given.options.items() if value is not None]
    if attach is not None and given.file is not None:
        raise typer.BadParameter("the configuration is the server's", param_hint="--config")
    if attach is not None and listen is not None:
        raise typer.BadParameter("an attached console has no runtime to serve", param_hint="--listen")
    if attach is not None and own:
        option = "--" + own[0].replace("_", "-")
        raise typer.BadParameter(
            f"the runtime is the server's; change it there with 'ddtree ctl apply {own[0]}=...'",
            param_hint=option,
        )
    if on_hangup is not None and listen is None:
        raise typer.BadParameter("it needs --listen", param_hint="--on-hangup")


app.command()(commands.generate)
app.command()(commands.verify)
app.add_typer(commands.config_app, name="config")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit code."""
    try:
        _finish_restore()
        code = get_command(app).main(args=argv, prog_name="ddtree", standalone_mode=False, obj=_keeper)
        sys.stdout.flush()
        return code if isinstance(code, int) else DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if _is_set("DDTREE_DEBUG"):
            traceback.print_exc()
        return _report(error)


async def _opened(resolved: "ResolvedConfig", fall_back: bool) -> "Runtime":
    """A runtime in this process; what keeps its snapshots is imported beside the screen."""
    import asyncio

    from runtime.connect import open_runtime

    return await open_runtime(resolved.config, fall_back, resolved.origins, await asyncio.to_thread(_keeper))


def _keeper() -> Any:
    """What keeps snapshots of a runtime that a command starts; the runtime itself knows nothing of the store."""
    from snapshots.serving import StoreKeeper

    return StoreKeeper()


def _finish_restore() -> None:
    """Brings installed files that an interrupted restore left half-way into one state, before anything loads them."""
    state = os.environ.get("XDG_STATE_HOME", "").strip() or os.path.expanduser("~/.local/state")
    if not os.path.isdir(os.path.join(state, "ddtree", "restore")):
        return  # nothing was ever restored here, and nothing needs to be loaded to know it
    from snapshots.journal import Journal

    done = Journal().recover()
    if done is not None:
        tell(done)


def _report(error: Exception) -> int:
    """Say on stderr what went wrong and return the exit code."""
    if isinstance(error, OSError):
        # What stdout could not take is dropped here, or the interpreter would complain about it once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return FAILED
    if isinstance(error, typer.TyperException) and error.message.startswith("Usage:"):
        print(error.message, file=sys.stderr)
        return error.exit_code
    line, code = _explain(error)
    tell(line)
    return code


def _explain(error: Exception) -> tuple[str, int]:
    """Return one line for a person and the exit code."""
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        hint = f" (see: {context.command_path} --help)" if context else ""
        return " ".join(error.format_message().split()).rstrip(".") + hint, error.exit_code
    if isinstance(error, typer.Abort):
        return "no answer was given", FAILED
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror, FAILED

    from runtime.interface import ConfigRejected, RequestRejected

    text = " ".join(str(error).split())
    if type(error).__module__.partition(".")[0] not in OWN_PACKAGES:
        return f"unexpected {type(error).__name__}: {text} (DDTREE_DEBUG=1 shows where)", FAILED
    named_badly = isinstance(error, ConfigRejected | RequestRejected | ValueError)
    return text, getattr(error, "exit_code", WRONG_USAGE if named_badly else FAILED)


def _missing_terminal() -> str | None:
    """Say what keeps a full-screen program from running here, or None."""
    for name, stream in (("stdin", sys.stdin), ("stdout", sys.stdout)):
        if stream is None or not stream.isatty():
            return f"{name} is none"
    if os.environ.get("TERM", "dumb") in ("", "dumb"):
        return "TERM is dumb or not set"
    return None


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() not in ("", "0", "false", "no", "off")
