"""The OpenAI-compatible API over real servers on loopback: what is asked for and what comes back."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from api_client import CHAT, HI, TEXT, chat, frames, refused, streamed_text, whole_text
from api_server import CONTEXT, ApiServer

from runtime.config import RuntimeConfig


@pytest.fixture(scope="module")
def default() -> Iterator[ApiServer]:
    """The default model."""
    with ApiServer(RuntimeConfig(threads=1, max_tokens=40, max_seq_len=512)) as server:
        yield server


def test_the_official_client_chats_and_completes_whole_and_streamed(default: ApiServer) -> None:
    client = default.openai()
    asked: dict[str, Any] = {"model": "smollm2-135m-instruct", "temperature": 0, "max_tokens": 24}
    messages: Any = [{"role": "user", "content": "Name three colours."}]
    reply = client.chat.completions.create(messages=messages, **asked)
    parts = list(
        client.chat.completions.create(
            messages=messages, stream=True, stream_options={"include_usage": True}, **asked
        )
    )
    assert reply.choices[0].message.content
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == reply.choices[0].message.content
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-1].usage == reply.usage.model_copy(
        update={"prompt_tokens_details": parts[-1].usage.prompt_tokens_details}
    )
    completion = client.completions.create(prompt="The quick brown", **asked)
    text = "".join(
        part.choices[0].text
        for part in client.completions.create(prompt="The quick brown", stream=True, **asked)
    )
    assert text == completion.choices[0].text
    assert [model.id for model in client.models.list()] == ["smollm2-135m-instruct"]
    assert client.models.retrieve("smollm2-135m-instruct").id == "smollm2-135m-instruct"


def test_the_official_client_raises_its_own_errors(tiny_api: ApiServer) -> None:
    client = tiny_api.openai()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-5", messages=HI)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="target",
            messages=HI,  # type: ignore[arg-type]
            tools=[{"type": "function", "function": {"name": "f"}}],
        )


@pytest.mark.case("E2")
@pytest.mark.parametrize("mode", ["off", "tree"])
def test_characters_split_over_tokens_and_rounds_arrive_whole(default: ApiServer, mode: str) -> None:
    messages = [{"role": "user", "content": "Repeat exactly: 👩‍🚀🎉 日本語 €"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 29, "ddtree": {"mode": mode}}
    with httpx.Client(base_url=default.url, timeout=120) as http:
        text = whole_text(http, CHAT, body)
        assert "👩‍🚀🎉" in text
        assert "\N{REPLACEMENT CHARACTER}" not in text[:-1]
        assert streamed_text(http, CHAT, body) == text


@pytest.mark.case("E2")
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_streamed_text_equals_the_whole_one_for_any_bytes_and_any_cap(http: httpx.Client, path: str) -> None:
    given = {"messages": HI} if path == CHAT else {"prompt": "日本 🎉"}
    texts = set()
    for seed in range(6):
        body = {**given, "temperature": 1, "seed": seed, "max_tokens": 7 + 9 * seed, "ignore_eos": True}
        text = whole_text(http, path, body)
        assert streamed_text(http, path, body) == text
        texts.add(text)
    assert len(texts) == 6


@pytest.mark.case("E1")
@pytest.mark.parametrize("mode", ["off", "tree"])
def test_a_stop_string_over_tokens_and_rounds_cuts_the_text_once(http: httpx.Client, mode: str) -> None:
    body = {
        "prompt": "the end of it",
        "temperature": 0,
        "max_tokens": 40,
        "ignore_eos": True,
        "ddtree": {"mode": mode},
    }
    full = whole_text(http, TEXT, body)
    for start in range(0, len(full) - 6, 5):
        stop = full[start : start + 6]
        response = http.post(TEXT, json={**body, "stop": stop}).json()
        assert response["choices"][0]["text"] == full[: full.find(stop)]
        assert response["choices"][0]["finish_reason"] == "stop"
        assert streamed_text(http, TEXT, {**body, "stop": [stop]}) == full[: full.find(stop)]
    overlapping = [full[12:18], full[10:15]]
    assert whole_text(http, TEXT, {**body, "stop": overlapping}) == full[: min(map(full.find, overlapping))]
    never = [full[-4:] + "!", "never", "comes", "up"]
    assert whole_text(http, TEXT, {**body, "stop": never}) == full
    assert streamed_text(http, TEXT, {**body, "stop": never}) == full


@pytest.mark.case("E5")
def test_the_usage_chunk_has_no_choices_and_comes_last_and_only_when_asked(http: httpx.Client) -> None:
    body = {"messages": HI, "max_tokens": 6, "ignore_eos": True, "stream": True}
    asked = frames(http.post(CHAT, json={**body, "stream_options": {"include_usage": True}}))
    assert asked[-1] == "[DONE]"
    assert asked[-2]["choices"] == [] and asked[-2]["usage"]["completion_tokens"] == 6
    assert all(part["choices"] and part["usage"] is None for part in asked[:-2])
    for options in ({"include_usage": False}, None):
        plain = frames(http.post(CHAT, json={**body, "stream_options": options}))
        assert all(part["choices"] and "usage" not in part for part in plain[:-1])


@pytest.mark.case("E5")
def test_choices_differ_by_their_seed_and_repeat_with_it(http: httpx.Client) -> None:
    body = {"messages": HI, "max_tokens": 16, "temperature": 1, "seed": 42, "ignore_eos": True}
    reply = http.post(CHAT, json={**body, "n": 3}).json()
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts[0] == whole_text(http, CHAT, body)
    assert texts == [
        c["message"]["content"] for c in http.post(CHAT, json={**body, "n": 3}).json()["choices"]
    ]
    assert reply["usage"]["completion_tokens"] == 48
    assert reply["ddtree"]["seed"] == 42 == reply["choices"][0]["ddtree"]["seed"]
    seeds = [choice["ddtree"]["seed"] for choice in reply["choices"]]
    assert whole_text(http, CHAT, {**body, "seed": seeds[2]}) == texts[2]
    parts = frames(http.post(CHAT, json={**body, "n": 3, "stream": True}))
    streamed = ["", "", ""]
    for part in parts[:-1]:
        for choice in part["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == texts


@pytest.mark.case("A04")
def test_requests_without_a_seed_differ(http: httpx.Client) -> None:
    texts = {whole_text(http, CHAT, {"messages": HI, "max_tokens": 16, "temperature": 1}) for _ in range(5)}
    assert len(texts) > 1


def test_a_list_of_prompts_gives_their_choices_in_order(http: httpx.Client) -> None:
    body = {"max_tokens": 10, "temperature": 0, "ignore_eos": True}
    texts = [whole_text(http, TEXT, {**body, "prompt": each}) for each in ("one", "two")]
    both = http.post(TEXT, json={**body, "prompt": ["one", "two"], "n": 2}).json()
    assert [choice["text"] for choice in both["choices"]] == [texts[0], texts[0], texts[1], texts[1]]
    assert both["usage"]["completion_tokens"] == 40
    ids = [[1, 2, 3], [4, 5, 6]]
    alone = [whole_text(http, TEXT, {**body, "prompt": each}) for each in ids]
    together = http.post(TEXT, json={**body, "prompt": ids}).json()
    assert [choice["text"] for choice in together["choices"]] == alone
    assert together["usage"]["prompt_tokens"] == 6


@pytest.mark.case("A06")
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_logprobs_have_one_entry_for_each_token_and_agree_with_plain_decoding(
    http: httpx.Client, path: str
) -> None:
    body: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
    body |= (
        {"messages": HI, "logprobs": True, "top_logprobs": 2}
        if path == CHAT
        else {"prompt": "hi", "logprobs": 2}
    )
    values = {}
    for mode in ("off", "tree"):
        reply = http.post(path, json={**body, "ddtree": {"mode": mode}}).json()
        known = reply["choices"][0]["logprobs"]
        values[mode] = (
            [entry["logprob"] for entry in known["content"]] if path == CHAT else known["token_logprobs"]
        )
        assert len(values[mode]) == reply["usage"]["completion_tokens"] == 16
        tops = (
            [len(entry["top_logprobs"]) for entry in known["content"]]
            if path == CHAT
            else [len(top) for top in known["top_logprobs"]]
        )
        assert max(tops) == 2
        parts = frames(http.post(path, json={**body, "ddtree": {"mode": mode}, "stream": True}))
        streamed = [c["logprobs"] for part in parts[:-1] for c in part["choices"] if c["logprobs"]]
        if path == CHAT:
            assert [entry for each in streamed for entry in each["content"]] == known["content"]
        else:
            assert [value for each in streamed for value in each["text_offset"]] == known["text_offset"]
    assert values["off"] == pytest.approx(values["tree"], abs=1e-3)
    assert all(value <= 0 for value in values["off"])


@pytest.mark.case("A05")
def test_penalties_and_minimum_length_are_the_same_with_trees(http: httpx.Client) -> None:
    body = {"prompt": "in the end in the end", "temperature": 0, "max_tokens": 32, "ignore_eos": True}
    for extra in (
        {"frequency_penalty": 1},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.3},
        {"logit_bias": {"5": 4, "7": -100}},
        {"min_tokens": 8, "ignore_eos": False},
    ):
        texts = [
            whole_text(http, TEXT, {**body, **extra, "ddtree": {"mode": mode}})
            for mode in ("off", "chain", "tree")
        ]
        assert len(set(texts)) == 1


def test_mode_budget_and_workload_are_honoured_and_echoed(http: httpx.Client) -> None:
    body = {"messages": HI, "temperature": 0, "max_tokens": 20, "ignore_eos": True}
    seen = {}
    for mode, budget in (("off", 0), ("chain", 7), ("tree", 5)):
        options = {"mode": mode, "tree_budget": budget, "workload": "test"}
        reply = http.post(CHAT, json={**body, "ddtree": options}).json()
        seen[mode] = reply["choices"][0]["message"]["content"]
        used = reply["ddtree"]
        assert (used["mode"], used["tree_budget"], used["workload"]) == (mode, budget, "test")
        assert used["accept_length"] == pytest.approx(19 / used["rounds"])
        assert used["plain_reason"] is None
        parts = frames(http.post(CHAT, json={**body, "ddtree": options, "stream": True}))
        last = next(part for part in parts[:-1] if part["choices"][0]["finish_reason"])
        assert last["ddtree"]["mode"] == mode and last["ddtree"]["rounds"] == used["rounds"]
    assert len(set(seen.values())) == 1
    plain = http.post(CHAT, json={**body, "ddtree": {"tree_budget": 0}}).json()
    assert plain["ddtree"]["plain_reason"] == "plain decoding because tree_budget is 0"
    assert plain["ddtree"]["mode"] == "off"


def test_other_modes_run_beside_each_other_and_give_the_same_texts(http: httpx.Client) -> None:
    def ask(mode: str) -> dict[str, Any]:
        body = {"prompt": "then", "temperature": 1, "seed": 3, "max_tokens": 60, "ignore_eos": True}
        return http.post(TEXT, json={**body, "ddtree": {"mode": mode}}).json()

    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(ask, ["off", "tree", "chain", "tree"]))
    assert [reply["ddtree"]["mode"] for reply in replies] == ["off", "tree", "chain", "tree"]
    assert len({reply["choices"][0]["text"] for reply in replies}) == 1


def test_models_routes_and_health(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "alive"}
    assert http.get("/ready").json()["status"] == "ready"
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list" and listed["data"][0]["id"] == "target"
    assert listed["data"][0]["max_model_len"] == CONTEXT
    assert refused(http.get("/v1/models/other"), "model", 404)["code"] == "model_not_found"
    assert refused(chat(http, model="other"), "model", 404)["code"] == "model_not_found"
    assert chat(http, model="target").json()["model"] == "target"
    assert chat(http, model=None).json()["model"] == "target"
    refused(http.get("/nothing"), None, 404)
    refused(http.get(CHAT), None, 405)


def test_the_page_of_the_api_needs_no_other_host(http: httpx.Client) -> None:
    page = http.get("/docs").text
    assert "/v1/chat/completions" in page and "CompletionRequest" in page
    assert "http://" not in page and "https://" not in page and "<script" not in page
    document = http.get("/openapi.json").json()
    assert "422" not in document["paths"][CHAT]["post"]["responses"]
