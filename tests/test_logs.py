"""The log of a service: one line a record, request ids throughout, neither keys nor prompts."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fake_runtime import FakeRuntime
from served import serving

from runtime import logs
from runtime.http_security import Keys
from runtime.interface import GenerateRequest, LogLine, RequestStats
from runtime.listener import Listener, ServerSettings

SECRET, OPERATOR = "sk-inference-0123456789", "operator-9876543210"


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    known = {name: logging.getLogger(name) for name in ("ddtree", "uvicorn")}
    kept = {name: (list(each.handlers), each.level, each.propagate) for name, each in known.items()}
    disabled = logs.PROMPTS.disabled
    yield
    for name, (handlers, level, propagate) in kept.items():
        known[name].handlers, known[name].propagate = handlers, propagate
        known[name].setLevel(level)
    logs.PROMPTS.disabled = disabled


def lines(captured: pytest.CaptureFixture[str]) -> list[dict]:
    return [json.loads(line) for line in captured.readouterr().err.splitlines()]


def test_json_lines_carry_fields_and_text_lines_stay_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.log_to_stderr("info", "json")
    logs.LOGGER.info("two\nlines", extra={"fields": {"tokens": 3, "what": "a\nb"}})
    logs.LOGGER.debug("not shown")
    (entry,) = lines(capsys)
    assert entry["message"] == "two\nlines" and entry["tokens"] == 3 and entry["level"] == "info"
    assert entry["time"].endswith("Z")
    logs.log_to_stderr("info", "text")
    logs.LOGGER.info("two\nlines\x1b[31m", extra={"fields": {"tokens": 3, "what": "a b\n"}})
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "\x1b" not in said
    assert 'tokens=3 what="a b\\n"' in said


def test_a_traceback_is_in_the_record_and_keys_are_masked_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    for style in ("json", "text"):
        logs.log_to_stderr("info", style)
        logs.mask(SECRET, None)
        try:
            raise ValueError(f"header was Bearer {SECRET}")
        except ValueError:
            logs.LOGGER.exception("failed with %s", SECRET, extra={"fields": {"deep": [{"key": SECRET}]}})
        said = capsys.readouterr().err
        assert SECRET not in said
        assert "Traceback" in said and "[key]" in said


def test_prompts_are_logged_only_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    request = GenerateRequest(prompt="my secret plan", client="me")
    logs.log_to_stderr("debug", "json")
    logs.log_prompt(request)
    assert lines(capsys) == []
    logs.log_to_stderr("info", "json", show_prompts=True)
    logs.log_prompt(request)
    assert lines(capsys)[0]["prompt"] == "my secret plan"


def test_the_level_is_heeded_and_an_error_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    logs.log_to_stderr("warning", "json")
    stats = RequestStats(
        request_id="r1",
        finish_reason="stop",
        mode="tree",
        tree_budget=8,
        temperature=0.0,
        prompt_tokens=3,
        cached_tokens=0,
        output_tokens=4,
        rounds=2,
        num_correct_drafts=1,
        accept_length=1.5,
    )
    logs.log_request(stats, None, None)
    logs.log_request(stats.model_copy(update={"finish_reason": "error"}), "it broke", "h1")
    (entry,) = lines(capsys)
    assert entry["error"] == "it broke" and entry["http_request"] == "h1"
    assert "ttft_s" not in entry, "what is not known is left out"


async def test_requests_are_logged_with_their_id_and_without_query_headers_or_body(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.log_to_stderr("info", "json")
    listener = Listener(FakeRuntime(), Keys(SECRET, OPERATOR), ServerSettings(port=0))
    listener.start()
    bearer = {"Authorization": f"Bearer {SECRET}"}
    async with httpx.AsyncClient(base_url=listener.url, trust_env=False) as client:
        body = {"messages": [{"role": "user", "content": "my secret plan"}]}
        named = await client.post(
            "/v1/chat/completions", json=body, headers=bearer | {"x-request-id": "mine-1"}
        )
        odd = await client.get(f"/v1/models?key={SECRET}", headers=bearer | {"x-request-id": "a b\\"})
        await client.get(f"/none/{SECRET}/%0a%1b")
        await client.get("/v1/models", headers={"Authorization": f"Bearer {OPERATOR}x"})
        await client.get("/health")
        metrics = (await client.get("/metrics")).text
    listener.stop()
    said = capsys.readouterr().err
    assert not [word for word in (SECRET, OPERATOR, "secret plan") if word in said or word in metrics]
    entries = [json.loads(line) for line in said.splitlines()]
    access = [each for each in entries if each["logger"] == "ddtree.access"]
    assert [each["message"].split()[0] for each in access] == ["POST", "GET", "GET", "GET"], (
        "not the health check"
    )
    assert access[0]["http_request"] == "mine-1"
    assert named.headers.get_list("x-request-id") == [named.json()["id"]], "the id the engine knows it by"
    assert access[1]["http_request"] == odd.headers["x-request-id"] != "a b\\"
    assert [each["message"].split()[-1] for each in access] == ["200", "200", "404", "401"]
    assert 'route="/v1/chat/completions",status="200"' in metrics
    assert 'route="none",status="404"' in metrics


def test_a_server_process_shows_neither_keys_nor_prompts(tmp_path: Path, tiny_folder: Path) -> None:
    keys = {"DDTREE_API_KEY": SECRET, "DDTREE_OPERATOR_KEY": OPERATOR}
    options = ("--model", str(tiny_folder / "target"), "--drafter", "none", "--log-format", "json")
    with serving(tmp_path, *options, **keys) as served:
        served.wait_ready()
        bearer = {"Authorization": f"Bearer {SECRET}"}
        body = {"prompt": "my secret plan", "max_tokens": 3}
        reply = served.post("/v1/completions", body, headers=bearer | {"x-request-id": "mine-2"})
        assert reply.status_code == 200
        assert served.post("/v1/completions", body).status_code == 401
        status = served.get("/runtime/status", headers={"Authorization": f"Bearer {OPERATOR}"})
        shown = status.text + served.get("/metrics", headers=bearer).text
        served.process.terminate()
        assert served.wait_end() == 0
        said = served.text
    assert not [word for word in (SECRET, OPERATOR, "secret plan") if word in said + shown]
    entries = [json.loads(line) for line in said.splitlines()]
    ours = [each["message"] for each in entries if each.get("http_request") == "mine-2"]
    assert "request finished" in ours and "POST /v1/completions 200" in ours


def test_who_watches_gets_records_without_keys_and_neither_prompts_nor_access_lines() -> None:
    logs.log_to_stderr("info", show_prompts=True)
    logs.mask(SECRET)
    told: list[LogLine] = []
    watched = logs.watch_log(told.append)
    logs.log_to_stderr("info", show_prompts=True)  # who watches outlives a change of the log's place
    logs.mask(SECRET)
    try:
        raise ValueError(f"header was {SECRET}")
    except ValueError:
        logs.LOGGER.exception("it broke", extra={"fields": {"tokens": 3}})
    logging.getLogger("ddtree.telemetry").warning("GPU 1 is lost")
    logs.ACCESS.info("GET /runtime/status")
    logs.PROMPTS.info("a secret story")
    logs.LOGGER.debug("not shown")
    assert [line.text for line in told if line.level != "debug"] == ["it broke tokens=3", "GPU 1 is lost"]
    assert told[0].level == "error" and any("ValueError: header was [key]" in line.text for line in told)
    logs.unwatch_log(watched)
    logs.LOGGER.error("nobody watches")
    assert told[-1].text == "GPU 1 is lost"


def test_a_log_that_cannot_be_written_is_said_once_and_stops_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    handler = logs.LogFile("/dev/full", maxBytes=logs.MAX_BYTES, backupCount=1, delay=True, encoding="utf-8")
    logger = logging.getLogger("ddtree-test-of-a-full-disk")
    logger.propagate = False
    logger.addHandler(handler)
    for number in range(3):
        logger.error("line %d", number)
    said = capsys.readouterr().err
    assert said == "ddtree: the log /dev/full cannot be written: No space left on device\n"
    logger.removeHandler(handler)
    with contextlib.suppress(OSError):  # the rest of the buffer cannot be written either
        handler.close()
