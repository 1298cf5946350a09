"""What the commands of `ddtree snapshot` share: their options, the store, the runtime, and asking before they act."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from runtime.command_options import emit_json, tell

if TYPE_CHECKING:
    from runtime.interface import Runtime
    from snapshots.store import Store

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
StoreFolder = Annotated[
    Path | None,
    typer.Option(
        "--store",
        metavar="FOLDER",
        help="The store; in a repository of yours: private refs there. Default: in the XDG data folder.",
    ),
]
Url = Annotated[
    str | None, typer.Option(metavar="URL", help="The runtime; without it: the one running instance here.")
]
Name = Annotated[str, typer.Argument(metavar="SNAPSHOT", help="Id, tag, commit, label, latest or latest~N.")]
UnderLoad = Annotated[bool, typer.Option("--under-load", help="Measure though other clients' requests run.")]
REFUSED = 3
T = TypeVar("T")


def store_at(folder: Path | None) -> Store:
    from snapshots.store import Store

    return Store.at(folder)


def with_runtime(url: str | None, act: Callable[[Runtime | None], Awaitable[T]]) -> T:
    """Run `act` with the runtime at `url`, or the one running instance of this user, or None where none runs."""
    from runtime.connect import attach
    from runtime.instance import instances, runtime_folder, the_instance

    if url is None and instances(runtime_folder()):
        url = the_instance(runtime_folder()).url

    async def run() -> T:
        runtime = attach(url) if url is not None else None
        try:
            return await act(runtime)
        finally:
            if runtime is not None:
                await runtime.aclose()

    return asyncio.run(run())


def given_words(text: str | None, file: Path | None) -> str:
    """The operator's words, not a byte changed."""
    from snapshots.content import NoteRefused, checked_note

    if text is not None and file is not None:
        raise typer.BadParameter("give the words or a file, not both", param_hint="--note-file")
    if file is None:
        return checked_note(text or "")
    content = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    try:
        return checked_note(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise NoteRefused(f"note {file}: not UTF-8 at byte {error.start}; save it as UTF-8") from None


def show_entry(entry: Any, json: bool, done: str) -> None:
    from snapshots import wording

    if json:
        emit_json({"snapshot": wording.entry_json(entry)})
    else:
        print(wording.plain(f"{done} {entry.id} (commit {entry.commit[:10]}) {entry.label}").rstrip())


def hardware_here() -> str:
    from snapshots.content import hardware_class
    from snapshots.hardware import read_hardware

    return hardware_class(read_hardware())


def ask(question: str, yes: bool) -> None:
    """Return if the operator agrees; nobody is asked without a terminal."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise refused("this needs your agreement and there is no terminal to ask on; use --yes")
    if not typer.confirm(question, default=False):
        tell("nothing was changed")
        raise typer.Exit(REFUSED)


def refuse_read_only() -> None:
    if os.environ.get("DDTREE_READ_ONLY", "").lower() not in ("", "0", "false", "no", "off"):
        raise refused("refused: DDTREE_READ_ONLY is set")


def refused(line: str) -> Exception:
    from snapshots.git import StoreRefused

    return StoreRefused(line)
