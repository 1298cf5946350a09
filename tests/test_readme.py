"""The README is true: its curl lines work as written, its commands and options exist, its pictures are there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from prometheus_client.parser import text_string_to_metric_families
from served import serving

from console.cli import ELSEWHERE, _load, app

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND_ROWS = re.findall(r"^\| (`ddtree .*?) \|", README, re.MULTILINE)
SERVED_AT = "http://127.0.0.1:8642"


def serving_lines() -> list[str]:
    """The commands of the section on serving, but for those that run until they are stopped."""
    section = README.split("\n## Serving\n", 1)[1].split("\n## ", 1)[0].replace("\\\n", " ")
    lines = re.findall(r"^    (\S.*)$", section, re.MULTILINE)
    return [line for line in lines if "ddtree serve" not in line and "ddtree console" not in line]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_commands_on_serving_work_as_written(tmp_path: Path, tiny_folder: Path) -> None:
    lines = serving_lines()
    assert sum(line.startswith("curl") for line in lines) >= 3 and "ctl stop" in lines[-1]
    models = ("--model", str(tiny_folder / "target"), "--drafter", str(tiny_folder / "drafter"))
    with serving(tmp_path, *models) as served:
        served.wait_ready()
        for line in lines:
            if line.startswith("curl"):
                said = run(
                    ["sh", "-c", line.replace(SERVED_AT, served.url()) + " --fail-with-body"], tmp_path
                )
            else:
                said = run([sys.executable, "-m", "console", *line.split()[1:]], tmp_path)
            if "/metrics" in line:
                families = text_string_to_metric_families(said)
                assert "ddtree_accept_length" in {family.name for family in families}
            elif "/v1/" in line:
                assert json.loads(said)["choices"][0]["message"]["role"] == "assistant"
        assert served.wait_end() == 0


def run(words: list[str], home: Path) -> str:
    folders = {"XDG_RUNTIME_DIR": str(home / "run"), "XDG_STATE_HOME": str(home / "state")}
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **folders}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def named(row: str) -> list[tuple[list[str], list[str]]]:
    """Commands of one row of the table, each with the options its code span names: (words, options)."""
    found: list[tuple[list[str], list[str]]] = []
    for span in re.findall(r"`([^`]*)`", row):
        options = re.findall(r"(?<![\w-])--[a-z-]+", span)
        words = re.match(r"(?:[a-z][a-z-]* ?)*", span)
        path = words[0].split() if words else []
        if path and path[0] == "ddtree":
            found.append((path[1:], options))
        elif path:
            found.append(([*found[0][0][:1], *path], options))
        else:
            found[-1][1].extend(options)
    return found


def command(path: list[str]) -> Any:
    at: Any = typer.main.get_command(app)
    for number, word in enumerate(path):
        commands = getattr(at, "commands", {})
        at = _load(word) if number == 0 and word in ELSEWHERE else commands.get(word)
    return at


@pytest.mark.parametrize("row", COMMAND_ROWS)
def test_commands_and_options_of_the_table_exist(row: str) -> None:
    pairs = named(row)
    assert pairs
    for path, options in pairs:
        found = command(path)
        assert found is not None, f"ddtree {' '.join(path)}"
        known = {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}
        assert set(options) <= known, f"ddtree {' '.join(path)}: {set(options) - known}"


def test_files_that_the_readme_names_exist() -> None:
    targets = re.findall(r"\]\(((?!http)[^)#]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
    for name in re.findall(r"`((?:scripts|docs|runtime|layouts|snapshots)/[\w./-]+)`", README):
        assert (ROOT / name).exists(), name


def test_make_targets_that_the_readme_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"\bmake ([a-z][a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
