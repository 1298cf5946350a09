"""The cost model: orderings that are known, figures that were measured, and evidence that stays in its scope."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts.calibrate import Calibration, calibrate, solve
from layouts.cost import (
    Prediction,
    all_reduce_s,
    busiest_rank,
    exchange_s,
    experts_touched,
    predict,
    rates,
)
from layouts.evidence import Known, known_evidence
from layouts.fit import Load
from layouts.host import given_host
from layouts.library import load_library
from layouts.plan import LayoutPlan, Question, plan_layout
from layouts.presets import Conditions, Degrees, Evidence, Scope

NOWHERE = Path("/nonexistent")
LIBRARY = load_library(NOWHERE)
KNOWN = known_evidence(LIBRARY, NOWHERE)
KIMI = LIBRARY.model("kimi-k2.6-int4")
TP, EP, PP = Degrees(tp=8), Degrees(tp=8, ep=8), Degrees(pp=8)
LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
AGGREGATE = (256, 512, 1024)
"""Loads at which all experts are read in every step."""


def on(hardware: str, degrees: Degrees, concurrency: int, context: int = 256, **load: object) -> Prediction:
    at = rates(LIBRARY.device(hardware), degrees, "sglang")
    assert not isinstance(at, str)
    asked = Load(concurrency=concurrency, context=context, **load)
    return predict(KIMI, degrees, "sglang", asked, 1.0, at)


def planned(name: str, *, library: object = LIBRARY, known: Known = KNOWN, **question: object) -> LayoutPlan:
    preset = LIBRARY.preset(name)
    hardware = "cpu" if preset.hardware == "host" else preset.hardware
    host = given_host(LIBRARY, hardware, 8)
    return plan_layout(LIBRARY, host, Question(**question), known, preset)


def test_over_pcie_tp_wins_alone_ep_in_aggregate_and_the_pipeline_loses() -> None:
    """Margins: TP over EP >= 15 % at 1; EP over TP >= 3 % from 256 on; the pipeline last by >= 10 % everywhere."""
    card = "rtx-pro-6000-blackwell"
    alone = {degrees: on(card, degrees, 1).total_tok_s for degrees in (TP, EP, PP)}
    assert alone[TP] > 1.15 * alone[EP] > 1.15 * 1.10 * alone[PP]
    for load in AGGREGATE:
        together = {degrees: on(card, degrees, load).total_tok_s for degrees in (TP, EP, PP)}
        assert together[EP] > 1.03 * together[TP]
        assert together[TP] > 1.10 * together[PP]
    assert all(
        on(card, PP, load).total_tok_s < 0.9 * min(on(card, d, load).total_tok_s for d in (TP, EP))
        for load in LOADS
    )


@pytest.mark.parametrize("hardware", ["h200", "b200", "b300"])
def test_over_nvlink_tp_wins_at_every_load(hardware: str) -> None:
    """Margin: TP over EP >= 2 % at every load from 1 to 1024, so the advantage of EP is gone."""
    for load in LOADS:
        assert on(hardware, TP, load).total_tok_s > 1.02 * on(hardware, EP, load).total_tok_s
        assert on(hardware, TP, load).total_tok_s > on(hardware, PP, load).total_tok_s


def test_the_pcie_table_is_predicted_within_a_fifth_without_having_seen_the_figure() -> None:
    """Each figure at concurrency 1, predicted from dimensions and hardware and the other figures of its scope."""
    seen = {}
    for suffix in ("tp8", "tp8-ep8", "tp8-ep4", "pp8", "tp8-chain"):
        for compared in planned(f"kimi-rtx6000x8-{suffix}").compared:
            if compared.record.unit == "tok/s" and suffix.endswith("chain") == (
                compared.record.conditions.mode == "chain"
            ):
                assert compared.error is not None
                seen[suffix] = compared.error
    assert len(seen) == 5
    assert all(abs(error) < 0.2 for error in seen.values()), seen


def test_the_default_models_measured_step_times_are_met_on_the_cpu_they_were_measured_on() -> None:
    """Forward of 1 to 64 rows over 200 tokens, prepacked float32, two threads; within 15 %."""
    measured = {1: 39.2, 8: 50.5, 12: 58.3, 16: 66.2, 24: 79.3, 32: 96.7, 64: 162.7}
    shape, at = LIBRARY.model("smollm2-135m-instruct"), rates(LIBRARY.device("cpu"))
    assert not isinstance(at, str)
    for rows, milliseconds in measured.items():
        load = Load(concurrency=1, context=200, dtype="float32", kv_format="float32", mode="tree")
        load = load.model_copy(update={"tree_budget": rows - 1, "block_size": 8})
        made = predict(shape, Degrees(), "native", load, 1.0, at)
        assert made.memory_s * 1e3 == pytest.approx(milliseconds, rel=0.15)


def test_two_ranks_on_one_cpu_are_not_said_to_be_faster() -> None:
    one, two = (
        planned("single", model=LIBRARY.model("smollm2-135m-instruct")),
        planned("tp2", model=LIBRARY.model("smollm2-135m-instruct")),
    )
    assert one.forecasts[0].prediction.tok_s > two.forecasts[0].prediction.tok_s


def test_a_chain_pays_only_with_its_accept_length() -> None:
    at = rates(LIBRARY.device("h200"), TP, "sglang")
    assert not isinstance(at, str)
    chain = Load(concurrency=1, mode="chain", block_size=8)
    plain = predict(KIMI, TP, "sglang", Load(concurrency=1), 1.0, at)
    assert predict(KIMI, TP, "sglang", chain, 1.0, at).tok_s < plain.tok_s
    assert predict(KIMI, TP, "sglang", chain, 4.0, at).tok_s > plain.tok_s
    large = chain.model_copy(update={"concurrency": 1024})
    gain = (
        predict(KIMI, TP, "sglang", large, 4.0, at).tok_s
        / predict(KIMI, TP, "sglang", Load(concurrency=1024), 1.0, at).tok_s
    )
    assert gain < predict(KIMI, TP, "sglang", chain, 4.0, at).tok_s / plain.tok_s


def test_expected_experts_are_those_of_random_routing() -> None:
    source = random.Random(7)
    count, per_token, ranks = 64, 4, 8
    for rows in (1, 3, 10, 40):
        distinct, busiest = [], []
        for _ in range(1500):
            chosen = {expert for _ in range(rows) for expert in source.sample(range(count), per_token)}
            distinct.append(len(chosen))
            busiest.append(max(sum(expert // 8 == rank for expert in chosen) for rank in range(ranks)))
        assert experts_touched(count, per_token, rows) == pytest.approx(sum(distinct) / 1500, rel=0.02)
        assert busiest_rank(count, per_token, rows, ranks) == pytest.approx(sum(busiest) / 1500, rel=0.12)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 2048), st.sampled_from((2, 4, 8)), st.integers(1, 1 << 26))
def test_collectives_never_get_cheaper_with_size(rows: int, ranks: int, size: int) -> None:
    for name in ("h200", "rtx-pro-6000-blackwell"):
        at = rates(LIBRARY.device(name), Degrees(tp=ranks))
        assert not isinstance(at, str)
        assert 0 < all_reduce_s(size, ranks, at) <= all_reduce_s(2 * size, ranks, at)
        assert 0 < exchange_s(rows, 8, 14336.0, ranks, at) <= exchange_s(rows + 1, 8, 14336.0, ranks, at)
        assert all_reduce_s(size, 1, at) == exchange_s(rows, 8, 14336.0, 1, at) == 0


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(tuple(LIBRARY.models.values())),
    st.sampled_from((Degrees(), Degrees(tp=2), Degrees(pp=2))),
    st.integers(1, 512),
    st.integers(1, 4096),
)
def test_more_work_never_takes_less_time(shape: object, degrees: Degrees, load: int, context: int) -> None:
    at = rates(LIBRARY.device("h200"), degrees, "sglang")
    assert not isinstance(at, str)

    def round_s(concurrency: int, tokens: int) -> float:
        asked = Load(concurrency=concurrency, context=tokens)
        return predict(shape, degrees, "sglang", asked, 1.0, at).round_s  # type: ignore[arg-type]

    base = round_s(load, context)
    assert round_s(load + 8, context) >= base * (1 - 1e-9) and round_s(load, context + 512) >= base > 0


def test_hardware_without_figures_predicts_nothing_and_says_which_are_missing() -> None:
    unknown = LIBRARY.device("h200").model_copy(update={"memory_gb_s": None, "link_gb_s": None})
    assert rates(unknown) == "NVIDIA H200 (SXM): memory_gb_s not known"
    assert rates(unknown, TP) == "NVIDIA H200 (SXM): memory_gb_s, link_gb_s not known"


# Calibration

CPU_SCOPE = Scope(hardware="CPU", devices=1, interconnect="gloo", engine="native", versions={"torch": "2.13"})


def measured(tok_s: float, scope: Scope = CPU_SCOPE, concurrency: int = 1) -> Evidence:
    conditions = Conditions(
        model="smollm2-135m-instruct", layout="single", mode="off", concurrency=concurrency, context=200
    )
    return Evidence(unit="tok/s", value=tok_s, scope=scope, conditions=conditions, source="a test")


def forecast_with(*records: Evidence) -> LayoutPlan:
    return planned("single", model=LIBRARY.model("smollm2-135m-instruct"), known=Known(records), context=200)


def test_evidence_of_the_scope_corrects_the_prediction() -> None:
    before = forecast_with().forecasts[0].prediction.tok_s
    after = forecast_with(measured(before / 2), measured(before / 2.02), measured(before / 1.98))
    assert after.forecasts[0].prediction.tok_s == pytest.approx(before / 2, rel=0.05)
    assert "calibrated by 3 records of 1 x CPU, gloo, native, torch 2.13" in after.calibration


@pytest.mark.parametrize(
    "change",
    [
        {"hardware": "Another CPU"},
        {"interconnect": "NVLink"},
        {"engine": "sglang"},
        {"devices": 2},
    ],
)
def test_evidence_of_another_scope_changes_nothing_and_is_no_advice(change: dict[str, object]) -> None:
    other = CPU_SCOPE.model_copy(update=change)
    before, after = forecast_with(), forecast_with(measured(1000.0, other))
    assert after.forecasts == before.forecasts
    assert not after.compared and "not calibrated" in after.calibration
    assert [record.scope for record in after.elsewhere] == [other]


def test_versions_are_never_pooled() -> None:
    older = CPU_SCOPE.model_copy(update={"versions": {"torch": "2.11"}})
    before = forecast_with().forecasts[0].prediction.tok_s
    records = [measured(before / 2), measured(before / 2, concurrency=2), measured(before * 3, older)]
    plan = forecast_with(*records)
    assert plan.calibration.startswith("calibrated by 2 records") and "torch 2.13" in plan.calibration
    assert plan.forecasts[0].prediction.tok_s < before
    assert len(plan.compared) == 3


def test_records_of_another_scope_cannot_be_passed_to_the_calibration() -> None:
    at = rates(LIBRARY.device("cpu"))
    assert not isinstance(at, str)
    from layouts.calibrate import Case

    other = CPU_SCOPE.model_copy(update={"engine": "sglang"})
    with pytest.raises(ValueError, match="never"):
        calibrate(other, (Case(measured(1.0), lambda given: on("h200", TP, 1)),), at)
    assert calibrate(None, (), at) == Calibration()


def test_a_figure_never_proves_itself() -> None:
    """With one record there is nothing else to calibrate its own prediction by."""
    before = forecast_with().forecasts[0].prediction.tok_s
    plan = forecast_with(measured(before / 2))
    assert plan.compared[0].predicted == pytest.approx(before, rel=1e-6)
    assert plan.compared[0].error == pytest.approx(1.0, rel=1e-3)


def test_a_peak_without_its_load_is_compared_but_calibrates_nothing() -> None:
    plan = planned("kimi-rtx6000x8-tp8")
    peak = next(each for each in plan.compared if each.record.peak)
    assert peak.predicted is not None and "not stated" in peak.why_not
    alone = Known(tuple(record for record in KNOWN.records if record.peak))
    assert "not calibrated" in planned("kimi-rtx6000x8-tp8", known=alone).calibration


def test_without_an_accept_length_plain_decoding_is_predicted_and_said_so() -> None:
    plan = planned("kimi-rtx6000x8-tp8-tree")
    assert "plain decoding" in plan.accept_words and plan.forecasts[0].prediction.accept_length == 1.0
    chain = planned("kimi-rtx6000x8-tp8-chain")
    assert "3.5-4 tokens/round measured in this scope" in chain.accept_words
    assert planned("kimi-h200x8-tp8").accept_words.startswith("predicted for plain decoding")


def test_loads_beyond_memory_wait_and_are_said_to() -> None:
    plan = planned("kimi-rtx6000x8-tp8", concurrency=(1024,), context=4096)
    assert plan.forecasts[0].running < 1024 and "at most" in plan.shortage


@given(st.lists(st.floats(-3, 3), min_size=3, max_size=3), st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_the_solver_solves(right: list[float], seed: int) -> None:
    source = random.Random(seed)
    rows = [[source.uniform(-1, 1) for _ in range(3)] for _ in range(3)]
    matrix = [[sum(a * b for a, b in zip(x, y, strict=True)) + (x is y) for y in rows] for x in rows]
    found = solve(matrix, list(right))
    for row, value in zip(matrix, right, strict=True):
        assert sum(a * b for a, b in zip(row, found, strict=True)) == pytest.approx(value, abs=1e-6)


def test_rates_can_be_moved_one_by_one() -> None:
    at = rates(LIBRARY.device("h200"))
    assert not isinstance(at, str)
    moved = Calibration(factors={"memory": 2.0}).apply(at)
    assert moved == replace(at, memory=2 * at.memory)
