"""Writes pictures of the real console: the default model answers a prompt, the screens are saved as SVG. Some minutes.

python scripts/screenshot.py [--folder docs] [--columns 100] [--rows 32]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from textual.pilot import Pilot

from console.app import ConsoleApp
from console.bench_load import Load
from console.draft_tree import accept_length
from console.lists import List
from console.prompt_input import PromptInput
from runtime.config import resolve
from runtime.connect import open_runtime
from runtime.interface import EngineState, Runtime

QUESTION = "Write a Python function that checks whether a word is a palindrome, and explain how it works."
LOAD_S = 300.0
ANSWER_S = 120.0
BENCH_S = 600.0
TREE_BUDGET, MAX_TOKENS = 16, 200
BENCH = Load(
    modes="off,tree",
    tree_budgets=f"8,{TREE_BUDGET}",
    prompts_per_kind="1",
    max_tokens="24",
    repetitions="1",
)
STEPS, MANY = 40, 5
SETTLE_S = 3.0
"""Seconds in which a screen reads its files."""


async def reached(pilot: Pilot[int], app: ConsoleApp, done: Callable[[], bool], limit_s: float) -> None:
    """Waits until `done`, one second longer so that the screens have followed."""
    end = time.monotonic() + limit_s
    while not done():
        status = app.view.status
        if status is not None and status.state is EngineState.FAILED:
            raise SystemExit(f"the engine failed: {status.reason}")
        if time.monotonic() > end:
            raise SystemExit(f"the console did not get that far within {limit_s:.0f} s")
        await pilot.pause(0.1)
    await pilot.pause(1.0)


async def ask(pilot: Pilot[int], app: ConsoleApp) -> None:
    """Types the question in a conversation of its own."""
    await pilot.press("3", *(("n", "y") if app.prompt.conversation.turns else ()), "i")
    app.prompt.query_one(PromptInput).insert(QUESTION)
    await pilot.press("enter")


async def take(runtime: Runtime, folder: Path, size: tuple[int, int]) -> list[Path]:
    """Runs the console over `runtime`, first in chain, then in tree mode, and saves its screens."""
    app = ConsoleApp(runtime)
    files: list[Path] = []

    def save(name: str) -> None:
        path = folder / name
        path.write_text(app.export_screenshot(title="ddtree"), encoding="utf-8")
        files.append(path)

    def ready() -> bool:
        """Serving, and the baselines are measured, which takes an idle moment."""
        status = app.view.status
        return status is not None and status.state is EngineState.READY and bool(status.baselines)

    async with app.run_test(size=size) as pilot:
        await reached(pilot, app, ready, LOAD_S)
        await pilot.press("m", "m", "m")
        await ask(pilot, app)
        await reached(pilot, app, lambda: app.prompt.conversation.open_turn is None, ANSWER_S)
        await snapshot(pilot, app, "chain, for comparison")
        await pilot.press("m")
        await reached(pilot, app, lambda: app.view.config.get("mode") == "tree", ANSWER_S)
        while (app.view.config.get("tree_budget") or 0) < TREE_BUDGET:
            await pilot.press("right_square_bracket")
            await pilot.pause(0.5)
        await ask(pilot, app)
        await reached(pilot, app, lambda: len(app.prompt.conversation.turns[-1].pieces) > 60, ANSWER_S)
        save("console-prompt.svg")
        await pilot.press("1")
        await pilot.pause(1.5)
        save("console.svg")
        await pilot.press("2", "space")
        await reached(pilot, app, lambda: app.trees.shown is not None, ANSWER_S)
        for _ in range(STEPS):  # to a round of which much was accepted
            if accept_length(app.trees.shown) > MANY:
                break
            await pilot.press("left")
        await pilot.pause(0.5)
        save("console-tree.svg")
        await reached(pilot, app, lambda: app.prompt.conversation.open_turn is None, ANSWER_S)
        await snapshot(pilot, app, f"tree {TREE_BUDGET}: best on this host")
        app.bench.use(BENCH)
        await pilot.press("7", "r")
        await reached(pilot, app, lambda: app.bench.query_one(List).row_count > 0, BENCH_S)
        for key, name in (
            ("7", "bench"),
            ("4", "controls"),
            ("5", "snapshots"),
            ("6", "layouts"),
            ("8", "log"),
        ):
            await pilot.press(key)
            await pilot.pause(SETTLE_S)
            save(f"console-{name}.svg")
        app.exit(0)
    return files


async def snapshot(pilot: Pilot[int], app: ConsoleApp, label: str) -> None:
    """Saves a snapshot by its key and waits until it is there."""
    await pilot.press("s")
    await pilot.pause(0.5)
    await pilot.press(*label, "enter")
    await reached(pilot, app, lambda: "saved " in app.view.notice, ANSWER_S)


async def main(folder: Path, size: tuple[int, int]) -> None:
    # The host keeps its own snapshots, results and preferences out of the pictures.
    with tempfile.TemporaryDirectory() as own:
        os.environ |= {"XDG_DATA_HOME": own, "XDG_STATE_HOME": own, "XDG_CONFIG_HOME": own}
        await pictures(folder, size)


async def pictures(folder: Path, size: tuple[int, int]) -> None:
    resolved = resolve({"max_tokens": MAX_TOKENS})
    runtime = await open_runtime(resolved.config, origins=resolved.origins)
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
