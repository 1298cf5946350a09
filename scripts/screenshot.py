"""Writes pictures of the real console: the default model answers a prompt, the screens are saved as SVG.

    python scripts/screenshot.py [--folder docs] [--columns 100] [--rows 32]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from textual.pilot import Pilot

from console.app import ConsoleApp
from runtime.config import RuntimeConfig
from runtime.connect import open_runtime
from runtime.interface import EngineState, Runtime

QUESTION = "Write a Python function that checks whether a word is a palindrome, and explain how it works."
LOAD_S = 300.0
ANSWER_S = 120.0


async def reached(pilot: Pilot[int], app: ConsoleApp, what: str, limit_s: float) -> None:
    """Waits until the engine is ready, or the answer under way has ended."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        status = app.view.status
        if status is not None and status.state is EngineState.FAILED:
            raise SystemExit(f"the engine failed: {status.reason}")
        ready = status is not None and status.state is EngineState.READY
        turns = app.prompt.conversation.turns
        if ready and (what == "ready" or (turns and turns[-1].ended)):
            await pilot.pause(1.0)
            return
        await pilot.pause(0.2)
    raise SystemExit(f"not reached within {limit_s:.0f} s: {what}")


async def take(runtime: Runtime, folder: Path, size: tuple[int, int]) -> list[Path]:
    """Runs the console over `runtime` and saves its screens; returns the files."""
    app = ConsoleApp(runtime)
    files: list[Path] = []

    def save(name: str) -> None:
        path = folder / name
        path.write_text(app.export_screenshot(title="ddtree"), encoding="utf-8")
        files.append(path)

    async with app.run_test(size=size) as pilot:
        await reached(pilot, app, "ready", LOAD_S)
        for mode_presses in (0, 1):
            await pilot.press(*["m"] * mode_presses, "i", *QUESTION, "enter")
            await pilot.pause(0.5)
            await pilot.press("1")
            await reached(pilot, app, "answered", ANSWER_S)
            if not mode_presses:
                await pilot.press("3", "n")
        await pilot.press("m", "m", "u", "u")
        await pilot.press("3", "n", "i", *QUESTION, "enter")
        await pilot.pause(2.5)
        await pilot.press("1")
        await pilot.pause(1.0)
        save("console.svg")
        await pilot.press("3")
        await pilot.pause(0.5)
        save("console-prompt.svg")
        await reached(pilot, app, "answered", ANSWER_S)
    return files


async def main(folder: Path, size: tuple[int, int]) -> None:
    runtime = await open_runtime(RuntimeConfig())
    try:
        for path in await take(runtime, folder, size):
            print(path)
    finally:
        await runtime.aclose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("docs"))
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--rows", type=int, default=32)
    given = parser.parse_args()
    asyncio.run(main(given.folder, (given.columns, given.rows)))
