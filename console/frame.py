"""What every screen has in common: the view it draws, status bar, footer, the notice for tiny terminals."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, ClassVar
from urllib.parse import urlsplit

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Footer, Static

from console.figures import Figures
from console.formats import NA, clean_line, percent, temperature
from console.host_window import Busy
from console.latency import Latency
from console.panel import Panel
from runtime.interface import Description, HostSample, Job, LogLine, RequestStats, Status

MIN_WIDTH, MIN_HEIGHT = 40, 10
LOST_CHARS = len("lost since 12:34:56")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the runtime of a console runs and who else reaches it; both None: here, for this screen alone."""

    attached_to: str | None = None
    """URL of the server that runs it; leaving the console does nothing to it."""
    listens_at: str | None = None
    """URL at which this process serves it to others; it may outlive the screen."""


@dataclass(frozen=True, slots=True)
class View:
    """Everything the screens show except the conversation; a handler makes the next one, screens draw it."""

    status: Status | None = None
    description: Description | None = None
    host: HostSample | None = None
    host_age_s: float | None = None
    figures: Figures = field(default_factory=Figures)
    latency: Latency = Latency()
    requests: tuple[RequestStats, ...] = ()
    """Running and waiting ones first, then those that finished last."""
    busy: Busy = Busy()
    lines: tuple[LogLine, ...] = ()
    """The latest log lines, oldest first."""
    lines_total: int = 0
    """How many there have ever been."""
    events: tuple[LogLine, ...] = ()
    """The latest changes, failures, snapshots and notices, oldest first; they are among the lines."""
    problem: str = ""
    """Why the status cannot be trusted; empty when it can."""
    notice: str = ""
    notice_bad: bool = False
    read_only: bool = False
    place: Place = Place()
    jobs: tuple[Job, ...] = ()
    """Those that run and those that ended lately, the latest first."""
    not_pushed: int | None = None
    """Snapshots that the store's remote has not; None without a remote, or not read yet."""

    @property
    def config(self) -> dict[str, Any]:
        return self.status.config if self.status is not None else {}

    @property
    def tree_budget(self) -> int | None:
        """The budget in force; None while it is not chosen yet."""
        budget = self.config.get("tree_budget")
        if budget is None and self.figures.setting is not None and self.figures.setting.mode == "tree":
            budget = self.figures.setting.tree_budget
        return budget

    @property
    def state_words(self) -> str:
        """The engine's state with its progress, and its reason where it is not simply ready."""
        if self.problem:
            return self.problem[:LOST_CHARS] if self.problem.startswith("lost since ") else "no answer"
        if self.status is None:
            return "starting"
        words = str(self.status.state)
        if words in ("loading", "rebuilding") and self.status.load_progress is not None:
            words += f" {percent(self.status.load_progress)}"
        return words

    @property
    def where(self) -> str:
        """Host and role of the server, and snapshots not pushed, for the header; empty if there is nothing to say."""
        pushed = f"not pushed: {self.not_pushed}" if self.not_pushed else ""
        return "  ".join(part for part in (pushed, self._role) if part)

    @property
    def _role(self) -> str:
        if self.place.attached_to is not None:
            url = urlsplit(self.place.attached_to).netloc
            return f"attached to {clean_line(self.description.host, 30) if self.description else url}"
        if self.place.listens_at is not None:
            return f"serves {urlsplit(self.place.listens_at).netloc}"
        return ""


def entitle(widget: Widget, title: str) -> None:
    """Gives `widget` a border title; even the same one would have it drawn again."""
    if isinstance(widget, Panel):
        widget.entitle(title)
    elif widget.border_title != title:
        widget.border_title = title


STATE_STYLES = {"ready": "good", "failed": "bad", "degraded": "bad", "no": "bad", "lost": "bad"}


def styled(text: str, style: str) -> Text:
    """`text` in one of the named styles; the base style of a Text knows none of them."""
    return Text.assemble((text, style))


def _layout(view: View) -> str:
    """The layout in force; of several ranks what they really split, which the description tells."""
    named = str(view.config.get("layout", NA))
    told = view.description.layout if view.description is not None else None
    return named if named == "single" or not told else told.partition(":")[0]


class StatusBar(Horizontal):
    """Model, engine, layout, mode, budget, temperature, state."""

    def __init__(self) -> None:
        super().__init__(id="status")

    def compose(self) -> ComposeResult:
        yield Panel(classes="bar line", id="facts")
        yield Panel(classes="bar line", id="state")

    def show(self, view: View) -> None:
        config = view.config
        budget = view.tree_budget
        mode, played = str(config.get("mode", NA)), view.status.auto if view.status is not None else None
        if mode == "auto" and played is not None:
            mode, budget = f"auto: {clean_line(played.partition(';')[0], 20)}", None
        facts = [
            clean_line(str(config.get("model", NA)).rstrip("/").rpartition("/")[2]),
            clean_line(str(config.get("engine", NA))),
            clean_line(_layout(view)),
            f"mode {mode}",
            f"budget {'auto' if budget is None and config else NA if budget is None else budget}",
            f"T {temperature(config.get('temperature'))}",
        ]
        self.query_one("#facts", Panel).put(Text("  ".join(facts)))
        words = view.state_words
        style = STATE_STYLES.get(words.split()[0], "fair")
        state = styled(words, style)
        if view.read_only:
            state = Text.assemble(("read-only ", "bold"), state)
        self.query_one("#state", Panel).put(state)


