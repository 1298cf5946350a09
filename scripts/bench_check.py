"""Checks of absolute speed and memory on this machine: `make bench-check`. They hold for an idle machine only.

Prints one line a check and exits 1 if one fails, 3 if the machine is too busy or too uneven to judge.
"""

from __future__ import annotations

import json
import os
import pty
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

from runtime.bench import BenchPlan, CaseResult, run_bench
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.interface import GenerateRequest, RequestFinished, SamplingParams
from runtime.loader import load

COMMAND = [sys.executable, "-m", "console"]
HELP_S = 0.3
SCREEN_S = 1.0
PEAK_BYTES = 2.5e9
SPEED_UP = 1.6
IDLE_LOAD = 0.5
HALVES = 0.05
SECOND_TURN = 0.25
FIRST_SCREEN = b"Live"
PROMPT = "Write a Python function that checks whether a word is a palindrome."


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    measured: str
    wanted: str

    def line(self) -> str:
        return (
            f"{'ok  ' if self.passed else 'FAIL'}  {self.name:<44}{self.measured:>12}  wanted {self.wanted}"
        )


def help_time() -> Check:
    def once() -> float:
        start = time.perf_counter()
        subprocess.run([*COMMAND, "--help"], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start

    return _below("ddtree --help", once, HELP_S)


def first_screen_time() -> Check:
    return _below("first console screen, model still loading", _first_screen, SCREEN_S)


def peak_memory() -> Check:
    """Highest resident memory of a process that loads the default model and answers; all KV slots are taken at load."""
    process = subprocess.Popen(
        [*COMMAND, "generate", PROMPT, "--max-tokens", "64"], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    peak = usage.ru_maxrss * 1024
    passed = process.returncode == 0 and peak < PEAK_BYTES
    return Check(
        "peak memory, all KV slots taken", passed, f"{peak / 1e9:.2f} GB", f"< {PEAK_BYTES / 1e9:g} GB"
    )


def default_speed() -> Check:
    """Default mode and budget against plain decoding, greedy, one request at a time.

    Raises:
        SystemExit: with 3, where the machine is busy or plain decoding changes its speed meanwhile.
    """
    load = os.getloadavg()[0]
    if load > IDLE_LOAD:
        _refuse(f"load average {load:.2f} is above {IDLE_LOAD}; stop what else runs and wait a minute")
    plan = BenchPlan(
        config=RuntimeConfig(), modes=("off", RuntimeConfig().mode), repetitions=5, max_tokens=64
    )
    report = run_bench(plan, progress=lambda text: print(f"      {text}", file=sys.stderr, flush=True))
    print(report.table())
    plain = next(each for each in report.results if each.case.mode == "off")
    uneven = _halves_differ(plain)
    if uneven > HALVES:
        _refuse(
            f"the two halves of plain decoding differ by {uneven:.0%}, more than {HALVES:.0%}; measure again"
        )
    fastest = max((each.speed_up or 0.0 for each in report.results if each.case.mode != "off"), default=0.0)
    return Check(
        "default against plain decoding", fastest >= SPEED_UP, f"{fastest:.2f} x", f">= {SPEED_UP} x"
    )


def second_turn() -> Check:
    """Time to the first token of a chat's second turn, its beginning reused, against the same turn computed cold."""
    engine = loaded_engine(RuntimeConfig())
    long_turn = {
        "role": "user",
        "content": "Summarise this list. " + "apples, pears, plums and cherries; " * 110,
    }
    first = answer(engine, [long_turn], reuse=True)
    turns = [long_turn, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Shorter."}]
    warm = answer(engine, turns, reuse=True)
    cold = answer(engine, turns, reuse=False)
    if warm.text != cold.text:
        sys.exit("the second turn has another text when its beginning is reused")
    ratio = (warm.stats.ttft_s or 0.0) / (cold.stats.ttft_s or 1.0)
    name = f"second turn of {warm.stats.prompt_tokens} tokens, reused against cold"
    return Check(name, ratio <= SECOND_TURN, f"{ratio:.2f} x", f"<= {SECOND_TURN:g} x")


def loaded_engine(config: RuntimeConfig) -> Engine:
    return Engine(load(config), config, default_budget=11)


def answer(engine: Engine, messages: list[dict[str, str]], reuse: bool) -> RequestFinished:
    """One greedy answer of 32 tokens."""
    finished: list[RequestFinished] = []

    def sink(event: object) -> None:
        if isinstance(event, RequestFinished):
            finished.append(event)

    sampling = SamplingParams(max_tokens=32, temperature=0.0)
    engine.submit(GenerateRequest(messages=tuple(messages), sampling=sampling, reuse_prefix=reuse), sink)
    while engine.busy:
        engine.step()
    return finished[0]


def main() -> int:
    checks = []
    # Speed first: it wants an idle machine, and the other checks leave a load behind.
    for check in (default_speed, help_time, first_screen_time, peak_memory, second_turn):
        checks.append(check())
        print(checks[-1].line(), flush=True)
    print(json.dumps({"schema": 1, "checks": [vars(check) for check in checks]}))
    return 0 if all(check.passed for check in checks) else 1


def _below(name: str, once: Callable[[], float], limit_s: float, times: int = 5) -> Check:
    once()
    median = statistics.median(once() for _ in range(times))
    return Check(name, median < limit_s, f"{median:.2f} s", f"< {limit_s:g} s")


def _first_screen() -> float:
    """Seconds from the start of the console to its first painted screen, on a terminal of its own."""
    ours, theirs = pty.openpty()
    state = tempfile.TemporaryDirectory()  # a console opens on the screen that was left last
    start = time.perf_counter()
    process = subprocess.Popen(
        COMMAND,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ
        | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", "XDG_STATE_HOME": state.name},
        start_new_session=True,
    )
    os.close(theirs)
    shown, seconds = b"", 0.0
    while select.select([ours], [], [], 30)[0]:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # how Linux says that the other side has closed
            break
        if not seconds and FIRST_SCREEN in shown:
            seconds = time.perf_counter() - start
            process.terminate()
    process.kill()
    process.wait()
    os.close(ours)
    state.cleanup()
    if not seconds:
        sys.exit(f"the console ended without a screen: {shown[-200:].decode(errors='replace')}")
    return seconds


def _halves_differ(result: CaseResult) -> float:
    speeds = [run.tok_s for run in result.runs]
    half = len(speeds) // 2
    first, second = statistics.median(speeds[:half]), statistics.median(speeds[-half:])
    return abs(first - second) / max(first, second)


def _refuse(reason: str) -> None:
    print(f"not judged: {reason}", file=sys.stderr)
    sys.exit(3)


if __name__ == "__main__":
    sys.exit(main())
