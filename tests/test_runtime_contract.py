"""One suite over every implementation of the Runtime interface: the fake of the console's tests, the engine in this
process, and both behind a real loopback server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest
from fake_runtime import FakeRuntime
from http_serving import OPERATOR, served
from tiny_models import tiny_config, write_drafter, write_target

from runtime.http_client import HttpRuntime
from runtime.interface import (
    ConfigRejected,
    EngineState,
    GenerateRequest,
    Job,
    JobProgress,
    JobRefused,
    RequestAdmitted,
    RequestFinished,
    RequestRejected,
    RoundStats,
    Runtime,
    SamplingParams,
    SnapshotUnknown,
    StatusChanged,
    TokensEmitted,
)
from runtime.local import LocalRuntime
from snapshots.serving import StoreKeeper


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target and a drafter for it."""
    root = tmp_path_factory.mktemp("contract")
    return write_target(root / "target"), write_drafter(root / "drafter", root / "target")


@pytest.fixture(params=["fake", "local", "http over fake", "http over local"])
async def runtime(
    request: pytest.FixtureRequest,
    folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Runtime]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    if "fake" in request.param:
        made: Runtime = FakeRuntime()
    else:
        config = tiny_config(*folders, mode="tree", tree_budget=8, max_tree_budget=16)
        local = LocalRuntime(config, keeper=StoreKeeper())
        await local.wait_ready()
        made = local
    if "http" in request.param:
        async with served(made) as url:
            attached = HttpRuntime(url, OPERATOR)
            yield attached
            await attached.aclose()
    else:
        yield made
    await made.aclose()


async def collect(runtime: Runtime, request: GenerateRequest) -> list:
    return [event async for event in runtime.generate(request)]


def ask(text: str = "abc", **sampling: object) -> GenerateRequest:
    return GenerateRequest(prompt=text, sampling=SamplingParams(**{"max_tokens": 12, **sampling}))


async def test_a_stream_is_admitted_then_tokens_then_finished(runtime: Runtime) -> None:
    events = await collect(runtime, ask())
    assert isinstance(events[0], RequestAdmitted)
    assert isinstance(events[-1], RequestFinished)
    assert all(isinstance(event, TokensEmitted) for event in events[1:-1])
    pieces = "".join(piece.text for event in events[1:-1] for piece in event.pieces)
    assert pieces + events[-1].tail == events[-1].text
    assert events[-1].stats.output_tokens == len(events[-1].token_ids) <= 12


async def test_it_implements_the_interface(runtime: Runtime) -> None:
    assert isinstance(runtime, Runtime)
    assert (await runtime.status()).state is EngineState.READY
    assert (await runtime.describe()).engine


async def test_leaving_a_stream_frees_its_slots(runtime: Runtime) -> None:
    async with aclosing(runtime.generate(ask(max_tokens=40))) as stream:
        async for event in stream:
            if isinstance(event, TokensEmitted):
                break
    await settle(lambda: idle(runtime))


async def test_cancel_ends_a_stream_with_its_reason(runtime: Runtime) -> None:
    async for event in runtime.generate(ask(max_tokens=40)):
        if isinstance(event, RequestAdmitted):
            assert await runtime.cancel(event.request_id)
        last = event
    assert isinstance(last, RequestFinished) and last.reason == "cancelled"
    assert not await runtime.cancel(last.request_id)


async def test_an_impossible_request_is_refused_before_any_event(runtime: Runtime) -> None:
    with pytest.raises(RequestRejected):
        await collect(runtime, ask("abc " * 4000))


async def test_an_old_revision_is_refused_and_says_who_changed_what(runtime: Runtime) -> None:
    plan = await runtime.preview({"tree_budget": 4})
    report = await runtime.apply({"tree_budget": 4}, plan.revision, author="first")
    assert report.revision > plan.revision
    with pytest.raises(ConfigRejected, match="first"):
        await runtime.apply({"tree_budget": 6}, plan.revision, author="second")
    assert (await runtime.status()).config["tree_budget"] == 4


async def test_a_wrong_field_or_value_is_refused_naming_it(runtime: Runtime) -> None:
    with pytest.raises(ConfigRejected, match="temperature"):
        await runtime.preview({"temperature": 9})
    with pytest.raises(ConfigRejected, match="tree_budgett"):
        await runtime.preview({"tree_budgett": 4})


async def test_a_field_that_needs_a_rebuild_is_planned_and_applied(runtime: Runtime) -> None:
    plan = await runtime.preview({"max_tree_budget": 24})
    assert [change.effect for change in plan.changes] == ["rebuild"]
    assert plan.allowed and "rebuilt" in plan.summary
    report = await runtime.apply({"max_tree_budget": 24}, plan.revision)
    assert report.outage_s is not None and report.failure is None
    assert (await runtime.status()).state is EngineState.READY
    assert (await runtime.describe()).max_tree_budget == 24
    assert (await collect(runtime, ask()))[-1].stats.output_tokens


