"""The command line as a person or a script meets it: real processes, their exit codes and both their outputs."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).parent.parent
COMMANDS = (
    "console",
    "generate",
    "bench",
    "verify",
    "ctl",
    "layouts",
    "serve",
    "service",
    "model",
    "doctor",
    "engine",
    "tune",
    "report",
    "snapshot",
    "train-drafter",
)


def ddtree(
    *arguments: str,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.PIPE,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "console", *arguments],
        cwd=ROOT,
        env=os.environ | variables,
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        timeout=120,
    )


def refused_with(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line on stderr of a command that was to fail, after checking that it is one and stdout is empty."""
    assert done.returncode == code, done.stderr
    assert not done.stdout
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("ddtree: ")
    return lines[0]


def test_help_lists_every_command_and_what_it_does() -> None:
    done = ddtree("--help")
    assert done.returncode == 0
    assert not done.stderr
    listed = {line.split()[0] for line in done.stdout.split("Commands:")[1].splitlines() if line.strip()}
    assert listed == {*COMMANDS, "config"}
    assert ddtree("-h").stdout == done.stdout


@pytest.mark.parametrize("command", [*COMMANDS, "config show"])
def test_each_command_has_help(command: str) -> None:
    done = ddtree(*command.split(), "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: ddtree {command}")


def test_version() -> None:
    assert ddtree("--version").stdout.startswith("ddtree ")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["genrate", "x"], ["genrate", "Did you mean 'generate'?", "ddtree --help"]),
        (["modle"], ["modle", "Did you mean 'model'"]),
        (["generate"], ["PROMPT", "ddtree generate --help"]),
        (["generate", "x", "--tree-bugdet", "8"], ["--tree-bugdet", "--tree-budget"]),
        (["generate", "x", "--tree-budget", "5000"], ["tree_budget = 5000 (command line)", "from 0 to 1024"]),
        (["generate", "x", "--tree-budget", "many"], ["tree_budget = many (command line)", "from 0 to 1024"]),
        (["generate", "x", "--temperature", "9"], ["temperature = 9 (command line)", "from 0 to 2"]),
        (["generate", "x", "--mode", "trees"], ["mode = trees (command line)", "off, chain, tree"]),
        (["generate", "x", "--seed", "-1"], ["seed = -1", "at least 0"]),
        (["generate", "x", "--min-p", "2"], ["min_p = 2", "from 0 to 1"]),
        (["generate", "x", *["--stop", "a"] * 5], ["stop = ", "at most 4"]),
        (["generate", "x", "--logprobs", "2"], ["--logprobs", "--json"]),
        (["bench", "--mode", "off,of"], ["--mode", "'of'", "off, chain, tree"]),
        (["bench", "--tree-budget", "0,x"], ["--tree-budget", "'0,x'"]),
        (["bench", "--tree-budget", "0,5000"], ["tree_budget = 5000", "from 0 to 1024"]),
        (["bench", "--concurrency", "0"], ["concurrency", "0"]),
        (["verify", "--temperature", "0,3"], ["temperature = 3", "from 0 to 2"]),
        (["config", "show", "--config", "/absent.toml"], ["/absent.toml", "does not exist"]),
        (["config", "show", "--block-size", "0"], ["block_size = 0 (command line)", "at least 1"]),
        (["config"], ["Missing command", "ddtree config --help"]),
    ],
)
def test_wrong_usage_is_one_line_that_names_it(arguments: list[str], parts: list[str]) -> None:
    line = refused_with(ddtree(*arguments), 2)
    for part in parts:
        assert part in line


def test_a_wrong_variable_or_file_is_refused_by_every_command(tmp_path: Path) -> None:
    assert "env DDTREE_MODE" in refused_with(ddtree("generate", "x", DDTREE_MODE="fast"), 2)
    file = tmp_path / "config.toml"
    file.write_text("mode = 'off'\ntree_bugdet = 8\n")
    line = refused_with(ddtree("console", DDTREE_CONFIG=str(file)), 2)
    assert f"tree_bugdet (file {file}, line 2)" in line
    assert "did you mean tree_budget?" in line


