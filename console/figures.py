"""Speed and acceptance over the last minutes, computed from decode rounds. No widget, no clock of its own.

tok/s counts output tokens of decode rounds over the time spent decoding: pauses in which nothing was decoded
are left out, so an idle minute neither lowers the mean nor keeps an earlier figure alive. Mean and peak cover
the same seconds, hence peak >= mean.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
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
class _Sums:
    """Sums over the rounds that ended within one second of Unix time, or over several such seconds."""

    at: int = 0
    """The second; 0 for several."""
    tokens: int = 0
    busy_s: float = 0.0
    rounds: int = 0
    sequences: int = 0
    accept_sum: int = 0
    nodes: int = 0
    stages: list[float] = field(default_factory=lambda: [0.0] * STAGE_COUNT)
    tried: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    """Accept length to how many sequences had it in a round."""
    prefill_tokens: int = 0
    prefill_s: float = 0.0

    def book(self, round_stats: RoundStats, busy_s: float) -> None:
        """Takes in one round that kept the runtime busy for `busy_s`."""
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
            self.lengths[length] += 1
        for length, depth in zip(round_stats.accept_lengths, round_stats.draft_depths, strict=False):
            for position in range(1, depth + 1):
                self.tried[position] += 1
                if length > position:
                    self.accepted[position] += 1

    def add(self, other: _Sums, sign: int = 1) -> None:
        """Adds the sums of other rounds, or with `sign` -1 takes them out."""
        self.tokens += sign * other.tokens
        self.busy_s += sign * other.busy_s
        self.rounds += sign * other.rounds
        self.sequences += sign * other.sequences
        self.accept_sum += sign * other.accept_sum
        self.nodes += sign * other.nodes
        self.stages = [a + sign * b for a, b in zip(self.stages, other.stages, strict=True)]
        self.prefill_tokens += sign * other.prefill_tokens
        self.prefill_s += sign * other.prefill_s
        for mine, theirs in (
            (self.tried, other.tried),
            (self.accepted, other.accepted),
            (self.lengths, other.lengths),
        ):
            for key, number in theirs.items():
                mine[key] += sign * number

    @property
    def rate(self) -> float | None:
        """Tokens per second of decoding."""
        return self.tokens / self.busy_s if self.rounds and self.busy_s > 0 else None

    @property
    def accept(self) -> float | None:
        """Mean tokens a sequence got in a round."""
        return self.accept_sum / self.sequences if self.sequences else None

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens per second of computing them."""
        return self.prefill_tokens / self.prefill_s if self.prefill_tokens and self.prefill_s > 0 else None

    @property
    def accept_counts(self) -> tuple[int, ...]:
        """Entry k: how often a sequence got k tokens in a round."""
        return tuple(self.lengths[length] for length in range(max(+self.lengths, default=-1) + 1))

    @property
    def by_position(self) -> tuple[float | None, ...]:
        """Entry k - 1: share of the rounds that drafted position k in which it was accepted."""
        return tuple(
            self.accepted[position] / self.tried[position] if self.tried[position] else None
            for position in range(1, max(+self.tried, default=0) + 1)
        )


class _Seconds:
    """The last KEEP_S seconds that had rounds, and the sums over those of them that are over."""

    def __init__(self) -> None:
        self.each: deque[_Sums] = deque()
        self._over = _Sums()

    def book(self, stats: RoundStats, busy_s: float) -> None:
        """Takes in one round."""
        at = int(stats.time_s)
        if not self.each or self.each[-1].at < at:
            if self.each:
                self._over.add(self.each[-1])
            self.each.append(_Sums(at))
            while self.each[0].at < at - KEEP_S:
                self._over.add(self.each.popleft(), -1)
        self.each[-1].book(stats, busy_s)

    def total(self) -> _Sums:
        """The sums over all of them."""
        return _total((self._over, self.each[-1]) if self.each else ())

    def since(self, at_s: float) -> list[_Sums]:
        """Those after the Unix time `at_s`."""
        found = []
        for second in reversed(self.each):
            if second.at <= at_s:
                break
            found.append(second)
        return found


