"""One engine a process for `sglang_gpu.py`: what such a process does when asked, and the handle its parent has of it.

    python scripts/sglang_arms.py FD     reads what to start from the socket FD, then one order after another

Orders and answers are JSON. The process ends with its socket, and all processes it started with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from sglang_cells import NATIVE, Results, arm_arguments, guarded, sglang_path, variables  # noqa: E402

Rows = list[list[int]]
MODES = {"native/off": ("off", 0), "native/chain": ("chain", 0), "native/tree15": ("tree", 15),
         "native/tree31": ("tree", 31)}  # fmt: skip
ANSWER_S = 90.0
LOG_LINES = 250
FAILURES = 3


class ArmLost(RuntimeError):
    """An arm that did not come up, ended or gave no answer in time; the words say which."""


class SglangArm:
    """SGLang in this process and its children."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        import sglang

        self.engine = sglang.Engine(**arguments)
        self.about = {"system": "sglang", "version": sglang.__version__}

    def load(
        self, prompts: Rows, at_once: int, temperature: float, tokens: int, **_mode: Any
    ) -> dict[str, Any]:
        """All prompts, `at_once` at a time, each seeded by its number; the window holds prefill and tails."""
        return dict(self.engine.loop.run_until_complete(self._load(prompts, at_once, temperature, tokens)))

    async def _load(self, prompts: Rows, at_once: int, temperature: float, tokens: int) -> dict[str, Any]:
        answers: list[Any] = [None] * len(prompts)
        waiting = iter(range(len(prompts)))

        async def client() -> None:
            for number in waiting:
                stream = self.engine.async_generate(
                    input_ids=prompts[number], sampling_params=sampling(temperature, tokens, number)
                )
                answers[number] = await stream

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(at_once)))
        seconds = time.perf_counter() - began
        ids = [list(each["output_ids"]) for each in answers]
        rounds = [each["meta_info"].get("spec_verify_ct") for each in answers]
        rounds = [
            len(row) - 1 if count is None else int(count) for row, count in zip(ids, rounds, strict=True)
        ]
        return {"seconds": seconds, "rounds": rounds, "ids": ids}

    def gaps(self, prompts: Rows, texts: Rows) -> dict[str, Any]:
        """In log-probability, by how much each token of each text falls short of plain decoding's choice."""
        return {
            "gaps": [max(0.0, best - own) for pairs in self._forced(prompts, texts) for own, best in pairs]
        }

    def differences(self, prompts: Rows, tokens: int) -> dict[str, Any]:
        """How far the same token's log-probability is apart when one row and when many rows are computed."""
        texts, alone = [], []
        for prompt in prompts:
            settings = sampling(0.0, tokens) | {"ignore_eos": True}
            answer = self.engine.generate(input_ids=prompt, sampling_params=settings, return_logprob=True)
            texts.append(list(answer["output_ids"]))
            alone.append([each[0] for each in answer["meta_info"]["output_token_logprobs"]])
        together = self._forced(prompts, texts)
        return {
            "differences": [
                abs(one - many[0])
                for row, pairs in zip(alone, together, strict=True)
                for one, many in zip(row, pairs, strict=True)
            ]
        }

    def _forced(self, prompts: Rows, texts: Rows) -> list[list[tuple[float, float]]]:
        """For each token its log-probability and the largest one, from one pass over each whole text."""
        answers = self.engine.generate(
            input_ids=[[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)],
            sampling_params={"temperature": 0.0, "max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=[len(prompt) - 1 for prompt in prompts],
            top_logprobs_num=1,
        )
        found = []
        for answer, text in zip(answers, texts, strict=True):
            meta = answer["meta_info"]
            chosen = meta["input_token_logprobs"][-len(text) :]
            best = meta["input_top_logprobs"][-len(text) :]
            found.append([(own[0], top[0][0]) for own, top in zip(chosen, best, strict=True)])
        return found

    def soak(self, prompts: Rows, steps: int, seconds: float) -> dict[str, Any]:
        """Requests that come, go and are aborted, in batches of 1 to 32, until the longest of each add up to `steps`.

        SGLang checks its slots whenever it is idle and ends with an error where one leaked.
        """
        done, requests, aborted = self.engine.loop.run_until_complete(self._soak(prompts, steps, seconds))
        time.sleep(2)
        answer = self.engine.generate(input_ids=prompts[0], sampling_params=sampling(0.0, 8))
        state = self.engine.get_server_info()["internal_states"][0]
        told = {key: value for key, value in state.items() if isinstance(value, int | float)}
        return {"steps": done, "requests": requests, "aborted": aborted, "serves": len(answer["output_ids"]),
                "state": told}  # fmt: skip

    async def _soak(self, prompts: Rows, steps: int, seconds: float) -> tuple[int, int, int]:
        draws, aborted = random.Random(0), 0
        end = time.monotonic() + seconds

        async def request(number: int) -> int:
            nonlocal aborted
            name, taken = f"soak{number}", 0
            abort_at = draws.randint(1, 60) if draws.random() < 0.3 else None
            settings = sampling(draws.choice((0.0, 1.0)), draws.randint(1, 200), number)
            stream = await self.engine.async_generate(
                input_ids=draws.choice(prompts), sampling_params=settings, stream=True, rid=name
            )
            async for answer in stream:
                taken += 1
                if abort_at is not None and len(answer["output_ids"]) >= abort_at:
                    self.engine.tokenizer_manager.abort_request(rid=name)
                    abort_at, aborted = None, aborted + 1
            return taken

        done, number = 0, 0
        while done < steps and time.monotonic() < end:
            batch = draws.randint(1, 32)
            done += max(await asyncio.gather(*(request(number + i) for i in range(batch))))
            number += batch
        return done, number, aborted


class NativeArm:
    """The native engine, as `gpu_bench.py` runs it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from runtime.config import validate
        from runtime.engine import Engine
        from runtime.garbage import keep_out
        from runtime.loader import load

        config = validate(arguments)
        loaded = load(config)
        self.engine = Engine(loaded, config, 31)
        keep_out()
        self.about = {
            "system": "ddtree",
            "dtype": str(loaded.models.target.dtype),
            "rounds_by": loaded.rounds,
        }

    def load(
        self, prompts: Rows, at_once: int, temperature: float, tokens: int, mode: str = "off", budget: int = 0
    ) -> dict[str, Any]:
        from gpu_bench import take

        asked = [{"prompt_token_ids": tuple(row)} for row in prompts]
        taken = take(self.engine, asked, (mode, budget), temperature, at_once, tokens)
        return {"seconds": taken.seconds, "rounds": [taken.sequence_rounds], "ids": [list(t) for t in taken.texts],
                "ms_round": 1000 * taken.round_s / max(1, taken.rounds)}  # fmt: skip


def sampling(temperature: float, tokens: int, seed: int = 0) -> dict[str, Any]:
    settings = {"temperature": temperature, "max_new_tokens": tokens}
    return settings | ({"sampling_seed": seed} if temperature else {})


def serve(pipe: Connection) -> None:
    """Starts the engine that is asked for, then obeys; an order that fails is answered with its traceback."""
    order = json.loads(pipe.recv_bytes())
    began = time.monotonic()
    arm = (NativeArm if order["native"] else SglangArm)(order["arguments"])
    pipe.send_bytes(json.dumps({**arm.about, "took_s": round(time.monotonic() - began, 1)}).encode())
    while True:
        order = json.loads(pipe.recv_bytes())
        try:
            answer = getattr(arm, order.pop("do"))(**order)
        except Exception:
            answer = {"failed": traceback.format_exc().splitlines()[-12:]}
        pipe.send_bytes(json.dumps(answer).encode())


class Arm:
    """The parent's handle of an arm's process, whose output goes to `log`."""

    def __init__(
        self, name: str, python: str, order: dict[str, Any], environment: dict[str, str], log: Path
    ) -> None:
        self.name, self.log, self.lost, self._failures = name, log, "", 0
        mine, theirs = socket.socketpair()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [python, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        theirs.close()
        self._pipe = Connection(mine.detach())
        self._pipe.send_bytes(json.dumps(order).encode())

    def ask(self, within: float, **order: Any) -> dict[str, Any]:
        """The answer to an order (`do`: a method of the arm). Raises ArmLost, and for good once it did."""
        self.post(**order)
        return self.answer(within)

    def post(self, **order: Any) -> None:
        """Gives an order; `answer` takes what comes of it."""
        if not self.lost:
            try:
                self._pipe.send_bytes(json.dumps(order).encode())
            except OSError:
                self.lost = f"{self.name} ended"

    def answer(self, seconds: float) -> dict[str, Any]:
        """What it sends next, within `seconds`."""
        if not self.lost:
            try:
                if self._pipe.poll(max(0.0, seconds)):
                    answer = dict(json.loads(self._pipe.recv_bytes()))
                    if "failed" in answer:
                        return self._failed(answer["failed"])
                    return answer
                self.lost = f"{self.name} gave no answer within {seconds:.0f} s"
            except (EOFError, OSError):
                self.lost = f"{self.name} ended"
            self.close()
        raise ArmLost(self.lost)

    def _failed(self, told: list[str]) -> NoReturn:
        """An order failed; an arm that fails at every one is ended."""
        self._failures += 1
        if self._failures >= FAILURES:
            self.lost = f"{self.name} failed {FAILURES} times"
            self.close()
        raise RuntimeError(f"{self.name}: " + "\n".join(told))

    def close(self) -> None:
        """Ends it and all it started."""
        self.lost = self.lost or f"{self.name} was ended"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(20)
        self._pipe.close()


class Fleet:
    """The arms that run, by name; what is asked of `native/...` goes to the one native engine."""

    def __init__(self, options: argparse.Namespace, results: Results, folder: Path) -> None:
        self.options, self.results, self.folder = options, results, folder
        self._arms: dict[str, Arm] = {}
        self._ready: set[str] = set()

    def start(self, names: list[str]) -> None:
        """Has arms come up side by side; returns at once."""
        for name in names:
            if name == "native":
                fields = {"model": str(self.options.target), "drafter": str(self.options.drafter)}
                about = {"device": self.options.device, "max_seq_len": self.options.context}
                arguments, wanted, path = NATIVE | fields | about, {}, None
            else:
                arguments, wanted = arm_arguments(name, self.options)
                arguments |= {"port": 30000 + 2000 * len(self._arms)}
                path = sglang_path(self.options.site, self.folder, name.endswith("-control"))
            order = {"native": name == "native", "arguments": arguments}
            python = sys.executable if name == "native" else self.options.python or sys.executable
            log = self.folder / f"{name}.log"
            self._arms[name] = Arm(name, python, order, variables(wanted, path), log)

    def await_ready(self) -> None:
        """Waits for all that were started and notes which came up."""
        for name, arm in self._arms.items():
            if name in self._ready:
                continue
            self._ready.add(name)
            try:
                self.results.note(
                    "engine", arm=name, **arm.answer(min(self.options.start_seconds, self.results.left))
                )
            except (ArmLost, RuntimeError) as failure:
                self.results.note("failed", part="start", arm=name, why=str(failure), log=_tail(arm.log, 12))

    def has(self, arm: str) -> bool:
        name = "native" if arm.startswith("native") else arm
        return name in self._arms and not self._arms[name].lost

    def ask(self, arm: str, within: float = ANSWER_S, **order: Any) -> dict[str, Any]:
        if arm in MODES:
            mode, budget = MODES[arm]
            return self._arms["native"].ask(within, **order, mode=mode, budget=budget)
        return self._arms[arm].ask(within, **order)

    def warm(self, arms: list[str], within: float, **order: Any) -> None:
        """The same order for several arms side by side; the answers are dropped, failures noted."""
        names = list(dict.fromkeys(arm.split("/")[0] for arm in arms))
        for name in names:
            self._arms[name].post(**order)
        for name in names:
            guarded(self.results, f"warm/{name}", lambda name=name: self._arms[name].answer(within))

    def end(self, names: list[str] | None = None) -> None:
        for name in list(self._arms) if names is None else names:
            if name in self._arms:
                self._arms[name].close()

    def keep_logs(self) -> None:
        """The ends of all logs in one file."""
        if self.options.out:
            parts = [
                f"==== {log.name}\n" + "\n".join(_tail(log, LOG_LINES))
                for log in sorted(self.folder.glob("*.log"))
            ]
            (self.options.out / "logs.txt").write_text("\n".join(parts)[-8_000_000:], encoding="utf-8")


def _tail(log: Path, lines: int) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:] if log.exists() else []


if __name__ == "__main__":
    try:
        serve(Connection(int(sys.argv[1])))
    except BaseException as end:
        if not isinstance(end, EOFError):
            traceback.print_exc()
    sys.stderr.flush()
    os.killpg(os.getpgid(0), signal.SIGKILL)
