"""What is observed of a runtime: what runs, requests, rounds, trees, host, state, log; frozen models of plain types.

These values cross `runtime.interface`, which gives their names on; nothing is imported here but pydantic.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Mode = Literal["off", "chain", "tree"]
FinishReason = Literal["stop", "length", "cancelled", "error"]
STAGES = ("draft", "tree", "verify", "accept", "commit")


class Frozen(BaseModel):
    """Base of all values that cross the interface."""

    model_config = ConfigDict(frozen=True, extra="forbid")


MEASURING = "calibration"
"""Client of the runtime's own measuring requests; nobody waits for them, and they give way."""


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
    layout: str | None = None
    """What is split over which processes, in words; may be less than the layout's name says."""
    host: str
    pid: int
    speculation: str
    """"ready", or "inactive: " and the reason."""
    memory: str | None = None
    """What the engine takes of its device's memory, term by term, in words."""
    notes: tuple[str, ...] = ()


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
    age_s: float | None = None
    """Since it was submitted; of a finished request, to its end."""
    last_token_age_s: float | None = None
    """Since its last token; None once it has finished."""
    queue_s: float | None = None
    ttft_s: float | None = None
    """Admission of the request to its first token."""
    decode_s: float | None = None
    """First to last token."""
    tok_s: float | None = None
    """Output tokens after the first, per second of decode_s."""
    finished_at_s: float | None = None
    """Unix time at which it ended; None while it waits or runs."""
    plain_reason: str | None = None
    """Why this request decodes plainly though speculation is configured; None if it does not."""
    continued: str | None = None
    """Under what an engine built meanwhile went on with it, and whether its text may differ; None: none was built."""


class RoundStats(Frozen):
    """One decode round over a batch."""

    kind: Literal["round"] = "round"
    index: int
    time_s: float
    """Unix time at the end of the round."""
    mode: Mode
    """How its sequences drafted; where they differ, how most of them did."""
    tree_budget: int
    mixed: bool = False
    """Some of its sequences drafted otherwise."""
    auto: bool = False
    """Mode and budget are the choice of auto mode."""
    batch: int
    nodes: int
    """Rows the target verified, roots included."""
    emitted: int
    """Output tokens this round gave, over the batch."""
    accept_lengths: tuple[int, ...]
    """Per sequence, bonus token included."""
    draft_depths: tuple[int, ...]
    """Per sequence, deepest position that was drafted (0: none)."""
    stage_s: tuple[float, float, float, float, float] | None
    """Seconds in draft, tree, verify, accept, commit (`STAGES`); None where the engine does not tell."""
    slots_used: int
    slots_total: int
    prefill_tokens: int = 0
    """Prompt tokens computed since the round before."""
    prefill_s: float = 0.0
    """Seconds spent on them."""


class GpuProcess(Frozen):
    """One process that holds memory of a GPU."""

    pid: int
    memory_used: int | None = None
    """Bytes."""
    ours: bool = False
    """The runtime's own process or a child of it."""


class GpuSample(Frozen):
    """One GPU or MIG instance; None where the device or driver does not tell."""

    index: int
    instance: int | None = None
    """Number of the MIG instance; None: the whole GPU."""
    name: str
    uuid: str | None = None
    bus_id: str | None = None
    utilisation: float | None = None
    """Share of the last sampling period in which a kernel ran, 0 to 1."""
    memory_used: int | None = None
    """Bytes."""
    memory_total: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    pcie_rx_b_s: float | None = None
    """Bytes per second into the GPU, in a window of 20 ms; `tx` is out of it."""
    pcie_tx_b_s: float | None = None
    nvlink_rx_b_s: float | None = None
    """Bytes per second of payload over all links, since the reading before."""
    nvlink_tx_b_s: float | None = None
    throttle: tuple[str, ...] | None = None
    """What holds the clocks down, in words; empty: nothing does."""
    processes: tuple[GpuProcess, ...] | None = None
    state: str = "ok"
    """In words: ok, lost, or which readings the driver does not answer."""
    ages: dict[str, float] = Field(default_factory=dict)
    """Seconds since each field above was read; a field that has no value has no age."""


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


JobName = Literal["bench", "tune", "verify", "doctor", "snapshot", "rollback"]
JobState = Literal["queued", "running", "done", "failed", "cancelled"]


class Job(Frozen):
    """One long piece of work beside serving."""

    id: str
    name: JobName
    holder: str
    """Who started it."""
    state: JobState = "queued"
    progress: float | None = None
    """0 to 1; None where it cannot be told."""
    text: str = ""
    """What it does, in the end its outcome or the reason why there is none; one line."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    result: dict[str, Any] | None = None
    """Of a job that is done."""
    started_at_s: float
    """Unix time."""
    ended_at_s: float | None = None

    @property
    def over(self) -> bool:
        return self.state in ("done", "failed", "cancelled")


class JobProgress(Frozen):
    """A job got on, or ended."""

    kind: Literal["job"] = "job"
    job: Job


WatchEvent = RoundStats | RequestStats | HostSample | StatusChanged | LogLine | JobProgress


class Baseline(Frozen):
    """Plain or chain decoding as last measured on this host in an idle moment, concurrency 1."""

    mode: Mode
    tree_budget: int
    tok_s: float
    measured_at_s: float
    """Unix time."""
    conditions: str


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
    bonus_token_id: int | None
    """The target's choice at the last accepted node; None where a stop or the cap ended the text before it."""
    bonus_text: str
    tree_budget: int
    mode: Mode = "tree"
    """How this round drafted."""
    reason: str | None = None
    """Why it was decoded plainly though drafting is configured; None if it was not."""
    finish: Literal["stop", "length"] | None = None
    """How the text ended with this round; None where it went on."""
