"""The engine over SGLang's process, with a stand-in for SGLang itself: streams, ends, losses and changes of engine."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from http_serving import OPERATOR, served
from test_rebuild import apply
from test_runtime_contract import collect, idle, settle
from test_traces import check_trees
from tiny_models import tiny_config

from runtime.engine_commands import engine_app
from runtime.http_client import HttpRuntime
from runtime.http_sglang import figure_lines, read_figures
from runtime.interface import (
    EngineState,
    GenerateRequest,
    RequestFinished,
    RequestRejected,
    RuntimeUnavailable,
    SamplingParams,
    TokensEmitted,
)
from runtime.local import LocalRuntime
from runtime.sglang_checks import check_version

HERE = Path(__file__).parent
Start = Callable[..., Any]


@pytest.fixture
async def start(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    monkeypatch.setenv("PYTHONPATH", str(HERE / "sglang_stand_in"))
    made: list[LocalRuntime] = []

    async def one(**settings: Any) -> LocalRuntime:
        fields = {"engine": "sglang", "sglang_python": sys.executable, "rebuild_drain": 0, "max_seq_len": 900}
        target = settings.pop("target", tiny_folder / "target")
        made.append(LocalRuntime(tiny_config(target, tiny_folder / "drafter", **fields | settings)))
        await made[-1].wait_ready()
        return made[-1]

    yield one
    for runtime in made:
        await runtime.aclose()


def ask(tokens: int, prompt: tuple[int, ...] = (1, 2, 3), **sampling: Any) -> GenerateRequest:
    settings = {"max_tokens": tokens, "ignore_eos": True} | sampling
    return GenerateRequest(prompt_token_ids=prompt, sampling=SamplingParams(**settings))


def text_of(prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """What the stand-in answers."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append((7 * ids[-1] + 3 * len(ids) + 11) % 256)
    return tuple(ids[len(prompt) :])


async def test_streams_of_sglang_are_those_of_the_interface(start: Start) -> None:
    runtime = await start(mode="tree", tree_budget=8)
    events, others = await asyncio.gather(collect(runtime, ask(50)), collect(runtime, ask(20, (9,))))
    end = events[-1]
    assert end.token_ids == text_of((1, 2, 3), 50) and end.reason == "length"
    assert others[-1].token_ids == text_of((9,), 20)
    assert end.stats.mode == "tree" and end.stats.tree_budget == 8
    # 1 token of prefill, then rounds of 3: what SGLang counted is what is told.
    assert end.stats.rounds == 17 and end.stats.accept_counts == (0, 0, 0, 17)
    pieces = [piece for event in events if isinstance(event, TokensEmitted) for piece in event.pieces]
    assert [piece.drafted for piece in pieces[1:4]] == [True, True, False]
    stop = end.token_ids[30]
    first = end.token_ids.index(stop)
    stopped = (await collect(runtime, ask(50, stop_token_ids=(stop,), ignore_eos=False)))[-1]
    assert stopped.reason == "stop" and stopped.token_ids == end.token_ids[: first + 1]
    # Where its own end tokens are ignored SGLang heeds no stop token; they are looked for here.
    again = (await collect(runtime, ask(50, stop_token_ids=(stop,))))[-1]
    assert again.reason == "stop" and again.token_ids == end.token_ids[: first + 1]
    with pytest.raises(RuntimeUnavailable, match="this prompt is not liked"):
        await collect(runtime, ask(5, (13, 2)))
    assert (await runtime.describe()).layout == "SGLang, 1 process"
    await settle(lambda: idle(runtime))


async def test_a_cancelled_request_ends_at_once_and_its_name_is_free_again(start: Start) -> None:
    runtime = await start(mode="off")
    request = ask(600).model_copy(update={"request_id": "mine"})
    async for event in runtime.generate(request):
        if isinstance(event, TokensEmitted):
            await runtime.cancel("mine")
        last = event
    assert isinstance(last, RequestFinished) and last.reason == "cancelled" and len(last.token_ids) < 600
    again = (await collect(runtime, ask(10).model_copy(update={"request_id": "mine"})))[-1]
    assert again.token_ids == text_of((1, 2, 3), 10)


async def test_what_sglang_cannot_do_for_one_request_is_refused_by_name(start: Start) -> None:
    runtime = await start(mode="tree")
    for field, sampling in {
        "logprobs": {"logprobs": 1},
        "frequency_penalty": {"frequency_penalty": 0.1},
        "min_tokens": {"min_tokens": 3},
    }.items():
        with pytest.raises(RequestRejected, match=f"^{field}: SGLang cannot"):
            await collect(runtime, ask(4, **sampling))
    with pytest.raises(RequestRejected, match="mode: chain was asked for, tree runs"):
        await collect(runtime, ask(4).model_copy(update={"mode": "chain"}))
    plan = await runtime.preview({"mode": "off", "tree_budget": 16, "temperature": 0.3})
    assert {each.field: each.effect for each in plan.changes} == {
        "mode": "rebuild",
        "tree_budget": "rebuild",
        "temperature": "live",
    }


