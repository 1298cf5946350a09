"""Flipping layouts under requests, and losing ranks: no request is lost, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest
from console_driver import console
from test_rebuild import EVERY, LONG, apply, running, through
from test_runtime_contract import ask, collect, idle, settle
from tiny_models import tiny_config, write_drafter, write_target

from console.dialogs import ConfirmDialog
from runtime.gang import Gang
from runtime.gang_step import pack
from runtime.interface import (
    ConfigRejected,
    EngineState,
    GenerateRequest,
    RequestFinished,
    SamplingParams,
    TokensEmitted,
)
from runtime.local import LocalRuntime

Start = Callable[..., Any]
SAMPLINGS = [{"temperature": 0.0}, {"temperature": 0.7, "seed": 11}]


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """A dense pair and one with experts."""
    root = tmp_path_factory.mktemp("flip")
    found = {}
    for family in ("llama", "qwen3_moe"):
        target = write_target(root / family, family)
        found[family] = target, write_drafter(root / f"{family}-drafter", target)
    return found


@pytest.fixture
async def start(pairs: dict[str, tuple[Path, Path]]) -> AsyncIterator[Start]:
    """Starts runtimes that carry every unfinished request over at once."""
    made: list[LocalRuntime] = []

    async def one(family: str = "llama", **settings: Any) -> LocalRuntime:
        target, drafter = pairs[family]
        fields = {"model": str(target), "drafter": str(drafter), "max_seq_len": 400, "rebuild_drain": 0}
        config = tiny_config(target, **(fields | settings))
        made.append(LocalRuntime(config))
        await made[-1].wait_ready()
        return made[-1]

    yield one
    for runtime in made:
        await runtime.aclose()


def gang_of(runtime: LocalRuntime) -> Gang:
    assert runtime._engine is not None
    return runtime._engine.models.target.gang  # type: ignore[attr-defined, no-any-return]


@pytest.mark.case("E7")
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(
    ("family", "layouts"), [("llama", ("tp2", "pp2", "single")), ("qwen3_moe", ("ep2", "tp2ep2", "pp2"))]
)
async def test_a_stream_over_flips_has_the_text_it_would_have_had(
    start: Start, family: str, layouts: tuple[str, ...], sampling: dict[str, Any]
) -> None:
    runtime = await start(family)
    wanted = {**LONG, **sampling}
    alone = (await collect(runtime, ask(**wanted)))[-1]
    events, reports = await through(runtime, ask(**wanted), *({"layout": layout} for layout in layouts))
    assert [report.carried for report in reports] == [1, 1, 1]
    assert all(report.failure is None and report.outage_s for report in reports)
    assert events[-1].token_ids == alone.token_ids and events[-1].text == alone.text
    assert events[-1].stats.continued == f"continued under {layouts[-1]}: near-ties may differ"
    assert (await runtime.status()).config["layout"] == layouts[-1]


@pytest.mark.case("A27")
async def test_what_a_target_cannot_have_is_refused_before_teardown_and_the_old_layout_serves(
    start: Start,
) -> None:
    runtime = await start()
    streaming = asyncio.create_task(collect(runtime, ask(**LONG)))
    await settle(lambda: running(runtime))
    plan = await runtime.preview({"layout": "ep2"})
    assert plan.changes[0].effect == "refused" and "splits experts" in plan.summary
    with pytest.raises(ConfigRejected, match="splits experts"):
        await runtime.apply({"layout": "ep2"}, plan.revision)
    end = (await streaming)[-1]
    assert end.reason == "length" and end.stats.continued is None


def kill(gang: Gang) -> None:
    os.kill(gang.pids[1], signal.SIGKILL)


def stop(gang: Gang) -> None:
    os.kill(gang.pids[1], signal.SIGSTOP)


def confuse(gang: Gang) -> None:
    """Rank 1 is told to do what it does not know."""
    gang._pipes[1].send_bytes((7).to_bytes(8, sys.byteorder) * 4)


def mismatch(gang: Gang) -> None:
    """Rank 1 runs a pass of two rows while rank 0 runs none, or one of other size."""
    import torch

    from runtime.attention import Segment, causal_mask

    rows = torch.arange(2)
    segment = Segment(0, 0, 2, causal_mask(2, torch.device("cpu")), rows)
    gang._pipes[1].send_bytes(pack(rows, rows, [segment], []))


FAULTS = [
    (kill, 0.3, "rank 1 was ended by SIGKILL"),
    (stop, 2.0, "hangs or is stopped"),
    (confuse, 0.3, "rank 1: ValueError: operation 7 is unknown"),
    (mismatch, 2.0, "rank"),
]
"""What happens to rank 1, within how many seconds it is seen on an idle machine, and what is said of it."""


@pytest.mark.parametrize("busy", [True, False], ids=["mid-step", "idle"])
async def test_a_lost_rank_brings_the_old_layout_back_and_loses_no_request(start: Start, busy: bool) -> None:
    runtime = await start()
    alone = (await collect(runtime, ask(**LONG)))[-1]
    for fault, limit_s, words in FAULTS:
        await apply(runtime, {"layout": "tp2"})
        await settle(lambda: idle(runtime))
        gang, pids = gang_of(runtime), gang_of(runtime).pids
        streaming = asyncio.create_task(collect(runtime, ask(**LONG))) if busy else None
        if busy:
            await settle(lambda: decoding(runtime), 60)
        began = time.monotonic()
        fault(gang)
        if fault is mismatch and not busy:
            # Rank 1 waits in a collective that rank 0 does not know of; the next pass of all meets another size.
            streaming = asyncio.create_task(collect(runtime, ask(**LONG)))
        while gang.lost is None:
            await asyncio.sleep(0.005)
        seen_s = time.monotonic() - began
        await settle(lambda: state_is(runtime, EngineState.DEGRADED), 120)
        status = await runtime.status()
        assert words in status.reason, (fault.__name__, status.reason)
        assert "single serves in place of tp2" in status.reason
        assert status.config["layout"] == "single" and status.errors
        if streaming is not None:
            end = (await streaming)[-1]
            assert end.token_ids == alone.token_ids and end.reason == "length"
        assert (await collect(runtime, ask(**LONG)))[-1].token_ids == alone.token_ids
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert seen_s < limit_s * patience(), fault.__name__
    await apply(runtime, {"layout": "tp2"})
    assert (await runtime.status()).state is EngineState.READY


def patience() -> float:
    """How many times slower than idle this machine may be just now."""
    return 1.0 + 2.0 * os.getloadavg()[0] / (os.cpu_count() or 1)


async def decoding(runtime: LocalRuntime) -> bool:
    return any(each.state == "decoding" and each.output_tokens > 5 for each in await runtime.requests())


async def state_is(runtime: LocalRuntime, state: EngineState) -> bool:
    return (await runtime.status()).state is state


@pytest.mark.case("A32")
async def test_a_rank_that_is_lost_while_it_loads_leaves_the_old_layout(start: Start) -> None:
    runtime = await start()
    change = asyncio.create_task(apply(runtime, {"layout": "pp2"}))
    while not (ranks := [each for each in children() if "rank" in name_of(each)]) and not change.done():
        await asyncio.sleep(0.001)
    for each in ranks[:1]:
        each.kill()
    report = await change
    assert report.failure is None or "SIGKILL" in report.failure
    assert (await collect(runtime, ask(**LONG)))[-1].reason == "length"


async def test_layouts_flip_by_key_while_text_streams(start: Start, tmp_path: Path) -> None:
    resource_tracker.ensure_running()  # as the console does before Textual takes stderr
    endless = write_target(tmp_path / "endless", eos_token_id=None, max_position_embeddings=16384)
    (endless / "generation_config.json").write_text("{}")
    limits = {"max_tokens": 16000, "max_seq_len": 16384, "max_concurrency": 1}
    runtime = await start(model=str(endless), drafter="none", prefix_reuse=False, **limits)
    messages = ({"role": "user", "content": "a"},)
    request = GenerateRequest(messages=messages, sampling=SamplingParams(max_tokens=400))
    alone = (await collect(runtime, request))[-1]
    async with console(runtime) as driven:
        await driven.ask("a")
        await driven.streaming()
        for layout, moves in (("tp2", ["down"]), ("pp2", ["down"] * 3), ("single", ["up"] * 4)):
            await driven.press("escape", "p", *moves, "enter")
            await settle(lambda: isinstance(driven.app.screen, ConfirmDialog), 60)
            await driven.press("y")
            await settle(lambda wanted=layout: layout_is(runtime, wanted), 120)
            assert driven.turn.stats is None, "the text still streams"
        shown = len(driven.turn.pieces)
        await settle(lambda: len(driven.turn.pieces) > shown + 3 or driven.turn.ended, 120)
        await driven.press("x")
        await settle(lambda: driven.turn.ended, 120)
        assert driven.turn.stats.continued == "continued under single: near-ties may differ"
        ids = tuple(piece.token_id for piece in driven.turn.pieces)
        shorter = min(len(ids), len(alone.token_ids))
        assert ids[:shorter] == alone.token_ids[:shorter]


async def layout_is(runtime: LocalRuntime, layout: str) -> bool:
    status = await runtime.status()
    return status.config["layout"] == layout and status.state is EngineState.READY


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.mark.case("A32")
async def test_flips_back_and_forth_leave_nothing_behind(start: Start) -> None:
    flips = 20 if os.environ.get("DDTREE_LONG") else 6
    runtime = await start(max_seq_len=1000)
    wanted = {"max_tokens": EVERY * (flips + 2), "ignore_eos": True, "temperature": 0.7, "seed": 3}
    alone = (await collect(runtime, ask(**wanted)))[-1]
    await apply(runtime, {"layout": "tp2"})
    await apply(runtime, {"layout": "single"})
    before = left()
    layouts = [{"layout": ("tp2", "single", "pp2", "single")[i % 4]} for i in range(flips)]
    events, reports = await through(runtime, ask(**wanted), *layouts)
    assert len(reports) == flips and all(report.failure is None for report in reports)
    assert isinstance(events[-1], RequestFinished) and events[-1].token_ids == alone.token_ids
    tokens = sum(len(event.pieces) for event in events if isinstance(event, TokensEmitted))
    assert tokens == len(alone.token_ids)
    await settle(lambda: idle(runtime))
    after = left()
    assert after[:3] == before[:3]
    assert after[3] - before[3] < 48 * 2**20, "resident memory stays"


def left() -> tuple[int, int, set[str], int]:
    """Processes, descriptors, files and resident bytes of this process."""
    gc.collect()
    folders = {each.name for each in Path(tempfile.gettempdir()).glob("ddtree-gang-*")}
    me = psutil.Process()
    return len(children()), me.num_fds(), folders, me.memory_info().rss


PARENT = """
import asyncio, sys
sys.path.insert(0, sys.argv[3])
from tiny_models import tiny_config
from runtime.local import LocalRuntime
from test_rebuild import LONG
from test_runtime_contract import ask

async def main():
    runtime = LocalRuntime(tiny_config(sys.argv[1], sys.argv[2], layout="pp2", max_seq_len=1000, max_tokens=900))
    await runtime.wait_ready()
    print(*runtime._engine.models.target.gang.pids, flush=True)
    while True:
        async for _ in runtime.generate(ask(**LONG)):
            pass

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.case("A32")
def test_ranks_end_with_a_killed_parent(pairs: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    here = Path(__file__).parent
    with subprocess.Popen(
        [sys.executable, str(script), *map(str, pairs["llama"]), str(here)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=here.parent,
        env={**os.environ, "PYTHONPATH": str(here.parent)},
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
        process.kill()
    began = time.monotonic()
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() - began < 1.0 * patience()
        time.sleep(0.01)
