"""Limits and failures of API requests: none is passed off as a complete answer, none leaves anything behind."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tiny_models
from api_client import CHAT, HI, TEXT, chat, frames, idle, refused, settle, streamed_text, whole_text
from api_server import CONTEXT, ApiServer

from runtime.config import RuntimeConfig
from runtime.listener import ServerSettings


@pytest.mark.case("E7")
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_does_not_fit_is_refused_before_any_byte(http: httpx.Client, stream: bool) -> None:
    body = {"max_tokens": 4, "stream": stream}
    fits = http.post(TEXT, json={**body, "prompt": [5] * (CONTEXT - 1)})
    assert fits.status_code == 200
    for length in (CONTEXT, CONTEXT + 1):
        error = refused(http.post(TEXT, json={**body, "prompt": [5] * length}), "prompt")
        assert str(CONTEXT) in error["message"] and str(length) in error["message"]
        refused(http.post(TEXT, json={**body, "prompt": [[5], [5] * length]}), "prompt")
    long = [{"role": "user", "content": "word " * 1000}]
    refused(http.post(CHAT, json={**body, "messages": long}), "messages")


@pytest.mark.case("E7")
@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_is_refused_unread(http: httpx.Client, declared: bool) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 10_000_000}]}).encode()
    parts = (body[i : i + 65536] for i in range(0, len(body), 65536))
    response = http.post(
        CHAT, content=body if declared else parts, headers={"content-type": "application/json"}
    )
    assert "200000 bytes" in refused(response, None, 413)["message"]
    assert chat(http).status_code == 200


@pytest.mark.case("E7")
def test_an_engine_that_fails_midway_ends_the_stream_with_an_error_frame(
    http: httpx.Client, tiny_api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import runtime.engine as engine_module

    settle(lambda: bool(tiny_api.status().baselines))
    decode_round = engine_module.decode_round
    rounds = iter(range(1000))

    def failing(*given: Any) -> Any:
        if next(rounds) == 3:
            raise ArithmeticError("made to fail")
        return decode_round(*given)

    body = {"messages": HI, "max_tokens": 60, "ignore_eos": True}
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "decode_round", failing)
        parts = frames(http.post(CHAT, json={**body, "stream": True}))
    assert "made to fail" in parts[-1]["error"]["message"]
    assert parts[-1]["error"]["type"] == "server_error"
    assert all(choice["finish_reason"] is None for part in parts[:-1] for choice in part["choices"])
    rounds = iter(range(3, 1000))
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "decode_round", failing)
        assert "made to fail" in refused(http.post(CHAT, json=body), None, 500)["message"]
        rounds = iter(range(1000))
        patch.setattr(engine_module, "decode_round", failing)
        with pytest.raises(openai.APIError, match="made to fail"):
            for _ in tiny_api.openai().completions.create(
                model="target", prompt="a", stream=True, max_tokens=60
            ):
                pass
    assert chat(http).status_code == 200


def test_a_cancelled_request_is_told_and_not_passed_off_as_complete(
    http: httpx.Client, tiny_api: ApiServer
) -> None:
    body = {"messages": HI, "max_tokens": 140, "ignore_eos": True, "stream": True}
    lines = []
    with http.stream("POST", CHAT, json=body) as response:
        for line in response.iter_lines():
            lines.append(line)
            if len(lines) == 3:
                assert cancel(tiny_api, response.headers["x-request-id"])
    last = json.loads(lines[-2].removeprefix("data: "))
    assert last["error"]["code"] == "cancelled"


def cancel(server: ApiServer, request_id: str) -> bool:
    return server.run(lambda runtime: runtime.cancel(request_id))


@pytest.fixture
def slow_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that take 0.1 s, as a large model's."""
    import runtime.engine as engine_module

    decode_round = engine_module.decode_round

    def slow(*given: Any) -> Any:
        time.sleep(0.1)
        return decode_round(*given)

    monkeypatch.setattr(engine_module, "decode_round", slow)


