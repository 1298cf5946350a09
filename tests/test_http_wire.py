"""Bodies of the OpenAI-compatible API: what is read, what is harmless, what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from api_client import CHAT, HI, TEXT, chat, refused
from api_server import CONTEXT, ApiServer


@pytest.mark.case("E1")
@pytest.mark.parametrize("stop", ["", ["a", ""], ["a", "b", "c", "d", "e"], 5, [1], {"a": 1}])
def test_wrong_stop_strings_are_refused(http: httpx.Client, stop: Any) -> None:
    refused(chat(http, stop=stop), "stop")


@pytest.mark.case("E4")
@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"",
        b"null",
        b'"text"',
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "hi"}], "seed": ' + b"9" * 5000 + b"}",
        b'{"messages": ' + b"[" * 90_000 + b"]" * 90_000 + b"}",
        b'{"messages": null}',
        b'{"messages": []}',
        b'{"messages": ["hi"]}',
        b'{"messages": [{"role": "user"}]}',
        b'{"messages": [{"role": "user", "content": null}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
        b'{"messages": [{"role": "robot", "content": "hi"}]}',
    ],
    ids=lambda body: body[:40].decode("latin-1"),
)
def test_a_malformed_body_is_a_400_and_the_next_request_is_served(http: httpx.Client, body: bytes) -> None:
    response = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert len(response.json()["error"]["message"]) < 300
    assert chat(http).status_code == 200


@pytest.mark.case("E4")
@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_another_content_type_is_refused(http: httpx.Client, kind: str) -> None:
    body = json.dumps({"messages": HI})
    refused(http.post(CHAT, content=body, headers={"content-type": kind}))


@pytest.mark.case("E4")
def test_content_as_text_parts_reads_as_their_text(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "over "}, {"type": "text", "text": "there"}]
    one = chat(http, messages=[{"role": "user", "content": parts}], max_tokens=12)
    other = chat(http, messages=[{"role": "user", "content": "over there"}], max_tokens=12)
    assert one.json()["choices"][0]["message"] == other.json()["choices"][0]["message"]
    assert one.json()["usage"]["prompt_tokens"] == other.json()["usage"]["prompt_tokens"]


def test_a_reply_can_be_sent_back_as_it_came(http: httpx.Client) -> None:
    answer = chat(http).json()["choices"][0]["message"] | {"tool_calls": None, "annotations": []}
    assert chat(http, messages=[*HI, answer, *HI]).status_code == 200


@pytest.mark.case("E5")
@pytest.mark.parametrize(
    "field",
    [
        {"n": 1},
        {"logit_bias": {}},
        {"tools": []},
        {"tools": None},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"parallel_tool_calls": True},
        {"store": False},
        {"metadata": {}},
        {"service_tier": "auto"},
        {"logprobs": False},
        {"top_logprobs": 0},
        {"user": "someone"},
        {"stop": None},
        {"stop": []},
        {"stream": False},
        {"ddtree": {}},
        {"ddtree": None},
    ],
    ids=str,
)
def test_a_value_that_asks_for_nothing_is_accepted(http: httpx.Client, field: dict[str, Any]) -> None:
    plain = chat(http, temperature=0).json()["choices"][0]["message"]
    assert chat(http, temperature=0, **field).json()["choices"][0]["message"] == plain


@pytest.mark.case("E5")
@pytest.mark.parametrize(
    ("path", "field", "param"),
    [
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
        (CHAT, {"store": True}, "store"),
        (CHAT, {"temprature": 1}, "temprature"),
        (CHAT, {"best_of": 1}, "best_of"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"n": 0}, "n"),
        (CHAT, {"n": 129}, "n"),
        (CHAT, {"seed": -1}, "seed"),
        (CHAT, {"seed": 2**64}, "seed"),
        (CHAT, {"logit_bias": {"0": 101}}, "logit_bias"),
        (CHAT, {"logit_bias": {"a": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"99999": 1}}, "logit_bias"),
        (CHAT, {"stop_token_ids": [99999]}, "stop_token_ids"),
        (CHAT, {"min_tokens": 5}, "min_tokens"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"ddtree": {"mode": "fast"}}, "ddtree.mode"),
        (CHAT, {"ddtree": {"tree_budget": 10**6}}, "ddtree.tree_budget"),
        (CHAT, {"ddtree": {"budget": 1}}, "ddtree.budget"),
        (CHAT, {"messages": [{"role": "user", "content": "hi", "name": "Eve"}]}, "messages[0].name"),
        (CHAT, {"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role"),
        (TEXT, {"echo": True}, "echo"),
        (TEXT, {"suffix": "end"}, "suffix"),
        (TEXT, {"best_of": 2}, "best_of"),
        (TEXT, {"logprobs": 21}, "logprobs"),
        (TEXT, {"max_completion_tokens": 4}, "max_completion_tokens"),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": [1, "a"]}, "prompt"),
        (TEXT, {"prompt": [99999]}, "prompt"),
        (TEXT, {"prompt": ["a"] * 70, "n": 2}, "prompt"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(
    http: httpx.Client, path: str, field: dict[str, Any], param: str
) -> None:
    given = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    refused(http.post(path, json={**given, "max_tokens": 4, **field}), param)


@pytest.mark.parametrize(
    "field",
    [
        {"min_tokens": 10**30, "max_tokens": None},
        {"max_tokens": 10**30},
        {"top_k": 10**30, "temperature": 1},
        {"top_p": 5e-324, "temperature": 1},
        {"temperature": 5e-324},
        {"repetition_penalty": 5e-324},
        {"seed": 2**64 - 1, "temperature": 1, "n": 3},
        {"logit_bias": {str(token): -100 for token in range(288)}},
        {"stop": ["a" * 100_000]},
        {"messages": [{"role": "user", "content": "\x00\x1b[31m<|end|>"}], "user": "\x00\x1b[31m"},
        {"messages": [{"role": "user", "content": ""}]},
    ],
    ids=lambda field: str(field)[:40],
)
def test_values_at_the_edge_are_served(http: httpx.Client, field: dict[str, Any]) -> None:
    response = chat(http, **field)
    assert response.status_code == 200, response.text


@pytest.mark.case("E6")
@pytest.mark.parametrize("temperature", [-1, 2.1, "0.5", True, [0]])
def test_a_wrong_temperature_is_refused(http: httpx.Client, temperature: Any) -> None:
    refused(chat(http, temperature=temperature), "temperature")


@pytest.mark.case("E6")
@pytest.mark.case("A02")
def test_zero_is_greedy_and_null_or_absent_is_the_configured_default(
    http: httpx.Client, tiny_api: ApiServer
) -> None:
    greedy = chat(http, temperature=0).json()["choices"][0]["message"]
    assert chat(http, temperature=0.0).json()["choices"][0]["message"] == greedy
    assert chat(http, temperature=1e-6).json()["choices"][0]["message"] == greedy
    assert chat(http, temperature=1, top_k=1).json()["choices"][0]["message"] == greedy
    assert chat(http, temperature=1, top_p=1e-6).json()["choices"][0]["message"] == greedy
    set_default(tiny_api, {"temperature": 1.0})
    try:
        for fields in ({}, {"temperature": None}):
            texts = {chat(http, **fields).json()["choices"][0]["message"]["content"] for _ in range(4)}
            assert len(texts) > 1
        assert chat(http, temperature=0).json()["choices"][0]["message"] == greedy
    finally:
        set_default(tiny_api, {"temperature": 0.0})


def set_default(server: ApiServer, change: dict[str, Any]) -> None:
    async def apply(runtime: Any) -> None:
        await runtime.apply(change, (await runtime.status()).revision)

    server.run(apply)


@pytest.mark.case("E6")
def test_token_limits_mean_what_they_say(http: httpx.Client) -> None:
    body = {"messages": HI, "ignore_eos": True, "temperature": 0}
    for name in ("max_tokens", "max_completion_tokens"):
        one = http.post(CHAT, json={**body, name: 1}).json()
        assert one["usage"]["completion_tokens"] == 1 and one["choices"][0]["finish_reason"] == "length"
        for wrong in (0, -1, 1.5, "8", True):
            refused(http.post(CHAT, json={**body, name: wrong}), name)
        default = http.post(CHAT, json={**body, name: None}).json()
        assert default["usage"]["completion_tokens"] == 24
        most = http.post(CHAT, json={**body, name: 10**9}).json()
        assert most["usage"]["total_tokens"] == CONTEXT
    refused(
        http.post(CHAT, json={**body, "max_tokens": 4, "max_completion_tokens": 4}), "max_completion_tokens"
    )
