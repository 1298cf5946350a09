"""The systemd unit: its directives, that systemd takes it, and that nothing foreign is touched."""

from __future__ import annotations

import configparser
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from test_cli import ddtree

from runtime.service import MARK, Service, ServiceFailed, ServiceRefused, UnitPlan, unit_text

SPECIAL = 'a b%c$d"e\\f'


def plan(root: Path, scope: str = "user", **changes: object) -> UnitPlan:
    fields: dict[str, object] = {
        "scope": scope,
        "serve_options": ("--port", "8700"),
        "drain_seconds": 45.0,
        "cache": root / "cache" / "ddtree",
        "state": root / "state" / "ddtree",
        "store": root / "data" / "ddtree",
        "environment_file": root / "environment",
    }
    return UnitPlan(**(fields | changes))  # type: ignore[arg-type]


def directives(text: str) -> dict[str, list[str]]:
    """Directive to its values, over all sections."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


@pytest.mark.parametrize("scope", ["user", "system"])
def test_the_unit_says_what_a_long_loading_draining_server_needs(tmp_path: Path, scope: str) -> None:
    text = unit_text(plan(tmp_path, scope))
    found = directives(text)
    assert found["Type"] == ["notify"]
    assert found["TimeoutStartSec"] == ["infinity"]
    assert float(found["TimeoutStopSec"][0]) > 45
    assert found["RestartPreventExitStatus"] == ["2 3"]
    assert found["LimitMEMLOCK"] == ["infinity"]
    assert int(found["WatchdogSec"][0]) > 0
    assert found["EnvironmentFile"] == [f"-{tmp_path}/environment"]
    for folder in ("cache/ddtree", "state/ddtree", "data/ddtree"):
        assert str(tmp_path / folder) in found["ReadWritePaths"][0].split()
    assert found["ExecStart"][0].startswith(sys.executable)
    assert found["ExecStart"][0].endswith("serve --port 8700 --drain-seconds 45")
    assert found["ProtectSystem"] == ["strict"] and found["NoNewPrivileges"] == ["true"]
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    assert parser.sections() == ["Unit", "Service", "Install"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("scope", ["user", "system"])
def test_systemd_takes_the_unit_also_with_odd_names(tmp_path: Path, scope: str) -> None:
    odd = tmp_path / SPECIAL
    unit = tmp_path / "ddtree.service"
    unit.write_text(unit_text(plan(odd, scope, serve_options=("--config", str(odd / "c.toml")))))
    flags = ["--user"] if scope == "user" else []
    done = subprocess.run(
        ["systemd-analyze", "verify", *flags, str(unit)],
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "ddtree.service" not in done.stderr, done.stderr


class Systemd:
    """Notes what it is asked, and answers as systemctl would."""

    def __init__(self, error: str = "", shown: str = "") -> None:
        self.asked: list[str] = []
        self.error, self.shown = error, shown

    def __call__(self, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.asked.append(" ".join(arguments))
        return subprocess.CompletedProcess(list(arguments), 1 if self.error else 0, self.shown, self.error)


def test_install_writes_enables_and_names_what_keeps_it_running(tmp_path: Path) -> None:
    systemd = Systemd()
    service = Service("user", tmp_path / "units" / "ddtree.service", systemd)
    notes = service.install(plan(tmp_path))
    assert service.path.read_text() == unit_text(plan(tmp_path))
    assert (tmp_path / "state" / "ddtree").is_dir()
    assert systemd.asked[-2:] == ["daemon-reload", "enable ddtree.service"]
    assert any(str(tmp_path / "environment") in note for note in notes)
    assert len([note for note in notes if "loginctl enable-linger" in note]) <= 1
    service.install(plan(tmp_path, drain_seconds=5.0))
    assert "--drain-seconds 5" in service.path.read_text(), "our own unit is replaced"
    service.uninstall()
    assert not service.path.exists()
    assert "disable --now ddtree.service" in systemd.asked


def test_a_foreign_unit_is_neither_overwritten_nor_removed(tmp_path: Path) -> None:
    path = tmp_path / "ddtree.service"
    path.write_text("[Service]\nExecStart=/bin/true\n")
    service = Service("user", path, Systemd())
    with pytest.raises(ServiceRefused, match="not written by ddtree"):
        service.install(plan(tmp_path))
    with pytest.raises(ServiceRefused, match="not written by ddtree"):
        service.uninstall()
    assert path.read_text().startswith("[Service]")


def test_without_a_systemd_that_answers_nothing_is_written(tmp_path: Path) -> None:
    silent = Systemd(error="Failed to connect to bus: No medium found\n")
    service = Service("user", tmp_path / "ddtree.service", silent)
    with pytest.raises(ServiceRefused, match="ddtree serve"):
        service.install(plan(tmp_path))
    assert not service.path.exists()
    service.path.write_text(MARK)
    failing = Service("user", service.path, Systemd(error="Job failed.\nSee more.\n"))
    with pytest.raises(ServiceFailed, match=r"systemctl start ddtree.service: Job failed\.$"):
        failing.act("start")


def test_status_says_nothing_that_systemd_does_not_tell(tmp_path: Path) -> None:
    shown = "ActiveState=active\nSubState=running\nStatusText=ready: tree, idle\nMainPID=0\nNRestarts=\n"
    known = Service("user", tmp_path / "ddtree.service", Systemd(shown=shown)).status()
    assert known["active"] == "active" and known["status"] == "ready: tree, idle"
    assert known["pid"] is None and known["restarts"] is None and known["installed"] is False


def test_a_dry_run_shows_the_unit_and_writes_nothing(tmp_path: Path) -> None:
    folders = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_STATE_HOME": str(tmp_path / "state")}
    done = ddtree("service", "install", "--dry-run", "--port", "8701", **folders)
    assert done.returncode == 0
    assert done.stdout.startswith(MARK) and "--port 8701" in done.stdout
    assert str(tmp_path / "config" / "systemd" / "user" / "ddtree.service") in done.stderr
    answer = json.loads(ddtree("service", "install", "--dry-run", "--system", "--json", **folders).stdout)
    assert answer["schema"] == 1 and answer["path"] == "/etc/systemd/system/ddtree.service"
    assert (
        json.loads(ddtree("service", "restart", "--dry-run", "--json", **folders).stdout)["would"]
        == "restart"
    )
    assert not list(tmp_path.rglob("*.service"))


def test_without_systemctl_each_command_is_one_line_and_exit_3(tmp_path: Path) -> None:
    for command in ("install", "start", "status"):
        done = ddtree("service", command, PATH=str(tmp_path), XDG_CONFIG_HOME=str(tmp_path))
        assert done.returncode == 3
        assert len(done.stderr.splitlines()) == 1 and "systemctl" in done.stderr
    assert not list(tmp_path.iterdir())
