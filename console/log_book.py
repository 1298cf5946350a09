"""What the console keeps of log lines: all of them for the Log screen, the events among them for the Live screen."""

from __future__ import annotations

import time
from collections import deque

from console.formats import clean_line
from runtime.interface import LogLine

KEEP_LINES = 5000
"""Log lines that are kept; older ones leave."""
KEEP_EVENTS = 100
EVENT_LEVELS = ("warning", "error", "critical", "fatal")


class LogBook:
    """Bounded; text is cleaned and cut when it comes in, so that nothing in it can break or style a screen."""

    def __init__(self) -> None:
        self._lines: deque[LogLine] = deque(maxlen=KEEP_LINES)
        self._events: deque[LogLine] = deque(maxlen=KEEP_EVENTS)
        self._drawn: tuple[LogLine, ...] = ()
        self._drawn_at = 0
        self.total = 0
        """Lines ever recorded."""

    @property
    def lines(self) -> tuple[LogLine, ...]:
        """The latest lines, oldest first."""
        if self._drawn_at != self.total:
            self._drawn, self._drawn_at = tuple(self._lines), self.total
        return self._drawn

    @property
    def events(self) -> tuple[LogLine, ...]:
        """The latest events, oldest first: changes, failures, snapshots, notices."""
        return tuple(self._events)

    def record(self, *lines: LogLine) -> None:
        """Keeps log lines; warnings and worse are events too."""
        self.total += len(lines)
        for line in lines[-KEEP_LINES:]:
            kept = _clean(line)
            self._lines.append(kept)
            if kept.level in EVENT_LEVELS:
                self._events.append(kept)

    def event(self, text: str, level: str = "info", time_s: float | None = None) -> None:
        """Keeps something that happened, now unless `time_s` says when."""
        line = LogLine(time_s=time.time() if time_s is None else time_s, level=level, text=text)
        self.record(line)
        if line.level not in EVENT_LEVELS:
            self._events.append(self._lines[-1])


def _clean(line: LogLine) -> LogLine:
    text = clean_line(line.text)
    return line if text == line.text else line.model_copy(update={"text": text})
