"""The console driven by keys over a scripted runtime: what an operator sees and what reaches the runtime."""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from fake_runtime import ACCEPT_LENGTHS, ANSWER, FakeRuntime
from textual.command import CommandPalette
from textual.pilot import Pilot
from textual.widgets import Input

from console import messages
from console.app import ConsoleApp
from console.bridge import Batch
from console.dialogs import ConfirmDialog, HelpScreen, ValueDialog
from console.live_screen import LiveScreen
from console.prompt_screen import PromptInput, PromptScreen
from console.transcript import Transcript
from runtime.config import RuntimeConfig
from runtime.interface import EngineState, GenerateRequest, GpuSample, HostSample, LogLine, TokenPiece

SIZES = ((80, 24), (120, 40), (200, 60))
GIVE_UP_S = 10.0
LONG = ANSWER * 20


class Driven:
    """An app under test, its runtime and its keys."""

    def __init__(self, app: ConsoleApp, runtime: FakeRuntime, pilot: Pilot[int]) -> None:
        self.app, self.runtime, self.pilot = app, runtime, pilot

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + GIVE_UP_S
        while not holds():
            assert self.app._exception is None, "the app failed"
            assert time.monotonic() < end, f"never came true: {what}; notice {self.app.view.notice!r}"
            await self.pilot.pause(0.01)

    async def ask(self, prompt: str) -> None:
        await self.press("i")
        self.app.prompt.query_one(PromptInput).insert(prompt)
        await self.press("enter")

    async def answered(self) -> None:
        await self.until(lambda: self.app.prompt.conversation.open_turn is None, "answered")
        await self.pilot.pause()

    async def streaming(self) -> None:
        await self.until(lambda: len(self.turn.pieces) > 3, "streaming")

    @property
    def turn(self):
        return self.app.prompt.conversation.turns[-1]

    def text(self, selector: str) -> str:
        for screen in self.app.screen_stack:
            for widget in screen.query(selector):
                return str(widget.render())
        raise AssertionError(f"no {selector}")

    def shown(self) -> str:
        """The whole screen as plain text."""
        strips = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text for strip in strips)


@asynccontextmanager
async def console(
    runtime: FakeRuntime | None = None, *, size: tuple[int, int] = (100, 30), read_only: bool = False
) -> AsyncIterator[Driven]:
    runtime = runtime or FakeRuntime()
    app = ConsoleApp(runtime, read_only=read_only)
    async with app.run_test(size=size) as pilot:
        driven = Driven(app, runtime, pilot)
        await driven.until(lambda: app.view.status is not None, "a status arrived")
        yield driven
        app.exit(0)
        await pilot.pause()


# Live


async def test_the_header_names_what_runs():
    async with console(FakeRuntime(RuntimeConfig(tree_budget=16, temperature=0.7))) as driven:
        header = driven.text("#facts") + driven.text("#state")
        for part in ("smollm2-135m-instruct", "native", "single", "mode tree", "budget 16", "T 0.7", "ready"):
            assert part in header


@pytest.mark.case("A30")
async def test_live_says_in_words_whether_speculation_pays_and_falls_idle():
    async with console(FakeRuntime(answer=LONG, round_s=0.02)) as driven:
        await driven.ask("hello")
        await driven.press("1")
        await driven.until(lambda: "speculation pays" in driven.text("#speed"), "pays")
        assert "plain baseline 40.0 tok/s (1 request, T 0, 64 tokens" in driven.text("#speed")
        assert "5   0 %" in driven.text("#positions")
        assert "20 %" in driven.text("#split")
        await driven.answered()
        await driven.until(lambda: "idle now" in driven.text("#speed"), "idle")
        assert "idle: nothing is being decoded" in driven.text("#speed")
        assert "n/a" in driven.text("#split")


async def test_without_a_gpu_the_host_is_shown_and_the_reason():
    async with console() as driven:
        await driven.until(lambda: "CPU 43 %" in driven.text("#host"), "host sample")
        assert "no GPU here" in str(driven.app.screen.query_one("#host").border_title)
        assert "memory n/a" in driven.text("#host")


