"""Figures and foreign text as the console prints them: units, "n/a" for unknown, no control characters."""

from __future__ import annotations

import math
import re
import time

from rich.cells import cell_len, set_cell_size

NA = "n/a"
MAX_LINE = 400
"""Most characters of one log line that are kept."""

_ZERO_WIDTH = frozenset((0xAD, 0x180E, *range(0x200B, 0x200E), *range(0x2060, 0x2065), 0xFEFF))
_VARIANTS = frozenset(range(0xFE00, 0xFE10))
_MARKS = "[\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff]"
_PILED_UP = re.compile(f"({_MARKS}{{4}}){_MARKS}+")
"""More marks over one character than any script has."""
_BIDI = frozenset(range(0x202A, 0x202F)) | frozenset(range(0x2066, 0x206A)) | {0x061C, 0x200E, 0x200F}


def _cleaned(code: int) -> str | None:
    if code in (0x2028, 0x2029):
        return "\n"
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if 0x80 <= code < 0xA0 or 0xD800 <= code < 0xE000:
        return "\ufffd"
    return None


_CONTROLS: dict[int, str | None] = {
    code: _cleaned(code)
    for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0xD800, 0xE000))
    if code != 0x0A
}
_CONTROLS |= dict.fromkeys(_BIDI | _ZERO_WIDTH | _VARIANTS)
_CONTROLS[0x09] = "    "


def clean_text(text: str) -> str:
    """Text that draws as text only.

    Control characters become their visible pictures (U+2400 ff.), C1 controls and lone surrogates U+FFFD;
    marks that reorder a line, what has no width or changes another's, and all but four marks over one character are
    dropped, so that a line is as wide in the terminal as it was counted; newlines stay.
    """
    return _PILED_UP.sub(r"\1", text.replace("\r\n", "\n").translate(_CONTROLS))


def pasted_text(text: str) -> str:
    """`clean_text` of a paste, in which terminals send their lines with the Enter key's code between them."""
    return clean_text(text.replace("\r\n", "\n").replace("\r", "\n"))


def clean_line(text: str, limit: int = MAX_LINE) -> str:
    """`clean_text` on one line of at most `limit` characters; a cut is marked."""
    if len(text) <= limit and text.isascii() and text.isprintable():
        return text
    text = clean_text(text[: limit + 1]).replace("\n", " ")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def fitted(text: str, width: int, right: bool = False) -> str:
    """Foreign text on exactly `width` cells; a cut is marked."""
    line = clean_line(text, 300)
    if cell_len(line) > width:
        return set_cell_size(line, max(width - 1, 0)) + "…"
    padding = " " * (width - cell_len(line))
    return padding + line if right else line + padding


def rate(value: float | None) -> str:
    """Tokens per second, without the unit."""
    if value is None or not math.isfinite(value):
        return NA
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def number(value: float | None, digits: int = 2) -> str:
    return NA if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def count(value: int | None) -> str:
    return NA if value is None else str(value)


def percent(share: float | None) -> str:
    """A share of 0 to 1 as a percentage."""
    return NA if share is None or not math.isfinite(share) else f"{share * 100:.0f} %"


def duration(seconds: float | None) -> str:
    """Milliseconds under one second, else seconds; minutes from two minutes on."""
    if seconds is None or not math.isfinite(seconds):
        return NA
    if seconds < 0.01:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def size(num_bytes: int | None) -> str:
    """Bytes in powers of 1024."""
    if num_bytes is None:
        return NA
    value, unit = float(num_bytes), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def used_of(used: int | None, total: int | None) -> str:
    """As in 3.1 of 7.8 GiB; the parts that are unknown read n/a."""
    if used is None and total is None:
        return NA
    part, whole = size(used), size(total)
    value, _, unit = part.partition(" ")
    return f"{value if unit and whole.endswith(f' {unit}') else part} of {whole}"


def temperature(value: float | None) -> str:
    """A sampling temperature as it is typed: no needless zeros."""
    return NA if value is None else f"{value:g}"


def clock(unix_s: float) -> str:
    """Local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def age(unix_s: float, now_s: float) -> str:
    """How long ago a moment was, in its largest unit."""
    minutes = int(max(now_s - unix_s, 0) // 60)
    if minutes < 1:
        return "just now"
    if minutes < 120:
        return f"{minutes} min ago"
    return f"{minutes // 60} h ago" if minutes < 48 * 60 else f"{minutes // 1440} d ago"


def bar(share: float | None, width: int) -> str:
    """A horizontal bar of `width` cells, eighths of a cell fine; blank where the share is unknown."""
    if width <= 0:
        return ""
    if share is None or not math.isfinite(share):
        return " " * width
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(width)
