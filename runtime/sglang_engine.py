"""The engine over SGLang: the same queue, requests and events as the native one; tokens come from `sglang.Engine`.

A request's tokens are kept here too, so it lives through the loss of SGLang and through a change of engine. What SGLang
does not offer, or offers otherwise than the native engine, is refused with the reason.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from runtime.calibrate import Calibration, prove
from runtime.config import EFFECTS, FIXED_UNDER_SGLANG, RuntimeConfig
from runtime.engine import Engine
from runtime.gang_step import RemotePool
from runtime.interface import (
    EngineLost,
    FinishReason,
    GenerateRequest,
    Mode,
    RequestRejected,
    RoundStats,
)
from runtime.kv_cache import KVCache
from runtime.loader import Loaded, Pair, Progress
from runtime.round import Models, SequenceRound
from runtime.running import Running, Sink
from runtime.sequence import OutputToken, Speculation
from runtime.sglang_arguments import Prepared, prepare, tree_budget_of
from runtime.sglang_host import Launch, SglangProcess, environment_folder
from runtime.target import TargetModel
from runtime.traces import LateRounds, TracedRound

WAIT_S = 0.02
"""A step waits so long for tokens; commands are obeyed between two steps."""


class SglangTarget(TargetModel):
    """A target that another process holds."""

    def __init__(self, process: SglangProcess, pair: Pair) -> None:
        self.process = process
        self.device, self.dtype = pair.device, pair.dtype
        self.vocab_size = pair.limits.vocab_size

    def watch(self, on_lost: Callable[[str], object]) -> None:
        self.process.watch(on_lost)

    def close(self) -> None:
        """Ends SGLang and all its processes."""
        self.process.close()


def build_sglang(config: RuntimeConfig, progress: Progress) -> tuple[SglangEngine, Calibration]:
    """Starts SGLang for `config` and lets it prove itself. Raises RuntimeFault."""
    prepared = prepare(config)
    pair, folder = prepared.pair, environment_folder().parent
    folder.mkdir(parents=True, exist_ok=True)
    progress(0.1, "starting SGLang")
    process = SglangProcess(
        prepared.launch, folder, lambda: progress(0.3, "SGLang loads and captures its graphs")
    )
    try:
        cache = KVCache(RemotePool(torch.device("cpu")), None, pair.limits.kv_slots, torch.device("cpu"))
        loaded = Loaded(
            models=Models(SglangTarget(process, pair), None, cache, pair.block_size),
            checkpoint=pair.checkpoint,
            tokenizer=pair.tokenizer,
            limits=pair.limits,
            drafter_path=pair.drafter_path,
            no_drafter_reason=pair.no_drafter_reason,
            linear="SGLang",
            threads=torch.get_num_threads(),
            target_digest=None,
            layout=_words(prepared.launch),
            notes=(
                f"SGLang {process.info['version']}",
                "a seed gives the same text in every mode of this engine, and another one than in the native engine",
            ),
        )
        engine = SglangEngine(loaded, config, prepared)
        progress(0.9, "decoding the first tokens")
        prove(engine)
    except BaseException:
        process.close()
        raise
    smaller = "; a smaller one counts live, in as many ms a round" if config.mode == "tree" else ""
    words = f"tree budget {prepared.budget}: as SGLang's graphs were captured{smaller}; a larger one needs a rebuild"
    return engine, Calibration(prepared.budget, {}, words)


class SglangEngine(Engine):
    """Requests over one SGLang process."""

    modes_by_request = False

    def __init__(self, loaded: Loaded, config: RuntimeConfig, prepared: Prepared) -> None:
        super().__init__(loaded, config, prepared.budget)
        self._prepared = prepared
        assert isinstance(loaded.models.target, SglangTarget)
        self._process = loaded.models.target.process
        self._sent: dict[str, str] = {}
        """Requests that SGLang works on, by the name it has for them; no name is used twice."""
        self._names = itertools.count()
        self._sampled = LateRounds()
        self._playing = self._captured()
        self._asked = self._playing.tree_budget
        """The tree budget SGLang was told of last; `_playing` has the one it has taken."""
        self._width = self._playing.tree_budget + 1

    def submit(self, request: GenerateRequest, sink: Sink) -> str:
        """As the native engine's; also raises RequestRejected for a mode or budget other than the captured one."""
        now = self._playing
        fixed = (
            "is the same for all requests under engine = sglang; leave it out, or change the configuration"
        )
        if request.mode is not None and request.mode != now.mode:
            raise RequestRejected(f"mode: {request.mode} was asked for, {now.mode} runs; it {fixed}", "mode")
        if request.tree_budget not in (None, now.tree_budget):
            raise RequestRejected(
                f"tree_budget: {request.tree_budget} was asked for, {now.tree_budget} runs; it {fixed}",
                "tree_budget",
            )
        return super().submit(request, sink)

    def _check_sampling(self, request: GenerateRequest) -> None:
        asked = request.sampling
        refused = {
            "presence_penalty": asked.presence_penalty != 0,
            "frequency_penalty": asked.frequency_penalty != 0,
            "repetition_penalty": asked.repetition_penalty != 1,
            "min_tokens": asked.min_tokens > 0,
            "logprobs": asked.logprobs is not None,
        }
        for name, wanted in refused.items():
            if wanted:
                raise RequestRejected(
                    f"{name}: SGLang cannot apply it in the same way with and without speculation; leave it out, or "
                    "use engine = native",
                    name,
                )

    def step(self) -> RoundStats | None:
        """Hands over what fits and delivers what came; figures where tokens came."""
        self._follow_budget()
        self._start()
        emitted: list[int] = []
        for answer in self._process.take(WAIT_S):
            if "budget" in answer:
                self._take_budget(answer)
                continue
            running = self._requests.get(self._sent.get(answer["id"], ""))
            if answer["finish"] is not None:
                self._sent.pop(answer["id"], None)
            if running is not None:
                count = self._take(running, answer)
                if count:
                    emitted.append(count)
                self._settle_rounds(running)
        for sent in self._process.trees.take():
            running = self._requests.get(self._sent.get(sent["id"], ""))
            if running is not None:
                self._sampled.add(running.ticket.request_id, _traced(sent, self._playing))
                self._settle_rounds(running)
        return self._figures(emitted) if emitted else None

    def traced(self, request_id: str, after: int = 0) -> tuple[TracedRound, ...]:
        """Rounds of a request as SGLang's scheduler samples them while somebody looks; the first look begins that."""
        self._process.trees.look([name for name, known in self._sent.items() if known == request_id])
        return super().traced(request_id, after)

    def _settle_rounds(self, running: Running, ended: bool = False) -> None:
        text = running.ticket.progress
        ids = [] if text is None else text.token_ids
        self._sampled.settle(running.ticket.request_id, ids, running.traces, ended)

    def catch_up(self, tick: Callable[[], object]) -> None:
        """Hands over what runs; SGLang computes it."""
        self._start()
        tick()

    def speculation(self, mode: str | None, tree_budget: int | None) -> Speculation:
        return self._playing

    def within_capture(self, wanted: RuntimeConfig) -> dict[str, str]:
        """`tree_budget`, where only that differs and the captured graphs hold as many nodes."""
        differing = [
            name for name in FIXED_UNDER_SGLANG if getattr(wanted, name) != getattr(self.config, name)
        ]
        rebuilt = [name for name, effect in EFFECTS.items() if effect == "rebuild"]
        if any(getattr(wanted, name) != getattr(self.config, name) for name in rebuilt):
            return {}
        if differing != ["tree_budget"] or self._playing.mode != "tree":
            return {}
        budget, horizon = tree_budget_of(wanted, self._prepared.pair), self.loaded.models.block_size - 1
        if not horizon <= budget <= self._prepared.budget:
            return {}
        cost = f"SGLang still computes the {self._width} rows its graphs were captured for, in as many ms a round"
        return {"tree_budget": cost}

    def _follow_budget(self) -> None:
        """Tells SGLang of the budget that the configuration names."""
        if self._playing.mode != "tree":
            return
        budget = tree_budget_of(self.config, self._prepared.pair)
        if budget != self._asked:
            self._asked = budget
            self._process.set_budget(budget)

    def _take_budget(self, answer: Mapping[str, Any]) -> None:
        if not answer["taken"]:
            raise EngineLost(f"SGLang did not take a tree budget of {answer['budget']}")
        self._playing = replace(self._playing, tree_budget=int(answer["budget"]))
        self.default_budget = self._playing.tree_budget

    def _captured(self) -> Speculation:
        if self.loaded.no_drafter_reason is not None:
            return Speculation(reason=self.loaded.no_drafter_reason)
        if self.config.mode == "off" or self.default_budget == 0:
            return Speculation()
        return Speculation("chain" if self.config.mode == "chain" else "tree", self.default_budget)

    def _start(self) -> None:
        room = self.config.max_concurrency if self.starts else 0
        for ticket in self.scheduler.schedule(room, False, False):
            running = self._requests[ticket.request_id]
            sequence = ticket.sequence
            assert sequence is not None
            name = f"{ticket.request_id}/{next(self._names)}"
            self._sent[name] = ticket.request_id
            self._process.add(name, sequence.token_ids, self._sampling(running))
            if sequence.num_outputs:
                sequence.committed_len = len(sequence.token_ids) - 1
                self._announce(running)

    def _sampling(self, running: Running) -> dict[str, Any]:
        """The request's settings as SGLang names them; what it has so far is part of the prompt."""
        ticket, sequence = running.ticket, running.ticket.sequence
        assert sequence is not None
        sampling = ticket.admitted.sampling
        return {
            "max_new_tokens": sequence.remaining,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "sampling_seed": sampling.seed & (2**63 - 1),
            "stop_token_ids": sorted(sampling.stop_token_ids),
            # With this SGLang heeds no stop token at all; those of the request are looked for here as well.
            "ignore_eos": ticket.request.sampling.ignore_eos,
            "logit_bias": {str(token): bias for token, bias in sampling.logit_bias} or None,
            "skip_special_tokens": False,
        }

    def _take(self, running: Running, answer: Mapping[str, Any]) -> int:
        """One answer of SGLang to a request; returns how many tokens it brought."""
        sequence, finish = running.ticket.sequence, answer["finish"]
        assert sequence is not None
        first = "cached" in answer
        if first and not sequence.num_outputs:
            sequence.cached_len = int(answer["cached"])
            self.prefilled_tokens += sequence.prompt_len - sequence.cached_len
            self._announce(running)
        ids = [int(each) for each in answer["ids"]]
        stopped = [i for i, each in enumerate(ids) if each in sequence.sampling.stop_token_ids]
        ids = ids[: stopped[0] + 1] if stopped else ids
        # A step's tokens are accepted drafts and, last, the target's own.
        drafts = self._playing.mode != "off" and not first
        tokens = [OutputToken(each, drafts and i + 1 < len(ids)) for i, each in enumerate(ids)]
        if not first and ids:
            sequence.rounds += 1
            sequence.num_correct_drafts += sum(token.drafted for token in tokens)
        sequence.append(tokens)
        sequence.committed_len = max(0, len(sequence.token_ids) - 1)
        if finish is not None:
            self._settle(running, answer, len(tokens))
        ended = _ended(finish, bool(stopped))
        if ended == "error":
            self._finish(running, "error", str(finish.get("message") or "SGLang ended the request"))
            return len(ids)
        return self._deliver(running, tokens, ended) if tokens or ended else 0

    def _settle(self, running: Running, answer: Mapping[str, Any], arriving: int) -> None:
        """At its end, the rounds as SGLang counted them: several may have come in one answer.

        `arriving`: tokens of the last answer, which are counted as a round when they are delivered.
        """
        sequence, rounds = running.ticket.sequence, answer.get("rounds")
        assert sequence is not None
        histogram = answer.get("histogram")
        if rounds is None or running.continued is not None:
            return
        sequence.rounds = int(rounds)
        sequence.num_correct_drafts = max(0, sequence.num_outputs - 1 - sequence.rounds)
        if histogram:
            running.accepts = Counter(
                {drafts + 1: int(count) for drafts, count in enumerate(histogram) if count}
            )
            if arriving and sequence.rounds:
                running.accepts[arriving] -= 1

    def _drop_tokens(self, sequence: Any, dropped: list[OutputToken]) -> None:
        super()._drop_tokens(sequence, dropped)
        sequence.committed_len = max(0, len(sequence.token_ids) - 1)

    def _finish(self, running: Running, reason: FinishReason, error: str | None = None) -> None:
        for name in [name for name, known in self._sent.items() if known == running.ticket.request_id]:
            del self._sent[name]
            self._process.cancel(name)
        self._settle_rounds(running, ended=True)
        self.scheduler.finish(running.ticket, False)
        self._close(running, reason, error)

    def _figures(self, emitted: list[int]) -> RoundStats:
        """Figures of what came in one step. SGLang does not tell where the time of a round goes."""
        self.rounds += 1
        how, (tokens, _) = self._playing, self._told_prefill
        self._told_prefill = self.prefilled_tokens, self.prefill_s
        depth = self.loaded.models.block_size - 1 if how.mode != "off" else 0
        return RoundStats(
            index=self.rounds,
            time_s=time.time(),
            mode=_mode(how.mode),
            tree_budget=how.tree_budget,
            batch=len(emitted),
            nodes=len(emitted) * self._width,
            emitted=sum(emitted),
            accept_lengths=tuple(emitted),
            draft_depths=(depth,) * len(emitted),
            stage_s=None,
            slots_used=self.scheduler.slots_used,
            slots_total=self.models.cache.slots,
            prefill_tokens=self.prefilled_tokens - tokens,
            prefill_s=0.0,
        )


