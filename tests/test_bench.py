"""The bench compares what it says it compares and counts tokens, not events."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import tiny_config, write_drafter, write_target

from runtime.bench import BenchPlan, BenchReport, run_bench
from runtime.calibrate import interpolate, no_less_for_more_rows


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("bench")
    target = write_target(root / "target")
    return target, write_drafter(root / "drafter", target)


@pytest.fixture(scope="module")
def report(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> BenchReport:
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n{"prompt": "the cat"}\n{"prompt": "a"}\n')
    plan = BenchPlan(
        config=tiny_config(*folders, max_concurrency=2),
        budgets=(0, 4),
        concurrency=(1, 2),
        temperatures=(0.0, 0.7),
        prompts=prompts,
        repetitions=2,
        max_tokens=10,
    )
    return run_bench(plan)


def test_every_case_is_measured_once_and_budget_0_is_plain_decoding(report: BenchReport) -> None:
    cases = [result.case for result in report.results]
    assert len(cases) == len(set(cases)) == 3 * 2 * 2
    assert {(case.mode, case.tree_budget) for case in cases} == {("off", 0), ("chain", 0), ("tree", 4)}
    assert all(len(result.runs) == 2 for result in report.results)


def test_speed_up_is_against_plain_decoding_of_the_same_load_and_temperature(report: BenchReport) -> None:
    plain = {
        (r.case.concurrency, r.case.temperature): r.median("tok_s")
        for r in report.results
        if r.case.mode == "off"
    }
    for result in report.results:
        base = plain[(result.case.concurrency, result.case.temperature)]
        assert result.speed_up == pytest.approx(result.median("tok_s") / base)


def test_cases_are_ranked_by_speed_and_plain_decoding_accepts_one_token_a_round(report: BenchReport) -> None:
    for load in {(r.case.temperature, r.case.concurrency) for r in report.results}:
        speeds = [
            r.median("tok_s") for r in report.results if (r.case.temperature, r.case.concurrency) == load
        ]
        assert speeds == sorted(speeds, reverse=True)
    assert all(r.median("accept_length") == 1 for r in report.results if r.case.mode == "off")


def test_without_a_drafter_speculative_modes_are_left_out_with_the_reason(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n')
    plan = BenchPlan(config=tiny_config(folders[0]), prompts=prompts, repetitions=1, max_tokens=4)
    report = run_bench(plan)
    assert [result.case.mode for result in report.results] == ["off"]
    assert any("chain not measured" in note for note in report.notes)


def test_accept_lengths_between_measured_budgets_are_interpolated() -> None:
    points = {7: 3.0, 11: 4.0}
    assert [interpolate(points, at) for at in (4, 7, 9, 11, 31)] == [3.0, 3.0, 3.5, 4.0, 4.0]


def test_a_size_measured_in_a_busy_moment_is_bounded_by_what_larger_ones_took() -> None:
    assert no_less_for_more_rows({1: 30.0, 5: 71.0, 8: 44.0, 12: 43.0}) == {
        1: 30.0,
        5: 43.0,
        8: 43.0,
        12: 43.0,
    }
