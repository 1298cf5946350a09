"""The store of snapshots: save, list, load, tag and annotate.

One snapshot is one commit and one annotated tag. Nothing here rewrites history, touches the operator's index, branch or
files, or removes a lock that is not ours.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import platform
import re
import secrets as random_source
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from snapshots import history
from snapshots.codec import to_files
from snapshots.content import Snapshot, checked_label, checked_note
from snapshots.git import GitRunner, StoreRefused, UnknownSnapshot, opened, without_password
from snapshots.history import Page
from snapshots.message import Entry, Kind, compose
from snapshots.objects import (
    ABSENT,
    RefMove,
    current,
    move,
    pack_refs,
    unfinished,
    write_commit,
    write_tag,
    write_tree,
    writing,
)
from snapshots.place import Place, find

WAIT_S = 30.0


@dataclass(frozen=True)
class Store:
    """One store; every method opens git for its own length only."""

    place: Place
    wait_s: float = WAIT_S
    """Longest wait for another process that writes."""

    @classmethod
    def at(cls, folder: Path | None = None, wait_s: float = WAIT_S) -> Store:
        """The store at `folder` (None: the default one); it need not exist yet."""
        return cls(find(folder), wait_s)

    def save(
        self,
        snapshot: Snapshot,
        kind: Kind = "save",
        extra: Mapping[str, str] | None = None,
        same_files_as: str | None = None,
    ) -> Entry:
        """Commit `snapshot` and return its entry; the same content again is a new snapshot.

        Args:
            extra: further trailers.
            same_files_as: a commit whose files are taken as they are (a rollback).

        Raises:
            StoreFault: with one line; then nothing was saved.
            NoteRefused: git cannot keep the note or the label as it is.
        """
        checked_label(snapshot.label)
        checked_note(snapshot.note)
        with self._writing() as runner:
            snapshot_id = new_id(snapshot.taken_at_s or time.time())
            if same_files_as is None:
                tree = write_tree(runner, to_files(snapshot, snapshot_id))
            else:
                tree = runner.run("rev-parse", "--verify", f"{same_files_as}^{{tree}}").line
            tip = current(runner, self.place.branch)
            message = compose(snapshot, snapshot_id, kind, extra)
            commit = write_commit(runner, tree, (tip,) if tip else (), message)
            moves = [RefMove(self.place.branch, commit, tip or ABSENT)]
            if kind != "measure":
                title = snapshot.label or snapshot_id
                tag = write_tag(runner, commit, f"snapshot/{snapshot_id}", title, time.time())
                moves.append(RefMove(self.place.snapshots + snapshot_id, tag))
            if kind != "import":
                self._remember(commit)
            move(runner, self.place, tuple(moves))
            pack_refs(runner, self.place)
            entry = history.entry_of(runner, commit)
        assert entry is not None
        return self._marked((entry,))[0]

    def list(self, words: str = "", offset: int = 0, limit: int = history.PAGE) -> Page:
        """Snapshots newest first, those that contain all of `words`."""
        with self._reading() as runner:
            if runner is None:
                return Page((), offset, False)
            notes = history.tree_names(runner, self.place.notes)
            tags = history.named_tags(runner, self.place)
            found = history.snapshots(history.walk(runner, self.place))
            found = (replace(each, tags=tags[each.commit]) if each.commit in tags else each for each in found)
            if words:
                found = (each for each in _annotated(runner, found, notes) if each.matches(words))
            page = list(itertools.islice(found, offset, offset + limit + 1))
            shown = self._marked(_annotated(runner, iter(page[:limit]), notes))
            unpushed, remote = self._unpushed(runner)
            return Page(shown, offset, len(page) > limit, unpushed, remote)

    def entry(self, name: str) -> Entry:
        """The snapshot called `name`; raises UnknownSnapshot."""
        with self._reading() as runner:
            return self._whole_entry(self._some(runner), name)

    def load(self, name: str) -> tuple[Entry, Snapshot]:
        """The snapshot called `name` with all it holds."""
        with self._reading() as runner:
            runner = self._some(runner)
            entry = self._whole_entry(runner, name)
            return entry, history.load(
                runner, entry, history.measurement_of(runner, self.place, entry.commit)
            )

    def files(self, commit: str) -> dict[str, bytes]:
        """The files of a snapshot's commit."""
        with self._reading() as runner:
            return history.files_of(self._some(runner), commit)

    def tag(self, name: str, tag: str) -> Entry:
        """Give a snapshot a name of the operator's own; a name in use is refused."""
        if (
            not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", tag)
            or ".." in tag
            or tag.endswith((".lock", "."))
        ):
            raise UnknownSnapshot(f"tag {tag!r}: use letters, digits, '.', '_' and '-', at most 80")
        if history._steps(tag) is not None or tag == "snapshot":
            raise UnknownSnapshot(f"tag {tag!r}: that word has a meaning here; choose another one")
        with self._writing() as runner:
            entry = self._entry(runner, name)
            ref = self.place.tags + tag
            if current(runner, ref):
                raise StoreRefused(f"tag {tag!r} is taken; tags are never moved, choose another one")
            move(runner, self.place, (RefMove(ref, write_tag(runner, entry.commit, tag, tag, time.time())),))
            return self._whole_entry(runner, name)

    def note(self, name: str, text: str, replace_it: bool = False) -> Entry:
        """Add `text` to the git note of a snapshot, byte for byte; a second one stands below the first."""
        checked_note(text)
        with self._writing() as runner:
            entry = self._entry(runner, name)
            tip = current(runner, self.place.notes)
            earlier = history.tree_names(runner, self.place.notes).get(entry.commit)
            if earlier and not replace_it:
                text = history.read_blobs(runner, [earlier])[0].decode("utf-8", "replace") + "\n" + text
            tree = write_tree(runner, {entry.commit: text.encode("utf-8")}, tip)
            words = f"Note on snapshot {entry.id}\n".encode()
            commit = write_commit(runner, tree, (tip,) if tip else (), words)
            move(runner, self.place, (RefMove(self.place.notes, commit, tip or ABSENT),))
            return self._whole_entry(runner, name)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[GitRunner]:
        with writing(self.place, self.wait_s) as runner:
            yield runner

    @contextlib.contextmanager
    def _reading(self) -> Iterator[GitRunner | None]:
        """Git on the store, or None where there is none yet; finishes what a killed command left."""
        if unfinished(self.place):
            with self._writing():
                pass
        if not self.place.exists:
            yield None
            return
        with opened(self.place.git_dir) as runner:
            yield runner

    def _some(self, runner: GitRunner | None) -> GitRunner:
        if runner is None:
            raise UnknownSnapshot(
                f"{self.place.words} holds no snapshot yet; make one with: ddtree snapshot save"
            )
        return runner

    def _entry(self, runner: GitRunner, name: str) -> Entry:
        return self._marked((history.resolve(runner, self.place, name),))[0]

    def _whole_entry(self, runner: GitRunner, name: str) -> Entry:
        """The entry with its git note, its tags and the figures of a later measurement."""
        entry = self._entry(runner, name)
        measured_by = history.measurement_of(runner, self.place, entry.commit)
        later = history.entry_of(runner, measured_by) if measured_by else None
        entry = history.with_figures(entry, later) if later else entry
        notes = history.tree_names(runner, self.place.notes)
        found = next(_annotated(runner, iter([entry]), notes))
        return replace(found, tags=history.named_tags(runner, self.place).get(entry.commit, ()))

    def _unpushed(self, runner: GitRunner) -> tuple[int | None, str | None]:
        url = remote_url(runner, self.place)
        if url is None or current(runner, self.place.branch) is None:
            return None, url and without_password(url)
        known = current(runner, self.place.remote_branch)
        span = [f"{known}..{self.place.branch}"] if known else [self.place.branch]
        return int(runner.run("rev-list", "--count", *span).line), without_password(url)

    def _marked(self, entries: Iterable[Entry]) -> tuple[Entry, ...]:
        """`entries`, those foreign that the ledger of this host does not name; it is read as it lies on the disk."""
        found = tuple(entries)
        wanted = {entry.commit for entry in found}
        made_here: set[str] = set()
        with contextlib.suppress(OSError), (self.place.state / _ledger()).open(encoding="ascii") as ledger:
            made_here.update(commit for line in ledger if (commit := line.strip()) in wanted)
        return tuple(replace(entry, foreign=entry.commit not in made_here) for entry in found)

    def _remember(self, commit: str) -> None:
        """Note that a commit was made on this host, which a clone or a copy elsewhere does not tell."""
        with (self.place.state / _ledger()).open("a", encoding="ascii") as file:
            file.write(f"\n{commit}\n")  # a full disk may have cut the line before


