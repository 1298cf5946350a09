"""The real console program over a FakeRuntime; what it does beyond that is named on the command line."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

from fake_runtime import ANSWER, FakeRuntime

from console.app import ConsoleApp
from console.session import run_console
from runtime.config import RuntimeConfig
from runtime.interface import Runtime


def noise() -> None:
    """Output as a native library, a child process and a careless module make it."""
    os.write(1, b"native library on fd 1\n")
    os.write(2, b"native library on fd 2\n")
    subprocess.run("echo child on stdout; echo child on stderr >&2", shell=True, check=True)
    print("printed by a module")


async def opener() -> Runtime:
    fake = FakeRuntime(
        RuntimeConfig(tree_budget=11), loading="loading" in sys.argv, answer=ANSWER * 120, round_s=0.05
    )
    if "noise" in sys.argv:
        asyncio.get_running_loop().call_later(0.3, noise)
    if "stuck" in sys.argv:

        async def aclose() -> None:
            await asyncio.sleep(3600)

        fake.aclose = aclose  # type: ignore[method-assign]
    return fake


def crash(app: ConsoleApp) -> None:
    raise RuntimeError("a handler broke")


if __name__ == "__main__":
    if "crash" in sys.argv:
        ConsoleApp.action_undo = crash  # type: ignore[method-assign]
    sys.exit(run_console(opener))
