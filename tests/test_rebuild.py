"""Rebuilding the engine under its requests: their text stays what it would have been, and a failure changes nothing."""

from __future__ import annotations

import asyncio
import gc
import shutil
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from test_runtime_contract import ask, collect, idle, settle
from tiny_models import tiny_config, write_target

from runtime import garbage
from runtime.interface import (
    ChangeReport,
    ConfigRejected,
    EngineState,
    GenerateRequest,
    JobRefused,
    RequestFinished,
    RuntimeUnavailable,
    TokensEmitted,
)
from runtime.local import LocalRuntime

Start = Callable[..., Any]
LONG: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True}
EVERY = 12
"""Tokens between two changes in the middle of a stream."""


@pytest.fixture
async def start(tiny_folder: Path) -> AsyncIterator[Start]:
    """Starts runtimes over the tiny models that carry every unfinished request over at once."""
    made: list[LocalRuntime] = []

    async def one(**settings: Any) -> LocalRuntime:
        fields = {"drafter": str(tiny_folder / "drafter"), "max_seq_len": 400, "rebuild_drain": 0} | settings
        config = tiny_config(tiny_folder / "target", **fields)
        made.append(LocalRuntime(config))
        await made[-1].wait_ready()
        return made[-1]

    yield one
    for runtime in made:
        await runtime.aclose()


async def apply(runtime: LocalRuntime, change: dict[str, Any]) -> ChangeReport:
    plan = await runtime.preview(change)
    return await runtime.apply(change, plan.revision, "a test")


async def through(
    runtime: LocalRuntime,
    request: GenerateRequest,
    *changes: dict[str, Any],
    then: Callable[[], object] = lambda: None,
) -> tuple[list[Any], list[ChangeReport]]:
    """The events of `request` with each change applied in the middle of it, and `then` called after the last."""
    events, reports, tokens = [], [], 0
    waiting = list(changes)
    async for event in runtime.generate(request):
        events.append(event)
        tokens += len(event.pieces) if isinstance(event, TokensEmitted) else 0
        if waiting and tokens >= EVERY * (1 + len(reports)):
            reports.append(await apply(runtime, waiting.pop(0)))
            if not waiting:
                then()
    return events, reports


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.7, "seed": 11, "top_k": 20}])
@pytest.mark.parametrize("mode", ["off", "tree"])
async def test_a_stream_over_a_rebuild_has_the_text_it_would_have_had(
    start: Start, sampling: dict[str, Any], mode: str
) -> None:
    runtime = await start(mode=mode)
    wanted = {**LONG, **sampling, "frequency_penalty": 0.3, "logprobs": 2}
    alone = (await collect(runtime, ask(**wanted)))[-1]
    events, reports = await through(runtime, ask(**wanted), {"max_tree_budget": 32}, {"max_tree_budget": 16})
    last = events[-1]
    assert [report.carried for report in reports] == [1, 1]
    assert last.token_ids == alone.token_ids and last.text == alone.text
    pieces = [piece for event in events if isinstance(event, TokensEmitted) for piece in event.pieces]
    assert "".join(piece.text for piece in pieces) + last.tail == last.text
    assert all(piece.logprob is not None for piece in pieces)
    assert [event.kind for event in events].count("admitted") == 1
    assert last.stats.continued == "continued under max_tree_budget 16"
    assert last.stats.output_tokens == LONG["max_tokens"]
    await settle(lambda: idle(runtime))


async def test_a_change_that_rounds_otherwise_says_so_to_those_it_interrupts(start: Start) -> None:
    runtime = await start()
    events, _ = await through(runtime, ask(**LONG), {"linear": "auto"})
    assert events[-1].stats.continued == "continued under linear auto: near-ties may differ"
    assert (await collect(runtime, ask()))[-1].stats.continued is None


