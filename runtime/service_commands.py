"""`ddtree service`: installs and manages the systemd unit of `ddtree serve`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from runtime.command_options import Json, emit_json, tell

if TYPE_CHECKING:
    from runtime.service import Scope, Service

service_app = typer.Typer(
    help="Install and manage the systemd unit of serve.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

System = Annotated[
    bool, typer.Option("--system/--user", help="A service of the system, or of your own (default).")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")]


@service_app.command()
def install(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Configuration file of the service.")
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="As for serve.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="As for serve.")] = 8642,
    drain_seconds: Annotated[float, typer.Option(metavar="S", min=0.0, help="As for serve.")] = 30.0,
    run_as: Annotated[
        str | None,
        typer.Option(metavar="USER", help="Who a system service runs as; default: who asks (sudo)."),
    ] = None,
    system: System = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> int:
    """Write the unit and have it started at boot; start it now with: ddtree service start."""
    from runtime.service import Service, default_plan, unit_path, unit_text

    if config is not None and not config.is_file():
        raise typer.BadParameter(f"{config} is no file", param_hint="--config")
    scope = _scope(system)
    named = ("--config", str(config.resolve())) if config else ()
    options = ("--host", host, "--port", str(port), *named)
    user = (run_as or os.environ.get("SUDO_USER")) if system else None
    plan = default_plan(scope, options, drain_seconds, user)
    text = unit_text(plan)
    if dry_run:
        path = unit_path(scope)
        if json:
            emit_json({"path": str(path), "unit": text, "installed": False})
        else:
            tell(f"would write {path}:")
            print(text, end="", flush=True)
        return 0
    service = Service(scope)
    notes = service.install(plan)
    if json:
        emit_json({"path": str(service.path), "unit": text, "installed": True, "notes": notes})
        return 0
    print(
        f"wrote {service.path}; start it with: ddtree service start{' --system' if system else ''}",
        flush=True,
    )
    for note in notes:
        tell(note)
    return 0


@service_app.command()
def uninstall(system: System = False, dry_run: DryRun = False, json: Json = False) -> int:
    """Stop the service and remove its unit."""
    from runtime.service import unit_path

    if dry_run:
        _say(
            {"path": str(unit_path(_scope(system))), "removed": False},
            "would stop it and remove {path}",
            json,
        )
        return 0
    service = _service(system)
    service.uninstall()
    _say({"path": str(service.path), "removed": True}, "removed {path}", json)
    return 0


@service_app.command()
def start(system: System = False, dry_run: DryRun = False, json: Json = False) -> int:
    """Start the service and wait until it serves."""
    return _act("start", system, dry_run, json)


@service_app.command()
def stop(system: System = False, dry_run: DryRun = False, json: Json = False) -> int:
    """Drain the service and stop it."""
    return _act("stop", system, dry_run, json)


@service_app.command()
def restart(system: System = False, dry_run: DryRun = False, json: Json = False) -> int:
    """Drain the service, stop it and start it."""
    return _act("restart", system, dry_run, json)


@service_app.command()
def status(system: System = False, json: Json = False) -> int:
    """Say how the service is."""
    known = _service(system).status()
    if json:
        emit_json(known)
        return 0
    if not known["installed"]:
        print(f"not installed ({known['path']} does not exist)", flush=True)
        return 0
    words = [f"{known['active'] or 'n/a'} ({known['sub_state'] or 'n/a'})", str(known["status"] or "")]
    print(": ".join(filter(None, words)), flush=True)
    restarts = "n/a" if known["restarts"] is None else known["restarts"]
    print(
        f"pid {known['pid'] or 'n/a'}, restarts {restarts}, at boot: {known['at_boot'] or 'n/a'}, {known['path']}",
        flush=True,
    )
    return 0


def _act(verb: Literal["start", "stop", "restart"], system: bool, dry_run: bool, json: bool) -> int:
    from runtime.service import UNIT

    if dry_run:
        _say({"unit": UNIT, "done": None, "would": verb}, "would {would} {unit}", json)
        return 0
    service = _service(system)
    service.act(verb)
    state = service.status()
    _say({"unit": UNIT, "done": verb, "active": state["active"]}, "{unit}: {active}", json)
    for note in service.linger_notes() if verb == "start" else []:
        tell(note)
    return 0


def _service(system: bool) -> "Service":
    from runtime.service import Service

    return Service(_scope(system))


def _scope(system: bool) -> "Scope":
    return "system" if system else "user"


def _say(answer: dict[str, Any], words: str, json: bool) -> None:
    if json:
        emit_json(answer)
    else:
        print(words.format(**answer), flush=True)
