"""Git as the store uses it: one short-lived GitPython `Repo` for each operation, and nothing of the operator's session.

Inherited `GIT_*` variables are dropped (those that say how to reach a network or a user's settings stay). Hooks,
signing, file system monitors, replacement objects and line-end conversion are off for every command by declared choice.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import git

KEPT_VARIABLES = re.compile(
    r"GIT_(SSH|SSH_COMMAND|SSH_VARIANT|ASKPASS|SSL_.*|PROXY_.*|EXEC_PATH|CONFIG_GLOBAL|CONFIG_SYSTEM|CONFIG_NOSYSTEM)"
)
DECLARED = (
    "core.hooksPath=/dev/null",
    "commit.gpgSign=false",
    "tag.gpgSign=false",
    "push.gpgSign=false",
    "log.showSignature=false",
    "core.fsmonitor=false",
    "core.autocrlf=false",
    "core.safecrlf=false",
    "core.fsync=committed",
    "core.filesRefLockTimeout=3000",
    "i18n.commitEncoding=UTF-8",
    "i18n.logOutputEncoding=UTF-8",
    "gc.auto=0",
    "maintenance.auto=false",
    "protocol.ext.allow=never",
    "http.lowSpeedLimit=1",
    "http.lowSpeedTime=30",
)
TOOL_NAME, TOOL_EMAIL = "ddtree", "ddtree@localhost"
"""Who makes a snapshot where the operator has set no user.name or user.email; used for the snapshot alone."""


class StoreFault(Exception):
    """Base of what the store raises on purpose; its text is one line made for a person."""

    exit_code = 1


class StoreRefused(StoreFault):
    """Not done, with the reason; nothing was changed."""

    exit_code = 3


class UnknownSnapshot(StoreFault):
    """No snapshot, or more than one, goes by that name."""

    exit_code = 2


class _Git(git.Git):
    """GitPython's runner without the variables that would lead git to another repository, index or identity."""

    def execute(self, command: Any, *args: Any, **options: Any) -> Any:
        given = options.get("env") or {}
        inherited = [
            name
            for name in os.environ
            if name.startswith("GIT_") and name not in given and not KEPT_VARIABLES.fullmatch(name)
        ]
        dropped = [part for name in inherited for part in ("-u", name)]
        return super().execute(["env", *dropped, *command] if dropped else command, *args, **options)


class _Repo(git.Repo):
    GitCommandWrapperType = _Git


@dataclass(frozen=True)
class Answer:
    """What one git command gave."""

    status: int
    out: bytes
    err: str

    @property
    def line(self) -> str:
        return self.out.decode("utf-8", "replace").strip()


@dataclass(frozen=True)
class GitRunner:
    """Runs git on one repository for the length of a `with` block."""

    git: git.Git
    git_dir: Path
    kept_open: tuple[int, ...] = ()
    """Descriptors that local commands inherit: the store's lock is held until the last of them has ended."""

    def ask(
        self,
        *arguments: str,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        network: bool = False,
    ) -> Answer:
        """Run git and return what it gave, whatever its exit status."""
        # A network command has no terminal to ask on and may leave helpers behind, which must not hold the lock.
        how: dict[str, Any] = {"start_new_session": True} if network else {"pass_fds": self.kept_open}
        with contextlib.ExitStack() as stack:
            source = None
            if stdin is not None:
                source = stack.enter_context(tempfile.TemporaryFile())
                source.write(stdin)
                source.seek(0)
            status, out, err = self.git.execute(
                self._command(arguments),
                istream=source,
                with_extended_output=True,
                with_exceptions=False,
                stdout_as_string=False,
                strip_newline_in_stdout=False,
                env={"GIT_TERMINAL_PROMPT": "0", **(env or {})},
                **how,
            )
        return Answer(status, out or b"", err or "")

    def stream(self, *arguments: str) -> Iterator[bytes]:
        """Records of a command's output, which end in NUL, as they come; its process is gone when the iterator is."""
        wrapper = self.git.execute(self._command(arguments), as_process=True)
        process = wrapper.proc
        if process is None or process.stdout is None or process.stderr is None:
            raise StoreFault("git could not be started")
        rest = b""
        try:
            while chunk := os.read(process.stdout.fileno(), 1 << 16):
                *records, rest = (rest + chunk).split(b"\0")
                yield from records
        finally:
            process.stdout.close()
            process.stderr.close()
            process.terminate()
            process.wait()

    def _command(self, arguments: tuple[str, ...]) -> list[str]:
        settings = [part for each in DECLARED for part in ("-c", each)]
        given = ["--no-pager", "--no-replace-objects", f"--git-dir={self.git_dir}"]
        return ["git", *given, *settings, *arguments]

    def run(
        self,
        *arguments: str,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        network: bool = False,
    ) -> Answer:
        """Run git; raises StoreFault with one line where it fails."""
        answer = self.ask(*arguments, stdin=stdin, env=env, network=network)
        if answer.status != 0:
            raise explained(answer.err, self.git_dir)
        return answer


