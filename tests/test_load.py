"""The load generator against servers whose answers are known: in virtual time, exactly; over a socket, closely."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fake_runtime import FakeRuntime
from scripted_server import Script, ScriptTransport, serve_script
from virtual_time import run_virtual

from runtime.http_load import OpenAiTarget
from runtime.interface import RuntimeUnavailable
from runtime.load import Load, LoadRun, RuntimeTarget, arrivals, run_load
from runtime.load_report import LoadResult, Slo, Spread, percentile, summarise

PROMPTS = [{"prompt": "one"}, {"messages": ({"role": "user", "content": "two"},)}]


def measure(script: Script, load: Load, transport: httpx.AsyncBaseTransport | None = None) -> LoadRun:
    """The load on a scripted server, in virtual time."""

    async def run() -> LoadRun:
        target = OpenAiTarget("http://scripted", transport=transport or ScriptTransport(script))
        await target.open()
        try:
            return await run_load(load, target, PROMPTS)
        finally:
            await target.aclose()

    return run_virtual(run())


def result(script: Script, **load: Any) -> LoadResult:
    return summarise(measure(script, Load(**load)))


def spread(found: Spread | None) -> Spread:
    assert found is not None
    return found


def test_closed_loop_figures_are_those_of_the_script() -> None:
    """200 ms to the first token, then 10 tokens each 50 ms: 0.7 s an answer, 3 users, 30 requests in 10 turns."""
    found = result(Script(), concurrency=3, requests=30, warm_up=3)
    assert spread(found.ttft_s).p50 == pytest.approx(0.2, rel=0.02)
    assert spread(found.ttft_s).p99 == pytest.approx(0.2, rel=0.02)
    assert spread(found.tpot_s).p95 == pytest.approx(0.05, rel=0.02)
    assert spread(found.e2e_s).mean == pytest.approx(0.7, rel=0.02)
    assert spread(found.gap_s).max == pytest.approx(0.05, rel=0.02)
    assert spread(found.user_tok_s).p50 == pytest.approx(20, rel=0.02)
    assert found.duration_s == pytest.approx(7.0, rel=0.02)
    assert found.total_tok_s == pytest.approx(330 / 7.0, rel=0.02)
    assert found.request_rate == pytest.approx(30 / 7.0, rel=0.02)
    assert (found.requests, found.failed, found.output_tokens, found.prompt_tokens) == (30, 0, 330, 150)
    assert found.peak_in_flight == 3 and found.loop == "closed"


@pytest.mark.case("A30")
def test_tokens_are_counted_not_chunks() -> None:
    """4 tokens a chunk: 40 tok/s, not 10."""
    found = result(
        Script(first_s=0.1, next_s=0.025, tokens=80, per_chunk=4), concurrency=1, requests=2, warm_up=0
    )
    assert found.output_tokens == 160 and found.tokens_by == "server"
    assert spread(found.user_tok_s).p50 == pytest.approx(40, rel=0.02)
    uncounted = result(Script(usage=False), concurrency=1, requests=2, warm_up=0)
    assert uncounted.tokens_by == "chunks" and uncounted.prompt_tokens is None


def test_an_open_loop_sends_by_the_clock_at_the_asked_rate() -> None:
    script = Script(first_s=1.0, next_s=0.1, tokens=3)
    load = Load(rate=20.0, requests=600, warm_up=0, seed=3)
    run = measure(script, load)
    due = list(arrivals(load))
    assert script.seen_at == pytest.approx(due, abs=1e-6), "slow answers hold no request back"
    assert len(due) / due[-1] == pytest.approx(20.0, rel=0.1)
    gaps = [later - earlier for earlier, later in zip(due, due[1:], strict=False)]
    # The gaps of a Poisson process are exponential: their deviation equals their mean.
    mean = sum(gaps) / len(gaps)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.15)
    found = summarise(run)
    assert found.peak_in_flight > 15 and found.send_lag_s == pytest.approx(0, abs=1e-6)
    assert spread(found.ttft_s).p99 == pytest.approx(1.0, rel=0.02)


STALLED = Load(rate=50.0, requests=None, duration_s=20.0, warm_up=0)


def stalling() -> Script:
    """Five hundredths of a second to answer, and nothing between 8 and 10 s."""
    return Script(first_s=0.05, next_s=0.01, tokens=3, stall=(8.0, 10.0))


@pytest.fixture(scope="module")
def stalled() -> LoadRun:
    return measure(stalling(), STALLED)


def test_a_stall_of_the_server_shows_in_the_tail_of_an_open_loop(stalled: LoadRun) -> None:
    found = summarise(stalled)
    assert spread(found.ttft_s).p50 == pytest.approx(0.05, rel=0.02)
    # Waits of those who come during the stall are uniform up to 2 s: 5 % of all wait over 1 s, 1 % over 1.8 s.
    waits = [max(0.05, 10.0 - due) if 8.0 <= due + 0.05 < 10.0 else 0.05 for due in arrivals(STALLED)]
    for share in (0.9, 0.95, 0.99):
        told = getattr(spread(found.ttft_s), f"p{round(share * 100)}")
        assert told == pytest.approx(percentile(sorted(waits), share), rel=0.02)
    assert spread(found.ttft_s).p95 > 0.8 and spread(found.ttft_s).p99 > 1.6
    one_by_one = summarise(measure(stalling(), Load(concurrency=1, requests=120)))
    assert spread(one_by_one.ttft_s).p95 < 0.1, "a user who waits sends nothing: closed loops hide stalls"


def test_warm_up_is_sent_and_enters_no_figure() -> None:
    script = Script()
    found = result(script, concurrency=2, requests=4, warm_up=6)
    assert len(script.seen_at) == 10 and found.requests == 4
    assert found.duration_s == pytest.approx(1.4, rel=0.02)


def test_a_load_ends_after_its_duration_with_whole_answers() -> None:
    found = result(Script(), concurrency=2, requests=None, duration_s=2.0, warm_up=0)
    assert found.requests == 6 and found.failed == 0, "begun at 0, 0.7 and 1.4 s"
    assert found.duration_s == pytest.approx(2.1, rel=0.02)


def test_failed_requests_are_counted_by_reason_and_enter_no_figure() -> None:
    found = result(Script(fail_every=3), concurrency=1, requests=9, warm_up=0)
    assert (found.requests, found.failed) == (9, 3)
    assert found.errors == {"HTTP 503: too busy": 3}
    assert spread(found.ttft_s).n == 6 and spread(found.ttft_s).min == pytest.approx(0.2, rel=0.02)
    late = summarise(measure(Script(first_s=5.0), Load(concurrency=1, requests=2, warm_up=0, timeout_s=1.0)))
    assert late.failed == 2 and late.ttft_s is None and list(late.errors) == ["no whole answer within 1 s"]


def test_goodput_counts_answers_that_keep_to_the_slo(stalled: LoadRun) -> None:
    run = stalled
    found = summarise(run, Slo(ttft_s=0.1, tpot_s=0.02))
    kept = sum(
        each.ttft_s is not None and each.ttft_s <= 0.1 and (each.tpot_s or 0) <= 0.02 for each in run.answers
    )
    assert found.goodput_share == pytest.approx(kept / len(run.answers)) and 0.85 < found.goodput_share < 0.93
    assert found.goodput_per_s == pytest.approx(kept / found.duration_s)
    assert summarise(run).goodput_per_s is None


def test_what_is_sent_is_what_was_asked() -> None:
    transport = ScriptTransport(Script(tokens=2))
    load = Load(concurrency=1, requests=2, warm_up=0, max_tokens=7, temperature=0.5, seed=40, ignore_eos=True)
    measure(transport.script, load.at(mode="tree", tree_budget=8), transport)
    first, second = transport.bodies
    assert first["messages"] == [{"role": "user", "content": "one"}] and first["model"] == "scripted"
    assert second["messages"] == [{"role": "user", "content": "two"}] and second["seed"] == 41
    assert first["max_tokens"] == 7 and first["temperature"] == 0.5 and first["ignore_eos"] is True
    assert first["ddtree"] == {"mode": "tree", "tree_budget": 8}
    plain = ScriptTransport(Script(tokens=2))
    measure(plain.script, Load(concurrency=1, requests=1, warm_up=0), plain)
    assert "ddtree" not in plain.bodies[0], "other servers know no such field"


def test_percentiles_are_linear_between_ranks() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], 0.5) == 3.0
    assert percentile([0.0, 10.0], 0.95) == pytest.approx(9.5)
    assert percentile([7.0], 0.99) == 7.0
    assert Spread.of([None, None]) is None


async def test_over_a_socket_the_figures_are_close_to_the_script() -> None:
    """On a busy machine a timer comes late, never early: the least of each figure is the script's."""
    server = await serve_script(Script(first_s=0.1, next_s=0.02, tokens=11))
    port = server.sockets[0].getsockname()[1]
    target = OpenAiTarget(f"http://127.0.0.1:{port}/v1")
    try:
        assert await target.open() == "scripted"
        found = summarise(await run_load(Load(concurrency=2, requests=8, warm_up=2), target, PROMPTS))
    finally:
        await target.aclose()
        server.close()
        await server.wait_closed()
    assert found.failed == 0 and found.output_tokens == 88
    assert 0.1 <= spread(found.ttft_s).min < 0.2
    assert 0.3 <= spread(found.e2e_s).min < 0.6
    assert 0.015 <= spread(found.tpot_s).p50 < 0.04


