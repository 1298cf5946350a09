"""The real console in a real terminal, for a measured session: its keys, its figures, its server's counters."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from tmux_window import Tmux

ROOT = Path(__file__).resolve().parent.parent
CHAT = "/v1/chat/completions"
SPEED = re.compile(r"decode tok/s +(\S+) now +(\S+) mean +(\S+) peak")
ACCEPT = re.compile(r"accept length +(\S+) now +(\S+) mean")
ROUND = re.compile(r"a round: ([\d.]+) ms")
LOAD = ("modes", "tree_budgets", "concurrency", "temperatures", "prompts", "prompts_per_kind", "max_tokens",
        "repetitions", "duration_s", "under_load")  # fmt: skip
"""Rows of the dialog for the load of a bench."""


class MissionConsole:
    """A console of 200x60 that serves on a free port, with folders of its own under `home`; screens go to `out`."""

    def __init__(self, home: Path, out: Path, options: list[str]) -> None:
        for folder in ("run", "state"):
            (home / folder).mkdir(parents=True, exist_ok=True)
        variables = [f"XDG_{name}_HOME={home / name.lower()}" for name in ("STATE", "DATA", "CONFIG")]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._ddtree = ["env", f"PYTHONPATH={path}", *variables, f"XDG_RUNTIME_DIR={home / 'run'}"]
        self._ddtree += [sys.executable, "-m", "console"]
        self._key, self._out = home / "run" / "ddtree" / "operator.key", out
        self._http = httpx.Client(timeout=30, trust_env=False)
        self.url = ""
        self.tmux = Tmux(f"ddtree-mission-{os.getpid()}", home, 200, 60)
        self.tmux.start(" ".join([*self._ddtree, "console", "--listen", "127.0.0.1:0", *options]))

    def wait_ready(self, limit_s: float) -> None:
        screen = self.tmux.until("[1 Live]", "serves 127.0.0.1:", " ready", limit_s=limit_s)
        found = re.search(r"serves (127\.0\.0\.1:\d+)", screen)
        assert found is not None
        self.url = f"http://{found[1]}"

    def shot(self, name: str) -> str:
        """Keeps the screen under `name`, with and without colours, and returns its text."""
        screen = self.tmux.screen()
        (self._out / f"{name}.txt").write_text(screen)
        (self._out / f"{name}.ansi").write_text(self.tmux.run("capture-pane", "-t", "w", "-p", "-e"))
        return screen

    def facts(self) -> str:
        """The first line: model, engine, layout, mode, budget, temperature, state."""
        return f" {self.tmux.screen().partition(chr(10))[0].strip()} "

    def until_fact(self, fact: str, key: str = "") -> None:
        """Waits until the first line says `fact`; with `key`, presses that, again when the line has followed."""
        end = time.monotonic() + 60.0
        pressed = ""
        while f" {fact} " not in (line := self.facts()):
            if time.monotonic() > end:
                raise AssertionError(f"the console never said {fact!r}: {line}")
            # What auto mode plays changes the line by itself.
            followed = "mode auto" if " mode auto" in line else line
            if key and followed != pressed:
                pressed = followed
                self.tmux.keys(key)
            time.sleep(0.2)

    def set_temperature(self, value: str) -> None:
        self.tmux.keys("t")
        self.tmux.until("temperature, 0 to 2")
        self.tmux.keys(value, "Enter")
        self.until_fact(f"T {value}")

    def live(self, name: str) -> dict[str, float | None]:
        """The figures of the Live screen, which is kept under `name`."""
        self.tmux.keys("1")
        self.tmux.until("[1 Live]")
        time.sleep(1.5)  # it looks at the figures once a second
        return figures(self.shot(name))

    def save_snapshot(self, label: str) -> None:
        self.tmux.keys("s")
        self.tmux.until("Save a snapshot of what runs")
        self.tmux.keys("-l", label)
        self.tmux.keys("Enter")
        self.tmux.until("saved ", without="Save a snapshot of what runs", limit_s=90)

    def roll_back(self, label: str, undoes: str, name: str) -> str:
        """Rolls back to the newest snapshot, with `label` in the list; returns what the console says of it."""
        self.tmux.keys("5")
        self.tmux.until("[5 Snapshots]", label)
        time.sleep(1.0)
        self.tmux.keys("g", "r")
        self.tmux.until("Roll back?", undoes, limit_s=90)
        self.shot(f"{name}-preview")
        self.tmux.keys("y")
        self.tmux.until("rolled back to", limit_s=120)
        time.sleep(1.0)
        self.shot(name)
        rows = self.tmux.screen().splitlines()
        at = max(number for number, row in enumerate(rows) if "rolled back to" in row)
        return " ".join(" ".join(rows[at : at + 3]).split())

    def bench(self, load: dict[str, str], name: str) -> dict[str, Any]:
        """Runs a bench of one case by the Bench screen, kept under `name`; returns its result as the job gives it."""
        self.tmux.keys("7")
        self.tmux.until("[7 Bench]")
        self.tmux.keys("e")
        self.tmux.until("Load of the bench")
        for field in LOAD:
            self.tmux.keys("End", "C-u")
            if load.get(field):
                self.tmux.keys("-l", load[field])
            if field != LOAD[-1]:
                self.tmux.keys("Down")
        self.tmux.keys("Enter")
        self.tmux.until("[7 Bench]", without="Load of the bench")
        known = {job["id"] for job in self.control("/jobs")["jobs"]}
        self.tmux.keys("r")
        job = self._ended_job(known)
        time.sleep(1.5)
        self.shot(name)
        assert job.get("result"), f"the bench gave nothing: {job}"
        return dict(job["result"]["results"][0])

    def _ended_job(self, known: set[str]) -> dict[str, Any]:
        for _ in range(600):
            for job in self.control("/jobs")["jobs"]:
                if job["id"] not in known and job["ended_at_s"] is not None:
                    return dict(job)
            time.sleep(0.2)
        raise AssertionError("the bench did not end within 120 s")

    def ctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*self._ddtree, "ctl", *arguments, "--url", self.url]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)

    def control(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {self._key.read_text().strip()}"}
        return self._http.get(f"{self.url}/runtime{path}", headers=headers).json()

    def counters(self) -> dict[str, float]:
        """The runtime's own counters, those of one name added up, and `at`, seconds of a clock."""
        text, sums = self._http.get(self.url + "/metrics").text, {"at": time.perf_counter()}
        for line in text.splitlines():
            if line.startswith("ddtree_"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0].removeprefix("ddtree_")
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def quit(self) -> bool:
        """Stops server and console; whether that was told as done well and left the terminal as it was."""
        self.tmux.keys("q")
        self.tmux.until("Leave the screen?")
        self.tmux.keys("s")
        return "exit=0" in self.tmux.ended()


