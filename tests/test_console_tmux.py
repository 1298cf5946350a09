"""The real program in a real terminal: keys in, screen out, the terminal given back as it was."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tmux_window import GIVE_UP_S, Tmux

HERE = Path(__file__).parent
MODEL_GIVE_UP_S = 600.0

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


@pytest.fixture
def tmux(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Tmux]:
    terminal = Tmux(f"ddtree-{os.getpid()}-{abs(hash(request.node.name))}", tmp_path)
    yield terminal
    terminal.end()


def fake(*what: str) -> str:
    """The command line of the console over a scripted runtime."""
    return " ".join(
        ["env", f"PYTHONPATH={HERE.parent}", sys.executable, str(HERE / "fake_console.py"), *what]
    )


@needs_tmux
def test_prompt_flips_and_quit_from_the_keyboard(tmux: Tmux):
    tmux.start(fake())
    tmux.until("[1 Live]", "ready", "T 0")
    tmux.keys("i")
    tmux.until("[3 Prompt]")
    tmux.keys("-l", "what is [a] fox? q13")
    tmux.until("what is [a] fox? q13")
    tmux.keys("Enter")
    tmux.until("> what is [a] fox? q13", "quick brown")
    tmux.keys("]")
    tmux.until("tree_budget 11 -> 16", "budget 16")
    tmux.keys("m", "m")
    tmux.until("mode off")
    tmux.keys("t")
    tmux.until("temperature, 0 to 2")
    tmux.keys("0.7", "Enter")
    tmux.until("T 0.7", "1 running keep theirs")
    tmux.keys("1")
    tmux.until("[1 Live]", "before, with")
    screen = tmux.quit()
    assert "exit=0" in screen and "Traceback" not in screen


@needs_tmux
@pytest.mark.case("C6")
def test_output_of_libraries_lands_in_the_log_and_on_no_other_screen(tmux: Tmux):
    tmux.start(fake("noise"))
    lines = (
        "native library on fd 1",
        "native library on fd 2",
        "child on stdout",
        "child on stderr",
        "printed by a module",
    )
    tmux.run("resize-window", "-t", "w", "-x", "100", "-y", "44")
    tmux.until("[1 Live]")
    tmux.keys("8")
    screen = tmux.until("[8 Log]", *lines)
    for line in lines:
        (row,) = [row for row in screen.splitlines() if line in row]
        assert row.strip().endswith(line) and row.strip()[2] == ":"
    assert screen.splitlines()[0].strip().startswith("smollm2-135m-instruct")
    assert "native library" not in tmux.quit()


@needs_tmux
@pytest.mark.case("C3")
@pytest.mark.parametrize(("signal", "code"), [("TERM", 0), ("HUP", 0), ("INT", 130)])
@pytest.mark.parametrize("what", ["loading", "streaming"])
def test_signals_end_the_console_and_restore_the_terminal(tmux: Tmux, signal: str, code: int, what: str):
    tmux.start(fake(what))
    tmux.until("[1 Live]", "loading 40 %" if what == "loading" else "ready")
    tmux.keys("i", "hello", "Enter")
    tmux.until("queued" if what == "loading" else "quick brown")
    subprocess.run(["kill", f"-{signal}", str(tmux.process())], check=True)
    screen = tmux.ended()
    assert f"exit={code}" in screen and "Traceback" not in screen


@needs_tmux
@pytest.mark.case("C3")
def test_an_engine_that_does_not_stop_is_not_waited_for(tmux: Tmux):
    tmux.start(fake("stuck"))
    tmux.until("[1 Live]", "ready")
    assert "exit=0" in tmux.quit()


@needs_tmux
def test_a_crash_is_one_line_and_leaves_the_terminal_sane(tmux: Tmux):
    tmux.start(fake("crash"))
    tmux.until("[1 Live]", "ready")
    tmux.keys("u")
    screen = tmux.ended()
    assert "exit=1" in screen and "Traceback" not in screen
    assert "ddtree: the console failed: RuntimeError: a handler broke" in screen


@needs_tmux
@pytest.mark.case("C3")
def test_stray_mouse_bytes_are_ignored(tmux: Tmux):
    tmux.start(fake())
    tmux.until("[1 Live]", "ready")
    for stray in ("1b 5b 3c 30 3b 31", "1b 5b 3c 39 39 39 39 39 3b 30 4d", "1b 5b 3c", "ff fe 80"):
        tmux.run("send-keys", "-t", "w", "-H", *stray.split())
        time.sleep(0.2)
    time.sleep(0.5)
    assert "budget 11" in tmux.screen()
    tmux.keys("3")
    tmux.until("[3 Prompt]")
    assert "exit=0" in tmux.quit()


@needs_tmux
@pytest.mark.case("C5")
def test_resizing_to_nothing_and_back_while_text_streams(tmux: Tmux):
    tmux.start(fake())
    tmux.until("[1 Live]", "ready")
    tmux.keys("i", "hello", "Enter")
    tmux.until("quick brown")
    for columns, rows in ((10, 3), (1, 1), (40, 10), (80, 24)):
        tmux.run("resize-window", "-t", "w", "-x", str(columns), "-y", str(rows))
        time.sleep(0.3)
    tmux.until("[3 Prompt]", "quick brown", "ready")
    tmux.quit()


@needs_tmux
@pytest.mark.case("C6")
def test_no_color_sends_no_colours(tmux: Tmux):
    tmux.start("NO_COLOR=1 " + fake())
    tmux.until("[1 Live]", "ready")
    tmux.keys("i", "hello", "Enter")
    tmux.until("quick brown")
    coloured = tmux.run("capture-pane", "-t", "w", "-p", "-e")
    codes = {code for part in coloured.split("\x1b[")[1:] for code in part.partition("m")[0].split(";")}
    assert not codes & {
        str(code) for code in (*range(30, 39), *range(40, 49), *range(90, 98), *range(100, 108))
    }
    assert "4" in codes, "bonus tokens are underlined"
    tmux.quit()


@pytest.mark.case("C1")
def test_a_terminal_that_hangs_up_without_a_signal_ends_the_console():
    master, slave = pty.openpty()
    program = subprocess.Popen(
        fake().split(),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(slave)
    seen, end = b"", time.monotonic() + GIVE_UP_S
    while b"ready" not in seen and time.monotonic() < end:
        if select.select([master], [], [], 0.2)[0]:
            seen += os.read(master, 65536)
    os.close(master)
    try:
        assert program.wait(timeout=GIVE_UP_S) == 0
    finally:
        program.kill()


@needs_tmux
def test_prompt_flips_verify_and_quit_over_the_default_model(tmux: Tmux, default_checkpoint: object):
    tmux.start(f"cd {HERE.parent} && {sys.executable} -m console console --threads 1")
    tmux.until("[1 Live]", "loading")
    tmux.keys("i")
    tmux.until("[3 Prompt]")
    tmux.keys("-l", "What is the capital of France?")
    tmux.keys("Enter")
    tmux.until("queued")
    tmux.until("Paris", limit_s=MODEL_GIVE_UP_S)
    tmux.keys("t")
    tmux.until("temperature, 0 to 2")
    tmux.keys("0.7", "Enter")
    tmux.until("T 0.7")
    tmux.keys("]")
    tmux.until("tree_budget")
    tmux.keys("1")
    tmux.until("[1 Live]", "0 running", limit_s=MODEL_GIVE_UP_S)
    tmux.keys(":")
    tmux.keys("-l", "verify")
    tmux.until("speculation changes no token")
    tmux.keys("Enter")
    tmux.until("verify: started")
    tmux.keys("7")
    tmux.until("[7 Bench]", "no divergence: 12 of 12 texts", limit_s=MODEL_GIVE_UP_S)
    assert "exit=0" in tmux.quit()


@needs_tmux
def test_the_default_model_changes_its_layout_by_key_while_text_streams(
    tmux: Tmux, default_checkpoint: object
):
    options = "--threads 1 --mode off --max-tokens 4000"
    tmux.start(f"cd {HERE.parent} && {sys.executable} -m console console {options}")
    tmux.until("[1 Live]", "loading")
    flips = (("Down",), "single -> tp2"), (("Down",) * 3, "tp2 -> pp2"), (("Up",) * 4, "pp2 -> single")
    for moves, what in flips:
        tmux.keys("i")
        tmux.until("[3 Prompt]")
        tmux.keys("-l", "Write the numbers from 1 to 1000, separated by commas.")
        tmux.keys("Enter")
        tmux.until("1, 2, 3, 4", "rounds", limit_s=MODEL_GIVE_UP_S)
        tmux.keys("p")
        tmux.until("one process on one device", "* runs now")
        tmux.keys(*moves, "Enter")
        tmux.until("Change the layout to", "expected outage", limit_s=MODEL_GIVE_UP_S)
        tmux.keys("y")
        tmux.until(f"layout {what}; ", "1 request carried over", limit_s=MODEL_GIVE_UP_S)
        tmux.keys("x")
        tmux.until("cancelled", limit_s=MODEL_GIVE_UP_S)
        tmux.keys("n")
        tmux.until("Forget this conversation?")
        tmux.keys("y")
    assert "exit=0" in tmux.quit()
