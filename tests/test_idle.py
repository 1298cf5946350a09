"""Plain and chain decoding are measured anew when nobody is there, and that measuring gives way and leaves no trace."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from test_runtime_contract import ask, collect, settle
from tiny_models import tiny_config

import runtime.calibrate as calibrate
import runtime.idle as idle
from runtime.engine import Engine
from runtime.idle import IdleClock
from runtime.interface import Baseline, RoundStats, TokensEmitted
from runtime.local import LocalRuntime


def test_the_first_time_is_at_once_then_seldom_and_only_after_a_quiet_while() -> None:
    clock = IdleClock()
    assert clock.rest_s(5.0, 900.0, engaged=True) <= 0
    clock.measured(10.0, took_s=1.0, interval=900.0)
    assert clock.rest_s(20.0, 900.0, engaged=False) == pytest.approx(890.0)
    clock.worked_at = 1000.0
    assert clock.rest_s(1001.0, 900.0, engaged=False) == pytest.approx(idle.QUIET_S - 1.0)
    assert clock.rest_s(1020.0, 900.0, engaged=False) <= 0
    assert clock.rest_s(1020.0, 900.0, engaged=True) > 0, "a job has the engine"
    assert clock.rest_s(1020.0, 0.0, engaged=False) == math.inf, "not wanted"
    clock.gave_way(1020.0)
    assert clock.rest_s(1021.0, 900.0, engaged=False) > 0


def test_what_is_slow_to_measure_is_measured_less_often_and_what_fails_no_more() -> None:
    clock = IdleClock()
    clock.measured(0.0, took_s=60.0, interval=900.0)
    assert clock.due_at == pytest.approx(60.0 / idle.SHARE)
    clock.failed()
    assert clock.rest_s(1e9, 900.0, engaged=False) == math.inf


@pytest.fixture
async def runtime(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalRuntime]:
    """One that measures as often as it can."""
    monkeypatch.setattr(idle, "QUIET_S", 0.02)
    monkeypatch.setattr(idle, "SHARE", 1.0)
    made = LocalRuntime(
        tiny_config(
            tiny_folder / "target",
            tiny_folder / "drafter",
            baseline_interval=0.01,
            max_seq_len=400,
            mode="tree",
        )
    )
    await made.wait_ready()
    yield made
    await made.aclose()


async def later_than(runtime: LocalRuntime, moment: float) -> tuple[Baseline, ...]:
    """The baselines once they were measured after `moment`."""
    await settle(lambda: bool(runtime._baselines) and runtime._baselines[0].measured_at_s > moment)
    return (await runtime.status()).baselines


async def test_an_idle_engine_is_measured_again_and_again_and_its_rounds_are_nobodys(
    runtime: LocalRuntime,
) -> None:
    rounds: list[RoundStats] = []

    async def watch() -> None:
        async for event in runtime.watch():
            if isinstance(event, RoundStats):
                rounds.append(event)

    watching = asyncio.create_task(watch())
    first = (await later_than(runtime, 0.0))[0].measured_at_s
    answer = await collect(runtime, ask())
    seen = answer[-1].stats.rounds
    await settle(lambda: len(rounds) == seen)
    second = (await later_than(runtime, time.time()))[0].measured_at_s
    assert second > first
    found = await later_than(runtime, second)
    assert {each.mode for each in found} == {"off", "chain"} and all(each.tok_s > 0 for each in found)
    assert "host load" in found[0].conditions
    assert len(rounds) == seen, "measuring publishes no rounds"
    await collect(runtime, ask())
    await settle(lambda: len(rounds) > seen)
    indices = [each.index for each in rounds]
    assert indices == list(range(indices[0], indices[0] + len(indices))), "nor leaves a gap in their numbers"
    assert {each.client for each in await runtime.requests()} == {"local"}
    watching.cancel()


async def test_it_does_not_begin_beside_a_request_nor_beside_a_job(
    runtime: LocalRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    await later_than(runtime, 0.0)
    busy: list[bool] = []
    beside: list[bool] = []
    real = calibrate.measure_baselines

    def measured(engine: Any, interrupted: Callable[[], bool]) -> Any:
        busy.append(engine.busy)
        beside.append(bool(runtime.job_board.holder))
        return real(engine, interrupted)

    monkeypatch.setattr(calibrate, "measure_baselines", measured)
    async for event in runtime.generate(ask(max_tokens=200, ignore_eos=True)):
        if isinstance(event, TokensEmitted):
            await asyncio.sleep(0.001)
    job = await runtime.start_job(
        "bench", {"prompts": [{"prompt": "abc"}], "max_tokens": 8, "repetitions": 2}
    )
    while not next(each for each in await runtime.jobs() if each.id == job).over:
        await asyncio.sleep(0.01)
    assert (await runtime.jobs())[0].state == "done", (await runtime.jobs())[0].text
    await later_than(runtime, time.time())
    assert busy and not any(busy)
    assert sum(beside) <= 1, (
        "one may have been about to begin as the job came, and gave way to its first request"
    )


async def test_a_request_that_comes_stops_it_at_once_and_the_figures_before_stay(
    runtime: LocalRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await later_than(runtime, 0.0)
    real, begun, outcomes = calibrate.measure_baselines, asyncio.Event(), []
    loop = asyncio.get_running_loop()

    def measured(engine: Any, interrupted: Callable[[], bool]) -> Any:
        asked = 0

        def at_the_fifth() -> bool:
            nonlocal asked
            asked += 1
            if asked == 5:  # in the middle of a measurement: somebody comes
                loop.call_soon_threadsafe(begun.set)
                deadline = time.monotonic() + 60
                while not runtime._acts and time.monotonic() < deadline:
                    time.sleep(0.001)
            return interrupted()

        outcomes.append((real(engine, at_the_fifth), asked, engine.busy))
        monkeypatch.setattr(calibrate, "measure_baselines", real)
        return outcomes[-1][0]

    monkeypatch.setattr(calibrate, "measure_baselines", measured)
    await asyncio.wait_for(begun.wait(), 60)
    known = (await runtime.status()).baselines
    answer = await collect(runtime, ask())
    assert answer[-1].reason in ("length", "stop")
    assert outcomes[0] == (None, 5, False), "it left at once, and left nothing in the engine"
    assert known[0].measured_at_s >= before[0].measured_at_s
    await later_than(runtime, known[0].measured_at_s)


async def test_it_can_be_switched_off_and_on_while_it_serves(runtime: LocalRuntime) -> None:
    await later_than(runtime, 0.0)
    revision = (await runtime.status()).revision
    await runtime.apply({"baseline_interval": 0}, revision)
    assert runtime._rest_s == math.inf
    off = (await runtime.status()).baselines[0].measured_at_s
    await collect(runtime, ask())
    await runtime.apply({"baseline_interval": 0.01}, revision + 1)
    await later_than(runtime, off)


async def test_an_engine_with_one_mode_for_all_requests_is_not_measured_and_its_thread_rests(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "modes_by_request", False)
    measuring, turns = LocalRuntime._measure_baselines, 0

    def counted(self: LocalRuntime, engine: Engine) -> None:
        nonlocal turns
        turns += 1
        measuring(self, engine)

    monkeypatch.setattr(LocalRuntime, "_measure_baselines", counted)
    runtime = LocalRuntime(tiny_config(tiny_folder / "target"))
    await runtime.wait_ready()
    await collect(runtime, ask())
    await asyncio.sleep(0.2)
    assert turns <= 1
    await runtime.aclose()
