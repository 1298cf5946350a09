"""The load of a bench as it is typed, checked, and turned into the parameters of a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from console.formats import clean_line
from runtime.connect import prompts_of

MODES = ("off", "chain", "tree")


class WrongLoad(ValueError):
    """A part of a load that is typed wrongly; one line naming it."""


@dataclass(frozen=True, slots=True)
class Load:
    """Every combination of modes, budgets, concurrency and temperatures is a case."""

    modes: str = "off,chain,tree"
    tree_budgets: str = ""
    concurrency: str = "1"
    temperatures: str = "0"
    prompts: str = ""
    prompts_per_kind: str = "2"
    max_tokens: str = "64"
    repetitions: str = "3"
    duration_s: str = ""
    under_load: str = "no"

    def parameters(self) -> dict[str, Any]:
        """The parameters of the job; raises WrongLoad."""
        chosen = self.prompts.strip()
        return {
            "modes": _list("modes", self.modes, _mode),
            "tree_budgets": _list("tree_budgets", self.tree_budgets, int),
            "concurrency": _list("concurrency", self.concurrency, int),
            "temperatures": _list("temperatures", self.temperatures, float),
            "max_tokens": _one("max_tokens", self.max_tokens, int),
            "repetitions": _one("repetitions", self.repetitions, int),
            "under_load": _yes("under_load", self.under_load),
            **({"duration_s": _one("duration_s", self.duration_s, float)} if self.duration_s.strip() else {}),
            **(
                {"prompts": _prompts(chosen)}
                if chosen
                else {"prompts_per_kind": _one("prompts_per_kind", self.prompts_per_kind, int)}
            ),
        }

    def words(self) -> str:
        """The load in two lines."""
        budgets = self.tree_budgets.strip() or "in force"
        prompts = self.prompts.strip() or f"bundled, {self.prompts_per_kind} of each kind"
        each = f"{self.duration_s} s a case" if self.duration_s.strip() else "each prompt once"
        times = f"{self.repetitions} repetition{'' if self.repetitions.strip() == '1' else 's'}"
        beside = "; beside other requests" if self.under_load.strip().lower() in ("y", "yes") else ""
        return (
            f"modes {self.modes} · budgets {budgets} · concurrency {self.concurrency} · T {self.temperatures}\n"
            f"prompts {prompts} · {self.max_tokens} tokens · {each} · {times}{beside}"
        )


EXPLAINED: Mapping[str, str] = {
    "modes": "off, chain, tree",
    "tree_budgets": "such as 4,8,16; empty: the one in force",
    "concurrency": "requests at once, such as 1,4",
    "temperatures": "0 to 2, such as 0,0.7",
    "prompts": "file of JSON lines; empty: bundled",
    "prompts_per_kind": "bundled: maths, code, chat",
    "max_tokens": "output tokens a request",
    "repetitions": "of every case, interleaved",
    "duration_s": "seconds a case; empty: each prompt once",
    "under_load": "yes: beside other clients' requests",
}


class LoadDialog(ModalScreen[Load | None]):
    """Asks for a load; None when left with Esc."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "dismiss", "Leave", tooltip="Leave the load as it is."),
        Binding("down", "app.focus_next", "next", show=False, tooltip="To the next line."),
        Binding("up", "app.focus_previous", "previous", show=False, tooltip="To the line before."),
    ]

    def __init__(self, load: Load) -> None:
        super().__init__()
        self._load = load

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog wide"):
            yield Static("Load of the bench", classes="title", markup=False)
            with VerticalScroll(can_focus=False):
                for name, note in EXPLAINED.items():
                    with Horizontal(classes="row"):
                        yield Static(name, classes="row_name", markup=False)
                        yield Input(
                            getattr(self._load, name),
                            id=name,
                            compact=True,
                            select_on_focus=False,
                            classes="row_value",
                        )
                        yield Static(note, classes="row_note hint", markup=False)
            yield Static("", id="wrong", markup=False)
            yield Static("Enter keeps the load · up/down move · Esc leaves", classes="hint", markup=False)

    def on_input_submitted(self, _event: Input.Submitted) -> None:
        typed = {name: self.query_one(f"#{name}", Input).value for name in EXPLAINED}
        load = dataclasses.replace(self._load, **typed)
        try:
            load.parameters()
        except WrongLoad as wrong:
            self.query_one("#wrong", Static).update(clean_line(str(wrong), 200))
        else:
            self.dismiss(load)


def _mode(text: str) -> str:
    if text not in MODES:
        raise ValueError
    return text


def _yes(name: str, text: str) -> bool:
    word = text.strip().lower()
    if word not in ("yes", "y", "no", "n", ""):
        raise WrongLoad(f"{name} = {clean_line(text, 40)}: must be yes or no")
    return word in ("yes", "y")


def _one(name: str, text: str, kind: Callable[[str], Any]) -> Any:
    values = _list(name, text, kind)
    if len(values) != 1:
        raise WrongLoad(f"{name} = {clean_line(text, 40) or 'nothing'}: must be one number")
    return values[0]


def _list(name: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        values = [kind(each.strip()) for each in text.split(",") if each.strip()]
    except ValueError:
        what = {int: "whole numbers", float: "numbers"}.get(kind, f"out of {', '.join(MODES)}")  # type: ignore[call-overload]
        raise WrongLoad(f"{name} = {clean_line(text, 40)}: must be {what}, parted by commas") from None
    return list(dict.fromkeys(values))


def _prompts(file: str) -> list[dict[str, Any]]:
    try:
        return prompts_of(Path(file).expanduser())
    except ValueError as wrong:
        raise WrongLoad(f"prompts: {wrong}") from None
