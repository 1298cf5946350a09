"""The Tree screen over a scripted runtime: what it shows of a round, how one steps, which request it follows."""

from __future__ import annotations

import asyncio

import pytest
from console_driver import Driven, console
from fake_runtime import ANSWER, FakeRuntime
from fake_trees import bushy, tree

from console.request_dialog import RequestDialog
from console.tree_feed import TreeFeed, TreesArrived, Wanted
from console.tree_screen import TreeScreen
from runtime.config import RuntimeConfig
from runtime.interface import GenerateRequest

ENDLESS = ANSWER * 500
SIZES = [(80, 24), (120, 40), (200, 60)]
NASTY = (
    "[red]no[/red]",
    "\x1b[2J",
    "\x00",
    "\u202eabc",
    "\u05d0\u05d1\u05d2",
    "👩‍👧",
    "\u200b\u0301",
    "x" * 9999,
)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("console.bridge.TREES_S", 0.05)


async def answered(driven: Driven, runtime: FakeRuntime) -> None:
    """One answer is complete and its trees stand on the screen."""
    await driven.ask("hello")
    await driven.answered()
    await driven.press("2")
    await driven.until(lambda: driven.app.trees.shown is not None, "a tree")


def texts(driven: Driven) -> str:
    return "\n".join(
        driven.text(name) for name in ("#tree_request", "#tree_rounds", "#tree_summary", "#tree_rows")
    )


@pytest.mark.parametrize("size", SIZES)
async def test_the_tree_of_the_newest_request_is_shown_and_followed(size: tuple[int, int]):
    async with console(FakeRuntime(answer=ENDLESS, round_s=0.06), size=size) as driven:
        await driven.press("2")
        await driven.until(lambda: "No request yet" in driven.shown(), "why there is none")
        await driven.ask("hello")
        await driven.press("2")
        await driven.until(lambda: "following" in driven.shown(), "following")
        first = driven.app.trees.shown
        await driven.until(lambda: driven.app.trees.shown.round_index > first.round_index + 2, "newer rounds")
        shown = driven.shown()
        assert "request fake-1 of " in shown and "11 of budget 11 used" in shown
        assert "✓" in shown and "►" in shown and "bonus: the target's own choice" in shown


async def test_one_steps_back_and_forth_and_stays_while_newer_rounds_come():
    async with console(FakeRuntime(answer=ENDLESS, round_s=0.06)) as driven:
        await driven.ask("hello")
        await driven.press("2")
        screen = driven.app.trees
        await driven.until(lambda: len(screen._rounds) > 6, "rounds")
        await driven.press("h", "left")
        kept = screen.shown
        assert "paused" in texts(driven)
        newest = screen._rounds[-1].round_index
        await driven.until(lambda: screen._rounds[-1].round_index > newest + 3, "newer rounds")
        assert screen.shown is kept and f"round {kept.round_index} at" in texts(driven)
        await driven.press("l")
        assert screen.shown.round_index == kept.round_index + 1
        await driven.press("f")
        assert "following" in texts(driven)
        await driven.press("space")
        held = screen.shown
        assert "paused" in texts(driven)
        await driven.press("space")
        await driven.until(lambda: screen.shown.round_index > held.round_index, "follows again")
        await driven.press(*["h"] * 9)
        assert screen.shown.round_index < screen._rounds[-1].round_index


async def test_a_request_is_chosen_from_a_filtered_list_and_stays_chosen():
    runtime = FakeRuntime()
    async with console(runtime) as driven:
        for _ in range(3):
            async for _event in runtime.generate(GenerateRequest(prompt="x")):
                pass
        await driven.press("2")
        await driven.until(lambda: "fake-3" in texts(driven), "the newest")
        await driven.press("r")
        assert isinstance(driven.app.screen, RequestDialog)
        await driven.press("slash", *"fake-1", "enter")
        await driven.until(lambda: "request fake-1 " in texts(driven), "the chosen one")
        async for _event in runtime.generate(GenerateRequest(prompt="x")):
            pass
        await driven.pilot.pause(0.1)
        assert "request fake-1 " in texts(driven)
        await driven.press("r", "escape")
        assert isinstance(driven.app.screen, TreeScreen)
        await driven.press("r", "j", "k", "enter")
        await driven.until(lambda: "request fake-4 " in texts(driven), "the newest again")
        await driven.press("r", "slash", "escape", "escape")
        assert isinstance(driven.app.screen, TreeScreen)
        driven.app.trees.follow("fake-2")
        await driven.until(lambda: "request fake-2 " in texts(driven) and driven.app.trees.shown, "followed")


