"""Themes, what is remembered, and the commands of the palette that are no key of the screen. A part of ConsoleApp."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.theme import Theme
from textual.app import SystemCommand
from textual.binding import Binding
from textual.filter import LineFilter, NoColor

from console.operations import Operations
from console.preferences import PreferenceFile, Preferences, Value
from console.themes import DARK, NO_COLOUR, THEMES, following, palette

DOCTOR = "Check the runtime's host: driver, toolkits, packages, memory, logout; changes nothing"
VERIFY = "Check that speculation changes no token; a short check, 'ddtree verify' is the thorough one"

if TYPE_CHECKING:
    from console.frame import ConsoleScreen


class Taste(Operations):
    """How the console looks, and what it remembers of that."""

    _preferences: Preferences
    _preference_file: PreferenceFile | None
    _colourless: bool

    def begin_taste(self, file: PreferenceFile | None, colourless: bool) -> None:
        """Reads what is remembered. `colourless`: the terminal is to get no colours, whatever that says."""
        self._preference_file, self._colourless = file, colourless
        self._preferences, problem = file.load() if file is not None else (Preferences(), "")
        if problem:
            self.book.event(problem, "warning")
        for theme in THEMES:
            self.register_theme(theme)
        wanted = NO_COLOUR if colourless else self._preferences.theme
        self.theme = wanted if any(theme.name == wanted for theme in THEMES) else DARK
        for name in set(self.available_themes) - {theme.name for theme in THEMES}:
            self.unregister_theme(name)

    @property
    def first_screen(self) -> str:
        """The screen that was left last, else the first one."""
        wanted = self._preferences.screen
        return wanted if wanted in self._screens else next(iter(self._screens))

    def preference(self, name: str, default: Value) -> Value:
        """What a screen remembers under `name`, if it is of the kind of `default`."""
        value = self._preferences.values.get(name, default)
        return value if type(value) is type(default) else default

    def remember(self, **values: Value) -> None:
        """Remembers values of screens for the next start."""
        self._preferences = dataclasses.replace(
            self._preferences, values={**self._preferences.values, **values}
        )
        self._save()

    def on_unmount(self) -> None:
        self._save()

    def _save(self) -> None:
        if self._preference_file is None:
            return
        theme = self._preferences.theme if self._colourless else self.theme
        here = self.current_mode if self.current_mode in self._screens else self._preferences.screen
        wanted = dataclasses.replace(self._preferences, theme=theme, screen=here)
        problem = self._preference_file.save(wanted)
        if problem:
            self._preference_file = None  # said once; another try would say it again
            self.book.event(problem, "warning")

    # Colours

    def apply_colours(self) -> None:
        """Gives the named styles the colours of the theme."""
        self.console.push_theme(Theme(palette(self.theme, self.current_theme.dark)))
        plain = self._colourless or self.theme == NO_COLOUR
        if plain != self.no_color:
            self.no_color = plain
            self.refresh_css(animate=False)

    def get_line_filters(self) -> Sequence[LineFilter]:
        filters = super().get_line_filters()
        return [*filters, NoColor()] if self.theme == NO_COLOUR and not self._colourless else filters

    def action_theme(self) -> None:
        self.use_theme(following(self.theme))

    def use_theme(self, name: str) -> None:
        if self._colourless:
            self._notice("the theme stays without colours: NO_COLOR is set", bad=True)
            return
        self.theme = name
        self._save()
        self._notice(f"theme: {name}")

    # The palette

    def other_commands(self) -> Iterable[SystemCommand]:
        """Actions of the screens that are not shown, the themes, and what has no key."""
        if not self.view.read_only:
            yield SystemCommand("Verify", VERIFY, self.action_verify)
        yield SystemCommand("Doctor", DOCTOR, self.action_doctor)
        for screen in self._screens.values():
            if screen is not self.screen:
                yield from self._commands_of(screen)
        for theme in THEMES:
            yield SystemCommand(
                f"Theme: {theme.name}", "Colours", functools.partial(self.use_theme, theme.name)
            )

    def _commands_of(self, screen: ConsoleScreen) -> Iterable[SystemCommand]:
        for binding in screen.BINDINGS:
            if isinstance(binding, Binding) and binding.tooltip and "app." not in binding.action:
                title, _, more = binding.tooltip.partition(". ")
                key = self.get_key_display(binding.with_key(binding.key.split(",")[0]))
                note = f"{screen.NAME} screen, key {key}. {more}".strip()
                run = functools.partial(self._run_on, screen, binding.action)
                yield SystemCommand(f"{screen.NAME}: {title.rstrip('.')}", note, run)

    async def _run_on(self, screen: ConsoleScreen, action: str) -> None:
        await self.run_action(f"screen_named('{screen.NAME}')")
        await self.run_action(action, screen)
