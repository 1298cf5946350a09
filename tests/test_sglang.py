"""The SGLang engine behind the Runtime interface, trees from the plugin: a real SGLang on a CPU, a tiny trained pair.

SGLang's kernels run under Triton's interpreter there, so these tests take minutes: `make test-sglang` runs them with
`SGLANG_TEST_PYTHON`; elsewhere they are skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from http_serving import OPERATOR, served
from test_rebuild import apply
from test_runtime_contract import collect, idle, settle
from test_traces import check_trees
from tiny_models import tiny_config

from runtime.http_client import HttpRuntime
from runtime.interface import (
    ConfigRejected,
    EngineState,
    GenerateRequest,
    RequestFinished,
    RequestRejected,
    Runtime,
    SamplingParams,
    TokensEmitted,
)
from runtime.local import LocalRuntime

PYTHON = os.environ.get("SGLANG_TEST_PYTHON", "")
HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not PYTHON, reason="needs SGLang's own environment: make test-sglang"),
]
Start = Callable[..., Any]
BUDGET = 14


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny target with a drafter that is often right; kept in SGLANG_TEST_PAIR between runs where that is set."""
    from sglang_pair import TrainedPair, write_trained_pair

    kept = os.environ.get("SGLANG_TEST_PAIR")
    if kept and Path(kept).is_dir():
        return TrainedPair(Path(kept) / "target", Path(kept) / "drafter")
    return write_trained_pair(Path(kept) if kept else tmp_path_factory.mktemp("pair"))


