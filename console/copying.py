"""Copies text to the terminal's clipboard by OSC 52, which some terminals ignore, and to a file beside it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

from textual.app import App

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
        _write(path, text)
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
    import platformdirs

    return platformdirs.user_state_path("ddtree") / "copied.txt"


def short(path: Path) -> str:
    """`path` as a person writes it."""
    with contextlib.suppress(ValueError, RuntimeError):
        return f"~/{path.relative_to(Path.home())}"
    return str(path)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace", newline="") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
