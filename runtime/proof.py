"""The first verified token: before an engine counts as ready it has to prefill and to decode a round."""

from __future__ import annotations

from runtime.engine import Engine
from runtime.interface import (
    GenerateEvent,
    GenerateRequest,
    RequestFinished,
    RuntimeUnavailable,
    SamplingParams,
)


def prove(engine: Engine) -> None:
    """Decodes two tokens, the second one in a round; raises RuntimeUnavailable where they do not come."""
    events: list[GenerateEvent] = []
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(prompt_token_ids=(0,), sampling=sampling, reuse_prefix=False)
    engine.submit(request, events.append)
    while engine.busy:
        engine.step()
    last = events[-1]
    if not isinstance(last, RequestFinished) or len(last.token_ids) != 2:
        raise RuntimeUnavailable("the engine gave no tokens in its first round")
