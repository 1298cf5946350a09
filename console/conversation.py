"""The turns of one conversation: what was asked, what came back, what the next request holds. No widgets."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from console.ask_settings import AskSettings
from runtime.interface import GenerateRequest, RequestStats, TokenPiece

MAX_HISTORY = 200


@dataclass(slots=True)
class Turn:
    """One prompt and its answer."""

    number: int
    prompt: str
    request_id: str | None = None
    pieces: list[TokenPiece] = field(default_factory=list)
    tail: str = ""
    """Text of the end that belongs to no piece: held back as a possible stop string, then released."""
    rounds: int = 0
    decode_s: float | None = None
    stats: RequestStats | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    seed: int | None = None
    """The one in use; None until admitted."""
    ended: bool = False
    error: str = ""

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces) + self.tail

    @property
    def accept_length(self) -> float | None:
        """Mean tokens per decode round, bonus token included; the first token comes from prefill."""
        if self.stats is not None:
            return self.stats.accept_length
        return (len(self.pieces) - 1) / self.rounds if self.rounds else None

    @property
    def tok_s(self) -> float | None:
        """Output tokens after the first per second since the first."""
        if self.stats is not None:
            return self.stats.tok_s
        if not self.decode_s or len(self.pieces) < 2:
            return None
        return (len(self.pieces) - 1) / self.decode_s


class Conversation:
    """Turns in order. At most one is open: waiting for the model, or streaming."""

    def __init__(self, turns: list[Turn] | None = None, numbers: Conversation | None = None) -> None:
        """A copy of `turns` takes the numbers of further ones from the conversation they belong to."""
        self.turns = list(turns or ())
        self._numbers = numbers._numbers if numbers is not None else itertools.count(1)

    @property
    def open_turn(self) -> Turn | None:
        return self.turns[-1] if self.turns and not self.turns[-1].ended else None

    def turn(self, number: int) -> Turn | None:
        return next((turn for turn in reversed(self.turns) if turn.number == number), None)

    def begin(self, prompt: str) -> Turn:
        self.turns.append(self.apart(prompt))
        return self.turns[-1]

    def apart(self, prompt: str) -> Turn:
        """A turn with a number of its own that is no part of the conversation."""
        return Turn(next(self._numbers), prompt)

    def drop(self, turn: Turn) -> None:
        """Forgets a turn that got no answer, so that it is not part of the next request."""
        self.turns = [kept for kept in self.turns if kept is not turn]

    def clear(self) -> None:
        self.turns = []

    def request(self, turn: Turn, settings: AskSettings = AskSettings()) -> GenerateRequest:  # noqa: B008
        """The system prompt, all turns before `turn` with their answers, then its prompt.

        A turn that is apart follows all of the conversation.
        """
        messages = [{"role": "system", "content": settings.system}] if settings.system else []
        for earlier in self.turns:
            if earlier is turn:
                break
            messages.append({"role": "user", "content": earlier.prompt})
            messages.append({"role": "assistant", "content": earlier.text})
        messages.append({"role": "user", "content": turn.prompt})
        return GenerateRequest(
            messages=tuple(messages), sampling=settings.sampling, client="console", workload="prompt"
        )


class History:
    """Prompts typed before, walked with up and down; what was being typed is kept at the end."""

    def __init__(self) -> None:
        self._entries: list[str] = []
        self._at: int | None = None
        self._draft = ""

    def add(self, prompt: str) -> None:
        if not self._entries or self._entries[-1] != prompt:
            self._entries = [*self._entries, prompt][-MAX_HISTORY:]
        self._at = None

    def older(self, typed: str) -> str | None:
        """The entry before; None at the oldest."""
        if self._at is None:
            if not self._entries:
                return None
            self._draft, self._at = typed, len(self._entries)
        if self._at == 0:
            return None
        self._at -= 1
        return self._entries[self._at]

    def newer(self) -> str | None:
        """The entry after, at last what was being typed; None when not walking."""
        if self._at is None:
            return None
        self._at += 1
        if self._at >= len(self._entries):
            self._at = None
            return self._draft
        return self._entries[self._at]
