"""`ddtree engine install` and `check` as typed, for an environment of SGLang's that an operator has already."""

from __future__ import annotations

import json
import venv
from pathlib import Path

import pytest
from installed_package import site_of

from console.cli import main
from runtime.sglang_host import SGLANG_VERSION

HERE = Path(__file__).parent


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment of its own without SGLang; our folders elsewhere."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv.create(tmp_path / "theirs", with_pip=False, symlinks=True)
    return tmp_path / "theirs"


def give_sglang(site: Path, version: str) -> None:
    """The stand-in for SGLang, installed as `version`."""
    (site / "sglang.pth").write_text(f"{HERE / 'sglang_stand_in'}\n")
    folder = site / f"sglang-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")


def test_the_plugin_is_brought_into_an_environment_that_is_there_already(
    environment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = environment / "bin" / "python"
    give_sglang(site_of(environment), SGLANG_VERSION)
    assert main(["engine", "check", "--python", str(python)]) == 1
    assert capsys.readouterr().out == f"SGLang {SGLANG_VERSION} ({python}): the plugin did not register\n"
    assert main(["engine", "install", "sglang", "--python", str(python)]) == 0
    assert f"set sglang_python = {python}" in capsys.readouterr().out
    assert main(["engine", "check", "--python", str(python), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["plugin_state"]) == (SGLANG_VERSION, "registered")
    plugin = (site_of(environment) / "ddtree_console_plugin.pth").read_text().strip()
    assert Path(plugin).is_relative_to(tmp_path / "data" / "ddtree")


def test_where_the_operator_stands_makes_no_difference(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a checkout with its .egg-info the plugin is found too, and Python by a path from there."""
    checkout = tmp_path / "checkout"
    (checkout / "ddtree_console.egg-info").mkdir(parents=True)
    (checkout / "ddtree_console.egg-info" / "PKG-INFO").write_text(
        "Metadata-Version: 2.1\nName: ddtree-console\nVersion: 0\n"
    )
    give_sglang(site_of(environment), SGLANG_VERSION)
    monkeypatch.chdir(checkout)
    words = ["--python", "../theirs/bin/python"]
    assert main(["engine", "install", "sglang", *words]) == 0
    assert main(["engine", "check", *words]) == 0
    assert "registered" in capsys.readouterr().out


def test_a_release_that_was_not_tested_is_named_with_the_reason(
    environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    give_sglang(site_of(environment), "0.0.1")
    words = ["--python", str(environment / "bin" / "python")]
    assert main(["engine", "install", "sglang", *words]) == 0
    assert main(["engine", "check", *words]) == 1
    said = capsys.readouterr().out
    assert "DDTREE_CONSOLE" in said and "0.0.1" in said and SGLANG_VERSION in said


def test_where_there_is_no_sglang_one_line_says_what_to_do(
    environment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = environment / "bin" / "python"
    for words, code, line in (
        (["check", "--python", str(python)], 1, f"{python} has no SGLang: "),
        (["check"], 3, "run: ddtree engine install sglang"),
        (["check", "--python", str(tmp_path / "none")], 3, "is no program that can be run"),
        (["install", "sglang", "--python", str(tmp_path / "none")], 3, "is no program that can be run"),
        (["install", "vllm"], 2, "'vllm' is no engine that can be installed; there is: sglang"),
    ):
        assert main(["engine", *words]) == code, words
        said = capsys.readouterr().err
        assert line in said and said.count("\n") == 1, said
