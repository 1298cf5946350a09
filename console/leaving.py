"""How the console is left: at once, after asking, or with its runtime going on. A part of ConsoleApp."""

from __future__ import annotations

from enum import StrEnum

from console.dialogs import ConfirmDialog, LeaveDialog, Leaving


class Ending(StrEnum):
    """How a console left its screen."""

    QUIT = "quit"
    INTERRUPTED = "interrupted"
    """By SIGINT."""
    LOST = "lost"
    """The terminal hung up."""
    DETACH = "detach"
    """The operator wants the runtime to go on serving."""


class Leave:
    """The keys that end the screen."""

    def action_interrupt(self) -> None:
        """Ctrl+C where nothing is selected to copy."""
        self.request_quit()

    async def action_quit(self) -> None:
        self.request_quit()

    def action_suspend_process(self) -> None:
        if self.view.place.attached_to is not None:
            self._notice("ctrl+z is refused; leave with q, the server goes on", bad=True)
        else:
            self._notice("ctrl+z is refused: it would stop the engine in this process as well", bad=True)

    def request_quit(self) -> None:
        """Leaves; asks first where that would lose a request, or end a runtime that others may use."""
        if isinstance(self.screen, ConfirmDialog | LeaveDialog):
            return
        served_at = self.view.place.listens_at
        lost = self._would_lose()
        if served_at is not None:
            self.push_screen(LeaveDialog(served_at, lost), self._leave)
        elif lost:
            dialog = ConfirmDialog("Quit ddtree?", lost, yes="Quit", no="Stay")
            self.push_screen(dialog, lambda yes: self._leave("stop" if yes else None))
        else:
            self.exit(Ending.QUIT)

    def _leave(self, how: Leaving | None) -> None:
        if how is not None:
            self.exit(Ending.DETACH if how == "detach" else Ending.QUIT)

    def _would_lose(self) -> str:
        """What is not finished, in words; of an attached server only the answer to this console counts."""
        status, place = self.view.status, self.view.place
        shared = status if place.attached_to is None else None
        running = shared.running + shared.waiting if shared is not None else 0
        if self.prompt.conversation.open_turn is not None:
            running = max(running, 1)
        if not running:
            return ""
        requests = f"{running} requests are" if running > 1 else "1 request is"
        if place.listens_at is not None:
            own = " The answer on this screen ends with it." if self.prompt.conversation.open_turn else ""
            return f"{requests} not finished.{own}"
        return f"{requests} not finished; the rest of the text would be lost."
