"""`ddtree snapshot` as an operator types it: against a real server, and with none running."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_models
from api_server import CONTEXT, ApiServer
from git_stores import git, repository, snapshot

from console.cli import main
from runtime.config import to_toml
from snapshots.store import Store

ROOT = Path(__file__).parent.parent
Run = Callable[..., tuple[int, str, str]]
OBJECTS = "snapshots"


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[ApiServer]:
    config = tiny_models.tiny_config(
        tiny_folder / "target", tiny_folder / "drafter", max_seq_len=CONTEXT, mode="tree", tree_budget=8
    )
    with ApiServer(config) as running:
        yield running


@pytest.fixture
def ddtree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs `ddtree snapshot` in this process: exit code, stdout, stderr."""
    for name in ("XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("DDTREE_OPERATOR_KEY", "operator-key")

    def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main(["snapshot", *arguments])
        return code, *capfd.readouterr()

    return run


def answer(done: tuple[int, str, str]) -> dict[str, Any]:
    code, out, err = done
    assert code == 0, err
    parsed = json.loads(out.splitlines()[-1])
    assert parsed["schema"] == 1
    return parsed


def refusal(done: tuple[int, str, str], code: int) -> str:
    assert done[0] == code, done
    (line,) = done[2].splitlines()
    assert line.startswith("ddtree: ")
    return line


def text_of(server: ApiServer) -> str:
    body = {"prompt": "a fixed prompt", "max_tokens": 24, "temperature": 0}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()["choices"][0]["text"]


def test_save_flip_save_diff_and_roll_back(ddtree: Run, server: ApiServer) -> None:
    told = text_of(server)
    at = ("--url", server.url)
    good = answer(ddtree("save", "--label", "good", "--note", "#1 best", "--measure", *at, "--json"))[
        "snapshot"
    ]
    assert (good["mode"], good["tree_budget"], good["figure_source"]) == ("tree", 8, "bench")
    assert good["tok_s"] > 0 and good["accept_length"] >= 1 and good["note"] == "#1 best"
    config = server.status().config
    assert main(["ctl", "apply", "tree_budget=1", "top_k=5", *at]) == 0
    answer(ddtree("save", "--label", "worse", *at, "--json"))
    assert "--yes" in refusal(ddtree("rollback", "good", *at), 3)
    shown = answer(ddtree("diff", "good", "worse", "--json"))
    assert {each["name"] for each in shown["settings"]} == {"tree_budget", "top_k"}
    assert any(row["before"]["source"] == "bench" for row in shown["results"] if row["before"])
    looked = answer(ddtree("rollback", "good", "--dry-run", *at, "--json"))
    assert looked["change"] == {"tree_budget": 8, "top_k": 0} and looked["same_hardware"]
    assert server.status().config["top_k"] == 5
    done = answer(ddtree("rollback", "good", "--yes", *at, "--json"))
    assert server.status().config == config and text_of(server) == told
    assert done["commit"]["source"] == good["commit"] and done["figure"]["tok_s"] > 0
    then, now = good["tok_s"], done["figure"]["tok_s"]
    assert done["back"] == (now >= 0.9 * then) and ("not back" in done["verdict"]) == (not done["back"])
    rows = answer(ddtree("list", "--json"))[OBJECTS]
    labels = ["rollback to good", "before rollback to good", "worse", "good"]
    assert [row["label"] for row in rows] == labels and rows[1]["id"] in done["kept"]
    code, out, _ = ddtree("list")
    assert (
        code == 0 and "[rollback]" in out and "[auto]" in out and max(map(len, out.splitlines()[1:2])) <= 80
    )
    live = answer(ddtree("show", "good", "--json"))["snapshot"]["measurements"]
    assert {row["source"] for row in live["results"]} >= {"live", "bench"}


def test_with_nothing_running(ddtree: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = ddtree("save", "--label", "to try", "--note-file", "-", stdin=b"#1\r\n\xc3\xbc  ")
    assert code == 0 and "to try" in out, err
    saved = answer(ddtree("show", "latest", "--json"))["snapshot"]
    assert saved["note"] == "#1\r\nü  " and saved["measured"] == "not running, not measured"
    assert saved["tok_s"] is None and saved["config"]["mode"] == "tree"
    config = tmp_path / "config.toml"
    assert main(["snapshot", "show", "to try", "--file", "config.toml"]) == 0
    assert ddtree("list", "nothing like it")[1].splitlines()[-1] == "no snapshot here"
    store = tmp_path / "XDG_DATA_HOME" / "ddtree" / "snapshots"
    config.write_text(git(store, "show", "HEAD:config.toml"))
    assert answer(ddtree("save", "--config", str(config), "--json"))["snapshot"]["mode"] == "tree"
    assert "nothing can be measured" in refusal(ddtree("save", "--measure"), 3)
    done = answer(ddtree("rollback", "to try", "--yes", "--json"))
    assert done["applied"].startswith("no runtime is running") and done["back"] is None
    assert answer(ddtree("tag", "to try", "gold", "--json"))["snapshot"]["tags"] == ["gold"]
    assert answer(ddtree("note", "gold", "--json", "--", "-later"))["snapshot"]["annotation"] == "-later"
    monkeypatch.setenv("DDTREE_READ_ONLY", "1")
    for command in (("save",), ("rollback", "gold"), ("tag", "gold", "x"), ("note", "gold", "x"), ("pull",)):
        assert "DDTREE_READ_ONLY" in refusal(ddtree(*command), 3)
    assert ddtree("rollback", "gold", "--dry-run")[0] == 0


def test_refusals_are_one_line_with_the_right_code(ddtree: Run, tmp_path: Path) -> None:
    assert "no snapshot yet" in refusal(ddtree("show", "latest"), 2)
    for arguments, code, words in (
        (("save", "--label", "two\nlines"), 2, "must be one line"),
        (("save", "--note", "a\0b"), 2, "NUL"),
        (("save", "--note", "x", "--note-file", "-"), 2, "not both"),
        (("save", "--note-file", str(tmp_path / "none")), 1, "No such file"),
        (
            ("save", "--note", "one\nAWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYzQ9dKlTrWv"),
            3,
            "note line 2",
        ),
        (("save", "--bench", str(tmp_path / "none.json")), 1, "none.json"),
        (("save", "--store", __file__), 3, "is a file and no snapshot store"),
        (("show", "--file", "x", "latest"), 2, "no snapshot yet"),
        (("push",), 3, "nothing to push"),
        (("import", str(tmp_path / "none.tar")), 1, "none.tar"),
        (("save", "--url", "http://127.0.0.1:9"), 1, "127.0.0.1:9"),
    ):
        if arguments[1:2] != ("--url",):
            assert words in refusal(ddtree(*arguments), code), arguments
        else:
            assert ddtree(*arguments)[0] in (1, 3)


def test_snapshots_are_handed_on_by_remote_and_by_file(ddtree: Run, tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet", "--bare", "--initial-branch=main", "hub.git")
    hub, file = str(tmp_path / "hub.git"), str(tmp_path / "one.ddtree")
    ours, theirs = (("--store", str(tmp_path / name)) for name in ("ours", "theirs"))
    saved = answer(ddtree("save", "--label", "mine", "--note", "#1", *ours, "--json"))["snapshot"]
    assert answer(ddtree("remote", "show", *ours, "--json"))["remote"] is None
    assert answer(ddtree("remote", "set", hub, *ours, "--json"))["remote"] == hub
    assert ddtree("remote", "show", *ours)[1] == f"remote: {hub}; not pushed: 1\n"
    assert ddtree("push", *ours)[1] == "pushed 1 commit\n"
    assert ddtree("remote", "set", hub, *theirs)[1] == f"remote: {hub}\n"
    assert answer(ddtree("pull", *theirs, "--json"))["pulled"] == 1
    assert answer(ddtree("show", "mine", *theirs, "--json"))["snapshot"]["note"] == "#1"
    assert ddtree("pull", *theirs)[1] == "pulled 0 commits\n"
    third = ("--store", str(tmp_path / "third"))
    assert answer(ddtree("export", "mine", file, *ours, "--json")) == {
        "schema": 1,
        "id": saved["id"],
        "file": file,
    }
    assert "--force" in refusal(ddtree("export", "mine", file, *ours), 3)
    nowhere = str(tmp_path / "none" / "one.ddtree")
    assert "cannot be written: No such file" in refusal(ddtree("export", "mine", nowhere, *ours), 1)
    assert ddtree("export", "mine", file, "--force", *ours)[1].endswith(f" written to {file}\n")
    assert answer(ddtree("import", file, *third, "--json"))["snapshot"]["label"] == "mine"
    assert "no words" in refusal(ddtree("note", "mine", "", *ours), 2)


def test_bisect_names_the_change_that_made_it_slow(ddtree: Run, server: ApiServer) -> None:
    at = ("--url", server.url)
    for label, changes in (("fast", ["mode=off"]), ("slow", ["mode=tree", "tree_budget=64"])):
        assert main(["ctl", "apply", *changes, *at]) == 0
        answer(ddtree("save", "--label", label, *at, "--json"))
    before = server.status().config
    found = answer(ddtree("bisect", "fast", "slow", *at, "--json"))
    assert (found["good"]["label"], found["bad"]["label"]) == ("fast", "slow")
    assert "mode" in {each["name"] for each in found["settings"]}
    assert found["results"][0]["tok_s"] > found["results"][1]["tok_s"] and not found["skipped"]
    assert server.status().config == before


def test_verify_starts_the_configuration_itself(ddtree: Run, tiny_folder: Path, tmp_path: Path) -> None:
    config = tiny_models.tiny_config(
        tiny_folder / "target", tiny_folder / "drafter", max_seq_len=CONTEXT, tree_budget=8
    )
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    answer(ddtree("save", "--label", "tiny", "--config", str(path), "--json"))
    found = answer(ddtree("verify", "tiny", "--json"))
    assert found["then"] is None and found["holds"] is None
    assert found["now"]["tok_s"] > 0 and "the snapshot has none" in found["verdict"]


def test_bench_results_are_kept(ddtree: Run, tmp_path: Path) -> None:
    row = {"mode": "chain", "tree_budget": 0, "concurrency": 4, "temperature": 0.0, "tok_s": 55.5}
    row |= {"total_tok_s": 200.0, "accept_length": 2.5, "ttft_s": 0.2}
    path = tmp_path / "bench.json"
    path.write_text("a table\n" + json.dumps({"conditions": {"prompts": 8}, "results": [row]}) + "\n")
    answer(ddtree("save", "--label", "b", "--bench", str(path), "--json"))
    (figure,) = answer(ddtree("show", "b", "--json"))["snapshot"]["measurements"]["results"]
    assert (figure["tok_s"], figure["concurrency"]) == (55.5, 4) and "prompts 8" in figure["conditions"]
    path.write_text("{}")
    assert "no answer of 'ddtree bench --json'" in refusal(ddtree("save", "--bench", str(path)), 1)


def test_text_of_commits_cannot_steer_the_terminal(ddtree: Run, tmp_path: Path) -> None:
    work = repository(tmp_path / "work")
    store = Store.at(work)
    store.save(snapshot("a\u202eb", "\x1b[31mred\x07\n\x9b2J"))
    store.note("latest", "\x1b]0;title\x07")
    store.save(snapshot("other"))
    for command in (("list",), ("show", "latest~1"), ("diff", "latest~1", "latest")):
        code, out, _ = ddtree(*command, "--store", str(work))
        assert code == 0 and not any(char in out for char in "\x1b\x07\x9b\u202e")


def test_no_command_of_a_store_loads_the_engine(tmp_path: Path) -> None:
    code = (
        "import sys; from console.cli import main; "
        f"codes = [main(['snapshot', *each, '--store', {str(tmp_path / 's')!r}]) for each in "
        "(['save', '--label', 'a'], ['list'], ['show', 'a'], ['rollback', 'a', '--yes'])]; "
        "print(codes, sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    folders = {name: str(tmp_path) for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **folders}, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0] []", done.stderr
