"""Requests of the OpenAI-compatible API: what is understood, what is harmless, and what each asks of a runtime.

A field that is absent, null or at a value that asks for nothing is accepted; any other value of a field this server
does not serve, and any unknown field, is an error naming it. Source of names and ranges: the OpenAI API reference for
chat completions and completions; `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos` and
`stop_token_ids` are the extensions vLLM and SGLang share; `ddtree` is this project's own.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from runtime.interface import Mode, SamplingParams

MAX_CHOICES = 128
"""Most choices of one request, over all its prompts."""
MAX_STOPS = 4
MAX_LOGPROBS = 20


class Wire(BaseModel):
    """Base of what clients send: nothing is converted between types, nothing unknown is taken."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Only:
    """Marks a field that is accepted at `harmless` values alone, which ask for nothing."""

    def __init__(self, *harmless: Any) -> None:
        self._harmless = harmless

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": list(self._harmless)}

    def _check(self, value: Any) -> Any:
        if not any(type(value) is type(each) and value == each for each in self._harmless):
            words = ", ".join(json.dumps(each) for each in self._harmless)
            raise PydanticCustomError(
                "explained",
                "this server does not serve it; leave it out (it takes only {words})",
                {"words": words},
            )
        return value


def _one_reason(words: str) -> WrapValidator:
    """One line in place of one error for each member of a union."""

    def check(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("explained", "must be {words}", {"words": words}) from None

    return WrapValidator(check)


def _stop_strings(value: Any) -> Any:
    """One string is a list of one; an empty list asks for nothing."""
    return [value] if isinstance(value, str) else value or None


Stop = Annotated[
    list[Annotated[str, Field(min_length=1)]] | None,
    Field(max_length=MAX_STOPS),
    _one_reason(f"one string or up to {MAX_STOPS} strings, none of them empty"),
    BeforeValidator(_stop_strings, json_schema_input_type=str | list[str] | None),
]
TokenId = Annotated[int, Field(ge=0)]
Prompt = Annotated[
    str
    | Annotated[list[str], Field(min_length=1)]
    | Annotated[list[TokenId], Field(min_length=1)]
    | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)],
    _one_reason("a string, token ids, or a list of strings or of token-id lists, not empty"),
]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100.0, le=100.0)]],
    _one_reason('an object of token ids and numbers from -100 to 100, as {"42": -100}'),
]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]


class DdtreeOptions(Wire):
    """How this one request speculates; what it leaves out follows the runtime's configuration."""

    mode: Mode | None = None
    tree_budget: int | None = Field(default=None, ge=0)
    workload: str | None = Field(default=None, min_length=1, max_length=64)
    """Label under which the figures of this request are counted."""


class StreamOptions(Wire):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, Only(None, False)] = None


class GenerationFields(Wire):
    """What chat completions and completions have in common."""

    model: str | None = None
    """None: the served model."""
    frequency_penalty: Penalty | None = None
    ignore_eos: bool | None = None
    """True: the model's own end tokens do not end the text."""
    logit_bias: LogitBias | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    """None: the runtime's configured default; the context limit caps it."""
    metadata: Annotated[Any, Only(None, {})] = None
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    min_tokens: int | None = Field(default=None, ge=0)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    presence_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(default=None, gt=0.0, le=10.0)
    seed: int | None = Field(default=None, ge=0, lt=2**64)
    stop: Stop = None
    stop_token_ids: list[TokenId] | None = None
    store: Annotated[Any, Only(None, False)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    """None: the runtime's configured default; below 1e-4 the choice is greedy."""
    top_k: int | None = Field(default=None, ge=0)
    """0: no limit."""
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    user: str | None = Field(default=None, max_length=256)
    """Shown to the operator as the client of this request."""
    ddtree: DdtreeOptions | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _explained("stream_options", "it needs stream = true")
        return self

    def _check_min_tokens(self, max_tokens: int | None) -> None:
        if self.min_tokens is not None and max_tokens is not None and self.min_tokens > max_tokens:
            raise _explained("min_tokens", f"it is above the most tokens asked for, {max_tokens}")

    @property
    def options(self) -> DdtreeOptions:
        return self.ddtree or DdtreeOptions()

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """What the request says of sampling; fields it leaves out stay at the runtime's defaults."""
        given = {
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "stop": tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "ignore_eos": self.ignore_eos,
            "min_tokens": self.min_tokens,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()},
            "logprobs": logprobs,
        }
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})


