"""Reading a store: the history as a list, one snapshot whole, and finding one by what the operator calls it.

Every question costs a fixed, small number of git processes, however long the history is, and leaves none behind.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from snapshots.codec import from_files
from snapshots.content import Snapshot
from snapshots.git import GitRunner, StoreFault, UnknownSnapshot
from snapshots.message import Entry, parse
from snapshots.objects import current
from snapshots.place import Place

PAGE = 50
_FORMAT = "--format=%H%x00%P%x00%an%x00%ct%x00%B%x00"
_FIELDS = 5


@dataclass(frozen=True)
class Page:
    """Some rows of the history, newest first."""

    entries: tuple[Entry, ...]
    offset: int
    more: bool
    """Whether older ones follow."""
    unpushed: int | None = None
    """Commits the remote has not; None without a remote."""
    remote: str | None = None
    """Its address, passwords left out."""


def walk(runner: GitRunner, place: Place) -> Iterator[Entry]:
    """All commits of ours, newest first, as they are read; whether they were made here is not known yet."""
    if current(runner, place.branch) is None:
        return
    fields: list[bytes] = []
    for field in runner.stream("log", _FORMAT, place.branch, "--"):
        fields.append(field)
        if len(fields) == _FIELDS:
            entry = _entry(fields)
            fields = []
            if entry is not None:
                yield entry


def snapshots(entries: Iterator[Entry]) -> Iterator[Entry]:
    """The snapshots among `entries`; a measurement that follows one lends it its figures."""
    measured: dict[str, Entry] = {}
    for entry in entries:
        if entry.kind == "merge":
            continue
        if entry.kind == "measure":
            measured.setdefault(entry.source or "", entry)
            continue
        later = measured.pop(entry.commit, None)
        if later is not None:
            entry = with_figures(entry, later)
        yield entry


def with_figures(entry: Entry, later: Entry) -> Entry:
    """`entry` with the figures that a later measurement of it has."""
    names = ("tok-s", "accept-length", "figure-source", "measured")
    figures = {name: later.trailers[name] for name in names if name in later.trailers}
    return replace(entry, trailers={**entry.trailers, **figures})


def entry_of(runner: GitRunner, commit: str) -> Entry | None:
    """The entry of one commit; None where it is no snapshot's."""
    fields = list(runner.stream("log", "-1", _FORMAT, commit, "--"))
    return _entry(fields) if len(fields) == _FIELDS else None


def measurement_of(runner: GitRunner, place: Place, commit: str) -> str | None:
    """The newest commit that measures `commit`, or None."""
    found = runner.ask(
        "log",
        "-1",
        "--format=%H",
        "--fixed-strings",
        f"--grep=DDTree-Measures: {commit}",
        f"{commit}..{place.branch}",
        "--",
    )
    return found.line or None


def load(runner: GitRunner, entry: Entry, measured_by: str | None = None) -> Snapshot:
    """The snapshot of a commit, its note as the message has it, with the figures of a later measurement."""
    snapshot = from_files(files_of(runner, entry.commit))
    if measured_by is not None:
        later = from_files(files_of(runner, measured_by)).measurements
        snapshot = snapshot.model_copy(update={"measurements": later})
    return snapshot.model_copy(update={"note": entry.note, "label": entry.label})


def files_of(runner: GitRunner, commit: str) -> dict[str, bytes]:
    """All files of a commit: path to content."""
    listing = runner.run("ls-tree", "-r", "-z", "--full-tree", commit).out.split(b"\0")
    rows = [line.split(b"\t", 1) for line in listing if b"\t" in line]
    blobs = [
        (name.decode("utf-8", "replace"), about.split()[2].decode())
        for about, name in rows
        if b" blob " in about
    ]
    contents = read_blobs(runner, [blob for _, blob in blobs])
    return {name: content for (name, _), content in zip(blobs, contents, strict=True)}


def read_blobs(runner: GitRunner, blobs: list[str]) -> list[bytes]:
    """The contents of objects, in order."""
    if not blobs:
        return []
    out = runner.run("cat-file", "--batch", stdin="".join(f"{blob}\n" for blob in blobs).encode()).out
    contents, at = [], 0
    for blob in blobs:
        end = out.index(b"\n", at)
        head = out[at:end].split()
        if len(head) != 3:
            raise StoreFault(f"object {blob} is missing from the store; run git fsck on it")
        size = int(head[2])
        contents.append(out[end + 1 : end + 1 + size])
        at = end + size + 2
    return contents


