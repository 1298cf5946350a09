"""`ddtree doctor`: checks this host for what keeps an engine from running, or from running fast."""

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from runtime.command_options import Json, emit_json, read_only, tell

REFUSED = 3


def doctor(
    json: Json = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Repair what is safe and can be undone; says how to undo it.")
    ] = False,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address a server would take.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=1, max=65535, help="Port a server would take.")
    ] = 8642,
    environment: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Virtual environment whose packages count; default: this one."),
    ] = None,
) -> int:
    """Check driver, CUDA toolkits, packages and host; each finding says what to do.

    Exit 1 only where something is in error; a host without a GPU is not.
    """
    if fix and read_only():
        tell("refused: DDTREE_READ_ONLY is set")
        return REFUSED
    from runtime.doctor import examine, exit_code, lines, to_json
    from runtime.doctor import fix as repair
    from runtime.host_probe import Sources, read_probe
    from runtime.instance import runtime_folder
    from runtime.service import unit_path

    sources = Sources(
        env=os.environ,
        site_packages=_site_packages(environment) if environment is not None else None,
        host=host,
        port=port,
        runtime_folder=runtime_folder(),
        user_unit=unit_path("user"),
    )
    probe = read_probe(sources)
    findings = examine(probe)
    fixed: tuple[str, ...] = ()
    if fix:
        fixed = repair(probe, findings)
        for line in fixed:
            tell(line)
        findings = examine(read_probe(sources)) if fixed else findings
    if json:
        emit_json(to_json(findings, fixed))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 100
        print("\n".join(lines(findings, width)), flush=True)
    return exit_code(findings)


def _site_packages(environment: Path) -> Path:
    found = sorted(environment.expanduser().glob("lib/python3*/site-packages"))
    if not found:
        raise typer.BadParameter(
            f"{environment} is no virtual environment (no lib/python3*/site-packages in it)",
            param_hint="--environment",
        )
    return found[-1]
