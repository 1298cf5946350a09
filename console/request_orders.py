"""What the list of requests orders and the app carries out: open a tree, cancel after asking. A part of ConsoleApp."""

from __future__ import annotations

from typing import TYPE_CHECKING

from console.formats import clean_line

if TYPE_CHECKING:
    from console.request_list import RequestTable


class RequestOrders:
    """Handlers of the request table's orders."""

    def on_request_table_said(self, event: RequestTable.Said) -> None:
        self._notice(event.text)

    async def on_request_table_opened(self, event: RequestTable.Opened) -> None:
        await self.action_open_tree(event.request_id)

    def on_request_table_ended(self, event: RequestTable.Ended) -> None:
        """Asks, then cancels a request, which may be somebody else's."""
        if self.view.read_only:
            self._notice("refused, the console is read-only: cancel a request", bad=True)
            return
        from console.dialogs import ConfirmDialog

        name = f"request {clean_line(event.request_id, 40)}"
        effect = f"{name} ends with the text it has; its client is told that it was cancelled."
        dialog = ConfirmDialog("Cancel the request?", effect, yes="Cancel it", no="Leave it")
        self.push_screen(dialog, lambda yes: self._cancel_request(event.request_id, name) if yes else None)

    def _cancel_request(self, request_id: str, name: str) -> None:
        async def cancel() -> None:
            ended = await self.bridge.cancel(request_id)
            self._notice(f"{name} is cancelled" if ended else f"{name} had ended already")

        self.run_worker(cancel(), name="cancel", exit_on_error=False)

    async def action_open_tree(self, request_id: str) -> None:
        """Shows the draft trees of a request."""
        await self.action_screen_named("Tree")
        self.trees.follow(request_id)