@contextlib.contextmanager
def opened(git_dir: Path, kept_open: Sequence[int] = ()) -> Iterator[GitRunner]:
    """Git on the repository at `git_dir`; every process and descriptor is gone at the end of the block."""
    try:
        repository = _Repo(git_dir, expand_vars=False)
    except (git.InvalidGitRepositoryError, git.NoSuchPathError):
        raise StoreFault(f"{git_dir} is no git repository; name another store with --store") from None
    with repository as repo:
        yield GitRunner(repo.git, git_dir, tuple(kept_open))


def outside(folder: Path, *arguments: str) -> Answer:
    """Run git in `folder` as git itself finds the repository there; it checks who owns it."""
    status, out, err = _Git(folder).execute(
        ["git", *arguments], with_extended_output=True, with_exceptions=False, stdout_as_string=False
    )
    return Answer(status, out or b"", err or "")


def explained(stderr: str, place: Path) -> StoreFault:
    """What git said, as one line with the remedy."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    text = " ".join(lines)
    if found := re.search(r"dubious ownership in repository at '(.+?)'", text):
        return StoreRefused(
            f"{found[1]} belongs to another user; if you trust it: git config --global --add safe.directory {found[1]}"
        )
    if "No space left on device" in text or "Disk quota exceeded" in text:
        return StoreFault(
            f"no space left on the volume of {place}: nothing was saved; free some and try again"
        )
    if found := re.search(r"Unable to create '(.+?\.lock)': File exists", text):
        return StoreRefused(_about_lock(Path(found[1])))
    if "fetch first" in text or "non-fast-forward" in text:
        return StoreRefused("the remote has snapshots that this store has not; first: ddtree snapshot pull")
    if "Read-only file system" in text or "Permission denied" in text or "insufficient permission" in text:
        return StoreFault(f"{place} cannot be written: {_told(lines)}")
    return StoreFault(f"git: {_told(lines)}")


def without_password(url: str) -> str:
    """`url` as it may be shown."""
    return re.sub(r"(?<=://)([^/@:]*):[^/@]*@", r"\1:***@", url)


def identity(runner: GitRunner) -> Mapping[str, str]:
    """Who makes a snapshot, as variables for git: the operator as git knows them, else the tool's own name."""
    found = runner.ask("config", "--null", "--get-regexp", r"^user\.(name|email)$").out.decode(
        "utf-8", "replace"
    )
    given = dict(line.split("\n", 1) for line in found.split("\0") if "\n" in line)
    name = re.sub(r"[<>\x00-\x1f]", " ", given.get("user.name", "")).strip(" .,;'\"") or TOOL_NAME
    email = re.sub(r"[<>\s]", "", given.get("user.email", "")) or TOOL_EMAIL
    who = {"GIT_AUTHOR_NAME": name, "GIT_AUTHOR_EMAIL": email}
    return who | {"GIT_COMMITTER_NAME": name, "GIT_COMMITTER_EMAIL": email}


def _told(lines: Sequence[str]) -> str:
    for line in lines:
        if line.startswith(("fatal:", "error:")):
            return without_password(line.partition(":")[2].strip())
    return without_password(lines[-1]) if lines else "it failed without a word"


def _about_lock(path: Path) -> str:
    try:
        age = f"{max(time.time() - path.stat().st_mtime, 0):.0f} s old"
    except OSError:
        age = "gone by now"
    return f"another git program holds {path} ({age}); if none runs, remove that file and try again"
