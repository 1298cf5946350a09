"""LocalRuntime alone: it answers while loading, fails in words, and one broken step never ends it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from test_runtime_contract import ask, collect, folders, idle, settle  # noqa: F401  (a fixture)
from tiny_models import tiny_config

from runtime.interface import (
    ConfigRejected,
    EngineState,
    RequestFinished,
    RuntimeUnavailable,
    TokensEmitted,
)
from runtime.local import LocalRuntime


async def test_it_answers_while_loading_and_can_be_closed_at_once(folders: tuple[Path, Path]) -> None:  # noqa: F811
    runtime = LocalRuntime(tiny_config(*folders))
    status = await runtime.status()
    assert status.state is EngineState.LOADING and status.load_progress is not None
    assert (await runtime.describe()).speculation == "loading"
    with pytest.raises(RuntimeUnavailable, match="loading"):
        await collect(runtime, ask())
    await runtime.aclose()


async def test_a_configuration_that_cannot_load_fails_with_one_line(tmp_path: Path) -> None:
    runtime = LocalRuntime(tiny_config(tmp_path / "nothing-here"))
    with pytest.raises(ConfigRejected, match="nothing-here") as refused:
        await runtime.wait_ready()
    assert "\n" not in str(refused.value)
    assert (await runtime.status()).state is EngineState.FAILED
    await runtime.aclose()


async def test_a_failed_step_ends_its_requests_with_the_reason_and_serving_goes_on(
    folders: tuple[Path, Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = LocalRuntime(tiny_config(*folders))
    await runtime.wait_ready()
    import runtime.engine as engine_module

    def broken(*_: object) -> None:
        raise ArithmeticError("made to fail")

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "decode_round", broken)
        events = await collect(runtime, ask())
    assert isinstance(events[-1], RequestFinished)
    assert events[-1].reason == "error" and "made to fail" in str(events[-1].error)
    assert (await collect(runtime, ask()))[-1].reason in ("length", "stop")
    await settle(lambda: idle(runtime))
    assert "made to fail" in (await runtime.status()).errors[0]
    await runtime.aclose()


async def test_who_looks_at_the_requests_does_not_keep_plain_decoding_from_being_measured(
    folders: tuple[Path, Path],  # noqa: F811
) -> None:
    runtime = LocalRuntime(tiny_config(*folders))
    await runtime.wait_ready()
    deadline = time.monotonic() + 60
    while not (await runtime.status()).baselines:
        await runtime.requests()
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)
    assert {each.mode for each in (await runtime.status()).baselines} == {"off", "chain"}
    await runtime.aclose()


async def test_a_failed_measurement_of_plain_decoding_leaves_the_engine_serving(
    folders: tuple[Path, Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import runtime.calibrate as calibrate_module

    def broken(*_: object) -> None:
        raise MemoryError("made to fail")

    monkeypatch.setattr(calibrate_module, "measure_baselines", broken)
    runtime = LocalRuntime(tiny_config(*folders))
    await runtime.wait_ready()
    while not (await runtime.status()).errors:
        await asyncio.sleep(0.01)
    assert "measuring plain decoding" in (await runtime.status()).errors[0]
    assert (await collect(runtime, ask()))[-1].reason in ("length", "stop")
    assert (await runtime.status()).baselines == ()
    await runtime.aclose()


async def test_mode_and_budget_act_on_running_requests_and_temperature_on_later_ones(
    folders: tuple[Path, Path],  # noqa: F811
) -> None:
    runtime = LocalRuntime(tiny_config(*folders, mode="off", tree_budget=4, max_seq_len=400))
    await runtime.wait_ready()
    nodes: list[int] = []
    watching = asyncio.create_task(_nodes(runtime, nodes))
    await asyncio.sleep(0)
    flipped = False
    async for event in runtime.generate(ask(max_tokens=300, ignore_eos=True)):
        if isinstance(event, TokensEmitted) and not flipped:
            flipped = True
            plan = await runtime.preview({"mode": "tree", "temperature": 0.7})
            assert plan.unreached == 1
            await runtime.apply({"mode": "tree", "temperature": 0.7}, plan.revision)
        last = event
    assert isinstance(last, RequestFinished)
    assert last.stats.temperature == 0.0
    await settle(lambda: max(nodes, default=0) == 5)
    assert nodes[0] == 1
    assert (await collect(runtime, ask()))[-1].stats.temperature == 0.7
    watching.cancel()
    await runtime.aclose()


async def test_the_engine_never_blocks_the_callers_loop(folders: tuple[Path, Path]) -> None:  # noqa: F811
    runtime = LocalRuntime(tiny_config(*folders, max_seq_len=400))
    await runtime.wait_ready()
    running = asyncio.create_task(collect(runtime, ask(max_tokens=300, ignore_eos=True)))
    waits = []
    while not running.done():
        start = time.perf_counter()
        await asyncio.sleep(0.001)
        waits.append(time.perf_counter() - start)
    assert len(waits) > 20, "the loop ran beside the engine"
    await runtime.aclose()


async def _nodes(runtime: LocalRuntime, nodes: list[int]) -> None:
    async for event in runtime.watch():
        if event.kind == "round":
            nodes.append(event.nodes)


async def test_requests_that_come_while_it_closes_are_answered(folders: tuple[Path, Path]) -> None:  # noqa: F811
    runtime = LocalRuntime(tiny_config(*folders))
    await runtime.wait_ready()
    closing = asyncio.create_task(runtime.aclose())
    late = [asyncio.create_task(collect(runtime, ask())) for _ in range(3)]
    async with asyncio.timeout(5):
        outcomes = await asyncio.gather(*late, return_exceptions=True)
        await closing
    assert all(isinstance(each, RuntimeUnavailable | list) for each in outcomes)


async def test_a_thread_that_cannot_go_on_says_so_and_leaves_nobody_waiting(
    folders: tuple[Path, Path],  # noqa: F811
) -> None:
    runtime = LocalRuntime(tiny_config(*folders, max_seq_len=1000))
    await runtime.wait_ready()
    streaming = asyncio.create_task(collect(runtime, ask(max_tokens=900, ignore_eos=True)))

    async def running() -> bool:
        return (await runtime.status()).running > 0

    await settle(running)

    def broken(_held: object) -> None:
        raise ArithmeticError("made to fail")

    runtime._post(broken)
    async with asyncio.timeout(30):
        end = (await streaming)[-1]
        assert isinstance(end, RequestFinished)
        assert end.reason == "error" and "made to fail" in str(end.error)
        status = await runtime.status()
        assert status.state is EngineState.FAILED and "made to fail" in status.reason
        for call in (collect(runtime, ask()), runtime.apply({"tree_budget": 4}, status.revision)):
            with pytest.raises(RuntimeUnavailable, match="made to fail"):
                await call
        await runtime.aclose()


@pytest.mark.parametrize("limits", [{"max_seq_len": 32}, {"kv_slots": 96, "max_tree_budget": 8}])
async def test_small_limits_do_not_keep_it_from_starting(
    folders: tuple[Path, Path],  # noqa: F811
    limits: dict[str, int],
) -> None:
    runtime = LocalRuntime(tiny_config(*folders, tree_budget="auto", **limits))
    await runtime.wait_ready()
    assert (await collect(runtime, ask(max_tokens=4)))[-1].reason in ("length", "stop")
    await runtime.aclose()
