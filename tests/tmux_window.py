"""A real terminal for the real program: keys in, screen out, its settings before and after."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

GIVE_UP_S = 60.0
SIZE = re.compile(r"rows \d+; columns \d+;")


class Tmux:
    """One tmux server of its own with one window, 80x24 by default, running a plain shell."""

    def __init__(self, name: str, folder: Path, columns: int = 80, rows: int = 24) -> None:
        self._base = ["tmux", "-L", name, "-f", "/dev/null"]
        self._folder = folder
        shell = f"env XDG_STATE_HOME={folder / 'state'} PS1='$ ' sh"
        self.run("new-session", "-d", "-s", "w", "-x", str(columns), "-y", str(rows), shell)
        self.run("set", "-g", "history-limit", "1000")
        self.until("$")

    def run(self, *arguments: str) -> str:
        done = subprocess.run([*self._base, *arguments], capture_output=True, text=True, check=True)
        return done.stdout

    def keys(self, *keys: str) -> None:
        self.run("send-keys", "-t", "w", *keys)

    def clear(self) -> None:
        """Wipes what is on the screen, so that nothing of it is taken for what comes."""
        self.keys("clear", "Enter")
        self.until(without="exit=")

    def screen(self) -> str:
        return self.run("capture-pane", "-t", "w", "-p")

    def until(self, *texts: str, without: str | None = None, limit_s: float = GIVE_UP_S) -> str:
        """Waits until all `texts` stand on the screen together, and `without` does not; returns it."""
        end = time.monotonic() + limit_s
        while True:
            shown = self.screen()
            wrapped = shown + " ".join(shown.split())  # a notice may go on in a second line
            if all(text in wrapped for text in texts) and (without is None or without not in shown):
                return shown
            assert time.monotonic() < end, f"never shown: {texts}, without {without}\n{shown}"
            time.sleep(0.05)

    def start(self, program: str) -> None:
        """Runs `program` between two readings of the terminal's settings; its exit code is echoed."""
        before, after = self._folder / "before", self._folder / "after"
        self.keys(
            f"stty -a > {before}; {program}; echo exit=$?; stty -a > {after}; printf 'sett%s\\n' led", "Enter"
        )

    def ended(self, limit_s: float = GIVE_UP_S) -> str:
        """Waits for the end of the program, checks that the terminal is as before; returns the screen."""
        self.until("exit=", "\nsettled", limit_s=limit_s)  # the command line itself spells it in two
        settings = [SIZE.sub("", (self._folder / name).read_text()) for name in ("before", "after")]
        assert settings[0] == settings[1]
        flags = "#{alternate_on} #{mouse_any_flag} #{cursor_flag}"
        assert self.run("display-message", "-p", "-t", "w", flags).split() == ["0", "0", "1"]
        return self.screen()

    def quit(self) -> str:
        """Quits with `q`, confirms if asked; returns the screen after the end."""
        self.keys("q")
        end = time.monotonic() + GIVE_UP_S
        while "exit=" not in (shown := self.screen()):
            assert time.monotonic() < end, f"still running\n{shown}"
            if "Quit ddtree?" in shown:
                self.keys("y")
            time.sleep(0.3)
        return self.ended()

    def process(self) -> int:
        """Process id of the running program."""
        shell = self.run("display-message", "-p", "-t", "w", "#{pane_pid}").strip()
        end = time.monotonic() + GIVE_UP_S
        while time.monotonic() < end:
            children = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
            if children:
                return int(children[0])
            time.sleep(0.05)
        raise AssertionError("the program is not running")

    def end(self) -> None:
        """Ends the terminal and every process in it, also one that would outlive its terminal."""
        panes = self.run("list-panes", "-a", "-F", "#{pane_pid}").split()
        inside = [each for pane in panes for each in descendants(int(pane))]
        self.run("kill-server")
        for pid in inside:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [found for child in children for found in (int(child), *descendants(int(child)))]
