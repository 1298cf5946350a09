"""`ddtree report`: one Markdown or HTML page from result files of bench and tune."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.command_options import tell

if TYPE_CHECKING:
    from runtime.report import Plot


class Form(StrEnum):
    """How the page is written."""

    markdown = "markdown"
    html = "html"


def report(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Results that bench --output or tune --json wrote."),
    ],
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

    Markdown names its plots as .svg files beside --output; HTML holds them.
    """
    from runtime.report import page, read_result, to_html, to_markdown

    if form is None:
        form = Form.html if output is not None and output.suffix in (".html", ".htm") else Form.markdown
    blocks = page([(file.name, read_result(file)) for file in files], title)
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
