"""What a prompt is asked with beside its text: system prompt and sampling, as typed and as sent. No widgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from console.formats import clean_line
from runtime.interface import SamplingParams

FIELDS: tuple[tuple[str, str], ...] = (
    ("temperature", "0 to 2, 0 is greedy"),
    ("top_p", "above 0, to 1"),
    ("top_k", "0 is no limit"),
    ("seed", "empty: drawn for each answer"),
    ("max_tokens", "1 or more"),
    ("stop", r"up to 4, comma between; \n \t \, \\"),
    ("logprobs", "0 to 20 likeliest besides; empty: none"),
)
"""Sampling fields and what they take; an empty one follows the runtime's default."""
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", ",": ",", "\\": "\\"}


@dataclass(frozen=True, slots=True)
class AskSettings:
    """Goes with every request of a conversation."""

    system: str = ""
    sampling: SamplingParams = SamplingParams()

    @property
    def summary(self) -> str:
        """What differs from the runtime's defaults, in one line; empty if nothing does."""
        parts = [
            f"{name} {_typed(self.sampling, name)}" for name, _ in FIELDS if _typed(self.sampling, name) != ""
        ]
        if self.system:
            parts.append(f"system: {clean_line(self.system, 40)}")
        return " · ".join(parts)

    def typed(self) -> dict[str, str]:
        """Field by field as it is typed."""
        return {name: _typed(self.sampling, name) for name, _ in FIELDS}


def parse(system: str, fields: Mapping[str, str]) -> AskSettings | str:
    """Settings from what was typed, or one line on the first field that is wrong."""
    values: dict[str, object] = {}
    for name, _ in FIELDS:
        text = fields.get(name, "").strip() if name != "stop" else fields.get(name, "")
        if text == "":
            continue
        if name == "stop":
            values[name] = stop_strings(text)
            continue
        try:
            values[name] = float(text) if name in ("temperature", "top_p") else int(text)
        except ValueError:
            kind = "a number" if name in ("temperature", "top_p") else "a whole number"
            return f"{name}: {clean_line(text, 30)!r} is not {kind}; {dict(FIELDS)[name]}"
    try:
        return AskSettings(system.strip(), SamplingParams.model_validate(values))
    except ValidationError as error:
        wrong = str(error.errors()[0]["loc"][0])
        return f"{wrong}: {clean_line(fields.get(wrong, ''), 30)} is outside its range; {dict(FIELDS)[wrong]}"


def stop_strings(text: str) -> tuple[str, ...]:
    """Stop strings from one line: a comma stands between two, a backslash makes `\\n`, `\\t`, `\\,` and itself."""
    found, current, escaped = [], "", False
    for character in text:
        if escaped:
            current += _ESCAPES.get(character, "\\" + character)
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == ",":
            found.append(current)
            current = ""
        else:
            current += character
    found.append(current + ("\\" if escaped else ""))
    return tuple(part for part in found if part)


def stop_text(stops: tuple[str, ...]) -> str:
    """The line from which `stop_strings` gives `stops`."""
    escapes = {ord(made): f"\\{name}" for name, made in _ESCAPES.items()}
    return ",".join(stop.translate(escapes) for stop in stops)


def _typed(sampling: SamplingParams, name: str) -> str:
    value = getattr(sampling, name)
    if name == "stop":
        return stop_text(value)
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)