def test_a_prompt_that_is_not_text_is_refused() -> None:
    with subprocess.Popen(["printf", r"caf\351"], stdout=subprocess.PIPE) as latin_1:
        assert latin_1.stdout
        line = refused_with(ddtree("generate", "-", stdin=latin_1.stdout), 2)
    assert "stdin is not UTF-8 (byte 3)" in line


def test_config_show_says_where_each_value_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("top_k = 5\n")
    arguments = ["config", "show", "--origin", "--config", str(file), "--tree-budget", "8"]
    done = ddtree(*arguments, "--json", DDTREE_MODE="chain", DDTREE_THREDS="1", DDTREE_API_KEY="hush")
    answer = json.loads(done.stdout)
    assert answer["schema"] == 1
    found = {
        name: (answer["config"][name], answer["origins"][name]) for name in ("top_k", "mode", "tree_budget")
    }
    assert found == {
        "top_k": (5, f"file {file}:top_k"),
        "mode": ("chain", "env DDTREE_MODE"),
        "tree_budget": (8, "command line"),
    }
    assert answer["origins"]["model"] == "default"
    assert answer["config"]["threads"] is None
    assert "DDTREE_THREDS" in done.stderr
    assert "did you mean DDTREE_THREADS?" in done.stderr
    assert "hush" not in done.stdout + done.stderr


def test_what_config_show_prints_is_a_configuration_file(tmp_path: Path) -> None:
    shown = ddtree("config", "show", "--origin", "--mode", "chain", "--threads", "2").stdout
    file = tmp_path / "again.toml"
    file.write_text(shown)
    again = json.loads(ddtree("config", "show", "--json", "--config", str(file)).stdout)
    assert again == json.loads(ddtree("config", "show", "--json", "--mode", "chain", "--threads", "2").stdout)


@pytest.mark.case("C1")
@pytest.mark.parametrize("arguments", [[], ["console"], ["console", "--read-only"]])
def test_no_terminal_names_what_works_without_one(arguments: list[str]) -> None:
    line = refused_with(ddtree(*arguments, TERM="xterm-256color"), 3)
    assert "ddtree generate" in line
    assert "\x1b" not in line


@pytest.mark.case("C1")
def test_a_dumb_terminal_or_a_piped_screen_is_refused_without_escape_codes() -> None:
    for variables, stdout in (({"TERM": "dumb"}, None), ({"TERM": "xterm"}, subprocess.PIPE)):
        code, screen, piped = on_a_terminal(["console"], variables, stdout)
        assert code == 3
        assert screen.count("\n") == 1
        assert "ddtree generate" in screen
        assert "\x1b" not in screen + piped


@pytest.mark.case("C6")
def test_help_on_a_terminal_obeys_no_color() -> None:
    code, screen, _ = on_a_terminal(["generate", "--help"], {"TERM": "xterm-256color", "NO_COLOR": "1"}, None)
    assert code == 0
    assert "Usage: ddtree generate" in screen
    assert "\x1b" not in screen