async def test_watch_shows_rounds_and_changes_and_ends_cleanly(runtime: Runtime) -> None:
    seen: list = []

    async def look() -> None:
        async with aclosing(runtime.watch()) as events:
            async for event in events:
                seen.append(event)

    watching = asyncio.create_task(look())
    await asyncio.sleep(0.05)
    await collect(runtime, ask())
    plan = await runtime.preview({"temperature": 0.5})
    await runtime.apply({"temperature": 0.5}, plan.revision)
    await settle(lambda: any(isinstance(event, StatusChanged) for event in seen))
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert any(isinstance(event, RoundStats) for event in seen)


async def test_requests_are_listed_while_they_run_and_after(runtime: Runtime) -> None:
    during = None
    async for event in runtime.generate(ask(max_tokens=30)):
        if isinstance(event, TokensEmitted) and during is None:
            during = await runtime.requests()
    assert during and during[0].state in ("decoding", "finished")


JOB = {"prompts": [{"prompt": "abc"}], "modes": ["tree"], "temperatures": [0.0], "max_tokens": 6}


async def test_a_job_runs_to_its_end_with_progress_for_those_who_watch(runtime: Runtime) -> None:
    seen: list[JobProgress] = []

    async def look() -> None:
        async with aclosing(runtime.watch()) as events:
            async for event in events:
                if isinstance(event, JobProgress):
                    seen.append(event)

    watching = asyncio.create_task(look())
    await asyncio.sleep(0.05)
    job_id = await runtime.start_job("verify", JOB, "operator")
    await settle(lambda: any(event.job.over for event in seen), 60)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert {event.job.id for event in seen} == {job_id} and seen[-1].job.state == "done"
    (job,) = await runtime.jobs()
    assert (job.id, job.name, job.holder, job.state, job.progress) == (
        job_id,
        "verify",
        "operator",
        "done",
        1.0,
    )
    assert "no divergence" in job.text and job.result is not None and job.result["passed"]
    assert job.ended_at_s is not None and job.ended_at_s >= job.started_at_s
    assert not await runtime.cancel_job(job_id)


async def test_one_job_at_a_time_the_other_is_refused_naming_its_holder_and_it_can_be_cancelled(
    runtime: Runtime,
) -> None:
    job_id = await runtime.start_job("bench", {**JOB, "duration_s": 600, "repetitions": 100}, "somebody")
    with pytest.raises(JobRefused, match=f"{job_id}, started by somebody at .* is running"):
        await runtime.start_job("verify", JOB)
    assert await runtime.cancel_job(job_id)
    await settle(lambda: over(runtime, job_id))
    assert (await runtime.jobs())[0].state == "cancelled"
    await settle(lambda: idle(runtime))
    assert await runtime.start_job("verify", JOB) != job_id


async def test_a_job_of_a_wrong_kind_or_parameter_is_refused_naming_it(runtime: Runtime) -> None:
    with pytest.raises(ConfigRejected, match="kind = benhc: must be one of .* did you mean bench"):
        await runtime.start_job("benhc")
    with pytest.raises(ConfigRejected, match="patches"):
        await runtime.start_job("rollback", {"snapshot": "latest", "patches": True})
    with pytest.raises(ConfigRejected, match="looks like a secret: note line 2"):
        await runtime.start_job("snapshot", {"note": "fine\nHF_TOKEN=hf_" + "a1" * 17})
    with pytest.raises(SnapshotUnknown, match="no snapshot yet"):
        await runtime.start_job("rollback", {"snapshot": "none such"})
    with pytest.raises(ConfigRejected, match="repetitions = 0"):
        await runtime.start_job("bench", {"repetitions": 0})
    with pytest.raises(ConfigRejected, match="tree_budgets = 900: must be from 0 to max_tree_budget"):
        await runtime.start_job("bench", {"tree_budgets": [900]})
    with pytest.raises(ConfigRejected, match="concurrency = 99: must be from 1 to max_concurrency"):
        await runtime.start_job("bench", {"concurrency": [99]})
    assert await runtime.jobs() == ()


async def test_a_measuring_job_keeps_out_of_other_clients_way_unless_told_not_to(runtime: Runtime) -> None:
    async with aclosing(runtime.generate(ask(max_tokens=400, ignore_eos=True))) as stream:
        await anext(stream)
        with pytest.raises(
            JobRefused, match="1 request of other clients runs; wait for them or set under_load"
        ):
            await runtime.start_job("verify", JOB)
        assert await runtime.start_job("verify", {**JOB, "under_load": True})
        await settle(lambda: over(runtime, "verify-1"), 60)
    assert (await runtime.jobs())[0].state == "done"


async def test_a_measuring_job_stops_when_somebody_sends_a_request(runtime: Runtime) -> None:
    job_id = await runtime.start_job("bench", {**JOB, "duration_s": 600, "repetitions": 100})
    await collect(runtime, ask())
    await settle(lambda: over(runtime, job_id), 60)
    job = (await runtime.jobs())[0]
    assert job.state == "cancelled" and "stopped for 1 request of other clients" in job.text


