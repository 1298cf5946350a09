"""From output tokens to text: incremental detokenisation and stop strings that may span tokens and rounds.

A piece is released once none of its text can still become part of a stop string, so the concatenated pieces and the
final tail are the whole text, streamed or not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.interface import TokenLogprob, TokenPiece
from runtime.sequence import OutputToken
from runtime.tokenizer import ChatTokenizer, IncrementalDetokenizer


@dataclass(frozen=True)
class StopMatch:
    """A stop string was completed by token number `index` of the call."""

    index: int


@dataclass
class TextStream:
    """The text of one request as it grows."""

    tokenizer: ChatTokenizer
    stops: tuple[str, ...] = ()
    hidden_ids: frozenset[int] = frozenset()
    """Tokens that end the text and are never part of it."""
    text: str = ""
    _held: list[TokenPiece] = field(default_factory=list)
    _detokenizer: IncrementalDetokenizer = field(init=False)

    def __post_init__(self) -> None:
        self._detokenizer = IncrementalDetokenizer(self.tokenizer)

    def push(self, tokens: list[OutputToken]) -> tuple[list[TokenPiece], StopMatch | None]:
        """Adds tokens; returns the pieces that are safe to show and where a stop string ended the text, if one did."""
        for index, token in enumerate(tokens):
            self._held.append(self._piece(token))
            if self._cut_at_stop():
                return self._release(len(self._held)), StopMatch(index)
        return self._release(self._safe_pieces()), None

    def finish(self) -> tuple[list[TokenPiece], str]:
        """The pieces still held and the text of bytes that never became a character."""
        pieces = self._release(len(self._held))
        tail = self._detokenizer.flush()
        self.text += tail
        return pieces, tail

    def _piece(self, token: OutputToken) -> TokenPiece:
        text = "" if token.token_id in self.hidden_ids else self._detokenizer.push(token.token_id)
        logprob = None
        if token.logprob is not None:
            value, top = token.logprob
            name = self.tokenizer.decode
            logprob = TokenLogprob(
                token_id=token.token_id,
                text=name([token.token_id], skip_special=False),
                logprob=value,
                top=tuple((i, name([i], skip_special=False), v) for i, v in top),
            )
        return TokenPiece(token_id=token.token_id, text=text, drafted=token.drafted, logprob=logprob)

    def _cut_at_stop(self) -> bool:
        """Cuts the held text before the earliest stop string in it; False if there is none."""
        held = "".join(piece.text for piece in self._held)
        found = [at for at in (held.find(stop) for stop in self.stops) if at >= 0]
        if not found:
            return False
        room = min(found)
        for i, piece in enumerate(self._held):
            self._held[i] = piece.model_copy(update={"text": piece.text[: max(room, 0)]})
            room -= len(piece.text)
        self._detokenizer = IncrementalDetokenizer(self.tokenizer)
        return True

    def _safe_pieces(self) -> int:
        """How many held pieces end before any text that could still begin a stop string."""
        held = "".join(piece.text for piece in self._held)
        kept = max((_overlap(held, stop) for stop in self.stops), default=0)
        safe, position = 0, 0
        for count, piece in enumerate(self._held, start=1):
            position += len(piece.text)
            if position <= len(held) - kept:
                safe = count
        return safe

    def _release(self, count: int) -> list[TokenPiece]:
        released, self._held = self._held[:count], self._held[count:]
        self.text += "".join(piece.text for piece in released)
        return released


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
