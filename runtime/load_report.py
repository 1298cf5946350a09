"""What a load measured, as values with a published JSON schema, and as a table for people."""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from runtime.interface import Frozen
from runtime.load import Answer, LoadRun

SCHEMA = 1


class Spread(Frozen):
    """A distribution; percentiles are interpolated linearly between ranks."""

    n: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """None where there are no values."""
        known = sorted(value for value in values if value is not None)
        if not known:
            return None
        shares = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
        return cls(
            n=len(known),
            mean=statistics.fmean(known),
            min=known[0],
            max=known[-1],
            **{name: percentile(known, share) for name, share in shares.items()},
        )


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the sorted `values` lie, linear between ranks."""
    at = share * (len(values) - 1)
    low = math.floor(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


class Slo(Frozen):
    """What a good answer keeps to, in seconds; None = no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def met_by(self, answer: Answer) -> bool:
        pairs = ((answer.ttft_s, self.ttft_s), (answer.tpot_s, self.tpot_s), (answer.e2e_s, self.e2e_s))
        # An answer of one token has no time per token after it, and keeps to any limit of it.
        return answer.error is None and all(
            value is None or limit is None or value <= limit for value, limit in pairs
        )


class LoadResult(Frozen):
    """One load. Times in seconds; null where there is nothing to tell."""

    loop: Literal["closed", "open"]
    concurrency: int | None
    """Closed loop: users at a time."""
    rate: float | None
    """Open loop: requests per second that were sent, by plan."""
    mode: str | None
    """null: the server's own."""
    tree_budget: int | None
    temperature: float
    max_tokens: int
    requests: int
    """Measured ones, warm-up left out."""
    failed: int
    errors: dict[str, int]
    """Reason to number of requests; failed ones are in no other figure."""
    duration_s: float
    """From the beginning to the end of the last answer."""
    request_rate: float
    """Answers per second."""
    prompt_tokens: int | None
    output_tokens: int
    tokens_by: Literal["server", "chunks"]
    """Who counted the output tokens: the server's usage, or the client its pieces of text (may be fewer)."""
    total_tok_s: float
    """Output tokens per second of duration, all users."""
    user_tok_s: Spread | None
    """Output tokens after the first per second of decoding, of each answer."""
    ttft_s: Spread | None
    """From the moment a request was due to its first token."""
    tpot_s: Spread | None
    """Time per output token after the first, of each answer."""
    gap_s: Spread | None
    """Longest pause in the text of each answer."""
    e2e_s: Spread | None
    """From the moment a request was due to its last token."""
    send_lag_s: float
    """Most that the client itself was late in sending."""
    peak_in_flight: int
    accept_length: float | None
    """Mean tokens per decode round, bonus token included, where the server tells."""
    slo: Slo | None
    goodput_per_s: float | None
    """Answers per second that kept to the SLO."""
    goodput_share: float | None
    energy_j: float | None = None
    """Of all GPUs of this host over the duration, idle power included."""
    energy_j_per_token: float | None = None


class LoadReport(Frozen):
    """The result file of `ddtree bench` under load."""

    schema_number: int = Field(default=SCHEMA, alias="schema")
    kind: Literal["load"] = "load"
    conditions: dict[str, str | int | float | bool | None]
    results: tuple[LoadResult, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)

    def table(self) -> str:
        """The results for people."""
        head = f"{'load':<10}{'mode':<7}{'budget':>6}{'T':>5}{'n':>5}{'fail':>5}{'tok/s':>9}{'user':>8}"
        head += f"{'TTFT p50':>10}{'p99':>8}{'TPOT p50':>10}{'p99':>8}{'e2e p99':>9}{'good/s':>8}"
        lines = [head, "-" * len(head)]
        for each in self.results:
            load = f"{each.concurrency} users" if each.loop == "closed" else f"{each.rate:g}/s"
            budget = "-" if each.tree_budget is None else str(each.tree_budget)
            lines.append(
                f"{load:<10}{each.mode or '-':<7}{budget:>6}{each.temperature:>5.2g}{each.requests:>5}"
                f"{each.failed:>5}{each.total_tok_s:>9.1f}{_at(each.user_tok_s, 'p50', '.1f'):>8}"
                f"{_time(each.ttft_s, 'p50'):>10}{_time(each.ttft_s, 'p99'):>8}{_time(each.tpot_s, 'p50'):>10}"
                f"{_time(each.tpot_s, 'p99'):>8}{_time(each.e2e_s, 'p99'):>9}"
                f"{'-' if each.goodput_per_s is None else f'{each.goodput_per_s:.2f}':>8}"
            )
        lines.append(
            "tok/s: all users, over the whole duration; user: tokens after the first per second, median."
        )
        lines.append("TTFT and e2e count from the moment a request was due.")
        return "\n".join([*lines, *self.notes])


