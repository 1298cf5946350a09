"""Control over HTTP: who may, what is refused, events that resume, and queues that stay bounded."""

from __future__ import annotations

import asyncio
import json
import stat
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from fake_runtime import FakeRuntime
from http_serving import AUTHORIZED, INFERENCE, OPERATOR, served
from test_runtime_contract import idle, settle

from runtime.http_events import ClientQueue, EventHub, Numbered
from runtime.http_security import load_keys
from runtime.interface import (
    ConfigRejected,
    EngineState,
    HostSample,
    LogLine,
    RequestStats,
    RoundStats,
    StatusChanged,
    WatchEvent,
)
from runtime.listener import ServerSettings

ROUTES = [
    ("GET", "/runtime"),
    ("GET", "/runtime/describe"),
    ("GET", "/runtime/status"),
    ("GET", "/runtime/requests"),
    ("GET", "/runtime/trace/x"),
    ("GET", "/runtime/events"),
    ("POST", "/runtime/preview"),
    ("POST", "/runtime/apply"),
    ("POST", "/runtime/cancel"),
    ("POST", "/runtime/generate"),
    ("GET", "/runtime/jobs"),
    ("POST", "/runtime/jobs"),
    ("DELETE", "/runtime/jobs/x"),
    ("POST", "/runtime/drain"),
    ("POST", "/runtime/stop"),
    ("POST", "/runtime/restart"),
    ("GET", "/snapshots"),
    ("GET", "/snapshots/diff"),
    ("GET", "/snapshots/show"),
]


@asynccontextmanager
async def client(
    runtime: FakeRuntime | None = None, headers: dict[str, str] = AUTHORIZED, **options: object
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a real server over a scripted runtime."""
    async with (
        served(runtime or FakeRuntime(), **options) as url,  # type: ignore[arg-type]
        httpx.AsyncClient(base_url=url, headers=headers, timeout=10.0) as http,
    ):
        yield http


class Orders:
    """Notes what the process was told."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def _note(self, what: str) -> str:
        self.given.append(what)
        return f"{what}: agreed"

    def drain(self) -> str:
        return self._note("drain")

    def stop(self) -> str:
        return self._note("stop")

    def restart(self) -> str:
        return self._note("restart")


# Keys


@pytest.mark.case("E8")
async def test_every_control_route_needs_the_operator_key_even_from_loopback() -> None:
    orders = Orders()
    wrong = [
        {},
        {"Authorization": f"Bearer {INFERENCE}"},
        {"Authorization": f"Bearer {OPERATOR.upper()}"},
        {"Authorization": "Bearer"},
        {"Authorization": f"Basic {OPERATOR}"},
        {"X-Api-Key": OPERATOR},
        {"Authorization": "Bearer clé".encode()},
        {"Authorization": b"Bearer \xff\xfe"},
    ]
    async with client(headers={}, lifecycle=orders) as http:
        for method, path in ROUTES:
            for headers in wrong:
                answer = await http.request(method, path, headers=headers, json={})  # type: ignore[arg-type]
                assert answer.status_code == 401, (method, path, headers)
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
                assert OPERATOR not in answer.text and INFERENCE not in answer.text
        assert not orders.given
        for scheme in ("Bearer", "bearer"):
            answer = await http.get("/runtime/status", headers={"Authorization": f"{scheme} {OPERATOR}"})
            assert answer.status_code == 200


@pytest.mark.case("E8")
async def test_the_list_of_routes_above_is_complete() -> None:
    async with client() as http:
        paths = (await http.get("/openapi.json")).json()["paths"]
    found = {
        (method.upper(), path.replace("{request_id}", "x").replace("{job_id}", "x"))
        for path, methods in paths.items()
        for method in methods
        if path.startswith(("/runtime", "/snapshots"))
    }
    assert found == set(ROUTES)


@pytest.mark.case("E8")
async def test_the_host_header_of_another_machine_is_refused_on_loopback() -> None:
    async with client() as http:
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "10.0.0.1", "[::2]:80"):
            assert (await http.get("/runtime/status", headers={"Host": host})).status_code == 400, host
            assert (await http.get("/health", headers={"Host": host})).status_code == 400
        for host in ("localhost", "LOCALHOST:1234", "127.0.0.1", "127.9.9.9:80", "[::1]:8642"):
            assert (await http.get("/runtime/status", headers={"Host": host})).status_code == 200, host