@pytest.fixture
def cpu_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables under which SGLang runs without a GPU; the engine's processes inherit them."""
    monkeypatch.setenv("PYTHONPATH", str(HERE / "sglang_cpu"))
    for name, value in {
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    layouts = Path(os.environ["XDG_CONFIG_HOME"]) / "ddtree" / "layouts"
    layouts.mkdir(parents=True, exist_ok=True)
    (layouts / "interpreted.toml").write_text(
        'name = "interpreted"\ntitle = "fewer programs for the interpreter"\nengine = "sglang"\n'
        "[arguments]\ntriton-attention-num-kv-splits = 1\n",
        encoding="utf-8",
    )


@pytest.fixture
async def start(pair: Any, cpu_sglang: None) -> AsyncIterator[Start]:
    made: list[LocalRuntime] = []

    async def one(**settings: Any) -> LocalRuntime:
        made.append(LocalRuntime(tiny_config(pair.target, pair.drafter, **(sglang_settings() | settings))))
        await made[-1].wait_ready()
        return made[-1]

    yield one
    for runtime in made:
        await runtime.aclose()


def sglang_settings() -> dict[str, Any]:
    return {
        "engine": "sglang",
        "layout": "interpreted",
        "sglang_python": PYTHON,
        "dtype": "bfloat16",
        "tree_budget": BUDGET,
        "max_seq_len": 400,
        "max_tokens": 300,
        "queue_timeout": 300,
        "rebuild_drain": 0,
        "prefix_reuse": False,
    }


def request_of(prompt: tuple[int, ...], tokens: int, **sampling: Any) -> GenerateRequest:
    settings = SamplingParams(**{"max_tokens": tokens, "ignore_eos": True, "temperature": 0.0} | sampling)
    return GenerateRequest(prompt_token_ids=prompt, sampling=settings)


async def texts(runtime: LocalRuntime, tokens: int, **sampling: Any) -> list[RequestFinished]:
    """The ends of four requests of unequal lengths that run together."""
    from sglang_pair import PROMPTS

    asked = [collect(runtime, request_of(prompt, tokens, **sampling)) for prompt in PROMPTS]
    return [events[-1] for events in await asyncio.gather(*asked)]


def ids(ends: list[RequestFinished]) -> list[tuple[int, ...]]:
    assert all(end.reason == "length" for end in ends), [end.error or end.reason for end in ends]
    return [end.token_ids for end in ends]


SAMPLED = {"temperature": 0.9, "seed": 5}
SETTINGS = ({}, SAMPLED, SAMPLED | {"top_p": 0.8, "min_p": 0.05})


async def test_every_mode_gives_the_targets_own_text_and_trees_are_accepted(start: Start, pair: Any) -> None:
    from sglang_pair import PROMPTS, Judge, judged

    judge = Judge(pair.target)
    runtime, plain, lengths = await start(mode="off"), None, {}
    for mode in ("off", "tree", "chain"):
        if mode != "off":
            report = await apply(runtime, {"mode": mode})
            assert report.failure is None
        for sampling in SETTINGS:
            ends = await texts(runtime, 12 if sampling else 36, **sampling)
            told = judged(judge, [(*each, sampling) for each in zip(PROMPTS, ends, strict=True)])
            print(f"{mode} {sampling}: {told}; {accepted(ends)}")
            if sampling:
                continue
            plain = plain or ids(ends)
            assert ids(ends) == plain, mode
            if mode != "off":
                lengths[mode] = accept_length(ends)
                counts = [end.stats.accept_counts for end in ends]
                assert all(sum(each) == end.stats.rounds for each, end in zip(counts, ends, strict=True))
                assert sum(each[1] for each in counts if len(each) > 1) > 0, "some rounds must accept nothing"
        # Requests of all kinds together: the text of one does not depend on how its neighbours are sampled.
        asked = list(zip(PROMPTS, (*SETTINGS, SAMPLED), strict=True))
        mixed = [collect(runtime, request_of(prompt, 8, **sampling)) for prompt, sampling in asked]
        ends = [events[-1] for events in await asyncio.gather(*mixed)]
        told = judged(judge, [(prompt, end, how) for (prompt, how), end in zip(asked, ends, strict=True)])
        print(f"{mode} mixed: {told}")
    # The drafter puts another token first in a share of the positions: a chain ends there.
    assert lengths["chain"] >= 1.5 and lengths["tree"] >= lengths["chain"] + 0.3, lengths
    description = await runtime.describe()
    assert description.engine == "sglang" and any("SGLang 0.5" in note for note in description.notes)
    assert any(
        "a seed gives the same text in every mode of this engine" in note for note in description.notes
    )


def accept_length(ends: list[RequestFinished]) -> float:
    return sum(end.stats.output_tokens - 1 for end in ends) / sum(end.stats.rounds for end in ends)


def accepted(ends: list[RequestFinished]) -> str:
    rounds = sum(end.stats.rounds for end in ends)
    return f"accept length {accept_length(ends):.2f} over {rounds} rounds" if rounds else "no rounds"


async def test_many_rounds_of_compaction_and_another_budget_leave_the_text_as_it_is(
    start: Start, pair: Any
) -> None:
    from sglang_pair import PROMPTS, DraftJudge, Judge, drift, judged

    runtime = await start(mode="tree")
    async for event in runtime.generate(request_of(PROMPTS[0], 120)):
        whole = event
        trees = await runtime.trace(event.request_id)
    assert whole.reason == "length" and whole.stats.rounds >= 20
    print(judged(Judge(pair.target), [(PROMPTS[0], whole, {})]), accepted([whole]))
    # The trees that the scheduler's process sampled meanwhile are of this text.
    print(f"{len(trees)} of {whole.stats.rounds} rounds sampled")
    assert trees and all(len(tree.nodes) == BUDGET + 1 for tree in trees)
    check_trees(trees, (*PROMPTS[0], *whole.token_ids))
    drifted = drift(DraftJudge(pair), trees, (*PROMPTS[0], *whole.token_ids))
    print(f"the drafter's log-probabilities: within {max(drifted):.2f} of float32 over {len(drifted)} nodes")
    assert len(drifted) >= 40 and max(drifted) < 0.5
    # Fewer nodes within the captured rows: nothing is rebuilt, fewer of them can be accepted.
    before = {each.pid for each in children("")}
    plan = await runtime.preview({"tree_budget": 5})
    assert [each.effect for each in plan.changes] == ["live"] and plan.outage_s == 0.0
    assert f"still computes the {BUDGET + 1} rows" in plan.summary
    await apply(runtime, {"tree_budget": 5})
    fewer = await texts(runtime, 36)
    assert all(end.stats.tree_budget == 5 for end in fewer)
    async for event in runtime.generate(request_of(PROMPTS[0], 60)):
        again = event
        trees = await runtime.trace(event.request_id)
    assert trees and all(len(tree.nodes) == 6 for tree in trees)
    check_trees(trees, (*PROMPTS[0], *again.token_ids))
    await apply(runtime, {"tree_budget": BUDGET})
    more = await texts(runtime, 36)
    print(
        judged(Judge(pair.target), [(PROMPTS[0], again, {})]),
        "5 nodes:",
        accepted(fewer),
        "all:",
        accepted(more),
    )
    assert ids(more) == ids(fewer) and accept_length(more) > accept_length(fewer)
    assert {each.pid for each in children("")} == before


async def test_requests_stop_end_and_are_refused_as_the_interface_says(start: Start) -> None:
    from sglang_pair import PROMPTS

    runtime = await start(mode="tree")
    whole = (await collect(runtime, request_of(PROMPTS[1], 30)))[-1]
    stop = whole.token_ids[9]
    first = whole.token_ids.index(stop)
    ended = (await collect(runtime, request_of(PROMPTS[1], 30, stop_token_ids=(stop,), ignore_eos=False)))[-1]
    assert ended.reason == "stop" and ended.token_ids == whole.token_ids[: first + 1]
    streamed = 0
    async for event in runtime.generate(request_of(PROMPTS[2], 200)):
        if isinstance(event, TokensEmitted):
            streamed += len(event.pieces)
            assert await runtime.cancel(event.request_id)
        last = event
    assert last.reason == "cancelled" and streamed == len(last.token_ids) < 200
    await settle(lambda: idle(runtime))
    for field, sampling in {
        "logprobs": {"logprobs": 2},
        "presence_penalty": {"presence_penalty": 0.5},
    }.items():
        with pytest.raises(RequestRejected, match=field):
            await collect(runtime, request_of(PROMPTS[0], 4, **sampling))
    with pytest.raises(RequestRejected, match="mode: off was asked for, tree runs"):
        await collect(runtime, request_of(PROMPTS[0], 4).model_copy(update={"mode": "off"}))
    plan = await runtime.preview({"mode": "off", "temperature": 0.5})
    effects = {each.field: each.effect for each in plan.changes}
    assert effects == {"mode": "rebuild", "temperature": "live"}, plan.summary


async def test_native_to_sglang_and_back_from_the_api_under_a_running_request(start: Start) -> None:
    from sglang_pair import PROMPTS

    runtime = await start(engine="native", layout="single", mode="tree")
    async with served(runtime) as url:
        api = HttpRuntime(url, OPERATOR)
        alone = (await collect(api, request_of(PROMPTS[0], 200)))[-1]
        for engine in ("sglang", "native"):
            change = {"engine": engine, "layout": "interpreted" if engine == "sglang" else "single"}
            assert (await api.preview(change)).allowed  # SGLang's parser takes longer than the text here
            streaming = asyncio.create_task(collect(api, request_of(PROMPTS[0], 200)))
            await settle(lambda: streams(api, 3), 120)
            report = await apply(api, change)
            assert report.failure is None and report.carried == 1, report.summary
            status = await api.status()
            assert status.state is EngineState.READY and status.config["engine"] == engine
            end = (await streaming)[-1]
            assert end.reason == "length" and len(end.token_ids) == 200
            assert engine in str(end.stats.continued)
            # Greedy text is the target's own in both engines, near-ties apart.
            same = next(
                (i for i, (a, b) in enumerate(zip(end.token_ids, alone.token_ids, strict=True)) if a != b),
                200,
            )
            print(f"{engine}: the first difference is at {same} of 200")
        await api.aclose()
    assert not children("sglang")


async def streams(runtime: Runtime, tokens: int) -> bool:
    return any(each.output_tokens >= tokens for each in await runtime.requests())


def children(word: str) -> list[psutil.Process]:
    """Processes of SGLang that this one started."""
    found = []
    for each in psutil.Process().children(recursive=True):
        try:
            if word in " ".join(each.cmdline()) and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
        except psutil.Error:
            continue
    return found


async def test_a_killed_scheduler_loses_no_request_and_sglang_comes_back(start: Start) -> None:
    from sglang_pair import PROMPTS

    runtime = await start(mode="tree")
    alone = (await collect(runtime, request_of(PROMPTS[0], 120)))[-1]
    streaming = asyncio.create_task(collect(runtime, request_of(PROMPTS[0], 120)))
    await settle(lambda: streams(runtime, 10), 120)
    before = children("")
    scheduler = [each for each in before if "scheduler" in " ".join(each.cmdline())]
    assert scheduler, [each.cmdline() for each in before]
    os.kill(scheduler[0].pid, signal.SIGKILL)
    end = (await streaming)[-1]
    assert end.reason == "length" and end.token_ids == alone.token_ids
    status = await runtime.status()
    assert status.state is EngineState.READY and status.config["engine"] == "sglang"
    assert any("SGLang ended" in error for error in status.errors)
    assert end.stats.continued == "continued under sglang, started again"
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in before)


