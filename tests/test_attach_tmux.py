"""Real consoles in real terminals: one that serves and outlives its screen, and ones attached to a server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from served import ROOT, Served, serving, until
from test_console_tmux import needs_tmux
from test_ctl import ctl
from tmux_window import Tmux

from runtime.instance import birth_of, instances

pytestmark = needs_tmux
LONG = {"prompt": "abc", "max_tokens": 1500, "ignore_eos": True, "temperature": 0, "ddtree": {"mode": "off"}}


@pytest.fixture
def tmux(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Tmux]:
    terminal = Tmux(f"ddtree-{os.getpid()}-{abs(hash(request.node.name))}", tmp_path)
    terminal.run("new-session", "-d", "-s", "other", "-x", "80", "-y", "24", "env PS1='$ ' sh")
    yield terminal
    terminal.end()
    for detached in instances(tmp_path / "run" / "ddtree"):  # is in no terminal any more
        with contextlib.suppress(ProcessLookupError):
            os.kill(detached.pid, signal.SIGKILL)


@pytest.fixture
def models(tiny_folder: Path) -> tuple[str, ...]:
    return ("--model", str(tiny_folder / "target"), "--drafter", str(tiny_folder / "drafter"))


def program(home: Path, *arguments: str) -> str:
    """The command line of a console of the user whose folders stand under `home`."""
    (home / "run").mkdir(exist_ok=True)
    variables = [
        f"XDG_{name}={home / folder}" for name, folder in (("RUNTIME_DIR", "run"), ("STATE_HOME", "state"))
    ]
    return " ".join(
        ["env", f"PYTHONPATH={ROOT}", *variables, sys.executable, "-m", "console", "console", *arguments]
    )


class Listening:
    """A console that serves: what its instance file says, and clients of it."""

    def __init__(self, home: Path) -> None:
        self._folder = home / "run" / "ddtree"
        until(lambda: list(self._folder.glob("instance-*.json")))
        (self.file,) = self._folder.glob("instance-*.json")
        found = json.loads(self.file.read_text())
        self.url, self.pid = found["url"], found["pid"]
        until(lambda: httpx.get(f"{self.url}/ready").status_code == 200)

    def text(self) -> str:
        body = {**LONG, "stream": False}
        return str(
            httpx.post(f"{self.url}/v1/completions", json=body, timeout=120).json()["choices"][0]["text"]
        )

    @property
    def gone(self) -> bool:
        return birth_of(self.pid) is None


class Streaming(threading.Thread):
    """A client that streams one long text."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self.texts: list[str] = []
        self.reason: str | None = None
        self.begun = threading.Event()

    def run(self) -> None:
        with httpx.stream(
            "POST", f"{self._url}/v1/completions", json={**LONG, "stream": True}, timeout=120
        ) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    self.texts.append(choice["text"])
                    self.reason = choice["finish_reason"] or self.reason
                    self.begun.set()

    def start_and_wait(self) -> None:
        self.start()
        assert self.begun.wait(60)


@pytest.mark.case("C1")
def test_a_listening_console_outlives_its_terminal(
    tmux: Tmux, tmp_path: Path, models: tuple[str, ...]
) -> None:
    tmux.start(program(tmp_path, "--listen", "127.0.0.1:0", "--threads", "1", *models))
    server = Listening(tmp_path)
    tmux.until("[1 Live]", "serves 127.0.0.1:", "ready")
    undisturbed = server.text()
    stream = Streaming(server.url)
    stream.start_and_wait()
    tmux.run("kill-session", "-t", "w")
    assert stream.is_alive(), "the text was complete before the terminal was killed"
    stream.join(120)
    assert ("".join(stream.texts), stream.reason) == (undisturbed, "length")
    assert not server.gone
    tmux.run("rename-session", "-t", "other", "w")
    tmux.start(program(tmp_path, "--attach", server.url))
    tmux.until("[1 Live]", f"attached to {os.uname().nodename[:20]}", "ready")
    assert ctl(tmp_path, "stop").returncode == 0
    assert server.gone and not server.file.exists()
    tmux.until("lost since")
    tmux.keys("q")
    assert "exit=0" in tmux.ended()


def test_on_hangup_stop_finishes_what_runs_and_ends(
    tmux: Tmux, tmp_path: Path, models: tuple[str, ...]
) -> None:
    options = ("--listen", "127.0.0.1:0", "--on-hangup", "stop", "--threads", "1")
    tmux.start(program(tmp_path, *options, *models))
    server = Listening(tmp_path)
    stream = Streaming(server.url)
    stream.start_and_wait()
    tmux.run("kill-session", "-t", "w")
    stream.join(120)
    assert stream.reason == "length"
    until(lambda: server.gone, seconds=20)
    assert not server.file.exists()


