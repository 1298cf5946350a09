"""Snapshots: the history as a graph, a page, two side by side, save, roll back, verify; git runs beside the screen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from console.archive import Archive, Foreseen, Here, explain
from console.formats import clean_line, clean_text
from console.frame import ConsoleScreen, Panel, View, styled
from console.snapshots_dialogs import Choice, PageDialog, RollbackDialog
from console.snapshots_rows import details_text, graph, heading, page_text, results_text, row_text

if TYPE_CHECKING:
    from snapshots.message import Entry

AHEAD = 10
"""Rows before the end of the list at which older snapshots are fetched."""
FILTER_PAUSE_S = 0.15


class SnapshotList(OptionList):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "cursor_down", "down", show=False, tooltip="The next snapshot."),
        Binding("k", "cursor_up", "up", show=False, tooltip="The snapshot before."),
        Binding("g", "first", "first", show=False, tooltip="The newest snapshot."),
        Binding("G", "last", "last", show=False, tooltip="The oldest snapshot in the list."),
        Binding("enter", "select", "page", tooltip="The snapshot's page."),
    ]

    def __init__(self) -> None:
        super().__init__(id="snapshots", markup=False, compact=True)


class SnapshotsScreen(ConsoleScreen):
    NAME = "Snapshots"
    CHANGING = ("roll_back", "verify")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "filter", tooltip="Show only snapshots that hold these words."),
        Binding("space", "mark", "mark", tooltip="Mark for the difference; again takes the mark away."),
        Binding("d", "diff", "diff", tooltip="The marked snapshot, or the one below, beside this one."),
        Binding("r", "roll_back", "roll back", tooltip="Go back to this snapshot; shows what it would do."),
        Binding("v", "verify", "verify", tooltip="Measure what runs and compare it with this snapshot."),
        Binding("escape", "leave_filter", "all", show=False, tooltip="Leave the filter."),
        Binding("f5", "reload", "reload", show=False, tooltip="Read the store again."),
    ]

    class Told(Message):
        """One line for the operator."""

        def __init__(self, text: str, bad: bool = False) -> None:
            super().__init__()
            self.text = text
            self.bad = bad

    class Counted(Message):
        """How many commits the store's remote has not; None without a remote."""

        def __init__(self, not_pushed: int | None) -> None:
            super().__init__()
            self.not_pushed = not_pushed

    archive: Archive
    """Given by the app."""

    def __init__(self, tabs: tuple[tuple[str, str], ...]) -> None:
        super().__init__(tabs)
        self._entries: list[Entry] = []
        self._more = False
        self._loading = False
        self._marked: str | None = None
        self._words = ""
        self._store = ""
        self._not_pushed: int | None = None
        self._here = Here()
        self._doing = ""
        self._author = "console"
        self._in_flight = 0

    def body(self) -> list[Widget]:
        words = Input(placeholder="words to filter by", id="filter", compact=True)
        words.display = False
        return [
            Panel(classes="bar line", id="store_line"),
            Panel(classes="bar line", id="columns"),
            SnapshotList(),
            Panel("snapshot", id="details"),
            Panel(classes="bar", id="verdict"),
            words,
        ]

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one("#verdict", Panel).display = False
        self.query_one(SnapshotList).focus()

    def on_screen_resume(self) -> None:
        if self.is_current and self.composed:
            self.action_reload()

    def show(self, view: View) -> None:
        self._in_flight = view.status.running if view.status is not None else 0
        self._tell_store()

    # Reading the store

    def action_reload(self) -> None:
        self._work(self._load, "load")

    async def _load(self) -> None:
        """Reads the newest page again and keeps the highlight on its snapshot."""
        kept = self._highlighted
        page = await self.archive.page(self._words)
        if not self._here.is_settled:
            self._store, self._here = await self.archive.where(), await self.archive.here()
        self._entries, self._more = list(page.entries), page.more
        self._not_pushed = page.unpushed
        self.app.post_message(self.Counted(page.unpushed))
        row = next((i for i, each in enumerate(self._entries) if kept and each.id == kept.id), 0)
        self._fill(row)

    async def _load_older(self) -> None:
        if self._loading:
            return
        self._loading = True
        try:
            page = await self.archive.page(self._words, len(self._entries))
        finally:
            self._loading = False
        known = {each.commit for each in self._entries}
        self._entries += [each for each in page.entries if each.commit not in known]
        self._more = page.more
        self._fill(self.query_one(SnapshotList).highlighted or 0)

    def _fill(self, row: int | None = None) -> None:
        """Draws the list; `row` gets the highlight, the same one if None."""
        rows = self.query_one(SnapshotList)
        row = rows.highlighted if row is None else row
        width, cells = max(self.size.width - 4, 20), graph(self._entries)
        graph_width = max(map(len, cells), default=1)
        self.query_one("#columns", Panel).put(heading(width, graph_width))
        options = []
        for entry, cell in zip(self._entries, cells, strict=True):
            marked = entry.id == self._marked
            options.append(Option(row_text(entry, cell, marked, self._here, width, graph_width)))
        rows.set_options(options)
        if options:
            rows.highlighted = min(row or 0, len(options) - 1)
        self._tell_store()
        self._tell_details()

    @property
    def _highlighted(self) -> Entry | None:
        row = self.query_one(SnapshotList).highlighted
        return self._entries[row] if row is not None and row < len(self._entries) else None

    def _tell_store(self) -> None:
        """The line above the list: how many there are, what is not pushed, the filter, what is being done."""
        count = f"{len(self._entries)}{'+' if self._more else ''}"
        parts = [f"{count} snapshot{'' if count == '1' else 's'}", clean_line(self._store, 60)]
        if self._not_pushed is not None:
            parts.insert(1, f"not pushed: {self._not_pushed}")
        if self._words:
            parts.insert(1, f"filter: {clean_line(self._words, 40)} (Esc: all)")
        text = Text(" · ".join(part for part in parts if part))
        if self._doing:
            text = Text.assemble((f"{self._doing} · ", "bold"), text)
        self.query_one("#store_line", Panel).put(text)

    def _tell_details(self) -> None:
        entry = self._highlighted
        panel = self.query_one("#details", Panel)
        if entry is not None:
            panel.put(details_text(entry, self._here))
        else:
            none = "no snapshot holds these words" if self._words else "no snapshot yet; s saves what runs"
            panel.put(Text(none, style="dim"))

    def on_resize(self, event: Any) -> None:
        super().on_resize(event)
        if self.composed and self._entries:
            self._fill()

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        self._tell_details()
        if self._more and not self._loading and event.option_index >= len(self._entries) - AHEAD:
            self._work(self._load_older, "older")

    # Filter

    def action_filter(self) -> None:
        words = self.query_one("#filter", Input)
        words.display = True
        words.focus()

    def action_leave_filter(self) -> None:
        words = self.query_one("#filter", Input)
        words.value = ""
        words.display = False
        self.query_one(SnapshotList).focus()
        self._filter_by("")

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.display:
            self._filter_by(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.input.display = bool(event.value)
        self.query_one(SnapshotList).focus()

    def _filter_by(self, words: str) -> None:
        if words != self._words:
            self._words = words
            self._work(self._load_soon, "load")

    async def _load_soon(self) -> None:
        await asyncio.sleep(FILTER_PAUSE_S)
        await self._load()

    # Reading snapshots

    def on_option_list_option_selected(self, _event: OptionList.OptionSelected) -> None:
        entry = self._highlighted
        if entry is not None:
            self._work(partial(self._show_page, entry), "page")

    async def _show_page(self, entry: Entry) -> None:
        loaded = await self.archive.load(entry.commit)
        page = loaded.page
        if entry.annotation:
            page = f"note added later:\n{entry.annotation}\n\n{page}"
        title = clean_line(f"{entry.label or entry.id} ({entry.id})", 120)
        self.app.push_screen(PageDialog(title, page_text(page)))

    def action_mark(self) -> None:
        entry = self._highlighted
        if entry is not None:
            self._marked = None if self._marked == entry.id else entry.id
            self._fill()

    def action_diff(self) -> None:
        entry = self._highlighted
        if entry is None:
            self._tell("nothing to compare: no snapshot", bad=True)
            return
        other = next((each for each in self._entries if each.id == self._marked), None)
        if other is None or other is entry:
            row = self._entries.index(entry) + 1
            other = self._entries[row] if row < len(self._entries) else None
        if other is None:
            self._tell("nothing to compare: space marks another snapshot first", bad=True)
            return
        older, newer = sorted((entry, other), key=self._entries.index, reverse=True)
        self._work(partial(self._show_diff, older, newer), "page")

    async def _show_diff(self, older: Entry, newer: Entry) -> None:
        from snapshots.diff import compare

        before = await self.archive.load(older.commit)
        after = await self.archive.load(newer.commit)
        title = f"{older.label or older.id}  ->  {newer.label or newer.id}"
        text = results_text(compare(before.snapshot, after.snapshot), max(self.size.width - 8, 40))
        self.app.push_screen(PageDialog(clean_line(title, 160), text))

    # Acts

    def action_roll_back(self) -> None:
        entry = self._highlighted
        if entry is None:
            self._tell("nothing to roll back to: no snapshot", bad=True)
        elif self._free():
            self._work(partial(self._preview, entry), "act")

    async def _preview(self, entry: Entry) -> None:
        """Shows what the rollback would do, and does it where the operator says so."""
        self._begin(f"looking at {clean_line(entry.id)}")
        try:
            seen = await self.archive.preview(entry, self._author)
        finally:
            self._begin("")
        running = "1 request is" if self._in_flight == 1 else f"{self._in_flight} requests are"
        effect = f"{running} in flight. " if self._in_flight else ""
        effect += "A new commit, then applied and measured." if seen.allowed else "Refused: see above."
        dialog = RollbackDialog(Text(clean_text("\n".join(seen.lines))), effect, seen.allowed)

        def chosen(choice: Choice | None) -> None:
            if choice is not None:
                self._work(partial(self._roll_back, seen, choice), "act")

        self.app.push_screen(dialog, chosen)

    async def _roll_back(self, seen: Foreseen, choice: Choice) -> None:
        self._begin("rolling back")
        try:
            done = await self.archive.roll_back(seen, choice, self._author, self._begin)
        finally:
            self._begin("")
            await self._load()
        words = f"rolled back to {seen.entry.id}: {done.verdict}"
        self._judge("; ".join((words, *done.notes)), done.back)

    def action_verify(self) -> None:
        entry = self._highlighted
        if entry is None:
            self._tell("nothing to verify: no snapshot", bad=True)
        elif self._free():
            self._work(partial(self._verify, entry), "act")

    async def _verify(self, entry: Entry) -> None:
        self._begin("measuring")
        try:
            back, words = await self.archive.verify(entry.commit, self._begin)
        finally:
            self._begin("")
        self._judge(f"{entry.id}: {words}", back)

    def _judge(self, words: str, back: bool | None) -> None:
        """Keeps a verdict below the list until the next act, for it is longer than a notice."""
        panel = self.query_one("#verdict", Panel)
        panel.display = True
        panel.put(styled(clean_line(words), "bold" if back is None else "good" if back else "bad"))
        self._tell(words, bad=back is False)

    def saved(self) -> None:
        """A snapshot was saved from somewhere; the list is read again if it is on screen."""
        if self.composed and self.is_attached:
            self.action_reload()

    def _free(self) -> bool:
        if self.archive.is_acting or self._doing:
            self._tell("wait: another save, rollback or measurement runs", bad=True)
            return False
        return True

    def _begin(self, words: str) -> None:
        """Says above the list what is being done; empty when it is done."""
        if words:
            panel = self.query_one("#verdict", Panel)
            panel.put(Text())
            panel.display = False
        self._doing = words
        self._tell_store()

    def _tell(self, text: str, bad: bool = False) -> None:
        self.app.post_message(self.Told(text, bad))

    def _work(self, act: Callable[[], Coroutine[Any, Any, None]], group: str) -> None:
        """Runs `act` beside the screen; what goes wrong is told in one line."""

        async def guarded() -> None:
            try:
                await act()
            except Exception as error:
                self._tell(explain(error), bad=True)

        self.run_worker(guarded, name=group, group=group, exclusive=group in ("load", "page"))
