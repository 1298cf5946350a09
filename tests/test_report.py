"""One page from result files: the right sentences, every figure with its conditions, nothing that breaks the page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from git_stores import snapshot
from scripted_server import Script
from test_load import measure
from test_tune import Paced, tuned

from console.cli import main
from runtime.load import Load
from runtime.load_report import LoadReport, Slo, summarise
from snapshots.store import Store


def row(mode: str, budget: int, tok_s: float, accept: float, **fields: Any) -> dict[str, Any]:
    return {
        "mode": mode,
        "tree_budget": budget,
        "concurrency": 1,
        "temperature": 0.0,
        "tok_s": tok_s,
        "tok_s_min": tok_s - 1,
        "tok_s_max": tok_s + 1,
        "total_tok_s": tok_s,
        "accept_length": accept,
        "ttft_s": 0.25,
        "round_s": 0.02,
        "speed_up": tok_s / 20,
        "repetitions": 5,
        **fields,
    }


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    """A bench in which the larger tree accepts more and is slower."""
    rows = [row("tree", 11, 42.0, 3.0), row("tree", 31, 35.0, 3.8), row("off", 0, 20.0, 1.0)]
    conditions = {"host": "gpu-1", "model": "a|b <script>", "measured_at": "2026-01-01T00:00:00Z"}
    file = tmp_path / "compared.json"
    file.write_text(
        json.dumps({"schema": 1, "conditions": conditions, "results": rows, "notes": ["a *note*"]})
    )
    return file


@pytest.fixture
def load(tmp_path: Path) -> Path:
    slo = Slo(ttft_s=0.1)
    runs = [measure(Script(fail_every=3), Load(concurrency=users, requests=6, warm_up=0)) for users in (1, 3)]
    report = LoadReport(
        conditions={"url": "http://h", "load_average_before": 3.0, "client_cpus": 2},
        results=tuple(summarise(run, slo) for run in runs),
    )
    file = tmp_path / "load.json"
    file.write_text("a table for people\n" + json.dumps(report.to_json()))
    return file


def test_the_page_says_what_is_fastest_and_what_only_accepts_more(
    comparison: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(comparison), "--title", "Our host"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# Our host\n")
    assert (
        "At 1 user, temperature 0 tree 11 is fastest: 42.0 tok/s a user, 2.10 times plain decoding." in text
    )
    assert "tree 31 accepts most (3.80 tokens a round against 3.00) and is slower: 35.0 tok/s." in text
    assert "| host | gpu-1 |" in text and "a\\|b \\<script\\>" in text and "a \\*note\\*" in text
    assert "| tree 11 | 1 | 0 | 42.0 | 41.0 to 43.0 | 2.10 | 3.00 | 250.0 ms | 20.0 ms | 5 |" in text


def test_a_load_is_told_with_failures_slo_and_a_busy_machine(
    load: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    assert main(["report", str(load), "--output", str(page)]) == 0
    text = page.read_text()
    assert "1 user, T 0: 2 of 6 requests failed (2 x HTTP 503: too busy)." in text
    assert "0% of the answers kept to ttft\\_s 100.0 ms." in text
    assert "not idle: load average 3.0 on 2 CPUs" in text
    assert "![time to first token, p50 and p99, by load](page-1.svg)" in text
    plots = sorted(each.name for each in tmp_path.glob("page-*.svg"))
    assert plots == ["page-1.svg", "page-2.svg"]
    assert (tmp_path / "page-1.svg").read_text().startswith("<svg")
    assert "page-1.svg" in capsys.readouterr().err


class Balanced(HTMLParser):
    """Fails on tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_one_file_with_its_plots_and_runs_nothing(
    comparison: Path, load: Path, tmp_path: Path
) -> None:
    tune = tmp_path / "tune.json"
    tune.write_text(json.dumps(tuned(Paced()).to_json()))
    page = tmp_path / "page.html"
    assert main(["report", str(comparison), str(load), str(tune), "--output", str(page)]) == 0
    text = page.read_text()
    parser = Balanced()
    parser.feed(text)
    assert not parser.open and {"svg", "table", "h1"} <= parser.seen
    assert "script" not in parser.seen and "a|b &lt;script&gt;" in text
    assert "Fastest for latency: tree 11" in text or "Fastest for latency: tree 15" in text
    assert "not tried: its neighbours were slower" in text or "slower than tree" in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[1]", "none of ddtree bench or ddtree tune"),
        ('{"schema": 9, "results": []}', "has schema 9, this version reads 1"),
        ('{"schema": 1, "kind": "dance", "results": []}', "kind this version does not know: dance"),
        ('{"schema": 1, "results": [{"mode": "off"}]}', "is not whole"),
    ],
)
def test_a_file_that_is_no_result_is_named(
    content: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.json"
    if content is not None:
        file.write_text(content)
    assert main(["report", str(file)]) == 2
    err = capsys.readouterr().err
    assert "file.json" in err and words in err


# Snapshots


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of three snapshots: two of one host class with a bench, one that was never measured."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "store"
    store = Store.at(folder)
    for label, tok_s in (("before", 30.0), ("tree | best", 42.0), ("not measured", None)):
        store.save(snapshot(label, f"why *{label}*", tok_s))
    return folder


def test_a_store_is_told_side_by_side_and_one_by_one(kept: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert main(["report", "--store", str(kept), "--output", str(page)]) == 0
    text = page.read_text()
    assert "from 3 snapshot(s)" in text
    assert "tok/s a user by snapshot; 2 x NVIDIA H200, bench" in text
    assert text.count("| bench | tree 8 | n/a | n/a |") == 2, (
        "each figure with its conditions, unknown ones n/a"
    )
    assert "tree \\| best" in text and "why \\*before\\*" in text
    assert "No figures: not measured." in text
    assert "| hardware | 2 x NVIDIA H200 |" in text and "layout single" in text
    drawn = (tmp_path / "page-1.svg").read_text()
    assert "42.0 tree 8 tree | best" in drawn and "30.0 tree 8 before" in drawn


def test_named_snapshots_stand_after_result_files_each_once(
    kept: Path, comparison: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--snapshot", "tree | best", "--snapshot", "latest~1", "--last", "1")
    assert main(["report", str(comparison), "--store", str(kept), *options]) == 0
    text = capsys.readouterr().out
    assert "from 1 result file(s) and 2 snapshot(s)" in text
    assert text.index("tree 11 is fastest") < text.index("## Snapshots")
    assert text.count("why \\*tree") == 1 and "before" not in text


def test_snapshots_that_do_not_compare_are_not_drawn_together(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = snapshot("elsewhere", "", 500.0)
    elsewhere = other.host.model_copy(update={"hardware": "8 x NVIDIA B300"})
    Store.at(kept).save(other.model_copy(update={"host": elsewhere}))
    assert main(["report", "--store", str(kept)]) == 0
    text = capsys.readouterr().out
    assert "do not compare" in text and "500.0" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [([], "--snapshot, --last or --store"), (["--snapshot", "nothing"], "no snapshot")],
)
def test_nothing_to_tell_of_is_an_error_in_words(
    options: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["report", *options]) in (1, 2)
    assert words in capsys.readouterr().err
