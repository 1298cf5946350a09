"""Asks an API server by bare HTTP and takes its answers apart."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
from api_server import ApiServer

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post(CHAT, json={"messages": HI, "max_tokens": 8, **fields})


def refused(response: httpx.Response, param: str | None = None, status: int = 400) -> dict[str, Any]:
    """The error object of a refusal, which names `param`."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"]
    assert error["param"] == param
    return error


def frames(response: httpx.Response) -> list[Any]:
    """The data of a stream's events; a comment as None."""
    blocks = response.text.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith(("data: ", ": ")) for block in blocks)
    data = [block.removeprefix("data: ") if block.startswith("data") else None for block in blocks]
    return [each if each in ("[DONE]", None) else json.loads(each) for each in data]


def streamed_text(http: httpx.Client, path: str, body: dict[str, Any]) -> str:
    """The text of choice 0 of a stream that ended well."""
    parts = frames(http.post(path, json={**body, "stream": True}))
    assert parts[-1] == "[DONE]"
    choices = [choice for part in parts[:-1] if part is not None for choice in part["choices"]]
    return "".join(c["delta"].get("content", "") if path == CHAT else c["text"] for c in choices)


def whole_text(http: httpx.Client, path: str, body: dict[str, Any]) -> str:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["message"]["content"] if path == CHAT else choice["text"]


def settle(condition: Callable[[], bool]) -> None:
    """Waits until `condition` holds."""
    for _ in range(400):
        if condition():
            return
        time.sleep(0.025)
    raise AssertionError("did not settle")


def idle(server: ApiServer) -> bool:
    status = server.status()
    return (status.running, status.waiting, status.slots_used, server.tasks()) == (0, 0, 0, 0)
