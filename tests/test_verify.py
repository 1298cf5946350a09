"""`ddtree verify` finds real divergences, forgives near-ties only, and passes on the default pair."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_driver import spoil_trees
from tiny_models import tiny_config, write_drafter, write_target

from runtime.engine import Engine
from runtime.loader import load
from runtime.models import Checkpoint
from runtime.prompt_sets import bundled_prompts
from runtime.sampling import Sampling
from runtime.verify import Divergence, VerifyPlan, _margin, compare, near_tie_gap, run_verify

PROMPTS = [{"prompt": "abc"}, {"prompt": "the cat"}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    root = tmp_path_factory.mktemp("verify")
    target = write_target(root / "target")
    config = tiny_config(target, write_drafter(root / "drafter", target))
    return Engine(load(config), config, 8)


def plan(engine: Engine, **changes: object) -> VerifyPlan:
    return VerifyPlan(config=engine.config, max_tokens=12, **changes)


def test_equal_texts_are_counted_as_identical(engine: Engine) -> None:
    report = compare(engine, plan(engine), PROMPTS, (4, 8))
    assert report.texts == report.identical == 2 * 2 * 3
    assert report.exit_code == 0 and not report.divergences
    assert "no divergence" in report.table()


def test_a_changed_token_is_a_divergence_with_its_place_and_margin(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_trees(monkeypatch)
    report = compare(engine, plan(engine, modes=("tree",), temperatures=(0.0,)), PROMPTS[:1], (8,))
    assert report.exit_code == 1
    first = report.divergences[0]
    assert (first.prompt, first.mode, first.tree_budget) == (0, "tree", 8)
    assert first.position >= 6 and first.plain != first.speculative and first.margin > first.tau
    assert report.to_json()["divergences"][0]["margin"] == first.margin


def test_more_near_ties_than_the_dtype_allows_are_a_failure(engine: Engine) -> None:
    report = compare(engine, plan(engine, modes=("chain",), temperatures=(0.0,)), PROMPTS[:1], (8,))
    tie = Divergence(0, "chain", 0, 0.0, 3, 1, 2, margin=1e-5, tau=1e-2)
    assert tie.near_tie
    once = report.__class__(**{**vars(report), "near_ties": (tie,)})
    twice = report.__class__(**{**vars(report), "near_ties": (tie, tie)})
    assert (once.exit_code, twice.exit_code) == (0, 1)


def test_the_near_tie_gap_follows_the_temperature_in_float32(engine: Engine) -> None:
    gaps = [near_tie_gap(engine, temperature, (1, 2, 3)) for temperature in (0.0, 0.05, 1.0)]
    assert gaps == [pytest.approx(1e-2), pytest.approx(1e-2), pytest.approx(1e-3)]


def test_a_filter_may_cut_within_the_gap_and_not_beyond_it() -> None:
    """Token 2 misses top_k = 2 by 1e-4 and token 3 by much; noise makes each the best of those that are kept."""
    logits = torch.tensor([[3.0, 1.0, 1.0 - 1e-4, 0.0]])

    def margin(token: int, tau: float, **filters: float) -> float:
        noise = torch.zeros(1, 4)
        noise[0, token] = 9.0
        sampling = Sampling(temperature=1.0, **filters)  # type: ignore[arg-type]
        return _margin(logits, sampling, noise, token, tau)

    assert margin(2, 1e-3, top_k=2) <= 0.0
    assert margin(2, 1e-5, top_k=2) == margin(3, 1e-3, top_k=2) == float("inf")
    before = float(logits.softmax(-1)[0, :2].sum())
    assert margin(2, 1e-3, top_p=before - 1e-5) <= 0.0
    assert margin(2, 1e-3, top_p=before - 0.01) == float("inf")
    ratio = float((logits[0, 2] - logits[0, 0]).exp())
    assert margin(2, 1e-3, min_p=ratio * 1.0001) <= 0.0 and margin(2, 1e-3, min_p=ratio * 1.01) == float(
        "inf"
    )


def test_the_near_tie_gap_of_bfloat16_is_measured(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    config = tiny_config(target, dtype="bfloat16")
    engine = Engine(load(config), config, 0)
    assert engine.models.target.dtype == torch.bfloat16
    assert near_tie_gap(engine, 0.0, tuple(range(1, 80))) >= 0.0


@pytest.mark.case("A19")
def test_the_default_pair_gives_the_same_tokens_in_every_mode(default_checkpoint: Checkpoint) -> None:
    config = tiny_config(default_checkpoint.path, drafter="auto", linear="auto", max_seq_len=1024)
    prompts = [prompt for kind in bundled_prompts(2).values() for prompt in kind]
    engine = Engine(load(config), config, 0)
    wanted = VerifyPlan(config=config, max_tokens=32)
    report = compare(engine, wanted, prompts, (4, 8, 11, 16, 32))
    assert report.texts == 6 * 2 * 6
    assert report.exit_code == 0, report.table()


def test_a_plan_with_a_prompt_file_reads_it(tmp_path: Path, engine: Engine) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "abc"}\n\n{"messages": [{"role": "user", "content": "hello"}]}\n')
    report = run_verify(plan(engine, prompts=file, modes=("tree",), budgets=(4,), temperatures=(0.0,)))
    assert report.prompts == 2 and report.exit_code == 0
