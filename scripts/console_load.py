"""How much the console costs and how fast its keys answer, measured on the real program in a pseudo-terminal.

    python scripts/console_load.py [--seconds 30] [--keys 200] [--pairs 8] [--size 120x40] [--model NAME_OR_FOLDER]

Eight simulated GPUs are sampled ten times a second. First the engine idles, its baselines measured; then it decodes
without a pause. A key's answer is the time from its byte until what it paints is there; the keys go through all
screens in turn, 20 to 200 ms after the answer before, whatever is still to be drawn then. The console's CPU is that of
its own thread, as a share of one core, and for a key all that it used until the next one, so with a part of its tick.
Then the same answer is decoded in turn under the console and by the same runtime without one (the other process is
stopped meanwhile), `--pairs` times. Only on a machine with nothing else to do are the figures worth anything.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import functools
import json
import os
import pty
import random
import select
import signal
import statistics
import struct
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SAMPLES_A_SECOND = 10
GPUS = 8
TICKS = os.sysconf("SC_CLK_TCK")
SCREENS = ("Live", "Tree", "Prompt", "Controls", "Snapshots", "Layouts", "Bench", "Log")


def child(model: str | None, answers: Path, headless: bool) -> None:
    """The console, or its runtime alone, with simulated GPUs and a client.

    The client asks once for each SIGUSR1, without end from SIGUSR2 on; the tok/s of each answer go to `answers`.
    """
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from fake_nvml import FakeNvml

    from console.session import run_console
    from runtime import engine_thread, local
    from runtime.config import RuntimeConfig
    from runtime.interface import GenerateRequest, RequestFinished, SamplingParams
    from runtime.telemetry import HostSampler

    sampler = functools.partial(HostSampler, nvml=lambda: FakeNvml(gpus=GPUS))
    engine_thread.HostSampler = sampler  # type: ignore[misc, assignment]
    engine_thread.HOST_SAMPLE_SECONDS = 1 / SAMPLES_A_SECOND
    wanted = threading.Semaphore(0)
    threading.Thread(target=name_threads, name="names", daemon=True).start()
    signal.signal(signal.SIGUSR1, lambda *_: wanted.release())
    signal.signal(signal.SIGUSR2, lambda *_: wanted.release(10**6))
    config = RuntimeConfig(threads=1) if model is None else RuntimeConfig(model=model, threads=1)

    async def ask(runtime: local.LocalRuntime) -> None:
        await runtime.wait_ready()
        request = GenerateRequest(
            prompt="Tell me a long story.",
            sampling=SamplingParams(max_tokens=256, ignore_eos=True, temperature=0.0),
            reuse_prefix=False,
        )
        while True:
            await asyncio.to_thread(wanted.acquire)
            async for event in runtime.generate(request):
                if isinstance(event, RequestFinished) and event.stats is not None:
                    with answers.open("a") as file:
                        file.write(f"{event.stats.tok_s}\n")

    async def opener() -> local.LocalRuntime:
        runtime = local.LocalRuntime(config)
        threading.Thread(target=lambda: asyncio.run(ask(runtime)), name="load", daemon=True).start()
        return runtime

    async def alone() -> None:
        runtime = await opener()
        await asyncio.Event().wait()
        await runtime.aclose()

    if headless:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        asyncio.run(alone())
    sys.exit(run_console(opener))


def name_threads() -> None:
    """Gives the threads of this process their names as the kernel shows them, which Python does from 3.14 on."""
    while True:
        for thread in threading.enumerate():
            with contextlib.suppress(OSError):
                Path(f"/proc/self/task/{thread.native_id}/comm").write_text(thread.name[:15])
        time.sleep(0.5)


class Screen:
    """The other end of the pseudo-terminal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, seconds: float) -> bytes:
        """What comes within `seconds`; empty if nothing does."""
        ready, _, _ = select.select([self._fd], [], [], max(seconds, 0.0))
        try:
            return os.read(self._fd, 65536) if ready else b""
        except OSError:  # the program has ended
            time.sleep(max(seconds, 0.0))
            return b""

    def until(self, marker: bytes, seconds: float) -> float | None:
        """Seconds until `marker` has come; None if it does not."""
        began, seen = time.perf_counter(), b""
        while time.perf_counter() - began < seconds:
            seen += self.read(0.05)
            if marker in seen:
                return time.perf_counter() - began
        return None

    def press(self, key: bytes) -> None:
        os.write(self._fd, key)

    def drain(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.read(end - time.perf_counter())


def thread_seconds(pid: int) -> dict[str, float]:
    """CPU seconds so far by kind of thread; threads that ended count only in `all`."""
    used = {"all": _ticks(Path(f"/proc/{pid}/stat"))}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            name = (task / "comm").read_text().strip()
            kind = "console" if int(task.name) == pid else f"thread {name}"
            # In nanoseconds: the ticks of `stat` are far too coarse for threads that run for moments.
            used[kind] = used.get(kind, 0.0) + int((task / "schedstat").read_text().split()[0]) / 1e9
    return used


def _ticks(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def measure(pid: int, screen: Screen, seconds: float) -> dict[str, float]:
    """Shares of one core over `seconds` in which no key is pressed."""
    before, began = thread_seconds(pid), time.perf_counter()
    screen.drain(seconds)
    spent = time.perf_counter() - began
    after = thread_seconds(pid)
    return {
        kind: round((after[kind] - before.get(kind, 0.0)) / spent, 4)
        for kind in after
        if after[kind] - before.get(kind, 0.0) > 0
    }


def press_keys(pid: int, screen: Screen, keys: int) -> dict[str, object]:
    """Milliseconds until the answers to `keys` keys, each for the next screen; the medians by screen as well."""
    taken: dict[str, list[float]] = {name: [] for name in SCREENS}
    before = thread_seconds(pid)["console"]
    for key in range(1, keys + 1):
        number = key % len(SCREENS) + 1
        name = SCREENS[number - 1]
        screen.drain(random.uniform(0.02, 0.2))
        screen.press(str(number).encode())
        took = screen.until(f"[{number} {name}]".encode(), 10.0)
        if took is None:
            sys.exit(f"key {number} was not answered within 10 s")
        taken[name].append(took)
    screen.drain(0.2)
    every = sorted(took for each in taken.values() for took in each)
    return {
        "p50": at(every, 0.5),
        "p99": at(every, 0.99),
        "max": at(every, 1.0),
        "p50_by_screen": {name: at(sorted(each), 0.5) for name, each in taken.items() if each},
        "console_cpu_per_key": round((thread_seconds(pid)["console"] - before) / keys * 1000, 1),
    }


class Alternating:
    """Two processes of which one runs at a time: each answers once when asked."""

    def __init__(self, answers: dict[int, Path], screen: Screen) -> None:
        self._answers, self._screen = answers, screen

    def answer(self, pid: int) -> float:
        """tok/s of one answer of `pid` while all others stand still."""
        for other in self._answers:
            os.kill(other, signal.SIGCONT if other == pid else signal.SIGSTOP)
        self._screen.drain(0.5)
        before = self._lines(pid)
        os.kill(pid, signal.SIGUSR1)
        while len(lines := self._lines(pid)) == len(before):
            self._screen.drain(0.1)
        return float(lines[-1])

    def _lines(self, pid: int) -> list[str]:
        path = self._answers[pid]
        return path.read_text().splitlines() if path.exists() else []


def against_headless(console: int, headless: int, turns: Alternating, pairs: int) -> dict[str, object]:
    """tok/s under the console and without one, interleaved; their medians and the ratio of these."""
    tok_s: dict[int, list[float]] = {console: [], headless: []}
    for number in range(pairs + 1):
        for pid in (console, headless) if number % 2 else (headless, console):
            rate = turns.answer(pid)
            if number:  # the first pair warms up
                tok_s[pid].append(round(rate, 2))
    with_console, without = statistics.median(tok_s[console]), statistics.median(tok_s[headless])
    return {
        "console_tok_s": tok_s[console],
        "headless_tok_s": tok_s[headless],
        "medians": [with_console, without],
        "ratio": round(with_console / without, 4),
    }


def at(values: list[float], share: float) -> float:
    return round(values[min(len(values) - 1, int(share * len(values)))] * 1000, 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--keys", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--size", default="120x40")
    parser.add_argument("--model")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(given, Path(folder))


def run(given: argparse.Namespace, folder: Path) -> None:
    """Starts the console and, for the comparison, its runtime alone; prints the result as JSON."""
    # A console opens on the screen that was left last, and reads the host's own snapshots.
    os.environ |= {"XDG_STATE_HOME": str(folder), "XDG_DATA_HOME": str(folder / "data")}
    pid, fd = pty.fork()
    if pid == 0:
        child(given.model, folder / "console", headless=False)
    headless = os.fork()
    if headless == 0:
        child(given.model, folder / "headless", headless=True)
    columns, rows = map(int, given.size.split("x"))
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    os.kill(pid, signal.SIGWINCH)
    screen = Screen(fd)
    try:
        if screen.until(b"at start-up", 400.0) is None:
            sys.exit("the baselines were not measured within 400 s")
        screen.drain(5.0)
        turns = Alternating({pid: folder / "console", headless: folder / "headless"}, screen)
        compared = against_headless(pid, headless, turns, given.pairs) if given.pairs else None
        os.kill(headless, signal.SIGSTOP)
        os.kill(pid, signal.SIGCONT)
        screen.drain(5.0)
        result: dict[str, object] = {"size": given.size, "idle": measure(pid, screen, given.seconds)}
        if compared is not None:
            result["decoding_tok_s"] = compared
        result["key_ms_idle"] = press_keys(pid, screen, given.keys)
        os.kill(pid, signal.SIGUSR2)
        screen.drain(10.0)
        result["decoding"] = measure(pid, screen, given.seconds)
        result["key_ms_decoding"] = press_keys(pid, screen, given.keys)
        print(json.dumps(result, indent=2))
    finally:
        os.kill(headless, signal.SIGKILL)
        os.waitpid(headless, 0)
        os.kill(pid, signal.SIGTERM)
        screen.drain(3.0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
