"""Where a store is: a repository of its own, or private refs inside the operator's repository.

In the operator's repository everything lives under `refs/ddtree/`; HEAD, branches, index and files are never touched.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from layouts.user_files import user_home
from snapshots.git import StoreRefused, explained, opened, outside
from snapshots.message import FIRST_TRAILER

MAKING = "making"
"""Stands in the state folder while the repository is made, so that a kill in between is known for what it is."""


@dataclass(frozen=True)
class Place:
    """A store: its git directory and the names of its refs."""

    folder: Path
    """As the operator named it."""
    git_dir: Path
    own: bool
    """True: a repository for snapshots alone; False: inside the operator's repository."""
    space: str = ""
    """Inside the operator's repository: "refs/ddtree/" and what tells this folder from others."""

    @property
    def state(self) -> Path:
        """Lock, list of commits made on this host, imported remote: files that are never pushed."""
        return self.git_dir / "ddtree" / self.space.removeprefix("refs/ddtree/")

    @property
    def branch(self) -> str:
        return "refs/heads/main" if self.own else f"{self.space}history"

    @property
    def snapshots(self) -> str:
        """Prefix of the annotated tags, one for each snapshot."""
        return "refs/tags/snapshot/" if self.own else f"{self.space}snapshots/"

    @property
    def tags(self) -> str:
        """Prefix of the operator's own names."""
        return "refs/tags/" if self.own else f"{self.space}tags/"

    @property
    def notes(self) -> str:
        return "refs/notes/commits" if self.own else f"{self.space}notes"

    @property
    def remote_branch(self) -> str:
        return "refs/remotes/origin/main" if self.own else f"{self.space}remote/history"

    @property
    def remote_notes(self) -> str:
        return "refs/remotes/origin-notes/commits" if self.own else f"{self.space}remote/notes"

    @property
    def exists(self) -> bool:
        return (self.git_dir / "HEAD").exists() and not (self.state / MAKING).exists()

    @property
    def words(self) -> str:
        """Where it is, for people."""
        return str(self.folder) if self.own else f"{self.git_dir} under {self.space}"


def default_folder(env: Mapping[str, str] = os.environ) -> Path:
    """The store used where none is named: `ddtree/snapshots` in the XDG data folder."""
    return user_home("data", env) / "snapshots"


def find(folder: Path | None) -> Place:
    """The store at `folder`; None is the default one, which is never sought in a repository around it.

    Raises:
        StoreRefused: the folder holds something else, or belongs to another user.
    """
    named = (folder or default_folder()).expanduser().absolute()
    if named.exists() and not named.is_dir():
        raise StoreRefused(f"{named} is a file and no snapshot store; name a folder with --store")
    if (named / "ddtree" / MAKING).exists():
        return Place(named, named, own=True)
    for git_dir in (named, named / ".git"):
        if (git_dir / "HEAD").is_file() and (git_dir / "objects").is_dir():
            _check_owner(named, git_dir)
            if _is_store(git_dir):
                return Place(named, git_dir, own=True)
    inside = _around(named) if folder is not None else None
    if inside is not None:
        return inside
    if named.exists() and any(each.name != "ddtree" for each in named.iterdir()):
        raise StoreRefused(
            f"{named} holds other files and is no snapshot store; name an empty folder with --store"
        )
    return Place(named, named, own=True)


def create(place: Place) -> None:
    """Make the repository of a store of its own, where there is none yet."""
    place.state.mkdir(parents=True, exist_ok=True)
    (place.state / MAKING).touch()
    answer = outside(
        place.git_dir,
        "-c",
        "init.defaultBranch=main",
        "init",
        "--quiet",
        "--bare",
        "--template=",
        str(place.git_dir),
    )
    if answer.status != 0:
        raise explained(answer.err, place.git_dir)
    with opened(place.git_dir) as runner:
        runner.run("config", "ddtree.store", "1")
    (place.state / MAKING).unlink()


def _is_store(git_dir: Path) -> bool:
    """Whether the repository was made by `create`, or is a clone of such a one."""
    with opened(git_dir) as runner:
        if runner.ask("config", "--local", "ddtree.store").line == "1":
            return True
        # A clone has the history and not the configuration.
        newest = runner.ask("log", "-1", "--format=%B", "refs/heads/main", "--").out
        return f"\n{FIRST_TRAILER}\n".encode() in newest


def _check_owner(named: Path, git_dir: Path) -> None:
    """Git skips this check for a directory it is told; a foreign repository's configuration could run programs."""
    if git_dir.stat().st_uid != os.geteuid():
        answer = outside(named, "rev-parse", "--git-dir")
        if answer.status != 0:
            raise explained(answer.err, named)


def _around(named: Path) -> Place | None:
    """The operator's repository that `named` lies in, if there is one."""
    start = next(each for each in (named, *named.parents) if each.is_dir())
    answer = outside(start, "rev-parse", "--path-format=absolute", "--git-common-dir", "--show-prefix")
    if answer.status != 0:
        if "not a git repository" in answer.err:
            return None
        raise explained(answer.err, start)
    git_dir, _, prefix = os.fsdecode(answer.out).rstrip("\n").partition("\n")
    below = (Path(prefix) / named.relative_to(start)).as_posix().strip("/.")
    return Place(named, Path(git_dir), own=False, space=f"refs/ddtree/{_space_of(below)}")


def _space_of(folder: str) -> str:
    """The part of ref names that tells a folder from others; empty for the top of the repository."""
    if not folder:
        return ""
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", folder).strip("-")[:40]
    if readable == folder and folder not in ("history", "snapshots", "tags", "notes", "remote"):
        return f"in-{folder}/"
    return f"in-{readable}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]}/"