class TextPart(Wire):
    type: Literal["text"]
    text: str


class ChatMessage(Wire):
    """One turn; the fields of a reply may be sent back as they came, as long as they hold nothing."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[TextPart], _one_reason("text or a list of text parts")]
    name: Annotated[Any, Only(None)] = None
    refusal: Annotated[Any, Only(None)] = None
    annotations: Annotated[Any, Only(None, [])] = None
    audio: Annotated[Any, Only(None)] = None
    function_call: Annotated[Any, Only(None)] = None
    tool_calls: Annotated[Any, Only(None, [])] = None

    def turn(self) -> dict[str, Any]:
        """The turn as chat templates take it: text parts joined, `developer` under its older name `system`."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(GenerationFields):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """The present name of `max_tokens`; at most one of the two is given."""
    audio: Annotated[Any, Only(None)] = None
    function_call: Annotated[Any, Only(None, "none", "auto")] = None
    functions: Annotated[Any, Only(None, [])] = None
    modalities: Annotated[Any, Only(None, ["text"])] = None
    parallel_tool_calls: Annotated[Any, Only(None, False, True)] = None
    prediction: Annotated[Any, Only(None)] = None
    prompt_cache_key: Annotated[Any, Only(None)] = None
    reasoning_effort: Annotated[Any, Only(None, "none")] = None
    response_format: Annotated[Any, Only(None, {"type": "text"})] = None
    safety_identifier: Annotated[Any, Only(None)] = None
    service_tier: Annotated[Any, Only(None, "auto", "default")] = None
    tool_choice: Annotated[Any, Only(None, "none", "auto")] = None
    tools: Annotated[Any, Only(None, [])] = None
    verbosity: Annotated[Any, Only(None, "medium")] = None
    web_search_options: Annotated[Any, Only(None)] = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise _explained(
                "max_completion_tokens", "max_tokens is given too; they are one limit, give one of them"
            )
        if self.top_logprobs and not self.logprobs:
            raise _explained("top_logprobs", "it needs logprobs = true")
        self._check_min_tokens(self.limit)
        return self

    @property
    def limit(self) -> int | None:
        """Most output tokens, under either name."""
        return self.max_completion_tokens or self.max_tokens

    def choice_sampling(self) -> SamplingParams:
        return self.sampling(self.limit, (self.top_logprobs or 0) if self.logprobs else None)


class CompletionRequest(GenerationFields):
    """Body of `POST /v1/completions`; each prompt of a list gives `n` choices."""

    prompt: Prompt
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    best_of: Annotated[Any, Only(None, 1)] = None
    echo: Annotated[Any, Only(None, False)] = None
    suffix: Annotated[Any, Only(None, "")] = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if len(self.prompts()) * (self.n or 1) > MAX_CHOICES:
            raise _explained("prompt", f"prompts and n together ask for more than {MAX_CHOICES} choices")
        self._check_min_tokens(self.max_tokens)
        return self

    def prompts(self) -> list[str | tuple[int, ...]]:
        """Each prompt as text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [tuple(self.prompt)]
        return [each if isinstance(each, str) else tuple(each) for each in self.prompt]

    def choice_sampling(self) -> SamplingParams:
        return self.sampling(self.max_tokens, self.logprobs)


def _explained(field: str, reason: str) -> PydanticCustomError:
    """An error of two fields together, told of `field`."""
    return PydanticCustomError("explained", "{reason}", {"field": field, "reason": reason})
