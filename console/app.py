"""The console application: keys, the view the screens draw, start and stop.

Handlers of messages make the next `View` and hand it to the screens; only `console.bridge` calls the runtime.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from textual import events
from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.css.query import NoMatches
from textual.screen import Screen

from console import messages
from console.answer_orders import AnswerOrders
from console.bench_orders import BenchOrders
from console.bridge import Bridge, RuntimeOpener
from console.change_orders import ChangeOrders
from console.figures import RoundWindow
from console.formats import clean_line
from console.frame import ConsoleScreen, Place, View
from console.host_window import HostWindow
from console.keys import help_groups, is_typing
from console.latency import RequestWindow
from console.leaving import Ending, Leave
from console.log_book import LogBook
from console.preferences import PreferenceFile
from console.request_orders import RequestOrders
from console.screens import TABS, Screens
from console.terminal import Terminal, driver_class
from console.type_ahead import TypeAhead
from console.verdict import alarm
from console.words import others_text
from runtime.garbage import keep_out
from runtime.interface import LogLine, Runtime, Status

if TYPE_CHECKING:
    from console.prompt_screen import PromptScreen
    from console.snapshots_screen import SnapshotsScreen
    from console.tree_feed import TreesArrived, Wanted
    from console.tree_screen import TreeScreen

CHANGING_ACTIONS = ("temperature", "budget", "mode", "layout", "undo", "verify", "save_snapshot")
TICK_S = 1.0
"""Between two looks at the figures; what an operator does shows at once."""
SWITCH_S = 0.001
"""A switch of screens and what it draws are painted together after this; a timer of Textual takes no zero."""
NOTICE_S = 8.0
CAPTURED_AT_ONCE = 400
COLLECT_AFTER = (10_000, 10, 10)
"""Objects made until the youngest are looked through, then rounds of that: a switch of screens makes thousands."""

COMMANDS = "Every command by name; in an input too with ctrl+p."
THEME = "Next colours: dark, light, high contrast, none. Remembered for the next start."
QUIT = "Leave; asks first if that would end something. An attached console leaves its server alone."
COPY = "Copy the selected text; without any, quit as q does."
SUSPEND = "Refused: what runs in this process would stop too."
_BUDGET = Binding.Group("budget", compact=True)


class ConsoleApp(AnswerOrders, ChangeOrders, RequestOrders, BenchOrders, Leave, TypeAhead):
    """The console over one runtime, given ready or as a function that opens it after the first paint."""

    TITLE = "ddtree"
    CSS_PATH = ["console.tcss", "prompt.tcss"]
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("t", "temperature", "temp", tooltip="Temperature of requests admitted from then on."),
        Binding("left_square_bracket", "budget(-1)", "less", group=_BUDGET, tooltip="Smaller tree budget."),
        Binding("right_square_bracket", "budget(1)", "more", group=_BUDGET, tooltip="Larger tree budget."),
        Binding("m", "mode", "mode", tooltip="Next speculation mode: off, chain, tree, auto."),
        Binding(
            "p", "layout", "layout", tooltip="Parallelism: choose a layout; its plan is shown and confirmed."
        ),
        Binding("s", "save_snapshot", "save", tooltip="Save a snapshot of what runs, with a note."),
        Binding("u", "undo", "undo", tooltip="Undo the last change made from this console; a rebuild asks."),
        Binding("x", "cancel", "cancel", tooltip="Cancel the answer, or take back a waiting prompt."),
        Binding("i", "input", "ask", priority=True, tooltip="To the prompt input; letters are text there."),
        Binding("question_mark", "help", "help", show=False, tooltip="This help."),
        Binding("T", "theme", "theme", show=False, tooltip=THEME),
        Binding("colon", "command_palette", "commands", show=False, tooltip=COMMANDS),
        Binding("ctrl+p", "command_palette", "commands", show=False, priority=True, tooltip=COMMANDS),
        Binding("q", "quit", "quit", tooltip=QUIT),
        Binding("ctrl+q", "quit", "quit", show=False, priority=True, tooltip=QUIT),
        Binding("ctrl+c", "interrupt", "copy or quit", show=False, tooltip=COPY),
        Binding("ctrl+z", "suspend_process", "suspend", show=False, tooltip=SUSPEND),
        *(
            Binding(key, f"screen_named('{name}')", name, show=False, tooltip=f"The {name} screen.")
            for key, name in TABS
        ),
    ]

    def __init__(
        self,
        runtime: Runtime | RuntimeOpener,
        *,
        read_only: bool = False,
        terminal: Terminal | None = None,
        place: Place = Place(),  # noqa: B008
        author: str = "console",
        preferences: PreferenceFile | None = None,
    ) -> None:
        """`preferences`: where they are remembered; None: nowhere."""
        super().__init__(
            driver_class=driver_class(terminal) if terminal is not None else None,
            ansi_color=True if no_color() else None,
        )
        self.bridge = Bridge(runtime, self.post_message, author)
        self.view = View(read_only=read_only, place=place)
        self._terminal = terminal
        self._window = RoundWindow()
        self._hosts = HostWindow()
        self._finished = RequestWindow()
        self._alarmed = False
        self.book = LogBook()
        self._host_at_s: float | None = None
        self._notice_until_s = 0.0
        self._state = ""
        self._screens = Screens(self._furnish)
        self.begin_taste(preferences, no_color())
        for name in self._screens:
            self.add_mode(name, functools.partial(self._screens.__getitem__, name))

    def _furnish(self, screen: ConsoleScreen) -> None:
        """Gives a screen what is remembered for it, or its source."""
        # It is styled as it is put together; Textual would parse all style sheets again and style all twice more.
        screen._css_update_count = self._css_update_count
        if screen.NAME == "Bench":
            self.furnish_bench(screen)
        elif screen.NAME == "Snapshots":
            from console.archive_served import archive_of

            screen.archive = archive_of(self.view.place, lambda: self.bridge.runtime)

    @property
    def prompt(self) -> PromptScreen:
        return self._screens["Prompt"]

    @property
    def trees(self) -> TreeScreen:
        return self._screens["Tree"]

    async def on_mount(self) -> None:
        if self._terminal is not None:
            # Textual's own capture, in force by now, would drop what libraries print.
            sys.stdout = sys.stderr = self._terminal.stream
        self.theme_changed_signal.subscribe(self, lambda _theme: self.apply_colours())
        self.apply_colours()
        await self.action_screen_named(self.first_screen)
        self.set_interval(TICK_S, self._tick)
        self.call_after_refresh(self._start)

    def _handle_exception(self, error: Exception) -> None:
        # Textual puts no parts on a screen that is being made when the end is asked for: what looks for them fails.
        if self._exit and isinstance(error, NoMatches):
            return
        super()._handle_exception(error)

    def _start(self) -> None:
        gc.enable()
        self.run_worker(self.bridge.run(), name="bridge", group="bridge", exit_on_error=False)
        self.run_worker(self.bridge.trees(self._wanted), name="trees", group="trees", exit_on_error=False)
        # Textual has no other name for it. A program that runs for a moment, as tests do, is spared it.
        mount = self._init_mode if self._terminal is not None else None
        self.run_worker(self._screens.prepare(mount), name="screens", group="screens")

    def _wanted(self) -> Wanted | None:
        tree = self._screens.made("Tree")
        return tree.wanted() if tree is not None else None

    # The view

    def _show(self, **changes: Any) -> None:
        """Makes the next view and draws it on the screens that are visible, also under a dialog."""
        self.view = dataclasses.replace(self.view, **changes)
        stack = self.screen_stack  # empty at the end
        for screen in stack:
            if isinstance(screen, ConsoleScreen):
                screen.draw(self.view)
        prompt = self._screens.made("Prompt")
        if prompt is not None and prompt not in stack and prompt.composed:
            prompt.show(self.view)  # it may have a prompt to send

    def _tick(self) -> None:
        now = time.time()
        if self._terminal is not None:
            if self._terminal.is_lost():
                self.exit(Ending.LOST)
                return
            now_s = time.time()
            captured = self._terminal.take_lines(CAPTURED_AT_ONCE)
            self.book.record(*(LogLine(time_s=now_s, level="info", text=text) for text in captured))
        if self.view.notice and time.monotonic() > self._notice_until_s:
            self.view = dataclasses.replace(self.view, notice="")
        age = None if self._host_at_s is None else time.monotonic() - self._host_at_s
        figures = self._window.figures(now)
        self._warn(alarm(figures, self.view.config))
        self._show(figures=figures, host_age_s=age, busy=self._hosts.busy(now), **self._logged())

    def _warn(self, trouble: str | None) -> None:
        """Makes an alarm an event when it begins."""
        if trouble is not None and not self._alarmed:
            self.book.event(trouble, "warning")
        self._alarmed = trouble is not None

    def _logged(self) -> dict[str, Any]:
        return {"lines": self.book.lines, "lines_total": self.book.total, "events": self.book.events}

    def _notice(self, text: str, bad: bool = False) -> None:
        """One line at the top for some seconds, kept among the events."""
        self._notice_until_s = time.monotonic() + NOTICE_S
        self.book.event(text, "warning" if bad else "info")
        self._show(notice=clean_line(text), notice_bad=bad, **self._logged())

    # Messages of the bridge

    def on_status_arrived(self, event: messages.StatusArrived) -> None:
        before = self.view.status
        if event.status.state != "loading" and (before is None or before.state == "loading"):
            self._loaded()
        told = before.errors if before is not None else ()
        for error in event.status.errors:
            if error not in told:
                self.book.event(error, "error")
        chosen = event.status.calibration
        if chosen and (before is None or before.calibration != chosen):
            self.book.event(f"budget: {chosen}")
        if before is not None and before.model_copy(update=_counts(event.status)) == event.status:
            self.view = dataclasses.replace(self.view, status=event.status)  # figures are drawn once a second
        else:
            self._show(status=event.status)
        if before is not None:
            self._tell_of_others(before, event.status)

    def _loaded(self) -> None:
        if self._terminal is not None:
            keep_out()
            gc.set_threshold(*COLLECT_AFTER)

    def _tell_of_others(self, before: Status, after: Status) -> None:
        """Says what others changed since the status before; a refusal that is being read stays."""
        for change in after.history:
            if change.revision > before.revision and change.author != self.bridge.author:
                if self.view.notice and self.view.notice_bad:
                    self.book.event(others_text(change), time_s=change.time_s)
                else:
                    self._notice(others_text(change))

    def on_description_arrived(self, event: messages.DescriptionArrived) -> None:
        self._show(description=event.description)

    def on_host_arrived(self, event: messages.HostArrived) -> None:
        first, self._host_at_s = self._host_at_s is None, event.at_s
        for sample in event.samples:
            self._hosts.add(sample)
        self.view = dataclasses.replace(
            self.view, host=event.samples[-1], host_age_s=time.monotonic() - event.at_s
        )
        if first:
            self._show()

    def on_rounds_arrived(self, event: messages.RoundsArrived) -> None:
        self._window.add(event.rounds)

    def on_request_arrived(self, event: messages.RequestArrived) -> None:
        self._finished.add((event.stats,))
        self.view = dataclasses.replace(self.view, latency=self._finished.latency)

    def on_requests_arrived(self, event: messages.RequestsArrived) -> None:
        self._finished.add(reversed(event.requests))
        self.view = dataclasses.replace(self.view, requests=event.requests, latency=self._finished.latency)

    def on_lines_arrived(self, event: messages.LinesArrived) -> None:
        self.book.record(*event.lines)

    def on_state_changed(self, event: messages.StateChanged) -> None:
        if event.change.state != self._state:
            self._state = event.change.state
            reason = f": {event.change.reason}" if event.change.reason else ""
            level = "error" if event.change.state in ("failed", "degraded") else "info"
            self.book.event(f"engine {event.change.state}{reason}", level)

    def on_bridge_problem(self, event: messages.BridgeProblem) -> None:
        if event.text and event.text != self.view.problem:
            self.book.event(event.text, "error")
        self._show(problem=event.text)

    def on_snapshots_screen_told(self, event: SnapshotsScreen.Told) -> None:
        self._notice(event.text, event.bad)

    def on_snapshots_screen_counted(self, event: SnapshotsScreen.Counted) -> None:
        self._show(not_pushed=event.not_pushed)

    def on_trees_arrived(self, event: TreesArrived) -> None:
        self.trees.arrived(event)

    def on_told(self, event: messages.Told) -> None:
        self._notice(event.text, event.bad)

    # Keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Changing keys are dimmed in a read-only console; `i` is a letter where text is typed."""
        if action == "input":
            return isinstance(self.screen, ConsoleScreen) and not is_typing(self)
        return None if self.view.read_only and action in CHANGING_ACTIONS else True

    def on_key(self, event: events.Key) -> None:
        """Says why a dimmed key does nothing."""
        binding = self.screen.active_bindings.get(event.key)
        if isinstance(self.screen, ConsoleScreen) and binding is not None and not binding.enabled:
            self._notice(f"refused, the console is read-only: {binding.binding.description}", bad=True)

    def delay_update(self, delay: float = SWITCH_S) -> None:
        """Draws another screen at once: Textual waits 50 ms to hide how it is put together, which happens once here."""
        super().delay_update(delay)

    async def action_screen_named(self, name: str) -> None:
        await self.switch_mode(name)
        # Textual waits only for a screen that it begins here, not for one that is being made ahead.
        await self.screen._mounted_event.wait()
        self._show()

    async def action_input(self) -> None:
        await self.action_screen_named("Prompt")
        self.prompt.focus_input()

    def action_help(self) -> None:
        from console.dialogs import HelpScreen

        self.push_screen(HelpScreen(help_groups(self)))

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Every key of the screen as a command, then those of the other screens and what has no key."""
        for node, binding, enabled, tooltip in screen.active_bindings.values():
            if enabled and node in (self, screen) and tooltip and "palette" not in binding.action:
                title, _, more = tooltip.partition(". ")
                key = self.get_key_display(binding)
                run = functools.partial(self.run_action, binding.action, node)
                yield SystemCommand(title.rstrip("."), f"key {key}. {more}".strip(), run)
        yield from self.other_commands()


def _counts(status: Status) -> dict[str, int]:
    """What of a status changes from second to second."""
    return {name: getattr(status, name) for name in ("running", "waiting", "slots_used", "slots_cached")}


def no_color() -> bool:
    """NO_COLOR by no-color.org: set and not empty."""
    return bool(os.environ.get("NO_COLOR"))
