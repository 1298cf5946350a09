"""The screens on the number keys. Each is imported and made when it is first asked for: the first paint needs one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from console.frame import ConsoleScreen

SCREENS: Mapping[str, str] = {
    "Live": "LiveScreen",
    "Tree": "TreeScreen",
    "Prompt": "PromptScreen",
    "Controls": "ControlsScreen",
    "Snapshots": "SnapshotsScreen",
    "Layouts": "LayoutsScreen",
    "Bench": "BenchScreen",
    "Log": "LogScreen",
}
"""Name and class, in the order of the number keys; the module is `console.<name>_screen`."""
TABS = tuple((str(number), name) for number, name in enumerate(SCREENS, 1))
BESIDE = ("change_draft", "dialogs", "field_dialog", "layout_chooser", "proposals")
"""What keys of every screen open; imported with the screens."""


class Screens(Mapping[str, Any]):
    """The screens by name, each of its own class; to look one up makes it."""

    def __init__(self, furnish: Callable[[ConsoleScreen], None]) -> None:
        """`furnish` gives a screen that was just made what it needs of the app."""
        self._furnish = furnish
        self._made: dict[str, ConsoleScreen] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            screen = getattr(_module(name), SCREENS[name])(TABS)
            self._furnish(screen)
            self._made[name] = screen
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in SCREENS

    def __iter__(self) -> Iterator[str]:
        return iter(SCREENS)

    def __len__(self) -> int:
        return len(SCREENS)

    def made(self, name: str) -> ConsoleScreen | None:
        """The screen if it has been asked for."""
        return self._made.get(name)

    async def prepare(self, mount: Callable[[str], Awaitable[object]] | None) -> None:
        """Imports in a thread what has not been, then makes every screen; keys are answered meanwhile.

        `mount`: puts a screen together out of sight; None: that is left to the first key that shows it.
        """
        for name in SCREENS:
            await asyncio.to_thread(_module, name)
            self.get(name)
            if mount is not None:
                await mount(name)
        for name in BESIDE:
            await asyncio.to_thread(import_module, f"console.{name}")


def _module(name: str) -> object:
    return import_module(f"console.{name.lower()}_screen")
