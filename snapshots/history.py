"""Reading a store: the history as a list, one snapshot whole, and finding one by what the operator calls it.

Every question costs a fixed, small number of git processes, however long the history is, and leaves none behind.
"""

from __future__ import annotations

import difflib
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


def walk(runner: GitRunner, place: Place, made_here: frozenset[str]) -> Iterator[Entry]:
    """All commits of ours, newest first."""
    if current(runner, place.branch) is None:
        return
    fields: list[bytes] = []
    for field in runner.stream("log", _FORMAT, place.branch, "--"):
        fields.append(field)
        if len(fields) == _FIELDS:
            entry = _entry(fields, made_here)
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


def entry_of(runner: GitRunner, commit: str, made_here: frozenset[str]) -> Entry | None:
    """The entry of one commit; None where it is no snapshot's."""
    fields = list(runner.stream("log", "-1", _FORMAT, commit, "--"))
    return _entry(fields, made_here) if len(fields) == _FIELDS else None


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
    listing = runner.ask("ls-tree", "-r", "-z", ref).out.split(b"\0")
    rows = [line.decode("utf-8", "replace").split("\t", 1) for line in listing if b"\t" in line]
    return {name.replace("/", ""): about.split()[2] for about, name in rows}


def named_tags(runner: GitRunner, place: Place) -> dict[str, tuple[str, ...]]:
    """The operator's own names by commit."""
    listed = runner.ask("for-each-ref", "--format=%(refname)", place.tags).out.decode("utf-8", "replace")
    refs = [ref for ref in listed.splitlines() if not ref.startswith(place.snapshots)]
    if not refs:
        return {}
    commits = runner.run("rev-parse", *(f"{ref}^{{}}" for ref in refs)).line.split()
    found: dict[str, tuple[str, ...]] = {}
    for ref, commit in zip(refs, commits, strict=True):
        found[commit] = (*found.get(commit, ()), ref.removeprefix(place.tags))
    return found


def resolve(runner: GitRunner, place: Place, name: str, made_here: frozenset[str]) -> Entry:
    """The snapshot the operator means: "latest", "latest~2", an id, a tag, a commit or its beginning, or a label.

    Raises:
        UnknownSnapshot: there is none, or several; the line names those near it.
    """
    for commit in _candidates(runner, place, name):
        entry = entry_of(runner, commit, made_here)
        if entry is not None and entry.kind != "merge" and _in_history(runner, place, commit):
            return entry
    near, wanted = [], _steps(name)
    same: list[Entry] = []
    for number, entry in enumerate(snapshots(walk(runner, place, made_here))):
        if number == wanted:
            return entry
        if entry.label == name:
            same.append(entry)
        near += [entry.id, entry.label]
    if len(same) == 1:
        return same[0]
    if same:
        ids = ", ".join(entry.id for entry in same[:5])
        raise UnknownSnapshot(f"{len(same)} snapshots have the label {name!r}: {ids}; name one by its id")
    if not near:
        raise UnknownSnapshot(f"{place.words} holds no snapshot yet; make one with: ddtree snapshot save")
    close = difflib.get_close_matches(name, [each for each in near if each], 1)
    hint = f"did you mean {close[0]}?" if close else "see: ddtree snapshot list"
    raise UnknownSnapshot(f"no snapshot is called {name!r}; {hint}")


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


def _entry(fields: list[bytes], made_here: frozenset[str]) -> Entry | None:
    commit, parents, author, time_s, message = fields
    name = commit.strip().decode("ascii", "replace")
    entry = parse(
        name,
        parents.decode("ascii", "replace"),
        author.decode("utf-8", "replace"),
        float(time_s or 0),
        message,
    )
    return replace(entry, foreign=name not in made_here) if entry is not None else None
