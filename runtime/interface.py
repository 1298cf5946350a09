"""The one interface between anything that shows or serves a runtime and the runtime itself.

`Runtime` is implemented by the in-process runtime (`runtime.local`) and by the HTTP client. Values that cross it are
frozen pydantic models of plain types: no tensor, no widget. This module imports neither torch nor transformers.

Errors:

    RuntimeFault
    ├── RuntimeUnavailable   the engine is loading, draining or failed; try again later (HTTP 503)
    │   └── RuntimeBusy      it serves, but its queue is full or moves too slowly; try again later (HTTP 429)
    ├── RequestRejected      this request cannot be served; `field` names what is wrong with it
    └── ConfigRejected       this configuration or change cannot be applied; `field` names what is wrong with it
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

Mode = Literal["off", "chain", "tree"]
FinishReason = Literal["stop", "length", "cancelled", "error"]
STAGES = ("draft", "tree", "verify", "accept", "commit")


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


class Frozen(BaseModel):
    """Base of all values that cross the interface."""

    model_config = ConfigDict(frozen=True, extra="forbid")


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


class RequestStats(Frozen):
    """One finished or running request in figures. Times in seconds, None where not known yet."""

    kind: Literal["request"] = "request"
    request_id: str
    client: str = "local"
    workload: str | None = None
    state: Literal["queued", "prefill", "decoding", "finished"] = "finished"
    finish_reason: FinishReason | None = None
    mode: Mode
    tree_budget: int
    temperature: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    rounds: int
    """Decode rounds; the prefill, which gives the first token, is not one."""
    num_correct_drafts: int
    """Accepted drafts, without bonus tokens, up to the stop token or cap."""
    accept_length: float | None
    """Mean tokens per decode round, bonus token included; None before the first round."""
    accept_counts: tuple[int, ...] = ()
    """Decode rounds by accept length: entry i counts the rounds that gave i tokens."""
    queue_s: float | None = None
    ttft_s: float | None = None
    """Admission of the request to its first token."""
    decode_s: float | None = None
    """First to last token."""
    tok_s: float | None = None
    """Output tokens after the first, per second of decode_s."""
    plain_reason: str | None = None
    """Why this request decodes plainly though speculation is configured; None if it does not."""


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


class RoundStats(Frozen):
    """One decode round over a batch."""

    kind: Literal["round"] = "round"
    index: int
    time_s: float
    """Unix time at the end of the round."""
    mode: Mode
    tree_budget: int
    batch: int
    nodes: int
    """Rows the target verified, roots included."""
    emitted: int
    """Output tokens this round gave, over the batch."""
    accept_lengths: tuple[int, ...]
    """Per sequence, bonus token included."""
    draft_depths: tuple[int, ...]
    """Per sequence, deepest position that was drafted (0: none)."""
    stage_s: tuple[float, float, float, float, float]
    """Seconds in draft, tree, verify, accept, commit (`STAGES`)."""
    slots_used: int
    slots_total: int


class GpuSample(Frozen):
    """One GPU; None where the device or driver does not tell."""

    index: int
    name: str
    uuid: str | None = None
    utilisation: float | None = None
    """Share of the last sampling period in which a kernel ran, 0 to 1."""
    memory_used: int | None = None
    """Bytes."""
    memory_total: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    state: str = "ok"


class HostSample(Frozen):
    """The host the runtime runs on."""

    kind: Literal["host"] = "host"
    host: str
    time_s: float
    cpu: float | None = None
    """Busy share over all cores since the last sample, 0 to 1."""
    cpu_count: int | None = None
    memory_used: int | None = None
    """Bytes."""
    memory_total: int | None = None
    process_memory: int | None = None
    """Resident bytes of the runtime's process."""
    load_1m: float | None = None
    gpus: tuple[GpuSample, ...] = ()
    gpu_note: str | None = None
    """Why there is no GPU row, in words."""


class EngineState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    REBUILDING = "rebuilding"
    DEGRADED = "degraded"
    FAILED = "failed"


class StatusChanged(Frozen):
    """The engine's state or configuration changed."""

    kind: Literal["status"] = "status"
    state: EngineState
    reason: str
    revision: int


class LogLine(Frozen):
    kind: Literal["log"] = "log"
    time_s: float
    level: str
    text: str


WatchEvent = RoundStats | RequestStats | HostSample | StatusChanged | LogLine


class Baseline(Frozen):
    """Plain or chain decoding as measured on this host at start-up, concurrency 1."""

    mode: Mode
    tree_budget: int
    tok_s: float
    measured_at_s: float
    """Unix time."""
    conditions: str


class Description(Frozen):
    """What runs; fixed until a rebuild."""

    engine: str
    target: str
    target_digest: str | None
    drafter: str | None
    architecture: str | None
    block_size: int | None
    """The drafter's trained block size; None without a drafter."""
    max_tree_budget: int
    max_seq_len: int
    max_concurrency: int
    vocab_size: int | None
    dtype: str | None
    device: str | None
    threads: int | None
    linear: str | None
    """Which linear layers run: prepacked or plain."""
    host: str
    pid: int
    speculation: str
    """"ready", or "inactive: " and the reason."""
    notes: tuple[str, ...] = ()


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


class TreeNode(Frozen):
    token_id: int
    text: str
    parent: int
    depth: int
    log_prob: float
    """Sum of the drafter's log-probabilities along the path."""
    accepted: bool


class TreeTrace(Frozen):
    """The draft tree of one round of one request; node 0 is the root."""

    round_index: int
    position: int
    """Absolute position of the root."""
    nodes: tuple[TreeNode, ...]
    bonus_token_id: int
    bonus_text: str
    tree_budget: int


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
    summary: str


@runtime_checkable
class Runtime(Protocol):
    """A DDTree runtime, in this process or elsewhere.

    `generate` raises `RequestRejected` or `RuntimeUnavailable` before the first event; leaving its iterator early
    cancels the request. `watch` never blocks the engine: it is coalesced and bounded. `apply` raises `ConfigRejected`
    when the revision is old or the plan is not allowed.
    """

    async def describe(self) -> Description: ...

    async def status(self) -> Status: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]: ...

    async def cancel(self, request_id: str) -> bool: ...

    def watch(self) -> AsyncIterator[WatchEvent]: ...

    async def requests(self) -> tuple[RequestStats, ...]: ...

    async def trace(self, request_id: str) -> tuple[TreeTrace, ...]: ...

    async def preview(self, change: dict[str, Any]) -> ChangePlan: ...

    async def apply(self, change: dict[str, Any], revision: int, author: str = "local") -> ChangeReport: ...

    async def aclose(self) -> None: ...