def test_q_detaches_or_stops_or_stays(tmux: Tmux, tmp_path: Path, models: tuple[str, ...]) -> None:
    command = program(tmp_path, "--listen", "127.0.0.1:0", "--threads", "1", *models)
    tmux.start(command)
    server = Listening(tmp_path)
    tmux.until("[1 Live]", "ready")
    tmux.keys("q")
    tmux.until("Leave the screen?", "Stay (Esc)", "Detach (d)", "Stop (s)")
    tmux.keys("Enter")
    tmux.until("[1 Live]", "ready", without="Leave the screen?")
    tmux.keys("q")
    tmux.until("Leave the screen?")
    tmux.keys("d")
    screen = tmux.until("goes on serving", "ddtree ctl stop")
    assert f"pid {server.pid}" in screen and f"ddtree console --attach {server.url}" in screen
    assert server.text()
    assert ctl(tmp_path, "restart").returncode != 0
    assert ctl(tmp_path, "stop").returncode == 0
    assert "exit=0" in tmux.ended()
    tmux.clear()
    tmux.start(command)
    server = Listening(tmp_path)
    tmux.until("[1 Live]", "ready")
    stream = Streaming(server.url)
    stream.start_and_wait()
    tmux.keys("q")
    tmux.until("Leave the screen?")
    tmux.keys("s")
    assert "exit=0" in tmux.ended()
    stream.join(60)
    assert stream.reason == "length" and server.gone and not server.file.exists()


def test_ctl_stop_ends_a_listening_console_with_its_screen(
    tmux: Tmux, tmp_path: Path, models: tuple[str, ...]
) -> None:
    tmux.start(program(tmp_path, "--listen", "127.0.0.1:0", "--threads", "1", *models))
    server = Listening(tmp_path)
    tmux.until("[1 Live]", "ready")
    assert ctl(tmp_path, "stop").returncode == 0
    assert server.gone
    assert "exit=0" in tmux.ended()


def test_an_address_in_use_is_said_before_the_screen_opens(
    tmux: Tmux, tmp_path: Path, models: tuple[str, ...]
) -> None:
    with serving(tmp_path, *models) as served:
        port = served.url().rpartition(":")[2]
        tmux.start(program(tmp_path, "--listen", f"127.0.0.1:{port}"))
        screen = tmux.ended().replace("\n", "")
        assert "exit=1" in screen and f"port {port}" in screen and "in use" in screen
        tmux.clear()
        tmux.start(program(tmp_path, "--listen", "0.0.0.0:0"))
        screen = tmux.ended().replace("\n", "")
        assert "exit=3" in screen and "DDTREE_API_KEY" in screen


@pytest.fixture
def server(tmp_path: Path, models: tuple[str, ...]) -> Iterator[Served]:
    with serving(tmp_path, *models, "--tree-budget", "8") as served:
        served.wait_ready()
        yield served


def test_an_attached_console_shows_and_steers_the_server(tmux: Tmux, tmp_path: Path, server: Served) -> None:
    tmux.start(program(tmp_path, "--attach", server.url()))
    tmux.until("[1 Live]", "attached to ", "ready", "budget 8", "(of the server)")
    tmux.keys("]")
    tmux.until("tree_budget 8 -> 11", "budget 11")
    assert "console " in ctl(tmp_path, "status").stdout
    assert ctl(tmp_path, "apply", "mode=chain").returncode == 0
    tmux.until("mode chain", "ctl of ", "set mode tree -> chain")
    tmux.keys("i", "abc", "Enter")
    tmux.until("[3 Prompt]", "> abc", "accept ", " rounds")
    os.kill(tmux.process(), signal.SIGKILL)
    tmux.until("exit=137")
    assert server.process.poll() is None
    assert ctl(tmp_path, "status").returncode == 0
    until(lambda: json.loads(ctl(tmp_path, "status", "--json").stdout)["status"]["running"] == 0)


def test_an_attached_console_that_quits_leaves_the_server_alone(
    tmux: Tmux, tmp_path: Path, server: Served
) -> None:
    stream = Streaming(server.url())
    tmux.start(program(tmp_path, "--attach", server.url()))
    tmux.until("[1 Live]", "attached to ", "ready")
    stream.start_and_wait()
    tmux.keys("q")
    assert "exit=0" in tmux.ended(), "others' requests are no reason to ask"
    stream.join(120)
    assert stream.reason == "length" and server.process.poll() is None


def test_a_console_attaches_again_when_a_killed_server_is_back(
    tmux: Tmux, tmp_path: Path, models: tuple[str, ...]
) -> None:
    with serving(tmp_path, *models, "--tree-budget", "8") as first:
        first.wait_ready()
        url = first.url()
        tmux.start(program(tmp_path, "--attach", url))
        tmux.until("[1 Live]", "attached to ", "ready", "budget 8")
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        tmux.until("lost since ")
    with serving(tmp_path, *models, "--tree-budget", "16", "--port", url.rpartition(":")[2]) as second:
        second.wait_ready()
        screen = tmux.until("attached to ", "ready", "budget 16")
        assert "lost since " not in screen.splitlines()[0]
        tmux.keys("q")
        assert "exit=0" in tmux.ended()


def test_attaching_without_a_key_or_to_nothing_is_one_line(tmux: Tmux, tmp_path: Path) -> None:
    tmux.start(program(tmp_path, "--attach", "http://127.0.0.1:9"))
    screen = tmux.ended().replace("\n", "")
    assert "exit=3" in screen and "DDTREE_OPERATOR_KEY" in screen
    tmux.clear()
    tmux.start(program(tmp_path, "--attach", "127.0.0.1"))
    assert "DDTREE_OPERATOR_KEY" in tmux.ended().replace("\n", "")
