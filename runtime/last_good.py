"""The configuration that last served well: kept when one has proved itself, tried once when another does not come up.

It lies in the XDG state folder as a plain configuration file, which an operator can read and use with `--config`.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from layouts.user_files import replace_text, user_home
from runtime.config import RuntimeConfig, to_toml, validate
from runtime.interface import ConfigRejected

PROOF_SECONDS = 60.0
"""Seconds without failure after the first verified token until a configuration counts as good."""


def last_good_file(env: Mapping[str, str] = os.environ) -> Path:
    """Where the last good configuration lies."""
    return user_home("state", env) / "last-good.toml"


def keep(config: RuntimeConfig, file: Path) -> None:
    """Make `config` the last good one; the file is the old or the new one at every moment. Raises OSError."""
    replace_text(file, to_toml(config))


def recall(file: Path) -> RuntimeConfig | None:
    """The last good configuration; None where there is none that this version can read."""
    try:
        return validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, ConfigRejected):
        return None


class LastGood:
    """The last good configuration, read again only when its file has changed."""

    def __init__(self, file: Path | None = None) -> None:
        try:
            self._file = file or last_good_file()
        except ImportError:  # a machine that runs engines alone has no state folder
            self._file = Path(os.devnull)
        self._changed_at: int | None = None
        self._config: RuntimeConfig | None = None

    def recall(self) -> RuntimeConfig | None:
        """As `recall`."""
        try:
            changed_at = self._file.stat().st_mtime_ns
        except OSError:
            return None
        if changed_at != self._changed_at:
            self._changed_at, self._config = changed_at, recall(self._file)
        return self._config