def remote_url(runner: GitRunner, place: Place) -> str | None:
    """The address of the store's remote, or None."""
    if place.own:
        return runner.ask("config", "--local", "remote.origin.url").line or None
    path = place.state / "remote"
    return path.read_text(encoding="utf-8").strip() or None if path.exists() else None


def new_id(time_s: float) -> str:
    """An id that sorts by time and needs no counter shared between hosts."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime(time_s)) + random_source.token_hex(2)


def _annotated(runner: GitRunner, entries: Iterator[Entry], notes: Mapping[str, str]) -> Iterator[Entry]:
    """`entries` with their git notes, read for many at once."""
    while batch := list(itertools.islice(entries, 200)):
        with_note = [entry for entry in batch if entry.commit in notes]
        texts = history.read_blobs(runner, [notes[entry.commit] for entry in with_note])
        found = {
            entry.commit: text.decode("utf-8", "replace")
            for entry, text in zip(with_note, texts, strict=True)
        }
        yield from (
            replace(entry, annotation=found[entry.commit]) if entry.commit in found else entry
            for entry in batch
        )


def _ledger() -> str:
    """The file of commits made on this host; another host that gets a copy of the store has another name for it."""
    identity = platform.node()
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError):
            identity += Path(path).read_text(encoding="ascii", errors="replace").strip()
            break
    return f"made-here-{hashlib.sha256(f'{identity} {os.geteuid()}'.encode()).hexdigest()[:12]}"
