"""Speed and acceptance over the last minutes, computed from decode rounds. No widget, no clock of its own.

tok/s counts output tokens of decode rounds over the time spent decoding: pauses in which nothing was decoded
are left out, so an idle minute neither lowers the mean nor keeps an earlier figure alive. Mean and peak cover
the same seconds, hence peak >= mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from runtime.interface import RoundStats

KEEP_S = 300
NOW_S = 5
IDLE_S = 1.5
"""Without a round for this long, or for IDLE_ROUNDS times the last round's work, nothing is being decoded."""
IDLE_ROUNDS = 3
PAUSE_S = 0.25
"""A gap between two rounds longer than the later one's work by this much is a pause, not decoding."""
STAGE_COUNT = 5


@dataclass(slots=True)
class _Second:
    """Sums over the rounds that ended within one second of Unix time."""

    at: int
    tokens: int = 0
    busy_s: float = 0.0
    rounds: int = 0
    sequences: int = 0
    accept_sum: int = 0
    nodes: int = 0
    stages: list[float] = field(default_factory=lambda: [0.0] * STAGE_COUNT)
    tried: dict[int, int] = field(default_factory=dict)
    accepted: dict[int, int] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    """Accept length to how many sequences had it in a round."""
    prefill_tokens: int = 0
    prefill_s: float = 0.0

    def add(self, round_stats: RoundStats, busy_s: float) -> None:
        self.tokens += round_stats.emitted
        self.busy_s += busy_s
        self.rounds += 1
        self.nodes += round_stats.nodes
        self.sequences += len(round_stats.accept_lengths)
        self.accept_sum += sum(round_stats.accept_lengths)
        if round_stats.stage_s is not None:
            self.stages = [a + b for a, b in zip(self.stages, round_stats.stage_s, strict=True)]
        self.prefill_tokens += round_stats.prefill_tokens
        self.prefill_s += round_stats.prefill_s
        for length in round_stats.accept_lengths:
            self.lengths[length] = self.lengths.get(length, 0) + 1
        for length, depth in zip(round_stats.accept_lengths, round_stats.draft_depths, strict=False):
            for position in range(1, depth + 1):
                self.tried[position] = self.tried.get(position, 0) + 1
                if length > position:
                    self.accepted[position] = self.accepted.get(position, 0) + 1


@dataclass(frozen=True, slots=True)
class Setting:
    """What the rounds of one stretch had in common."""

    mode: str
    """Auto for all that auto mode plays: it changes from round to round."""
    tree_budget: int
    """0 unless the mode is tree: the other modes have none."""
    mixed: bool = False
    """Some requests of the batch chose otherwise."""

    @classmethod
    def of(cls, stats: RoundStats) -> Setting:
        if stats.auto:
            return cls("auto", 0, stats.mixed)
        return cls(stats.mode, stats.tree_budget if stats.mode == "tree" else 0, stats.mixed)

    @property
    def plain(self) -> bool:
        return not self.mixed and (self.mode == "off" or (self.mode == "tree" and self.tree_budget == 0))

    def __str__(self) -> str:
        name = f"tree {self.tree_budget}" if self.mode == "tree" else self.mode
        return f"{name} and others" if self.mixed else name


@dataclass(frozen=True, slots=True)
class Before:
    """The stretch before the last flip of mode or budget, for comparison."""

    setting: Setting
    tok_s: float | None
    accept_length: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """What the Live screen shows; None where there is nothing to tell."""

    setting: Setting | None = None
    idle: bool = True
    tok_s: float | None = None
    """Over the last NOW_S seconds; None when idle."""
    tok_s_mean: float | None = None
    tok_s_peak: float | None = None
    accept_length: float | None = None
    accept_mean: float | None = None
    rounds: int = 0
    """Decode rounds with this setting that the means below cover."""
    accept_counts: tuple[int, ...] = ()
    """Entry k: how often a sequence got k tokens in a round, this setting."""
    prefill_tok_s: float | None = None
    """Prompt tokens per second of computing them, over the last NOW_S seconds; None where there were none."""
    prefill_mean: float | None = None
    prefill_peak: float | None = None
    by_position: tuple[float | None, ...] = ()
    """Entry k - 1: share of rounds that drafted position k in which it was accepted, this setting."""
    stages_s: tuple[float, ...] | None = None
    """Mean seconds per round in draft, tree, verify, accept, commit."""
    nodes: float | None = None
    """Mean rows the target verified in a round."""
    batch: float | None = None
    """Mean sequences in a round."""
    before: Before | None = None
    tok_s_series: tuple[float | None, ...] = ()
    """One entry per second, the last one the latest; None where nothing was decoded."""
    accept_series: tuple[float | None, ...] = ()


