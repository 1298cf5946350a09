"""The Log screen: follow and hold, filter by level and text, bounds, and text that would break a terminal."""

from __future__ import annotations

import os
import threading
import time

import pytest
from console_driver import Driven, console
from rich.cells import cell_len

from console.log_book import KEEP_LINES, LogBook
from console.log_screen import LogView, level_of
from console.terminal import Terminal
from runtime.interface import LogLine


def line(text: str, level: str = "info") -> LogLine:
    return LogLine(time_s=time.time(), level=level, text=text)


def log(driven: Driven) -> LogView:
    return driven.app.screen.query_one(LogView)


def title(driven: Driven) -> str:
    return str(log(driven).border_title)


async def test_lines_are_followed_held_filtered_and_searched():
    async with console(size=(80, 24)) as driven:
        for number in range(100):
            driven.app.book.record(line(f"line {number}", "warning" if number % 10 == 0 else "info"))
        await driven.press("8")
        await driven.until(
            lambda: "line 99" in driven.shown() and "following" in title(driven), "the last line"
        )
        await driven.press("k", "k", "k")
        await driven.until(lambda: "held" in title(driven), "held")
        driven.app.book.record(line("later"))
        await driven.until(lambda: "101 of 101" in title(driven), "taken")
        assert "later" not in driven.shown() and "line 96" in driven.shown()
        await driven.press("f")
        await driven.until(lambda: "later" in driven.shown(), "followed again")
        await driven.press("l", "l")
        await driven.until(lambda: "10 of 101 lines; warning and worse" in title(driven), "by level")
        await driven.press("slash", *"!9 line", "enter")
        await driven.until(lambda: "9 of 101" in title(driven), "by text")
        assert "line 80" in driven.shown() and "line 90" not in driven.shown()
        await driven.press("slash", "escape", "l", "l")
        await driven.until(lambda: "101 of 101 lines; all levels" in title(driven), "all again")
        await driven.press("g")
        await driven.until(lambda: "line 0 " in driven.shown(), "the first line")


@pytest.mark.case("C4")
async def test_a_flood_is_bounded_and_nothing_in_it_breaks_or_styles_the_screen():
    hostile = (
        "[red]x[/red]",
        "\x1b[2J\x1b[31mred",
        "nul\x00nul",
        "y" * 1_000_000,
        "‮שלום 👩‍👩‍👧",
        "a\nb\rc",
        "",
        "\t",
    )
    async with console(size=(80, 24)) as driven:
        await driven.press("8")
        for _ in range(5):
            driven.app.book.record(*(line(f"flood {number}") for number in range(10_000)))
        driven.app.book.record(*(line(text) for text in hostile))
        await driven.until(lambda: f"{KEEP_LINES} of {KEEP_LINES} lines" in title(driven), "bounded")
        shown = driven.shown()
        assert "[red]x[/red]" in shown and "\x1b" not in shown and "\x00" not in shown
        assert max(map(cell_len, shown.splitlines())) <= 80
        await driven.press("right", "right", "left")
        for size in ((10, 3), (1, 1), (200, 60), (80, 24)):
            await driven.pilot.resize_terminal(*size)
            await driven.pilot.pause()
        await driven.until(lambda: "following" in title(driven) and "yyyy" in driven.shown(), "still there")
        await driven.press("1")
        assert len(driven.app.book.lines) == KEEP_LINES


def test_events_are_what_happened_and_what_went_wrong_not_every_line():
    book = LogBook()
    book.record(line("a library speaks"), line("it warns", "warning"))
    book.event("mode tree -> off")
    book.event("it failed", "error")
    assert [each.text for each in book.events] == ["it warns", "mode tree -> off", "it failed"]
    assert [each.text for each in book.lines] == [
        "a library speaks",
        "it warns",
        "mode tree -> off",
        "it failed",
    ]
    for number in range(3 * KEEP_LINES):
        book.record(line(str(number), "warning"))
    assert (
        len(book.lines) == KEEP_LINES and len(book.events) < KEEP_LINES and book.total == 4 + 3 * KEEP_LINES
    )


@pytest.mark.parametrize(
    ("level", "place"), [("debug", 0), ("INFO", 1), ("odd", 1), ("warning", 2), ("error", 3), ("critical", 3)]
)
def test_levels_in_order(level: str, place: int):
    assert level_of(line("x", level)) == place


@pytest.mark.case("C6")
def test_captured_output_that_comes_too_fast_is_counted():
    terminal = Terminal()
    read, write = os.pipe()
    terminal._read = read
    with os.fdopen(write, "w") as out:
        terminal._stop = threading.Event()
        pump = threading.Thread(target=terminal._pump)
        pump.start()
        out.write("".join(f"line {number}\n" for number in range(5000)))
    pump.join(timeout=30)
    os.close(read)
    first, *lines = terminal.take_lines(10_000)
    assert first == "4000 lines of output were left out: they came too fast"
    assert (lines[0], lines[-1], len(lines)) == ("line 4000", "line 4999", 1000)
    assert terminal.take_lines(10) == []
