"""The console driven by keys over a scripted runtime: figures, changes, leaving."""

from __future__ import annotations

import time

import pytest
from console_driver import LONG, console
from fake_runtime import FakeRuntime
from textual.widgets import Input

from console.dialogs import ConfirmDialog, ValueDialog
from console.layout_chooser import LayoutChooser
from console.prompt_screen import PromptScreen
from runtime.config import RuntimeConfig
from runtime.interface import GpuSample, HostSample

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
        assert "plain baseline 40.0 tok/s, chain " in driven.text("#speed")
        assert "(1 request, T 0, 64 tokens" in driven.text("#speed")
        assert "5   0 %" in driven.text("#positions")
        assert "20 %" in driven.text("#split")
        await driven.answered()
        await driven.until(lambda: "idle now" in driven.text("#speed"), "idle")
        assert "idle: nothing is being decoded" in driven.text("#speed")
        split = driven.app.screen.query_one("#split")
        await driven.until(lambda: "rounds so far: 20 ms" in str(split.border_title), "what was measured")
        assert "20 %" in driven.text("#split")


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
        await driven.until(lambda: "lost" in driven.text("#host"), "rows")
        head, first, _more, second = driven.text("#host").splitlines()[-4:]
        assert " ".join(head.split()) == "GPU util memory power temp SM MHz throttled by age"
        assert " ".join(first.split()) == "0 93 % 61.0 of 140 GiB 512/700 W 54 °C n/a n/a n/a"
        assert second == "1    lost, last reading 09:12:13  NVIDIA H200"


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
        await driven.press("right_square_bracket", "m", "m")
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
        for mode in ("auto", "off", "chain", "tree"):
            await driven.press("m")
            await driven.until(lambda mode=mode: driven.runtime.config.mode == mode, mode)
            await driven.until(lambda mode=mode: f"-> {mode}" in driven.app.view.notice, "notice")
        assert "-> tree" in driven.shown()


async def test_auto_is_reached_by_m_and_live_shows_what_it_plays_and_why():
    async with console(FakeRuntime(answer=LONG, round_s=0.02), size=(100, 40)) as driven:
        await driven.ask("hello")
        await driven.streaming()
        await driven.press("1", "m")
        await driven.until(lambda: driven.runtime.config.mode == "auto", "auto")
        await driven.until(lambda: "mode auto: tree 11" in driven.text("#facts"), "header")
        assert "auto plays tree 11; off -> tree 11: 31% faster" in driven.text("#speed")
        await driven.until(
            lambda: str(driven.app.view.figures.setting) == "auto", "figures of auto as one stretch"
        )
        await driven.until(lambda: "before, with tree 11" in driven.text("#speed"), "what was before")
        await driven.press("m")
        await driven.until(lambda: driven.runtime.config.mode == "off", "off")
        await driven.until(lambda: "auto plays" not in driven.text("#speed"), "no more")


async def test_temperature_is_asked_for_checked_and_does_not_reach_the_running_request():
    async with console(FakeRuntime(answer=LONG, round_s=0.03)) as driven:
        await driven.ask("hello")
        await driven.streaming()
        await driven.until(lambda: driven.running == 1, "running")
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
        assert driven.runtime.config.mode == "auto"
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


# Layout


async def test_p_opens_a_chooser_and_only_a_confirmed_plan_is_applied():
    runtime = FakeRuntime()
    async with console(runtime) as driven:
        await driven.press("p")
        await driven.until(lambda: isinstance(driven.app.screen, LayoutChooser), "chooser")
        assert "single  * one process" in driven.shown()
        await driven.press("escape")
        await driven.press("p", "down", "enter")
        await driven.until(lambda: isinstance(driven.app.screen, ConfirmDialog), "plan")
        assert runtime.config.layout == "single"
        assert "layout single -> tp2" in driven.shown() and "unknown" in driven.shown()
        await driven.press("escape")
        assert runtime.config.layout == "single"
        await driven.press("p", "down", "down", "down", "down", "enter")
        await driven.until(lambda: isinstance(driven.app.screen, ConfirmDialog), "plan")
        await driven.press("y")
        await driven.until(lambda: runtime.config.layout == "pp2", "applied")


async def test_a_read_only_console_does_not_open_the_chooser():
    async with console(read_only=True) as driven:
        await driven.press("p")
        await driven.until(lambda: "read-only" in driven.app.view.notice, "notice")
        assert not isinstance(driven.app.screen, LayoutChooser)


async def test_a_key_that_has_no_room_in_the_footer_is_left_out_whole():
    async with console(size=(100, 30)) as driven:
        await driven.press("4")

        def footer() -> str:
            return driven.shown().splitlines()[-1]

        await driven.until(lambda: "all keys" in footer() and "layout" in footer(), "drawn")
        names = tuple(each.binding.description for each in driven.app.screen.active_bindings.values())
        await driven.until(lambda: footer().partition("?")[0].rstrip().endswith(names), "no name is cut")
        await driven.pilot.resize_terminal(160, 30)
        await driven.until(lambda: "quit" in footer(), "those that fit are back")


async def test_the_help_is_read_to_its_end_by_one_key_and_from_its_beginning_again():
    async with console(size=(80, 24)) as driven:
        await driven.press("question_mark", "G")
        await driven.until(lambda: "Esc closes this" in driven.shown(), "the end")
        await driven.press("g")
        await driven.until(lambda: "Live screen" in driven.shown(), "the beginning")


async def test_the_smallest_terminal_names_the_screen_and_what_is_told_comes_before_it():
    async with console(size=(40, 12)) as driven:
        await driven.press("2")
        await driven.until(lambda: "[2 Tree]" in driven.shown(), "where one is")
        await driven.press("x")
        await driven.until(lambda: "nothing to cancel" in driven.shown(), "a notice")
