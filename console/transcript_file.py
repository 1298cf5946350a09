"""A conversation as a file: Markdown to read, JSON to work with. An existing file is never touched."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from console.ask_settings import AskSettings
from console.conversation import Turn
from console.formats import duration, number, rate

SCHEMA = 1


def default_path(now_s: float) -> Path:
    """A name in the home folder that says when."""
    return free_path(Path.home() / f"ddtree-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now_s))}.md")


def free_path(path: Path) -> Path:
    """`path`, or where it exists its first numbered neighbour that does not."""
    found, count = path, 1
    while found.exists() or found.is_symlink():
        count += 1
        found = path.with_name(f"{path.stem}-{count}{path.suffix}")
    return found


def save(path: Path, turns: Sequence[Turn], settings: AskSettings, facts: dict[str, Any]) -> None:
    """Writes the turns to a new file of mode 0600; `facts` name what answered.

    Raises OSError, FileExistsError among them.
    """
    text = as_json(turns, settings, facts) if path.suffix == ".json" else as_markdown(turns, settings, facts)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8", errors="replace", newline="") as file:
        file.write(text)


def as_markdown(turns: Sequence[Turn], settings: AskSettings, facts: dict[str, Any]) -> str:
    lines = ["# Conversation", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    if settings.system:
        lines += ["", "## System", "", settings.system]
    for turn in turns:
        lines += ["", "## Prompt", "", turn.prompt, "", "## Answer", "", turn.text, "", f"*{_figures(turn)}*"]
    return "\n".join(lines) + "\n"


def _figures(turn: Turn) -> str:
    stats = turn.stats
    tokens = stats.output_tokens if stats is not None else len(turn.pieces)
    parts = [f"{tokens} tokens", f"{rate(turn.tok_s)} tok/s", f"accept length {number(turn.accept_length)}"]
    if stats is not None:
        parts += [f"mode {stats.mode}", f"TTFT {duration(stats.ttft_s)}", f"ended: {stats.finish_reason}"]
    if turn.seed is not None:
        parts.append(f"seed {turn.seed}")
    if turn.error:
        parts.append(turn.error)
    return " · ".join(parts)


def as_json(turns: Sequence[Turn], settings: AskSettings, facts: dict[str, Any]) -> str:
    return json.dumps(
        {
            "schema": SCHEMA,
            "facts": facts,
            "system": settings.system,
            "sampling": settings.sampling.model_dump(mode="json", exclude_defaults=True),
            "turns": [
                {
                    "prompt": turn.prompt,
                    "answer": turn.text,
                    "seed": turn.seed,
                    "tokens": [piece.model_dump(mode="json", exclude_none=True) for piece in turn.pieces],
                    "figures": turn.stats.model_dump(mode="json") if turn.stats is not None else None,
                    "error": turn.error or None,
                }
                for turn in turns
            ],
        },
        indent=1,
        ensure_ascii=True,
    )