def _traced(sent: Mapping[str, Any], how: Speculation) -> TracedRound:
    """A round as the scheduler sent it, its last token the target's own."""
    ids = [int(each) for each in sent["tokens"]]
    tokens = [OutputToken(each, i + 1 < len(ids)) for i, each in enumerate(ids)]
    nodes = tuple(
        (int(token), int(parent), int(depth), float(p)) for token, parent, depth, p in sent["nodes"]
    )
    outcome = SequenceRound(tokens, tuple(sent["path"]), nodes, None)
    return TracedRound(int(sent["index"]), int(sent["position"]), outcome, how, len(tokens), False)


def _ended(finish: Mapping[str, Any] | None, stopped: bool) -> str | None:
    """Why a request is over, in the engine's words; None: it goes on."""
    if finish is None:
        return "stop" if stopped else None
    kind = finish.get("type")
    if stopped or kind == "stop":
        return "stop"
    return "length" if kind == "length" else "error"


def _mode(name: str) -> Mode:
    return "tree" if name == "tree" else "chain" if name == "chain" else "off"


def _words(launch: Launch) -> str:
    """Degrees as in "SGLang, TP8+EP8"."""
    names = (("TP", "tp_size"), ("EP", "ep_size"), ("PP", "pp_size"), ("DP", "dp_size"))
    degrees = [f"{name}{launch.arguments[key]}" for name, key in names if launch.arguments.get(key, 1) > 1]
    return "SGLang, " + ("+".join(degrees) or "1 process")
