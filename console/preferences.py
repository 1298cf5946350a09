"""What a console remembers from one start to the next: theme, screen and more. A file that is broken is ignored."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from layouts.user_files import replace_text, user_home

Value = str | int | float | bool
MAX_BYTES = 64 * 1024


@dataclass(frozen=True)
class Preferences:
    theme: str = ""
    screen: str = ""
    values: Mapping[str, Value] = field(default_factory=dict)
    """What screens remember, by names such as `bench.modes`."""


def preference_path(env: Mapping[str, str] = os.environ) -> Path:
    """Where the preferences lie: in the XDG state folder."""
    return user_home("state", env) / "console.json"


class PreferenceFile:
    """Preferences in a JSON file that is the old or the new one at every moment."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> tuple[Preferences, str]:
        """What is remembered, and one line on why it is not, empty otherwise."""
        try:
            with open(self.path, "rb") as file:
                raw = file.read(MAX_BYTES + 1)
            if len(raw) > MAX_BYTES:
                raise ValueError(f"it is larger than {MAX_BYTES} bytes")
            return _parsed(json.loads(raw.decode("utf-8"))), ""
        except FileNotFoundError:
            return Preferences(), ""
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            return Preferences(), f"preferences in {self.path} are ignored: {reason}"

    def save(self, preferences: Preferences) -> str:
        """Remembers; returns one line on why it could not, empty otherwise."""
        text = json.dumps(
            {
                "schema": 1,
                "theme": preferences.theme,
                "screen": preferences.screen,
                "values": dict(preferences.values),
            }
        )
        try:
            replace_text(self.path, text + "\n")
        except OSError as error:
            return f"preferences are not kept in {self.path}: {error.strerror}"
        return ""


def _parsed(answer: object) -> Preferences:
    """What this version knows of a file; raises ValueError for one that holds something else."""
    if not isinstance(answer, dict):
        raise ValueError("it is no JSON object")
    theme, screen, values = answer.get("theme", ""), answer.get("screen", ""), answer.get("values", {})
    if not isinstance(theme, str) or not isinstance(screen, str) or not isinstance(values, dict):
        raise ValueError("theme and screen must be text, values an object")
    kept = {name: value for name, value in values.items() if isinstance(value, str | int | float | bool)}
    return Preferences(theme, screen, kept)