async def test_a_server_that_does_not_answer_is_named() -> None:
    target = OpenAiTarget("http://127.0.0.1:9")
    with pytest.raises(RuntimeUnavailable, match=r"127\.0\.0\.1:9 does not answer"):
        await target.open()
    await target.aclose()


@pytest.mark.parametrize(
    ("status", "content", "words"),
    [
        (200, b"<html>hello</html>", "no list of models; is this an OpenAI API?"),
        (200, b'{"data": []}', "lists no model; name one with --served-model"),
        (401, b'{"error": {"message": "who?"}}', "HTTP 401: who?; set DDTREE_API_KEY or OPENAI_API_KEY"),
        (502, b"<html>bad gateway</html>", "HTTP 502$"),
    ],
)
async def test_what_answers_but_cannot_be_measured_is_said(status: int, content: bytes, words: str) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, content=content))
    target = OpenAiTarget("http://scripted", transport=transport)
    with pytest.raises(RuntimeUnavailable, match=words.replace("?", "[?]")):
        await target.open()
    await target.aclose()


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (b"data: {\n\n", "a line of the stream is not JSON"),
        (b'data: {"choices": []}\n\n', "the stream ended without [DONE]"),
        (b'data: {"error": {"message": "out of memory"}}\n\n', "error in the stream: out of memory"),
    ],
)
def test_a_stream_that_breaks_off_is_a_failed_request(stream: bytes, reason: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        listed = request.url.path == "/v1/models"
        return httpx.Response(200, content=b'{"data": [{"id": "scripted"}]}' if listed else stream)

    load = Load(concurrency=1, requests=2, warm_up=0)
    found = summarise(measure(Script(), load, httpx.MockTransport(answer)))
    assert found.failed == 2 and found.errors == {reason: 2} and found.ttft_s is None


async def test_a_runtime_is_measured_without_http() -> None:
    runtime = FakeRuntime(round_s=0.001)
    try:
        load = Load(concurrency=2, requests=4, warm_up=1, max_tokens=16, mode="tree", tree_budget=4)
        found = summarise(await run_load(load, RuntimeTarget(runtime), PROMPTS))
    finally:
        await runtime.aclose()
    assert found.failed == 0 and found.output_tokens == 64 and found.tokens_by == "server"
    assert found.accept_length is not None and found.accept_length > 1
