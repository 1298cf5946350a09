"""What a prompt is asked with, what can be done with its answer, and the same prompt in two modes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from console_driver import Driven, console
from fake_runtime import ANSWER, FakeRuntime
from hypothesis import given
from hypothesis import strategies as st
from textual.screen import ModalScreen
from textual.widgets import Input, TextArea
from tiny_models import tiny_config

from console.ask_dialogs import SettingsDialog, TokensDialog, TranscriptDialog
from console.ask_settings import AskSettings, parse, stop_strings, stop_text
from console.compare_screen import CompareScreen
from console.prompt_input import PromptInput
from console.prompt_screen import PromptScreen
from console.transcript_file import free_path
from console.tree_screen import TreeScreen
from runtime.config import RuntimeConfig
from runtime.local import LocalRuntime

SIZES = [(80, 24), (120, 40), (200, 60)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


async def ask_again(driven: Driven, prompt: str) -> None:
    await driven.ask(prompt)
    await driven.answered()


# Settings


async def test_system_prompt_and_sampling_go_with_every_later_request():
    async with console(FakeRuntime(answer="ok")) as driven:
        await ask_again(driven, "one")
        await driven.press("o")
        assert isinstance(driven.app.screen, SettingsDialog)
        driven.app.screen.query_one(TextArea).text = "You are [terse]."
        for name, value in (("temperature", "0.7"), ("top_p", "0.9"), ("top_k", "40"), ("seed", "12")):
            driven.app.screen.query_one(f"#ask_{name}", Input).value = value
        driven.app.screen.query_one("#ask_max_tokens", Input).value = "99"
        driven.app.screen.query_one("#ask_stop", Input).value = r"END,\n\n"
        await driven.press("enter")
        assert isinstance(driven.app.screen, PromptScreen)
        line = driven.text("#prompt_settings")
        assert "temperature 0.7" in line and "seed 12" in line and "system: You are [terse]." in line
        await ask_again(driven, "two")
        request = driven.runtime.seen[-1]
        assert [message["role"] for message in request.messages] == ["system", "user", "assistant", "user"]
        assert request.messages[0]["content"] == "You are [terse]."
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.7, 0.9, 40, 12)
        assert (sampling.max_tokens, sampling.stop) == (99, ("END", "\n\n"))


async def test_a_wrong_setting_is_named_and_nothing_is_changed():
    async with console() as driven:
        await driven.press("3", "o")
        driven.app.screen.query_one("#ask_top_p", Input).value = "7"
        await driven.press("enter")
        assert "top_p: 7 is outside its range; above 0, to 1" in str(
            driven.app.screen.query_one("#wrong").render()
        )
        await driven.press("escape")
        assert driven.app.prompt.settings == AskSettings()
        await driven.press("o")
        driven.app.screen.query_one(TextArea).focus()
        await driven.press(*"be q", "ctrl+s")
        assert driven.app.prompt.settings.system == "be q"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", "hot", "'hot' is not a number"),
        ("temperature", "3", "outside its range; 0 to 2"),
        ("seed", "1.5", "'1.5' is not a whole number"),
        ("seed", "-1", "seed: -1 is outside its range"),
        ("stop", "a,b,c,d,e", "stop: a,b,c,d,e is outside its range; up to 4"),
        ("logprobs", "21", "logprobs: 21 is outside"),
        ("temperature", "nan", "temperature: nan"),
    ],
)
def test_each_wrong_field_is_one_line(field: str, value: str, words: str):
    found = parse("", {field: value})
    assert isinstance(found, str) and words in found and "\n" not in found


@given(st.lists(st.text(min_size=1, max_size=8), max_size=4))
def test_stop_strings_survive_being_typed(stops: list[str]):
    assert stop_strings(stop_text(tuple(stops))) == tuple(stops)


# What can be done with an answer


async def test_y_copies_the_answer_to_terminal_and_file_and_says_so(home: Path):
    async with console(FakeRuntime(answer="an [answer]\n\x1b[31m")) as driven:
        await driven.press("3", "y")
        assert "nothing to copy" in driven.text("#prompt_note")
        await ask_again(driven, "hello")
        await driven.press("y")
        note = driven.text("#prompt_note")
        assert "sent to the terminal's clipboard" in note and "~/state/ddtree/copied.txt" in note
        assert driven.app.clipboard == "an [answer]\n\x1b[31m"
        copied = home / "state" / "ddtree" / "copied.txt"
        assert copied.read_bytes() == b"an [answer]\n\x1b[31m"
        assert copied.stat().st_mode & 0o777 == 0o600


async def test_what_is_too_long_for_the_terminal_is_in_the_file(home: Path):
    async with console(FakeRuntime(answer="y" * 100_000)) as driven:
        await ask_again(driven, "hello")
        await driven.press("y")
        assert "too long for the terminal's clipboard; it is in" in driven.text("#prompt_note")
        assert (home / "state" / "ddtree" / "copied.txt").stat().st_size == 100_000


@pytest.mark.parametrize("ending", ["md", "json"])
async def test_w_saves_the_conversation_and_touches_no_file_that_exists(home: Path, ending: str):
    async with console(FakeRuntime(answer="an answer")) as driven:
        await driven.press("3", "w")
        assert "nothing to save" in driven.text("#prompt_note")
        await ask_again(driven, "a question")
        taken = home / f"talk.{ending}"
        taken.write_text("mine")
        await driven.press("w")
        assert isinstance(driven.app.screen, TranscriptDialog)
        box = driven.app.screen.query_one(Input)
        for wrong, words in (
            ("", "a file name is needed"),
            (str(home / "no" / "such"), "there is no folder"),
            ("a\0b", "not a usable name"),
            (str(taken), "exists and is kept"),
        ):
            box.value = wrong
            await driven.press("enter")
            assert words in str(driven.app.screen.query_one("#wrong").render())
        assert box.value == f"~/talk-2.{ending}"
        await driven.press("enter")
        await driven.until(lambda: "saved to" in driven.text("#prompt_note"), "saved")
        assert taken.read_text() == "mine"
        text = (home / f"talk-2.{ending}").read_text()
        if ending == "json":
            (turn,) = json.loads(text)["turns"]
            assert (turn["prompt"], turn["answer"]) == ("a question", "an answer")
            assert [token["text"] for token in turn["tokens"]] == ["an ", "answer"]
        else:
            assert "## Prompt\n\na question\n\n## Answer\n\nan answer\n" in text and "tok/s" in text


async def test_a_folder_that_takes_no_file_is_told(home: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("console.prompt_screen.save", full)
    async with console(FakeRuntime(answer="an answer")) as driven:
        await ask_again(driven, "a question")
        await driven.press("w", "enter")
        await driven.until(lambda: "No space left" in driven.text("#prompt_note"), "told")


def test_free_names_are_numbered(tmp_path: Path):
    (tmp_path / "a.md").touch()
    (tmp_path / "a-2.md").symlink_to("nowhere")
    assert free_path(tmp_path / "a.md").name == "a-3.md"


async def test_l_lists_tokens_with_their_probabilities_where_asked_for():
    async with console(FakeRuntime(answer="one two three four")) as driven:
        await driven.press("3", "l")
        assert "no tokens yet" in driven.text("#prompt_note")
        await ask_again(driven, "hello")
        await driven.press("l")
        assert isinstance(driven.app.screen, TokensDialog)
        assert "they were not asked for" in driven.shown() and "bonus" in driven.shown()
        await driven.press("j", "k", "escape", "o")
        driven.app.screen.query_one("#ask_logprobs", Input).value = "2"
        driven.runtime.scores = {"one ": -0.1, "other": -3.0}
        await driven.press("enter")
        await ask_again(driven, "hello")
        assert driven.runtime.seen[-1].sampling.logprobs == 2
        await driven.press("l")
        await driven.until(lambda: "90%" in driven.shown() and "other 5%" in driven.shown(), "probabilities")
        assert "drafted" in driven.shown()


async def test_bonus_tokens_are_told_apart_in_characters_too():
    async with console(FakeRuntime(answer="one two three four five six")) as driven:
        await ask_again(driven, "hello")
        await driven.press("d")
        quoted = "‹one› two three ‹four five six›"  # neighbours may share their quotes
        await driven.until(lambda: quoted in driven.shown().replace("› ‹", " "), "quoted")
        assert "‹in quotes›: bonus token" in driven.shown()
        await driven.press("d")
        await driven.until(lambda: "one two three four five six" in driven.shown(), "hidden")
        assert driven.turn.text == "one two three four five six"


# Side by side


async def compared(driven: Driven, prompt: str = "why?") -> str:
    """Both sides have ended; the verdict."""
    await driven.press("i")
    driven.app.prompt.query_one(PromptInput).insert(prompt)
    await driven.press("escape", "b")
    await driven.until(lambda: isinstance(driven.app.screen, CompareScreen), "side by side")
    found = driven.app.screen.comparison
    await driven.until(lambda: all(turn.ended for turn in found.turns), "both")
    await driven.until(lambda: not any(word in verdict(driven) for word in ("being",)), "judged")
    return verdict(driven)


def verdict(driven: Driven) -> str:
    return str(driven.app.screen.query_one("#compare_verdict").render())


@pytest.mark.parametrize("size", [SIZES[0], SIZES[-1]])
async def test_the_same_prompt_in_two_modes_has_the_same_text_with_both_speeds(size: tuple[int, int]):
    config = RuntimeConfig(tree_budget=11, temperature=0.6, top_k=20)
    async with console(FakeRuntime(config), size=size) as driven:
        words = await compared(driven)
        assert words.startswith("Same text: all 36 tokens are equal. tree ") and "times as fast" in words
        left, right = driven.runtime.seen
        assert (left.mode, right.mode) == ("tree", "off")
        assert left.sampling == right.sampling and left.sampling.seed is not None
        assert (left.sampling.temperature, left.sampling.top_k) == (0.6, 20)
        assert not left.reuse_prefix and not right.reuse_prefix
        shown = driven.shown()
        assert "mode tree" in shown and "mode off: plain decoding" in shown and shown.count("tok/s") >= 4
        await driven.press("m")
        await driven.until(lambda: len(driven.runtime.seen) == 4, "chain and off")
        assert driven.runtime.seen[2].mode == "chain"
        await driven.until(lambda: verdict(driven).startswith("Same"), "again")
        await driven.press("r")
        await driven.until(lambda: len(driven.runtime.seen) == 6, "once more")
        await driven.until(lambda: verdict(driven).startswith("Same"), "again")
        await driven.press("j", "k", "down", "up", "pagedown", "pageup", "escape")
        assert isinstance(driven.app.screen, PromptScreen)
        assert driven.app.prompt.conversation.turns == []


@pytest.mark.parametrize(
    ("gap", "words"),
    [(0.004, "A near-tie, 4.0e-03 apart"), (2.5, "2.50 apart, no near-tie"), (None, "ddtree verify tells")],
)
async def test_the_first_difference_is_shown_and_judged(gap: float | None, words: str):
    runtime = FakeRuntime(answer="one two [three] four")
    runtime.answers["off"] = "one two drei four"
    if gap is not None:
        runtime.scores = {"drei ": -0.1, "[three] ": -0.1 - gap}
    async with console(runtime) as driven:
        found = await compared(driven)
        assert "First difference at token 3, character 9: tree [three]·, off drei·." in found
        assert words in found
        judge = runtime.seen[2]
        assert (judge.mode, judge.sampling.max_tokens, judge.sampling.logprobs) == ("off", 3, 20)


async def test_a_text_that_goes_on_where_the_other_ended_differs_there():
    runtime = FakeRuntime(answer="one two three")
    runtime.answers["off"] = "one two three four"
    async with console(runtime) as driven:
        found = await compared(driven)
        assert "First difference at token 4, character 14: tree had ended, off four." in found or (
            "First difference at token 3" in found
        )


async def test_comparing_needs_a_prompt_a_ready_engine_and_no_other_answer():
    async with console(FakeRuntime(answer=ANSWER * 100, round_s=0.02)) as driven:
        await driven.press("3", "b")
        assert "nothing to compare" in driven.text("#prompt_note")
        await driven.ask("hello")
        await driven.streaming()
        await driven.press("b")
        assert "one answer at a time" in driven.text("#prompt_note")
        await driven.press("x")
        await driven.answered()
        await driven.press("b")
        await driven.until(lambda: isinstance(driven.app.screen, CompareScreen), "the last prompt")
        assert driven.runtime.seen[-1].messages == ({"role": "user", "content": "hello"},)
        await driven.until(lambda: len(driven.app.screen.comparison.turns[0].pieces) > 5, "streams")
        await driven.press("x")
        await driven.until(lambda: "cancelled" in verdict(driven), "cancelled")
        await driven.until(lambda: not driven.runtime._running, "its slots are free")
        await driven.press("r")
        await driven.until(lambda: len(driven.app.screen.comparison.turns[0].pieces) > 5, "streams again")
        await driven.press("escape")
        await driven.until(lambda: not driven.runtime._running, "closed: nothing runs")


async def test_a_side_that_breaks_is_told():
    runtime = FakeRuntime()
    runtime.break_after = 2
    async with console(runtime) as driven:
        found = await compared(driven)
        assert "not compared: mode tree broke off" in found and "fell over" in found


async def test_a_real_engine_says_the_same_in_both_modes_at_a_temperature_and_shows_its_trees(
    tiny_folder: Path,
):
    config = tiny_config(
        tiny_folder / "target", tiny_folder / "drafter", temperature=0.8, max_tokens=24, tree_budget=8
    )
    runtime = LocalRuntime(config)
    await runtime.wait_ready()
    try:
        async with console(runtime) as driven:
            await driven.until(lambda: driven.app.view.description is not None, "described")
            words = await compared(driven, "abc")
            assert words.startswith("Same text: all ") and "tok/s" in words
            await driven.press("escape", "2")
            await driven.until(lambda: driven.app.trees.shown is not None, "a tree")
            assert driven.app.trees.shown.mode == "off"
            (_, speculative) = driven.app.trees._requests[:2]
            driven.app.trees.follow(speculative.request_id)
            await driven.until(lambda: driven.app.trees.shown is not None, "a tree")
            await driven.press("h", "h")
            assert driven.app.trees.shown.mode == "tree" and "of budget 8 used" in driven.text(
                "#tree_summary"
            )
    finally:
        await runtime.aclose()


# Anywhere


@pytest.mark.parametrize("size", SIZES)
async def test_every_key_of_both_screens_is_answered_at_every_size(size: tuple[int, int]):
    async with console(size=size) as driven:
        await ask_again(driven, "hello")
        for number, screen in (("2", TreeScreen), ("3", PromptScreen)):
            for binding in screen.BINDINGS:
                for key in binding.key.split(","):
                    await driven.press(number, key)
                    if isinstance(driven.app.screen, ModalScreen):
                        await driven.press("escape")
                    await driven.until(lambda kind=screen: isinstance(driven.app.screen, kind), key)


@pytest.mark.case("C5")
@pytest.mark.parametrize("key", ["o", "b"])
async def test_dialogs_survive_a_tiny_terminal_while_text_streams(key: str):
    async with console(FakeRuntime(answer=ANSWER * 300, round_s=0.06), size=(80, 24)) as driven:
        await driven.ask("hello")
        await driven.streaming()
        if key == "b":
            await driven.press("x")
            await driven.answered()
        await driven.press(key)
        for size in ((10, 3), (1, 1), (40, 10), (80, 24)):
            await driven.pilot.resize_terminal(*size)
            await driven.pilot.pause()
        await driven.press("escape")
        await driven.until(lambda: isinstance(driven.app.screen, PromptScreen), "closed")
        await driven.until(
            lambda: "> hello" in driven.shown() or "quick brown" in driven.shown(), "drawn again"
        )


NASTY = (
    "[red]no[/red] [@click=app.quit]a[/] \x1b]0;title\x07 \x1b[2J \x00 \x9b1m \u202eabc \u05d0\u05d1 👩‍👧 "
    "\u200b\ufeff\ufe0f z" + "\u0301" * 300 + " \ud800 "
)


async def test_hostile_text_and_a_megabyte_line_neither_style_nor_freeze_any_view():
    async with console(FakeRuntime(answer=NASTY + "x" * 1_000_000 + " end"), size=(80, 24)) as driven:
        await ask_again(driven, NASTY)
        await driven.press("g")
        await driven.until(lambda: "[red]no[/red]" in driven.shown(), "drawn")
        for keys in (("d",), ("l",), ("escape",), ("2",), ("e",), ("3",), ("y",)):
            await driven.press(*keys)
            await driven.pilot.pause()
            shown = driven.shown()
            shown.encode("utf-8")
            assert not any(
                ord(each) < 32 or each in "\x9b\u202e\ud800\u200b" for each in shown if each != "\n"
            )
        await driven.press("m")
        await driven.until(lambda: driven.runtime.config.mode == "auto", "keys still answer")
