"""`ddtree ctl` on real servers: found by their file, steered, drained, restarted and stopped; and without any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import ROOT, Served, serving, until

from runtime.ctl_text import RoundMeter, watch_line
from runtime.instance import Instance, InstanceUnclear, birth_of, instances, register, the_instance
from runtime.interface import EngineState, Job, JobProgress, LogLine, RoundStats, StatusChanged

LONG = {"prompt": "abc", "max_tokens": 800, "ignore_eos": True, "temperature": 0}


def ctl(home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `ddtree ctl` as the user whose folders stand under `home`."""
    (home / "run").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", "console", "ctl", *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "XDG_RUNTIME_DIR": str(home / "run"),
            "XDG_STATE_HOME": str(home / "state"),
            **variables,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def answer(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    parsed = json.loads(line)
    assert parsed["schema"] == 1
    return parsed


def refusal(done: subprocess.CompletedProcess[str], code: int) -> str:
    assert done.returncode == code, (done.stdout, done.stderr)
    (line,) = done.stderr.splitlines()
    assert line.startswith("ddtree: ")
    return line


@pytest.fixture(scope="module")
def models(tiny_folder: Path) -> tuple[str, ...]:
    return ("--model", str(tiny_folder / "target"), "--drafter", str(tiny_folder / "drafter"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ctl")


@pytest.fixture(scope="module")
def server(home: Path, models: tuple[str, ...]) -> Iterator[Served]:
    with serving(home, *models, "--tree-budget", "8") as served:
        served.wait_ready()
        yield served


def test_status_fits_a_screen_of_80_columns(server: Served, home: Path) -> None:
    done = ctl(home, "status")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 23 and max(map(len, lines)) <= 80
    for part in (
        server.url(),
        f"pid {server.process.pid}",
        "ready",
        "mode tree",
        "tree_budget 8",
        "revision",
    ):
        assert part in done.stdout
    found = answer(ctl(home, "status", "--json"))
    assert found["status"]["config"]["tree_budget"] == 8
    assert found["description"]["pid"] == server.process.pid


def test_a_change_is_planned_applied_shown_and_undone(server: Served, home: Path) -> None:
    planned = ctl(home, "plan", "tree_budget=16", "temperature=0.5")
    assert planned.returncode == 0
    assert (
        "tree_budget  8 -> 16  live" in planned.stdout and "temperature  0.0 -> 0.5  live" in planned.stdout
    )
    applied = answer(ctl(home, "apply", "tree_budget=16", "--json"))
    assert applied["report"]["applied"][0]["new"] == 16
    shown = ctl(home, "status").stdout
    assert "tree_budget 16" in shown and "ctl of " in shown and "tree_budget 8 -> 16" in shown
    undone = ctl(home, "undo")
    assert undone.returncode == 0 and "tree_budget 16 -> 8" in undone.stdout
    assert answer(ctl(home, "status", "--json"))["status"]["config"]["tree_budget"] == 8


def test_undo_names_the_later_change_that_forbids_it(server: Served, home: Path) -> None:
    first = answer(ctl(home, "apply", "top_k=5", "--json"))["report"]["revision"]
    answer(ctl(home, "apply", "top_k=7", "--json"))
    line = refusal(ctl(home, "undo", "--revision", str(first)), 3)
    assert "top_k was changed again since" in line and "5 -> 7" in line
    assert "no change led to revision 999" in refusal(ctl(home, "undo", "--revision", "999"), 3)


def test_a_change_for_an_old_revision_is_refused_saying_who_was_first(server: Served, home: Path) -> None:
    old = answer(ctl(home, "status", "--json"))["status"]["revision"]
    answer(ctl(home, "apply", "top_p=0.9", "--json"))
    line = refusal(ctl(home, "apply", "top_p=0.8", "--revision", str(old)), 3)
    assert "ctl of " in line and "top_p 1.0 -> 0.9" in line


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (["apply", "tree_budget=many"], 2, ["tree_budget = many", "from 0 to 1024"]),
        (["apply", "tree_bugdet=8"], 2, ["tree_bugdet", "did you mean tree_budget?"]),
        (["apply", "tree_budget"], 2, ["KEY=VALUE"]),
        (["apply", "top_k=1", "top_k=2"], 2, ["top_k", "twice"]),
        (["apply", "model=/etc/passwd"], 2, ["model", "not set over HTTP"]),
        (["cancel", "none-such"], 3, ["none-such"]),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str], code: int, parts: list[str], server: Served, home: Path
) -> None:
    line = refusal(ctl(home, *arguments), code)
    assert all(part in line for part in parts)


def test_a_change_that_needs_a_rebuild_is_shown_with_its_pause_and_made(server: Served, home: Path) -> None:
    planned = ctl(home, "plan", "max_tree_budget=48")
    assert planned.returncode == 0
    assert (
        "max_tree_budget  64 -> 48  rebuild" in planned.stdout and "expected pause unknown" in planned.stdout
    )
    report = answer(ctl(home, "apply", "max_tree_budget=48", "--json"))["report"]
    assert report["outage_s"] > 0 and report["failure"] is None
    assert ctl(home, "undo").returncode == 0
    assert "max_tree_budget  48 -> 64" not in ctl(home, "plan", "max_tree_budget=64").stdout


def test_a_rebuild_that_cannot_be_is_refused_before_it_begins(server: Served, home: Path) -> None:
    for what in ("plan", "apply"):
        done = ctl(home, what, "device=cuda:97")
        assert done.returncode == 3
        assert "cuda:97" in done.stdout and "cuda:97" in done.stderr


def test_read_only_changes_nothing(server: Served, home: Path) -> None:
    for arguments in (["apply", "top_k=3"], ["undo"], ["cancel", "x"], ["drain"], ["stop"], ["restart"]):
        assert "DDTREE_READ_ONLY" in refusal(ctl(home, *arguments, DDTREE_READ_ONLY="1"), 3)
    assert ctl(home, "status", DDTREE_READ_ONLY="1").returncode == 0


def test_a_running_request_is_listed_and_cancelled(server: Served, home: Path) -> None:
    frames = server.stream(LONG)
    next(frames)
    running = [
        each for each in answer(ctl(home, "requests", "--json"))["results"] if each["state"] != "finished"
    ]
    for request in running:
        assert ctl(home, "cancel", request["request_id"]).returncode == 0
    list(frames)
    table = ctl(home, "requests").stdout.splitlines()
    assert table[0].startswith("ID") and max(map(len, table)) <= 80


def test_watch_shows_what_happens_until_interrupted(server: Served, home: Path) -> None:
    watching = subprocess.Popen(
        [sys.executable, "-m", "console", "ctl", "watch", "--json", "--url", server.url()],
        cwd=ROOT,
        env={**os.environ, "XDG_RUNTIME_DIR": str(home / "run")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout
    kinds = {json.loads(watching.stdout.readline())["kind"]}
    asking = threading.Thread(target=lambda: list(server.stream({**LONG, "max_tokens": 50})))
    asking.start()
    while not {"status", "round", "request", "host"} <= kinds:
        kinds.add(json.loads(watching.stdout.readline())["kind"])
    asking.join()
    watching.send_signal(2)
    assert watching.wait(30) == 130
    watching.stdout.close()


def test_restart_keeps_the_pid_and_serves_again_and_stop_leaves_nothing(
    tmp_path: Path, models: tuple[str, ...]
) -> None:
    with serving(tmp_path, *models, "--port", "0") as served:
        served.wait_ready()
        began = answer(ctl(tmp_path, "status", "--json"))["status"]["started_at_s"]
        assert ctl(tmp_path, "restart", "--url", served.url(), "--no-wait").returncode == 0
        until(
            lambda: (
                (now := ctl(tmp_path, "status", "--json")).returncode == 0
                and answer(now)["status"]["started_at_s"] > began
            ),
            served,
        )
        served.wait_ready()
        drained = ctl(tmp_path, "drain")
        assert drained.returncode == 0 and "draining" in drained.stdout
        assert "draining" in ctl(tmp_path, "status").stdout
        stopped = ctl(tmp_path, "stop")
        assert stopped.returncode == 0, stopped.stderr
        assert served.wait_end(5.0) == 0
        assert not list((tmp_path / "run" / "ddtree").glob("instance-*"))
        assert "no running instance" in refusal(ctl(tmp_path, "status"), 3)


# Which instance


def test_without_an_instance_every_command_says_how_to_name_one(tmp_path: Path) -> None:
    for arguments in (["status"], ["apply", "mode=off"], ["stop"], ["watch"]):
        line = refusal(ctl(tmp_path, *arguments), 3)
        assert "ddtree serve" in line and "--url" in line


def write_instance(folder: Path, pid: int, port: int, birth: int | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"instance-{pid}.json"
    values = {
        "url": f"http://127.0.0.1:{port}",
        "pid": pid,
        "host": os.uname().nodename,
        "started_at_s": float(port),
        "birth": birth_of(pid) if birth is None else birth,
        "key_file": None,
    }
    path.write_text(json.dumps(values))
    path.chmod(0o600)
    return path


def test_several_instances_are_all_named(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "ddtree"
    write_instance(folder, os.getpid(), 8642)
    write_instance(folder, os.getppid(), 8643)
    line = refusal(ctl(tmp_path, "status"), 3)
    assert "http://127.0.0.1:8642" in line and "http://127.0.0.1:8643" in line and str(os.getppid()) in line


def test_files_of_dead_or_reused_pids_and_broken_ones_are_cleaned_away(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    dead = write_instance(tmp_path, ended.pid, 1, birth=5)
    reused = write_instance(tmp_path, os.getppid(), 2, birth=1)
    broken = tmp_path / "instance-3.json"
    broken.write_text("{")
    foreign = tmp_path / "instance-4.json"
    foreign.write_text(json.dumps({**json.loads(dead.read_text()), "host": "another-host"}))
    foreign.chmod(0o600)
    mine = register(tmp_path, "http://127.0.0.1:8642", None)
    assert [each.pid for each in instances(tmp_path)] == [os.getpid()]
    assert the_instance(tmp_path).url == "http://127.0.0.1:8642"
    assert (mine.stat().st_mode & 0o777) == 0o600
    assert not dead.exists() and not reused.exists() and not broken.exists() and foreign.exists()


def test_a_file_that_others_may_write_is_not_trusted(tmp_path: Path) -> None:
    write_instance(tmp_path, os.getpid(), 8642).chmod(0o666)
    with pytest.raises(InstanceUnclear):
        the_instance(tmp_path)


def test_an_instance_is_known_by_every_name_of_this_machine() -> None:
    instance = Instance("http://127.0.0.1:8642", 1, "h", 0.0, None)
    assert instance.serves("http://localhost:8642") and instance.serves("http://[::1]:8642/")
    assert not instance.serves("http://127.0.0.1:8643") and not instance.serves("http://gpu01:8642")


# What watch prints


def a_round(at_s: float, emitted: int, **changes: Any) -> RoundStats:
    fields: dict[str, Any] = {
        "index": 1,
        "time_s": at_s,
        "mode": "tree",
        "tree_budget": 8,
        "batch": 2,
        "nodes": 18,
        "emitted": emitted,
        "accept_lengths": (emitted - 1, 1),
        "draft_depths": (7, 7),
        "stage_s": None,
        "slots_used": 1,
        "slots_total": 9,
    }
    return RoundStats(**(fields | changes))


def test_watch_adds_rounds_up_to_a_line_a_second_and_calls_no_pause_decoding() -> None:
    meter = RoundMeter()
    assert [meter.add(a_round(at_s, 6)) for at_s in (100.0, 100.4, 100.8)] == [None, None, None]
    line = meter.add(a_round(101.2, 3))
    assert line is not None and line.endswith(" tree 8: 12.5 tok/s, accept length 2.50, batch 2")
    line = meter.add(a_round(200.0, 4, mode="chain", tree_budget=0, batch=1, mixed=True))
    assert line is not None and line.endswith(" chain and others: n/a tok/s, accept length 2.00, batch 1")
    line = meter.add(a_round(201.0, 4, auto=True))
    assert line is not None and " auto, tree 8: 4.0 tok/s" in line


def test_watch_names_what_happens_without_the_control_characters_of_others() -> None:
    job = Job(
        id="b1", name="bench", holder="x", state="running", progress=0.5, text="a\x1b[2Jb", started_at_s=0
    )
    lines = [
        watch_line(StatusChanged(state=EngineState.FAILED, reason="no memory", revision=3)),
        watch_line(LogLine(time_s=0.0, level="WARNING", text="x" * 200)),
        watch_line(JobProgress(job=job)),
    ]
    assert lines[0] is not None and lines[0].endswith(" failed: no memory (revision 3)")
    assert lines[1] is not None and len(lines[1]) == 80
    assert lines[2] is not None and " job b1 running 50%: a" in lines[2] and "\x1b" not in lines[2]
    assert watch_line(a_round(1.0, 2)) is None