async def test_gpus_have_a_row_each_with_na_for_what_they_do_not_tell():
    runtime = FakeRuntime()
    async with console(runtime, size=(80, 24)) as driven:
        await driven.until(lambda: "CPU 43 %" in driven.text("#host"), "watching")
        whole = GpuSample(
            index=0,
            name="NVIDIA H200",
            utilisation=0.93,
            memory_used=61 * 2**30,
            memory_total=140 * 2**30,
            power_w=512.0,
            power_limit_w=700.0,
            temperature_c=54.0,
        )
        lost = GpuSample(index=1, name="NVIDIA H200", state="lost, last reading 09:12:13")
        runtime.emit(HostSample(host="box", time_s=time.time(), gpus=(whole, lost)))
        await driven.until(lambda: "GPU 1" in driven.text("#host"), "rows")
        first, second = driven.text("#host").splitlines()[-2:]
        assert first == "GPU 0 NVIDIA H200         93 %  61.0 of 140 GiB  512/700 W  54 °C  ok"
        assert second == "GPU 1 NVIDIA H200          n/a  n/a  n/a  n/a  lost, last reading 09:12:13"


async def test_a_baseline_not_measured_yet_is_not_available():
    async with console(FakeRuntime(baseline_tok_s=None)) as driven:
        await driven.until(lambda: "plain baseline n/a" in driven.text("#speed"), "n/a")


