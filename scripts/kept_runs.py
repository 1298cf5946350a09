"""Measurements of a long check, kept as they are made, so that a check that was stopped goes on where it was."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import platformdirs

IDLE_LOAD = 0.5
FRESH_S = 6 * 3600.0
"""Older measurements are not gone on with: the host may be another one by then."""


class KeptRuns:
    """Values by name in a file of JSON lines; what was kept under other conditions is not seen."""

    def __init__(self, check: str, conditions: dict[str, Any], fresh: bool) -> None:
        """`fresh`: what is there is thrown away."""
        folder = platformdirs.user_state_path() / "ddtree" / "checks"
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / f"{check}.jsonl"
        self._key = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:16]
        if fresh:
            self.file.unlink(missing_ok=True)
        self._values = dict(self._read())

    def _read(self) -> list[tuple[str, Any]]:
        found = []
        for line in self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else ():
            try:
                row = json.loads(line)
            except ValueError:  # a line that was cut off
                continue
            if row["key"] == self._key and time.time() - row["time_s"] < FRESH_S:
                found.append((row["name"], row["value"]))
        return found

    def get(self, name: str) -> Any:
        """None where it was not measured."""
        return self._values.get(name)

    def put(self, name: str, value: Any) -> None:
        row = {"key": self._key, "name": name, "time_s": time.time(), "value": value}
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._values[name] = value


def tell(text: str) -> None:
    print(f"      {text}", file=sys.stderr, flush=True)


def judge(
    words: str,
    check: Callable[[argparse.Namespace], Coroutine[Any, Any, dict[str, Any]]],
    add_options: Callable[[argparse.ArgumentParser], None] = lambda _parser: None,
) -> int:
    """Runs a check as a program described by `words`: options, an idle machine, the result as JSON, the exit code.

    `check` is given the options, with those of `add_options`. Exits with 3 where the load average is too high to
    measure.
    """
    options = argparse.ArgumentParser(description=words)
    add_options(options)
    options.add_argument(
        "--fresh", action="store_true", help="do not go on with what a stopped check measured"
    )
    options.add_argument("--busy", action="store_true", help="measure although the machine is not idle")
    options.add_argument("--output", type=Path, help="write the result as JSON here too")
    given = options.parse_args()
    load = os.getloadavg()[0]
    if load > IDLE_LOAD and not given.busy:
        reason = f"load average {load:.2f} is above {IDLE_LOAD}; stop what else runs and wait a minute, or use --busy"
        print(f"not judged: {reason}", file=sys.stderr)
        return 3
    result = asyncio.run(check(given)) | {"load_average_before": load}
    if given.output is not None:
        given.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0 if result["passed"] else 1
