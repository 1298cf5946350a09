"""The runtime's log: a file in the XDG state folder, since the screen and stderr belong to the operator."""

from __future__ import annotations

import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path

MAX_BYTES = 2_000_000
LOGGER = logging.getLogger("ddtree")


def log_file() -> Path:
    """Where the log is kept."""
    import platformdirs

    return platformdirs.user_state_path("ddtree") / "ddtree.log"


def start_logging(level: str) -> None:
    """Sends the `ddtree` logger to its file, once; where no file can be written nothing is logged."""
    LOGGER.setLevel(level.upper())
    LOGGER.propagate = False
    if LOGGER.handlers:
        return
    handler: logging.Handler
    try:
        path = log_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = RotatingFileHandler(path, maxBytes=MAX_BYTES, backupCount=1, delay=True, encoding="utf-8")
    except OSError:
        handler = logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    LOGGER.addHandler(handler)
