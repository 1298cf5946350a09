"""What the bridge tells the app. Frequent messages are batches, or replace a waiting one of their kind."""

from __future__ import annotations

from textual.message import Message

from runtime.interface import (
    ChangePlan,
    Description,
    GenerateRequest,
    HostSample,
    Job,
    LogLine,
    RequestFinished,
    RequestStats,
    RoundStats,
    Status,
    StatusChanged,
    TokenPiece,
)


class Replaceable(Message):
    """A message of which only the last matters."""

    def can_replace(self, message: Message) -> bool:
        return type(message) is type(self)


class StatusArrived(Replaceable):
    def __init__(self, status: Status) -> None:
        super().__init__()
        self.status = status


class HostArrived(Message):
    """Samples of about half a second, the latest last."""

    def __init__(self, samples: tuple[HostSample, ...], at_s: float) -> None:
        """`at_s`: when the last one came (monotonic)."""
        super().__init__()
        self.samples = samples
        self.at_s = at_s


class DescriptionArrived(Message):
    def __init__(self, description: Description) -> None:
        super().__init__()
        self.description = description


class RoundsArrived(Message):
    """Decode rounds of about half a second; every round is in exactly one of these."""

    def __init__(self, rounds: tuple[RoundStats, ...]) -> None:
        super().__init__()
        self.rounds = rounds


class RequestArrived(Message):
    def __init__(self, stats: RequestStats) -> None:
        super().__init__()
        self.stats = stats


class RequestsArrived(Replaceable):
    """All requests the runtime knows: running and waiting ones, and those that finished last."""

    def __init__(self, requests: tuple[RequestStats, ...]) -> None:
        super().__init__()
        self.requests = requests


class StateChanged(Message):
    def __init__(self, change: StatusChanged) -> None:
        super().__init__()
        self.change = change


class LinesArrived(Message):
    """Log lines of the runtime, or captured output of libraries."""

    def __init__(self, lines: tuple[LogLine, ...]) -> None:
        super().__init__()
        self.lines = lines


class BridgeProblem(Message):
    """The runtime does not answer as it should; the text is one line, empty when it is well again."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class AnswerTokens(Message):
    """Tokens of one answer, joined up to 10 times a second; none is ever dropped."""

    def __init__(
        self, turn: int, pieces: tuple[TokenPiece, ...], rounds: int, decode_s: float | None
    ) -> None:
        """`rounds`: decode rounds since the answer began; `decode_s`: seconds since its first token."""
        super().__init__()
        self.turn = turn
        self.pieces = pieces
        self.rounds = rounds
        self.decode_s = decode_s


class AnswerAdmitted(Message):
    def __init__(
        self, turn: int, request_id: str, prompt_tokens: int, cached_tokens: int, seed: int | None = None
    ) -> None:
        """`seed`: the one in use, also where the request named none."""
        super().__init__()
        self.turn = turn
        self.request_id = request_id
        self.seed = seed
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens


class AnswerFinished(Message):
    def __init__(self, turn: int, finished: RequestFinished) -> None:
        super().__init__()
        self.turn = turn
        self.finished = finished


class AnswerFailed(Message):
    def __init__(self, turn: int, reason: str) -> None:
        super().__init__()
        self.turn = turn
        self.reason = reason


class ChangeDone(Message):
    """A change was applied; `text` says which and what it does not reach."""

    def __init__(self, text: str, fields: tuple[str, ...], config: dict[str, object], undo: bool) -> None:
        super().__init__()
        self.text = text
        self.fields = fields
        self.config = config
        self.undo = undo


class ChangeRefused(Message):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class PlanArrived(Message):
    """What a collected change would do, or why that cannot be told."""

    def __init__(self, change: dict[str, object], plan: ChangePlan | None, refusal: str) -> None:
        super().__init__()
        self.change = change
        self.plan = plan
        self.refusal = refusal


class JobChanged(Message):
    """A job began, got on or ended."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, JobChanged) and message.job.id == self.job.id and not message.job.over


class JobNotStarted(Message):
    """An order about a job was refused; `field` is the parameter at fault, if one is."""

    def __init__(self, kind: str, reason: str, field: str | None) -> None:
        super().__init__()
        self.kind = kind
        self.reason = reason
        self.field = field


class Told(Message):
    """A screen has one line for the operator."""

    def __init__(self, text: str, bad: bool = False) -> None:
        super().__init__()
        self.text = text
        self.bad = bad


class AnswerWanted(Message):
    """A turn is to be answered."""

    def __init__(self, turn: int, request: GenerateRequest) -> None:
        super().__init__()
        self.turn = turn
        self.request = request


class AnswersUnwanted(Message):
    """Whatever is being answered for this console is to end."""