async def test_what_does_not_come_up_leaves_the_engine_before_it(
    start: Start, pair: Any, tmp_path: Path
) -> None:
    runtime = await start(engine="native", layout="single", mode="tree")
    broken = tmp_path / "broken"
    shutil.copytree(pair.drafter, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    report = await apply(runtime, {"engine": "sglang", "drafter": str(broken)})
    assert report.failure is not None and "SGLang did not come up" in report.failure
    status = await runtime.status()
    assert status.state is EngineState.READY and status.config["engine"] == "native"
    assert not children("sglang")
    await check_refusals(runtime)


async def check_refusals(runtime: LocalRuntime) -> None:
    """What is refused before anything is torn down, some of it by SGLang's own parser."""
    folder = Path(os.environ["XDG_CONFIG_HOME"]) / "ddtree" / "layouts"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "wrong.toml").write_text(
        'name = "wrong"\ntitle = "t"\nengine = "sglang"\n[arguments]\nno-such-flag = 3\n', encoding="utf-8"
    )
    for change, words in {
        "tp9x": "degrees such as tp8",
        "pp2": "no speculation with a pipeline",
        "wrong": "SGLang refuses the arguments: .*no_such_flag",
    }.items():
        plan = await runtime.preview({"engine": "sglang", "layout": change})
        assert not plan.allowed
        with pytest.raises(ConfigRejected, match=words):
            await runtime.apply({"engine": "sglang", "layout": change}, plan.revision)
    for change, words in (
        ({"engine": "sglang", "tree_budget": 3}, "slots a request for a draft block of 6"),
        ({"engine": "sglang", "mode": "auto"}, "auto chooses round by round"),
        ({"engine": "sglang", "sglang_python": "/nowhere/python"}, "no program"),
    ):
        assert words in (await runtime.preview(change)).summary


PARENT = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[3])
from test_sglang import request_of, sglang_settings
from tiny_models import tiny_config
from runtime.local import LocalRuntime

async def main():
    runtime = LocalRuntime(tiny_config(sys.argv[1], sys.argv[2], **sglang_settings()))
    await runtime.wait_ready()
    print(json.dumps(runtime._engine.models.target.process.info["pids"]), flush=True)
    async for _ in runtime.generate(request_of((1, 2, 3), 200)):
        pass

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_sglang_ends_with_a_killed_parent(pair: Any, cpu_sglang: None, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    path = os.pathsep.join([str(HERE.parent), os.environ["PYTHONPATH"]])
    with subprocess.Popen(
        [sys.executable, str(script), str(pair.target), str(pair.drafter), str(HERE)],
        stdout=subprocess.PIPE,
        cwd=HERE.parent,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        assert process.stdout is not None
        pids = json.loads(process.stdout.readline())
        assert pids and all(psutil.pid_exists(pid) for pid in pids)
        process.kill()
    gone, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], 60)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