async def ended(runtime: Runtime, kind: str, parameters: dict, author: str = "operator") -> Job:
    """A job at its end."""
    job_id = await runtime.start_job(kind, parameters, author)
    await settle(lambda: over(runtime, job_id), 120)
    return next(job for job in await runtime.jobs() if job.id == job_id)


async def test_what_runs_is_saved_read_compared_and_gone_back_to(runtime: Runtime) -> None:
    saved = await ended(runtime, "snapshot", {"label": "good", "note": "#1 best\r\n"})
    assert saved.state == "done" and saved.result is not None, saved.text
    before = (await runtime.status()).config
    await runtime.apply({"tree_budget": 4}, (await runtime.status()).revision, "operator")
    assert (await ended(runtime, "snapshot", {"label": "worse"})).state == "done"

    page = await runtime.snapshots.page()
    assert [each.label for each in page.snapshots] == ["worse", "good"] and not page.more
    assert not any(each.foreign for each in page.snapshots) and page.host and page.store
    assert [each.label for each in (await runtime.snapshots.page("#1 best")).snapshots] == ["good"]
    second = await runtime.snapshots.page(offset=1, limit=1)
    assert [each.label for each in second.snapshots] == ["good"] and second.offset == 1
    assert (await runtime.snapshots.page(limit=1)).more
    view = await runtime.snapshots.show("good")
    assert view.snapshot.note == "#1 best\r\n" and view.snapshot.commit == saved.result["snapshot"]["commit"]
    assert view.content["config"]["tree_budget"] == before["tree_budget"] and "config.toml" in view.files
    assert view.page.startswith("#1 best")
    found = await runtime.snapshots.diff("good")
    assert [each["name"] for each in found.settings] == ["tree_budget"]
    assert (found.before.label, found.after.label) == ("good", "worse")
    with pytest.raises(SnapshotUnknown, match="did you mean good"):
        await runtime.snapshots.show("goood")

    looked = await ended(runtime, "rollback", {"snapshot": "good", "dry_run": True})
    assert looked.result is not None and looked.result["change"] == {"tree_budget": before["tree_budget"]}
    assert looked.result["refused"] == [] and (await runtime.status()).config["tree_budget"] == 4
    done = await ended(runtime, "rollback", {"snapshot": "good", "measure": False})
    assert done.state == "done" and "rolled back to" in done.text and "not measured" in done.text
    assert (await runtime.status()).config == before
    assert (await runtime.status()).history[-1].author == "operator"
    rows = (await runtime.snapshots.page()).snapshots
    assert [each.kind for each in rows] == ["rollback", "auto", "save", "save"]
    assert rows[0].source == view.snapshot.commit and rows[1].tree_budget == 4
    assert rows[1].label == "before rollback to good" and rows[1].id in done.text


async def test_a_rollback_that_is_cancelled_while_it_measures_is_done_and_says_so(runtime: Runtime) -> None:
    await ended(runtime, "snapshot", {"label": "good"})
    await runtime.apply({"tree_budget": 4}, (await runtime.status()).revision)
    job_id = await runtime.start_job("rollback", {"snapshot": "good"})
    with pytest.raises(JobRefused, match=f"{job_id}, started by"):
        await runtime.start_job("verify", JOB)

    async def measures() -> bool:
        job = next(each for each in await runtime.jobs() if each.id == job_id)
        return job.over or job.text.startswith("measuring")

    await settle(measures, 120)
    await runtime.cancel_job(job_id)
    await settle(lambda: over(runtime, job_id), 60)
    (job,) = [each for each in await runtime.jobs() if each.id == job_id]
    assert job.state == "cancelled" and "rolled back to" in job.text and job.text.endswith("not measured")
    assert (await runtime.status()).config["tree_budget"] != 4


async def over(runtime: Runtime, job_id: str) -> bool:
    return next(job for job in await runtime.jobs() if job.id == job_id).over


async def test_draft_trees_are_given_while_a_request_runs_and_after(runtime: Runtime) -> None:
    request_id, during = "", ()
    async for event in runtime.generate(ask(max_tokens=30, ignore_eos=True)):
        request_id = event.request_id
        if isinstance(event, TokensEmitted) and not during:
            during = await runtime.trace(request_id)
    kept = await runtime.trace(request_id)
    assert during and kept[: len(during)] == during
    assert all(trace.nodes[0].accepted and len(trace.nodes) <= 1 + trace.tree_budget for trace in kept)
    assert await runtime.trace(request_id, kept[-2].round_index) == kept[-1:]
    assert await runtime.trace("no such request") == ()


async def idle(runtime: Runtime) -> bool:
    status = await runtime.status()
    return status.running == 0 and status.slots_used == 0


async def settle(condition: Callable, seconds: float = 5.0) -> None:
    """Waits until `condition` holds; fails after `seconds`."""
    for _ in range(int(seconds / 0.02)):
        value = condition()
        if await value if asyncio.iscoroutine(value) else value:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("did not settle")
