"""The same prompt answered in two modes with one seed: are the texts the same, and how fast was each? No widgets."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from console.ask_settings import AskSettings
from console.conversation import Conversation, Turn
from console.draft_tree import token_label
from console.formats import number, rate
from runtime.interface import GenerateRequest, Mode, SamplingParams

PLAIN: Mode = "off"
GREEDY_TAU = 1e-2
"""Largest gap of two greedy scores in float32 that counts as a near-tie."""
GREEDY_BELOW = 1e-4
JUDGE_LOGPROBS = 20


@dataclass(slots=True)
class Comparison:
    """Two answers, written one after the other so that neither slows the other."""

    request: GenerateRequest
    """What both are asked, the mode left out."""
    modes: tuple[Mode, Mode]
    turns: tuple[Turn, Turn]
    judge: Turn
    """The plain answer once more up to the first difference, with log-probabilities; asked only where it can tell."""
    dtype: str | None = None
    """Of the target; None: not known."""

    @classmethod
    def of(
        cls,
        conversation: Conversation,
        prompt: str,
        settings: AskSettings,
        mode: Mode,
        defaults: dict[str, object],
        dtype: str | None = None,
    ) -> Comparison:
        """`mode` beside plain decoding. What `settings` leave open is fixed now, from `defaults` and a fresh seed."""
        asked = conversation.apart(prompt)
        sampling = settings.sampling
        fixed = {
            name: defaults[name]
            for name in ("temperature", "top_p", "top_k")
            if getattr(sampling, name) is None and defaults.get(name) is not None
        }
        if sampling.seed is None:
            fixed["seed"] = secrets.randbits(64)
        sampling = SamplingParams.model_validate({**sampling.model_dump(), "logprobs": None, **fixed})
        request = conversation.request(asked, AskSettings(settings.system, sampling))
        request = request.model_copy(update={"reuse_prefix": False, "workload": "compare"})
        turns = (asked, conversation.apart(prompt))
        return cls(request, (mode, PLAIN), turns, conversation.apart(prompt), dtype)

    def request_of(self, side: int) -> GenerateRequest:
        return self.request.model_copy(update={"mode": self.modes[side]})

    @property
    def greedy(self) -> bool:
        return (self.request.sampling.temperature or 0.0) < GREEDY_BELOW

    @property
    def difference(self) -> int | None:
        """Number of the first token, from 0, in which the answers differ; None where they do not."""
        left, right = ([piece.token_id for piece in turn.pieces] for turn in self.turns)
        for at, (one, other) in enumerate(zip(left, right, strict=False)):
            if one != other:
                return at
        return None if len(left) == len(right) else min(len(left), len(right))

    @property
    def complete(self) -> bool:
        """Both ended by themselves."""
        return all(
            turn.ended and turn.stats is not None and turn.stats.finish_reason in ("stop", "length")
            for turn in self.turns
        )

    def judge_request(self) -> GenerateRequest | None:
        """What tells how close the differing tokens were; None where that is not needed or cannot tell."""
        at = self.difference
        shorter = min(len(turn.pieces) for turn in self.turns)
        if not self.complete or at is None or at >= shorter or not self.greedy or self.dtype != "float32":
            return None
        sampling = self.request.sampling.model_copy(
            update={"max_tokens": at + 1, "logprobs": JUDGE_LOGPROBS, "stop": ()}
        )
        return self.request.model_copy(update={"mode": PLAIN, "sampling": sampling})

    @property
    def gap(self) -> float | None:
        """How far apart plain decoding scores the two differing tokens; None: not known."""
        at = self.difference
        if at is None or not self.judge.ended or len(self.judge.pieces) != at + 1:
            return None
        told = self.judge.pieces[at].logprob
        scores = {token_id: value for token_id, _, value in told.top} if told is not None else {}
        ids = [turn.pieces[at].token_id for turn in self.turns]
        return abs(scores[ids[0]] - scores[ids[1]]) if all(each in scores for each in ids) else None

    def verdict(self) -> str:
        """What has been found, in words."""
        if not all(turn.ended for turn in self.turns):
            side = 0 if not self.turns[0].ended else 1
            return f"mode {self.modes[side]} is being answered; one after the other, so that neither slows the other"
        for mode, turn in zip(self.modes, self.turns, strict=True):
            if turn.error:
                return f"not compared: mode {mode} broke off: {turn.error}"
        at = self.difference
        if not self.complete:
            both = min(len(turn.pieces) for turn in self.turns)
            if at is not None and at < both:
                return f"one answer was cancelled. {self._difference_words(at)}"
            return f"one answer was cancelled; the {both} tokens that both have are equal"
        if at is None:
            count = len(self.turns[0].pieces)
            return f"Same text: all {count} tokens are equal. {self._speeds()}"
        return f"{self._difference_words(at)} {self._judged()} {self._speeds()}"

    def _difference_words(self, at: int) -> str:
        character = len("".join(piece.text for piece in self.turns[0].pieces[:at]))
        there = []
        for mode, turn in zip(self.modes, self.turns, strict=True):
            piece = turn.pieces[at] if at < len(turn.pieces) else None
            there.append(f"{mode} {token_label(piece.text, piece.token_id) if piece else 'had ended'}")
        return f"First difference at token {at + 1}, character {character + 1}: {', '.join(there)}."

    def _judged(self) -> str:
        gap = self.gap
        if gap is None and self.judge_request() is not None and not self.judge.ended:
            return "How close the two were is being looked up."
        if gap is None:
            return "Whether that is a near-tie, which rounding may turn either way, or a fault: ddtree verify tells."
        if gap <= GREEDY_TAU:
            return f"A near-tie, {gap:.1e} apart (at most {GREEDY_TAU:g}): rounding may turn it either way."
        return f"They are {gap:.2f} apart, no near-tie (at most {GREEDY_TAU:g}): a fault; run ddtree verify."

    def _speeds(self) -> str:
        left, right = (turn.tok_s for turn in self.turns)
        words = f"{self.modes[0]} {rate(left)} tok/s, plain {rate(right)} tok/s"
        if not left or not right:
            return f"{words}."
        if left >= right:
            return f"{words}: {self.modes[0]} is {number(left / right)} times as fast."
        return f"{words}: {self.modes[0]} is slower, {number(left / right)} of plain."
