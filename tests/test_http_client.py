"""HttpRuntime beyond the contract: a server that is lost and comes back, keys, foreign servers, odd characters."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_runtime import FakeRuntime
from http_serving import INFERENCE, OPERATOR, served
from test_runtime_contract import collect, settle

from runtime import http_client
from runtime.connect import attach
from runtime.http_client import AccessRefused, HttpRuntime, RevisionRefused
from runtime.instance import register, runtime_folder
from runtime.interface import (
    ChangePlan,
    ConfigRejected,
    EngineState,
    GenerateRequest,
    HostSample,
    LogLine,
    RequestFinished,
    RuntimeFault,
    RuntimeUnavailable,
    StatusChanged,
    WatchEvent,
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@asynccontextmanager
async def client(url: str, key: str = OPERATOR) -> AsyncIterator[HttpRuntime]:
    runtime = HttpRuntime(url, key)
    try:
        yield runtime
    finally:
        await runtime.aclose()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter waits between attempts."""
    monkeypatch.setattr(http_client, "RETRY_FIRST_S", 0.02)
    monkeypatch.setattr(http_client, "RETRY_MOST_S", 0.05)


async def test_a_server_that_goes_and_comes_back_is_told_and_attached_again(quick: None) -> None:
    port = free_port()
    seen: list[WatchEvent] = []

    async def look(runtime: HttpRuntime) -> None:
        async for event in runtime.watch():
            seen.append(event)

    def texts() -> list[str]:
        return [event.text for event in seen if isinstance(event, LogLine)]

    async with client(f"http://127.0.0.1:{port}") as attached:
        watching = asyncio.create_task(look(attached))
        async with served(FakeRuntime(), port):
            await settle(lambda: any(isinstance(event, HostSample) for event in seen))
            assert (await attached.status()).state is EngineState.READY
        await settle(lambda: bool(texts()))
        (lost,) = texts()
        with pytest.raises(RuntimeUnavailable) as refused:
            await attached.status()
        for text in (lost, str(refused.value)):
            since = time.strptime(text[: len("lost since 12:34:56")], "lost since %H:%M:%S")
            assert since and str(port) in text
        assert str(refused.value)[:19] == lost[:19], "since when does not move with each attempt"
        before = len(seen)
        async with served(FakeRuntime(), port):
            await settle(lambda: any(isinstance(event, StatusChanged) for event in seen[before:]))
            assert texts()[1].startswith("attached to ")
            assert (await attached.status()).state is EngineState.READY
            assert attached.lost_since_s is None
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a_plan_may_take_longer_than_other_answers() -> None:
    class Slow(FakeRuntime):
        async def preview(self, change: dict[str, Any]) -> ChangePlan:
            await asyncio.sleep(http_client.READ_S + 0.5)
            return await super().preview(change)

    async with served(Slow()) as url, client(url) as runtime:
        assert (await runtime.preview({"temperature": 0.5})).allowed


async def test_a_server_that_was_never_there_is_not_called_lost() -> None:
    async with client(f"http://127.0.0.1:{free_port()}") as attached:
        with pytest.raises(RuntimeUnavailable, match="no answer from .* since .*: it refuses connections"):
            await attached.describe()


async def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one() -> None:
    runtime = FakeRuntime(answer="word " * 1000)
    port = free_port()
    async with client(f"http://127.0.0.1:{port}") as attached:
        async with served(runtime, port):
            stream = attached.generate(GenerateRequest(prompt="x"))
            events = [await anext(stream) for _ in range(3)]
        with pytest.raises(RuntimeUnavailable):
            async for event in stream:
                events.append(event)
    assert not any(isinstance(event, RequestFinished) for event in events)


async def test_a_wrong_key_is_named_with_its_remedy_and_never_shown() -> None:
    async with served(FakeRuntime()) as url:
        for key in ("wrong", INFERENCE, "schlüssel"):
            async with client(url, key) as attached:
                for call in (attached.status(), collect(attached, GenerateRequest(prompt="x"))):
                    with pytest.raises(AccessRefused, match="DDTREE_OPERATOR_KEY") as refused:
                        await call
                    assert key not in str(refused.value)
                with pytest.raises(AccessRefused):
                    await anext(attached.watch())


async def test_a_conflict_is_refused_with_exit_code_3_and_who_was_first() -> None:
    async with served(FakeRuntime()) as url, client(url) as ann, client(url) as bob:
        revision = (await bob.preview({"mode": "off"})).revision
        await ann.apply({"mode": "chain"}, revision, "console 1 of ann@a")
        with pytest.raises(RevisionRefused, match="console 1 of ann@a set mode tree -> chain at ") as refused:
            await bob.apply({"mode": "off"}, revision, "console 2 of bob@b")
        assert refused.value.exit_code == 3 and refused.value.field == "revision"


async def test_text_with_characters_that_split_lines_elsewhere_arrives_whole() -> None:
    answer = "a\u2028b\u2029c\x85d\x0be \x1cf\r\ng 🧑‍🧑‍🧒 ende"
    async with served(FakeRuntime(answer=answer)) as url, client(url) as attached:
        events = await collect(attached, GenerateRequest(prompt="x"))
    direct = await collect(FakeRuntime(answer=answer), GenerateRequest(prompt="x"))
    assert events[-1].text == direct[-1].text
    assert [event.kind for event in events] == [event.kind for event in direct]


async def test_what_is_no_ddtree_server_is_said_to_be_none() -> None:
    async def hello(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        writer.close()

    async with await asyncio.start_server(hello, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with client(f"http://127.0.0.1:{port}") as attached:
            with pytest.raises(RuntimeFault, match="is it a ddtree server"):
                await attached.status()


@pytest.mark.parametrize("url", ["", "127.0.0.1:8642", "ftp://host", "http://", "unix:/x"])
def test_what_is_no_address_is_refused_naming_the_form(url: str) -> None:
    with pytest.raises(ConfigRejected, match="http://HOST:PORT"):
        HttpRuntime(url, "key")


# Which key goes where


def env_of(folder: Path, **more: str) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    return {"XDG_RUNTIME_DIR": str(folder), **more}


def key_of(runtime: HttpRuntime) -> str:
    return runtime._client.headers["authorization"].removeprefix("Bearer ")


async def test_a_generated_key_goes_to_its_own_server_only(tmp_path: Path) -> None:
    env = env_of(tmp_path / "run")
    folder = runtime_folder(env)
    key_file = folder / "operator.key"
    key_file.write_text("generated\n")
    key_file.chmod(0o600)
    with pytest.raises(AccessRefused, match="DDTREE_OPERATOR_KEY is not set"):
        attach("http://127.0.0.1:8642", env)
    register(folder, "http://127.0.0.1:8642", key_file)
    with_variable = {**env, "DDTREE_OPERATOR_KEY": "elsewhere"}
    assert key_of(attach("http://localhost:8642", with_variable)) == "generated"
    for foreign in ("http://127.0.0.1:8643", "http://gpu01:8642"):
        assert key_of(attach(foreign, with_variable)) == "elsewhere"
        with pytest.raises(AccessRefused):
            attach(foreign, env)


async def test_a_key_file_that_others_may_read_is_not_used(tmp_path: Path) -> None:
    env = env_of(tmp_path / "run")
    key_file = tmp_path / "open.key"
    key_file.write_text("open")
    key_file.chmod(0o644)
    register(runtime_folder(env), "http://127.0.0.1:8642", key_file)
    with pytest.raises(ConfigRejected, match="read by others"):
        attach("http://127.0.0.1:8642", env)