def on_a_terminal(
    arguments: list[str], variables: dict[str, str], stdout: int | None
) -> tuple[int, str, str]:
    """(exit code, what the terminal showed, what went to `stdout` if that is a pipe)."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "console", *arguments],
        cwd=ROOT,
        env=os.environ | variables,
        stdin=theirs,
        stdout=theirs if stdout is None else stdout,
        stderr=theirs,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        deadline = threading.Timer(60, process.kill)
        deadline.start()
        screen = b""
        while chunk := _read(ours):
            screen += chunk
        piped = process.stdout.read() if process.stdout else b""
        deadline.cancel()
    os.close(ours)
    return process.returncode, screen.decode().replace("\r\n", "\n"), piped.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""  # how Linux says that the other side has closed


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        done = ddtree("config", "show", stdout=full)
    assert done.returncode == 1
    assert done.stderr == "ddtree: No space left on device\n"


def test_a_reader_that_goes_away_ends_the_command_quietly() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "wb") as closed:
        done = ddtree("config", "show", stdout=closed)
    assert done.stderr == ""


def test_a_model_that_is_not_there_is_one_line() -> None:
    line = refused_with(ddtree("generate", "x", "--model", "/absent/model"), 2)
    assert "/absent/model" in line


def test_the_debug_variable_shows_where_an_error_came_from() -> None:
    done = ddtree("config", "show", "--top-k", "-1", DDTREE_DEBUG="1")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("ddtree: top_k = -1")


PLAIN = ["--mode", "off", "--temperature", "0", "--threads", "1"]
"""Two threads would wait for each other where other tests run beside them."""


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options for a tiny model that goes on for as long as it may."""
    from tiny_models import write_target

    folder = tmp_path_factory.mktemp("endless") / "target"
    target = write_target(folder, eos_token_id=None, max_position_embeddings=32768)
    (target / "generation_config.json").write_text("{}")
    return ["--model", str(target), "--drafter", "none", "--max-seq-len", "32768"]


def interruptible(*arguments: str) -> subprocess.Popen[str]:
    """A command that Ctrl-C reaches even where the tests themselves run in the background, with it ignored."""
    return subprocess.Popen(
        [sys.executable, "-m", "console", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.usefixtures("default_checkpoint")
def test_generate_streams_the_text_that_its_json_holds() -> None:
    with subprocess.Popen(["echo", "Name three colours."], stdout=subprocess.PIPE) as prompt:
        assert prompt.stdout
        answer = ddtree(
            "generate", "-", *PLAIN, "--max-tokens", "8", "--json", "--seed", "5", stdin=prompt.stdout
        )
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert len(found["token_ids"]) == found["output_tokens"] == 8
    assert (found["schema"], found["seed"], found["mode"], found["tree_budget"]) == (1, 5, "off", 0)
    assert (found["finish_reason"], found["rounds"], found["accept_length"]) == ("length", 7, 1.0)
    assert found["prompt_tokens"] > 8
    assert found["tok_s"] > 0
    streamed = ddtree("generate", "Name three colours.", *PLAIN, "--max-tokens", "8")
    assert streamed.stdout == found["text"] + "\n"
    assert streamed.stderr == ""


def test_ctrl_c_keeps_the_text_so_far(endless: list[str]) -> None:
    with interruptible("generate", "A story.", *PLAIN, *endless, "--max-tokens", "32000") as process:
        assert process.stdout
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (first + rest).strip()
    assert rest.endswith("\n")
    assert errors == ""


@pytest.mark.usefixtures("default_checkpoint")
def test_ctrl_c_while_the_model_loads_ends_quietly() -> None:
    with interruptible("generate", "x", *PLAIN) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        while process.poll() is None and "libtorch" not in maps.read_text():
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        text, errors = process.communicate(timeout=60)
    assert (process.returncode, text, errors) == (130, "", "")


def test_a_reader_that_has_seen_enough_ends_the_answer_quietly(endless: list[str]) -> None:
    with interruptible("generate", "A story.", *PLAIN, *endless, "--max-tokens", "32000") as process:
        assert process.stdout and process.stderr
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""
        process.wait(timeout=60)


def test_bench_shows_a_table_and_ends_in_one_json_line(endless: list[str]) -> None:
    quick = ["--repetitions", "1", "--max-tokens", "2", "--prompts-per-kind", "1", "--threads", "1"]
    done = ddtree("bench", "--mode", "off", *endless, *quick)
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    assert "tok/s" in table[0]
    [result] = json.loads(last)["results"]
    assert (result["mode"], result["accept_length"], result["speed_up"]) == ("off", 1.0, 1.0)
