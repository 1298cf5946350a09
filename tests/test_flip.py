"""Flipping layouts under requests, and losing ranks: no request is lost, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import statistics
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
from test_rebuild import EVERY, LONG, apply, hold_builds, reason_has, running, through
from test_runtime_contract import ask, collect, idle, settle
from tiny_models import tiny_config, write_drafter, write_target

from console.dialogs import ConfirmDialog
from runtime.gang import SLICE_S, Gang, _Patience
from runtime.gang_step import pack
from runtime.interface import (
    ChangeReport,
    ConfigRejected,
    EngineState,
    GenerateRequest,
    RuntimeUnavailable,
    SamplingParams,
)
from runtime.local import LocalRuntime

Start = Callable[..., Any]
LONG_FORM = bool(os.environ.get("DDTREE_LONG"))
SAMPLINGS = [{"temperature": 0.0}, {"temperature": 0.7, "seed": 11}]
MODES = ("off", "chain", "tree")
FLIPS = {
    "llama": ("tp2", "pp2", "single"),
    "qwen3": ("pp2", "tp2", "single"),
    "qwen3_moe": ("tp2", "ep2", "tp2ep2", "pp2", "single"),
}


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """A target of each family and a drafter for it."""
    root = tmp_path_factory.mktemp("flip")
    found = {}
    for family in FLIPS:
        target = write_target(root / family, family)
        found[family] = target, write_drafter(root / f"{family}-drafter", target)
    return found


@pytest.fixture
async def start(pairs: dict[str, tuple[Path, Path]]) -> AsyncIterator[Start]:
    """Starts runtimes that end the engine before they build another one, and carry every request over at once."""
    made: list[LocalRuntime] = []

    async def one(family: str = "llama", **settings: Any) -> LocalRuntime:
        target, drafter = pairs[family]
        fields = {"model": str(target), "drafter": str(drafter), "max_seq_len": 400}
        config = tiny_config(target, **(fields | {"rebuild_drain": 0, "rebuild_ahead": False} | settings))
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
@pytest.mark.parametrize("family", FLIPS)
async def test_streams_of_every_mode_over_flips_have_the_text_they_would_have_had(
    start: Start, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [(mode, sampling) for mode in MODES for sampling in SAMPLINGS]
    runtime = await start(family, max_concurrency=len(kinds), kv_slots=(len(kinds) + 1) * 480)
    length = {"max_tokens": 380, "ignore_eos": True}
    alone = [(await collect(runtime, ask(**length, **sampling)))[-1] for sampling in SAMPLINGS]
    wanted = [ask(**length, **sampling).model_copy(update={"mode": mode}) for mode, sampling in kinds]
    slow_down(runtime, monkeypatch)
    others = [asyncio.create_task(collect(runtime, request)) for request in wanted[1:]]
    changes = [{"layout": layout} for layout in FLIPS[family]]
    events, reports = await through(runtime, wanted[0], *changes, then=monkeypatch.undo)
    ends = [events[-1], *[(await each)[-1] for each in others]]
    assert [report.carried for report in reports] == [len(kinds)] * len(changes)
    assert all(report.failure is None and report.outage_s for report in reports)
    for (mode, sampling), end in zip(kinds, ends, strict=True):
        expected = alone[SAMPLINGS.index(sampling)]
        assert end.token_ids == expected.token_ids and end.text == expected.text, (mode, sampling)
        assert end.stats.continued == "continued under single: near-ties may differ"
    assert (await runtime.status()).config["layout"] == "single"


async def test_the_next_layout_is_built_while_this_one_serves(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = await start(rebuild_ahead=True, max_seq_len=1000)
    endless = {**LONG, "max_tokens": 900}
    alone = (await collect(runtime, ask(**endless)))[-1]
    slow_down(runtime, monkeypatch)
    hold = hold_builds(monkeypatch)
    streaming = asyncio.create_task(collect(runtime, ask(**endless)))
    await settle(lambda: decoding(runtime), 60)
    plan = await runtime.preview({"layout": "tp2"})
    assert plan.outage_s is not None, (
        "loading is no part of the pause, so it can be told before the first time"
    )
    assert plan.changes[0].note == "the engine is built while the one before it serves"
    change = asyncio.create_task(runtime.apply({"layout": "tp2"}, plan.revision, "a test"))
    await settle(lambda: reason_has(runtime, "loading tp2; serving"))
    before = (await runtime.requests())[0]
    await settle(lambda: longer(runtime, before.output_tokens + 5), 60)
    status = await runtime.status()
    assert status.state is EngineState.READY and status.config["layout"] == "single" and not change.done()
    hold.set()
    report = await change
    assert report.failure is None and report.carried == 1 and report.outage_s
    monkeypatch.undo()
    end = (await streaming)[-1]
    assert end.token_ids == alone.token_ids
    assert end.stats.continued == "continued under tp2: near-ties may differ"


async def longer(runtime: LocalRuntime, tokens: int) -> bool:
    return any(each.state == "decoding" and each.output_tokens > tokens for each in await runtime.requests())


def slow_down(runtime: LocalRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a stream of a tiny model last longer than all flips of a test take on a busy machine."""
    step = runtime._step

    def paced(engine: Any) -> None:
        time.sleep(0.08)
        step(engine)

    monkeypatch.setattr(runtime, "_step", paced)


