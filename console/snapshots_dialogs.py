"""Dialogs of the snapshots: save with a note, read a page, confirm a rollback with what it would do before the eyes."""

from __future__ import annotations

from typing import ClassVar, Literal

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static, TextArea

from console.archive import Archive, explain
from console.dialogs import ScrollDialog
from console.formats import pasted_text
from console.frame import styled
from console.messages import Told

Choice = Literal["all", "settings"]
SAVING = "save"
"""Group of the workers that save; one at a time."""


class NoteArea(TextArea):
    """A note of any number of lines; Tab leaves it."""

    def __init__(self, note: str) -> None:
        super().__init__(
            note,
            id="note",
            tab_behavior="focus",
            highlight_cursor_line=False,
            placeholder="What works, and why.",
        )

    async def _on_paste(self, event: events.Paste) -> None:
        event.text = pasted_text(event.text)


Unsaved = tuple[str, str]
"""Label and note that were typed and not saved."""


class SaveDialog(ModalScreen[Unsaved]):
    """Asks for a label and a note and saves; it stays open with the reason if that is refused.

    What was typed is given back when it is left, so that the next one can begin with it.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "leave", "Leave", tooltip="Leave without saving; the text is kept."),
        Binding("ctrl+s", "save", "Save", priority=True, tooltip="Save."),
    ]

    class Saved(Message):
        """The snapshot is committed."""

        def __init__(self, words: str, typed: Unsaved) -> None:
            super().__init__()
            self.words, self.typed = words, typed

    def __init__(self, archive: Archive, unsaved: Unsaved = ("", "")) -> None:
        super().__init__()
        self._archive = archive
        self._unsaved = unsaved

    def compose(self) -> ComposeResult:
        label, note = self._unsaved
        yield Vertical(
            Static("Save a snapshot of what runs", classes="title", markup=False),
            Input(label, placeholder="label, one line (Enter saves)", max_length=120, id="label"),
            NoteArea(note),
            Static("", id="wrong", markup=False),
            Static("Tab to the note · ctrl+s saves · Esc leaves", classes="hint", markup=False),
            Horizontal(
                Button("Cancel (Esc)", id="no"),
                Button("Save (ctrl+s)", id="yes", variant="primary"),
                classes="buttons",
            ),
            classes="dialog",
        )

    @property
    def _typed(self) -> Unsaved:
        return self.query_one("#label", Input).value, self.query_one(NoteArea).text

    def action_leave(self) -> None:
        self.dismiss(self._typed)

    def action_save(self) -> None:
        if not self.is_current:  # what it saved has closed it already
            return
        # A worker counts from its making on; the archive knows of a save from its first step on.
        if any(each.group == SAVING and not each.is_finished for each in self.app.workers):
            self._say("a save is running; wait for it")
            return
        if self._archive.is_acting:
            self._say("a rollback or a measurement is running; wait for it")
            return
        self._say("saving")
        # The app's worker: to leave the dialog does not end a save that has begun.
        self.app.run_worker(self._save(*self._typed), name=SAVING, group=SAVING, exit_on_error=False)

    async def _save(self, label: str, note: str) -> None:
        typed, label = (label, note), label.strip()
        try:
            entry = await self._archive.save(label, note)
        except Exception as error:
            if self.is_attached:
                self._say(explain(error), bad=True)
            else:
                self.app.post_message(Told(f"not saved: {explain(error)}", bad=True))
            return
        self.app.post_message(self.Saved(f"saved {entry.id} {label}".strip(), typed))
        if self.is_current:
            self.dismiss(("", ""))

    def _say(self, words: str, bad: bool = False) -> None:
        self.query_one("#wrong", Static).update(styled(words, "bad" if bad else ""))

    def on_input_submitted(self, _event: Input.Submitted) -> None:
        self.action_save()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "yes":
            self.action_save()
        else:
            self.action_leave()


class PageDialog(ScrollDialog[None]):
    """Text to be read: a snapshot's page, or two snapshots beside each other."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter,ctrl+c", "dismiss", "Close", tooltip="Back to the list."),
        Binding("j,down", "scroll(1)", "down", show=False, tooltip="Down."),
        Binding("k,up", "scroll(-1)", "up", show=False, tooltip="Up."),
        Binding("pagedown,space", "scroll(15)", "page down", show=False, tooltip="A page down."),
        Binding("pageup", "scroll(-15)", "page up", show=False, tooltip="A page up."),
        Binding("g,home", "scroll(-100000)", "top", show=False, tooltip="To the top."),
        Binding("G,end", "scroll(100000)", "end", show=False, tooltip="To the end."),
    ]

    def __init__(self, title: str, text: Text) -> None:
        super().__init__()
        self._title_text, self._text = title, text

    def compose(self) -> ComposeResult:
        yield Vertical(
            Static(self._title_text, classes="title", markup=False),
            VerticalScroll(Static(self._text, id="page", markup=False), classes="page", can_focus=True),
            Static("j/k scroll · Esc closes", classes="hint", markup=False),
            classes="wide_dialog",
        )


class RollbackDialog(ScrollDialog[Choice | None]):
    """What a rollback would do; Cancel has the focus, and a refused one cannot be confirmed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,n,ctrl+c", "answer('')", "Cancel", tooltip="Leave everything as it is."),
        Binding("y", "answer('all')", "Roll back", tooltip="Do it."),
        Binding("a", "answer('settings')", "Settings alone", tooltip="Leave patched files as they are."),
        Binding("j,down", "scroll(1)", "down", show=False, tooltip="Down."),
        Binding("k,up", "scroll(-1)", "up", show=False, tooltip="Up."),
        Binding("left,right", "app.focus_next", "other", show=False, tooltip="To the next button."),
    ]

    def __init__(self, lines: Text, effect: str, allowed: frozenset[str]) -> None:
        """`allowed`: which of "all" and "settings" may be chosen."""
        super().__init__()
        self._lines, self._effect, self._allowed = lines, effect, allowed

    def compose(self) -> ComposeResult:
        buttons = [Button("Cancel (Esc)", id="no", variant="primary")]
        if "settings" in self._allowed:
            buttons.append(Button("Settings alone (a)", id="settings"))
        if "all" in self._allowed:
            buttons.append(Button("Roll back (y)", id="all", variant="error"))
        yield Vertical(
            Static("Roll back?", classes="title", markup=False),
            VerticalScroll(Static(self._lines, id="preview", markup=False), classes="page", can_focus=False),
            Static(self._effect, id="effect", markup=False),
            Horizontal(*buttons, classes="buttons"),
            classes="wide_dialog",
        )

    def on_mount(self) -> None:
        self.query_one("#no", Button).focus()

    def action_answer(self, choice: str) -> None:
        if not choice:
            self.dismiss(None)
        elif choice in self._allowed:
            self.dismiss("all" if choice == "all" else "settings")

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.action_answer("" if event.button.id == "no" else str(event.button.id))