def tabs_text(tabs: tuple[tuple[str, str], ...], here: str, width: int) -> Text:
    """The screens by number; by name too where that leaves room for the engine's reason."""
    names = sum(len(key) + len(name) + 4 for key, name in tabs) <= width - 34
    text = Text()
    for key, name in tabs:
        mine = name == here
        if mine:
            text.append(f"[{key} {name}]", "bold reverse")
        else:
            text.append(f" {key} {name} " if names else f" {key}")
        text.append(" ")
    return text


class NoticeBar(Horizontal):
    """The screens by number, the last notice or the engine's reason, and where the runtime is if not here."""

    def __init__(self, tabs: tuple[tuple[str, str], ...], here: str) -> None:
        super().__init__(id="notice_bar")
        self._tabs = tabs
        self._here = here

    def compose(self) -> ComposeResult:
        yield Panel(id="tabs", classes="")
        yield Panel(classes="bar", id="notice")
        yield Panel(classes="bar line", id="where")

    def show(self, view: View) -> None:
        tabs = tabs_text(self._tabs, self._here, self.size.width)
        self.query_one("#tabs", Panel).put(tabs)
        # A notice that two lines beside the tabs would cut has the whole bar for its few seconds.
        beside = self.size.width - len(tabs) - len(view.where) - 8
        self.query_one("#tabs", Panel).display = not view.notice or len(view.notice) < 2 * beside - 10
        text, style = view.notice, "bad" if view.notice_bad else "bold"
        if not text:
            style = ""
            text = view.problem or (view.status.reason if view.status is not None else "")
        self.query_one("#notice", Panel).put(styled(clean_line(text), style))
        self.query_one("#where", Panel).put(styled(view.where, "bold"))


class KeyFooter(Footer):
    """The keys of the screen, with the way to all of them always in sight."""

    def __init__(self) -> None:
        super().__init__(show_command_palette=False, compact=True)
        self._said: tuple[tuple[str, str, bool], ...] = ()

    def bindings_changed(self, screen: Screen[Any]) -> None:
        """Is made anew only where it would read differently: it is told of every change of the focus several times."""
        said = tuple(
            (key, active.binding.description, active.enabled)
            for key, active in screen.active_bindings.items()
            if active.binding.show
        )
        in_sight = screen.app.app_focus and self.is_attached and screen is self.screen
        if not in_sight or said != self._said:
            self._said = said if in_sight else ()
            super().bindings_changed(screen)

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield Static(Text.assemble(("?", "bold"), " all keys"), classes="all_keys")

    async def recompose(self) -> None:
        await super().recompose()
        self.call_after_refresh(self._leave_out)

    def on_resize(self) -> None:
        self.call_after_refresh(self._leave_out)

    def _leave_out(self) -> None:
        """Hides what has no room as a whole, from the first key on whose name would be cut."""
        if not self.children:  # they are being replaced, or the screen closes
            return
        *keys, all_keys = self.children
        cut = False
        for key, after in zip_longest(keys, keys[1:]):
            last = after if isinstance(after, Static) else key
            cut = cut or last.region.right > all_keys.region.x
            key.visible = not cut


class ConsoleScreen(Screen[None]):
    """Base of the screens on the number keys. A subclass gives `NAME`, `body()` and `show()`."""

    NAME: ClassVar[str] = ""
    CHANGING: ClassVar[tuple[str, ...]] = ()
    """Actions that change something; their keys are dimmed in a read-only console."""
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (70, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-tall")]

    def __init__(self, tabs: tuple[tuple[str, str], ...]) -> None:
        super().__init__()
        self._tabs = tabs
        self._read_only = False
        self.composed = False
        """True once all parts are there to be drawn on."""

    def compose(self) -> ComposeResult:
        yield StatusBar()
        yield NoticeBar(self._tabs, self.NAME)
        yield from self.body()
        yield KeyFooter()
        yield Static(id="too_small")

    def body(self) -> list[Widget]:
        raise TypeError(f"{type(self).__name__} has no body")

    def on_mount(self) -> None:
        self.composed = True

    def draw(self, view: View) -> None:
        """Draws `view` if there is something to draw on."""
        self._read_only = view.read_only
        if self.composed:
            self.query_one(StatusBar).show(view)
            self.query_one(NoticeBar).show(view)
            self.show(view)

    def show(self, view: View) -> None:
        """Draws the screen's own part of `view`."""

    def _on_screen_resume(self, event: events.ScreenResume) -> None:
        """Spares the restyling of every widget: classes and themes that change meanwhile restyle by themselves."""
        event.refresh_styles = not self.composed

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return None if self._read_only and action in self.CHANGING else True

    def on_resize(self, event: events.Resize) -> None:
        tiny = event.size.width < MIN_WIDTH or event.size.height < MIN_HEIGHT
        self.set_class(tiny, "-tiny")
        if tiny:
            here = f"{event.size.width}x{event.size.height}"
            self.query_one("#too_small", Static).update(
                Text(f"terminal too small: {here}, {MIN_WIDTH}x{MIN_HEIGHT} needed")
            )
