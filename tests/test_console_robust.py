"""Help, palette, terminal sizes, floods and failures: nothing of them may cost an operator the console."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys

import pytest
from console_driver import Driven, console
from fake_runtime import FakeRuntime
from textual import events
from textual.binding import Binding
from textual.command import CommandPalette
from textual.widget import Widget
from textual.widgets import Input

from console import messages
from console.app import ConsoleApp
from console.bench_load import LoadDialog
from console.bench_screen import BenchScreen
from console.bridge import Batch
from console.controls_screen import ControlsScreen
from console.dialogs import HelpScreen
from console.field_dialog import FieldDialog
from console.filtering import FilterLine
from console.lists import List
from console.live_screen import LiveScreen
from console.log_book import KEEP_LINES
from console.log_screen import LogScreen
from console.prompt_input import PromptInput
from console.prompt_screen import PromptScreen
from console.screens import TABS
from runtime.interface import EngineState, GenerateRequest, LogLine, TokenPiece

SIZES = ((80, 24), (120, 40), (200, 60))
KEY_NAMES = {":": "colon", ".": "full_stop", " ": "space"}


# Help, palette, sizes


async def test_help_lists_every_key_of_the_screen_from_its_bindings():
    async with console(size=(100, 80)) as driven:
        await driven.press("3", "question_mark")
        assert isinstance(driven.app.screen, HelpScreen)
        shown = driven.shown()
        for words in (
            "Temperature of requests",
            "Smaller tree budget",
            "Next speculation mode",
            "How bonus tokens are marked",
        ):
            assert words in shown
        assert "Tokens per verify step" in shown
        await driven.press("escape")
        assert isinstance(driven.app.screen, PromptScreen)


@pytest.mark.case("C3")
async def test_the_palette_runs_commands_and_pollers_survive_it():
    async with console() as driven:
        await driven.press("colon")
        await driven.press(*"next speculation")
        await driven.until(lambda: "Next speculation mode" in driven.shown(), "found")
        await driven.press("enter")
        await driven.until(lambda: driven.runtime.config.mode == "auto", "run")
        driven.runtime.become(EngineState.DRAINING, "by hand")
        await driven.until(lambda: driven.app.view.state_words == "draining", "still polled")
        await driven.press("i", "ctrl+p")
        await driven.until(lambda: isinstance(driven.app.screen, CommandPalette), "the palette in an input")


@pytest.mark.parametrize("size", SIZES)
async def test_keys_typed_ahead_go_where_the_key_before_them_led(size: tuple[int, int]):
    def all_at_once(driven: Driven, *keys: str) -> None:
        for key in keys:
            driven.app.post_message(events.Key(KEY_NAMES.get(key, key), key if len(key) == 1 else None))

    async with console(size=size) as driven:
        all_at_once(driven, ":", *"verify")
        await driven.until(lambda: isinstance(driven.app.screen, CommandPalette), "the palette")
        await driven.until(lambda: driven.app.screen.query_one(Input).value == "verify", "all in the palette")
        await driven.press("escape")
        all_at_once(driven, "t", *"0.7", "enter", "i", *"quit 13m")
        await driven.until(
            lambda: [each.text for each in driven.app.prompt.query(PromptInput)] == ["quit 13m"],
            "in the prompt",
        )
        assert driven.runtime.config.temperature == 0.7
        assert driven.runtime.config.mode == "tree"


@pytest.mark.parametrize("size", SIZES)
async def test_every_key_works_on_every_screen_at_every_size(size: tuple[int, int]):
    async with console(FakeRuntime(round_s=0.002), size=size) as driven:
        for number, screen in (("1", LiveScreen), ("3", PromptScreen), ("8", LogScreen)):
            await driven.press(number)
            keys = [key for key in driven.app.screen.active_bindings if key not in ("q", "ctrl+q", "ctrl+c")]
            for key in keys:
                await driven.press(key)
                while len(driven.app.screen_stack) > 1 or isinstance(
                    driven.app.focused, PromptInput | FilterLine
                ):
                    await driven.press("escape")
                if not isinstance(driven.app.screen, screen):
                    await driven.press(number)
        assert not driven.app._exit


@pytest.mark.parametrize("size", SIZES)
async def test_every_key_of_its_own_works_on_controls_and_bench_at_every_size(size: tuple[int, int]):
    async with console(size=size) as driven:
        for number, screen in (("4", ControlsScreen), ("7", BenchScreen)):
            await driven.press(number)
            keys = [
                key for each in screen.BINDINGS if isinstance(each, Binding) for key in each.key.split(",")
            ]
            for key in ("question_mark", *keys):
                await driven.press(key)
                while not isinstance(driven.app.screen, screen) or isinstance(driven.app.focused, FilterLine):
                    await driven.press("escape")
        assert not driven.app._exit


@pytest.mark.case("C5")
async def test_a_tiny_terminal_and_back_with_a_dialog_of_controls_and_bench_open():
    async with console(size=(80, 24)) as driven:
        for keys, dialog in ((("4", "e"), FieldDialog), (("7", "e"), LoadDialog)):
            await driven.press(*keys)
            for tiny in ((10, 3), (1, 1), (2, 60), (200, 1)):
                await driven.pilot.resize_terminal(*tiny)
                await driven.pilot.pause(0.05)
            await driven.pilot.resize_terminal(80, 24)
            assert isinstance(driven.app.screen, dialog)
            await driven.press("escape")
            await driven.until(lambda: isinstance(driven.app.focused, List), "the list has the focus again")


@pytest.mark.case("C5")
@pytest.mark.parametrize("tiny", [(1, 1), (10, 3), (40, 10), (2, 60), (200, 1)])
async def test_a_tiny_terminal_and_back_leaves_everything_as_it_was(tiny: tuple[int, int]):
    async with console(FakeRuntime(round_s=0.02), size=(80, 24)) as driven:
        await driven.ask("hello")
        await driven.streaming()
        await driven.press("i", *"half")
        await driven.pilot.resize_terminal(*tiny)
        await driven.pilot.pause(0.1)
        if tiny == (10, 3):
            assert "terminal" in driven.shown()
        await driven.pilot.resize_terminal(80, 24)
        await driven.press(*" a word")
        assert driven.app.prompt.query_one(PromptInput).text == "half a word"
        await driven.press("escape", "1", "t")
        await driven.pilot.resize_terminal(*tiny)
        await driven.pilot.pause(0.1)
        await driven.pilot.resize_terminal(80, 24)
        await driven.press("escape")
        assert isinstance(driven.app.screen, LiveScreen)
        await driven.answered()
        assert driven.turn.text == driven.runtime.answer


@pytest.mark.case("C6")
async def test_without_colour_charts_and_marks_remain(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_COLOR", "1")
    async with console(FakeRuntime(round_s=0.02)) as driven:
        await driven.ask("hello")
        await driven.press("1")
        await driven.until(lambda: "speculation pays" in driven.text("#speed"), "pays")
        await driven.pilot.resize_terminal(14, 12)
        await driven.pilot.resize_terminal(100, 30)
        await driven.until(lambda: any("⠀" < mark < "⣿" for mark in driven.shown()), "a chart is drawn")


# Robustness


@pytest.mark.parametrize(("key", "name"), TABS[1:])
async def test_the_end_while_a_screen_is_being_made_is_no_failure(
    key: str, name: str, monkeypatch: pytest.MonkeyPatch
):
    """Screens are made ahead, and `q` may come at any time: a screen may never get its parts."""
    app = ConsoleApp(FakeRuntime())
    made = app._screens[name]
    body: list[Widget] = []

    def ended_meanwhile() -> list[Widget]:
        app.exit()
        made.remove()
        body.extend(type(made).body(made))
        return body

    monkeypatch.setattr(made, "body", ended_meanwhile)
    running = asyncio.create_task(app.run_async(headless=True))
    while app.view.status is None:
        await asyncio.sleep(0.01)
    app.simulate_key(key)
    await asyncio.wait_for(running, 30)
    assert body and not any(part.is_attached for part in body)
    assert not app.return_code


async def test_the_runtime_is_opened_after_the_first_paint():
    painted: list[str] = []

    async def opener() -> FakeRuntime:
        strips = app.screen._compositor.render_strips()
        painted.append("".join(strip.text for strip in strips))
        return FakeRuntime()

    app = ConsoleApp(opener)
    async with app.run_test() as pilot:
        await Driven(app, FakeRuntime(), pilot).until(lambda: bool(painted), "opened")
    assert "starting" in painted[0] and "tok/s" in painted[0]


async def test_a_runtime_that_cannot_be_opened_is_said_and_tried_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("console.bridge.RETRY_S", 0.05)
    tries = 0

    async def opener() -> FakeRuntime:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise OSError("disk on fire")
        return FakeRuntime()

    app = ConsoleApp(opener)
    async with app.run_test() as pilot:
        driven = Driven(app, FakeRuntime(), pilot)
        await driven.until(lambda: app.view.state_words == "ready", "opened")
        assert any("disk on fire" in line.text for line in app.book.lines)


async def test_a_status_that_fails_is_told_and_recovers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("console.bridge.STATUS_S", 0.05)
    async with console() as driven:
        status = driven.runtime.status

        async def broken():
            raise OSError("gone")

        driven.runtime.status = broken  # type: ignore[method-assign]
        await driven.until(lambda: driven.app.view.state_words == "no answer", "told")
        driven.runtime.status = status  # type: ignore[method-assign]
        await driven.until(lambda: driven.app.view.state_words == "ready", "recovered")


async def test_messages_in_any_order_do_no_harm():
    runtime = FakeRuntime()
    finished = []
    async for event in runtime.generate(GenerateRequest(prompt="x")):
        finished.append(event)
    status = await runtime.status()
    pieces = (TokenPiece(token_id=1, text="x", drafted=True),)
    made = [
        lambda: messages.AnswerTokens(1, pieces, 0, None),
        lambda: messages.AnswerFinished(1, finished[-1]),
        lambda: messages.AnswerFailed(1, "late"),
        lambda: messages.AnswerAdmitted(1, "r", 1, 0),
        lambda: messages.StatusArrived(status),
        lambda: messages.BridgeProblem("gone"),
        lambda: messages.BridgeProblem(""),
        lambda: messages.ChangeRefused("no"),
        lambda: messages.RoundsArrived((runtime._round(3),)),
        lambda: messages.LinesArrived((LogLine(time_s=0.0, level="error", text="x"),)),
    ]
    random.seed(7)
    async with console(FakeRuntime(loading=True)) as driven:
        for screen in ("1", "3", "8"):
            await driven.press(screen)
            for _ in range(60):
                driven.app.post_message(random.choice(made)())
            await driven.pilot.pause()
        await driven.ask("still alive")
        for _ in range(60):
            driven.app.post_message(random.choice(made)())
        await driven.pilot.pause()
        assert driven.app.is_running


@pytest.mark.case("C4")
async def test_a_flood_of_log_lines_is_bounded_and_keys_still_answer():
    async with console() as driven:
        lines = tuple(LogLine(time_s=0.0, level="info", text=f"line {n}") for n in range(1000))
        for _ in range(50):
            driven.app.post_message(messages.LinesArrived(lines))
        long_line = LogLine(time_s=0.0, level="info", text="y" * 1_000_000)
        driven.app.post_message(messages.LinesArrived((long_line,)))
        await driven.press("m")
        await driven.until(lambda: driven.runtime.config.mode == "auto", "the key")
        assert len(driven.app.book.lines) <= KEEP_LINES
        assert max(len(line.text) for line in driven.app.book.lines) <= 400


async def test_a_batch_keeps_every_item_in_order():
    out: list[tuple[int, ...]] = []
    batch: Batch[int] = Batch(0.01, out.append)
    for number in range(1000):
        batch.add(number)
        if number % 100 == 0:
            await asyncio.sleep(0.011)
    batch.flush()
    assert [item for items in out for item in items] == list(range(1000))
    assert len(out) < 30


def test_of_replaceable_messages_the_newest_wins_and_token_text_is_never_replaced():
    status = messages.StatusArrived(asyncio.run(FakeRuntime().status()))
    tokens = messages.AnswerTokens(1, (), 0, None)
    assert status.can_replace(status)
    assert not status.can_replace(tokens) and not tokens.can_replace(tokens)
    assert not messages.RoundsArrived(()).can_replace(messages.RoundsArrived(()))


def test_the_console_loads_no_engine_library():
    code = (
        "import importlib, sys, console.app; from console.screens import SCREENS; "
        "print([name for name in sys.modules if name.startswith('console.') and name.endswith('_screen')]); "
        "[importlib.import_module(f'console.{name.lower()}_screen') for name in SCREENS]; "
        "print([name for name in ('torch', 'transformers', 'numpy', 'sglang') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    screens, engines = done.stdout.splitlines()
    assert screens == "['console.doctor_screen']", "the first paint needs no screen but the one it shows"
    assert engines == "[]"
