"""Secrets in text: finding them by line, marking them out, and putting a live file's values back for the marks.

A mark stands for the value of the field before it, so a text with marks is restored from a live text that has those
fields, and from nothing else. Numbers, switches, references to a variable and code are not taken for secrets.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from snapshots.content import REDACTED

_NAMES = (
    r"(?:[A-Za-z0-9]+[_-])*"
    r"(?:api[_-]?key|key|token|secret|password|passwd|passphrase|credentials?|auth)"
    r"(?:[_-](?:key|id|value|secret))?"
)
_NAMED = re.compile(
    rf"(?:(?P<flag>--)|(?<![A-Za-z0-9_.-]))(?P<field>{_NAMES})(?![A-Za-z0-9_-])[\"']?"
    r"(?:(?P<sep>[ \t]*[=:][ \t]*|[ \t]+is[ \t]+)|[ \t]+)"
    r"(?P<quote>[\"']?)(?P<value>[^\s\"']+)",
    re.IGNORECASE,
)
_SHAPES: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "private key",
        re.compile(
            r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----(?:.*?-----END [A-Z0-9 ]*PRIVATE KEY-----|.*)", re.DOTALL
        ),
    ),
    ("GitHub token", re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{22,})")),
    ("GitLab token", re.compile(r"\bglpat-[A-Za-z0-9_-]{16,}")),
    ("Hugging Face token", re.compile(r"\bhf_[A-Za-z0-9]{20,}")),
    ("API key", re.compile(r"\bsk-[A-Za-z0-9_-]{20,}")),
    ("Slack token", re.compile(r"\bxox[abeprs]-[A-Za-z0-9-]{10,}")),
    ("AWS access key", re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")),
    ("Google API key", re.compile(r"\bAIza[A-Za-z0-9_-]{35}")),
    ("JSON web token", re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}")),
    ("bearer token", re.compile(r"\bbearer\s+(?P<value>[A-Za-z0-9._~+/=-]{16,})", re.IGNORECASE)),
    ("password in a URL", re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s/:@]*:(?P<value>[^\s/@<]+)@")),
)
_OWNER = re.compile(rf"({_NAMES})[\"']?(?:[ \t]*[=:][ \t]*|[ \t]+(?:is[ \t]+)?)[\"']?$", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(rf"(?:^|.*_)(?:{_NAMES})$", re.IGNORECASE)
_NO_SECRET = re.compile(
    r"""(?x)
    [-+]?[0-9.]{1,8}                               # a number
    | (?:true|false|none|null|yes|no|on|off|auto)  # a switch
    | [$%{<(\[].*                                  # a variable, a placeholder, a mark
    | .*[(\[{}\])].*                               # code
    | [A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+,?;?          # an attribute
    | (?:\.{0,2}/|~/).*                            # a path
    | [*x.]+ | (?:change|replace)[_-]?me | your[_-].* | example.*
    """,
    re.IGNORECASE,
)


class SecretMissing(Exception):
    """A text with marks cannot be restored: the live one has no value for a field."""

    exit_code = 3

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Hit:
    """One secret: in what it stands, on which line (from 1), and what it looks like; never its value."""

    name: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.name} line {self.line}: {self.what}"


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    end: int
    field: str
    what: str


def scan(text: str, name: str) -> tuple[Hit, ...]:
    """The secrets in `text`, in order; `name` says in the hits where they stand."""
    return tuple(Hit(name, text.count("\n", 0, span.start) + 1, span.what) for span in _spans(text))


def redact(text: str) -> str:
    """`text` with a mark for every secret; text without one comes back as it is."""
    parts, at = [], 0
    for span in _spans(text):
        parts += [text[at : span.start], REDACTED]
        at = span.end
    return "".join(parts) + text[at:]


def redact_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables with secret values marked out: by the variable's name, or by what the value is."""
    return {
        name: REDACTED if _is_secret_variable(name, value) else redact(value)
        for name, value in variables.items()
    }


def fill(text: str, live: str, name: str) -> str:
    """`text` with the values that the `live` text has for its marks, field by field in order.

    Raises:
        SecretMissing: `live` has no value for a mark; nothing with a mark is ever given back.
    """
    values: defaultdict[str, list[str]] = defaultdict(list)
    for span in _spans(live):
        values[span.field].append(live[span.start : span.end])
    taken: defaultdict[str, int] = defaultdict(int)

    parts = text.split(REDACTED)
    filled = parts[0]
    for after in parts[1:]:
        field = _field(filled)
        known, number = values[field], taken[field]
        if number >= len(known) and len(set(known)) != 1:
            raise SecretMissing(
                f"{name}: the value of {field!r} was redacted and the live file has none;"
                " put it into the live file, or restore this file by hand",
                field,
            )
        taken[field] += 1
        filled += known[min(number, len(known) - 1)] + after
    return filled


def _spans(text: str) -> list[_Span]:
    """What looks like a secret, in order, without overlaps; the more certain shapes win."""
    found: list[_Span] = []
    for what, shape in _SHAPES:
        for match in shape.finditer(text):
            start, end = match.span("value" if "value" in shape.groupindex else 0)
            found.append(_Span(start, end, _field(text[:start]), what))
    for match in _NAMED.finditer(text):
        if _named_secret(match):
            start, end = match.span("value")
            found.append(_Span(start, end, _field(text[:start]), f"value of {match['field']}"))
    covered = [match.span() for match in re.finditer(re.escape(REDACTED), text)]
    kept: list[_Span] = []
    for span in found:
        if any(span.start < end and start < span.end for start, end in covered):
            continue
        covered.append((span.start, span.end))
        kept.append(span)
    return sorted(kept, key=lambda span: span.start)


def _field(before: str) -> str:
    """What the value after `before` belongs to: the name right before it, else the line's text up to it."""
    line = before[before.rfind("\n") + 1 :]
    owner = _OWNER.search(line)
    return owner[1] if owner else line.strip()


def _named_secret(match: re.Match[str]) -> bool:
    """Whether the value beside a telling name is one: a literal, not code, a number or a reference."""
    value, field = match["value"], match["field"]
    if not (match["sep"] or match["flag"]) or _NO_SECRET.fullmatch(value):
        return False
    if match["quote"] or field.isupper() or match["flag"]:
        return len(value) >= 4
    # A bare value of a name in small letters is prose or code, where secrets have digits and words have few.
    shortest = 16 if field.lower() in ("key", "token", "auth") else 6
    return len(value) >= shortest and any(char.isdigit() for char in value)


def _is_secret_variable(name: str, value: str) -> bool:
    return bool(_SECRET_VARIABLE.match(name)) and bool(value) and not _NO_SECRET.fullmatch(value)
