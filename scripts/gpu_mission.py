"""The mission on this host: the real console in tmux, its figures against the runtime's own, what the console costs.

    python scripts/gpu_mission.py --out FOLDER [--seconds 300] [--device cuda] [--model M --drafter D]

One session: start, stream requests, T 0 -> 1, tree budget 15 -> 63, mode tree -> off -> tree, save a snapshot, break
the configuration, roll back, bench; then the same requests to the console's server and to a headless one in turn.
Each finding is one JSON line in `findings.jsonl`, each screen a text with and without colours. It ends by itself, its
processes too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx
from mission_terminal import MissionConsole, Streams, answered
from served import Served, serving

from runtime.prompt_sets import mixed_prompts

NEAR = 0.05
LEFT_S = 20.0
"""The comparison with the headless server starts no pair with less time left."""


class TimeUp(Exception):
    """The time given is over."""


class Mission:
    """What is done in turn, and where findings go."""

    def __init__(self, given: argparse.Namespace, console: MissionConsole, headless: Served) -> None:
        self.given, self.console, self.headless = given, console, headless
        self.ends = time.monotonic() + given.seconds
        self.prompts = [str(each["prompt"]) for each in mixed_prompts(3)][:8]

    def tell(self, finding: str, **what: Any) -> None:
        line = json.dumps({"finding": finding, **what})
        print(line, flush=True)
        with (self.given.out / "findings.jsonl").open("a") as file:
            file.write(line + "\n")

    def start(self) -> None:
        self.console.wait_ready(400)
        self.headless.wait_ready()
        self.tell("started", runtime=self.console.control(""))
        self.console.shot("01-ready")

    def stream(self) -> None:
        """Requests that run on while the console changes temperature, budget and mode under them."""
        streams = Streams(self.console.url, self.prompts[: self.given.streams], self.given.stream_tokens)
        try:
            self.console.tmux.until("a round: ", limit_s=90)
            self.watch("02-small-tree-T0")
            self.console.set_temperature("1")
            self.watch("03-small-tree-T1")
            self.console.until_fact(f"budget {self.given.tree_budgets[1]}", "]")
            self.watch("04-large-tree-T1")
            self.console.until_fact("mode off", "m")
            self.watch("05-off-T1")
            self.console.until_fact("mode tree", "m")
            self.watch("06-large-tree-again")
        finally:
            streams.stop()
        self.console.set_temperature("0")
        self.tell("streamed", clients=self.given.streams, answers_complete=streams.complete)

    def watch(self, name: str) -> None:
        """Figures on the Live screen against the runtime's counters over the same stretch of time."""
        time.sleep(self.given.window / 2)  # what the screen covers from here on is of this setting alone
        before = self.console.counters()
        time.sleep(self.given.window)
        shown, after = self.console.live(name), self.console.counters()
        grew = {key: value - before.get(key, 0.0) for key, value in after.items()}
        own = {
            "tok_s": grew["decode_tokens_total"] / grew["at"],
            "accept_length": grew["decode_tokens_total"] / max(grew["sequence_rounds_total"], 1.0),
            "round_ms": 1e3 * grew["round_stage_seconds_total"] / max(grew["rounds_total"], 1.0),
        }
        shown = {"tok_s": shown["now"], "accept_length": shown["accept_now"], "round_ms": shown["round_ms"]}
        self.tell(
            "screen against counters", screen=name, facts=self.console.facts().strip(), **compared(shown, own),
            rounds=grew["rounds_total"], missed_rounds=grew["missed_rounds_total"],
        )  # fmt: skip

    def keep_and_roll_back(self) -> None:
        """Save, a refused change, a bad change, roll back: twice, so that the second has figures to compare with."""
        label = "large trees work"
        self.console.save_snapshot(label)
        refused = self.console.ctl("apply", "tree_budget=9999")
        self.tell(
            "wrong change", code=refused.returncode, said=refused.stderr.strip(), ok=refused.returncode > 0
        )
        for turn in (1, 2):
            self.console.until_fact("mode off", "m")
            self.console.until_fact("budget 4", "[")
            self.console.shot(f"07-broken-{turn}")
            said = self.console.roll_back(label, "mode: off -> tree", f"08-rolled-back-{turn}")
            for fact in ("mode tree", f"budget {self.given.tree_budgets[1]}"):
                self.console.until_fact(fact)
            self.tell("rolled back", turn=turn, said=said, facts=self.console.facts().strip(), ok=True)

    def bench(self) -> None:
        """The bench of this session, by the Bench screen, against what the Live screen shows of its rounds."""
        prompts = self.given.out.resolve() / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in self.prompts))
        small, large = map(str, self.given.tree_budgets)
        # No two of one setting behind each other: the means on the Live screen cover a setting since it was taken.
        cases = [
            ("off", "", "0"),
            ("tree", small, "0"),
            ("tree", large, "0"),
            ("off", "", "1"),
            ("tree", large, "1"),
        ]
        for mode, budget, temperature in cases:
            name = f"{mode}{budget}-T{temperature}"
            load = {
                "modes": mode, "tree_budgets": budget, "concurrency": "1", "temperatures": temperature,
                "prompts": str(prompts), "prompts_per_kind": "3", "max_tokens": str(self.given.tokens),
                "repetitions": "1", "duration_s": str(self.given.bench_s), "under_load": "no",
            }  # fmt: skip
            kept = self.console.bench(load, f"10-bench-{name}")
            shown = self.console.live(f"11-live-{name}")
            own = {key: kept[key] for key in ("tok_s", "accept_length")}
            seen = {"tok_s": shown["mean"], "accept_length": shown["accept_mean"]}
            self.tell(
                "screen against bench", case=name, **compared(seen, own),
                bench_round_ms=round(1e3 * kept["round_s"], 4), bench_total_tok_s=round(kept["total_tok_s"], 1),
            )  # fmt: skip

    def cost(self) -> None:
        """tok/s of the console's server and of the headless one, which stands still meanwhile; the same requests."""
        self.console.live("12-before-the-comparison")
        urls = {"console": self.console.url, "headless": self.headless.url()}
        loads = sorted({1, self.given.streams})
        taken: dict[int, dict[str, list[float]]] = {each: {name: [] for name in urls} for each in loads}
        for pair in range(self.given.pairs + 1):
            if self.ends - time.monotonic() < LEFT_S:
                break
            for at_once in loads:
                for name in sorted(urls, reverse=bool(pair % 2)):
                    stop = signal.SIGSTOP if name == "console" else signal.SIGCONT
                    os.kill(self.headless.process.pid, stop)
                    time.sleep(0.2)
                    speed = answered(urls[name], self.prompts, at_once, self.given.turn, self.given.tokens)
                    if pair:  # the first pair warms up
                        taken[at_once][name].append(round(speed, 1))
        for at_once, speeds in taken.items():
            if not speeds["console"]:
                self.tell("cost of the console", at_once=at_once, n=0, ok=False, error="no time was left")
                continue
            ratios = [a / b for a, b in zip(speeds["console"], speeds["headless"], strict=True)]
            middle = statistics.median(speeds["console"]) / statistics.median(speeds["headless"])
            self.tell(
                "cost of the console", at_once=at_once, n=len(ratios), tok_s=speeds, ratio_of_medians=round(middle, 4),
                median_ratio=round(statistics.median(ratios), 4), ratios=[round(each, 4) for each in ratios],
                ok=middle >= 0.98,
            )  # fmt: skip
        self.console.shot("13-after-the-comparison")

    def leave(self) -> None:
        self.tell("left", ok=self.console.quit())

    def attempt(self, phase: Callable[[], None]) -> bool:
        """Runs one phase; what goes wrong is a finding, and the next one starts from the Live screen."""
        began, wrong = time.monotonic(), None
        try:
            phase()
        except (AssertionError, httpx.HTTPError, subprocess.SubprocessError, OSError, LookupError) as error:
            wrong = f"{type(error).__name__}: {error}"[:3000]
            self.console.shot(f"failed-{phase.__name__}")
            self.console.tmux.keys("Escape", "Escape", "Escape", "1")
        seconds = round(time.monotonic() - began, 1)
        self.tell("phase", name=phase.__name__, seconds=seconds, ok=wrong is None, error=wrong)
        return wrong is None