@pytest.mark.case("E8")
async def test_preflights_pass_for_configured_origins_only() -> None:
    asked = {"Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "authorization"}
    friend, stranger = "https://friend.example", "https://stranger.example"
    async with client(headers={}, settings=ServerSettings(cors_origins=(friend,))) as http:
        passed = await http.options("/runtime/status", headers={"Origin": friend, **asked})
        assert passed.status_code == 200
        assert passed.headers["access-control-allow-origin"] == friend
        refused = await http.options("/runtime/status", headers={"Origin": stranger, **asked})
        assert "access-control-allow-origin" not in refused.headers
    async with client(headers={}) as http:
        answer = await http.options("/runtime/status", headers={"Origin": friend, **asked})
        assert "access-control-allow-origin" not in answer.headers


def test_an_operator_key_is_generated_once_into_a_file_nobody_else_reads(tmp_path: Path) -> None:
    keys = load_keys({}, tmp_path / "run")
    assert keys.operator_file is not None and keys.inference is None
    assert stat.S_IMODE(keys.operator_file.stat().st_mode) == 0o600
    assert load_keys({}, tmp_path / "run").operator == keys.operator
    assert len(keys.operator) > 30 and keys.operator not in repr(keys)
    keys.operator_file.chmod(0o644)
    with pytest.raises(ConfigRejected, match="read by others"):
        load_keys({}, tmp_path / "run")


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"DDTREE_API_KEY": "same", "DDTREE_OPERATOR_KEY": "same"}, "equal"),
        ({"DDTREE_OPERATOR_KEY": "with space"}, "DDTREE_OPERATOR_KEY"),
        ({"DDTREE_API_KEY": "line\nbreak"}, "DDTREE_API_KEY"),
    ],
)
def test_keys_that_cannot_work_are_refused_without_showing_them(
    env: dict[str, str], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigRejected, match=named) as refused:
        load_keys(env, tmp_path)
    assert not any(value in str(refused.value) for value in env.values())


async def test_a_key_of_other_than_ascii_characters_works(tmp_path: Path) -> None:
    keys = load_keys({"DDTREE_OPERATOR_KEY": "schlüssel"}, tmp_path)
    assert keys.operator_file is None
    async with served(FakeRuntime(), keys=keys) as url, httpx.AsyncClient(base_url=url) as http:
        right = {"Authorization": "Bearer schlüssel".encode()}
        assert (await http.get("/runtime/status", headers=right)).status_code == 200  # type: ignore[arg-type]


# Changes


async def test_of_two_changes_from_one_revision_exactly_one_is_applied() -> None:
    async with client() as http:
        revision = (await http.get("/runtime/status")).json()["revision"]
        bodies = [
            {"change": {"tree_budget": budget}, "revision": revision, "author": who}
            for budget, who in ((16, "console of ann@a"), (24, "console of bob@b"))
        ]
        answers = await asyncio.gather(*(http.post("/runtime/apply", json=body) for body in bodies))
        assert sorted(answer.status_code for answer in answers) == [200, 409]
        won = next(i for i, answer in enumerate(answers) if answer.status_code == 200)
        error = answers[1 - won].json()["error"]
        assert error["param"] == "revision"
        assert bodies[won]["author"] in error["message"]
        assert f"tree_budget 11 -> {bodies[won]['change']['tree_budget']}" in error["message"]
        assert time.strftime(" at %H:") in error["message"]
        status = (await http.get("/runtime/status")).json()
        assert status["config"]["tree_budget"] == bodies[won]["change"]["tree_budget"]
        assert [change["author"] for change in status["history"]] == [bodies[won]["author"]]


async def test_paths_of_the_server_are_not_set_over_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    paths = (
        {"model": "/etc/passwd"},
        {"drafter": "../x"},
        {"model": "~/m"},
        {"model": "a\\b"},
        {"model": "here"},
    )
    async with client() as http:
        for change in paths:
            for route, more in (("preview", {}), ("apply", {"revision": 1})):
                answer = await http.post(f"/runtime/{route}", json={"change": change, **more})
                assert answer.status_code == 400
                assert "not set over HTTP" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"change": []},
        {"change": {"tree_budget": "many"}},
        {"change": {"temperature": None}},
        {"change": {"tree_budgett": 1}},
        {"change": {"tree_budget": 1}, "more": 1},
        {"change": {"tree_budget": {"deep": [[]]}}},
    ],
)
async def test_wrong_changes_are_a_400_with_an_error_object(body: dict[str, object]) -> None:
    async with client() as http:
        answer = await http.post("/runtime/preview", json=body)
        assert answer.status_code == 400
        assert "\n" not in answer.json()["error"]["message"]


