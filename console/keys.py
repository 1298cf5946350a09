"""What the keys step through, and the help made from the bindings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from textual.app import App
from textual.binding import Binding

from console.frame import ConsoleScreen

if TYPE_CHECKING:
    from console.dialogs import HelpGroup

BUDGET_STEPS = (4, 8, 11, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
MODES = ("off", "chain", "tree", "auto")


def next_budget(config: Mapping[str, Any], direction: int, in_force: int | None) -> dict[str, Any] | str:
    """The next step of the tree budget up or down, within what live changes may set."""
    budget = config.get("tree_budget")
    budget = in_force if budget is None else budget
    if budget is None:
        return "tree budget: not chosen yet, the engine is still loading"
    largest = config.get("max_tree_budget", BUDGET_STEPS[-1])
    steps = sorted({*(step for step in BUDGET_STEPS if step < largest), largest})
    further = [step for step in steps if (step > budget if direction > 0 else step < budget)]
    if not further:
        return f"tree budget: {budget} is the {'largest' if direction > 0 else 'smallest'} step"
    return {"tree_budget": further[0] if direction > 0 else further[-1]}


def next_mode(config: Mapping[str, Any]) -> dict[str, Any]:
    """The speculation mode after the present one."""
    mode = config.get("mode")
    return {"mode": MODES[(MODES.index(mode) + 1) % len(MODES)] if mode in MODES else MODES[0]}


def is_typing(app: App[Any]) -> bool:
    """Whether what has the focus takes letters as text."""
    return app.focused is not None and app.focused.check_consume_key("i", "i")


def help_groups(app: App[Any]) -> tuple[HelpGroup, ...]:
    """The keys of the present screen, everywhere, of the focused part, and in the prompt input."""
    screen = app.screen
    own = f"{screen.NAME} screen" if isinstance(screen, ConsoleScreen) else "This screen"
    titles: dict[str, list[tuple[Binding, str]]] = {own: [], "Everywhere": []}
    for node, binding, _enabled, tooltip in screen.active_bindings.values():
        if binding.system or not (tooltip or binding.description):
            continue
        if node is app:
            title = "Everywhere"
        elif node is screen:
            title = own
        else:
            title = "In what has the focus"
        titles.setdefault(title, []).append((binding, app.get_key_display(binding)))
    from console.dialogs import help_rows
    from console.prompt_input import PromptInput

    groups = [(title, help_rows(found)) for title, found in titles.items() if found]
    if not isinstance(app.focused, PromptInput):
        typing = [
            binding.with_key(key)
            for binding in PromptInput.BINDINGS
            if isinstance(binding, Binding)
            for key in binding.key.split(",")
        ]
        rows = help_rows((binding, app.get_key_display(binding)) for binding in typing)
        groups.append(("In the prompt input", rows))
    return tuple(groups)
