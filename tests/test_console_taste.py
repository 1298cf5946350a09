"""Themes, what is remembered between starts, and the palette that has every action."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from console_driver import Driven
from fake_runtime import FakeRuntime
from textual.binding import Binding

from console.app import ConsoleApp
from console.lists import List
from console.preferences import PreferenceFile, Preferences
from console.themes import HIGH_CONTRAST, NO_COLOUR, THEMES


@pytest.fixture
def file(tmp_path: Path) -> PreferenceFile:
    return PreferenceFile(tmp_path / "state" / "ddtree" / "console.json")


# The file


def test_preferences_read_back_and_leave_no_draft(file: PreferenceFile):
    assert file.load() == (Preferences(), "")
    wanted = Preferences("light", "Bench", {"bench.modes": "tree", "chart_seconds": 120, "marks": False})
    assert file.save(wanted) == ""
    assert file.load() == (wanted, "")
    assert os.listdir(file.path.parent) == ["console.json"]


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"\xff\xfe", b'{"theme": 1}', b'{"values": []}', b"[" * 60_000, b"x" * 70_000]
)
def test_a_broken_file_is_ignored_with_one_line_naming_it(file: PreferenceFile, text: bytes):
    file.path.parent.mkdir(parents=True)
    file.path.write_bytes(text)
    preferences, problem = file.load()
    assert preferences == Preferences()
    assert problem.startswith(f"preferences in {file.path} are ignored: ") and "\n" not in problem


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path):
    (tmp_path / "taken").write_text("")
    assert "preferences are not kept in" in PreferenceFile(tmp_path / "taken" / "console.json").save(
        Preferences()
    )


# The app


async def test_theme_screen_and_load_are_as_they_were_left(file: PreferenceFile):
    app = ConsoleApp(FakeRuntime(), preferences=file)
    async with app.run_test(size=(80, 24)) as pilot:
        driven = Driven(app, FakeRuntime(), pilot)
        await driven.press("T", "T")
        assert app.theme == HIGH_CONTRAST
        await driven.press("7", "e")
        await driven.until(lambda: bool(driven.app.screen.query("LoadDialog #modes")), "the dialog")
        await driven.press("end", *",x")
        await driven.press("enter")
        assert "modes = off,chain,tree,x" in driven.text("#wrong")
        await driven.press("backspace", "backspace", "enter", "4")
        app.exit(0)
        await pilot.pause()
    kept = json.loads(file.path.read_text())
    assert (kept["theme"], kept["screen"], kept["values"]["bench.modes"]) == (
        HIGH_CONTRAST,
        "Controls",
        "off,chain,tree",
    )
    app = ConsoleApp(FakeRuntime(), preferences=file)
    async with app.run_test(size=(80, 24)) as pilot:
        assert app.theme == HIGH_CONTRAST and app.screen is app.controls
        app.exit(0)
        await pilot.pause()


async def test_a_broken_file_is_told_once_among_the_events(file: PreferenceFile):
    file.path.parent.mkdir(parents=True)
    file.path.write_text('{"theme": [], "screen": "Nowhere"}')
    app = ConsoleApp(FakeRuntime(), preferences=file)
    async with app.run_test() as pilot:
        await pilot.pause()
        assert sum("are ignored" in line.text for line in app.book.lines) == 1
        assert app.theme == "dark"
        app.exit(0)
        await pilot.pause()


async def test_every_theme_draws_every_screen_and_without_colours_the_chosen_row_is_marked():
    app = ConsoleApp(FakeRuntime())
    async with app.run_test(size=(80, 24)) as pilot:
        driven = Driven(app, FakeRuntime(), pilot)
        await driven.until(lambda: app.view.status is not None, "a status")
        for theme in THEMES:
            app.use_theme(theme.name)
            for number in "13478":
                await driven.press(number)
            assert app.theme == theme.name
        assert app.theme == NO_COLOUR and app.no_color
        await driven.press("4", "j")
        await pilot.pause()
        strips = app.screen._compositor.render_strips()
        row = next(strip for strip in strips if "tree_budget " in strip.text)
        assert any(
            segment.style and segment.style.reverse for segment in row if "tree_budget" in segment.text
        )
        assert isinstance(app.focused, List)
        app.exit(0)
        await pilot.pause()


@pytest.mark.case("C6")
async def test_no_color_wins_over_a_remembered_theme(file: PreferenceFile, monkeypatch: pytest.MonkeyPatch):
    file.save(Preferences(theme="light"))
    monkeypatch.setenv("NO_COLOR", "1")
    app = ConsoleApp(FakeRuntime(), preferences=file)
    async with app.run_test() as pilot:
        await pilot.press("T")
        assert "NO_COLOR is set" in app.view.notice
        app.exit(0)
        await pilot.pause()
    assert file.load()[0].theme == "light"


async def test_the_palette_has_every_action_of_every_screen():
    app = ConsoleApp(FakeRuntime())
    async with app.run_test() as pilot:
        driven = Driven(app, FakeRuntime(), pilot)
        commands = {command.title: command for command in app.get_system_commands(app.screen)}
        for screen in app._screens.values():
            for binding in screen.BINDINGS:
                if isinstance(binding, Binding) and binding.tooltip and "app." not in binding.action:
                    title = binding.tooltip.partition(". ")[0].rstrip(".")
                    assert title in commands or f"{screen.NAME}: {title}" in commands, binding
        assert {"Verify", "Doctor"} <= set(commands) and "Theme: high-contrast" in commands
        await commands["Controls: Filter the fields"].callback()
        await driven.until(lambda: app.screen is app.controls, "the screen of the action")
        app.exit(0)
        await pilot.pause()
