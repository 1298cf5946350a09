"""`ddtree serve`, the headless runtime with its HTTP API, and `ddtree service`, which manages its systemd unit.

Light on purpose, as `runtime.command_options`: the server, and with it torch, loads when the command runs.
"""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from runtime.command_options import (
    ENGINE_OPTIONS,
    SAMPLING_OPTIONS,
    Given,
    Json,
    config_options,
    emit_json,
    tell,
    words,
)

if TYPE_CHECKING:
    from runtime.config import ResolvedConfig
    from runtime.service import Scope, Service

QUEUE_OPTIONS = ("max_queue", "queue_timeout")

service_app = typer.Typer(
    help="Install and manage the systemd unit of serve.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

System = Annotated[
    bool, typer.Option("--system/--user", help="A service of the system, or of your own (default).")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")]


@config_options(*ENGINE_OPTIONS, *SAMPLING_OPTIONS, *QUEUE_OPTIONS)
def serve(
    context: typer.Context,
    given: Given,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Address to listen on; others than loopback need DDTREE_API_KEY."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0 = any free one.")] = 8642,
    drain_seconds: Annotated[
        float, typer.Option(metavar="S", min=0.0, help="Time accepted requests have to finish at the end.")
    ] = 30.0,
    request_timeout: Annotated[
        float,
        typer.Option(
            metavar="S", min=0.0, help="Longest time of one request, waiting included; 0 = no limit."
        ),
    ] = 3600.0,
    max_body_bytes: Annotated[int, typer.Option(metavar="N", min=1024, help="Largest request body.")] = 2
    * 1024
    * 1024,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Web origin whose pages may call; may be repeated."),
    ] = None,
    no_fallback: Annotated[
        bool,
        typer.Option(
            "--no-fallback", help="Fail, rather than serve the last good configuration, if this one fails."
        ),
    ] = False,
    log_format: Annotated[str, typer.Option(metavar="text|json", help="Form of the log on stderr.")] = "text",
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts into the log.")] = False,
) -> int:
    """Serve without a screen: OpenAI-compatible API, metrics, control; SIGTERM drains."""
    origins = tuple(cors_origin or ())
    for origin in origins:
        if not re.fullmatch(r"https?://[^/\s*]+", origin):
            raise typer.BadParameter(
                f"{origin!r} is not an origin such as https://example.org", param_hint="--cors-origin"
            )
    (style,) = words("--log-format", log_format, ("text", "json"))[:1]
    resolved, degraded = _resolve(given, not no_fallback)
    config = resolved.config
    from runtime.listener import ServerSettings
    from runtime.logs import log_to_stderr
    from runtime.serve import ServeOptions
    from runtime.serve import serve as run

    log_to_stderr(config.log_level, style, show_prompts=log_prompts)  # type: ignore[arg-type]
    settings = ServerSettings(
        host=host,
        port=port,
        cors_origins=origins,
        max_body_bytes=max_body_bytes,
        request_timeout_s=request_timeout or None,
    )
    keeper = context.obj() if context.obj is not None else None
    options = ServeOptions(settings, drain_seconds, not no_fallback, degraded, resolved.origins, keeper)
    return run(config, options, lambda: given.resolve().config)


def _resolve(given: Given, fall_back: bool) -> "tuple[ResolvedConfig, str | None]":
    """The configuration asked for; or, where a file or variable is wrong, the last good one with the reason.

    Raises ConfigRejected where the command line is wrong, or there is nothing to fall back to.
    """
    from runtime.config import ResolvedConfig, validate
    from runtime.interface import ConfigRejected
    from runtime.last_good import last_good_file, recall

    try:
        return given.resolve(), None
    except ConfigRejected as refused:
        named_file_is_there = given.file is None or given.file.exists()
        good = recall(last_good_file()) if fall_back and named_file_is_there else None
        try:
            validate({name: value for name, value in given.options.items() if value is not None})
        except ConfigRejected:
            raise refused from None
        if good is None:
            raise
        reason = f"the last good configuration is served, because the one asked for is wrong: {refused}"
    tell(reason)
    origins = dict.fromkeys(type(good).model_fields, "last good configuration")
    return ResolvedConfig(config=good, origins=origins), reason


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
    parts = [f"{known['active'] or 'n/a'} ({known['sub_state'] or 'n/a'})", str(known["status"] or "")]
    print(": ".join(filter(None, parts)), flush=True)
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
