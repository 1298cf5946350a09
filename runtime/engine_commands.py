"""`ddtree engine install | check | figures`: SGLang in an environment of its own, and servers that run already."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from runtime.command_options import emit_json, tell

engine_app = typer.Typer(
    help="SGLang: install it beside the native engine, check it, look at a server.", no_args_is_help=True
)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Python = Annotated[
    Path | None,
    typer.Option("--python", metavar="FILE", help="Python of an environment that is there already."),
]


@engine_app.command("install")
def install(
    name: Annotated[str, typer.Argument(metavar="sglang", help="The engine.")],
    python: Python = None,
    constraints: Annotated[
        Path | None, typer.Option(metavar="FILE", help="pip constraints in place of SGLang's own pins.")
    ] = None,
    json: Json = False,
) -> None:
    """Make SGLang's environment, or bring the plugin into the one of --python; nothing else of it is touched."""
    from runtime.sglang_host import SGLANG_VERSION, environment_folder

    _only_sglang(name)
    folder = environment_folder()
    made = python is None
    if python is None:
        python = folder / "bin" / "python"
        if not python.is_file():
            _run([sys.executable, "-m", "venv", str(folder)], f"making {folder}")
        command = [str(python), "-m", "pip", "install", f"sglang=={SGLANG_VERSION}"]
        command += ["--constraint", str(constraints)] if constraints else []
        _run(command, f"installing SGLang {SGLANG_VERSION}")
    else:
        python = _python_at(str(python))
    pth = _link_plugin(python, folder.parent)
    found = _look(python)
    if json:
        emit_json({"engine": "sglang", "python": str(python), "made": made, "plugin": str(pth), **found})
        return
    print(f"SGLang {found['version']} in {python.parent.parent}; plugin: {pth}")
    if not made:
        print(f"set sglang_python = {python}")


@engine_app.command("check")
def check(python: Python = None, json: Json = False) -> None:
    """Say which SGLang there is and whether the plugin registers with it."""
    from runtime.config import resolve

    found = _python_at(str(python) if python else resolve({}).config.sglang_python)
    answer = _look(found)
    if json:
        emit_json({"engine": "sglang", "python": str(found), **answer})
    else:
        print(f"SGLang {answer['version']} ({found}): {answer['plugin_state']}")
    if answer["plugin_state"] != "registered":
        raise typer.Exit(1)


@engine_app.command("figures")
def figures(
    url: Annotated[str, typer.Argument(metavar="URL", help="An SGLang server that runs.")],
    every: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.5, help="Read again and again; ctrl+c ends it.")
    ] = None,
    json: Json = False,
) -> None:
    """Show what a running SGLang server tells of itself; nothing is changed there. Its key: SGLANG_API_KEY."""
    import asyncio
    import time

    from runtime.http_sglang import figure_lines, read_figures
    from runtime.interface import RuntimeUnavailable

    while True:
        try:
            found = asyncio.run(read_figures(url, os.environ.get("SGLANG_API_KEY")))
        except RuntimeUnavailable as failure:
            tell(str(failure))
            raise typer.Exit(3) from None
        if json:
            emit_json({"figures": found.model_dump()})
        else:
            print(*figure_lines(found), sep="\n", flush=True)
        if every is None:
            return
        time.sleep(every)


def _only_sglang(name: str) -> None:
    if name != "sglang":
        raise typer.BadParameter(f"{name!r} is no engine that can be installed; there is: sglang")


def _run(command: list[str], what: str) -> None:
    tell(what)
    done = subprocess.run(command, stdout=sys.stderr)
    if done.returncode:
        tell(f"{what} failed (exit code {done.returncode}); what pip says stands above")
        raise typer.Exit(1)


def _python_at(wanted: str) -> Path:
    """SGLang's Python, or exit 3 with what to do."""
    from runtime.interface import ConfigRejected
    from runtime.sglang_host import find_python

    try:
        return find_python(wanted)
    except ConfigRejected as refused:
        tell(str(refused))
        raise typer.Exit(3) from None


def _link_plugin(python: Path, parent: Path) -> Path:
    """Makes SGLang started by hand in this environment find the plugin too."""
    from runtime.sglang_host import plugin_folder

    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([str(python), "-c", asked], capture_output=True, text=True)
    if done.returncode:
        tell(f"{python} cannot be run: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
        raise typer.Exit(1)
    parent.mkdir(parents=True, exist_ok=True)
    pth = Path(done.stdout.strip()) / "ddtree_console_plugin.pth"
    pth.write_text(f"{plugin_folder(parent)}\n", encoding="utf-8")
    return pth


def _look(python: Path) -> dict[str, str]:
    """SGLang's version there and whether the plugin registers; exit 1 where there is no SGLang."""
    asked = (
        "from importlib.metadata import version; v = version('sglang'); print(v)\n"
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.speculative.spec_registry import get_spec\n"
        "print('registered' if get_spec('DDTREE_CONSOLE') else 'not registered')\n"
    )
    # From elsewhere than the folder the operator is in: a checkout of this project there would hide the plugin.
    done = subprocess.run([str(python), "-c", asked], capture_output=True, text=True, cwd=python.parent)
    lines = done.stdout.splitlines()
    if not lines:
        tell(f"{python} has no SGLang: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
        raise typer.Exit(1)
    reasons = [line for line in done.stderr.splitlines() if "DDTREE_CONSOLE" in line]
    state = "registered" if lines[-1] == "registered" else (reasons or ["the plugin did not register"])[-1]
    return {"version": lines[0], "plugin_state": state}
