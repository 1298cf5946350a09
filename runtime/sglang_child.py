"""The process that owns `sglang.Engine`: it runs in SGLang's own environment and speaks plain values over a pipe.

    python -m runtime.sglang_child serve FD     reads the engine's arguments from the pipe, then requests
    python -m runtime.sglang_child check        arguments as JSON on stdin, what SGLang's parser makes of them on stdout

Messages are bytes: one letter, then JSON. To here: `S` engine arguments, `N` a new request, `X` cancel one, `B` another
tree budget. From here: `R` ready, `A` answers of a step or to a budget, `E` an error after which nothing comes. Nothing
but SGLang is imported.
The process ends with its pipe, and all processes it started with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

CHECKED = (
    "tp_size",
    "ep_size",
    "pp_size",
    "dp_size",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
)
"""Arguments of which a check tells what the parser made of them."""


def check() -> int:
    """Parses arguments as SGLang does at its start; loads nothing. One JSON object on stdout."""
    arguments = json.loads(sys.stdin.read())
    told = os.dup(1)
    os.dup2(2, 1)  # what SGLang prints must not get between
    try:
        answer: dict[str, Any] = {"refused": None, "resolved": parse(arguments)}
    except (Exception, SystemExit) as refused:
        answer = {"refused": " ".join(f"{refused}".split()) or type(refused).__name__}
    os.write(told, json.dumps(answer).encode())
    return 0


def parse(arguments: dict[str, Any]) -> dict[str, Any]:
    """SGLang's own parsing and checks of engine arguments; raises what SGLang raises."""
    require_plugin(arguments)
    from sglang.srt.server_args import ServerArgs

    parsed = ServerArgs(**arguments)
    parsed.check_server_args()
    return {name: getattr(parsed, name) for name in CHECKED}


def require_plugin(arguments: dict[str, Any]) -> None:
    """Raises RuntimeError, with the cause, where the algorithm asked for is ours and did not register.

    SGLang logs a plugin's error and goes on, to fail on an unknown name.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from runtime.sglang_checks import check_version, installed_version
    from runtime.sglang_plugin import NAME

    if arguments.get("speculative_algorithm") != NAME:
        return
    check_version(installed_version())
    from sglang.srt.speculative.spec_registry import get_spec

    if get_spec(NAME) is None:
        raise RuntimeError(f"{NAME} did not register with SGLang; its log says why")


class Service:
    """The engine and the requests it works on."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self._told: dict[str, int] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Brings the engine up and says so; its loop is this thread's."""
        kind, arguments = _received(self.pipe)
        if kind != b"S":
            raise ValueError(f"the engine's arguments are expected, not {kind!r}")
        require_plugin(arguments)
        import sglang

        self.engine = sglang.Engine(**arguments)
        info = self.engine.get_server_info()
        pids = [int(pid) for pid in self.engine.get_all_child_pids()]
        slots = info.get("max_total_num_tokens")
        self.send(b"R", {"version": sglang.__version__, "pids": pids, "slots": slots})

    def send(self, kind: bytes, value: Any) -> None:
        self.pipe.send_bytes(kind + json.dumps(value).encode())

    async def serve(self) -> None:
        """Takes requests until the pipe closes."""
        loop = asyncio.get_running_loop()
        closed = asyncio.Event()

        def read() -> None:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    loop.call_soon_threadsafe(self._obey, *_received(self.pipe))
            loop.call_soon_threadsafe(closed.set)

        threading.Thread(target=read, name="pipe", daemon=True).start()
        await closed.wait()

    def _obey(self, kind: bytes, order: dict[str, Any]) -> None:
        name = order["id"]
        if kind == b"B":
            self._tasks[name] = asyncio.get_running_loop().create_task(
                self._set_budget(name, order["budget"])
            )
        if kind == b"N":
            self._tasks[name] = asyncio.get_running_loop().create_task(self._run(name, order))
        elif kind == b"X" and name in self._tasks:
            self.engine.tokenizer_manager.abort_request(rid=name)

    async def _set_budget(self, name: str, budget: int) -> None:
        """Has the schedulers count `budget` draft nodes from their next step on, and says whether all do."""
        from sglang.srt.managers.io_struct import SetInternalStateReq

        from runtime.sglang_plugin import BUDGET

        try:
            asked = SetInternalStateReq(server_args={BUDGET: budget})
            taken = all(await self.engine.tokenizer_manager.set_internal_state(asked))
        except (
            Exception
        ):  # stated to the parent as not taken, which then rebuilds; the reason goes to the log
            traceback.print_exc()
            taken = False
        self._tasks.pop(name, None)
        self.send(b"A", [{"id": name, "budget": budget, "taken": taken}])

    async def _run(self, name: str, order: dict[str, Any]) -> None:
        """Sends what a request gives as it comes; its last message has `finish`."""
        told, cached = 0, 0
        try:
            stream = await self.engine.async_generate(
                input_ids=order["input_ids"], sampling_params=order["sampling"], stream=True, rid=name
            )
            async for chunk in stream:
                meta, ids = chunk["meta_info"], chunk["output_ids"]
                finish = meta.get("finish_reason")
                answer = {"id": name, "ids": ids[told:], "finish": finish}
                if not told:
                    cached = meta.get("cached_tokens") or 0
                    answer["cached"] = cached
                told = len(ids)
                if finish is not None:
                    answer["rounds"] = meta.get("spec_verify_ct")
                    answer["histogram"] = meta.get("spec_correct_drafts_histogram")
                self.send(b"A", [answer])
        except Exception as failure:  # whatever it is, this request ends with it and says so
            words = " ".join(f"{type(failure).__name__}: {failure}".split())
            self.send(b"A", [{"id": name, "ids": [], "finish": {"type": "error", "message": words}}])
        finally:
            self._tasks.pop(name, None)


def _received(pipe: Connection) -> tuple[bytes, dict[str, Any]]:
    message = pipe.recv_bytes()
    return message[:1], json.loads(message[1:])


def _end_everything() -> None:
    """Ends this process and all that it started, now."""
    os.killpg(os.getpgid(0), signal.SIGKILL)


def serve(descriptor: int) -> None:
    """The whole life of the process; its own process group is killed at the end."""
    service = Service(Connection(descriptor))
    try:
        service.start()
        service.engine.loop.run_until_complete(service.serve())
    except (Exception, SystemExit) as failure:
        traceback.print_exc()
        words = " ".join(f"{type(failure).__name__}: {failure}".split())
        with contextlib.suppress(OSError):
            service.pipe.send_bytes(b"E" + words.encode())
    finally:
        sys.stderr.flush()
        _end_everything()


if __name__ == "__main__":
    if sys.argv[1:] == ["check"]:
        sys.exit(check())
    serve(int(sys.argv[2]))
