"""Sends a load to any server with an OpenAI-compatible API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from runtime.interface import RuntimeUnavailable
from runtime.load import Arrived, Ended, Shot, ShotFailed
from runtime.rejection import words_of

CONNECT_S = 10.0


class OpenAiTarget:
    """A server's /v1/chat/completions, streamed, through one client."""

    def __init__(
        self, url: str, model: str | None = None, key: str | None = None, transport: Any = None
    ) -> None:
        """`url` with or without its /v1; `model` None = the first that the server lists."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.local = _is_local(self.url)
        """Whether the server runs on this host."""
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            # Requests of an open loop must not wait for one another here.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=not self.local,
            transport=transport,
        )

    async def open(self) -> str:
        """The model to ask for. Raises RuntimeUnavailable where no such server answers."""
        try:
            reply = await self._client.get("/v1/models", timeout=CONNECT_S)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise RuntimeUnavailable(f"{self.url} does not answer: {words_of(error)}") from None
        if reply.status_code != 200:
            raise RuntimeUnavailable(f"{self.url}/v1/models: {_refusal(reply.status_code, reply.content)}")
        try:
            names = [str(each["id"]) for each in reply.json()["data"]]
        except (ValueError, KeyError, TypeError):
            raise RuntimeUnavailable(
                f"{self.url}/v1/models: no list of models; is this an OpenAI API?"
            ) from None
        if self.model is None:
            if not names:
                raise RuntimeUnavailable(f"{self.url} lists no model; name one with --served-model")
            self.model = names[0]
        return self.model

    async def send(self, shot: Shot) -> AsyncIterator[Arrived | Ended]:
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=self._body(shot)) as reply:
                if reply.status_code != 200:
                    raise ShotFailed(_refusal(reply.status_code, await reply.aread()))
                end = Ended()
                async for chunk in _chunks(reply):
                    if chunk.get("error"):
                        raise ShotFailed(f"error in the stream: {_message(chunk)}")
                    end = _end(chunk, end)
                    if _has_text(chunk):
                        yield Arrived()
                yield end
        except httpx.HTTPError as error:
            raise ShotFailed(words_of(error)) from None

    def _body(self, shot: Shot) -> dict[str, Any]:
        load = shot.load
        messages = shot.prompt.get("messages") or [{"role": "user", "content": shot.prompt["prompt"]}]
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": load.max_tokens,
            "temperature": load.temperature,
            "seed": shot.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if load.ignore_eos:
            body["ignore_eos"] = True
        asked = {"mode": load.mode, "tree_budget": load.tree_budget}
        wanted = {name: value for name, value in asked.items() if value is not None}
        return body | ({"ddtree": wanted} if wanted else {})

    async def aclose(self) -> None:
        await self._client.aclose()


async def _chunks(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to [DONE]."""
    async for line in reply.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            raise ShotFailed("a line of the stream is not JSON") from None
        if isinstance(chunk, dict):
            yield chunk
    raise ShotFailed("the stream ended without [DONE]")


def _has_text(chunk: dict[str, Any]) -> bool:
    """Whether a chunk brings text, of the answer or of what leads to it."""
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
            return True
    return False


def _end(chunk: dict[str, Any], end: Ended) -> Ended:
    """`end` completed by what a chunk says of the whole answer."""
    usage = chunk.get("usage") or {}
    report = chunk.get("ddtree") or {}
    return Ended(
        usage.get("prompt_tokens", end.prompt_tokens),
        usage.get("completion_tokens", end.output_tokens),
        report.get("rounds", end.rounds),
        report.get("num_correct_drafts", end.num_correct_drafts),
    )


def _refusal(status: int, content: bytes) -> str:
    try:
        said = _message(json.loads(content))
    except ValueError:
        said = ""
    hint = "; set DDTREE_API_KEY or OPENAI_API_KEY" if status in (401, 403) else ""
    return f"HTTP {status}{f': {said}' if said else ''}{hint}"


def _message(answer: Any) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    said = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(said or "").split())[:200]


def _is_local(url: str) -> bool:
    from runtime.instance import is_loopback

    try:
        return is_loopback(httpx.URL(url).host)
    except httpx.InvalidURL:
        return False