async def test_closing_ends_an_engine_that_is_built_ahead(start: Start) -> None:
    runtime = await start(rebuild_ahead=True)
    change = asyncio.create_task(apply(runtime, {"layout": "tp2"}))
    await settle(lambda: reason_has(runtime, "loading tp2"))
    await runtime.aclose()
    outcome = (await asyncio.gather(change, return_exceptions=True))[0]
    assert isinstance(outcome, RuntimeUnavailable) or outcome.failure == "closed while loading"
    assert not [each for each in children() if "ddtree rank" in name_of(each)]


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


def kill(gang: Gang, rank: int) -> None:
    os.kill(gang.pids[rank], signal.SIGKILL)


def stop(gang: Gang, rank: int) -> None:
    os.kill(gang.pids[rank], signal.SIGSTOP)


def test_a_stopped_rank_is_noticed_beside_one_that_spins() -> None:
    """As ranks on GPUs do, in a collective that the other one never joins."""
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    stopped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        patience = _Patience([spinning.pid, stopped.pid], stall_s=0.3, limit_s=600.0)
        assert not patience.over()
        os.kill(stopped.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while not patience.over():
            assert time.monotonic() < deadline, "a rank that is stopped goes unnoticed"
            time.sleep(SLICE_S)
    finally:
        for process in (spinning, stopped):
            process.kill()
            process.wait()


def confuse(gang: Gang, rank: int) -> None:
    """A rank is told to do what it does not know."""
    gang._pipes[rank].send_bytes((7).to_bytes(8, sys.byteorder) * 4)


def mismatch(gang: Gang, rank: int) -> None:
    """A rank runs a pass of two rows while the other one runs none, or one of other size."""
    import torch

    from runtime.attention import Segment, causal_mask

    rows = torch.arange(2)
    segment = Segment(0, 0, 2, causal_mask(2, torch.device("cpu")), rows)
    gang._pipes[rank].send_bytes(pack(rows, rows, [segment], []))


FAULTS = [
    (kill, 0.3, "rank {} was ended by SIGKILL"),
    (stop, 2.0, "hangs or is stopped"),
    (confuse, 0.3, "rank {}: ValueError: operation 7 is unknown"),
    (mismatch, 2.0, "rank"),
]
"""What happens to a rank, within how many seconds it is seen on an idle machine, and what is said of it."""
PROMPTS = ("abc", "the cat", "zz")
"""Two run, one waits."""


LOSSES = [(True, "tp2", 1), (False, "pp2", 0)]
"""In the middle of a pass or idle, the layout, and the rank it happens to."""
if LONG_FORM:
    LOSSES += [(False, "tp2", 1), (True, "pp2", 0)]


@pytest.mark.parametrize(("busy", "layout", "rank"), LOSSES)
async def test_a_lost_rank_brings_the_old_layout_back_and_loses_no_request(
    start: Start, busy: bool, layout: str, rank: int
) -> None:
    runtime = await start(max_concurrency=2)
    alone = [(await collect(runtime, ask(text, **LONG)))[-1].token_ids for text in PROMPTS]

    def streams() -> list[asyncio.Task[list[Any]]]:
        return [asyncio.create_task(collect(runtime, ask(text, **LONG))) for text in PROMPTS]

    for fault, limit_s, words in FAULTS:
        await apply(runtime, {"layout": layout})
        await settle(lambda: idle(runtime))
        gang, pids = gang_of(runtime), gang_of(runtime).pids
        streaming = streams() if busy else []
        if busy:
            await settle(lambda: decoding(runtime), 60)
        began = time.monotonic()
        fault(gang, rank)
        if fault is mismatch and not busy:
            # The rank waits in a collective that the other does not know of; the next pass of all meets another size.
            streaming = streams()
        while gang.lost is None:
            await asyncio.sleep(0.005)
        seen_s = time.monotonic() - began
        await settle(lambda: state_is(runtime, EngineState.DEGRADED), 120)
        tell(f"{fault.__name__}, {'mid-step' if busy else 'idle'}, {layout}: seen after {seen_s:.2f} s")
        status = await runtime.status()
        seen = words.format(rank) in status.reason or "by peer" in status.reason
        assert seen, (fault.__name__, status.reason)
        assert f"single serves in place of {layout}" in status.reason
        assert status.config["layout"] == "single" and status.errors
        ends = [(await each)[-1] for each in streaming]
        assert all(end.reason == "length" for end in ends)
        assert not ends or [end.token_ids for end in ends] == alone
        assert (await collect(runtime, ask(PROMPTS[0], **LONG)))[-1].token_ids == alone[0]
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert seen_s < limit_s * patience(), fault.__name__
    await apply(runtime, {"layout": layout})
    assert (await runtime.status()).state is EngineState.READY


def tell(line: str) -> None:
    """Prints a figure of the long form."""
    if LONG_FORM:
        print(f"\n{line}", end="", flush=True)


def patience() -> float:
    """How many times slower than idle this machine may be just now."""
    return 1.0 + 2.0 * os.getloadavg()[0] / (os.cpu_count() or 1)


async def decoding(runtime: LocalRuntime) -> bool:
    return any(each.state == "decoding" and each.output_tokens > 5 for each in await runtime.requests())


async def state_is(runtime: LocalRuntime, state: EngineState) -> bool:
    return (await runtime.status()).state is state


@pytest.mark.case("A32")
@pytest.mark.parametrize("ahead", [False, True])
async def test_a_rank_that_is_lost_while_it_loads_leaves_the_old_layout(start: Start, ahead: bool) -> None:
    runtime = await start(rebuild_ahead=ahead)
    change = asyncio.create_task(apply(runtime, {"layout": "pp2"}))
    while not (ranks := forked_ranks()) and not change.done():
        await asyncio.sleep(0.001)
    for each in ranks[:1]:
        each.kill()
    report = await change
    assert report.failure is None or "SIGKILL" in report.failure
    assert report.failure is None or not ahead or report.outage_s == 0, "the old one never went"
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


def forked_ranks() -> list[psutil.Process]:
    """Ranks, without the server process that they are forked from, whose command line they share."""
    found = []
    for each in children():
        with contextlib.suppress(psutil.Error):
            if "gang_rank" in name_of(each) and each.ppid() != os.getpid():
                found.append(each)
    return found


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended; whoever adopted it may take a while to notice that."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.mark.case("A32")
@pytest.mark.parametrize("ahead", [False, True])
async def test_flips_back_and_forth_leave_nothing_behind(
    start: Start, ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flips = 20 if LONG_FORM else 2 if ahead else 6
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where no other process has folders of ranks
    target = write_target(tmp_path / "endless", eos_token_id=None, max_position_embeddings=16384)
    (target / "generation_config.json").write_text("{}")
    drafter = write_drafter(tmp_path / "drafter", target)
    fields = {"model": str(target), "drafter": str(drafter), "prefix_reuse": False, "rebuild_ahead": ahead}
    runtime = await start(**fields, max_seq_len=16384, max_concurrency=1)
    wanted = {"temperature": 0.7, "seed": 3}
    await apply(runtime, {"layout": "tp2"})
    await apply(runtime, {"layout": "single"})
    before = left()
    step = runtime._step
    if ahead:
        slow_down(runtime, monkeypatch)
    streaming = asyncio.create_task(collect(runtime, ask(**wanted, max_tokens=16000)))
    reports: list[ChangeReport] = []
    reached = 0
    for number in range(flips):
        await settle(lambda: longer(runtime, reached + EVERY), 60)  # noqa: B023
        reports.append(await apply(runtime, {"layout": ("tp2", "single", "pp2", "single")[number % 4]}))
        reached = (await runtime.requests())[0].output_tokens
    await settle(lambda: longer(runtime, reached + EVERY), 60)
    assert await runtime.cancel((await runtime.requests())[0].request_id)
    end = (await streaming)[-1]
    runtime._step = step  # type: ignore[method-assign]
    assert all(report.failure is None and report.carried == 1 for report in reports)
    await settle(lambda: idle(runtime))
    after = left()
    assert after[:3] == before[:3]
    assert after[3] - before[3] < 48 * 2**20, "resident memory stays"
    alone = (await collect(runtime, ask(**wanted, max_tokens=len(end.token_ids))))[-1]
    assert end.token_ids == alone.token_ids and end.text == alone.text
    pauses = sorted(report.outage_s or 0.0 for report in reports)
    how = "built ahead" if ahead else "one engine at a time"
    tell(
        f"{flips} flips, {how}: {len(end.token_ids)} tokens as undisturbed; "
        f"pause median {statistics.median(pauses):.2f} s, longest {pauses[-1]:.2f} s; "
        f"processes {before[0]} to {after[0]}, descriptors {before[1]} to {after[1]}, "
        f"folders {len(before[2])} to {len(after[2])}, "
        f"resident {before[3] / 2**20:.0f} to {after[3] / 2**20:.0f} MiB"
    )


def left() -> tuple[int, int, set[str], int]:
    """Processes, descriptors, files and resident bytes of this process."""
    gc.collect()
    folders = {each.name for each in Path(tempfile.gettempdir()).glob("ddtree-gang-*")}
    me = psutil.Process()
    return len(children()), me.num_fds(), folders, me.memory_info().rss


OWN_PRESET = """
name = "tp2"
title = "The native two ranks with variables of one's own"
engine = "native"
degrees = { tp = 2 }

[environment.GLOO_SOCKET_IFNAME]
value = "LINK"
why = "ranks cannot meet over a link that is not there"
"""
LATE = """
[environment.TRANSFORMERS_VERBOSITY]
value = "loudest"
before = "import"
why = "transformers complains of it when it is imported"
"""


async def test_variables_of_a_preset_are_set_in_its_ranks_and_nowhere_else(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "ddtree" / "layouts" / "own.toml"
    file.parent.mkdir(parents=True)
    runtime = await start()
    before = dict(os.environ)
    file.write_text(OWN_PRESET.replace("LINK", "no-such-link"))
    report = await apply(runtime, {"layout": "tp2"})
    assert report.failure and "no-such-link" in report.failure
    file.write_text(OWN_PRESET.replace("LINK", "lo") + LATE)
    plan = await runtime.preview({"layout": "tp2"})
    assert "needs a new process: TRANSFORMERS_VERBOSITY must be set before" in plan.changes[0].note
    if LONG_FORM:  # each rank imports torch and transformers for itself
        assert (await apply(runtime, {"layout": "tp2"})).failure is None
        said = (gang_of(runtime)._folder / "rank1.log").read_text()
        assert "TRANSFORMERS_VERBOSITY=loudest" in said
    assert dict(os.environ) == before


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
    while any(runs(pid) for pid in pids):
        assert time.monotonic() - began < 1.0 * patience()
        time.sleep(0.01)
