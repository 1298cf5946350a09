"""Correcting the cost model by what was measured in the same scope, never by anything else.

The hardware's figures are a prior: each rate may move by a factor whose logarithm is normal around 0, and each record
says what a round took to a few per cent. The most likely factors are found by Gauss-Newton steps. A record's own error
is worked out with the record left out, so that a figure never proves itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log

from layouts.cost import Prediction, Rates
from layouts.presets import Evidence, Scope

PRIORS = {"memory": 0.15, "kernel_s": 0.5, "eager_kernel_s": 0.5, "step_s": 0.7, "link": 0.5}
"""Standard deviation of the logarithm of each factor: peak rates are known better than overheads."""
MEASURED = 0.04
"""The same of a measured figure."""
STEPS = 4
NUDGE = 0.02

Factors = dict[str, float]


@dataclass(frozen=True)
class Case:
    """One usable record: how to predict it, and what was measured."""

    record: Evidence
    predict: Callable[[Rates], Prediction]

    def residual(self, predicted: Prediction) -> float:
        """Logarithm of predicted over measured; 0 within a range."""
        value = predicted.total_tok_s if self.record.unit == "tok/s total" else predicted.tok_s
        low = self.record.low or self.record.value or value
        high = self.record.high or self.record.value or value
        return log(value / low) if value < low else log(value / high) if value > high else 0.0


@dataclass(frozen=True)
class Calibration:
    """Factors on the rates of one scope. Without records it changes nothing."""

    scope: Scope | None = None
    factors: Factors = field(default_factory=dict)
    cases: tuple[Case, ...] = ()

    @property
    def words(self) -> str:
        if self.scope is None or not self.cases:
            return "not calibrated: no usable record of this scope"
        moved = ", ".join(
            f"{_NAMES[name]} x{factor:.2f}"
            for name, factor in self.factors.items()
            if abs(factor - 1) >= 0.01
        )
        records = f"{len(self.cases)} record{'s' if len(self.cases) > 1 else ''}"
        return f"calibrated by {records} of {self.scope.words}: {moved or 'nothing moved'}"

    def apply(self, rates: Rates) -> Rates:
        return replace(
            rates, **{name: getattr(rates, name) * factor for name, factor in self.factors.items()}
        )

    def without(self, record: Evidence, rates: Rates) -> Calibration:
        """The calibration by the other records of the scope."""
        others = tuple(case for case in self.cases if case.record != record)
        return self if len(others) == len(self.cases) else calibrate(self.scope, others, rates)


_NAMES = {
    "memory": "memory bandwidth",
    "kernel_s": "kernel time",
    "eager_kernel_s": "kernel time without graphs",
    "step_s": "link latency",
    "link": "link bandwidth",
}


def best_group(cases: Sequence[Case]) -> tuple[Scope | None, tuple[Case, ...]]:
    """The cases of the one scope, versions included, that has most of them; the latest measured on a tie."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.record.scope.words, []).append(case)
    if not groups:
        return None, ()
    best = max(groups.values(), key=lambda each: (len(each), max(c.record.measured_at or "" for c in each)))
    return best[0].record.scope, tuple(best)


def calibrate(scope: Scope | None, cases: tuple[Case, ...], rates: Rates) -> Calibration:
    """The most likely factors on `rates` given `cases`, all of `scope`."""
    if any(case.record.scope != scope for case in cases):
        raise ValueError("records of another scope never calibrate")
    if not cases:
        return Calibration()
    names = list(PRIORS)
    logs = [0.0] * len(names)

    def residuals(at: list[float]) -> list[float]:
        moved = Calibration(factors={name: exp(value) for name, value in zip(names, at, strict=True)})
        fitted = [case.residual(case.predict(moved.apply(rates))) / MEASURED for case in cases]
        return fitted + [value / PRIORS[name] for name, value in zip(names, at, strict=True)]

    now = residuals(logs)
    for _ in range(STEPS):
        columns = []
        for index in range(len(names)):
            nudged = list(logs)
            nudged[index] += NUDGE
            columns.append([(b - a) / NUDGE for a, b in zip(now, residuals(nudged), strict=True)])
        move = solve(
            [[_dot(left, right) for right in columns] for left in columns], [-_dot(c, now) for c in columns]
        )
        better = None
        for share in (1.0, 0.5, 0.25):
            tried = [value + share * step for value, step in zip(logs, move, strict=True)]
            after = residuals(tried)
            if _dot(after, after) < _dot(now, now):
                better = tried, after
                break
        if better is None:
            break
        logs, now = better
    return Calibration(scope, {name: exp(value) for name, value in zip(names, logs, strict=True)}, cases)


def solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """The solution of a small positive definite system, by elimination with pivots."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda index: abs(rows[index][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for index in range(column + 1, size):
            factor = rows[index][column] / rows[column][column]
            rows[index] = [a - factor * b for a, b in zip(rows[index], rows[column], strict=True)]
    found = [0.0] * size
    for column in reversed(range(size)):
        known = sum(rows[column][k] * found[k] for k in range(column + 1, size))
        found[column] = (rows[column][size] - known) / rows[column][column]
    return found


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