def conditions(facts: Mapping[str, Any], prompts: int) -> dict[str, Any]:
    """What a load was measured under: `facts` of the target, and this client's host and moment."""
    return {
        **facts,
        "client_host": platform.node(),
        "client_cpus": os.cpu_count(),
        "prompt_count": prompts,
        "load_average_before": os.getloadavg()[0],
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def summarise(run: LoadRun, slo: Slo | None = None, energy_j: float | None = None) -> LoadResult:
    """The figures of one load; failed requests are counted and enter nothing else."""
    load, good = run.load, [each for each in run.answers if each.error is None]
    tokens = sum(each.tokens for each in good)
    prompts = [each.end.prompt_tokens for each in good]
    met = sum(slo.met_by(each) for each in good) if slo is not None else None
    per_second = 1 / run.duration_s if run.duration_s > 0 else 0.0
    return LoadResult(
        loop="closed" if load.rate is None else "open",
        concurrency=load.concurrency,
        rate=load.rate,
        mode=load.mode,
        tree_budget=load.tree_budget,
        temperature=load.temperature,
        max_tokens=load.max_tokens,
        requests=len(run.answers),
        failed=len(run.answers) - len(good),
        errors=dict(Counter(each.error for each in run.answers if each.error is not None)),
        duration_s=run.duration_s,
        request_rate=len(good) * per_second,
        prompt_tokens=sum(each for each in prompts if each is not None) if None not in prompts else None,
        output_tokens=tokens,
        tokens_by="chunks" if any(each.end.output_tokens is None for each in good) else "server",
        total_tok_s=tokens * per_second,
        user_tok_s=Spread.of(1 / each.tpot_s if each.tpot_s else None for each in good),
        ttft_s=Spread.of(each.ttft_s for each in good),
        tpot_s=Spread.of(each.tpot_s for each in good),
        gap_s=Spread.of(each.longest_gap_s for each in good),
        e2e_s=Spread.of(each.e2e_s for each in good),
        send_lag_s=max((each.sent_s - each.due_s for each in run.answers), default=0.0),
        peak_in_flight=_peak(run.answers),
        accept_length=_accept_length(good),
        slo=slo,
        goodput_per_s=None if met is None else met * per_second,
        goodput_share=None if met is None or not run.answers else met / len(run.answers),
        energy_j=energy_j,
        energy_j_per_token=energy_j / tokens if energy_j is not None and tokens else None,
    )


def _accept_length(answers: Sequence[Answer]) -> float | None:
    counted = [(each.end.rounds, each.end.num_correct_drafts) for each in answers]
    known = [(rounds, drafts) for rounds, drafts in counted if rounds and drafts is not None]
    rounds = sum(each for each, _ in known)
    return (rounds + sum(drafts for _, drafts in known)) / rounds if rounds else None


def _peak(answers: Sequence[Answer]) -> int:
    """Most requests in flight at one moment."""
    moments = sorted(
        [(each.sent_s, 1) for each in answers] + [(each.ended_s, -1) for each in answers],
        key=lambda each: (each[0], each[1]),
    )
    most = now = 0
    for _, change in moments:
        now += change
        most = max(most, now)
    return most


def _at(spread: Spread | None, name: str, form: str) -> str:
    return "n/a" if spread is None else format(getattr(spread, name), form)


def _time(spread: Spread | None, name: str) -> str:
    """Milliseconds below one second, else seconds."""
    if spread is None:
        return "n/a"
    seconds = getattr(spread, name)
    return f"{seconds * 1e3:.0f}ms" if seconds < 1 else f"{seconds:.2f}s"
