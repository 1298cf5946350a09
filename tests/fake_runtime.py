"""A Runtime without a model: scripted, deterministic, in memory; to test what shows or serves a runtime."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
import zlib
from collections.abc import AsyncIterator
from typing import Any

from fake_trees import scripted

from runtime.changes import check_revision, plan_change, recorded
from runtime.config import RuntimeConfig
from runtime.interface import (
    AppliedChange,
    Baseline,
    ChangePlan,
    ChangeReport,
    ConfigRejected,
    Description,
    EngineState,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    HostSample,
    Job,
    JobProgress,
    Mode,
    RequestAdmitted,
    RequestFinished,
    RequestRejected,
    RequestStats,
    RoundStats,
    RuntimeUnavailable,
    Status,
    StatusChanged,
    TokenLogprob,
    TokenPiece,
    TokensEmitted,
    TreeTrace,
    WatchEvent,
)
from runtime.job_kinds import BenchParameters, DoctorParameters, VerifyParameters, check_measured
from runtime.jobs import JobContext, JobKind, Jobs, Outcome
from snapshots.serving import StoreKeeper, StoreReader

ANSWER = "The quick brown fox jumps over the lazy dog. "
ACCEPT_LENGTHS = (3, 1, 5, 4, 2)
"""Tokens per decode round, bonus token included, repeated for ever."""
SLOTS = 4096
CONTEXT = 2048
VOCABULARY = 49152


def token_id(text: str) -> int:
    """The token whose text is `text`."""
    return zlib.crc32(text.encode("utf-8", "replace")) % VOCABULARY


AUTO = "tree 11; off -> tree 11: 31% faster expected at 1 sequence (3.05 tokens a round against 1.00)"
JOB_STEPS = 5
EXAMINED = {
    "checks": [
        {
            "id": "logout",
            "found": "the user service of [red]me[/red] ends at logout: no linger",
            "expected": "services and detached consoles that outlive the session",
            "severity": "warning",
            "remedy": "loginctl enable-linger me",
            "source": "/var/lib/systemd/linger",
            "fix": "linger",
        },
        {
            "id": "gpu-driver",
            "found": "no NVIDIA GPU here: models run on the CPU",
            "expected": "a driver that answers where there is a GPU",
            "severity": "ok",
            "remedy": "",
            "source": "NVML",
            "fix": None,
        },
    ],
    "counts": {"error": 0, "warning": 1, "info": 0, "ok": 1},
    "fixed": [],
}
VERIFIED = {"passed": True, "texts": 4, "identical": 4, "findings": "no divergence"}


def bench_case(mode: str, budget: int, tok_s: float, accept: float, **more: Any) -> dict[str, Any]:
    """One result of a bench, as `runtime.bench` writes it; plain decoding gives 40 tok/s."""
    stages = dict.fromkeys(("draft", "tree", "verify", "accept", "commit"), 0.002)
    return {
        "mode": mode,
        "tree_budget": budget,
        "concurrency": 1,
        "temperature": 0.0,
        "tok_s": tok_s,
        "tok_s_min": tok_s - 1,
        "tok_s_max": tok_s + 1,
        "total_tok_s": tok_s * 0.9,
        "accept_length": accept,
        "ttft_s": 0.02,
        "round_s": 0.01,
        "stage_s": stages,
        "speed_up": tok_s / 40.0,
        "repetitions": 3,
        **more,
    }


BENCHED = {
    "schema": 1,
    "conditions": {
        "host": "fake",
        "measured_at": "2026-01-02T03:04:05Z",
        "max_tokens": 64,
        "prompt_count": 6,
    },
    "results": [
        bench_case("tree", 8, 81.5, 3.4),
        bench_case("tree", 16, 72.0, 3.9),
        bench_case("chain", 0, 60.25, 2.6),
        bench_case("off", 0, 40.0, 1.0),
    ],
    "notes": [],
}


class FakeRuntime:
    """Answers every request with `answer`, one token a word, `ACCEPT_LENGTHS` tokens a round."""

    def __init__(
        self,
        config: RuntimeConfig | None = None,
        *,
        loading: bool = False,
        answer: str = (ANSWER * 4).strip(),
        round_s: float = 0.01,
        baseline_tok_s: float | None = 40.0,
    ) -> None:
        self.config = config or RuntimeConfig(tree_budget=11)
        self.answer = answer
        self.round_s = round_s
        self.refusals: dict[str, str] = {}
        """Field to the reason why a change of it is refused."""
        self.rejection: str | None = None
        """Set: requests are rejected with it."""
        self.break_after: int | None = None
        """Set: streams break after that many rounds."""
        self.errors: tuple[str, ...] = ()
        self.calibration: str | None = None
        self.origins: dict[str, str] = {"model": "default", "tree_budget": "command line"}
        self.last_good: dict[str, Any] | None = None
        self.answers: dict[str, str] = {}
        """Another answer by mode."""
        self.scores: dict[str, float] = {}
        """Log-probability by token text, where asked for; others have -0.1."""
        self.seen: list[GenerateRequest] = []
        self.traces: dict[str, list[TreeTrace]] = {}
        """Draft trees by request."""
        self.closed = False
        self._state = EngineState.LOADING if loading else EngineState.READY
        self._reason = "loading the model" if loading else ""
        self._progress: float | None = 0.4 if loading else None
        self._baseline = baseline_tok_s
        self._revision = 1
        self._history: tuple[AppliedChange, ...] = ()
        self._finished: list[RequestStats] = []
        self._running: dict[str, asyncio.Event] = {}
        self._clients: dict[str, str] = {}
        self._numbers = itertools.count(1)
        self._rounds = itertools.count()
        self._watchers: list[asyncio.Queue[WatchEvent]] = []
        self.job_results: dict[str, Outcome] = {
            "bench": Outcome("fastest: tree 8, 81.5 tok/s, 2.04x plain; 4 cases", BENCHED),
            "verify": Outcome("no divergence: 4 of 4 texts have exactly the plain tokens", VERIFIED),
            "doctor": Outcome("2 checks, 1 to look at: logout", EXAMINED),
        }
        self.job_step_s = 0.02
        """Seconds a step of a job takes; each has JOB_STEPS."""
        self._loop: asyncio.AbstractEventLoop | None = None
        kinds = (
            JobKind("bench", BenchParameters, self._work, check_measured, measures=True),
            JobKind("verify", VerifyParameters, self._work, check_measured, measures=True),
            JobKind("doctor", DoctorParameters, self._work, exclusive=False),
        )
        self.keeper = StoreKeeper()
        self.job_board = Jobs(self, (*kinds, *self.keeper.jobs), self._tell_job)

    @property
    def snapshots(self) -> StoreReader:
        return self.keeper.snapshots

    # Controls for tests

    def become(self, state: EngineState, reason: str = "") -> None:
        self._state, self._reason, self._progress = state, reason, None
        self.emit(StatusChanged(state=state, reason=reason, revision=self._revision))

    def emit(self, event: WatchEvent) -> None:
        """From the loop the fake lives in, or from the thread of a job."""
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if self._loop in (None, here) or self._loop.is_closed():
            self._hand_out(event)
        else:
            self._loop.call_soon_threadsafe(self._hand_out, event)

    def _hand_out(self, event: WatchEvent) -> None:
        for queue in self._watchers:
            queue.put_nowait(event)

    # Runtime

    async def describe(self) -> Description:
        if self._state is EngineState.LOADING:
            raise RuntimeUnavailable("still loading")
        return Description(
            engine="native",
            target=self.config.model,
            target_digest=None,
            drafter="its drafter",
            architecture="LlamaForCausalLM",
            block_size=8,
            max_tree_budget=self.config.max_tree_budget,
            max_seq_len=CONTEXT,
            max_concurrency=self.config.max_concurrency,
            vocab_size=VOCABULARY,
            dtype="float32",
            device="cpu",
            threads=2,
            linear="prepacked",
            host="fake",
            pid=1,
            speculation="ready",
        )

    async def status(self) -> Status:
        baselines = ()
        if self._baseline is not None and self._state is not EngineState.LOADING:
            baselines = (
                Baseline(
                    mode="off",
                    tree_budget=0,
                    tok_s=self._baseline,
                    measured_at_s=1_700_000_000.0,
                    conditions="1 request, T 0, 64 tokens",
                ),
            )
        return Status(
            state=self._state,
            reason=self._reason,
            revision=self._revision,
            config=self.config.model_dump(),
            running=len(self._running),
            waiting=0,
            slots_used=100 * len(self._running),
            slots_cached=50,
            slots_total=SLOTS,
            load_progress=self._progress,
            baselines=baselines,
            auto=AUTO if self.config.mode == "auto" else None,
            errors=self.errors,
            calibration=self.calibration,
            history=self._history,
            origins=self.origins,
            last_good=self.last_good,
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        if self._state is not EngineState.READY:
            raise RuntimeUnavailable(f"the engine is {self._state}")
        if self.rejection is not None:
            raise RequestRejected(self.rejection, "messages")
        if len(request.prompt or "") > 4 * CONTEXT:
            raise RequestRejected(f"prompt: it leaves no room in the context limit of {CONTEXT}", "prompt")
        self.seen.append(request)
        request_id = f"fake-{next(self._numbers)}"
        self._clients[request_id] = request.client
        cancelled = self._running[request_id] = asyncio.Event()
        mode = request.mode or self.config.mode
        answer = self.answers.get(mode, self.answer)
        tokens = [part for part in re.split(r"(?<= )", answer) if part][: request.sampling.max_tokens]
        temperature = self.config.temperature
        sent: list[str] = []
        rounds = 0
        reason: FinishReason = "stop"
        try:
            yield RequestAdmitted(request_id=request_id, seed=7, prompt_tokens=12, cached_tokens=0)
            lengths = itertools.chain((1,), itertools.cycle(ACCEPT_LENGTHS))
            while len(sent) < len(tokens):
                await asyncio.sleep(self.round_s)
                if cancelled.is_set():
                    reason = "cancelled"
                    break
                first = not sent
                if not first and self.break_after is not None and rounds >= self.break_after:
                    raise RuntimeError("the engine fell over")
                accept = next(lengths) if (request.mode or self.config.mode) != "off" else 1
                emitted = tokens[len(sent) : len(sent) + accept]
                sent += emitted
                if not first:
                    rounds += 1
                    done = self._round(len(emitted))
                    self.emit(done)
                    budget = self.config.tree_budget or 0
                    self.traces.setdefault(request_id, []).append(
                        scripted(done.index + 1, emitted, done.mode, budget)
                    )
                yield TokensEmitted(
                    request_id=request_id,
                    pieces=tuple(
                        TokenPiece(
                            token_id=token_id(text),
                            text=text,
                            drafted=index < len(emitted) - 1,
                            logprob=self._logprob(text) if request.sampling.logprobs is not None else None,
                        )
                        for index, text in enumerate(emitted)
                    ),
                )
        finally:
            self._running.pop(request_id, None)
        stats = self._stats(request_id, reason, temperature, len(sent), rounds, request.mode)
        self._finished.insert(0, stats)
        self.emit(stats)
        yield RequestFinished(
            request_id=request_id,
            reason=reason,
            text="".join(sent),
            token_ids=tuple(map(token_id, sent)),
            stats=stats,
        )

    def _logprob(self, text: str) -> TokenLogprob:
        scores = {text: -0.1} | self.scores
        top = tuple((token_id(each), each, scores[each]) for each in scores)
        return TokenLogprob(token_id=token_id(text), text=text, logprob=scores[text], top=top)

    def _stats(
        self,
        request_id: str,
        reason: FinishReason | None = None,
        temperature: float = 0.0,
        outputs: int = 0,
        rounds: int = 0,
        mode: Mode | None = None,
    ) -> RequestStats:
        decode_s = rounds * self.round_s
        return RequestStats(
            request_id=request_id,
            client=self._clients[request_id],
            state="finished" if reason else "decoding",
            finish_reason=reason,
            mode=mode or ("tree" if self.config.mode == "auto" else self.config.mode),
            tree_budget=self.config.tree_budget or 0,
            temperature=temperature,
            prompt_tokens=12,
            cached_tokens=0,
            output_tokens=outputs,
            rounds=rounds,
            num_correct_drafts=max(outputs - 1 - rounds, 0),
            accept_length=(outputs - 1) / rounds if rounds else None,
            ttft_s=self.round_s,
            decode_s=decode_s,
            tok_s=(outputs - 1) / decode_s if rounds else None,
            finished_at_s=time.time() if reason else None,
        )

    def _round(self, emitted: int) -> RoundStats:
        auto = self.config.mode == "auto"
        mode: Mode = "tree" if self.config.mode == "auto" else self.config.mode
        budget = self.config.tree_budget or 0
        part = self.round_s / 5
        return RoundStats(
            index=next(self._rounds),
            time_s=time.time(),
            mode=mode,
            tree_budget=budget,
            auto=auto,
            batch=1,
            nodes=budget + 1 if mode == "tree" else 8 if mode == "chain" else 1,
            emitted=emitted,
            accept_lengths=(emitted,),
            draft_depths=(0 if mode == "off" else 7,),
            stage_s=(part, part, part, part, part),
            slots_used=100,
            slots_total=SLOTS,
        )

    async def cancel(self, request_id: str) -> bool:
        event = self._running.get(request_id)
        if event is not None:
            event.set()
        return event is not None

    async def watch(self) -> AsyncIterator[WatchEvent]:
        queue: asyncio.Queue[WatchEvent] = asyncio.Queue()
        self._watchers.append(queue)
        try:
            yield HostSample(host="fake", time_s=time.time(), cpu=0.43, cpu_count=2, gpu_note="no GPU here")
            while True:
                yield await queue.get()
        finally:
            self._watchers.remove(queue)

    async def requests(self) -> tuple[RequestStats, ...]:
        return (*(self._stats(request_id) for request_id in self._running), *self._finished)

    async def trace(self, request_id: str, after: int = 0) -> tuple[TreeTrace, ...]:
        kept = self.traces.get(request_id, [])[-64:]
        return tuple(trace for trace in kept if trace.round_index > after)

    async def preview(self, change: dict[str, Any]) -> ChangePlan:
        running = await self.requests()
        plan = plan_change(
            self.config, change, self._revision, running[: len(self._running)], self.config.tree_budget
        )
        refused = {name: reason for name, reason in self.refusals.items() if name in change}
        if not refused:
            return plan
        changes = tuple(
            each.model_copy(update={"effect": "refused", "note": refused[each.field]})
            if each.field in refused
            else each
            for each in plan.changes
        )
        return plan.model_copy(
            update={"changes": changes, "allowed": False, "summary": "; ".join(refused.values())}
        )

    async def apply(self, change: dict[str, Any], revision: int, author: str = "local") -> ChangeReport:
        plan = await self.preview(change)
        check_revision(revision, self._revision, self._history)
        if not plan.allowed:
            raise ConfigRejected(plan.summary)
        self.config = self.config.changed(change)
        self._revision += 1
        self._history = recorded(self._history, plan, self._revision, author)
        self.emit(StatusChanged(state=self._state, reason=self._reason, revision=self._revision))
        rebuilt = any(each.effect == "rebuild" for each in plan.changes)
        return ChangeReport(
            revision=self._revision,
            applied=plan.changes,
            summary=plan.summary,
            outage_s=0.0 if rebuilt else None,
        )

    async def start_job(
        self, kind: str, parameters: dict[str, Any] | None = None, author: str = "local"
    ) -> str:
        self._loop = asyncio.get_running_loop()
        return await self.job_board.start(kind, parameters or {}, author)

    async def cancel_job(self, job_id: str) -> bool:
        return self.job_board.cancel(job_id)

    async def jobs(self) -> tuple[Job, ...]:
        return self.job_board.all()

    async def _work(self, context: JobContext[Any]) -> Outcome:
        step_s = max(self.job_step_s, (getattr(context.parameters, "duration_s", None) or 0.0) / JOB_STEPS)
        for step in range(JOB_STEPS):
            context.report(step / JOB_STEPS, f"step {step + 1} of {JOB_STEPS}")
            await asyncio.sleep(step_s)
        return self.job_results[context.job_id.partition("-")[0]]

    def _tell_job(self, event: JobProgress) -> None:
        """From the job's thread into the loop the fake lives in."""
        self.emit(event)

    async def aclose(self) -> None:
        await self.job_board.close()
        self.closed = True
        for event in self._running.values():
            event.set()