def compared(shown: dict[str, float | None], own: dict[str, float]) -> dict[str, Any]:
    """Each figure as shown and as it is, and their ratio; `ok` if speed and accept length are near."""
    ratios = {name: value / own[name] if value and own[name] else None for name, value in shown.items()}
    near = [each is not None and abs(each - 1) <= NEAR for each in (ratios["tok_s"], ratios["accept_length"])]
    return {
        "shown": shown,
        "own": {name: round(value, 4) for name, value in own.items()},
        "ratio": {name: each and round(each, 4) for name, each in ratios.items()},
        "ok": all(near),
    }


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TimeUp in the block after `seconds`, or when the process is asked to end."""

    def over(*_: object) -> None:
        raise TimeUp

    signal.signal(signal.SIGTERM, over)
    signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model")
    parser.add_argument("--drafter")
    parser.add_argument("--tree-budgets", type=int, nargs=2, default=[15, 63], metavar=("SMALL", "LARGE"))
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--stream-tokens", type=int, default=2000, help="of each streamed answer")
    parser.add_argument("--window", type=float, default=6.0, help="seconds of each setting")
    parser.add_argument("--tokens", type=int, default=256, help="of each other answer")
    parser.add_argument("--bench-s", type=float, default=5.0, help="seconds of each bench")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--turn", type=float, default=1.5, help="seconds of each side of a pair")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    os.environ["LC_ALL"] = "C.UTF-8"  # tmux writes what is no ASCII only where it is told so
    small, large = map(str, given.tree_budgets)
    options = ["--device", given.device, "--mode", "tree", "--tree-budget", small, "--max-tree-budget", large,
               "--temperature", "0", "--max-concurrency", str(given.streams)]  # fmt: skip
    for name in ("model", "drafter"):
        options += [f"--{name}", getattr(given, name)] if getattr(given, name) else []
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "headless", *options) as headless:
        console = MissionConsole(Path(folder) / "console", given.out, ["--threads", "1", *options])
        mission = Mission(given, console, headless)
        try:
            with limited(given.seconds):
                if mission.attempt(mission.start):
                    for phase in (mission.stream, mission.keep_and_roll_back, mission.bench, mission.cost):
                        mission.attempt(phase)
                    mission.attempt(mission.leave)
        except TimeUp:
            mission.tell("stopped by the clock", seconds=given.seconds)
        finally:
            console.tmux.end()


if __name__ == "__main__":
    main()
