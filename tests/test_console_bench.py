"""Bench: loads, jobs with progress and cancel, results as table, charts and files; verify in words."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from console_driver import console
from fake_runtime import BENCHED, VERIFIED, FakeRuntime, bench_case
from textual.widgets import Input

from console.bench_load import Load, WrongLoad
from console.bench_results import Bench, NotABench, differing, keep, kept, read, verdict
from console.bench_screen import BenchScreen
from console.dialogs import ConfirmDialog
from console.lists import List
from console.sweep_chart import SweepChart
from runtime.interface import GenerateRequest
from runtime.jobs import Outcome


@pytest.fixture(autouse=True)
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data" / "ddtree" / "benches"


# Loads and files


def test_a_load_becomes_the_parameters_of_a_job_and_what_is_wrong_is_named(tmp_path: Path):
    wanted = Load(
        modes="tree, off", tree_budgets="8,16,8", concurrency="1,4", temperatures="0,0.7", duration_s="2.5"
    )
    assert wanted.parameters() == {
        "modes": ["tree", "off"],
        "tree_budgets": [8, 16],
        "concurrency": [1, 4],
        "temperatures": [0.0, 0.7],
        "max_tokens": 64,
        "repetitions": 3,
        "under_load": False,
        "duration_s": 2.5,
        "prompts_per_kind": 2,
    }
    for wrong, words in (
        (Load(modes="tree,fast"), "modes = tree,fast: must be out of off, chain, tree"),
        (Load(tree_budgets="4;8"), "tree_budgets = 4;8: must be whole numbers"),
        (Load(repetitions=""), "repetitions = nothing: must be one number"),
        (Load(under_load="maybe"), "under_load = maybe: must be yes or no"),
        (Load(prompts=str(tmp_path / "none.jsonl")), "prompts: prompt file .*none.jsonl does not exist"),
    ):
        with pytest.raises(WrongLoad, match=words):
            wrong.parameters()
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "abc"}\n')
    assert Load(prompts=str(file)).parameters()["prompts"] == [{"prompt": "abc"}]


def test_what_is_kept_reads_back_equal_and_never_overwrites(tmp_path: Path):
    bench = Bench.of("bench-1", BENCHED)
    first = keep(tmp_path / "new", "my / bench: one", bench.json_text(), ".json")
    second = keep(tmp_path / "new", "my / bench: one", "{}", ".json")
    assert first.name == "my-bench-one.json" and second.name == "my-bench-one-2.json"
    assert read(first).results == bench.results and read(first).conditions == bench.conditions
    assert {each.label for each in kept(tmp_path / "new")} == {"my-bench-one", "my-bench-one-2"}
    for text in ("{}", "[", "[]", '{"results": [{}]}', '{"results": [{"tok_s": 1}]}'):
        second.write_text(text)
        with pytest.raises(NotABench, match="my-bench-one-2"):
            read(second)
    assert keep(tmp_path / "new", "../..//", "x", ".csv").parent == tmp_path / "new"
    rows = list(csv.DictReader(bench.csv_text().splitlines()))
    assert [row["tok_s"] for row in rows] == ["81.5", "72.0", "60.25", "40.0"]
    assert rows[0]["mode"] == "tree" and rows[0]["tree_budget"] == "8" and rows[0]["host"] == "fake"


def test_a_slower_case_is_called_slower_and_unlike_conditions_are_named():
    slow = Bench.of("a", {"results": [bench_case("tree", 32, 30.0, 4.2)], "conditions": {"threads": 2}})
    assert "loses: 0.75x plain" in verdict(slow, slow.results[0])
    unknown = Bench.of("b", {"results": [bench_case("tree", 32, 30.0, 4.2, speed_up=None)]})
    assert "plain decoding was not measured" in verdict(unknown, unknown.results[0])
    assert differing(slow, unknown) == "threads n/a then, 2 here"
    assert differing(slow, slow) == ""


# The screen


async def test_a_bench_runs_with_progress_and_its_results_are_a_table_a_verdict_and_charts():
    runtime = FakeRuntime()
    runtime.job_step_s = 0.1
    async with console(runtime, size=(120, 40)) as driven:
        await driven.press("7")
        assert "no results yet" in driven.text("#verdict")
        await driven.press("r")
        await driven.until(lambda: "step 3 of 5" in driven.text("#job"), "progress")
        assert "left: about" in driven.text("#job") and "40 %" in driven.text("#job")
        title = str(driven.app.screen.query_one("#job").border_title)
        assert title.startswith("bench-1 runs, started by console")
        await driven.until(lambda: "fastest: tree 8" in driven.text("#job"), "the end")
        table = driven.app.screen.query_one(List)
        assert [str(table.get_row_at(row)[0]) for row in range(4)] == ["tree 8", "tree 16", "chain", "off"]
        assert "pays: 2.04x plain" in driven.text("#verdict")
        await driven.press("j")
        await driven.until(lambda: "tree 16: 72.0 tok/s" in driven.text("#verdict"), "the next case")
        charts = list(driven.app.screen.query(SweepChart))
        assert [str(chart.border_title) for chart in charts] == [
            f"{name} by budget; lines: plain, chain" for name in ("tok/s", "accept length")
        ]
        assert any("⠀" < mark < "⣿" for mark in driven.shown())


async def test_the_load_is_edited_in_a_dialog_that_refuses_what_is_wrong_and_is_what_runs():
    async with console(size=(80, 24)) as driven:
        await driven.press("7", "e")
        await driven.until(lambda: bool(driven.app.screen.query("LoadDialog #tree_budgets")), "the dialog")
        driven.app.screen.query_one("#tree_budgets", Input).value = "8,many"
        await driven.press("enter")
        assert "tree_budgets = 8,many" in driven.text("#wrong")
        driven.app.screen.query_one("#tree_budgets", Input).value = "8,16"
        await driven.press("down", "down", "enter")
        await driven.until(lambda: "budgets 8,16" in driven.text("#load"), "kept")
        await driven.press("r")
        await driven.until(lambda: any(job.over for job in driven.app.view.jobs), "ran")
        assert driven.app.view.jobs[0].parameters["tree_budgets"] == [8, 16]
        driven.app.bench.use(Load(tree_budgets="900"))
        await driven.press("r")
        await driven.until(lambda: "tree_budgets = 900: must be from 0" in driven.app.view.notice, "refused")


async def test_cancel_asks_and_a_second_job_is_refused_naming_the_first():
    runtime = FakeRuntime()
    runtime.job_step_s = 60.0
    async with console(runtime, size=(80, 24)) as driven:
        await driven.press("7", "x")
        await driven.until(lambda: "nothing to cancel" in driven.app.view.notice, "nothing")
        await driven.press("r")
        await driven.until(lambda: "step 1 of 5" in driven.text("#job"), "running")
        await driven.press("v")
        await driven.until(lambda: "bench-1, started by console" in driven.app.view.notice, "refused")
        await driven.press("x")
        assert isinstance(driven.app.screen, ConfirmDialog)
        await driven.press("enter")
        assert isinstance(driven.app.screen, BenchScreen) and not driven.app.view.jobs[0].over
        await driven.press("x", "y")
        await driven.until(lambda: driven.app.view.jobs[0].state == "cancelled", "cancelled")
        await driven.until(lambda: "bench cancelled" in driven.app.view.notice, "told")


async def test_a_bench_beside_other_requests_is_refused_in_words():
    async with console(FakeRuntime(answer="word " * 400, round_s=0.05), size=(80, 24)) as driven:
        stream = driven.runtime.generate(GenerateRequest(prompt="hello"))
        await anext(stream)
        await driven.press("7", "r")
        await driven.until(lambda: "1 request of other clients runs" in driven.app.view.notice, "refused")
        await stream.aclose()


async def test_results_are_kept_opened_compared_and_exported(data_home: Path):
    async with console(size=(120, 40)) as driven:
        await driven.press("7", "w")
        await driven.until(lambda: "nothing to keep" in driven.app.view.notice, "nothing")
        await driven.press("o")
        await driven.until(lambda: "no results are kept in" in driven.app.view.notice, "none")
        await driven.press("r")
        await driven.until(lambda: driven.app.bench.bench is not None, "results")
        await driven.press("w")
        await driven.until(lambda: bool(driven.app.screen.query("TextDialog Input")), "asked for a name")
        driven.app.screen.query_one(Input).value = "quiet host"
        await driven.press("enter")
        await driven.until(lambda: "quiet-host.json" in driven.app.view.notice, "kept")
        assert json.loads((data_home / "quiet-host.json").read_text())["results"][0]["tok_s"] == 81.5
        await driven.press("E")
        await driven.until(lambda: bool(driven.app.screen.query("TextDialog Input")), "asked for a name")
        await driven.press("enter")
        await driven.until(lambda: ".csv" in driven.app.view.notice, "exported")
        faster = {**BENCHED, "results": [bench_case("tree", 8, 163.0, 3.4)]}
        driven.runtime.job_results["bench"] = Outcome("fastest: tree 8", faster)
        await driven.press("r")
        await driven.until(lambda: len(driven.app.bench.bench.results) == 1, "the second bench")
        await driven.press("c")
        await driven.until(
            lambda: bool(driven.app.screen.query("ChooseDialog OptionList")), "the list of kept ones"
        )
        await driven.press("enter")
        await driven.until(lambda: "+100.0 %" in driven.shown(), "compared")
        assert "than kept: quiet-host" in driven.text("#verdict")
        await driven.press("c")
        await driven.until(lambda: "+100.0 %" not in driven.shown(), "not compared any more")
        await driven.press("o")
        await driven.until(lambda: bool(driven.app.screen.query("ChooseDialog OptionList")), "the list again")
        await driven.press("enter")
        await driven.until(lambda: driven.app.bench.bench.label == "quiet-host", "opened")


async def test_verify_from_the_palette_tells_its_result_in_words_good_or_bad():
    async with console(size=(80, 24)) as driven:
        for passed, words in ((True, "no divergence: 4 of 4 texts"), (False, "speculation changed the text")):
            outcome = Outcome(words, {**VERIFIED, "passed": passed})
            driven.runtime.job_results["verify"] = outcome
            await driven.press("colon", *"verify")
            await driven.until(lambda: "speculation changes no token" in driven.shown(), "found")
            await driven.press("enter")
            await driven.until(lambda words=words: f"verify: {words}" in driven.app.view.notice, "told")
            assert driven.app.view.notice_bad is not passed


async def test_a_read_only_console_shows_results_and_starts_nothing():
    async with console(read_only=True, size=(80, 24)) as driven:
        await driven.runtime.start_job("bench", {})
        await driven.press("7")
        await driven.until(lambda: driven.app.bench.bench is not None, "results of others")
        for key in ("r", "v"):
            await driven.press(key)
            assert "read-only" in driven.app.view.notice, key
        assert len(await driven.runtime.jobs()) == 1
        assert "Verify" not in {
            command.title for command in driven.app.get_system_commands(driven.app.screen)
        }
