"""What all values of layouts share: frozen models, names, errors.

Pure: neither torch nor anything of the runtime is imported here or anywhere in this package.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Engine = Literal["native", "sglang"]
Mode = Literal["off", "chain", "tree"]
NAME_MARKS = "._-+"
HOST = "host"
"""Name of the hardware "whatever this host has"."""


class LayoutError(Exception):
    """A file or a name that cannot be used; its text is one line made for a person."""

    exit_code = 2


class LayoutRefused(LayoutError):
    """A layout that is understood and cannot be run."""

    exit_code = 3


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _one_line(text: str) -> str:
    if not text.strip() or any(ord(char) < 0x20 or ord(char) == 0x7F for char in text):
        raise ValueError("must be one line of text, not empty")
    return text


def model_name(text: str) -> str:
    """The name evidence knows a model by: the last part of a path, in lower case."""
    last = text.rstrip("/").rpartition("/")[2].lower()
    name = "".join(char if char.isalnum() and char.isascii() or char in NAME_MARKS else "-" for char in last)
    return name.strip(NAME_MARKS)[:64] or "model"


Line = Annotated[str, AfterValidator(_one_line)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.+_-]*$", max_length=64)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
