"""`ddtree snapshot`: commits working configurations, shows and compares them, and goes back to one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.command_options import Given, ProgressLine, config_options, emit_json, tell
from snapshots.command_parts import (
    REFUSED,
    Json,
    Name,
    StoreFolder,
    UnderLoad,
    Url,
    ask,
    given_words,
    hardware_here,
    refuse_read_only,
    refused,
    show_entry,
    store_at,
    with_runtime,
)
from snapshots.upkeep_commands import add_upkeep

if TYPE_CHECKING:
    from runtime.interface import Runtime
    from snapshots.message import Entry
    from snapshots.rollback import Outcome, Preview
    from snapshots.saving import SaveRequest
    from snapshots.store import Store

snapshot_app = typer.Typer(
    help="Commit working configurations, compare them, and go back to one.", no_args_is_help=True
)

Label = Annotated[str, typer.Option(metavar="TEXT", help="One line to find it by.")]
Note = Annotated[str | None, typer.Option(metavar="TEXT", help="Your words, kept as they are.")]
NoteFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Your words from a file; - is stdin.")]
AttachBench = Annotated[
    bool, typer.Option("--measure/--no-measure", help="Take a short bench and attach it.")
]
BenchFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Keep the figures of 'ddtree bench --json'.")
]
Packages = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Compare this package with its wheel too.")
]
Units = Annotated[list[str] | None, typer.Option(metavar="UNIT", help="Keep this systemd unit too.")]
AllowSecret = Annotated[
    bool, typer.Option("--allow-secret", help="Save though something looks like a secret.")
]
FetchOriginals = Annotated[
    bool,
    typer.Option(
        "--fetch-originals/--no-fetch-originals",
        help="Download the wheel of a patched package once, for the diff.",
    ),
]
Push = Annotated[
    bool, typer.Option("--push/--no-push", help="Push in the background where there is a remote.")
]


@snapshot_app.command()
@config_options()
def save(
    given: Given,
    label: Label = "",
    note: Note = None,
    note_file: NoteFile = None,
    measure: AttachBench = False,
    under_load: UnderLoad = False,
    bench: BenchFile = None,
    package: Packages = None,
    unit: Units = None,
    allow_secret: AllowSecret = False,
    fetch_originals: FetchOriginals = True,
    push: Push = True,
    store: StoreFolder = None,
    url: Url = None,
    json: Json = False,
) -> int:
    """Commit what runs: settings, figures of the last minutes, host, patched files, units.

    With no running instance: the settings it would start with, marked "not running, not measured".
    """
    from snapshots.patches import DEFAULT_PACKAGES
    from snapshots.remote import get_remote, push_in_background
    from snapshots.saving import SaveRequest, save_running

    refuse_read_only()
    request = SaveRequest(
        label=label,
        note=given_words(note, note_file),
        packages=(*DEFAULT_PACKAGES, *(package or ())),
        units=tuple(unit or ()),
        allow_secret=allow_secret,
        fetch_originals=fetch_originals,
        bench_file=bench,
    )
    into = store_at(store)

    async def act(runtime: Runtime | None) -> int:
        code = 0
        if runtime is None:
            entry = await _save_stopped(into, given, request, measure)
        elif given.file is not None:
            raise typer.BadParameter(
                "a runtime is running; its own settings are saved", param_hint="--config"
            )
        else:
            entry = await save_running(into, runtime, request)
            if measure:
                code = await _attach_bench(into, entry, runtime, under_load)
        if push and get_remote(into) is not None:
            push_in_background(into)
        show_entry(into.entry(entry.commit), json, "saved")
        return code

    return with_runtime(url, act)


async def _save_stopped(into: Store, given: Given, request: SaveRequest, measure: bool) -> Entry:
    """Commits the settings that a start would have, where nothing runs."""
    from snapshots.saving import save_resolved

    if measure:
        raise refused("no instance is running, so nothing can be measured; start one or use --no-measure")
    return await save_resolved(into, given.resolve().config.model_dump(), request)


async def _attach_bench(into: Store, entry: Entry, runtime: Runtime, under_load: bool) -> int:
    """Measures what runs and adds the figure to its snapshot; the exit code. A refusal leaves the snapshot saved."""
    from snapshots.git import StoreRefused
    from snapshots.live import standard_bench
    from snapshots.saving import attach

    try:
        with ProgressLine() as progress:
            figure = await standard_bench(runtime, under_load, progress)
        attach(into, entry, figure)
    except StoreRefused as reason:
        tell(f"saved, and {reason}")
        return REFUSED
    return 0


@snapshot_app.command("list")
def list_snapshots(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[WORD]...", help="Only those with all words.")
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=10_000, help="Rows.")] = 50,
    offset: Annotated[int, typer.Option(metavar="N", min=0, help="Leave out the newest N.")] = 0,
    store: StoreFolder = None,
    json: Json = False,
) -> None:
    """List snapshots, newest first."""
    from snapshots import wording

    into = store_at(store)
    page = into.list(" ".join(words or ()), offset, limit)
    if json:
        emit_json(
            {
                "snapshots": [wording.entry_json(entry) for entry in page.entries],
                "more": page.more,
                "remote": page.remote,
                "not_pushed": page.unpushed,
            }
        )
        return
    wording.told(wording.list_lines(page, into.place, hardware_here() if page.entries else "n/a"))


@snapshot_app.command()
def show(
    name: Name,
    file: Annotated[
        str | None, typer.Option(metavar="PATH", help="One file of it as it is, as config.toml.")
    ] = None,
    store: StoreFolder = None,
    json: Json = False,
) -> None:
    """Show one snapshot: its page, or one file of it."""
    from snapshots import wording

    into = store_at(store)
    entry, snapshot = into.load(name)
    files = into.files(entry.commit)
    if file is not None:
        if file not in files:
            raise typer.BadParameter(
                f"{file!r} is not in it; there are {', '.join(sorted(files))}", param_hint="--file"
            )
        sys.stdout.buffer.write(files[file])
        sys.stdout.buffer.flush()
        return
    if json:
        content = snapshot.model_dump(exclude={"patches", "note", "label"})
        patches = [each.model_dump(exclude={"content", "original"}) for each in snapshot.patches]
        emit_json(
            {"snapshot": {**wording.entry_json(entry), **content, "patches": patches}, "files": sorted(files)}
        )
        return
    print(f"{entry.id}  commit {entry.commit}")
    if entry.foreign:
        print("not made on this host: its patches and units need --trust to be restored")
    if entry.annotation:
        wording.told(["note added later:", *(f"  {line}" for line in wording.lines_of(entry.annotation))])
    wording.told(files.get("README.md", b"").decode("utf-8", "replace").splitlines())


@snapshot_app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="FIRST", help="The one before.")],
    second: Annotated[str, typer.Argument(metavar="[SECOND]", help="The one after.")] = "latest",
    store: StoreFolder = None,
    json: Json = False,
) -> None:
    """Compare two snapshots: settings, results, host, patches, units."""
    from snapshots import wording
    from snapshots.diff import compare, text

    into = store_at(store)
    (one, before), (other, after) = into.load(first), into.load(second)
    changes = compare(before, after)
    if json:
        emit_json(
            {
                "before": wording.entry_json(one),
                "after": wording.entry_json(other),
                **wording.diff_json(changes),
            }
        )
        return
    wording.told([f"from {one.id} {one.label}", f"to   {other.id} {other.label}", *text(changes)])


@snapshot_app.command()
@config_options()
def rollback(
    given: Given,
    name: Name,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what it would do.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    patches: Annotated[
        bool, typer.Option("--patches/--no-patches", help="Restore patched files of the same version.")
    ] = True,
    units: Annotated[bool, typer.Option("--units", help="Write the service units too.")] = False,
    trust: Annotated[
        str | None, typer.Option(metavar="COMMIT", help="Restore files of this foreign snapshot.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure/--no-measure", help="Bench afterwards and say whether figures are back."),
    ] = True,
    under_load: UnderLoad = False,
    store: StoreFolder = None,
    url: Url = None,
    json: Json = False,
) -> int:
    """Go back to a snapshot: preview, a new commit, the change, a probe, a bench and a verdict."""
    from runtime.connect import author
    from snapshots import wording
    from snapshots.rollback import RollbackOptions, perform, preview

    if not dry_run:
        refuse_read_only()
    into = store_at(store)
    options = RollbackOptions(patches, units, trust, measure, under_load, author("snapshot rollback"))

    async def act(runtime: Runtime | None) -> int:
        config = given.resolve().config.model_dump() if runtime is None else None
        plan = await preview(into, name, runtime, options, config)
        if not json or not (yes or dry_run):
            wording.told(plan.text())
        if dry_run:
            if json:
                emit_json(_plan_json(plan))
            return REFUSED if plan.refusals else 0
        if not plan.refusals:
            ask(f"Roll back to {plan.entry.id}?", yes)
        with ProgressLine() as progress:
            outcome = await perform(into, plan, runtime, progress)
        _show_outcome(plan, outcome, json)
        return 0

    return with_runtime(url, act)


def _plan_json(plan: Preview) -> dict[str, Any]:
    from snapshots import wording

    return {
        "snapshot": wording.entry_json(plan.entry),
        **wording.diff_json(plan.changes),
        "change": plan.change,
        "plan": plan.plan and plan.plan.model_dump(mode="json"),
        "patch_plan": list(plan.patches.lines) if plan.patches else [],
        "trusted": plan.trusted,
        "same_hardware": plan.same_hardware,
        "refused": list(plan.refusals),
    }


def _show_outcome(plan: Preview, outcome: Outcome, json: bool) -> None:
    from snapshots import wording

    if json:
        emit_json(
            {
                **_plan_json(plan),
                "commit": wording.entry_json(outcome.entry),
                "applied": outcome.applied,
                "files": list(outcome.files),
                "figure": outcome.figure and outcome.figure.model_dump(),
                "back": outcome.back,
                "verdict": outcome.verdict,
                "notes": list(outcome.notes),
                "kept": outcome.kept,
            }
        )
        return
    wording.told(
        [
            f"rolled back to {plan.entry.id} as {outcome.entry.id}: {outcome.applied}",
            *(f"wrote {path}" for path in outcome.files),
            *outcome.notes,
            *([outcome.kept] if outcome.kept else []),
            outcome.verdict,
        ]
    )


add_upkeep(snapshot_app)