async def test_an_author_cannot_break_the_terminals_of_others() -> None:
    async with client() as http:
        body = {"change": {"tree_budget": 16}, "revision": 1, "author": "eve\x1b[2J\n" + "x" * 500}
        assert (await http.post("/runtime/apply", json=body)).status_code == 200
        author = (await http.get("/runtime/status")).json()["history"][0]["author"]
        assert author.isprintable() and len(author) < 100


async def test_orders_reach_the_process_or_are_refused_where_nobody_takes_them() -> None:
    orders = Orders()
    async with client(lifecycle=orders) as http:
        for what in ("drain", "restart", "stop"):
            answer = await http.post(f"/runtime/{what}")
            assert (answer.status_code, answer.json()) == (202, {"summary": f"{what}: agreed"})
    assert orders.given == ["drain", "restart", "stop"]
    async with client() as http:
        assert (await http.post("/runtime/stop")).status_code == 409


# Requests


async def test_leaving_a_generate_stream_ends_the_request() -> None:
    runtime = FakeRuntime(answer="word " * 500)
    async with client(runtime) as http:
        async with http.stream("POST", "/runtime/generate", json={"prompt": "x"}) as response:
            async for line in response.aiter_lines():
                if line.startswith("event: tokens"):
                    break
        await settle(lambda: idle(runtime))


async def test_a_refused_request_is_an_http_status_and_a_late_fault_an_event() -> None:
    runtime = FakeRuntime()
    async with client(runtime) as http:
        runtime.rejection = "prompt: too long"
        answer = await http.post("/runtime/generate", json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "prompt: too long")
        runtime.rejection, runtime.break_after = None, 3
        answer = await http.post("/runtime/generate", json={"prompt": "x"})
        last = answer.text.rstrip("\n").split("\n\n")[-1]
        assert last.startswith("event: fault\n")
        assert "RuntimeError" in last and "fell over" not in last


# Events


