"""Prompt files: JSON lines of `{"prompt": ...}` or `{"messages": [...]}`, and the field names of public sets."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

BUNDLED = Path(__file__).parent / "prompts"
"""Samples of public evaluation sets (licences beside them): maths, code, chat."""

TEXT_FIELDS = ("prompt", "question", "text", "instruction")


class PromptFileError(ValueError):
    """A prompt file that cannot be read; names the file, the line and what is wrong."""


def read_prompts(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """The first `limit` prompts as `GenerateRequest` fields (`prompt` or `messages`).

    Multi-turn sets (`turns`) give their first turn. Raises PromptFileError.
    """
    prompts: list[dict[str, Any]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise PromptFileError(f"prompt file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as bad:
        raise PromptFileError(f"prompt file {path} cannot be read: {bad}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if limit is not None and len(prompts) == limit:
            break
        prompts.append(_prompt(line, f"prompt file {path}, line {number}"))
    if not prompts:
        raise PromptFileError(f"prompt file {path} holds no prompts")
    return prompts


def bundled_prompts(per_kind: int) -> dict[str, list[dict[str, Any]]]:
    """The first `per_kind` bundled prompts of each kind: maths, code, chat."""
    return {path.stem: read_prompts(path, per_kind) for path in sorted(BUNDLED.glob("*.jsonl"))}


def mixed_prompts(per_kind: int) -> list[dict[str, Any]]:
    """The bundled prompts with their kinds in turn, so that any stretch of them holds every kind."""
    kinds = bundled_prompts(per_kind).values()
    return [prompt for row in itertools.zip_longest(*kinds) for prompt in row if prompt is not None]


def random_prompts(low: int, high: int, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """`count` prompts of `low` to `high` random words of the bundled prompts; the same for the same seed."""
    draws = random.Random(seed)
    words = sorted({word for prompt in mixed_prompts(8) for word in str(prompt.get("prompt", "")).split()})
    return [{"prompt": " ".join(draws.choices(words, k=draws.randint(low, high)))} for _ in range(count)]


def _prompt(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as bad:
        raise PromptFileError(f"{where}: not JSON ({bad})") from None
    if isinstance(row, dict):
        if isinstance(row.get("messages"), list):
            return {"messages": tuple(row["messages"])}
        if isinstance(row.get("turns"), list) and row["turns"]:
            return {"prompt": str(row["turns"][0])}
        for name in TEXT_FIELDS:
            if isinstance(row.get(name), str):
                return {"prompt": row[name]}
    raise PromptFileError(f'{where}: needs {{"prompt": ...}} or {{"messages": [...]}}')
