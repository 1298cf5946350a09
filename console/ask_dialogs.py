"""Dialogs of the Prompt screen: with what is asked, where a transcript is saved, the tokens of an answer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static, TextArea

from console.ask_settings import FIELDS, AskSettings, parse
from console.conversation import Turn
from console.copying import short
from console.dialogs import ScrollDialog
from console.draft_tree import share_text, token_label
from console.formats import clean_line
from console.transcript_file import free_path
from runtime.interface import TokenPiece

MOST_TOKENS = 2000
"""Tokens listed; of a longer answer the last ones."""


class SettingsDialog(ModalScreen[AskSettings | None]):
    """Asks for system prompt and sampling; None when left with Esc."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Leave", tooltip="Leave without a change."),
        Binding("ctrl+s", "apply", "Apply", tooltip="Apply; in the system prompt too."),
        Binding("down", "app.focus_next", "next", show=False),
        Binding("up", "app.focus_previous", "previous", show=False),
    ]

    def __init__(self, settings: AskSettings, defaults: dict[str, object]) -> None:
        """`defaults`: the runtime's configuration, which empty fields follow."""
        super().__init__()
        self._settings = settings
        self._defaults = defaults

    def compose(self) -> ComposeResult:
        typed = self._settings.typed()
        with VerticalScroll(classes="dialog", can_focus=False):
            yield Static("Asked with, from the next answer on", classes="title", markup=False)
            yield Static("system prompt (ctrl+s applies from here)", classes="hint", markup=False)
            yield TextArea(self._settings.system, id="system", compact=True)
            for name, takes in FIELDS:
                default = self._defaults.get(name)
                follows = f"{default:g}" if isinstance(default, float) else str(default)
                hint = takes if default is None else f"default {follows}; {takes}"
                yield Horizontal(
                    Static(name, classes="field", markup=False),
                    Input(typed[name], id=f"ask_{name}", compact=True, placeholder=hint),
                    classes="field_row",
                )
            yield Static("", id="wrong", markup=False)
            yield Static("Enter applies · empty: the default · Esc leaves", classes="hint")

    def on_mount(self) -> None:
        self.query_one("#ask_temperature", Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.action_apply()

    def action_apply(self) -> None:
        fields = {name: self.query_one(f"#ask_{name}", Input).value for name, _ in FIELDS}
        found = parse(self.query_one(TextArea).text, fields)
        if isinstance(found, str):
            self.query_one("#wrong", Static).update(Text.assemble((found, "bad")))
        else:
            self.dismiss(found)


class TranscriptDialog(ModalScreen[Path | None]):
    """Asks for a file that does not exist yet; its ending chooses Markdown or JSON."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Leave", tooltip="Save nothing."),
    ]

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def compose(self) -> ComposeResult:
        yield Vertical(
            Static("Save the conversation", classes="title", markup=False),
            Input(short(self._path), id="path", compact=True),
            Static("", id="wrong", markup=False),
            Static(
                "Enter saves · .json is JSON, any other ending Markdown · Esc leaves",
                classes="hint",
                markup=False,
            ),
            classes="dialog",
        )

    def on_mount(self) -> None:
        self.query_one(Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        typed = event.value.strip()
        if not typed:
            self._say("a file name is needed")
            return
        if not typed.isprintable():
            self._say("not a usable name: it has control characters")
            return
        try:
            path = Path(typed).expanduser()
            taken = path.exists() or path.is_symlink()
            folder = path.parent.is_dir()
        except (OSError, RuntimeError, ValueError) as error:
            self._say(f"not a usable name: {clean_line(str(error), 80)}")
            return
        if taken:
            box = self.query_one(Input)
            box.value = short(free_path(path))
            box.cursor_position = len(box.value)
            self._say(f"{clean_line(path.name, 40)} exists and is kept; this name is free")
        elif not folder:
            self._say(f"there is no folder {clean_line(str(path.parent), 60)}")
        else:
            self.dismiss(path)

    def _say(self, text: str) -> None:
        self.query_one("#wrong", Static).update(Text.assemble((text, "bad")))


class TokensDialog(ScrollDialog[None]):
    """Every token of an answer: drafted or the target's own, and its probability where that was asked for."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,l,ctrl+c", "dismiss", "Close", tooltip="Close the list."),
        Binding("j", "scroll(1)", "down", show=False),
        Binding("k", "scroll(-1)", "up", show=False),
    ]

    def __init__(self, turn: Turn) -> None:
        super().__init__()
        self._turn = turn

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="help", can_focus=True):
            yield Static("Tokens of the last answer", classes="title", markup=False)
            yield Static(tokens_text(self._turn), markup=False)
            yield Static("Esc closes this", classes="hint", markup=False)


def tokens_text(turn: Turn) -> Text:
    """One line a token: number, text, drafted or bonus, probability, the likeliest others."""
    text = Text(no_wrap=True, overflow="ellipsis")
    pieces = turn.pieces
    if not any(piece.logprob is not None for piece in pieces):
        text.append(
            "probabilities n/a: they were not asked for; o sets logprobs for the next answers\n", "dim"
        )
    else:
        text.append("probability: the target's own, before temperature and filters\n", "dim")
    first = max(len(pieces) - MOST_TOKENS, 0)
    if first:
        text.append(f"the last {MOST_TOKENS} of {len(pieces)} tokens\n", "dim")
    for number, piece in enumerate(pieces[first:], start=first + 1):
        text.append_text(_token_line(number, piece))
    return text


def _token_line(number: int, piece: TokenPiece) -> Text:
    origin = "drafted" if piece.drafted else "bonus"
    label = token_label(piece.logprob.text if piece.logprob else piece.text, piece.token_id)
    text = Text(f"{number:>5} ", style="")
    cell = Text(label, style="" if piece.drafted else "bold")
    cell.truncate(20, pad=True, overflow="ellipsis")
    text.append_text(cell)
    text.append(f" {origin:<8}", "" if piece.drafted else "bonus")
    if piece.logprob is not None:
        text.append(f"{share_text(math.exp(min(piece.logprob.logprob, 0.0))):>5}  ")
        others = [
            f"{token_label(name, token_id)} {share_text(math.exp(min(value, 0.0)))}"
            for token_id, name, value in piece.logprob.top
            if token_id != piece.token_id
        ]
        text.append(" · ".join(others), "dim")
    text.append("\n")
    return text
