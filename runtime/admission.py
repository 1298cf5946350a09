"""From a request to what the engine runs: tokens, resolved sampling settings, limits; or a refusal naming the field."""

from __future__ import annotations

from dataclasses import dataclass, replace

from runtime.config import RuntimeConfig
from runtime.interface import GenerateRequest, RequestRejected
from runtime.noise import draw_seed
from runtime.sampling import Sampling
from runtime.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class Limits:
    """What a request may ask of this engine."""

    max_seq_len: int
    max_tree_budget: int
    kv_slots: int
    slot_reserve: int
    """Scratch slots each request needs beyond its tokens."""
    vocab_size: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True)
class Admitted:
    """A request the engine can run."""

    prompt: tuple[int, ...]
    sampling: Sampling
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    slots: int


def admit(
    request: GenerateRequest, config: RuntimeConfig, limits: Limits, tokenizer: ChatTokenizer
) -> Admitted:
    """Checks and resolves `request` under the defaults of `config`; raises RequestRejected."""
    prompt = _prompt_tokens(request, tokenizer)
    asked = request.sampling
    _check_ids("prompt_token_ids", prompt, limits.vocab_size)
    _check_ids("logit_bias", tuple(asked.logit_bias), limits.vocab_size)
    _check_ids("stop_token_ids", asked.stop_token_ids, limits.vocab_size)
    if any(not stop for stop in asked.stop):
        raise RequestRejected("stop: an empty stop string ends every text at once; leave it out", "stop")
    if not prompt:
        raise RequestRejected("prompt: it has no tokens; give some text", "prompt")
    if len(prompt) >= limits.max_seq_len:
        raise RequestRejected(
            f"prompt: {len(prompt)} tokens leave no room in the context limit of {limits.max_seq_len} (max_seq_len); "
            "shorten the prompt or raise the limit",
            "prompt",
        )
    if request.tree_budget is not None and request.tree_budget > limits.max_tree_budget:
        raise RequestRejected(
            f"tree_budget: {request.tree_budget} is above {limits.max_tree_budget} (max_tree_budget)",
            "tree_budget",
        )
    new_tokens = min(asked.max_tokens or config.max_tokens, limits.max_seq_len - len(prompt))
    slots = len(prompt) + new_tokens + limits.slot_reserve
    if slots > limits.kv_slots:
        raise RequestRejected(
            f"max_tokens: prompt and output need {slots} KV slots, there are {limits.kv_slots} (kv_slots); "
            "ask for fewer tokens or raise kv_slots",
            "max_tokens",
        )
    stop_ids = frozenset(asked.stop_token_ids) | (frozenset() if asked.ignore_eos else limits.eos_token_ids)
    return Admitted(prompt, _sampling(request, config, stop_ids, new_tokens), new_tokens, stop_ids, slots)


def readmit(admitted: Admitted, limits: Limits) -> Admitted:
    """`admitted` under the `limits` of another engine; raises RequestRejected where it does not fit there."""
    tokens = len(admitted.prompt) + admitted.max_new_tokens
    slots = tokens + limits.slot_reserve
    if tokens > limits.max_seq_len or slots > limits.kv_slots:
        raise RequestRejected(
            f"the engine was rebuilt with less room: the request needs {tokens} positions and {slots} KV slots, there "
            f"are {limits.max_seq_len} (max_seq_len) and {limits.kv_slots} (kv_slots)"
        )
    return replace(admitted, slots=slots)


def _sampling(
    request: GenerateRequest, config: RuntimeConfig, stop_ids: frozenset[int], new_tokens: int
) -> Sampling:
    asked = request.sampling
    return Sampling(
        temperature=config.temperature if asked.temperature is None else asked.temperature,
        top_p=config.top_p if asked.top_p is None else asked.top_p,
        top_k=config.top_k if asked.top_k is None else asked.top_k,
        min_p=asked.min_p,
        seed=draw_seed() if asked.seed is None else asked.seed,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty,
        logit_bias=tuple(sorted(asked.logit_bias.items())),
        min_tokens=min(asked.min_tokens, new_tokens),
        stop_token_ids=stop_ids,
    )


def _prompt_tokens(request: GenerateRequest, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    given = [
        name for name in ("prompt", "messages", "prompt_token_ids") if getattr(request, name) is not None
    ]
    if len(given) != 1:
        what = "none is given" if not given else f"{' and '.join(given)} are given"
        raise RequestRejected(
            f"prompt: exactly one of prompt, messages and prompt_token_ids is needed; {what}", "prompt"
        )
    if request.prompt_token_ids is not None:
        return request.prompt_token_ids
    if request.prompt is not None and request.raw:
        return tuple(tokenizer.encode(request.prompt, add_special=True))
    messages = request.messages
    if messages is None:
        messages = ({"role": "user", "content": request.prompt},)
    try:
        return tuple(tokenizer.apply_chat_template([dict(message) for message in messages]))
    except ValueError as bad:
        raise RequestRejected(f"messages: {bad}", "messages") from None


def _check_ids(name: str, ids: tuple[int, ...], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RequestRejected(f"{name}: token id {token_id} is not in 0 to {vocab_size - 1}", name)