async def test_what_waits_stays_in_its_order_and_what_is_parked_can_be_seen_and_cancelled(
    start: Start,
) -> None:
    runtime = await start(max_concurrency=1)
    asked = [asyncio.create_task(collect(runtime, ask(f"{i}", **LONG))) for i in range(4)]
    await settle(lambda: waiting(runtime, 3))
    change = asyncio.create_task(apply(runtime, {"max_tree_budget": 32}))
    await settle(lambda: state_is(runtime, EngineState.REBUILDING))
    listed = {each.request_id: each.state for each in await runtime.requests()}
    assert list(listed.values()) == ["decoding", "queued", "queued", "queued"]
    first, _, third, _ = listed
    assert await runtime.cancel(third)
    assert await runtime.cancel(first)
    report = await change
    assert report.carried <= 1
    ends = [(await task)[-1] for task in asked]
    assert [end.reason for end in ends] == ["cancelled", "length", "cancelled", "length"]
    assert 0 < len(ends[0].token_ids) < LONG["max_tokens"]
    assert ends[1].stats.continued is None


async def waiting(runtime: LocalRuntime, count: int) -> bool:
    status = await runtime.status()
    return status.waiting == count and status.running == 1


async def state_is(runtime: LocalRuntime, state: EngineState) -> bool:
    return (await runtime.status()).state is state


