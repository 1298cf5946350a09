"""Sends a load to a runtime through its interface, without HTTP in between."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from runtime.interface import (
    GenerateRequest,
    RequestFinished,
    Runtime,
    RuntimeFault,
    SamplingParams,
    TokensEmitted,
)
from runtime.load import Arrived, Ended, Shot, ShotFailed


class RuntimeTarget:
    """A runtime as the target of a load."""

    def __init__(self, runtime: Runtime, client: str = "bench") -> None:
        self._runtime = runtime
        self._client = client

    async def send(self, shot: Shot) -> AsyncIterator[Arrived | Ended]:
        load = shot.load
        request = GenerateRequest(
            **shot.prompt,
            sampling=SamplingParams(
                max_tokens=load.max_tokens,
                temperature=load.temperature,
                seed=shot.seed,
                ignore_eos=load.ignore_eos,
            ),
            mode=load.mode,
            tree_budget=load.tree_budget,
            reuse_prefix=False,
            client=self._client,
        )
        try:
            async with aclosing(self._runtime.generate(request)) as events:  # type: ignore[type-var]
                async for event in events:
                    if isinstance(event, TokensEmitted):
                        yield Arrived()
                    elif isinstance(event, RequestFinished):
                        if event.reason in ("error", "cancelled"):
                            raise ShotFailed(event.error or event.reason)
                        stats = event.stats
                        yield Ended(
                            stats.prompt_tokens, stats.output_tokens, stats.rounds, stats.num_correct_drafts
                        )
        except ShotFailed:
            raise
        except RuntimeFault as fault:
            raise ShotFailed(str(fault)) from None
