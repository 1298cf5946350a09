"""Replies of the OpenAI-compatible API, whole and in stream chunks, out of what a runtime answered.

Source of the shapes: the OpenAI API reference for chat completions, completions and their streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from runtime.interface import FinishReason, Mode, RequestFinished, RequestStats, TokenLogprob, TokenPiece

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Reply(BaseModel):
    model_config = ConfigDict(frozen=True)


class PromptTokensDetails(Reply):
    cached_tokens: int
    """Prompt tokens whose computation was reused."""


class Usage(Reply):
    prompt_tokens: int
    """Of each prompt once, however many choices it has."""
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class DdtreeReport(Reply):
    """How the answer was really decoded."""

    mode: Mode
    tree_budget: int
    """Draft nodes, root excluded; 0 = plain decoding."""
    workload: str | None
    accept_length: float | None
    """Mean tokens per decode round, bonus token included; None before the first round."""
    rounds: int
    """Decode rounds; the prefill, which gives the first token, is not one."""
    num_correct_drafts: int
    plain_reason: str | None
    """"plain decoding because ..." where speculation is configured and was not used."""
    continued: str | None
    """"continued under ..." where the engine was rebuilt meanwhile, and whether that may have changed the text."""
    seed: int
    """The seed in use; of several choices, the one they derive from."""
    cached_tokens: int


class ReplyLogprobTop(Reply):
    token: str
    logprob: float
    bytes: list[int] | None


class ReplyLogprob(ReplyLogprobTop):
    top_logprobs: list[ReplyLogprobTop]


class ChatLogprobs(Reply):
    content: list[ReplyLogprob]
    refusal: None = None


class ChatReplyMessage(Reply):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Reply):
    index: int
    message: ChatReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    ddtree: DdtreeReport


class ChatReply(Reply):
    """Answer of `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    ddtree: DdtreeReport


class CompletionLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    """Characters of the choice's text before each token."""


class CompletionChoice(Reply):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    ddtree: DdtreeReport


class CompletionReply(Reply):
    """Answer of `POST /v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    ddtree: DdtreeReport


class ChatFormat:
    """Chat completions: messages and deltas."""

    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"
    reply = ChatReply

    @staticmethod
    def opening() -> dict[str, Any]:
        """First chunk of a choice."""
        return {"delta": {"role": "assistant", "content": "", "refusal": None}}

    @staticmethod
    def delta(text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    @staticmethod
    def closing() -> dict[str, Any]:
        return {"delta": {}}

    @staticmethod
    def whole(text: str) -> dict[str, Any]:
        return {"message": ChatReplyMessage(content=text)}

    @staticmethod
    def logprobs(pieces: Sequence[TokenPiece], offset: int) -> ChatLogprobs | None:
        """Log-probabilities of `pieces`, which follow `offset` characters of text."""
        content = [_chat_logprob(piece.logprob) for piece in pieces if piece.logprob is not None]
        return ChatLogprobs(content=content) if content else None


class CompletionFormat:
    """Completions: plain text."""

    id_prefix = "cmpl"
    chunk_object = "text_completion"
    reply = CompletionReply

    @staticmethod
    def opening() -> dict[str, Any] | None:
        return None

    @staticmethod
    def delta(text: str) -> dict[str, Any]:
        return {"text": text}

    @staticmethod
    def closing() -> dict[str, Any]:
        return {"text": ""}

    @staticmethod
    def whole(text: str) -> dict[str, Any]:
        return {"text": text}

    @staticmethod
    def logprobs(pieces: Sequence[TokenPiece], offset: int) -> CompletionLogprobs | None:
        """Log-probabilities of `pieces`, which follow `offset` characters of text."""
        known, offsets = [], []
        for piece in pieces:
            if piece.logprob is not None:
                known.append(piece.logprob)
                offsets.append(offset)
            offset += len(piece.text)
        if not known:
            return None
        return CompletionLogprobs(
            tokens=[each.text for each in known],
            token_logprobs=[each.logprob for each in known],
            top_logprobs=[{text: value for _, text, value in each.top} for each in known],
            text_offset=offsets,
        )


Format = type[ChatFormat] | type[CompletionFormat]


def finish_reason(reason: FinishReason) -> Literal["stop", "length"] | None:
    """The reason as clients know it; None where the text did not end by itself."""
    return reason if reason in ("stop", "length") else None


def report(stats: RequestStats, seed: int) -> DdtreeReport:
    """How one choice was decoded."""
    return DdtreeReport(
        mode=stats.mode,
        tree_budget=stats.tree_budget,
        workload=stats.workload,
        accept_length=stats.accept_length,
        rounds=stats.rounds,
        num_correct_drafts=stats.num_correct_drafts,
        plain_reason=None if stats.plain_reason is None else f"plain decoding because {stats.plain_reason}",
        continued=stats.continued,
        seed=seed,
        cached_tokens=stats.cached_tokens,
    )


def total(reports: Sequence[DdtreeReport], finished: Sequence[RequestFinished]) -> DdtreeReport:
    """How all choices of a request were decoded: sums, and the mean over all their rounds."""
    rounds = sum(each.rounds for each in reports)
    after_first = sum(max(each.stats.output_tokens - 1, 0) for each in finished)
    return reports[0].model_copy(
        update={
            "rounds": rounds,
            "accept_length": after_first / rounds if rounds else None,
            "num_correct_drafts": sum(each.num_correct_drafts for each in reports),
            "cached_tokens": sum(each.cached_tokens for each in reports),
        }
    )


def usage(finished: Sequence[RequestFinished], choices_per_prompt: int) -> Usage:
    """Tokens of all choices, in the order of their index."""
    firsts = [each.stats for each in finished[::choices_per_prompt]]
    prompt = sum(stats.prompt_tokens for stats in firsts)
    completion = sum(each.stats.output_tokens for each in finished)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(stats.cached_tokens for stats in firsts)),
    )


def _chat_logprob(known: TokenLogprob) -> ReplyLogprob:
    top = [ReplyLogprobTop(token=text, logprob=value, bytes=_bytes(text)) for _, text, value in known.top]
    return ReplyLogprob(token=known.text, logprob=known.logprob, bytes=_bytes(known.text), top_logprobs=top)


def _bytes(text: str) -> list[int] | None:
    """UTF-8 bytes of a token; None for a token that is a part of a character, whose bytes its text does not tell."""
    return None if REPLACEMENT in text else list(text.encode())