async def test_what_comes_meanwhile_waits_or_is_told_when_to_come_back(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = await start()
    hold = hold_builds(monkeypatch)
    change = asyncio.create_task(apply(runtime, {"max_tree_budget": 32}))
    await settle(lambda: state_is(runtime, EngineState.REBUILDING))
    patient = asyncio.create_task(collect(runtime, ask()))
    await settle(lambda: waits(runtime))
    with pytest.raises(ConfigRejected, match="a test has the engine rebuilt"):
        await runtime.apply({"temperature": 0.5}, (await runtime.status()).revision)
    hold.set()
    await change
    assert (await patient)[-1].stats.output_tokens

    await apply(runtime, {"queue_timeout": 0.1})
    hold = hold_builds(monkeypatch)
    change = asyncio.create_task(apply(runtime, {"max_tree_budget": 16}))
    await settle(lambda: state_is(runtime, EngineState.REBUILDING))
    with pytest.raises(RuntimeUnavailable, match="rebuilding") as refused:
        await collect(runtime, ask())
    assert refused.value.retry_after_s
    hold.set()
    await change


async def waits(runtime: LocalRuntime) -> bool:
    return (await runtime.status()).waiting == 1


def hold_builds(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes engines wait, before they are built, for the event that is returned."""
    import threading

    import runtime.rebuilder as rebuilder
    from runtime.rebuild import build

    event = threading.Event()

    def held(*arguments: Any) -> Any:
        assert event.wait(60)
        return build(*arguments)

    monkeypatch.setattr(rebuilder, "build", held)
    return event


async def test_a_job_and_a_rebuild_keep_each_other_out_and_say_who_holds_the_engine(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = await start()
    job = await runtime.start_job("bench", {"duration_s": 600.0}, "somebody")
    plan = await runtime.preview({"max_tree_budget": 32})
    assert not plan.allowed and f"no rebuild now: {job}, started by somebody" in plan.summary
    with pytest.raises(ConfigRejected, match="started by somebody"):
        await runtime.apply({"max_tree_budget": 32}, plan.revision)
    assert (await runtime.preview({"temperature": 0.5})).allowed
    assert await runtime.cancel_job(job)
    await settle(lambda: no_job(runtime))

    hold = hold_builds(monkeypatch)
    change = asyncio.create_task(apply(runtime, {"layout": "tp2"}))
    await settle(lambda: reason_has(runtime, "for a test: loading tp2"))
    with pytest.raises(JobRefused, match=r"bench does not start: a test has the engine rebuilt \(layout"):
        await runtime.start_job("bench", {"duration_s": 600.0})
    with pytest.raises(ConfigRejected, match="a test has the engine rebuilt"):
        await runtime.apply({"layout": "pp2"}, plan.revision)
    hold.set()
    await runtime.aclose()
    outcome = (await asyncio.gather(change, return_exceptions=True))[0]
    assert isinstance(outcome, RuntimeUnavailable) or "closed" in str(outcome.failure)


async def no_job(runtime: LocalRuntime) -> bool:
    return not runtime.job_board.holder


async def reason_has(runtime: LocalRuntime, words: str) -> bool:
    return words in (await runtime.status()).reason


async def test_what_cannot_be_is_refused_before_anything_is_torn_down(start: Start, tmp_path: Path) -> None:
    runtime = await start()
    plan = await runtime.preview({"drafter": str(tmp_path / "nothing")})
    assert not plan.allowed and plan.changes[0].effect == "refused"
    assert "nothing" in plan.summary
    with pytest.raises(ConfigRejected, match="nothing"):
        await runtime.apply({"drafter": str(tmp_path / "nothing")}, plan.revision)
    assert (await runtime.preview({"max_seq_len": 5000})).changes[0].effect == "refused"


async def test_where_the_engine_does_not_come_up_the_one_before_goes_on(
    start: Start, tiny_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_folder / "drafter", tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no weights")
    runtime = await start()
    before = await runtime.status()
    alone = (await collect(runtime, ask(**LONG)))[-1]
    events, (report,) = await through(runtime, ask(**LONG), {"drafter": str(tmp_path / "broken")})
    assert report.failure and "model.safetensors" in report.failure
    assert report.applied == () and report.revision == before.revision
    assert events[-1].token_ids == alone.token_ids
    after = await runtime.status()
    assert after.state is EngineState.READY and after.config["drafter"] == before.config["drafter"]
    assert (await collect(runtime, ask()))[-1].stats.output_tokens


async def test_a_change_of_model_lets_accepted_requests_finish_under_the_old_one(
    start: Start, tmp_path: Path
) -> None:
    runtime = await start(drafter="none", max_concurrency=1)
    alone = (await collect(runtime, ask(**LONG)))[-1]
    other = write_target(tmp_path / "other", "qwen3", seed=5)
    asked = [asyncio.create_task(collect(runtime, ask(**LONG))) for _ in range(2)]
    await settle(lambda: waiting(runtime, 1))
    report = await apply(runtime, {"model": str(other)})
    assert report.carried == 0 and report.failure is None
    for task in asked:
        end = (await task)[-1]
        assert end.token_ids == alone.token_ids and end.stats.continued is None
    assert (await runtime.describe()).architecture == "Qwen3ForCausalLM"
    assert (await collect(runtime, ask(**LONG)))[-1].token_ids != alone.token_ids


async def test_closing_ends_a_rebuild_and_answers_everybody(start: Start) -> None:
    runtime = await start()
    asked = asyncio.create_task(collect(runtime, ask(**LONG)))
    await settle(lambda: running(runtime))
    change = asyncio.create_task(apply(runtime, {"max_tree_budget": 32}))
    await settle(lambda: state_is(runtime, EngineState.REBUILDING))
    await runtime.aclose()
    outcomes = await asyncio.gather(asked, change, return_exceptions=True)
    assert isinstance(outcomes[0], list) and isinstance(outcomes[0][-1], RequestFinished)
    assert isinstance(outcomes[1], ChangeReport | RuntimeUnavailable)


async def running(runtime: LocalRuntime) -> bool:
    return (await runtime.status()).running == 1


async def test_the_expected_outage_is_the_last_measured_load(start: Start) -> None:
    runtime = await start()
    assert (await runtime.preview({"max_tree_budget": 32})).outage_s is None
    report = await apply(runtime, {"max_tree_budget": 32})
    back = await runtime.preview({"max_tree_budget": 64})
    assert back.outage_s is not None and back.outage_s > 0
    assert report.outage_s is not None and 0 < report.outage_s < 60


def test_what_a_process_keeps_out_of_collections_is_given_back_with_its_engine():
    """A console keeps all that was loaded out of them; an engine in a cycle must not stay for ever by that."""

    class Held:
        def __init__(self) -> None:
            self.itself = self

    held = weakref.ref(Held())
    gc.freeze()
    try:
        gc.collect()
        assert held() is not None
        garbage.collect()
        assert held() is None and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