def tree_names(runner: GitRunner, ref: str) -> dict[str, str]:
    """The notes tree of `ref`: commit to blob; empty where there is none."""
    if current(runner, ref) is None:
        return {}
    listing = (each.decode("utf-8", "replace") for each in runner.stream("ls-tree", "-r", "-z", ref))
    rows = (line.split("\t", 1) for line in listing if "\t" in line)
    return {name.replace("/", ""): about.split()[2] for about, name in rows}


def named_tags(runner: GitRunner, place: Place) -> dict[str, tuple[str, ...]]:
    """The operator's own names by commit; those of the snapshots themselves are passed over as they come."""
    listed = runner.stream("for-each-ref", "--format=%(refname)%00", place.tags)
    names = (each.decode("utf-8", "replace").strip() for each in listed)
    refs = [ref for ref in names if ref and not ref.startswith(place.snapshots)]
    if not refs:
        return {}
    commits = runner.run("rev-parse", *(f"{ref}^{{}}" for ref in refs)).line.split()
    found: dict[str, tuple[str, ...]] = {}
    for ref, commit in zip(refs, commits, strict=True):
        found[commit] = (*found.get(commit, ()), ref.removeprefix(place.tags))
    return found


def resolve(runner: GitRunner, place: Place, name: str) -> Entry:
    """The snapshot the operator means: "latest", "latest~2", an id, a tag, a commit or its beginning, or a label.

    Raises:
        UnknownSnapshot: there is none, or several; the line names those near it.
    """
    for commit in _candidates(runner, place, name):
        entry = entry_of(runner, commit)
        if entry is not None and entry.kind != "merge" and _in_history(runner, place, commit):
            return entry
    wanted = _steps(name)
    same: list[Entry] = []
    count = namesakes = 0
    for number, entry in enumerate(snapshots(walk(runner, place))):
        count += 1
        if number == wanted:
            return entry
        if entry.label == name:
            namesakes += 1
            same = [*same, entry][:5]
    if namesakes == 1:
        return same[0]
    if same:
        ids = ", ".join(entry.id for entry in same)
        raise UnknownSnapshot(f"{namesakes} snapshots have the label {name!r}: {ids}; name one by its id")
    if not count:
        raise UnknownSnapshot(f"{place.words} holds no snapshot yet; make one with: ddtree snapshot save")
    close = _nearest(runner, place, name)
    raise UnknownSnapshot(
        f"no snapshot is called {name!r}; "
        + (f"did you mean {close}?" if close else "see: ddtree snapshot list")
    )


def _nearest(runner: GitRunner, place: Place, name: str) -> str | None:
    """The id or label that is spelt most like `name`; none where nothing is near."""
    best: list[str] = []
    names = (each for entry in walk(runner, place) for each in (entry.id, entry.label) if each)
    while batch := list(itertools.islice(names, 500)):
        best = difflib.get_close_matches(name, [*best, *batch], 1)
    return best[0] if best else None


def _steps(name: str) -> int | None:
    found = re.fullmatch(r"latest(?:~(\d{1,6}))?", name)
    return int(found[1] or 0) if found else None


def _candidates(runner: GitRunner, place: Place, name: str) -> Iterator[str]:
    if (
        re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]*", name)
        and ".." not in name
        and not name.endswith((".lock", "/", "."))
    ):
        for prefix in (place.snapshots, place.tags):
            commit = current(runner, f"{prefix}{name}^{{commit}}")
            if commit:
                yield commit
    if re.fullmatch(r"[0-9a-f]{4,64}", name):
        commit = current(runner, f"{name}^{{commit}}")
        if commit:
            yield commit


def _in_history(runner: GitRunner, place: Place, commit: str) -> bool:
    return runner.ask("merge-base", "--is-ancestor", commit, place.branch).status == 0


def _entry(fields: list[bytes]) -> Entry | None:
    commit, parents, author, time_s, message = fields
    return parse(
        commit.strip().decode("ascii", "replace"),
        parents.decode("ascii", "replace"),
        author.decode("utf-8", "replace"),
        float(time_s or 0),
        message,
    )
