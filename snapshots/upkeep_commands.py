"""Commands of `ddtree snapshot` on what is there already: measure again, hand on, name, annotate, push, pull."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.command_options import ProgressLine, emit_json
from snapshots.command_parts import (
    Json,
    Name,
    StoreFolder,
    UnderLoad,
    Url,
    given_words,
    refuse_read_only,
    show_entry,
    store_at,
    with_runtime,
)

if TYPE_CHECKING:
    from runtime.interface import Runtime

remote_app = typer.Typer(help="Where snapshots are pushed to.", no_args_is_help=True)


def add_upkeep(app: typer.Typer) -> None:
    """Add these commands to `app`."""
    app.add_typer(remote_app, name="remote")
    for name, command in (
        ("verify", verify),
        ("bisect", bisect),
        ("export", export_snapshot),
        ("import", import_snapshot),
        ("tag", tag),
        ("note", note),
        ("push", push),
        ("pull", pull),
    ):
        app.command(name)(command)


def verify(
    name: Name, under_load: UnderLoad = False, store: StoreFolder = None, url: Url = None, json: Json = False
) -> int:
    """Measure a snapshot's configuration again; exit code 1 if its figures do not hold."""
    from snapshots import checks, wording

    into = store_at(store)

    async def act(runtime: Runtime | None) -> int:
        with ProgressLine() as progress:
            found = await checks.verify(into, name, runtime, under_load, progress)
        if json:
            emit_json(
                {
                    "snapshot": wording.entry_json(found.entry),
                    "then": found.then and found.then.model_dump(),
                    "now": found.now.model_dump(),
                    "holds": found.holds,
                    "verdict": found.verdict,
                }
            )
        else:
            wording.told([found.verdict])
        return 1 if found.holds is False else 0

    return with_runtime(url, act)


def bisect(
    good: Annotated[str, typer.Argument(metavar="GOOD", help="An older snapshot that is fast.")],
    bad: Annotated[str, typer.Argument(metavar="[BAD]", help="A newer one that is slow.")] = "latest",
    under_load: UnderLoad = False,
    store: StoreFolder = None,
    url: Url = None,
    json: Json = False,
) -> int:
    """Find the snapshot where tok/s fell, by measuring those between a good and a bad one."""
    from snapshots import checks, wording

    refuse_read_only()
    into = store_at(store)

    async def act(runtime: Runtime | None) -> int:
        with ProgressLine() as progress:
            found = await checks.bisect(into, good, bad, runtime, under_load, progress)
        if json:
            emit_json(
                {
                    "good": wording.entry_json(found.good),
                    "bad": wording.entry_json(found.bad),
                    "settings": [vars(each) for each in found.settings],
                    "others": found.others,
                    "results": [{"id": entry.id, **figure.model_dump()} for entry, figure in found.measured],
                    "skipped": [{"id": entry.id, "reason": reason} for entry, reason in found.skipped],
                    "verdict": found.verdict,
                }
            )
            return 0
        rows = [f"  {entry.id}: {figure.tok_s:.1f} tok/s" for entry, figure in found.measured if figure.tok_s]
        rows += [f"  {entry.id}: not measured: {reason}" for entry, reason in found.skipped]
        wording.told(["measured:", *rows, found.verdict, *(f"also differs: {each}" for each in found.others)])
        return 0

    return with_runtime(url, act)


def export_snapshot(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A tar file to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    store: StoreFolder = None,
    json: Json = False,
) -> None:
    """Write one snapshot to a file, to be handed on."""
    from snapshots.transfer import export

    entry = export(store_at(store), name, file, force)
    emit_json({"id": entry.id, "file": str(file)}) if json else print(f"{entry.id} written to {file}")


def import_snapshot(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of 'snapshot export'.")],
    store: StoreFolder = None,
    json: Json = False,
) -> None:
    """Take in a snapshot from a file; its patches and units stay untrusted."""
    from snapshots.transfer import take_in

    refuse_read_only()
    show_entry(take_in(store_at(store), file), json, "imported")


def tag(
    name: Name,
    tag_name: Annotated[str, typer.Argument(metavar="TAG", help="A name of your own.")],
    store: StoreFolder = None,
    json: Json = False,
) -> None:
    """Give a snapshot a name of your own."""
    refuse_read_only()
    show_entry(store_at(store).tag(name, tag_name), json, "tagged")


def note(
    name: Name,
    text: Annotated[str | None, typer.Argument(metavar="[TEXT]", help="Words to add.")] = None,
    note_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Words from a file; - is stdin.")
    ] = None,
    allow_secret: Annotated[
        bool, typer.Option("--allow-secret", help="Add it though it looks like a secret.")
    ] = False,
    store: StoreFolder = None,
    json: Json = False,
) -> None:
    """Add words to a snapshot that is there already, as a git note."""
    from snapshots.saving import SaveRequest, check_words

    refuse_read_only()
    words = given_words(text, note_file)
    if not words:
        raise typer.BadParameter("no words were given", param_hint="TEXT")
    check_words(SaveRequest(note=words, allow_secret=allow_secret))
    show_entry(store_at(store).note(name, words), json, "noted")


@remote_app.command("set")
def remote_set(
    address: Annotated[str, typer.Argument(metavar="URL", help="A repository for snapshots.")],
    store: StoreFolder = None,
    json: Json = False,
) -> None:
    """Set where snapshots are pushed to."""
    from snapshots.remote import set_remote

    refuse_read_only()
    url = set_remote(store_at(store), address)
    emit_json({"remote": url}) if json else print(f"remote: {url}")


@remote_app.command("show")
def remote_show(store: StoreFolder = None, json: Json = False) -> None:
    """Show where snapshots are pushed to, and how many are not there yet."""
    page = store_at(store).list(limit=1)
    if json:
        emit_json({"remote": page.remote, "not_pushed": page.unpushed})
    else:
        print(f"remote: {page.remote or 'none'}" + (f"; not pushed: {page.unpushed}" if page.remote else ""))


def push(store: StoreFolder = None, json: Json = False) -> None:
    """Send what the remote has not; never forced."""
    from snapshots import remote

    count = remote.push(store_at(store))
    emit_json({"pushed": count}) if json else print(f"pushed {count} commit{'' if count == 1 else 's'}")


def pull(store: StoreFolder = None, json: Json = False) -> None:
    """Fetch what the remote has; histories of both sides are kept."""
    from snapshots import remote

    refuse_read_only()
    found = remote.pull(store_at(store))
    if json:
        emit_json({"pulled": found.new, "joined": found.joined})
    else:
        print(
            f"pulled {found.new} commit{'' if found.new == 1 else 's'}"
            + (", histories joined" if found.joined else "")
        )