def _total(parts: Iterable[_Sums]) -> _Sums:
    total = _Sums()
    for part in parts:
        total.add(part)
    return total


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
    """Mean seconds per round in draft, tree, verify, accept, commit: over NOW_S seconds, or idle of this setting."""
    nodes: float | None = None
    """Mean rows the target verified in a round, of the same rounds."""
    batch: float | None = None
    """Mean sequences in a round."""
    before: Before | None = None
    tok_s_series: tuple[float | None, ...] = ()
    """One entry per second, the last one the latest; None where nothing was decoded."""
    accept_series: tuple[float | None, ...] = ()


class RoundWindow:
    """Keeps sums per second of the last KEEP_S seconds, and of the present setting apart."""

    def __init__(self) -> None:
        self._all = _Seconds()
        self._setting: Setting | None = None
        self._stretch = _Seconds()
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
                    stretch = self._stretch.total()
                    self._before = Before(self._setting, stretch.rate, stretch.accept)
                self._setting, self._stretch = setting, _Seconds()
            busy_s = self._busy(stats)
            self._all.book(stats, busy_s)
            self._stretch.book(stats, busy_s)
            self._last_s, self._last_index = stats.time_s, stats.index
            self._last_work_s = sum(stats.stage_s or ())

    def _busy(self, stats: RoundStats) -> float:
        """Seconds this round kept the runtime busy: since the round before, unless there was a pause."""
        work_s = sum(stats.stage_s or ())
        if self._last_s is None or stats.index != (self._last_index or 0) + 1:
            return work_s
        if stats.batch == 1 and stats.prefill_tokens and stats.stage_s is not None:
            return work_s  # a pause before a lone sequence's first round is not told from host time
        gap_s = stats.time_s - self._last_s - stats.prefill_s
        return gap_s if 0.0 <= gap_s <= work_s + PAUSE_S else work_s

    def figures(self, now_s: float) -> Figures:
        """Everything as of the Unix time `now_s`."""
        quiet_s = max(IDLE_S, IDLE_ROUNDS * self._last_work_s)
        idle = self._last_s is None or now_s - self._last_s > quiet_s
        stretch, all_of_it = self._stretch.total(), self._all.total()
        live = _total(() if idle else self._stretch.since(now_s - max(NOW_S, quiet_s) - 1))
        rounds = live.rounds
        timed = stretch if idle else live  # what was measured stays to be read once nothing is decoded
        # The engine may not tell how long its stages took.
        stages = tuple(seconds / timed.rounds for seconds in timed.stages) if any(timed.stages) else None
        return Figures(
            setting=self._setting,
            idle=idle,
            tok_s=live.rate,
            tok_s_mean=stretch.rate,
            tok_s_peak=_peak(self._stretch, stretch),
            accept_length=live.accept,
            accept_mean=stretch.accept,
            rounds=stretch.rounds,
            accept_counts=stretch.accept_counts,
            prefill_tok_s=_total(self._all.since(now_s - NOW_S - 1)).prefill_rate,
            prefill_mean=all_of_it.prefill_rate,
            prefill_peak=max(
                (s.prefill_rate or 0.0 for s in self._all.each if s.prefill_tokens), default=None
            ),
            by_position=stretch.by_position,
            stages_s=stages,
            nodes=timed.nodes / timed.rounds if timed.rounds else None,
            batch=live.sequences / rounds if rounds else None,
            before=self._before,
            tok_s_series=self._series(now_s, lambda second: second.rate),
            accept_series=self._series(now_s, lambda second: second.accept),
        )

    def _series(self, now_s: float, value: Callable[[_Sums], float | None]) -> tuple[float | None, ...]:
        first = int(now_s) - KEEP_S + 1
        series: list[float | None] = [None] * KEEP_S
        for second in self._all.each:
            if 0 <= second.at - first < KEEP_S:
                series[second.at - first] = value(second)
        return tuple(series)


def _peak(seconds: _Seconds, total: _Sums) -> float | None:
    """The best second that was busy for at least half of itself; never under the mean."""
    best = [second.rate for second in seconds.each if second.busy_s >= 0.5]
    return max((rate for rate in [*best, total.rate] if rate is not None), default=None)