async def test_a_budget_within_the_captured_one_is_taken_live_and_the_plan_says_what_it_costs(
    start: Start,
) -> None:
    runtime = await start(mode="tree", tree_budget=16)
    streaming = asyncio.create_task(collect(runtime, ask(700)))
    plan = await runtime.preview({"tree_budget": 9})
    (change,) = plan.changes
    assert change.effect == "live" and plan.outage_s == 0.0
    assert "still computes the 17 rows its graphs were captured for" in plan.summary
    report = await apply(runtime, {"tree_budget": 9})
    assert report.outage_s in (None, 0.0) and not streaming.done()

    async def follows() -> bool:
        return [each.tree_budget for each in await runtime.requests() if each.state == "decoding"] == [9]

    await settle(follows, 60)
    assert (await streaming)[-1].stats.continued is None  # nothing was rebuilt
    with pytest.raises(RequestRejected, match="16 was asked for, 9 runs"):
        await collect(runtime, ask(4).model_copy(update={"tree_budget": 16}))
    for change, effects in (
        ({"tree_budget": 17}, ["rebuild"]),
        ({"tree_budget": 6}, ["refused"]),  # the draft block alone has more
        ({"tree_budget": 12, "max_concurrency": 3}, ["rebuild", "rebuild"]),
        ({"tree_budget": 12, "mode": "chain"}, ["rebuild", "rebuild"]),
    ):
        plan = await runtime.preview(change)
        assert [each.effect for each in plan.changes] == effects, plan.summary
    # SGLang is lost where it does not take a budget, and comes back as it last served; the request lives through it.
    await apply(runtime, {"tree_budget": 12})
    end = (await collect(runtime, ask(20)))[-1]
    assert end.reason == "length" and end.stats.continued is not None
    assert any("did not take a tree budget of 12" in error for error in (await runtime.status()).errors)


async def test_trees_come_from_the_scheduler_while_somebody_looks_and_fit_the_text(start: Start) -> None:
    runtime = await start(mode="tree", tree_budget=8)
    unseen = await collect(runtime, ask(20))
    assert await runtime.trace(unseen[-1].request_id) == ()
    streaming = asyncio.create_task(collect(runtime, ask(800).model_copy(update={"request_id": "seen"})))

    async def sampled() -> bool:
        return len(await runtime.trace("seen")) >= 3

    await settle(sampled, 60)
    text = (1, 2, 3, *(await streaming)[-1].token_ids)
    trees = await runtime.trace("seen")
    check_trees(trees, text)
    for tree in trees:
        assert (tree.mode, tree.tree_budget) == ("tree", 8)
        assert [node.parent for node in tree.nodes] == [0, 0, 1, 0] and not tree.nodes[3].accepted
    assert await runtime.trace("seen", trees[-2].round_index) == trees[-1:]


async def test_native_to_sglang_to_native_from_the_api_loses_no_request(start: Start) -> None:
    runtime = await start(engine="native", mode="tree", max_tokens=800)
    async with served(runtime) as url:
        api = HttpRuntime(url, OPERATOR)
        streaming = asyncio.create_task(collect(api, ask(800)))
        for engine in ("sglang", "native"):
            await settle(lambda: streams(api))
            report = await apply(api, {"engine": engine})
            assert report.failure is None and report.carried == 1
            assert (await api.status()).config["engine"] == engine
        end = (await streaming)[-1]
        await api.aclose()
    assert end.reason == "length" and len(end.token_ids) == 800
    assert "engine native" in end.stats.continued and "noise of this engine" in end.stats.continued
    assert not children()


async def streams(runtime: LocalRuntime) -> bool:
    return any(each.state == "decoding" for each in await runtime.requests())


def children() -> list[psutil.Process]:
    """Processes of the stand-in."""
    found = []
    for each in psutil.Process().children(recursive=True):
        try:
            words = " ".join(each.cmdline())
            if ("sglang_child" in words or "# scheduler" in words) and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
        except psutil.Error:
            continue
    return found


async def test_a_killed_scheduler_ends_no_stream_and_sglang_is_started_again(start: Start) -> None:
    runtime = await start(mode="tree")
    streaming = asyncio.create_task(collect(runtime, ask(800, max_tokens=800)))
    await settle(lambda: streams(runtime))
    before = children()
    scheduler = next(each for each in before if "# scheduler" in " ".join(each.cmdline()))
    os.kill(scheduler.pid, signal.SIGKILL)
    end = (await streaming)[-1]
    assert end.reason == "length" and end.token_ids == text_of((1, 2, 3), 800)
    assert end.stats.continued == "continued under sglang, started again"
    status = await runtime.status()
    assert status.state is EngineState.READY
    assert any("SGLang ended" in each and "crashed with exit code -9" in each for each in status.errors)
    assert not {each.pid for each in before} & {each.pid for each in children()}


