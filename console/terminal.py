"""The terminal while the console owns it: who may write to it, and how it is given back.

Textual draws on file descriptor 2, where native libraries and child processes write as well. `Terminal` moves
the drawing to a duplicate and turns descriptors 1 and 2 into a pipe whose lines reach the console's log.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from textual.app import App
    from textual.driver import Driver
    from textual.events import Key
    from textual.message import Message

STOP_S = 4.0
KEEP_LINES = 1000
MAX_PARTIAL = 4096
"""Characters of a line without end that are held back before they count as a line."""
RESTORE = "".join(
    "\x1b[" + code
    for code in (
        "?1000l",
        "?1003l",
        "?1015l",
        "?1006l",
        "?2004l",
        "?1004l",
        "?7h",
        "<u",
        "?1049l",
        "?25h",
        "0m",
    )
)
"""Mouse, paste and focus reports off, line wrap on, plain keyboard, main screen, cursor shown."""


class _Screen:
    """The text file Textual's driver draws on; a lost terminal is noted, never raised."""

    def __init__(self, fd: int) -> None:
        self._file: IO[str] = os.fdopen(fd, "w", encoding="utf-8", errors="replace", newline="")
        self.lost = False

    def write(self, text: str) -> int:
        if not self.lost:
            try:
                self._file.write(text)
            except (OSError, ValueError):
                self.lost = True
        return len(text)

    def flush(self) -> None:
        if not self.lost:
            try:
                self._file.flush()
            except (OSError, ValueError):
                self.lost = True

    def fileno(self) -> int:
        return self._file.fileno()

    def isatty(self) -> bool:
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._file.close()


class Terminal:
    """Context manager: owns the terminal inside, gives it back as it was outside."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=KEEP_LINES)
        """Captured output, one entry a line; the app takes them out."""
        self.left_out = 0
        """Captured lines that came faster than they were taken and are gone."""
        self.drawing = False
        """True while the terminal is in the app's modes."""
        self.screen: _Screen
        self.stream: IO[str]
        """Writes into the capture; stands in for sys.stdout and sys.stderr."""

    def __enter__(self) -> Terminal:
        sys.stdout.flush()
        sys.stderr.flush()
        self._saved = (os.dup(1), os.dup(2))
        self._attributes = _attributes(0)
        self.screen = _Screen(os.dup(2 if os.isatty(2) else 1))
        self._read, write = os.pipe()
        os.dup2(write, 1)
        os.dup2(write, 2)
        self.stream = os.fdopen(write, "w", encoding="utf-8", errors="replace", buffering=1)
        self._stop = threading.Event()
        self._reader = threading.Thread(target=self._pump, name="ddtree-output", daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in (sys.stdout, sys.stderr, self.stream):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        self._stop.set()
        self._reader.join(timeout=1.0)
        for target, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, target)
            os.close(saved)
        with contextlib.suppress(OSError, ValueError):
            self.stream.close()
        self.restore()
        self.screen.close()
        if not self._reader.is_alive():
            os.close(self._read)

    def restore(self) -> None:
        """Puts the terminal's modes back where the app could not; harmless when it did."""
        if self.drawing:
            self.screen.write(RESTORE)
            self.screen.flush()
            self.drawing = False
        if self._attributes is not None:
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(0, termios.TCSANOW, self._attributes)

    def is_lost(self) -> bool:
        """True once the terminal has hung up."""
        return self.screen.lost or (self._attributes is not None and _attributes(0) is None)

    def size(self) -> tuple[int, int]:
        """(columns, rows); 80 x 24 where the terminal does not tell or says 0."""
        try:
            columns, rows = os.get_terminal_size(self.screen.fileno())
        except (OSError, ValueError):
            columns, rows = 0, 0
        return columns or 80, rows or 24

    def take_lines(self, most: int) -> list[str]:
        """Up to `most` captured lines, oldest first."""
        taken: list[str] = []
        if self.left_out:
            taken.append(f"{self.left_out} lines of output were left out: they came too fast")
            self.left_out = 0
        while self.lines and len(taken) < most:
            taken.append(self.lines.popleft())
        return taken

    def last_line(self) -> str:
        """The last captured line that says something; what a crash ends with."""
        return next((line.strip() for line in reversed(self.lines) if line.strip()), "no reason given")

    def _pump(self) -> None:
        partial = ""
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        while True:
            ready, _, _ = select.select([self._read], [], [], 0.2)
            if not ready:
                if self._stop.is_set():
                    break
                continue
            data = os.read(self._read, 65536)
            if not data:
                break
            *lines, partial = (partial + decode(data)).replace("\r", "\n").split("\n")
            if len(partial) > MAX_PARTIAL:
                lines, partial = [*lines, partial], ""
            lines = [line for line in lines if line.strip()]
            self.left_out += max(0, len(self.lines) + len(lines) - KEEP_LINES)
            self.lines.extend(lines)
        if partial.strip():
            self.lines.append(partial)


