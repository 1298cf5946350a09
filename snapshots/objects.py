"""Commits of a store: written as objects first, then shown by moving all refs at once.

Objects come from `hash-object`, a private index, `commit-tree` and `mktag`. Which refs are about to move is announced
in a file beside the lock; whoever finds it after a kill removes the lock files that git left and finishes the move.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from snapshots import lock
from snapshots.git import Answer, GitRunner, StoreFault, explained, identity, opened
from snapshots.place import Place, create

PENDING = "pending.json"
LOOSE_TAGS = 500
"""Tags in files of their own up to which a store is left as it is."""
ABSENT = ""


@dataclass(frozen=True)
class RefMove:
    """One ref from `old` (`ABSENT`: it must not exist) to `new`."""

    ref: str
    new: str
    old: str = ABSENT


@contextlib.contextmanager
def writing(place: Place, wait_s: float = lock.WAIT_S) -> Iterator[GitRunner]:
    """Git on the store with its lock held and what a killed command left finished; makes the store if need be.

    Raises:
        StoreRefused: another process held the lock all the time.
        StoreFault: the disk is full or not writable; nothing was changed.
    """
    with _disk_faults(place), lock.held(place.state, wait_s) as held:
        if held.after_a_failure:
            _sweep(place)
        if not place.exists:
            create(place)
        with opened(place.git_dir, (held.descriptor,)) as runner:
            recover(runner, place)
            yield runner


def write_tree(runner: GitRunner, files: Mapping[str, bytes], base: str | None = None) -> str:
    """The tree of `files` (path to content), added to the tree `base` where one is given; returns its hash."""
    with tempfile.TemporaryDirectory(prefix="ddtree-") as folder:
        for number, content in enumerate(files.values()):
            (Path(folder) / str(number)).write_bytes(content)
        names = "".join(f"{folder}/{number}\n" for number in range(len(files)))
        blobs = runner.run(
            "hash-object", "-w", "--no-filters", "--stdin-paths", stdin=names.encode()
        ).line.split()
        private = {"GIT_INDEX_FILE": f"{folder}/index"}
        if base is not None:
            runner.run("read-tree", base, env=private)
        lines = b"".join(
            f"100644 {blob}\t".encode() + os.fsencode(path) + b"\0"
            for path, blob in zip(files, blobs, strict=True)
        )
        runner.run("update-index", "-z", "--index-info", stdin=lines, env=private)
        return runner.run("write-tree", env=private).line


def write_commit(runner: GitRunner, tree: str, parents: tuple[str, ...], message: bytes) -> str:
    """The commit of `tree`; its hash. The message is kept byte for byte."""
    parts = [part for parent in parents for part in ("-p", parent)]
    return runner.run("commit-tree", tree, *parts, stdin=message, env=identity(runner)).line


def write_tag(runner: GitRunner, commit: str, name: str, message: str, time_s: float) -> str:
    """An annotated tag object; its hash."""
    who = identity(runner)
    tagger = f"{who['GIT_COMMITTER_NAME']} <{who['GIT_COMMITTER_EMAIL']}> {int(time_s)} +0000"
    text = f"object {commit}\ntype commit\ntag {name}\ntagger {tagger}\n\n{message}\n"
    return runner.run("mktag", stdin=text.encode()).line


def move(runner: GitRunner, place: Place, moves: tuple[RefMove, ...]) -> None:
    """Move all refs or none; from here on a kill does not undo it."""
    # Lock files that stand there already are somebody else's: git waits for them, and we never remove them.
    ours = [f"{each.ref}.lock" for each in moves if not (place.git_dir / f"{each.ref}.lock").exists()]
    if place.own and not (place.git_dir / "HEAD.lock").exists():
        ours.append("HEAD.lock")
    announced = _announce(place, ours, [[each.ref, each.new, each.old] for each in moves])
    answer = _update_refs(runner, moves)
    if answer.status < 0:
        _remove_locks(place, ours, announced.stat().st_mtime)
    announced.unlink()
    if answer.status != 0:
        raise explained(answer.err, place.git_dir)


def pack_refs(runner: GitRunner, place: Place) -> None:
    """Keep the list fast: many tags as one file. The operator's own repository is left as it is."""
    folder = place.git_dir / place.snapshots
    if not place.own or not folder.is_dir() or len(os.listdir(folder)) <= LOOSE_TAGS:
        return
    loose = [
        path.relative_to(place.git_dir) for path in (place.git_dir / "refs").rglob("*") if path.is_file()
    ]
    names = ["packed-refs.lock", "packed-refs.new", *(f"{path}.lock" for path in loose)]
    announced = _announce(place, [name for name in names if not (place.git_dir / name).exists()], [])
    runner.ask("pack-refs", "--all")
    announced.unlink()


