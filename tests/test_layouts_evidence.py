"""Evidence files: what is written comes back, nothing is lost or doubled, every record keeps its own scope."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts import evidence as files
from layouts.evidence import (
    Known,
    append_evidence,
    bench_scope,
    evidence_text,
    from_bench,
    from_snapshot,
    known_evidence,
    read_evidence,
)
from layouts.library import load_library
from layouts.presets import Conditions, Degrees, Evidence, Scope
from layouts.values import LayoutError

ROOT = Path(__file__).parent.parent
SCOPE = Scope(hardware="A CPU, 2 threads", devices=1, interconnect="gloo", engine="native")
CONDITIONS = {
    "host": "box",
    "cpu": "A CPU",
    "device": "cpu",
    "dtype": "float32",
    "threads": 2,
    "torch": "2.13.0",
    "model": "smollm2-135m-instruct",
    "prompts": "bundled, 8 of each kind",
    "measured_at": "2026-11-30T12:00:00Z",
}
RESULTS = [
    {
        "mode": "off",
        "tree_budget": 0,
        "concurrency": 1,
        "temperature": 0.0,
        "tok_s": 20.0,
        "accept_length": 1.0,
    },
    {
        "mode": "tree",
        "tree_budget": 11,
        "concurrency": 4,
        "temperature": 0.0,
        "tok_s": 33.0,
        "accept_length": 3.2,
    },
]
REPORT = {"schema": 1, "conditions": CONDITIONS, "results": RESULTS, "notes": []}

lines = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1, max_size=30
).filter(lambda text: bool(text.strip()))
positive = st.floats(1e-6, 1e9)
records = st.builds(
    Evidence,
    unit=st.just("tok/s"),
    value=positive,
    approximate=st.booleans(),
    finding=st.none() | lines,
    scope=st.builds(
        Scope,
        hardware=lines,
        devices=st.integers(1, 64),
        interconnect=lines,
        engine=st.sampled_from(("native", "sglang")),
        versions=st.dictionaries(lines, lines, max_size=3),
    ),
    conditions=st.builds(
        Conditions,
        layout=st.none() | lines,
        mode=st.none() | st.sampled_from(("off", "chain", "tree")),
        concurrency=st.none() | st.integers(1, 1024),
        graphs=st.none() | st.booleans(),
        accept_length=st.none() | positive,
    ),
    source=lines,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(records, max_size=4))
def test_what_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, written: list[Evidence]
) -> None:
    path = tmp_path_factory.mktemp("evidence") / "evidence.toml"
    path.write_text(evidence_text(written), encoding="utf-8")
    assert list(read_evidence(path)) == written


@given(
    st.builds(
        Degrees,
        tp=st.integers(1, 64),
        ep=st.integers(1, 64),
        pp=st.integers(1, 64),
        dp=st.integers(1, 64),
    )
)
def test_labels_of_degrees_are_read_again(degrees: Degrees) -> None:
    assert Degrees.parse(degrees.label) == degrees


@pytest.mark.parametrize("label", ["", "TP0", "XP8", "TP8+", "TP8 (MLP only)", "TP99999"])
def test_what_is_no_label_is_none(label: str) -> None:
    assert Degrees.parse(label) is None


@pytest.mark.parametrize(
    ("figure", "words"),
    [
        ({"value": 1.0}, "unit is missing"),
        ({"unit": "tok/s"}, "needs value"),
        ({"unit": "tok/s", "low": 1.0}, "low and high go together"),
        ({"unit": "tok/s", "low": 2.0, "high": 1.0}, "above high"),
        ({"unit": "tok/s", "value": 1.0, "low": 1.0, "high": 2.0}, "not both"),
        ({"unit": "tok/s", "value": 0.0}, "greater than 0"),
    ],
)
def test_a_record_without_a_clear_figure_is_refused(figure: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Evidence(scope=SCOPE, source="x", **figure)  # type: ignore[arg-type]


def test_a_bench_becomes_evidence_of_its_own_scope() -> None:
    scope = bench_scope(REPORT, None, 1, "gloo")
    assert scope.words == "1 x A CPU, 2 threads, gloo, native, dtype float32, torch 2.13.0"
    plain, tree = from_bench(REPORT, scope, "single", "ddtree bench")
    assert (plain.figure, plain.conditions.mode, plain.conditions.accept_length) == ("20 tok/s", "off", None)
    assert (tree.conditions.tree_budget, tree.conditions.accept_length) == (11, 3.2)
    assert (tree.conditions.concurrency, tree.where, tree.measured_at) == (4, "box", "2026-11-30T12:00:00Z")


@pytest.mark.parametrize(
    "report", [{}, {"conditions": {}, "results": []}, {"conditions": CONDITIONS, "results": 3}]
)
def test_what_is_no_bench_is_refused(report: dict[str, object]) -> None:
    with pytest.raises(LayoutError, match="ddtree bench --json"):
        from_bench(report, SCOPE, "single", "file.json")


def test_a_wrong_figure_in_a_bench_is_named() -> None:
    wrong = {**REPORT, "results": [{**RESULTS[0], "tok_s": -1.0}]}
    with pytest.raises(LayoutError, match=r"value = -1\.0: input should be greater than 0"):
        from_bench(wrong, SCOPE, "single", "file.json")


def test_a_snapshot_becomes_evidence_of_the_host_it_was_taken_on() -> None:
    config = {"engine": "native", "model": "/models/Kimi", "device": "auto", "threads": 2}
    gpu = {"name": "NVIDIA H200"}
    environment = {
        "hardware": {"cpu": "A CPU", "gpus": [gpu, gpu], "links": [{"kind": "NV18"}]},
        "software": {"packages": {"torch": "2.11.0"}},
    }
    measurements = {"results": [{**RESULTS[0], "measured_at_s": 0.0}, {"mode": "off", "tok_s": None}]}
    (record,) = from_snapshot(config, environment, measurements, "TP2", "snapshot 3")
    assert record.scope.words == "2 x NVIDIA H200, NVLink, native, torch 2.11.0"
    assert (record.conditions.model, record.measured_at) == ("kimi", "1970-01-01T00:00:00Z")
    on_cpu = {"hardware": {"cpu": "A CPU", "gpus": []}}
    (record,) = from_snapshot(config, on_cpu, {"results": RESULTS[:1]}, "single", "snapshot 4")
    assert record.scope.words == "1 x A CPU, 2 threads, gloo, native"
    with pytest.raises(LayoutError, match="does not name the hardware"):
        from_snapshot(config, {"hardware": {"cpu": "n/a"}}, measurements, "single", "snapshot 5")


def test_records_are_added_once_and_the_file_is_never_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "evidence.toml"
    found = from_bench(REPORT, SCOPE, "single", "ddtree bench")
    assert append_evidence(path, found) == 2
    assert append_evidence(path, found) == 0
    kept = path.read_bytes()

    def full(_source: object, _target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    more = found[0].model_copy(update={"value": 21.0})
    with pytest.raises(LayoutError, match="cannot be written: No space left"):
        append_evidence(path, [more])
    assert path.read_bytes() == kept
    assert {each.name for each in path.parent.iterdir()} <= {"evidence.toml", "evidence.toml.lock"}


APPENDER = """
import sys
from pathlib import Path
from layouts.evidence import append_evidence
from layouts.presets import Evidence, Scope
scope = Scope(hardware="A CPU", devices=1, interconnect="gloo", engine="native")
for number in range(int(sys.argv[2]), int(sys.argv[2]) + 5):
    record = Evidence(unit="tok/s", value=number, scope=scope, source="a test")
    append_evidence(Path(sys.argv[1]), [record])
