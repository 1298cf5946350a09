"""The application as a whole: which routes need which key, and which web pages may call it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from fake_runtime import FakeRuntime

from runtime.http_security import Keys
from runtime.http_server import create_app
from runtime.interface import EngineState
from runtime.listener import ServerSettings

PAGE = "https://page.example"


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
async def client(runtime: FakeRuntime) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(runtime, Keys("inference", "operator"), ServerSettings(cors_origins=(PAGE,)))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8642"
    ) as client:
        yield client


def bearer(key: str | bytes) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + (key if isinstance(key, bytes) else key.encode())}


@pytest.mark.case("E8")
async def test_every_data_and_control_route_needs_its_key(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    for path, methods in paths.items():
        for method in methods:
            url = path.replace("{model}", "x").replace("{request_id}", "x")
            for key in ("", "Inference", "inference ", b"\xff\xfe", "operatorr"):
                if key == "inference " and path.startswith("/v1"):
                    continue
                response = await client.request(method, url, headers=bearer(key))
                if path in ("/health", "/ready"):
                    assert response.status_code == 200
                    continue
                assert response.status_code == 401, (path, key)
                assert response.json()["error"]["type"] == "authentication_error"
    assert (await client.get("/v1/models", headers=bearer("inference"))).status_code == 200
    assert (await client.get("/v1/models", headers=bearer("operator"))).status_code == 200
    assert (await client.get("/runtime/status", headers=bearer("inference"))).status_code == 401
    assert (await client.get("/runtime/status", headers=bearer("operator"))).status_code == 200


@pytest.mark.case("E8")
async def test_only_configured_pages_may_call(client: httpx.AsyncClient) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    allowed = await client.options("/v1/chat/completions", headers={"origin": PAGE, **asked})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == PAGE
    other = await client.options("/v1/chat/completions", headers={"origin": "https://other.example", **asked})
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
    refused = await client.get("/v1/models", headers={"origin": PAGE})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == PAGE


@pytest.mark.case("E8")
async def test_another_host_name_is_refused_on_loopback(client: httpx.AsyncClient) -> None:
    response = await client.get("/health", headers={"host": "evil.example"})
    assert response.status_code == 400 and "Host" in response.json()["error"]["message"]


@pytest.mark.parametrize("state", [EngineState.LOADING, EngineState.DRAINING, EngineState.FAILED])
async def test_what_does_not_serve_is_alive_but_not_ready(
    client: httpx.AsyncClient, runtime: FakeRuntime, state: EngineState
) -> None:
    runtime.become(state, "a reason")
    assert (await client.get("/health")).status_code == 200
    ready = await client.get("/ready")
    assert ready.status_code == 503 and "a reason" in ready.json()["error"]["message"]
    assert int(ready.headers["retry-after"]) > 0
    body = {"messages": [{"role": "user", "content": "hi"}]}
    asked = await client.post("/v1/chat/completions", json=body, headers=bearer("inference"))
    assert asked.status_code == 503 and int(asked.headers["retry-after"]) > 0
