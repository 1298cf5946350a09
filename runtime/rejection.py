"""One line for a person on what cannot be used: the field, its value, what is allowed, the nearest known name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

_COMPARISONS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}
_SHOWN_CHARS = 60


def words_of(error: BaseException) -> str:
    """What an error says, on one line; its kind where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


class CheckpointError(ValueError):
    """A model file or folder cannot be used; the message is one line: the path, the reason, the remedy.

    `exit_code` is what a command ends with: 2, the configuration names something unusable.
    """

    exit_code = 2


@dataclass(frozen=True)
class Rejection:
    """Why one field of a model was refused."""

    field: str | None
    subject: str
    """The field with its value."""
    reason: str

    def line(self, place: str = "") -> str:
        """One line for a person; `place` says where the value stands."""
        return f"{self.subject} ({place}): {self.reason}" if place else f"{self.subject}: {self.reason}"


def rejection(error: ValidationError, model: type[BaseModel], none_word: str = "") -> Rejection:
    """Return the first problem that `model` has with its input.

    An error of type "explained" brings its own reason and, raised for the whole model, `field` and `value` in its
    context. `none_word` is what stands for None in the input, if anything does.
    """
    problem = error.errors(include_url=False)[0]
    context = problem.get("ctx", {})
    name = str(problem["loc"][0]) if problem["loc"] else context.get("field")
    if name is None:
        return Rejection(None, model.__name__, problem["msg"])
    if problem["type"] == "extra_forbidden":
        return Rejection(name, plain(name), f"no such setting{nearest(_as_name(name), model.model_fields)}")
    explained = problem["type"] == "explained" or len(problem["loc"]) > 1
    reason = problem["msg"] if explained else allowed(model.model_fields[name], none_word) or problem["msg"]
    return Rejection(name, f"{name} = {_shown(context.get('value', problem['input']))}", reason)


def allowed(field: FieldInfo, none_word: str = "") -> str | None:
    """Return what a field takes, as "must be a whole number from 0 to 1024, or auto"; None for compound fields."""
    kind, optional = kind_of(field)
    if field.description:
        words = field.description
    elif get_origin(kind) is Literal:
        words = "one of " + ", ".join(map(str, get_args(kind)))
    elif kind is bool:
        words = "true or false"
    elif kind is str:
        words = "text"
    elif kind in (int, float):
        words = ("a whole number" if kind is int else "a number") + _bounds(field)
    else:
        return None
    return f"must be {words}" + (f", or {none_word}" if optional and none_word else "")


def kind_of(field: FieldInfo) -> tuple[Any, bool]:
    """Return (the type of a field without None and annotations, whether None is allowed)."""
    optional = type(None) in get_args(field.annotation)
    kind = (
        next(each for each in get_args(field.annotation) if each is not type(None))
        if optional
        else field.annotation
    )
    return (get_args(kind)[0] if get_origin(kind) is Annotated else kind), optional


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the known name most like `name`, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def plain(text: str) -> str:
    """Return `text` so that it can neither break nor style a terminal, cut to a readable length."""
    safe = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return safe if len(safe) <= _SHOWN_CHARS else safe[:_SHOWN_CHARS] + "..."


def _as_name(name: str) -> str:
    return name.lower().replace("-", "_")


def _bounds(field: FieldInfo) -> str:
    limits = {
        key: _number(getattr(each, key))
        for each in field.metadata
        for key in _COMPARISONS
        if hasattr(each, key)
    }
    if "ge" in limits and "le" in limits:
        return f" from {limits['ge']} to {limits['le']}"
    return " and".join(f" {_COMPARISONS[key]} {value}" for key, value in limits.items())


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _shown(value: Any) -> str:
    try:
        return plain(value if isinstance(value, str) and value else repr(value))
    except (ValueError, RecursionError):  # repr() of a number of thousands of digits, or of lists in lists
        return "a value too large to be shown"