def _announce(place: Place, locks: list[str], moves: list[list[str]]) -> Path:
    announced = place.state / PENDING
    draft = announced.with_suffix(".draft")
    with draft.open("w", encoding="utf-8") as file:
        json.dump({"locks": locks, "moves": moves}, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(announced)
    return announced


def recover(runner: GitRunner, place: Place) -> None:
    """Finish what a killed command announced; to be called with the lock held.

    Git children hold the lock too, so whoever announced it has ended with all of them: lock files that came after the
    announcement are ours.
    """
    announced = place.state / PENDING
    try:
        since = announced.stat().st_mtime
        pending = json.loads(announced.read_text(encoding="utf-8"))
        moves = tuple(RefMove(*each) for each in pending["moves"])
        locks = [str(each) for each in pending["locks"]]
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError, RecursionError):
        announced.unlink(missing_ok=True)
        return
    _remove_locks(place, locks, since)
    now = {each.ref: current(runner, each.ref) or ABSENT for each in moves}
    left = tuple(each for each in moves if now[each.ref] != each.new)
    if all(now[each.ref] == each.old for each in left):
        answer = _update_refs(runner, left)
        if answer.status != 0:
            raise explained(answer.err, place.git_dir)
    announced.unlink(missing_ok=True)


def unfinished(place: Place) -> bool:
    """Whether a killed command left something to finish."""
    return (place.state / PENDING).exists()


def current(runner: GitRunner, ref: str) -> str | None:
    """What a ref points at, or None."""
    return runner.ask("rev-parse", "--verify", "--quiet", "--end-of-options", ref).line or None


def _update_refs(runner: GitRunner, moves: tuple[RefMove, ...]) -> Answer:
    orders = "".join(
        f"create {each.ref} {each.new}\n"
        if each.old == ABSENT
        else f"update {each.ref} {each.new} {each.old}\n"
        for each in moves
    )
    return runner.ask(
        "update-ref",
        "-m",
        "ddtree snapshot",
        "--create-reflog",
        "--stdin",
        stdin=orders.encode(),
        env=identity(runner),
    )


def _sweep(place: Place) -> None:
    """Remove what git had half written when it failed or was killed; only in a store of its own, with the lock held.

    In the operator's repository such a file may be another git's; `git gc` removes it there.
    """
    if place.own:
        for path in place.git_dir.glob("objects/[0-9a-f][0-9a-f]/tmp_obj_*"):
            path.unlink(missing_ok=True)


def _remove_locks(place: Place, names: list[str], since: float) -> None:
    for name in names:
        path = place.git_dir / name
        with contextlib.suppress(OSError):
            if path.stat().st_mtime >= since - 1.0:
                path.unlink()


@contextlib.contextmanager
def _disk_faults(place: Place) -> Iterator[None]:
    """Say in one line what the file system refused."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFault(
                f"no space left on the volume of {error.filename or place.folder}: nothing was saved; "
                "free some and try again"
            ) from None
        raise StoreFault(f"{error.filename or place.folder}: {error.strerror}") from None
