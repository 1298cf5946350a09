"""Jobs on a real engine: what a bench and a verify of the serving runtime find, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from engine_driver import spoil_trees
from tiny_models import tiny_config

from runtime.interface import ConfigRejected, Frozen, Job, Runtime, RuntimeFault, RuntimeUnavailable
from runtime.jobs import JobContext, JobKind, Outcome
from runtime.local import LocalRuntime

PROMPTS = [{"prompt": "abc"}, {"prompt": "the cat"}]


@pytest.fixture
async def local(tiny_folder: Path) -> AsyncIterator[LocalRuntime]:
    made = LocalRuntime(
        tiny_config(tiny_folder / "target", tiny_folder / "drafter", mode="tree", max_tree_budget=16)
    )
    await made.wait_ready()
    yield made
    await made.aclose()


async def ended(runtime: Runtime, kind: str, parameters: dict[str, Any]) -> Job:
    job_id = await runtime.start_job(kind, parameters)
    while not (job := next(each for each in await runtime.jobs() if each.id == job_id)).over:
        await asyncio.sleep(0.02)
    return job


async def test_without_a_keeper_nothing_is_saved_or_rolled_back_to(local: LocalRuntime) -> None:
    for kind in ("snapshot", "rollback"):
        with pytest.raises(ConfigRejected, match=f"kind = {kind}: this runtime does not offer it"):
            await local.start_job(kind)
    with pytest.raises(RuntimeFault, match="keeps no snapshots"):
        await local.snapshots.page()


async def test_a_bench_measures_every_case_through_the_serving_runtime(local: LocalRuntime) -> None:
    wanted = {
        "prompts": PROMPTS,
        "tree_budgets": [4, 8],
        "concurrency": [1, 2],
        "repetitions": 2,
        "max_tokens": 8,
    }
    job = await ended(local, "bench", wanted)
    assert job.state == "done" and job.result is not None, job.text
    cases = {(each["mode"], each["tree_budget"], each["concurrency"]) for each in job.result["results"]}
    assert cases == {
        (m, b, c) for m, b in (("off", 0), ("chain", 0), ("tree", 4), ("tree", 8)) for c in (1, 2)
    }
    for each in job.result["results"]:
        assert (
            each["tok_s"] > 0
            and each["total_tok_s"] > 0
            and each["speed_up"] > 0
            and each["repetitions"] == 2
        )
        assert each["accept_length"] == 1.0 if each["mode"] == "off" else each["accept_length"] >= 1.0
    assert job.result["conditions"]["prompt_count"] == 2
    assert job.text.startswith("fastest: ")
    clients = {each.client for each in await local.requests()}
    assert clients == {job.id}


async def test_a_load_of_a_given_duration_repeats_its_prompts_and_then_ends(local: LocalRuntime) -> None:
    wanted = {"prompts": PROMPTS[:1], "modes": ["tree"], "duration_s": 0.3, "repetitions": 1, "max_tokens": 4}
    job = await ended(local, "bench", wanted)
    assert job.state == "done", job.text
    assert len(await local.requests()) > 2


async def test_a_verify_that_finds_a_changed_token_says_so_and_where(
    local: LocalRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_trees(monkeypatch)
    wanted = {"prompts": PROMPTS[:1], "modes": ["tree"], "temperatures": [0.0], "max_tokens": 12}
    job = await ended(local, "verify", wanted)
    assert job.state == "done" and job.result is not None
    assert not job.result["passed"] and "this is a bug" in job.text
    assert job.result["divergences"][0]["position"] >= 6


async def test_a_job_is_refused_while_the_engine_loads_and_ends_with_the_runtime(tiny_folder: Path) -> None:
    local = LocalRuntime(tiny_config(tiny_folder / "target", tiny_folder / "drafter"))
    with pytest.raises(RuntimeUnavailable, match="verify needs a serving engine; it is loading"):
        await local.start_job("verify")
    await local.wait_ready()
    job_id = await local.start_job("bench", {"duration_s": 600.0})
    await local.aclose()
    (job,) = await local.jobs()
    assert (job.id, job.state, job.text) == (job_id, "cancelled", "the runtime was closed")
    with pytest.raises(RuntimeUnavailable):
        await local.start_job("verify")


async def test_other_parts_add_kinds_and_a_fault_of_one_is_its_reason(local: LocalRuntime) -> None:
    class Wanted(Frozen):
        word: str

    async def run(context: JobContext[Wanted]) -> Outcome:
        if context.parameters.word == "bad":
            raise OSError("disk on fire")
        context.report(None, "looking")
        return Outcome(f"found {context.parameters.word}", {"word": context.parameters.word})

    local.job_board.register(JobKind("doctor", Wanted, run, exclusive=False))
    busy = await local.start_job("bench", {"duration_s": 600.0})
    job = await ended(local, "doctor", {"word": "good"})
    assert (job.state, job.text, job.result) == ("done", "found good", {"word": "good"})
    job = await ended(local, "doctor", {"word": "bad"})
    assert (job.state, job.text) == ("failed", "OSError: disk on fire")
    with pytest.raises(ConfigRejected, match=r"wrod \(doctor job\): no such setting; did you mean word"):
        await local.start_job("doctor", {"word": "good", "wrod": 1})
    assert await local.cancel_job(busy)


async def test_prompts_of_a_job_are_checked_before_it_begins(local: LocalRuntime) -> None:
    for prompt in ({}, {"prompt": "a", "mode": "off"}, {"text": "a"}):
        with pytest.raises(ConfigRejected, match="prompts, number 1"):
            await local.start_job("bench", {"prompts": [prompt]})
