"""Secrets in text: finding them by line, marking them out, and putting a live file's values back for the marks.

A mark stands for the value of the field before it, so a text with marks is restored from a live text that has those
fields, and from nothing else. Numbers, switches, references to a variable and code are not taken for secrets.
"""

from __future__ import annotations

import re
import string
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from snapshots.content import REDACTED

FIELD_CHARS = 200
"""Most characters before a value that say whose it is."""

_KEYWORD = re.compile(r"key|token|secret|passw(?:or)?d|passphrase|credentials?|auth", re.IGNORECASE)
_AFTER = re.compile(
    r"(?:[_-](?:key|token|value|secret))?(?![A-Za-z0-9_-])[\"']?"
    r"(?:(?P<sep>[ \t]*[=:][ \t]*|[ \t]+is[ \t]+)|[ \t]+)"
    r"(?:\"(?P<double>[^\"\n]+)|'(?P<single>[^'\n]+)|(?P<bare>[^\s\"']+))",
    re.IGNORECASE,
)
_NAME_CHARS = string.ascii_letters + string.digits + "_-"
_OWNER = re.compile(
    r"([A-Za-z0-9_-]*(?:key|token|secret|passw(?:or)?d|passphrase|credentials?|auth|value))[\"']?"
    r"(?:[ \t]*[=:][ \t]*|[ \t]+(?:is[ \t]+)?)[\"']?$",
    re.IGNORECASE,
)
_SHAPES: tuple[tuple[str, tuple[str, ...], re.Pattern[str]], ...] = (
    (
        "private key",
        ("PRIVATE KEY-----",),
        re.compile(
            r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----(?:.*?-----END [A-Z0-9 ]*PRIVATE KEY-----|.*)", re.DOTALL
        ),
    ),
    ("GitHub token", ("gh", "github_pat_"), re.compile(r"\b(?:gh[pousr]|github_pat)_[A-Za-z0-9_]{20,}")),
    ("GitLab token", ("glpat-",), re.compile(r"glpat-[A-Za-z0-9_-]{16,}")),
    ("Hugging Face token", ("hf_",), re.compile(r"hf_(?=[A-Za-z]{0,60}\d)[A-Za-z0-9]{24,}")),
    ("API key", ("sk-",), re.compile(r"sk-(?=[A-Za-z_-]{0,60}\d)[A-Za-z0-9_-]{20,}")),
    ("Slack token", ("xox",), re.compile(r"xox[abeprs]-[A-Za-z0-9-]{10,}")),
    ("AWS access key", ("AKIA", "ASIA"), re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")),
    ("Google API key", ("AIza",), re.compile(r"AIza[A-Za-z0-9_-]{35}")),
    (
        "JSON web token",
        ("eyJ",),
        re.compile(r"\beyJ[A-Za-z0-9_-]{8,200}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}"),
    ),
    (
        "bearer token",
        ("earer ", "EARER "),
        re.compile(r"[Bb](?:earer|EARER) +(?=[^\s\d]{0,60}\d)(?P<value>[A-Za-z0-9._~+/=-]{16,})"),
    ),
    ("password in a URL", ("://",), re.compile(r"://[^\s/:@\"']{0,100}:(?P<value>[^\s/@<{$\"']{1,200})@")),
)
"""What it is, words without which it is not there, and the shape."""
_SURE = re.compile(
    r"(?i:.*(?:passw(?:or)?d|passphrase|secret|credentials?|(?:api|access|secret|private|auth)[_-]?key"
    r"|(?:api|access|auth|bearer|refresh|hf|hub)[_-]?token))"
)
"""Names that stand for nothing but a secret."""
_NO_VALUE = re.compile(
    r"""(?xi)
    [-+]?[0-9.]{1,8}                               # a number
    | (?:true|false|none|null|yes|no|on|off|auto)  # a switch
    | [$%{<(\[].*                                  # a variable, a placeholder, a mark
    | (?:\.{0,2}/|~/).*                            # a path
    | [*x.]+ | (?:change|replace)[_-]?me | your[_-].* | example.* | (?:my[_-])?(?:api[_-])?(?:key|token)
    | empty | dummy.* | test | password | secret | str(?:ing)?,?
    """
)
_CODE = re.compile(r".*[(\[{}\])].*|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+,?;?")
_RANDOM = re.compile(r"(?=(?:\D*\d){2})(?=[^a-z]*[a-z])(?=[^A-Z]*[A-Z])[A-Za-z0-9+/=_-]{20,}")


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
    for what, words, shape in _SHAPES:
        if any(word in text for word in words):
            for match in shape.finditer(text):
                start, end = match.span("value" if "value" in shape.groupindex else 0)
                found.append(_Span(start, end, _field(_before(text, start)), what))
    for keyword in _KEYWORD.finditer(text):
        span = _named_secret(text, keyword)
        if span is not None:
            found.append(span)
    covered = [match.span() for match in re.finditer(re.escape(REDACTED), text)]
    kept: list[_Span] = []
    for span in found:
        if any(span.start < end and start < span.end for start, end in covered):
            continue
        covered.append((span.start, span.end))
        kept.append(span)
    return sorted(kept, key=lambda span: span.start)


def _before(text: str, place: int) -> str:
    return text[max(place - FIELD_CHARS, 0) : place]


def _field(before: str) -> str:
    """What the value after `before` belongs to: the name right before it, else the line's text up to it."""
    line = before[-FIELD_CHARS:].rpartition("\n")[2]
    owner = _OWNER.search(line)
    return owner[1].lstrip("-") if owner else line.strip()


def _named_secret(text: str, keyword: re.Match[str]) -> _Span | None:
    """The value beside a telling name if it is one: a literal, not code, a number or a reference."""
    after = _AFTER.match(text, keyword.end())
    if after is None:
        return None
    start, end = next(after.span(name) for name in ("double", "single", "bare") if after[name])
    before = _before(text, keyword.start())
    name = before[len(before.rstrip(_NAME_CHARS)) :] + text[keyword.start() : start]
    full = re.split(r"[\s\"'=:]", name, maxsplit=1)[0]
    field = full.lstrip("-")
    value, separator, quoted = text[start:end], after["sep"], after["bare"] is None
    if (separator is None and not full.startswith("--")) or _NO_VALUE.fullmatch(value):
        return None
    if not _is_secret_value(field, value, separator, quoted, full.startswith("--")):
        return None
    return _Span(start, end, _field(_before(text, start)), f"value of {field}")


def _is_secret_value(field: str, value: str, separator: str | None, quoted: bool, is_flag: bool) -> bool:
    sure = bool(_SURE.fullmatch(field))
    if (is_flag and field not in ("key", "auth")) or (separator == "=" and field.isupper() and "_" in field):
        return len(value) >= 4
    if _CODE.fullmatch(value):
        return False
    if not sure:
        return bool(_RANDOM.fullmatch(value))
    # A bare value of a name in small letters is prose or code, where secrets have digits and words have few.
    return len(value) >= 4 if quoted else len(value) >= 6 and any(char.isdigit() for char in value)


def _is_secret_variable(name: str, value: str) -> bool:
    last = re.split("[_-]", name.lower())[-1]
    return bool(value) and bool(_KEYWORD.fullmatch(last)) and not _NO_VALUE.fullmatch(value)
