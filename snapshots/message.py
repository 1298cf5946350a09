"""The commit message of a snapshot: subject, the operator's note byte for byte, and trailers that programs read.

    <label, or what it is>

    <note>

    DDTree-Schema: 1
    DDTree-Note-Bytes: 123
    ...

`git log` alone is readable; nothing is ever read out of the note. Rows of a list come from trailers only.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from snapshots.annotate import headline
from snapshots.content import Snapshot

Kind = Literal["save", "auto", "rollback", "measure", "import", "merge"]
"""auto: what ran before a change; measure: figures of an earlier commit; merge: two histories joined."""
KINDS: tuple[Kind, ...] = ("save", "auto", "rollback", "measure", "import", "merge")
FIRST_TRAILER = "DDTree-Schema: 1"
_START = f"\n{FIRST_TRAILER}\n".encode()


@dataclass(frozen=True)
class Entry:
    """One commit of the history, from its message alone."""

    commit: str
    parents: tuple[str, ...]
    kind: Kind
    id: str
    label: str
    note: str
    time_s: float
    author: str
    trailers: Mapping[str, str] = field(default_factory=dict)
    """Lower-case names without "DDTree-"."""
    foreign: bool = False
    """Not made on this host: its patches and units need trust."""
    annotation: str = ""
    """The git note added later."""
    tags: tuple[str, ...] = ()

    @property
    def tok_s(self) -> float | None:
        return _number(self.trailers.get("tok-s"))

    @property
    def accept_length(self) -> float | None:
        return _number(self.trailers.get("accept-length"))

    @property
    def source(self) -> str | None:
        """The commit a rollback restores, a measurement measures or an import came from."""
        return self.trailers.get("restores") or self.trailers.get("measures") or self.trailers.get("origin")

    def matches(self, words: str) -> bool:
        """Whether each word stands somewhere in what a list shows or in the note; case does not matter."""
        text = "\n".join(
            (
                self.id,
                self.commit,
                self.kind,
                self.label,
                self.note,
                self.annotation,
                *self.tags,
                *self.trailers.values(),
            )
        ).lower()
        return all(word in text for word in words.lower().split())


def compose(
    snapshot: Snapshot, snapshot_id: str, kind: Kind = "save", extra: Mapping[str, str] | None = None
) -> bytes:
    """The message of a snapshot's commit."""
    config, figure = snapshot.config, headline(snapshot)
    note = snapshot.note.encode("utf-8")
    values: dict[str, object] = {
        "Id": snapshot_id,
        "Kind": kind,
        "Label": snapshot.label,
        "Taken": _stamp(snapshot.taken_at_s),
        "Host": snapshot.host.name,
        "Hardware": snapshot.host.hardware,
        "Model": config.get("model", ""),
        "Layout": config.get("layout", ""),
        "Mode": config.get("mode", ""),
        "Tree-Budget": config.get("tree_budget", ""),
        "Temperature": config.get("temperature", ""),
        "Measured": snapshot.measurements.state,
        "Patched-Files": len(snapshot.patches),
        "Units": len(snapshot.services),
    }
    if figure is not None:
        values["Figure-Source"] = figure.source
        values["Tok-S"] = "" if figure.tok_s is None else f"{figure.tok_s:.6g}"
        values["Accept-Length"] = "" if figure.accept_length is None else f"{figure.accept_length:.6g}"
    values.update(extra or {})
    subject = snapshot.label or f"{config.get('model', 'configuration')}, {config.get('mode', '')}"
    return _assembled(subject, note, values)


def compose_merge(snapshot_id: str, remote: str, taken_at_s: float) -> bytes:
    """The message of a commit that joins the histories of two stores."""
    values = {"Id": snapshot_id, "Kind": "merge", "Taken": _stamp(taken_at_s)}
    return _assembled(f"Histories of this store and {remote} joined", b"", values)


def parse(commit: str, parents: str, author: str, time_s: float, message: bytes) -> Entry | None:
    """The entry of a commit; None where its message is none of ours."""
    at = message.rfind(_START)
    if at < 0:
        return None
    trailers = {}
    for line in message[at + 1 :].decode("utf-8", "replace").splitlines():
        name, colon, value = line.partition(":")
        if colon and name.startswith("DDTree-"):
            trailers[name.removeprefix("DDTree-").lower()] = value.strip()
    kind = trailers.pop("kind", "")
    if kind not in KINDS:
        return None
    length = int(found[0]) if (found := re.fullmatch("[0-9]{1,12}", trailers.get("note-bytes", ""))) else 0
    head = message.find(b"\n\n") + 2
    return Entry(
        commit=commit,
        parents=tuple(parents.split()),
        kind=kind,
        id=trailers.pop("id", commit[:12]),
        label=trailers.pop("label", ""),
        note=message[head : head + length].decode("utf-8", "replace"),
        time_s=_time(trailers.get("taken", ""), time_s),
        author=author,
        trailers=trailers,
    )


def _assembled(subject: str, note: bytes, values: Mapping[str, object]) -> bytes:
    lines = [FIRST_TRAILER, f"DDTree-Note-Bytes: {len(note)}"]
    lines += [f"DDTree-{name}: {_one_line(str(value))}" for name, value in values.items() if value != ""]
    middle = note + b"\n\n" if note else b""
    return _one_line(subject).encode() + b"\n\n" + middle + "\n".join(lines).encode() + b"\n"


def _one_line(text: str) -> str:
    text = text.encode("utf-8", "replace").decode("utf-8")
    return re.sub(r"\s+", " ", "".join(char if char.isprintable() else " " for char in text)).strip()


def _stamp(time_s: float) -> str:
    whole = int(time_s)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{int((time_s - whole) * 1e6):06d}Z"


def _time(stamp: str, otherwise: float) -> float:
    try:
        taken = datetime.fromisoformat(stamp)
        return (taken if taken.tzinfo else taken.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return otherwise


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
