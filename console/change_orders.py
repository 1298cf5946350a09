"""Changes of the configuration from this console: their keys, their plans, what came of them. A part of ConsoleApp."""

from __future__ import annotations

from typing import TYPE_CHECKING

from console import messages
from console.bridge import Step
from console.keys import next_budget, next_mode

if TYPE_CHECKING:
    from console.layouts_screen import LayoutsScreen


class ChangeOrders:
    """Keys and handlers around `Bridge.change`, `Bridge.undo` and the plans that are confirmed first."""

    def _change(self, step: Step) -> None:
        self.run_worker(self.bridge.change(step), name="change", group="change", exit_on_error=False)

    def action_temperature(self) -> None:
        from console.dialogs import Asked, ValueDialog

        running = self.view.status.running if self.view.status is not None else 0
        note = "Acts on requests admitted afterwards that set none; 0 is greedy."
        if running:
            note += f" {running} running keep theirs."
        asked = Asked("temperature", self.view.config.get("temperature"), 0.0, 2.0, 0.1, note)

        def chosen(value: float | None) -> None:
            if value is not None:
                self._change(lambda config: {"temperature": value})

        self.push_screen(ValueDialog(asked), chosen)

    def action_budget(self, direction: int) -> None:
        self._change(lambda config: next_budget(config, direction, self.view.tree_budget))

    def action_mode(self) -> None:
        self._change(next_mode)

    def action_layout(self) -> None:
        from console.layout_chooser import LayoutChooser

        def chosen(name: str | None) -> None:
            if name is not None:
                self._propose({"layout": name}, f"Change the layout to {name}?")

        self.push_screen(LayoutChooser(self.view.config.get("layout")), chosen)

    def on_layouts_screen_chosen(self, event: LayoutsScreen.Chosen) -> None:
        self._propose(event.change, event.title)

    def on_layouts_screen_unable(self, event: LayoutsScreen.Unable) -> None:
        self._notice(event.text, bad=True)

    def _propose(self, change: dict[str, object], title: str) -> None:
        from console.proposals import propose

        asked = propose(self, self.bridge, change, title)
        self.run_worker(asked, name="propose", group="change", exit_on_error=False)

    def action_undo(self) -> None:
        from console.proposals import undo

        self.run_worker(undo(self, self.bridge), name="undo", group="change", exit_on_error=False)

    def on_change_done(self, event: messages.ChangeDone) -> None:
        text = event.text + ("" if event.undo else "; u undoes")
        if "tree_budget" in event.fields and event.config.get("mode") != "tree":
            text += f"; acts in mode tree, the mode is {event.config.get('mode')}"
        self._notice(text)

    def on_change_refused(self, event: messages.ChangeRefused) -> None:
        self._notice(event.text, bad=True)
