"""The one interface between anything that shows or serves a runtime and the runtime itself.

`Runtime` is implemented by the in-process runtime (`runtime.local`) and by the HTTP client. Values that cross it are
frozen pydantic models of plain types: no tensor, no widget. This module imports neither torch nor transformers.

Errors:

    RuntimeFault
    ├── RuntimeUnavailable   the engine is loading, draining or failed; try again later (HTTP 503)
    │   ├── RuntimeBusy      it serves, but its queue is full or moves too slowly; try again later (HTTP 429)
    │   └── EngineLost       a process of the engine is gone; the runtime builds another engine
    ├── RequestRejected      this request cannot be served; `field` names what is wrong with it
    ├── ConfigRejected       this configuration or change cannot be applied; `field` names what is wrong with it
    ├── JobRefused           this job cannot start beside what runs; nothing of it was begun (HTTP 409)
    └── SnapshotUnknown      no snapshot, or more than one, goes by that name (HTTP 404)
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import Field

from runtime.samples import (
    STAGES,
    Baseline,
    Description,
    EngineState,
    FinishReason,
    Frozen,
    GpuProcess,
    GpuSample,
    HostSample,
    Job,
    JobName,
    JobProgress,
    JobState,
    LogLine,
    Mode,
    RequestStats,
    RoundStats,
    StatusChanged,
    TreeNode,
    TreeTrace,
    WatchEvent,
)
from runtime.snapshot_port import SnapshotComparison, SnapshotPage, SnapshotRow, Snapshots, SnapshotView

__all__ = [
    "AppliedChange",
    "Baseline",
    "ChangePlan",
    "ChangeReport",
    "ConfigRejected",
    "Description",
    "EngineState",
    "FieldChange",
    "FinishReason",
    "Frozen",
    "GenerateEvent",
    "GenerateRequest",
    "GpuProcess",
    "GpuSample",
    "HostSample",
    "Job",
    "JobName",
    "JobProgress",
    "JobRefused",
    "JobState",
    "LogLine",
    "Mode",
    "RequestAdmitted",
    "RequestFinished",
    "RequestRejected",
    "RequestStats",
    "RoundStats",
    "Runtime",
    "RuntimeBusy",
    "RuntimeFault",
    "RuntimeUnavailable",
    "STAGES",
    "SamplingParams",
    "SnapshotComparison",
    "SnapshotPage",
    "SnapshotRow",
    "SnapshotUnknown",
    "SnapshotView",
    "Snapshots",
    "Status",
    "StatusChanged",
    "TokenLogprob",
    "TokenPiece",
    "TokensEmitted",
    "TreeNode",
    "TreeTrace",
    "WatchEvent",
]


class RuntimeFault(Exception):
    """Base of everything a runtime raises on purpose; its text is one line made for a person."""


class RuntimeUnavailable(RuntimeFault):
    """The engine cannot take requests now (loading, draining, failed)."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        """`retry_after_s`: seconds after which another try makes sense, where that can be told."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RuntimeBusy(RuntimeUnavailable):
    """The queue is full, or the request waited in it for too long; nothing of it was computed."""


class EngineLost(RuntimeUnavailable):
    """A process that the engine runs in ended or hangs; its requests go on in another engine."""


class RequestRejected(RuntimeFault):
    """A request that can never be served as it stands."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ConfigRejected(RuntimeFault):
    """A configuration or a change of one that is refused before anything is touched."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class JobRefused(RuntimeFault):
    """A job that must not start now: another one holds the engine, or other clients' requests run."""

    exit_code = 3


class SnapshotUnknown(RuntimeFault):
    """No snapshot goes by that name, or several do; the line names those near it."""

    exit_code = 2


class SamplingParams(Frozen):
    """How one request is sampled. `None` means: the runtime's configured default at admission."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Most output tokens; None = the configured default. The context limit also caps it."""
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    """Below 1e-4 the choice is greedy."""
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=0)
    """0 = no limit."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=0, lt=2**64)
    """Key of the position-keyed noise; None draws 64 random bits at admission."""
    stop: tuple[str, ...] = Field(default=(), max_length=4)
    """Strings that end the text; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """True: the model's own end tokens do not end the text (measuring)."""
    min_tokens: int = Field(default=0, ge=0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=10.0)
    logit_bias: dict[int, float] = Field(default_factory=dict)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    """None: no log-probabilities; n: of the chosen token and the n likeliest ones."""


class GenerateRequest(Frozen):
    """One request: exactly one of `prompt`, `messages` and `prompt_token_ids` is given."""

    prompt: str | None = None
    """Text; the chat template is applied unless `raw`."""
    messages: tuple[dict[str, Any], ...] | None = None
    """Chat turns, each `{"role": ..., "content": ...}`."""
    prompt_token_ids: tuple[int, ...] | None = None
    raw: bool = False
    sampling: SamplingParams = SamplingParams()
    mode: Mode | None = None
    """None follows the runtime's configured mode, also when that is flipped while the request runs."""
    tree_budget: int | None = Field(default=None, ge=0)
    """None follows the runtime's configured budget."""
    reuse_prefix: bool = True
    """False: neither read nor keep cached prefixes (measuring)."""
    request_id: str | None = None
    client: str = "local"
    workload: str | None = None


