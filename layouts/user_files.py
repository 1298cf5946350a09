"""A user's own files: where each kind of them stands, and how one is replaced as a whole."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

Kind = Literal["config", "data", "state"]


def user_home(kind: Kind, env: Mapping[str, str] = os.environ) -> Path:
    """`ddtree` in the user's folder of this kind (XDG Base Directory Specification: a relative path does not count).

    Raises ImportError where the variable is not set and platformdirs is not installed.
    """
    home = Path(env.get(f"XDG_{kind.upper()}_HOME", ""))
    if not home.is_absolute():
        import platformdirs

        of_kind = {
            "config": platformdirs.user_config_path,
            "data": platformdirs.user_data_path,
            "state": platformdirs.user_state_path,
        }
        home = of_kind[kind]()
    return home / "ddtree"


def replace_text(path: Path, text: str, errors: str = "strict") -> None:
    """Writes a file that is the old or the new one at every moment, for its owner alone; its folder is made.

    `errors`: what becomes of characters that UTF-8 cannot hold. Raises OSError; nothing is left behind then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".draft")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors=errors, newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
