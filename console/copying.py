"""Copies text to the terminal's clipboard by OSC 52, which some terminals ignore, and to a file beside it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from textual.app import App

from layouts.user_files import replace_text, user_home

TERMINAL_CHARS = 70_000
"""Terminals drop longer OSC 52 sequences, or cut them; xterm's limit is about 75 kB of base64."""


def copy(app: App[Any], text: str, what: str) -> tuple[str, bool]:
    """Copies `text`; returns one line that says where it went, and whether that is bad news."""
    sent = len(text.encode("utf-8", "replace")) * 4 // 3 <= TERMINAL_CHARS
    if sent:
        app.copy_to_clipboard(text)
    size = f"{what}, {len(text)} characters"
    path = copied_path()
    try:
        replace_text(path, text, errors="replace")
    except OSError as error:
        problem = f"{path}: {error.strerror or error}"
        if sent:
            return f"{size}: sent to the terminal's clipboard; not to a file as well, {problem}", False
        return f"not copied: too long for the terminal's clipboard, and {problem}", True
    if sent:
        return f"{size}: sent to the terminal's clipboard, and in {short(path)}", False
    return f"{size}: too long for the terminal's clipboard; it is in {short(path)}", False


def copied_path() -> Path:
    """Where the last copied text stands, in the XDG state folder."""
    return user_home("state") / "copied.txt"


def short(path: Path) -> str:
    """`path` as a person writes it."""
    with contextlib.suppress(ValueError, RuntimeError):
        return f"~/{path.relative_to(Path.home())}"
    return str(path)