class TokenLogprob(Frozen):
    """Log-probabilities (natural log, untempered, before any filter) of one output token."""

    token_id: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()
    """(token id, text, log-probability) of the likeliest tokens, best first."""


class TokenPiece(Frozen):
    """One output token as it reached the text."""

    token_id: int
    text: str
    """Text this token completed; empty while a character or a possible stop string is incomplete."""
    drafted: bool
    """True: proposed by the drafter and accepted; False: the target's own bonus token."""
    logprob: TokenLogprob | None = None


class RequestAdmitted(Frozen):
    """First event of a stream; absent where the request was cancelled while it waited."""

    kind: Literal["admitted"] = "admitted"
    request_id: str
    seed: int
    """The seed in use, drawn at admission when the request gave none."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose keys, values and drafter features were reused."""


class TokensEmitted(Frozen):
    """Tokens of one round (or of prefill) for one request."""

    kind: Literal["tokens"] = "tokens"
    request_id: str
    pieces: tuple[TokenPiece, ...]


class RequestFinished(Frozen):
    """Last event of every stream."""

    kind: Literal["finished"] = "finished"
    request_id: str
    reason: FinishReason
    text: str
    token_ids: tuple[int, ...]
    stats: RequestStats
    tail: str = ""
    """Text held back as a possible stop string and released because none came."""
    error: str | None = None


GenerateEvent = RequestAdmitted | TokensEmitted | RequestFinished


class FieldChange(Frozen):
    field: str
    old: Any
    new: Any
    effect: Literal["live", "rebuild", "refused"]
    note: str = ""


class AppliedChange(Frozen):
    """One change that was applied: who made it, when, and what it changed."""

    revision: int
    """Configuration revision that the change led to."""
    author: str
    time_s: float
    """Unix time."""
    changes: tuple[FieldChange, ...]


class Status(Frozen):
    state: EngineState
    reason: str
    revision: int
    """Configuration revision; `apply` needs the one its change was previewed at."""
    config: dict[str, Any]
    running: int
    waiting: int
    slots_used: int
    slots_cached: int
    """Slots that hold reusable prefixes of finished requests."""
    slots_total: int
    started_at_s: float | None = None
    load_progress: float | None = None
    """0 to 1 while loading."""
    baselines: tuple[Baseline, ...] = ()
    calibration: str | None = None
    """How the default budget was chosen."""
    auto: str | None = None
    """In auto mode: what is played now, and the reason of the last change."""
    errors: tuple[str, ...] = ()
    history: tuple[AppliedChange, ...] = ()
    """The last applied changes, the latest one last."""
    origins: dict[str, str] = Field(default_factory=dict)
    """Configuration field to where its value came from; fields that are missing: unknown."""
    last_good: dict[str, Any] | None = None
    """The configuration that last proved itself on the runtime's host; None where none is kept."""


class ChangePlan(Frozen):
    """What a change would do; nothing has been touched yet."""

    revision: int
    changes: tuple[FieldChange, ...]
    allowed: bool
    requests_running: int
    unreached: int
    """Running requests a change of temperature does not reach."""
    outage_s: float | None = None
    """Expected pause of service; None = unknown; 0 for live changes."""
    summary: str


class ChangeReport(Frozen):
    revision: int
    applied: tuple[FieldChange, ...]
    """Empty where the change failed and the configuration before it is in force."""
    summary: str
    outage_s: float | None = None
    """Seconds without service as measured, the carried requests' tokens computed anew included; None: no rebuild."""
    carried: int = 0
    """Requests that ran on under the engine built for the change."""
    failure: str | None = None
    """Why the change was taken back; None where it was applied."""
    kept: str | None = None
    """How what ran before was kept as an automatic snapshot, or why not; None where that was not asked for."""


@runtime_checkable
class Runtime(Protocol):
    """A DDTree runtime, in this process or elsewhere.

    `generate` raises `RequestRejected` or `RuntimeUnavailable` before the first event; leaving its iterator early
    cancels the request. `watch` never blocks the engine: it is coalesced and bounded. `apply` raises `ConfigRejected`
    when the revision is old or the plan is not allowed. `start_job` returns the job's id at once; it raises
    `ConfigRejected` for a kind or parameter that is wrong and `JobRefused` while another job or other clients' requests
    stand in its way.
    """

    async def describe(self) -> Description: ...

    async def status(self) -> Status: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]: ...

    async def cancel(self, request_id: str) -> bool: ...

    def watch(self) -> AsyncIterator[WatchEvent]: ...

    async def requests(self) -> tuple[RequestStats, ...]: ...

    async def trace(self, request_id: str, after: int = 0) -> tuple[TreeTrace, ...]:
        """Draft trees of a request's last rounds with an index above `after`, oldest first.

        Empty where none are kept: it is unknown, has not decoded a round yet, or ended long ago.
        """
        ...

    async def preview(self, change: dict[str, Any]) -> ChangePlan: ...

    async def apply(self, change: dict[str, Any], revision: int, author: str = "local") -> ChangeReport: ...

    async def start_job(
        self, kind: str, parameters: dict[str, Any] | None = None, author: str = "local"
    ) -> str: ...

    async def cancel_job(self, job_id: str) -> bool: ...

    async def jobs(self) -> tuple[Job, ...]: ...

    @property
    def snapshots(self) -> Snapshots:
        """The snapshots kept where the runtime runs."""
        ...

    async def aclose(self) -> None: ...
