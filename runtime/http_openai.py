"""The OpenAI-compatible routes: `/v1/models`, `/v1/completions`, `/v1/chat/completions`.

Requests are `runtime.http_wire`, replies `runtime.http_reply`; how a request is run is `runtime.http_run`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from runtime.http_connection import CLIENT_LEFT, ClientGone, EventStream, StrictRoute, while_connected
from runtime.http_errors import ApiError
from runtime.http_reply import ChatFormat, ChatReply, CompletionFormat, CompletionReply, Format
from runtime.http_run import ChoiceEvent, Job, choice_events, frames, opening_events, whole
from runtime.http_wire import ChatRequest, CompletionRequest, GenerationFields
from runtime.interface import (
    Description,
    EngineState,
    GenerateRequest,
    Runtime,
    RuntimeUnavailable,
    SamplingParams,
)
from runtime.rejection import plain

if TYPE_CHECKING:
    from runtime.listener import ServerSettings


class ServedModel(BaseModel):
    id: str
    object: str = "model"
    created: int
    """Unix time at which the runtime started."""
    owned_by: str = "ddtree"
    max_model_len: int
    """Context limit in tokens, prompt and output."""


class ModelList(BaseModel):
    object: str = "list"
    data: list[ServedModel]


def openai_router(runtime: Runtime, settings: ServerSettings) -> APIRouter:
    """The routes over `runtime`. Who may call them is up to who includes the router."""
    router = APIRouter(prefix="/v1", tags=["inference"], route_class=StrictRoute)

    @router.get("/models", summary="The served model")
    async def models() -> ModelList:
        return ModelList(data=[await _served_model(runtime)])

    @router.get("/models/{model:path}", summary="One model")
    async def model(model: str) -> ServedModel:
        served = await _served_model(runtime)
        if model != served.id:
            raise _no_such_model(model, served.id)
        return served

    @router.post("/chat/completions", summary="Answer a conversation", response_model=ChatReply)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        prompt = {"messages": tuple(message.turn() for message in body.messages)}
        served = await _served_name(runtime, body.model)
        job = _job(ChatFormat, served, body, [prompt], body.choice_sampling(), _client(body, request))
        return await _reply(runtime, settings, job, bool(body.stream), request)

    @router.post("/completions", summary="Continue a text", response_model=CompletionReply)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        prompts: list[dict[str, Any]] = [
            {"prompt": each, "raw": True} if isinstance(each, str) else {"prompt_token_ids": each}
            for each in body.prompts()
        ]
        served = await _served_name(runtime, body.model)
        job = _job(CompletionFormat, served, body, prompts, body.choice_sampling(), _client(body, request))
        return await _reply(runtime, settings, job, bool(body.stream), request)

    return router


async def _reply(
    runtime: Runtime, settings: ServerSettings, job: Job, stream: bool, request: Request
) -> Response:
    """The answer to `job`; a client that leaves has its requests cancelled."""
    headers = {"x-request-id": job.id}
    limit_s = settings.request_timeout_s
    try:
        if not stream:
            reply = await while_connected(whole(runtime, job, limit_s), request.receive)
            return Response(reply.model_dump_json(), media_type="application/json", headers=headers)
        events = choice_events(runtime, job, settings.keep_alive_s, limit_s)
        opening = await while_connected(_opened(events, job), request.receive)
    except ClientGone:
        return Response(status_code=CLIENT_LEFT)
    closed_after = None if limit_s is None else limit_s + settings.keep_alive_s
    return EventStream(frames(job, opening, events), events.aclose, closed_after, headers)


async def _opened(events: AsyncGenerator[ChoiceEvent, None], job: Job) -> list[ChoiceEvent]:
    """The opening of a stream; `events` is closed when there is none."""
    try:
        return await opening_events(events, job)
    except BaseException:
        await events.aclose()
        raise


def _job(
    shape: Format,
    model: str,
    body: GenerationFields,
    prompts: list[dict[str, Any]],
    sampling: SamplingParams,
    client: str,
) -> Job:
    per_prompt = body.n or 1
    several = len(prompts) * per_prompt > 1
    seed = secrets.randbits(64) if sampling.seed is None and several else sampling.seed
    reply_id = f"{shape.id_prefix}-{secrets.token_hex(12)}"
    shared = {
        "mode": body.options.mode,
        "tree_budget": body.options.tree_budget,
        "workload": body.options.workload,
        "client": client,
    }
    requests = tuple(
        GenerateRequest(
            **prompt,
            **shared,
            sampling=sampling.model_copy(update={"seed": _choice_seed(seed, choice)}),
            request_id=f"{reply_id}-{place * per_prompt + choice}" if several else reply_id,
        )
        for place, prompt in enumerate(prompts)
        for choice in range(per_prompt)
    )
    names = {"prompt_token_ids": "prompt", "tree_budget": "ddtree.tree_budget"}
    if isinstance(body, ChatRequest):
        names["prompt"] = "messages"
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
    return Job(
        id=reply_id,
        created=int(time.time()),
        model=model,
        shape=shape,
        requests=requests,
        choices_per_prompt=per_prompt,
        include_usage=body.include_usage,
        names=names,
    )


def _choice_seed(seed: int | None, choice: int) -> int | None:
    """Seed of choice number `choice` of a prompt; None leaves the draw to the runtime."""
    if seed is None or choice == 0:
        return seed
    from runtime.noise import derived_seed

    return derived_seed(seed, choice)


def _client(body: GenerationFields, request: Request) -> str:
    """Who asks, for the operator's eyes and for taking turns: the named user, else the address."""
    return plain(body.user) if body.user else request.client.host if request.client else "http"


async def _served_name(runtime: Runtime, asked: str | None) -> str:
    """Name of the served model; raises ApiError 404 if `asked` is another."""
    served = (await runtime.describe()).target
    if asked is None or asked == served:
        return served
    status = await runtime.status()
    if status.state is EngineState.LOADING:
        raise RuntimeUnavailable(f"the engine is loading: {status.reason}")
    raise _no_such_model(asked, served)


def _no_such_model(asked: str, served: str) -> ApiError:
    return ApiError(
        404,
        f"model: {plain(asked)} is not served here; this server has {plain(served)}",
        param="model",
        code="model_not_found",
    )


async def _served_model(runtime: Runtime) -> ServedModel:
    description: Description = await runtime.describe()
    started = (await runtime.status()).started_at_s
    return ServedModel(
        id=description.target, created=int(started or 0), max_model_len=description.max_seq_len
    )