"""


def test_two_processes_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "evidence.toml"
    command = [sys.executable, "-c", APPENDER, str(path)]
    workers = [subprocess.Popen([*command, start], cwd=ROOT) for start in ("1", "100")]
    assert [worker.wait(60) for worker in workers] == [0, 0]
    assert {record.value for record in read_evidence(path)} == {*range(1, 6), *range(100, 105)}


def test_a_damaged_file_is_named_kept_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "evidence.toml"
    path.write_text('[[evidence]]\nunit = "tok/s"\nvalue = 1\nsource = "x"\n')
    with pytest.raises(LayoutError, match=r"evidence\.0\.scope is missing"):
        append_evidence(path, from_bench(REPORT, SCOPE, "single", "x"))
    library = load_library(Path("/nonexistent"))
    known = known_evidence(library, path)
    assert known.problem is not None and str(path) in known.problem
    assert known.records == known_evidence(library, tmp_path / "absent").records
    path.write_text("[[evidence")
    with pytest.raises(LayoutError, match="not TOML"):
        read_evidence(path)


def test_records_are_found_by_scope_whatever_the_versions() -> None:
    record = Evidence(
        unit="tok/s",
        value=1.0,
        source="x",
        scope=SCOPE.model_copy(update={"versions": {"torch": "2.11"}}),
        conditions=Conditions(model="m"),
    )
    known = Known((record,))
    assert known.at(SCOPE, "m") == (record,) and not known.elsewhere(SCOPE, "m")
    other = SCOPE.model_copy(update={"hardware": "B"})
    assert not known.at(other, "m") and known.elsewhere(other, "m") == (record,)
    assert not known.at(SCOPE, "other model")