class Streams:
    """Clients that stream one long answer after the other by the server's own mode, budget and temperature."""

    def __init__(self, url: str, prompts: list[str], tokens: int) -> None:
        self._body = {"max_tokens": tokens, "ignore_eos": True, "stream": True}
        self._url, self._over = url, threading.Event()
        self.complete = 0
        """Answers that came to their end."""
        self._threads = [threading.Thread(target=self._run, args=(each,), daemon=True) for each in prompts]
        for thread in self._threads:
            thread.start()

    def _run(self, prompt: str) -> None:
        body = {**self._body, "messages": [{"role": "user", "content": prompt}]}
        with contextlib.suppress(httpx.HTTPError), httpx.Client(timeout=120, trust_env=False) as client:
            while True:
                with client.stream("POST", self._url + CHAT, json=body) as reply:
                    for _ in reply.iter_raw():
                        if self._over.is_set():
                            return
                self.complete += 1

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30)


def answered(url: str, prompts: list[str], at_once: int, seconds: float, tokens: int) -> float:
    """Output tokens a second of `at_once` clients that ask for greedy answers of `tokens` one after the other."""
    given: list[int] = []
    began = time.perf_counter()

    def ask(first: int) -> None:
        with httpx.Client(timeout=120, trust_env=False) as client:
            for number in itertools.count(first):
                body = {"messages": [{"role": "user", "content": prompts[number % len(prompts)]}]}
                body |= {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}  # type: ignore[dict-item]
                given.append(client.post(url + CHAT, json=body).json()["usage"]["completion_tokens"])
                if time.perf_counter() > began + seconds:
                    return

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(at_once)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return sum(given) / (time.perf_counter() - began)


def figures(screen: str) -> dict[str, float | None]:
    """The speed panel of the Live screen in numbers; None where it shows none."""
    names = ("now", "mean", "peak", "accept_now", "accept_mean", "round_ms")
    found = [pattern.search(screen) for pattern in (SPEED, ACCEPT, ROUND)]
    texts = [
        text
        for match, count in zip(found, (3, 2, 1), strict=True)
        for text in (match.groups() if match else ("",) * count)
    ]
    return {
        name: float(text) if re.fullmatch(r"[\d.]+", text) else None
        for name, text in zip(names, texts, strict=True)
    }
