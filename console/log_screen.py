"""Log: everything that is logged and what libraries print, followed, filtered by level and text, bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from console.filtering import FilterLine, wanted
from console.formats import clean_line, clock
from console.frame import ConsoleScreen, View, entitle
from console.log_book import KEEP_LINES
from runtime.interface import LogLine

LEVELS = ("debug", "info", "warning", "error")
TIME_CHARS, LEVEL_CHARS = 9, 9


def level_of(line: LogLine) -> int:
    """Its place in LEVELS; what is worse than an error counts as one, what is unknown as info."""
    level = line.level.lower()
    if level in LEVELS:
        return LEVELS.index(level)
    return LEVELS.index("error") if level in ("critical", "fatal") else LEVELS.index("info")


class LogView(ScrollView, can_focus=True):
    """The lines that pass the filter; draws those in sight only. Follows the last one until it is scrolled away."""

    def __init__(self) -> None:
        super().__init__(id="log", classes="panel")
        self._kept: deque[LogLine] = deque(maxlen=KEEP_LINES)
        self._shown: deque[LogLine] = deque(maxlen=KEEP_LINES)
        self._least = 0
        self._text = ""
        self._holds = wanted("")
        self._widest = 0
        """Cells of the widest line shown since the filter was chosen; to count all anew at each line takes long."""
        self.follows = True

    def on_mount(self) -> None:
        self._redraw(0)

    def on_resize(self, event: events.Resize) -> None:
        if self.follows:
            self.call_later(self._redraw, 0)

    def add(self, lines: Iterable[LogLine]) -> None:
        """Takes lines, oldest first."""
        added = list(lines)
        if not added:
            return
        dropped = max(0, len(self._kept) + len(added) - KEEP_LINES)
        gone = sum(self._passes(line) for line in list(self._kept)[:dropped])
        self._kept.extend(added)
        for _ in range(min(gone, len(self._shown))):
            self._shown.popleft()
        fresh = [line for line in added if self._passes(line)]
        self._shown.extend(fresh)
        self._widest = _widest(fresh, self._widest)
        # Who reads further up keeps the lines before their eyes.
        self._redraw(0 if self.follows else -gone)

    def choose(self, *, least: int | None = None, text: str | None = None) -> None:
        """Shows lines of at least the level LEVELS[least] that have the words of `text`."""
        self._least = self._least if least is None else least
        if text is not None:
            self._text, self._holds = text, wanted(text)
        self._shown = deque(filter(self._passes, self._kept), maxlen=KEEP_LINES)
        self._widest = _widest(self._shown, 0)
        self._redraw(0)

    def follow(self, follows: bool) -> None:
        self.follows = follows
        self._redraw(0)

    @property
    def level(self) -> int:
        return self._least

    def _passes(self, line: LogLine) -> bool:
        return level_of(line) >= self._least and self._holds(f"{line.level} {line.text}")

    def _redraw(self, moved: int) -> None:
        self.virtual_size = Size(TIME_CHARS + LEVEL_CHARS + self._widest, len(self._shown))
        if self.follows:
            self.scroll_to(y=self.max_scroll_y, animate=False, force=True)
        elif moved:
            self.scroll_to(y=max(0, self.scroll_y + moved), animate=False, force=True)
        state = "following" if self.follows else "held, f follows"
        levels = f"{LEVELS[self._least]} and worse" if self._least else "all levels"
        title = f"log: {len(self._shown)} of {len(self._kept)} lines; {levels}; {state}"
        entitle(self, title + (f"; with {clean_line(self._text, 40)!r}" if self._text else ""))
        self.refresh()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """A line that is read stays in sight: to scroll up ends following, to reach the end begins it again."""
        super().watch_scroll_y(old_value, new_value)
        if self.is_mounted and new_value != old_value:
            at_end = new_value >= self.max_scroll_y - 0.5
            if at_end != self.follows and (at_end or new_value < old_value):
                self.follows = at_end
                self.call_later(self._redraw, 0)

    def render_line(self, y: int) -> Strip:
        x, top = self.scroll_offset
        width = self.size.width
        index = top + y
        base = self.rich_style
        if not 0 <= index < len(self._shown):
            return Strip.blank(width, base)
        line = self._shown[index]
        named = ("", "", "fair", "bad")[level_of(line)]
        style = self.app.console.get_style(named) if named else Style(dim=True)
        segments = [
            Segment(f"{clock(line.time_s)} ", base + Style(dim=True)),
            Segment(f"{clean_line(line.level, LEVEL_CHARS - 1):<{LEVEL_CHARS}}", base + style),
            Segment(clean_line(line.text), base + Style(bold=bool(named))),
        ]
        return Strip(segments).crop_extend(x, x + width, base)


def _widest(lines: Iterable[LogLine], least: int) -> int:
    """Cells of the widest of `lines`, `least` at least."""
    return max((least, *(cell_len(line.text) for line in lines)))


class LogScreen(ConsoleScreen):
    NAME = "Log"
    AUTO_FOCUS = "#log"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "slash", "filter", "filter", tooltip="Show the lines with these words; !word shows those without."
        ),
        Binding("l", "level", "level", tooltip="Least level shown: debug, info, warning, error."),
        Binding("f", "follow", "follow", tooltip="Follow the last line, or hold."),
        Binding(
            "d", "app.doctor", "doctor", tooltip="Check the runtime's host; each finding says what to do."
        ),
        Binding("j,down", "move(1)", "down", show=False, tooltip="One line down."),
        Binding("k,up", "move(-1)", "up", show=False, tooltip="One line up."),
        Binding("g,home", "top", "top", show=False, tooltip="The oldest line."),
        Binding("G,end", "bottom", "bottom", show=False, tooltip="The last line; follows it."),
    ]

    def __init__(self, tabs: tuple[tuple[str, str], ...]) -> None:
        super().__init__(tabs)
        self._log_view = LogView()
        self._filter = FilterLine(lambda text: self._log_view.choose(text=text), lambda: self._log_view)
        self._seen = 0

    def body(self) -> list[Widget]:
        return [self._log_view, self._filter]

    def show(self, view: View) -> None:
        fresh = min(view.lines_total - self._seen, len(view.lines))
        self._seen = view.lines_total
        if fresh > 0:
            self._log_view.add(view.lines[-fresh:])

    def action_filter(self) -> None:
        self._filter.open()

    def action_level(self) -> None:
        self._log_view.choose(least=(self._log_view.level + 1) % len(LEVELS))

    def action_follow(self) -> None:
        self._log_view.follow(not self._log_view.follows)

    def action_move(self, rows: int) -> None:
        self._log_view.scroll_relative(y=rows, animate=False)

    def action_top(self) -> None:
        self._log_view.scroll_home(animate=False)

    def action_bottom(self) -> None:
        self._log_view.follow(True)