async def test_errors_of_the_engine_and_its_choice_of_a_budget_are_events(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("console.bridge.STATUS_S", 0.05)
    runtime = FakeRuntime()
    runtime.calibration = "budget 11, 74 of 61, 70 and 74 tok/s"
    async with console(runtime) as driven:
        await driven.until(lambda: "budget 11, 74 of 61" in driven.text("#events"), "calibration")
        runtime.errors = ("3 slots leaked",)
        await driven.until(lambda: "error 3 slots leaked" in driven.text("#events"), "error")
        await driven.pilot.pause(0.3)
        assert driven.text("#events").count("3 slots leaked") == 1


# Changes


async def test_mode_and_budget_flip_while_text_streams_and_the_stream_goes_on():
    async with console(FakeRuntime(answer=LONG, round_s=0.02)) as driven:
        await driven.ask("hello")
        await driven.streaming()
        await driven.press("right_square_bracket", "m")
        await driven.until(lambda: driven.runtime.config.mode == "off", "mode off")
        assert driven.runtime.config.tree_budget == 16
        assert driven.app.prompt.conversation.open_turn is not None
        await driven.until(lambda: "mode off" in driven.text("#facts"), "header follows")
        await driven.answered()
        assert driven.turn.text == driven.runtime.answer


async def test_quick_presses_are_as_many_steps_and_the_ends_are_told():
    async with console() as driven:
        await driven.press(*["right_square_bracket"] * 3)
        await driven.until(lambda: driven.runtime.config.tree_budget == 32, "three steps")
        await driven.press(*["right_square_bracket"] * 4)
        await driven.until(lambda: "64 is the largest step" in driven.app.view.notice, "the largest")
        await driven.press(*["left_square_bracket"] * 9)
        await driven.until(lambda: "4 is the smallest step" in driven.app.view.notice, "the smallest")
        assert driven.runtime.config.tree_budget == 4


async def test_the_budget_stays_within_what_live_changes_may_set():
    async with console(FakeRuntime(RuntimeConfig(tree_budget=16, max_tree_budget=20))) as driven:
        await driven.press(*["right_square_bracket"] * 2)
        await driven.until(lambda: "20 is the largest step" in driven.app.view.notice, "the largest")


async def test_mode_cycles_and_says_so():
    async with console() as driven:
        for mode in ("off", "chain", "tree"):
            await driven.press("m")
            await driven.until(lambda mode=mode: driven.runtime.config.mode == mode, mode)
            await driven.until(lambda mode=mode: f"-> {mode}" in driven.app.view.notice, "notice")
        assert "-> tree" in driven.shown()


async def test_temperature_is_asked_for_checked_and_does_not_reach_the_running_request():
    async with console(FakeRuntime(answer=LONG, round_s=0.03)) as driven:
        await driven.ask("hello")
        await driven.streaming()
        await driven.until(lambda: driven.app.view.status.running == 1, "running")
        await driven.press("t")
        assert isinstance(driven.app.screen, ValueDialog)
        driven.app.screen.query_one(Input).value = "2.5"
        await driven.press("enter")
        assert "'2.5' is not a number from 0 to 2" in driven.text("#wrong")
        driven.app.screen.query_one(Input).value = "0.6"
        await driven.press("up", "enter")
        await driven.until(lambda: driven.runtime.config.temperature == 0.7, "set")
        await driven.until(lambda: "1 running keep theirs" in driven.app.view.notice, "notice")
        await driven.press("t", "escape")
        assert isinstance(driven.app.screen, PromptScreen)
        assert driven.runtime.config.temperature == 0.7


async def test_undo_reverts_the_last_change_and_no_later_one_of_others():
    async with console() as driven:
        await driven.press("u")
        await driven.until(lambda: "nothing to undo" in driven.app.view.notice, "nothing")
        await driven.press("m", "right_square_bracket")
        await driven.until(lambda: driven.runtime.config.tree_budget == 16, "changed")
        await driven.press("u")
        await driven.until(lambda: driven.runtime.config.tree_budget == 11, "undone")
        assert driven.runtime.config.mode == "off"
        status = await driven.runtime.status()
        await driven.runtime.apply({"mode": "chain"}, status.revision, author="someone else")
        await driven.press("u")
        await driven.until(lambda: "changed again since, to chain" in driven.app.view.notice, "refused")
        assert driven.runtime.config.mode == "chain"


async def test_a_refused_change_says_why():
    runtime = FakeRuntime()
    runtime.refusals["mode"] = "no drafter for this target"
    async with console(runtime) as driven:
        await driven.press("m")
        await driven.until(lambda: "no drafter for this target" in driven.app.view.notice, "refused")
        assert runtime.config.mode == "tree"


async def test_a_read_only_console_refuses_changes_in_words_and_still_answers():
    async with console(read_only=True) as driven:
        for key in ("m", "t", "left_square_bracket", "right_square_bracket", "u"):
            driven.app.view = driven.app.view.__class__(status=driven.app.view.status, read_only=True)
            await driven.press(key)
            assert "read-only" in driven.app.view.notice, key
        assert driven.runtime.config == FakeRuntime().config
        assert "read-only" in driven.text("#state")
        await driven.ask("hello")
        await driven.answered()
        assert driven.turn.text == driven.runtime.answer


# Prompt


async def test_an_answer_streams_with_its_figures_beside_it():
    async with console() as driven:
        await driven.ask("hello")
        await driven.answered()
        await driven.until(lambda: driven.turn.stats.finish_reason == "stop", "finished")
        tokens = driven.runtime.answer.split()
        figures = driven.text(".answer_figures")
        assert f"{len(tokens)} tok" in figures
        assert f"accept {(len(tokens) - 1) / driven.turn.rounds:.2f}" in figures
        shown = "".join(str(block.render()) for block in driven.app.screen.query(".answer_block"))
        assert shown == driven.runtime.answer


async def test_bonus_tokens_are_marked_and_d_takes_the_marks_away():
    async with console() as driven:
        await driven.ask("hello")
        await driven.answered()

        def underlined() -> str:
            strips = driven.app.screen.query_one(".answer_block").render_lines(
                driven.app.screen.query_one(".answer_block").region.reset_offset
            )
            return " ".join(
                segment.text.strip() for strip in strips for segment in strip if segment.style.underline
            )

        words = driven.runtime.answer.split()
        bonus, at = [words[0]], 0
        for length in itertools.cycle(ACCEPT_LENGTHS):
            at += length
            if at >= len(words):
                bonus.append(words[-1])
                break
            bonus.append(words[at])
        assert underlined().split() == bonus
        await driven.press("d")
        await driven.pilot.pause()
        assert underlined() == ""


async def test_text_of_the_model_cannot_style_or_steer_the_screen():
    nasty = (
        "[red]no[/red] \x1b[31mred\x1b[2J \x00 \x9b1m \u202eabc \ud800 {x} [/] [@click=app.quit]a[/]\r\nend"
    )
    async with console(FakeRuntime(answer=nasty)) as driven:
        await driven.ask("say [bold]this[/bold]\x1b[0m")
        await driven.answered()
        await driven.until(lambda: "end" in driven.shown(), "drawn")
        shown = driven.shown()
        for part in ("[red]no[/red]", "␛[31mred␛[2J", "␀", "[/]", "[@click=app.quit]a[/]", "say [bold]this"):
            assert part in shown
        assert not any(
            ord(character) < 32 or character in "\x9b\u202e\ud800" for character in shown if character != "\n"
        )
        shown.encode("utf-8")


async def test_a_prompt_typed_while_loading_is_sent_when_the_model_is_ready():
    async with console(FakeRuntime(loading=True)) as driven:
        await driven.ask("early")
        await driven.until(lambda: "loading 40 %" in driven.text(".answer_foot"), "queued")
        assert driven.runtime.seen == []
        driven.runtime.become(EngineState.READY)
        await driven.answered()
        assert driven.runtime.seen[0].messages == ({"role": "user", "content": "early"},)
        assert driven.turn.text == driven.runtime.answer


async def test_x_takes_a_waiting_prompt_back():
    async with console(FakeRuntime(loading=True)) as driven:
        await driven.ask("early")
        await driven.press("x")
        assert driven.app.prompt.query_one(PromptInput).text == "early"
        driven.runtime.become(EngineState.READY)
        await driven.until(lambda: driven.app.view.state_words == "ready", "ready")
        assert driven.runtime.seen == []


async def test_a_failed_load_gives_the_prompt_back_with_the_reason():
    async with console(FakeRuntime(loading=True)) as driven:
        await driven.ask("early")
        driven.runtime.become(EngineState.FAILED, "tokenizer.json is missing")
        await driven.until(lambda: "tokenizer.json is missing" in driven.text("#prompt_note"), "reason")
        assert driven.app.prompt.query_one(PromptInput).text == "early"
        assert "failed" in driven.text("#state")


async def test_a_rejected_request_is_told_and_its_prompt_kept():
    runtime = FakeRuntime()
    runtime.rejection = "the prompt has 5000 tokens, the limit is 2048"
    async with console(runtime) as driven:
        await driven.ask("too long")
        await driven.until(lambda: "the limit is 2048" in driven.text("#prompt_note"), "told")
        assert driven.app.prompt.query_one(PromptInput).text == "too long"
        assert driven.app.prompt.conversation.turns == []
        runtime.rejection = None
        await driven.press("i", "enter")
        await driven.answered()
        assert [request.messages for request in runtime.seen] == [({"role": "user", "content": "too long"},)]


async def test_a_stream_that_breaks_keeps_its_text_and_says_so():
    runtime = FakeRuntime()
    runtime.break_after = 2
    async with console(runtime) as driven:
        await driven.ask("hello")
        await driven.answered()
        assert "the engine fell over" in driven.text(".answer_foot")
        assert runtime.answer.startswith(driven.turn.text) and driven.turn.text


async def test_x_cancels_the_answer_and_keeps_what_came():
    async with console(FakeRuntime(round_s=0.02)) as driven:
        await driven.press("x")
        assert "nothing to cancel" in driven.app.view.notice
        await driven.ask("hello")
        await driven.streaming()
        await driven.press("x")
        await driven.answered()
        assert driven.turn.stats.finish_reason == "cancelled"
        assert "cancelled" in driven.text(".answer_foot")
        assert 0 < len(driven.turn.text) < len(driven.runtime.answer)


async def test_a_second_turn_carries_the_first_and_n_forgets_it():
    async with console(FakeRuntime(answer="An answer.")) as driven:
        await driven.ask("one")
        await driven.answered()
        await driven.ask("two")
        await driven.answered()
        assert [message["content"] for message in driven.runtime.seen[-1].messages] == [
            "one",
            "An answer.",
            "two",
        ]
        await driven.press("n")
        await driven.ask("three")
        await driven.answered()
        assert len(driven.runtime.seen[-1].messages) == 1


async def test_earlier_prompts_come_back_with_up_and_the_draft_with_down():
    async with console(FakeRuntime(answer="ok")) as driven:
        for prompt in ("first", "second"):
            await driven.ask(prompt)
            await driven.answered()
        box = driven.app.prompt.query_one(PromptInput)
        await driven.press("i", *"draft", "up")
        assert box.text == "second"
        await driven.press("up", "up")
        assert box.text == "first"
        await driven.press("down", "down")
        assert box.text == "draft"


async def test_letters_are_text_in_the_input_and_commands_outside():
    async with console() as driven:
        await driven.press("i", *"qm13tuxn[]?", "colon")
        assert driven.app.prompt.query_one(PromptInput).text == "qm13tuxn[]?:"
        assert driven.runtime.config.mode == "tree"
        await driven.press("escape", "1")
        assert isinstance(driven.app.screen, LiveScreen)


async def test_a_pasted_prompt_keeps_its_lines():
    async with console(FakeRuntime(answer="ok")) as driven:
        await driven.press("i")
        driven.app.prompt.query_one(PromptInput).insert("def f():\n    return 1")
        await driven.press("ctrl+j", "x", "enter")
        await driven.answered()
        assert driven.runtime.seen[0].messages[0]["content"] == "def f():\n    return 1\nx"


async def test_the_transcript_follows_the_end_unless_scrolled_up():
    async with console(FakeRuntime(answer="line of text\n" * 120, round_s=0.02), size=(80, 24)) as driven:
        await driven.ask("hello")
        transcript = driven.app.prompt.query_one(Transcript)
        await driven.until(lambda: transcript.max_scroll_y > 15, "long")
        await driven.until(lambda: transcript.scroll_y == transcript.max_scroll_y, "at the end")
        await driven.press("pageup")
        await driven.until(lambda: transcript.scroll_y < transcript.max_scroll_y, "scrolled up")
        before, length = transcript.scroll_y, transcript.max_scroll_y
        await driven.until(lambda: transcript.max_scroll_y > length + 5, "longer")
        assert transcript.scroll_y <= before + 1


async def test_a_long_answer_is_complete_in_blocks():
    answer = "".join(f"word{number} " + ("\n" if number % 9 == 0 else "") for number in range(2000))
    async with console(FakeRuntime(answer=answer, round_s=0.0)) as driven:
        await driven.ask("hello")
        await driven.answered()
        blocks = [str(block.render()) for block in driven.app.screen.query(".answer_block")]
        assert "\n".join(blocks) == answer.removesuffix("\n") or "\n".join(blocks) == answer
        assert max(len(block) for block in blocks) < 2000


# Leaving


@pytest.mark.case("C6")
@pytest.mark.parametrize("key", ["q", "ctrl+q", "ctrl+c"])
async def test_an_idle_console_quits_at_once(key: str):
    async with console() as driven:
        await driven.press(key)
        await driven.until(lambda: not driven.app.is_running or driven.app._exit, "left")


@pytest.mark.parametrize("key", ["q", "ctrl+q", "ctrl+c"])
async def test_with_a_request_running_quit_asks_and_staying_is_the_default(key: str):
    async with console(FakeRuntime(answer=LONG, round_s=0.05)) as driven:
        await driven.ask("hello")
        await driven.streaming()
        await driven.press(key)
        assert isinstance(driven.app.screen, ConfirmDialog)
        await driven.press("enter")
        assert isinstance(driven.app.screen, PromptScreen)
        assert not driven.app._exit
        await driven.press(key, "escape")
        assert not driven.app._exit
        await driven.press(key, "y")
        await driven.until(lambda: driven.app._exit, "left")


async def test_closing_the_bridge_ends_the_runtime():
    async with console() as driven:
        await driven.app.bridge.close()
        assert driven.runtime.closed


# Help, palette, sizes


async def test_help_lists_every_key_of_the_screen_from_its_bindings():
    async with console(size=(100, 60)) as driven:
        await driven.press("3", "question_mark")
        assert isinstance(driven.app.screen, HelpScreen)
        shown = driven.shown()
        for words in (
            "Temperature of requests",
            "Smaller tree budget",
            "Next speculation mode",
            "Mark bonus",
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
        await driven.until(lambda: driven.runtime.config.mode == "off", "run")
        driven.runtime.become(EngineState.DRAINING, "by hand")
        await driven.until(lambda: driven.app.view.state_words == "draining", "still polled")
        await driven.press("i", "ctrl+p")
        await driven.until(lambda: isinstance(driven.app.screen, CommandPalette), "the palette in an input")


@pytest.mark.parametrize("size", SIZES)
async def test_every_key_works_on_every_screen_at_every_size(size: tuple[int, int]):
    async with console(FakeRuntime(round_s=0.002), size=size) as driven:
        for number, screen in (("1", LiveScreen), ("3", PromptScreen)):
            await driven.press(number)
            keys = [key for key in driven.app.screen.active_bindings if key not in ("q", "ctrl+q", "ctrl+c")]
            for key in keys:
                await driven.press(key)
                while len(driven.app.screen_stack) > 1 or isinstance(driven.app.focused, PromptInput):
                    await driven.press("escape")
                if not isinstance(driven.app.screen, screen):
                    await driven.press(number)
        assert not driven.app._exit


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
        assert any("disk on fire" in line.text for line in app._lines)


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
        for screen in ("1", "3"):
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
        await driven.until(lambda: driven.runtime.config.mode == "off", "the key")
        assert len(driven.app._lines) <= 500
        assert max(len(line.text) for line in driven.app._lines) <= 400


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
        "import sys, console.app; "
        "print([name for name in ('torch', 'transformers', 'numpy', 'sglang') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
