"""`ddtree layouts`: what a person and a script get, and with which exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from console.cli import main
from layouts.evidence import read_evidence
from layouts.library import load_library

PRESETS = sorted(load_library(Path("/nonexistent")).presets)


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Presets and evidence of nobody, on a host without a GPU."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("DDTREE_DEVICE", "cpu")
    monkeypatch.setenv("DDTREE_THREADS", "2")
    return tmp_path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def ddtree(*arguments: str, code: int = 0) -> str:
        assert main(["layouts", *arguments]) == code
        captured = capsys.readouterr()
        if code:
            return captured.err if not captured.out else captured.out
        return captured.out

    return ddtree


def answer(text: str) -> dict[str, Any]:
    found = json.loads(text)
    assert found["schema"] == 1
    return found


def test_list_names_every_preset_this_hosts_first(run: Any) -> None:
    listed = [line[2:].split()[0] for line in run("list").splitlines()[:-1]]
    assert sorted(listed) == PRESETS and set(listed[:5]) == {"single", "tp2", "ep2", "pp2", "tp2ep2"}
    layouts = answer(run("list", "--json"))["layouts"]
    assert [each["name"] for each in layouts] == listed
    assert [each["this_host"] for each in layouts] == [True] * 5 + [False] * (len(PRESETS) - 5)


def test_show_has_scope_source_and_the_reason_of_each_variable(run: Any) -> None:
    text = run("show", "kimi-rtx6000x8-tp8")
    for part in (
        "measured: 97.9 tok/s (TP8, mode off, concurrency 1, graphs on)",
        "scope: 8 x RTX PRO 6000 Blackwell, PCIe, sglang, cuda 13.0",
        "variable CUDA_HOME=/usr/local/cuda-13.0",
        "needs a new process",
        "CUDA toolkit >= 12.9",
        "date n/a",
    ):
        assert part in text
    assert answer(run("show", "kimi-rtx6000x8-tp8", "--json"))["evidence"][0]["value"] == 97.9


def test_plan_ranks_this_hosts_layouts_and_says_why_others_are_refused(run: Any) -> None:
    text = run("plan")
    assert "TP2 (MLP only)" in text
    assert "ep2: refused: ep = 2: SmolLM2-135M-Instruct is a dense model" in " ".join(text.split())
    plans = answer(run("plan", "--json", "--concurrency", "1,2"))["layouts"]
    assert [plan["name"] for plan in plans][0] == "single"
    assert [each["concurrency"] for each in plans[0]["predicted"]] == [1, 2]
    assert {term["name"] for term in plans[0]["fit"]["terms"]} >= {"KV cache", "drafter weights"}
    assert plans[0]["fit"]["total"] == pytest.approx(sum(t["bytes"] for t in plans[0]["fit"]["terms"]))


def test_plan_prints_for_all_shipped_presets(run: Any) -> None:
    plans = answer(run("plan", "--all", "--json"))["layouts"]
    assert sorted(plan["name"] for plan in plans) == PRESETS
    text = run("plan", *PRESETS)
    assert all(f"{name}: " in text for name in PRESETS)
    assert "at most" in text and "CUDA_HOME=/usr/local/cuda-13.0: needs a new process" in text


def test_plan_reproduces_the_pcie_ranking_and_its_flip_on_nvlink(run: Any) -> None:
    def ranking(hardware: str, load: str) -> list[str]:
        arguments = ("plan", "--json", "--mode", "off", "--hardware", hardware, "--concurrency", load)
        return list(dict.fromkeys(plan["label"] for plan in answer(run(*arguments))["layouts"]))

    assert ranking("rtx-pro-6000-blackwell", "1") == ["TP8", "TP8+EP4", "TP8+EP8", "PP8"]
    in_aggregate = ranking("rtx-pro-6000-blackwell", "256")
    assert in_aggregate[0] == "TP8+EP8" and in_aggregate[-1] == "PP8"
    for load in ("1", "256"):
        assert ranking("b300", load) == ["TP8", "TP8+EP8", "PP8"]


def test_predicted_stands_beside_measured_with_the_error(run: Any) -> None:
    text = run("plan", "kimi-rtx6000x8-tp8")
    assert "measured: 97.9 tok/s" in text and "error -" in text and "left out of the calibration" in text
    (plan,) = answer(run("plan", "kimi-rtx6000x8-tp8", "--json"))["layouts"]
    measured = {each["unit"]: each for each in plan["measured"]}
    assert abs(measured["tok/s"]["error"]) < 0.2
    elsewhere = run("plan", "kimi-h200x8-tp8")
    assert "measured: nothing in this scope (8 x H200, NVLink, sglang)" in elsewhere
    assert "measured elsewhere, no advice for this hardware" in elsewhere


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("show", "tp3"), 2, "layout 'tp3' is not known; did you mean tp"),
        (("plan", "--hardware", "abacus"), 2, "hardware 'abacus' is not known"),
        (("plan", "--model", "/no/such"), 2, "model '/no/such' is not known"),
        (("plan", "--concurrency", "0"), 2, "0 is not from 1 to 1024"),
        (("plan", "--concurrency", "x"), 2, "'x' is not a list of whole numbers"),
        (("args", "kimi-rtx6000x8-pp8", "--mode", "tree"), 3, "SGLang refuses pipeline parallelism"),
        (("args", "sglang-tp2"), 3, "block_size"),
        (("plan", "ep2"), 3, "refused: ep = 2"),
        (("record", "/no/such.json"), 2, "cannot be read: No such file"),
    ],
)
def test_bad_input_is_one_line_with_the_right_exit_code(
    run: Any, arguments: tuple[str, ...], code: int, words: str
) -> None:
    assert words in run(*arguments, code=code)


def test_args_prints_a_line_to_paste(run: Any) -> None:
    line = run("args", "kimi-h200x8-tp8-ep8", "--model", "/m", "--drafter", "/d").strip()
    assert line == (
        "python -m sglang.launch_server --model-path /m --tp-size 8 --ep-size 8 --trust-remote-code "
        "--speculative-algorithm DFLASH --speculative-draft-model-path /d --speculative-dflash-block-size 8 "
        "--speculative-num-draft-tokens 8"
    )
    made = answer(run("args", "kimi-rtx6000x8-tp8", "--json"))
    assert made["needs_new_process"] == ["CUDA_HOME"]
    assert made["environment"]["PATH"] == "/usr/local/cuda-13.0/bin:$PATH"
    assert 'layout = "tp2"' in run("args", "tp2")


def test_a_users_preset_is_listed_as_such_and_a_wrong_one_does_not_take_the_others_away(
    own_folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = own_folders / "config" / "ddtree" / "layouts"
    folder.mkdir(parents=True)
    (folder / "a.toml").write_text('name = "tp2"\ntitle = "Mine"\nengine = "native"\ndegrees = { tp = 2 }\n')
    (folder / "b.toml").write_text('name = "x"\n')
    assert main(["layouts", "list"]) == 0
    captured = capsys.readouterr()
    assert f"Mine (user file {folder / 'a.toml'}, in place of the shipped one)" in captured.out
    assert captured.err == f"ddtree: warning: {folder / 'b.toml'}: title is missing; this file is left out\n"


def test_a_recorded_bench_calibrates_the_plan_of_its_own_host(
    run: Any, own_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layouts.host.cpu_name", lambda: "A CPU")
    arguments = ("plan", "single", "--json", "--mode", "off", "--concurrency", "1")
    before = answer(run(*arguments))["layouts"][0]["predicted"][0]["tok_s"]
    results = [
        {
            "mode": "off",
            "tree_budget": 0,
            "concurrency": load,
            "temperature": 0.0,
            "tok_s": before / 2 / load**0.5,
        }
        for load in (1, 4)
    ]
    conditions = {
        "device": "cpu",
        "cpu": "A CPU",
        "threads": 2,
        "model": "smollm2-135m-instruct",
        "torch": "2.13",
    }
    report = own_folders / "bench.json"
    report.write_text("a table for people\n" + json.dumps({"conditions": conditions, "results": results}))
    assert "2 of 2 records added" in run("record", str(report))
    assert "0 of 2 records added" in run("record", str(report))
    assert len(read_evidence(own_folders / "data" / "ddtree" / "evidence.toml")) == 2
    after = answer(run(*arguments))["layouts"][0]
    assert after["predicted"][0]["tok_s"] < 0.75 * before
    assert "calibrated by 2 records of 1 x A CPU, 2 threads, gloo, native, torch 2.13" in after["calibration"]
    monkeypatch.setattr("layouts.host.cpu_name", lambda: "Another CPU")
    assert answer(run(*arguments))["layouts"][0]["predicted"][0]["tok_s"] == pytest.approx(before)


def test_a_snapshots_folder_is_recorded_in_its_own_scope(run: Any, own_folders: Path) -> None:
    folder = own_folders / "7"
    folder.mkdir()
    (folder / "config.toml").write_text('model = "/m/kimi"\nthreads = 2\n')
    assert "environment.toml: cannot be read: No such file" in run("record", str(folder), code=2)
    (folder / "environment.toml").write_text('[hardware]\ncpu = "A CPU"\n')
    figure = {"mode": "off", "tree_budget": 0, "concurrency": 1, "temperature": 0.0, "tok_s": 20.0}
    (folder / "measurements.json").write_text(json.dumps({"results": [figure]}))
    told = run("record", str(folder))
    assert told.startswith("1 of 1 records added") and "scope: 1 x A CPU, 2 threads, gloo, native" in told


def test_what_is_no_bench_of_this_host_is_not_recorded(run: Any, own_folders: Path) -> None:
    report = own_folders / "bench.json"
    report.write_text("a table without its last line\n")
    assert "no JSON object; give what 'ddtree bench --json' printed" in run("record", str(report), code=2)
    report.write_bytes(b"\xff\xfe")
    assert f"{report}: not UTF-8" in run("record", str(report), code=2)
    report.write_text(json.dumps({"conditions": {"device": "cuda:0"}, "results": []}))
    assert "ran on cuda:0, and this host has no GPU" in run("record", str(report), code=2)
    assert not (own_folders / "data").exists()


def test_a_configured_model_that_is_not_there_takes_no_layout_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDTREE_MODEL", "/no/such")
    assert main(["layouts", "list"]) == 0
    told = capsys.readouterr()
    assert all(name in told.out for name in PRESETS)
    assert "warning: model '/no/such' is not known" in told.err and "nothing is predicted" in told.err