def test_a_client_that_leaves_frees_its_slots(
    http: httpx.Client, tiny_api: ApiServer, slow_rounds: None
) -> None:
    body = {"messages": HI, "max_tokens": 120, "ignore_eos": True, "ddtree": {"mode": "off"}}
    with http.stream("POST", CHAT, json={**body, "stream": True, "n": 2}) as response:
        lines = response.iter_lines()
        assert next(lines)
        assert tiny_api.status().running == 2
    settle(lambda: idle(tiny_api))
    left = tiny_api.run(lambda runtime: runtime.requests())[:2]
    assert {stats.finish_reason for stats in left} == {"cancelled"}
    assert max(stats.output_tokens for stats in left) < 12
    with pytest.raises(httpx.ReadTimeout):
        http.post(CHAT, json={**body, "n": 6}, timeout=0.3)
    settle(lambda: idle(tiny_api))


def test_a_pause_is_filled_with_comments(http: httpx.Client, slow_rounds: None) -> None:
    body = {"prompt": "a", "max_tokens": 4, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor(5) as pool:
        replies = list(pool.map(lambda _: frames(http.post(TEXT, json={**body, "max_tokens": 12})), range(5)))
    assert any(None in parts for parts in replies), "the fifth waits for a place"
    assert all(parts[-1] == "[DONE]" for parts in replies)


@pytest.fixture
def one_place(tiny_folder: Path) -> RuntimeConfig:
    """One request at a time, and no queue."""
    return tiny_models.tiny_config(
        tiny_folder / "target", max_seq_len=CONTEXT, max_queue=0, max_concurrency=1, mode="off"
    )


def test_a_full_queue_is_a_429_that_says_when_to_come_back(
    one_place: RuntimeConfig, slow_rounds: None
) -> None:
    body = {"prompt": "a", "max_tokens": 140, "ignore_eos": True}
    with ApiServer(one_place) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        with http.stream("POST", TEXT, json={**body, "stream": True}) as first:
            lines = first.iter_lines()
            assert next(lines)
            for stream in (False, True):
                busy = http.post(TEXT, json={**body, "stream": stream})
                assert refused(busy, None, 429)["type"] == "rate_limit_error"
                assert int(busy.headers["retry-after"]) >= 1
        settle(lambda: idle(server))


def test_the_time_limit_of_a_request_is_a_504_or_an_error_frame(
    one_place: RuntimeConfig, slow_rounds: None
) -> None:
    body = {"prompt": "a", "max_tokens": 140, "ignore_eos": True}
    settings = ServerSettings(request_timeout_s=1.5, keep_alive_s=0.2)
    with ApiServer(one_place, settings) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        late = http.post(TEXT, json=body)
        assert "1.5 s" in refused(late, None, 504)["message"]
        assert late.headers["x-should-retry"] == "false"
        settle(lambda: idle(server))
        parts = [part for part in frames(http.post(TEXT, json={**body, "stream": True})) if part]
        assert parts[-1]["error"]["code"] == "request_timeout"
        settle(lambda: idle(server))


def test_many_clients_of_which_half_leave_do_not_disturb_the_others(tiny_api: ApiServer) -> None:
    def body(number: int) -> dict[str, Any]:
        return {"prompt": f"client {number}", "max_tokens": 60, "temperature": 0, "ignore_eos": True}

    with httpx.Client(base_url=tiny_api.url, timeout=120) as http:
        solo = [whole_text(http, TEXT, body(number)) for number in range(20)]
    draw = random.Random(7)
    waits = [draw.uniform(0, 0.4) for _ in range(20)]

    def ask(number: int) -> str | None:
        if number % 2 == 0:
            with httpx.Client(base_url=tiny_api.url, timeout=120) as http:
                path_text = streamed_text if number % 4 else whole_text
                return path_text(http, TEXT, body(number))
        leave(tiny_api.url, {**body(number), "stream": number % 4 == 1}, waits[number])
        return None

    with ThreadPoolExecutor(20) as pool:
        texts = list(pool.map(ask, range(20)))
    assert texts[::2] == solo[::2]
    settle(lambda: idle(tiny_api))


def leave(url: str, body: dict[str, Any], wait: float) -> None:
    """Sends a request and drops the connection after `wait` seconds, whatever has come by then."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        threading.Event().wait(wait)