async def test_sglang_that_ends_soon_after_a_change_to_it_gives_way_to_the_engine_before(
    start: Start,
) -> None:
    runtime = await start(engine="native", mode="tree", max_tokens=800)
    assert (await apply(runtime, {"engine": "sglang"})).failure is None
    streaming = asyncio.create_task(collect(runtime, ask(800)))
    await settle(lambda: streams(runtime))
    scheduler = next(each for each in children() if "# scheduler" in " ".join(each.cmdline()))
    os.kill(scheduler.pid, signal.SIGKILL)
    end = (await streaming)[-1]
    assert end.reason == "length" and len(end.token_ids) == 800
    status = await runtime.status()
    assert status.config["engine"] == "native" and any("SGLang ended" in each for each in status.errors)
    assert not children()


async def test_what_does_not_fit_is_refused_before_teardown_and_a_failure_changes_nothing(
    start: Start, tiny_folder: Path, tmp_path: Path
) -> None:
    runtime = await start(engine="native", mode="tree")
    presets = Path(os.environ["XDG_CONFIG_HOME"]) / "ddtree" / "layouts"
    presets.mkdir(parents=True, exist_ok=True)
    wrong = 'name = "wrong"\ntitle = "t"\nengine = "sglang"\n[arguments]\nno-such-flag = 3\n'
    (presets / "wrong.toml").write_text(wrong, encoding="utf-8")
    for change, words in (
        ({"layout": "tp9x"}, "degrees such as tp8+ep8 or the name of a layout"),
        ({"layout": "pp2"}, "no speculation with a pipeline"),
        ({"layout": "wrong"}, "SGLang refuses the arguments"),
        ({"tree_budget": 3}, "slots a request for a draft block of 8"),
        ({"mode": "auto"}, "auto chooses round by round"),
        ({"sglang_python": "/nowhere/python"}, "/nowhere/python is no program"),
        ({"sglang_python": ""}, "ddtree engine install sglang"),
    ):
        plan = await runtime.preview({"engine": "sglang", **change})
        assert not plan.allowed and words in plan.summary, change
    (presets / "wrong.toml").unlink()
    unloadable = tmp_path / "unloadable"
    shutil.copytree(tiny_folder / "target", unloadable)
    report = await apply(runtime, {"engine": "sglang", "model": str(unloadable)})
    assert report.failure is not None and "the weights cannot be read" in report.failure
    status = await runtime.status()
    assert status.state is EngineState.READY and status.config["engine"] == "native"
    assert (await collect(runtime, ask(5)))[-1].reason == "length" and not children()


def test_versions_that_were_not_tested_are_refused_with_the_list() -> None:
    check_version("0.5.18")
    with pytest.raises(RuntimeError, match="not tested with SGLang 0.6.0; tested: 0.5.17, 0.5.18"):
        check_version("0.6.0")


# Looking at a server that runs already

INFO = """{"version": "0.5.18", "model_path": "/m", "speculative_algorithm": "DFLASH",
"speculative_num_draft_tokens": 16, "attention_backend": "triton", "tp_size": 8, "ep_size": 1, 
"internal_states": [{"avg_spec_accept_length": 3.5,
"last_gen_throughput": 80.5}]}"""
METRICS = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{tp_rank="0"} 3.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{tp_rank="0"} 1.0
# TYPE sglang:token_usage gauge
sglang:token_usage{tp_rank="0"} 0.25
"""


@pytest.fixture
def server() -> Any:
    pages = {"/server_info": INFO, "/metrics": METRICS}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = pages.get(self.path)
            self.send_response(200 if body is not None else 404)
            self.end_headers()
            self.wfile.write((body or "").encode())

        def log_message(self, *_arguments: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}", pages
    running.shutdown()
    running.server_close()
    thread.join()


async def test_a_running_server_is_shown_as_it_tells_and_unknown_figures_as_such(server: Any) -> None:
    url, pages = server
    found = await read_figures(f"{url}/v1")
    assert (found.running, found.waiting, found.tok_s, found.accept_length) == (3, 1, 80.5, 3.5)
    assert found.degrees == "TP8" and found.kv_usage == 0.25 and found.kv_slots is None
    assert "KV slots   25 % of n/a" in figure_lines(found)
    del pages["/metrics"]
    bare = await read_figures(url)
    assert bare.running is None and "--enable-metrics" in bare.notes[0]
    assert "requests   n/a running, n/a waiting" in figure_lines(bare)
    pages["/server_info"] = "{}"
    with pytest.raises(RuntimeUnavailable, match="is no SGLang server"):
        await read_figures(url)


def test_the_command_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = server
    engine_app(["figures", url], standalone_mode=False)
    assert "DFLASH, 16 rows a verify pass, accept length 3.50" in capsys.readouterr().out
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(SystemExit) as ended:
        engine_app(["check"])
    assert ended.value.code == 3 and "ddtree engine install sglang" in capsys.readouterr().err