class RoundWindow:
    """Keeps sums per second of the last KEEP_S seconds, and of the present setting apart."""

    def __init__(self) -> None:
        self._all: deque[_Second] = deque()
        self._setting: Setting | None = None
        self._stretch: deque[_Second] = deque()
        self._before: Before | None = None
        self._last_s: float | None = None
        self._last_work_s = 0.0
        self._last_index: int | None = None

    def add(self, rounds: Iterable[RoundStats]) -> None:
        """Books rounds in their order."""
        for stats in rounds:
            setting = Setting.of(stats)
            if setting != self._setting:
                if self._setting is not None:
                    self._before = Before(self._setting, _rate(self._stretch), _accept(self._stretch))
                self._setting, self._stretch = setting, deque()
            busy_s = self._busy(stats)
            for seconds in (self._all, self._stretch):
                at = int(stats.time_s)
                if not seconds or seconds[-1].at < at:
                    seconds.append(_Second(at))
                while seconds[0].at < seconds[-1].at - KEEP_S:
                    seconds.popleft()
                seconds[-1].add(stats, busy_s)
            self._last_s, self._last_index = stats.time_s, stats.index
            self._last_work_s = sum(stats.stage_s or ())

    def _busy(self, stats: RoundStats) -> float:
        """Seconds this round kept the runtime busy: since the round before, unless there was a pause."""
        work_s = sum(stats.stage_s or ())
        if self._last_s is None or stats.index != (self._last_index or 0) + 1:
            return work_s
        gap_s = stats.time_s - self._last_s - stats.prefill_s
        return gap_s if 0.0 <= gap_s <= work_s + PAUSE_S else work_s

    def figures(self, now_s: float) -> Figures:
        """Everything as of the Unix time `now_s`."""
        quiet_s = max(IDLE_S, IDLE_ROUNDS * self._last_work_s)
        idle = self._last_s is None or now_s - self._last_s > quiet_s
        recent = [second for second in self._stretch if second.at > now_s - max(NOW_S, quiet_s) - 1]
        rounds = sum(second.rounds for second in recent)
        live = recent if rounds and not idle else []
        stages = [sum(s.stages[i] for s in live) / rounds for i in range(STAGE_COUNT)] if live else None
        if stages is not None and not any(stages):
            stages = None  # the engine does not tell
        return Figures(
            setting=self._setting,
            idle=idle,
            tok_s=_rate(live),
            tok_s_mean=_rate(self._stretch),
            tok_s_peak=_peak(self._stretch),
            accept_length=_accept(live),
            accept_mean=_accept(self._stretch),
            rounds=sum(second.rounds for second in self._stretch),
            accept_counts=_accept_counts(self._stretch),
            prefill_tok_s=_prefill_rate(s for s in self._all if s.at > now_s - NOW_S - 1),
            prefill_mean=_prefill_rate(self._all),
            prefill_peak=max(
                (_prefill_rate([s]) or 0.0 for s in self._all if s.prefill_tokens), default=None
            ),
            by_position=_by_position(self._stretch),
            stages_s=tuple(stages) if stages else None,
            nodes=sum(s.nodes for s in live) / rounds if live else None,
            batch=sum(s.sequences for s in live) / rounds if live else None,
            before=self._before,
            tok_s_series=self._series(now_s, lambda second: _rate([second])),
            accept_series=self._series(now_s, lambda second: _accept([second])),
        )

    def _series(self, now_s: float, value: Callable[[_Second], float | None]) -> tuple[float | None, ...]:
        last = int(now_s)
        by_second = {second.at: second for second in self._all}
        return tuple(
            value(by_second[at]) if at in by_second else None for at in range(last - KEEP_S + 1, last + 1)
        )


def _rate(seconds: Iterable[_Second]) -> float | None:
    kept = list(seconds)
    busy_s = sum(second.busy_s for second in kept)
    return sum(second.tokens for second in kept) / busy_s if busy_s > 0 else None


def _peak(seconds: Iterable[_Second]) -> float | None:
    """The best second that was busy for at least half of itself; never under the mean."""
    kept = list(seconds)
    best = [_rate([second]) for second in kept if second.busy_s >= 0.5]
    return max((rate for rate in [*best, _rate(kept)] if rate is not None), default=None)


def _accept(seconds: Iterable[_Second]) -> float | None:
    kept = list(seconds)
    sequences = sum(second.sequences for second in kept)
    return sum(second.accept_sum for second in kept) / sequences if sequences else None


def _prefill_rate(seconds: Iterable[_Second]) -> float | None:
    kept = list(seconds)
    spent = sum(second.prefill_s for second in kept)
    return sum(second.prefill_tokens for second in kept) / spent if spent > 0 else None


def _accept_counts(seconds: Iterable[_Second]) -> tuple[int, ...]:
    counts: dict[int, int] = {}
    for second in seconds:
        for length, number in second.lengths.items():
            counts[length] = counts.get(length, 0) + number
    return tuple(counts.get(length, 0) for length in range(max(counts, default=-1) + 1))


def _by_position(seconds: Sequence[_Second] | deque[_Second]) -> tuple[float | None, ...]:
    tried: dict[int, int] = {}
    accepted: dict[int, int] = {}
    for second in seconds:
        for total, part in ((tried, second.tried), (accepted, second.accepted)):
            for position, number in part.items():
                total[position] = total.get(position, 0) + number
    return tuple(
        accepted.get(position, 0) / tried[position] if tried.get(position) else None
        for position in range(1, max(tried, default=0) + 1)
    )
