"""The runtime's log: a file in the XDG state folder, or stderr (as text or JSON) where a service writes it.

Keys never reach it: what a formatter writes is searched for them. Prompts reach it only where `show_prompts` was asked
for. Records may carry fields (`extra={"fields": {...}}`); the request id of the HTTP request at hand is added to each.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal

from layouts.user_files import user_home
from runtime.interface import GenerateRequest, LogLine, RequestStats

MAX_BYTES = 2_000_000
LOGGER = logging.getLogger("ddtree")
ACCESS = logging.getLogger("ddtree.access")
PROMPTS = logging.getLogger("ddtree.prompts")
PROMPTS.disabled = True
REQUEST_ID: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)
"""Id of the HTTP request this task answers."""

Format = Literal["text", "json"]


def log_file() -> Path:
    """Where the log is kept unless it goes to stderr."""
    return user_home("state") / "ddtree.log"


def log_place() -> str:
    """Where a person finds the log of this process, in words."""
    to_file = any(isinstance(each, RotatingFileHandler) for each in LOGGER.handlers)
    return str(log_file()) if to_file else "the log on stderr"


def start_logging(level: str) -> None:
    """Sends the `ddtree` logger to its file, once; where no file can be written nothing is logged."""
    set_level(level)
    if any(not isinstance(each, WatchedLog) for each in LOGGER.handlers):
        return
    handler: logging.Handler
    try:
        path = log_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = LogFile(path, maxBytes=MAX_BYTES, backupCount=1, delay=True, encoding="utf-8")
    except OSError:
        handler = logging.NullHandler()
    _install(handler, TextFormatter())


def log_to_stderr(level: str, style: Format = "text", *, show_prompts: bool = False) -> None:
    """Sends the log to stderr, where a service manager or a container collects it."""
    set_level(level)
    _install(LogStream(sys.stderr), JsonFormatter() if style == "json" else TextFormatter())
    PROMPTS.disabled = not show_prompts


def watch_log(post: Callable[[LogLine], object]) -> WatchedLog:
    """Hands what is logged on to `post` as well, until `unwatch_log`; access lines and prompts stay where they are."""
    watched = WatchedLog(post)
    formatters = [each.formatter for each in LOGGER.handlers if isinstance(each.formatter, _Masking)]
    watched.formatter.secrets = tuple({secret for each in formatters for secret in each.secrets})
    LOGGER.addHandler(watched)
    return watched


def unwatch_log(watched: WatchedLog) -> None:
    """Ends what `watch_log` began."""
    LOGGER.removeHandler(watched)


def mask(*secrets: str | None) -> None:
    """Shows `secrets` as [key] from then on, wherever a line would show them."""
    for handler in LOGGER.handlers:
        if isinstance(handler.formatter, _Masking):
            handler.formatter.secrets = tuple(filter(None, secrets))


def set_level(level: str) -> None:
    """Sets the least level that is logged: debug, info, warning or error."""
    LOGGER.setLevel(level.upper())


def adopt(name: str) -> None:
    """Sends warnings and errors of another library's logger to the same place."""
    theirs = logging.getLogger(name)
    theirs.handlers, theirs.propagate = list(LOGGER.handlers), False
    theirs.setLevel(logging.WARNING)


def log_prompt(request: GenerateRequest) -> str | None:
    """Logs the prompt where the operator asked for prompts; returns the id of the HTTP request at hand, if any."""
    if not PROMPTS.disabled:
        asked = request.model_dump(include={"prompt", "messages", "prompt_token_ids"}, exclude_none=True)
        PROMPTS.info("prompt", extra={"fields": {"client": request.client} | asked})
    return REQUEST_ID.get()


def log_request(stats: RequestStats, error: str | None, http_request: str | None) -> None:
    """One line of figures for a finished request; no text of it."""
    level = logging.WARNING if stats.finish_reason == "error" else logging.INFO
    fields = {"http_request": http_request, "error": error} | stats.model_dump(
        exclude={"kind", "state", "accept_counts", "age_s"}
    )
    known = {name: value for name, value in fields.items() if value is not None}
    LOGGER.log(level, "request finished", extra={"fields": known})


class _Masking(logging.Formatter):
    secrets: tuple[str, ...] = ()


class TextFormatter(_Masking):
    """`TIME LEVEL message name=value ...`, one line a record save for tracebacks."""

    def __init__(self, style: str = "%(asctime)s %(levelname)s %(message)s") -> None:
        super().__init__(style)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's own name)
        fields = "".join(f" {name}={_value(value)}" for name, value in _fields(record).items())
        return _one_line(super().formatMessage(record)) + fields

    def format(self, record: logging.LogRecord) -> str:
        return str(_masked(super().format(record), self.secrets))


class LogStream(logging.StreamHandler[Any]):
    """Lines to a stream; one that cannot be written is left out, for there is nowhere else to say so."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's own name)
        pass


class LogFile(RotatingFileHandler):
    """Lines to a file; where it cannot be written, as on a full disk, that is said once, in a line on stderr."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's own name)
        if not self._told:
            self._told = True
            with contextlib.suppress(OSError, ValueError):
                reason = getattr(sys.exc_info()[1], "strerror", None) or "it failed"
                print(f"ddtree: the log {self.baseFilename} cannot be written: {reason}", file=sys.stderr)


class WatchedLog(logging.Handler):
    """Records as `LogLine`s; the lines of a traceback come as debug lines behind theirs."""

    formatter: TextFormatter

    def __init__(self, post: Callable[[LogLine], object]) -> None:
        super().__init__()
        self.setFormatter(TextFormatter("%(message)s"))
        self._post = post

    def filter(self, record: logging.LogRecord) -> bool:
        """No access lines, no prompts, nothing that is told to the watchers in another way."""
        return record.name not in (ACCESS.name, PROMPTS.name) and getattr(record, "watched", True)

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelname.lower()
        for text in self.format(record).splitlines():
            self._post(LogLine(time_s=record.created, level=level, text=text))
            level = "debug"


class JsonFormatter(_Masking):
    """One JSON object a line: time (ISO 8601, UTC), level, logger, message, the record's fields, and its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        } | _fields(record)
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(_masked(entry, self.secrets), default=str)


def _install(handler: logging.Handler, formatter: logging.Formatter) -> None:
    handler.setFormatter(formatter)
    LOGGER.propagate = False
    for old in [each for each in LOGGER.handlers if not isinstance(each, WatchedLog)]:
        LOGGER.removeHandler(old)
        old.close()
    LOGGER.addHandler(handler)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    request_id = REQUEST_ID.get()
    given: Mapping[str, Any] = getattr(record, "fields", {})
    return ({"http_request": request_id} if request_id else {}) | dict(given)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _masked(value: Any, secrets: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, "[key]")
        return value
    if isinstance(value, Mapping):
        return {name: _masked(each, secrets) for name, each in value.items()}
    return [_masked(each, secrets) for each in value] if isinstance(value, list | tuple) else value