@pytest.mark.parametrize(
    ("mode", "words"), [("off", "mode off drafts nothing"), ("chain", "no branches, so there is no tree")]
)
async def test_without_a_tree_it_says_why(mode: str, words: str):
    async with console(FakeRuntime(RuntimeConfig(tree_budget=11, mode=mode))) as driven:
        await answered(driven, driven.runtime)
        assert words in texts(driven)


@pytest.mark.parametrize("size", [SIZES[0], SIZES[-1]])
async def test_64_nodes_can_be_scrolled_through(size: tuple[int, int]):
    runtime = FakeRuntime()
    async with console(runtime, size=size) as driven:
        await answered(driven, runtime)
        runtime.traces["fake-1"].append(bushy(64, index=1000))
        await driven.until(lambda: driven.app.trees.shown.round_index == 1000, "the large tree")
        await driven.press("e")
        scroll = driven.app.screen.query_one("#tree_scroll")
        await driven.until(lambda: len(driven.text("#tree_rows").splitlines()) == 66, "a row each")
        await driven.press("G")
        await driven.until(lambda: scroll.scroll_y == scroll.max_scroll_y, "the end")
        last = driven.text("#tree_rows").splitlines()[-1].strip()
        assert last.split()[-3] in driven.shown()
        await driven.press("g")
        await driven.until(lambda: scroll.scroll_y == 0, "the root")
        await driven.press("e", "j", "k", "pagedown", "pageup")
        assert "64 of budget 64 used" in texts(driven)


async def test_tokens_cannot_style_break_or_steer_the_screen():
    runtime = FakeRuntime()
    async with console(runtime, size=(80, 24)) as driven:
        await answered(driven, runtime)
        nodes = [(text, 0, 0.1, not at) for at, text in enumerate(NASTY)]
        runtime.traces["fake-1"].append(tree(nodes, "\x1b[31m", index=1000))
        await driven.until(lambda: driven.app.trees.shown.round_index == 1000, "it")
        await driven.pilot.pause()
        shown = driven.shown()
        assert "[red]no[/red]" in shown and "␛[2J" in shown and "␀" in shown and "\\u202eabc" in shown
        assert not any(
            ord(character) < 32 or character in "\u202e\u200b" for character in shown if character != "\n"
        )


async def test_y_copies_the_tree_as_text(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("console.copying.copied_path", lambda: tmp_path / "deep" / "copied.txt")
    async with console() as driven:
        await answered(driven, driven.runtime)
        await driven.press("y")
        await driven.until(lambda: "the tree" in driven.app.view.notice, "told")
        assert driven.app.clipboard == (tmp_path / "deep" / "copied.txt").read_text()
        assert "bonus: the target's own choice" in driven.app.clipboard


@pytest.mark.case("C5")
async def test_it_survives_a_tiny_terminal_while_rounds_come_and_with_a_dialog_open():
    async with console(FakeRuntime(answer=ENDLESS, round_s=0.06), size=(80, 24)) as driven:
        await driven.ask("hello")
        await driven.press("2")
        await driven.until(lambda: driven.app.trees.shown is not None, "a tree")
        for keys in ((), ("r",)):
            await driven.press(*keys)
            for size in ((10, 3), (1, 1), (40, 10), (80, 24)):
                await driven.pilot.resize_terminal(*size)
                await driven.pilot.pause()
        await driven.press("escape")
        at = driven.app.trees.shown.round_index
        await driven.until(lambda: driven.app.trees.shown.round_index > at, "still following")
        await driven.until(lambda: "following" in driven.shown(), "drawn again")


async def test_the_feed_asks_only_for_what_is_new_and_notices_another_engine():
    runtime = FakeRuntime(round_s=0.001)
    posted: list[TreesArrived] = []
    feed = TreeFeed(posted.append)
    await feed.look(runtime, Wanted())
    assert (posted[-1].request_id, posted[-1].traces) == (None, ())
    async for _event in runtime.generate(GenerateRequest(prompt="x")):
        pass
    await feed.look(runtime, Wanted())
    assert posted[-1].anew and len(posted[-1].traces) == len(runtime.traces["fake-1"])
    looks = len(posted)
    await feed.look(runtime, Wanted())
    assert len(posted) == looks, "nothing new"
    runtime.traces["fake-1"].append(tree([], index=1000))
    await feed.look(runtime, Wanted())
    assert [trace.round_index for trace in posted[-1].traces] == [1000] and not posted[-1].anew
    runtime.traces["fake-1"] = [tree([], index=2)]
    await feed.look(runtime, Wanted())
    assert posted[-1].anew and [trace.round_index for trace in posted[-1].traces] == [2]
    await asyncio.sleep(0)
