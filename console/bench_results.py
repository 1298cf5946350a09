"""Results of benches: as rows, compared with an earlier one, kept as files that are never overwritten. No widget."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from console.formats import NA, number, rate
from layouts.user_files import user_home

CaseKey = tuple[str, int, int, float]
"""Mode, tree budget, concurrency, temperature."""
CONDITIONS = ("host", "model", "device", "dtype", "threads", "linear", "prompts", "max_tokens", "duration_s")
"""Conditions under which figures can be compared."""
COLUMNS = (
    "mode",
    "tree_budget",
    "concurrency",
    "temperature",
    "tok_s",
    "tok_s_min",
    "tok_s_max",
    "total_tok_s",
    "speed_up",
    "accept_length",
    "ttft_s",
    "round_s",
    "repetitions",
)


class NotABench(ValueError):
    """A file that holds no results of a bench; says which and why."""


@dataclass(frozen=True)
class Bench:
    """The results of one bench with their conditions, in the form `ddtree bench --json` has."""

    label: str
    results: tuple[Mapping[str, Any], ...]
    conditions: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, label: str, answer: Mapping[str, Any]) -> Bench:
        """From a bench's answer; raises NotABench naming what is missing."""
        results = answer.get("results")
        if not isinstance(results, Sequence) or isinstance(results, str) or not results:
            raise NotABench(f"{label}: it holds no results")
        for each in results:
            if not isinstance(each, Mapping) or not isinstance(each.get("tok_s"), int | float):
                raise NotABench(f"{label}: a result has no tok_s")
            if not all(name in each for name in ("mode", "tree_budget", "concurrency", "temperature")):
                raise NotABench(f"{label}: a result does not say of which case it is")
        conditions, notes = answer.get("conditions"), answer.get("notes")
        return cls(
            label,
            tuple(results),
            conditions if isinstance(conditions, Mapping) else {},
            tuple(map(str, notes)) if isinstance(notes, Sequence) else (),
        )

    def by_case(self) -> dict[CaseKey, Mapping[str, Any]]:
        return {case_key(each): each for each in self.results}

    def json_text(self) -> str:
        answer = {
            "schema": 1,
            "label": self.label,
            "conditions": dict(self.conditions),
            "results": [dict(each) for each in self.results],
            "notes": list(self.notes),
        }
        return json.dumps(answer, indent=2, ensure_ascii=False) + "\n"

    def csv_text(self) -> str:
        """One row a case; what is unknown stays empty."""
        out = io.StringIO()
        named = [name for name in ("host", "model", "max_tokens", "measured_at") if name in self.conditions]
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([*COLUMNS, *named])
        for each in self.results:
            writer.writerow(
                [*(each.get(name) for name in COLUMNS), *(self.conditions[name] for name in named)]
            )
        return out.getvalue()


def case_key(result: Mapping[str, Any]) -> CaseKey:
    return (
        str(result["mode"]),
        int(result["tree_budget"]),
        int(result["concurrency"]),
        float(result["temperature"]),
    )


def case_name(key: CaseKey) -> str:
    return f"tree {key[1]}" if key[0] == "tree" else key[0]


def against(result: Mapping[str, Any], other: Mapping[str, Any] | None) -> str:
    """How much faster than the same case of another bench, in words; n/a where that has no such case."""
    if other is None or not other["tok_s"]:
        return NA
    return f"{(result['tok_s'] / other['tok_s'] - 1) * 100:+.1f} %"


def differing(one: Bench, other: Bench) -> str:
    """The conditions in which two benches differ, in words; empty where the figures can be compared."""
    parts = [
        f"{name} {other.conditions.get(name, NA)} then, {one.conditions.get(name, NA)} here"
        for name in CONDITIONS
        if one.conditions.get(name) != other.conditions.get(name)
    ]
    return "; ".join(parts)


def verdict(bench: Bench, result: Mapping[str, Any]) -> str:
    """In words, whether speculation pays in this case, and what a larger tree does to it."""
    name, gain = case_name(case_key(result)), result.get("speed_up")
    words = f"{name}: {rate(result['tok_s'])} tok/s, accept length {number(result.get('accept_length'))}"
    if result["mode"] == "off":
        return f"{words}; plain decoding is what the others are compared with"
    if gain is None:
        return f"{words}; plain decoding was not measured beside it"
    if gain >= 1.02:
        return f"{words}; pays: {gain:.2f}x plain"
    return f"{words}; " + (
        f"loses: {gain:.2f}x plain" if gain <= 0.98 else f"no difference: {gain:.2f}x plain"
    )


@dataclass(frozen=True)
class Kept:
    path: Path
    label: str
    kept_at_s: float


def bench_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Where benches are kept: in the XDG data folder."""
    return user_home("data", env) / "benches"


def keep(folder: Path, label: str, text: str, suffix: str) -> Path:
    """Writes `text` as a file of its own and returns its path; a name that is taken gets a number. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.+-]+", "-", label, flags=re.ASCII).strip("-.")[:80] or "bench"
    for count in range(1, 10_000):
        path = folder / (f"{name}{suffix}" if count == 1 else f"{name}-{count}{suffix}")
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            return path
        except FileExistsError:
            continue
        except OSError:
            path.unlink(missing_ok=True)
            raise
    raise FileExistsError(f"{folder / name}{suffix}: too many files of that name")


def kept(folder: Path) -> tuple[Kept, ...]:
    """The benches that are kept, the latest first."""
    try:
        paths = list(folder.glob("*.json"))
        found = [Kept(path, path.stem, path.stat().st_mtime) for path in paths]
    except OSError:
        return ()
    return tuple(sorted(found, key=lambda each: -each.kept_at_s))


def read(path: Path) -> Bench:
    """A bench that was kept, or that `ddtree bench --json` wrote; raises NotABench."""
    try:
        answer = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise NotABench(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(answer, Mapping):
        raise NotABench(f"{path}: it is no JSON object")
    return Bench.of(path.stem, answer)