async def read(http: httpx.AsyncClient, count: int, last_id: str | None = None) -> list[dict[str, str]]:
    """The first `count` blocks of an event stream; comments as {"comment": ...}."""
    blocks: list[dict[str, str]] = []
    block: dict[str, str] = {}
    headers = {"Last-Event-ID": last_id} if last_id else {}
    async with http.stream("GET", "/runtime/events", headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if line:
                block[name or "comment"] = value
            elif block:
                blocks.append(block)
                block = {}
                if len(blocks) == count:
                    break
    return blocks


def line(text: str) -> LogLine:
    return LogLine(time_s=0.0, level="info", text=text)


async def test_a_stream_begins_with_the_present_state_and_its_silence_with_heartbeats() -> None:
    runtime = FakeRuntime()
    async with client(runtime, heartbeat_s=0.05) as http:
        blocks = await read(http, 4)
        assert json.loads(blocks[0]["data"]) == {
            "kind": "status",
            "state": "ready",
            "reason": "",
            "revision": 1,
        }
        assert {"comment": "heartbeat"} in blocks


async def test_a_client_that_comes_back_gets_exactly_what_it_missed() -> None:
    runtime = FakeRuntime()
    async with client(runtime, heartbeat_s=0.05) as http:
        seen = [block for block in await read(http, 2) if "id" in block]  # the state, a host sample
        for number in range(5):
            runtime.emit(line(f"missed {number}"))
        await asyncio.sleep(0.05)
        blocks = await read(http, 6, seen[-1]["id"])
        texts = [json.loads(block["data"])["text"] for block in blocks if block.get("event") == "log"]
        assert texts == [f"missed {number}" for number in range(5)]
        again = await read(http, 2, blocks[-1]["id"])
        assert [block.get("event") for block in again] == ["status", None]


async def test_a_client_of_an_earlier_process_is_told_that_something_is_lost() -> None:
    async with client(heartbeat_s=0.05) as http:
        for unknown in ("deadbeef-3", "nonsense", "-", "a-b"):
            blocks = await read(http, 2, unknown)
            assert [block.get("event") for block in blocks] == ["log", "status"]
            assert "lost" in json.loads(blocks[0]["data"])["text"]


async def test_many_clients_see_each_others_changes() -> None:
    async with client() as http:
        readers = [asyncio.create_task(read(http, 3)) for _ in range(5)]
        await asyncio.sleep(0.2)
        await http.post("/runtime/apply", json={"change": {"mode": "off"}, "revision": 1})
        for blocks in await asyncio.wait_for(asyncio.gather(*readers), 10):
            changes = [json.loads(block["data"]) for block in blocks if block.get("event") == "status"]
            assert changes[-1]["revision"] == 2


def round_of(index: int) -> RoundStats:
    return RoundStats(
        index=index,
        time_s=0.0,
        mode="tree",
        tree_budget=8,
        batch=1,
        nodes=9,
        emitted=2,
        accept_lengths=(2,),
        draft_depths=(7,),
        stage_s=(0.0, 0.0, 0.0, 0.0, 0.0),
        slots_used=1,
        slots_total=2,
    )


def host(cpu: float) -> HostSample:
    return HostSample(host="h", time_s=0.0, cpu=cpu)


def change(revision: int) -> StatusChanged:
    return StatusChanged(state=EngineState.READY, reason="", revision=revision)


async def filled(*events: WatchEvent, limit: int = 8) -> tuple[ClientQueue, list[WatchEvent]]:
    queue = ClientQueue(limit)
    for number, event in enumerate(events):
        queue.put(Numbered(number, event))
    return queue, [item.event for item in await queue.take(0.01)]


async def test_a_slow_client_loses_rounds_first_and_changes_never() -> None:
    queue, kept = await filled(change(1), *(round_of(i) for i in range(50)), change(2), line("x"), change(3))
    assert [event for event in kept if not isinstance(event, RoundStats)] == [
        change(1),
        change(2),
        line("x"),
        change(3),
    ]
    assert [event.index for event in kept if isinstance(event, RoundStats)] == [46, 47, 48, 49]
    assert queue.missed == 46 and not queue.overrun


async def test_only_the_last_sample_of_the_host_waits() -> None:
    queue, kept = await filled(host(0.1), round_of(1), host(0.2), host(0.3))
    assert kept == [round_of(1), host(0.3)] and queue.missed == 0


async def test_a_client_with_nothing_left_to_drop_has_to_come_back() -> None:
    queue, kept = await filled(*(change(i) for i in range(20)))
    assert kept == [change(i) for i in range(8)] and queue.overrun


async def test_a_client_that_does_not_read_holds_nobody_up_and_is_told() -> None:
    runtime = FakeRuntime()
    hub = EventHub(runtime, heartbeat_s=0.05)
    slow, fast = hub.stream(), hub.stream()
    await anext(slow)  # the present state, then nothing more for now
    frames = [await anext(fast), await anext(fast)]
    for index in range(1000):
        runtime.emit(round_of(index))
        await asyncio.sleep(0)
        if index % 100 == 99:
            frames += [await anext(fast) for _ in range(100)]
    late = [await anext(slow) for _ in range(600)]
    await hub.close()
    assert sum(b"event: round" in frame for frame in frames) == 1000
    assert any(b"left out" in frame for frame in late)
    for stream in (slow, fast):
        await stream.aclose()


async def test_closing_ends_every_stream_and_the_watching() -> None:
    runtime = FakeRuntime()
    async with httpx.AsyncClient(headers=AUTHORIZED) as http:
        async with served(runtime) as url:
            http.base_url = url
            reading = asyncio.create_task(read(http, 1000))
            await settle(lambda: bool(runtime._watchers))
        assert await asyncio.wait_for(reading, 5)
    assert not runtime._watchers


class Spoilt(FakeRuntime):
    """A runtime with a fault that nobody foresaw."""

    async def requests(self) -> tuple[RequestStats, ...]:
        raise ZeroDivisionError("a text of its inside")


async def test_a_fault_nobody_foresaw_is_a_500_without_its_inside_and_the_log_has_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with client(Spoilt()) as http:
        answer = await http.get("/runtime/requests")
        assert answer.status_code == 500 and "inside" not in answer.text
        assert "(ZeroDivisionError); see its log" in answer.json()["error"]["message"]
        assert "a text of its inside" in caplog.text
        assert (await http.get("/runtime/status")).status_code == 200
