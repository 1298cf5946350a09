"""Service units: found, kept without their secrets, written back with the live file's."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshots import services
from snapshots.content import REDACTED, UnitFile
from snapshots.secrets import SecretMissing
from snapshots.services import UnitNotFound, UnitRefused

UNIT = """[Service]
ExecStart=/opt/bin/ddtree serve --port 8642
Environment=DDTREE_API_KEY={key}
Restart=on-failure
"""
SYSTEMCTL = """#!/bin/sh
case "$*" in
*--user*) exit 1 ;;
*--state=running*) cat {folder}/running ;;
*) for last; do :; done; test "$last" = ddtree.service && cat {folder}/running ;;
esac
exit 0
"""


@pytest.fixture
def units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder of units, with a unit that serves and its drop-in."""
    folder = tmp_path / "config/systemd/user"
    (folder / "ddtree.service.d").mkdir(parents=True)
    (folder / "ddtree.service").write_text(UNIT.format(key="first-key-1"))
    (folder / "ddtree.service.d/override.conf").write_text("[Service]\nNice=5\n")
    (folder / "other.service").write_text("[Service]\nExecStart=/bin/sleep 1\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", str(tmp_path))
    return folder


@pytest.fixture
def systemctl(tmp_path: Path, units: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A systemctl that shows the two units as systemd does."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "running").write_text(
        f"ExecStart={{ path=/opt/bin/ddtree ; argv[]=/opt/bin/ddtree serve --port 8642 ; }}\nId=ddtree.service\n"
        f"FragmentPath={units}/ddtree.service\nDropInPaths={units}/ddtree.service.d/override.conf\n\n"
        f"ExecStart={{ path=/bin/sleep ; argv[]=/bin/sleep 1 ; }}\nId=other.service\n"
        f"FragmentPath={units}/other.service\nDropInPaths=\n"
    )
    (tmp_path / "systemctl").write_text(SYSTEMCTL.format(folder=tmp_path))
    (tmp_path / "systemctl").chmod(0o755)


def test_running_units_that_serve_are_found_with_their_drop_ins(systemctl: None) -> None:
    found = services.capture()
    assert [unit.name for unit in found] == ["ddtree.service", "ddtree.service.d/override.conf"]
    assert f"DDTREE_API_KEY={REDACTED}\n" in found[0].content
    assert "first-key-1" not in found[0].content


@pytest.mark.parametrize(
    ("command", "serves"),
    [
        ("/usr/bin/python -m console serve --port 1", True),
        ("/venv/bin/python -m sglang.launch_server --tp 8", True),
        ("/venv/bin/sglang serve --model x", True),
        ("/usr/bin/ddtree console", False),
        ("/usr/bin/python server.py", False),
    ],
)
def test_what_counts_as_serving(command: str, serves: bool) -> None:
    assert bool(services.SERVES.search(command)) is serves


def test_named_units_are_found_by_name_and_path_without_systemd(units: Path) -> None:
    found = services.capture(["ddtree", str(units / "other.service")])
    assert [unit.name for unit in found] == [
        "ddtree.service",
        "ddtree.service.d/override.conf",
        "other.service",
    ]


@pytest.mark.parametrize("name", ["nothing", "-x", "/no/such.service", "a;b"])
def test_a_unit_that_is_not_there_is_named(units: Path, name: str) -> None:
    with pytest.raises(UnitNotFound, match=f"unit '{name}'"):
        services.capture([name])


def test_restoring_shows_the_difference_and_keeps_the_live_secret(units: Path) -> None:
    stored = services.capture(["ddtree"])
    live = UNIT.format(key="second-key-2").replace("8642", "9000")
    (units / "ddtree.service").write_text(live)
    (units / "ddtree.service").chmod(0o600)
    change = services.changes(stored)[0]
    assert (
        "-ExecStart=/opt/bin/ddtree serve --port 9000\n+ExecStart=/opt/bin/ddtree serve --port 8642"
        in change.diff
    )
    assert "key-" not in change.diff and not change.refused
    path = str(units / "ddtree.service")
    assert services.restore(stored, dry_run=True) == (path,)
    assert (units / "ddtree.service").read_text() == live
    assert services.restore(stored) == (path,)
    assert (units / "ddtree.service").read_text() == UNIT.format(key="second-key-2")
    assert (units / "ddtree.service").stat().st_mode & 0o777 == 0o600
    assert services.restore(stored) == ()


def test_a_redaction_mark_is_never_written_and_nothing_else_is_then(units: Path) -> None:
    stored = services.capture(["ddtree", "other"])
    (units / "other.service").write_text("changed\n")
    (units / "ddtree.service").write_text("[Service]\nExecStart=/opt/bin/ddtree serve\n")
    assert "DDTREE_API_KEY" in services.changes(stored)[0].refused
    with pytest.raises(SecretMissing, match="the value of 'DDTREE_API_KEY' was redacted"):
        services.restore(stored)
    assert (units / "other.service").read_text() == "changed\n"
    (units / "ddtree.service").write_text(f"Environment=DDTREE_API_KEY={REDACTED}\n")
    with pytest.raises(SecretMissing):
        services.restore(stored)


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/tmp/x.service", "relative.service", "/etc/systemd/system/../../x.service"]
)
def test_only_unit_files_are_written(units: Path, path: str) -> None:
    with pytest.raises(UnitRefused, match="unit x"):
        services.restore([UnitFile(name="x", path=path, content="bad")])


def test_no_unit_is_written_through_a_link(units: Path, tmp_path: Path) -> None:
    (units / "linked.service").symlink_to(tmp_path / "elsewhere.service")
    with pytest.raises(UnitRefused, match="symbolic link"):
        services.restore([UnitFile(name="x", path=str(units / "linked.service"), content="bad")])
