"""Asks an engine and collects what it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from constructed import ConstructedDrafter, Request

import runtime.round
from runtime.engine import Engine
from runtime.interface import (
    GenerateEvent,
    GenerateRequest,
    RequestFinished,
    RoundStats,
    SamplingParams,
    TokensEmitted,
)
from runtime.loader import Loaded

MODES: tuple[Any, ...] = ("off", "chain", "tree")
MakeEngine = Callable[..., Engine]


class Client:
    """Collects the events of one request."""

    def __init__(self) -> None:
        self.events: list[GenerateEvent] = []

    def __call__(self, event: GenerateEvent) -> None:
        self.events.append(event)

    @property
    def finished(self) -> RequestFinished:
        last = self.events[-1]
        assert isinstance(last, RequestFinished)
        return last

    @property
    def pieces(self) -> list[Any]:
        return [piece for event in self.events if isinstance(event, TokensEmitted) for piece in event.pieces]

    @property
    def streamed(self) -> str:
        return "".join(piece.text for piece in self.pieces) + self.finished.tail


def with_scripts(loaded: Loaded, drafter: ConstructedDrafter) -> Loaded:
    """`loaded` with the constructed drafter in the place of its own."""
    return replace(loaded, models=replace(loaded.models, propose=drafter))


def ask(engine: Engine, request: GenerateRequest) -> Client:
    """Queues `request` and returns where its events go."""
    client = Client()
    engine.submit(request, client)
    return client


def run(engine: Engine) -> None:
    """Steps until nothing waits or runs."""
    while engine.busy:
        engine.step()


def answer(engine: Engine, prompt: Sequence[int] | str, **sampling: Any) -> RequestFinished:
    """The finished answer to one prompt."""
    given: dict[str, Any] = (
        {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": tuple(prompt)}
    )
    client = ask(engine, GenerateRequest(**given, sampling=SamplingParams(**sampling)))
    run(engine)
    return client.finished


def rounds_of(engine: Engine) -> list[RoundStats]:
    """Steps until idle; the rounds' figures."""
    rounds = []
    while engine.busy:
        stats = engine.step()
        if stats is not None:
            rounds.append(stats)
    return rounds


def as_generate(request: Request, **fields: Any) -> GenerateRequest:
    """`request` as the API has it."""
    rule = request.rule
    sampling = SamplingParams(
        max_tokens=request.new_tokens,
        temperature=rule.temperature,
        top_k=rule.top_k,
        top_p=rule.top_p,
        seed=rule.seed,
        logit_bias=dict(rule.logit_bias),
        logprobs=request.logprobs,
    )
    given: dict[str, Any] = {
        "request_id": request.name,
        "prompt_token_ids": request.prompt,
        "sampling": sampling,
    }
    return GenerateRequest(**(given | fields))


def spoil_trees(patch: pytest.MonkeyPatch) -> None:
    """Has every tree round behind the first five tokens of a text choose the second best token."""
    choose = runtime.round._choose_batch

    def second_best(models, batch, tree, sizes, hidden, noise):  # type: ignore[no-untyped-def]
        chosen, logits = choose(models, batch, tree, sizes, hidden, noise)
        if max(sizes) > 1 and batch[0].num_outputs > 5:
            chosen[0, 0] = models.target.logits(hidden[:1])[0].topk(2).indices[1]
        return chosen, logits

    patch.setattr(runtime.round, "_choose_batch", second_best)
