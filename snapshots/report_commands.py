"""`ddtree report`: one Markdown or HTML page from result files of bench and tune, and from snapshots."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.command_options import tell
from snapshots.command_parts import StoreFolder, store_at

if TYPE_CHECKING:
    from runtime.report import Plot
    from snapshots.report import Found

LATEST = 10


class Form(StrEnum):
    """How the page is written."""

    markdown = "markdown"
    html = "html"


def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="Results that bench --output or tune --json wrote."),
    ] = None,
    snapshot: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SNAPSHOT", help="This snapshot too: id, tag, label, latest or latest~N; repeat."
        ),
    ] = None,
    last: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=1000, help="The N newest snapshots too.")
    ] = None,
    store: StoreFolder = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the page here (.md or .html); default: Markdown to stdout."),
    ] = None,
    form: Annotated[
        Form | None, typer.Option("--format", help="Default: by the name of --output, else markdown.")
    ] = None,
    title: Annotated[str, typer.Option(metavar="TEXT", help="Heading of the page.")] = "Measurements",
) -> int:
    """Write one page with tables, plots and the conditions of every figure.

    Of a store alone the newest ten snapshots are told of. Markdown names its plots as .svg files beside --output; HTML
    holds them.
    """
    from runtime.report import page, read_result, to_html, to_markdown
    from snapshots.report import snapshot_blocks

    if not files and not snapshot and last is None and store is None:
        raise typer.BadParameter("name result files, or snapshots by --snapshot, --last or --store")
    if form is None:
        form = Form.html if output is not None and output.suffix in (".html", ".htm") else Form.markdown
    results = [(file.name, read_result(file)) for file in files or ()]
    found = _snapshots(store, snapshot or [], last)
    blocks = page(results, title, snapshot_blocks(found), len(found))
    written: list[Path] = []

    def plot(number: int, drawn: "Plot") -> str | None:
        if output is None:
            return None
        file = output.with_name(f"{output.stem}-{number}.svg")
        file.write_text(drawn.svg, encoding="utf-8")
        written.append(file)
        return file.name.replace(" ", "%20")

    text = to_html(blocks) if form is Form.html else to_markdown(blocks, plot)
    if output is None:
        print(text, end="", flush=True)
        return 0
    output.write_text(text, encoding="utf-8")
    tell(f"written: {', '.join(map(str, [output, *written]))}")
    return 0


def _snapshots(store: Path | None, names: list[str], last: int | None) -> "list[Found]":
    """The snapshots that are asked for, each once: those by name as they are named, then the newest."""
    if not names and last is None:
        if store is None:
            return []
        last = LATEST
    into = store_at(store)
    newest = [entry.commit for entry in into.list(limit=last).entries] if last is not None else []
    found = {entry.commit: (entry, snapshot) for entry, snapshot in map(into.load, [*names, *newest])}
    return list(found.values())
