"""An OpenAI-compatible server whose tokens come at fixed times, as an httpx transport and over a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx


@dataclass
class Script:
    """Token times of every answer, and one stall of the whole server."""

    first_s: float = 0.2
    next_s: float = 0.05
    tokens: int = 11
    per_chunk: int = 1
    stall: tuple[float, float] | None = None
    """From when to when nothing is sent, in the loop's time."""
    usage: bool = True
    fail_every: int = 0
    seen_at: list[float] = field(default_factory=list)

    async def stream(self) -> AsyncIterator[bytes]:
        """The body of one answer."""
        clock = asyncio.get_running_loop().time
        start = clock()
        self.seen_at.append(start)
        yield _frame({"choices": [{"delta": {"role": "assistant"}}]})
        for chunk in range(0, self.tokens, self.per_chunk):
            # Token i is due at first_s + i * next_s; a chunk comes with its last token.
            last = min(chunk + self.per_chunk, self.tokens) - 1
            due = start + self.first_s + (last * self.next_s if chunk else 0.0)
            if self.stall and self.stall[0] <= due < self.stall[1]:
                due = self.stall[1]
            await asyncio.sleep(max(0.0, due - clock()))
            yield _frame({"choices": [{"delta": {"content": "x"}}]})
        yield _frame({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        if self.usage:
            yield _frame({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": self.tokens}})
        yield b"data: [DONE]\n\n"

    def fails(self) -> bool:
        return bool(self.fail_every) and (len(self.seen_at) + 1) % self.fail_every == 0


def _frame(chunk: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


class _Body(httpx.AsyncByteStream):
    def __init__(self, script: Script) -> None:
        self._script = script

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._script.stream():
            yield part


class ScriptTransport(httpx.AsyncBaseTransport):
    """Answers inside the client's own loop, so that virtual time holds for both."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.bodies: list[dict[str, object]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "scripted"}]})
        self.bodies.append(json.loads(request.content))
        if self.script.fails():
            self.script.seen_at.append(asyncio.get_running_loop().time())
            return httpx.Response(503, json={"error": {"message": "too busy"}})
        return httpx.Response(200, stream=_Body(self.script))


async def serve_script(script: Script) -> asyncio.Server:
    """The same over a socket on a free port of this machine; close it after use."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                sized = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
                await reader.readexactly(int(sized[0].split(b":")[1]) if sized else 0)
                if b"/v1/models" in head:
                    body = json.dumps({"data": [{"id": "scripted"}]}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                else:
                    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                    async for part in script.stream():
                        writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                        await writer.drain()
                    writer.write(b"0\r\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", 0)
