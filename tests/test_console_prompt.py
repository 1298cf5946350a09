"""The Prompt screen over a scripted runtime: what is sent, what is shown, what is kept when it fails."""

from __future__ import annotations

import itertools

from console_driver import LONG, console
from fake_runtime import ACCEPT_LENGTHS, FakeRuntime
from textual.events import Paste

from console.live_screen import LiveScreen
from console.prompt_input import PromptInput
from console.transcript import GROWTH_ROWS, AnswerBlock, Transcript
from runtime.interface import EngineState


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


async def test_i_waits_for_a_prompt_screen_that_is_being_made_ahead():
    """As a quick hand meets it at the start; Textual takes a screen for shown as soon as it is begun."""
    async with console() as driven:
        ahead = driven.app._init_mode("Prompt")
        await driven.app.action_input()
        assert isinstance(driven.app.focused, PromptInput)
        await ahead


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
    async with console(FakeRuntime(answer=LONG * 20, round_s=0.02)) as driven:
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
        await driven.press("n", "escape")
        assert len(driven.app.prompt.conversation.turns) == 2
        await driven.press("n", "y")
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


async def test_an_answer_grows_some_rows_at_a_time_and_has_no_gap_at_its_end():
    answer = " ".join(f"word{number}" for number in range(135))
    async with console(FakeRuntime(answer=answer, round_s=0.03)) as driven:
        await driven.ask("hello")
        await driven.streaming()
        block = driven.app.screen.query_one(AnswerBlock)
        await driven.until(lambda: block.size.height == GROWTH_ROWS, "room for rows to come")
        await driven.answered()
        rows = len({y for y in range(block.size.height) if block.render_line(y).text.strip()})
        await driven.until(lambda: block.size.height == rows, "no gap")
        assert rows % GROWTH_ROWS, "the answer would fill its room by chance"


async def test_pasted_lines_stay_lines_however_the_terminal_sends_them():
    async with console() as driven:
        await driven.press("i")
        driven.app.post_message(Paste("one\rtwo\r\nthree\nfour"))
        prompt = driven.app.prompt.query_one(PromptInput)
        await driven.until(lambda: prompt.text == "one\ntwo\nthree\nfour", "pasted")