class Deadline:
    """Ends the process `seconds` after the first sign to stop, should the orderly end take longer.

    An engine in the middle of loading cannot be interrupted; whoever asked the console to stop must not wait
    for it.
    """

    def __init__(self, terminal: Terminal, seconds: float = STOP_S) -> None:
        self._terminal = terminal
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def begin(self) -> None:
        """Starts the time, once; safe in a signal handler."""
        if self._timer.ident is None:
            with contextlib.suppress(RuntimeError):
                self._timer.start()

    def _end(self) -> None:
        self._terminal.restore()
        os._exit(0)

    def __enter__(self) -> Deadline:
        return self

    def __exit__(self, *_: object) -> None:
        """Disarms, unless a thread is left that the interpreter would wait for at its end."""
        others = (thread for thread in threading.enumerate() if thread is not threading.current_thread())
        if all(thread.daemon for thread in others):
            self._timer.cancel()


def _attributes(fd: int) -> list[Any] | None:
    try:
        return termios.tcgetattr(fd)
    except (termios.error, OSError):
        return None


class KeyFilter:
    """Holds back the pieces of mouse reports that a slow line cut off.

    Textual hands a broken escape sequence on as the keys it spells, here `[`, `<` and digits: `[` would lower the
    budget and digits change the screen. A `[` outside of inputs therefore waits for what comes right behind it.
    """

    TOGETHER_S = 0.02

    def __init__(self, deliver: Callable[[Key], None], typing: Callable[[], bool]) -> None:
        self._deliver = deliver
        self._typing = typing
        self._lock = threading.Lock()
        self._held: Key | None = None
        self._inside = False
        self._last_s = float("-inf")

    def key(self, event: Key) -> None:
        """Takes the next key; delivers it and the held one unless they are pieces of a report."""
        now = time.monotonic()
        together, self._last_s = now - self._last_s < self.TOGETHER_S, now
        self._inside = self._inside and together
        if self._inside:
            return
        with self._lock:
            held, self._held = self._held, None
        if held is not None and event.key == "less_than_sign":
            self._inside = True
            return
        if held is not None:
            self._deliver(held)
        if event.key != "left_square_bracket" or self._typing():
            self._deliver(event)
            return
        self._held = event
        threading.Timer(self.TOGETHER_S, self.release).start()

    def release(self) -> None:
        """Delivers the held key: nothing came right behind it."""
        with self._lock:
            held, self._held = self._held, None
        if held is not None:
            self._deliver(held)


def driver_class(terminal: Terminal) -> type[Driver]:
    """Textual's Linux driver, drawing on the terminal's own descriptor and asking that one for its size."""
    from textual.drivers.linux_driver import LinuxDriver
    from textual.events import Key

    from console.keys import is_typing

    class TerminalDriver(LinuxDriver):
        def __init__(self, app: App[Any], **options: Any) -> None:
            super().__init__(app, **options)
            self._file = terminal.screen  # type: ignore[assignment]
            self._keys = KeyFilter(super().process_message, lambda: is_typing(app))

        def process_message(self, message: Message) -> None:
            if isinstance(message, Key):
                self._keys.key(message)
            else:
                super().process_message(message)

        def _get_terminal_size(self) -> tuple[int, int]:
            return terminal.size()

        def _run_input_thread(self) -> None:
            """Reads keys until told to stop; bytes that are no UTF-8 are left out instead of ending the app."""
            while not self.exit_event.is_set() and not terminal.is_lost():
                try:
                    self.run_input_thread()
                except ValueError:
                    continue
                except OSError:
                    terminal.screen.lost = True

        def _sigcont_application(self, *_: object) -> None:
            """Resumes what was suspended. The kernel sends SIGCONT after the SIGHUP of a lost terminal as well."""
            if not terminal.is_lost() and (terminal.drawing or self._must_signal_resume):
                super()._sigcont_application()  # type: ignore[no-untyped-call]

        def start_application_mode(self) -> None:
            terminal.drawing = True
            super().start_application_mode()  # type: ignore[no-untyped-call]

        def stop_application_mode(self) -> None:
            super().stop_application_mode()
            terminal.drawing = False

    return TerminalDriver
