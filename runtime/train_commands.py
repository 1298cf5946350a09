"""The command `ddtree train-drafter`; everything heavy is imported inside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

STAGES = ("prompts", "responses", "train", "export", "all")


def train_drafter(
    out: Annotated[Path, typer.Option(help="Folder of all state; the same folder continues a run.")],
    model: Annotated[str, typer.Option(help="Target: a model name, a .gguf file or a local folder.")] = "",
    prompts: Annotated[
        list[Path] | None, typer.Option(help="JSON lines with prompts; may be repeated.")
    ] = None,
    exclude: Annotated[
        list[Path] | None, typer.Option(help="JSON lines never to train on; may be repeated.")
    ] = None,
    stage: Annotated[str, typer.Option(help="prompts, responses, train, export or all.")] = "all",
    minutes_generate: Annotated[
        float, typer.Option(min=0.01, help="Minutes for self-prompts and responses.")
    ] = 4.5,
    minutes_train: Annotated[float, typer.Option(min=0.01, help="Minutes of training.")] = 14.5,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Seed of every draw.")] = 0,
    self_prompts: Annotated[
        int, typer.Option(min=0, help="Prompts the target writes itself, at most.")
    ] = 150_000,
    layers: Annotated[int, typer.Option(min=1, help="Drafter layers.")] = 4,
    taps: Annotated[
        str, typer.Option(help="Target layers to take features from, such as 1,8,14,20,27.")
    ] = "",
    block_size: Annotated[int, typer.Option(min=2, help="Tokens a block, the root included.")] = 8,
    mask_token_id: Annotated[int | None, typer.Option(help="Token that marks a position to draft.")] = None,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = 1e-3,
    blocks: Annotated[
        int | None, typer.Option(min=16, help="Blocks a step [5120 on a GPU, 128 on a CPU].")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Texts at once [6144 on a GPU, 16 on a CPU].")
    ] = None,
    max_new: Annotated[int, typer.Option(min=16, max=2048, help="Longest response in tokens.")] = 320,
    max_bytes: Annotated[int | None, typer.Option(help="Largest drafter folder.")] = None,
    data_list: Annotated[Path | None, typer.Option(help="JSON list of {name, origin, licence}.")] = None,
) -> None:
    """Train a DFlash drafter for a target on text the target writes itself; resumable, bounded by the clock."""
    if stage not in STAGES:
        _refuse(f"--stage {stage!r} is none of {', '.join(STAGES)}", 2)
    for file in [*(prompts or []), *(exclude or []), *([data_list] if data_list else [])]:
        if not file.is_file():
            _refuse(f"file {file} does not exist; give JSON lines", 2)
    try:
        tapped = tuple(int(each) for each in taps.split(",")) if taps else None
    except ValueError:
        _refuse(f"--taps {taps!r} is no list of layer numbers such as 1,8,14,20,27", 2)

    import torch

    from runtime.config import validate
    from runtime.interface import ConfigRejected
    from runtime.loader import device_of
    from runtime.models import DEFAULT_MODEL, open_checkpoint
    from runtime.train_drafter import TrainOptions
    from runtime.train_stages import TrainingRun, run_stages, with_device_defaults

    try:
        place = device_of(validate({"device": device}))
    except ConfigRejected as refused:
        _refuse(str(refused), 2)
    try:
        options = TrainOptions(minutes=minutes_train, seed=seed, learning_rate=learning_rate)
        run = TrainingRun(
            checkpoint=open_checkpoint(model or DEFAULT_MODEL, allow_fetch=True),
            folder=out,
            device=place,
            options=options,
            prompts=tuple(prompts or ()),
            exclude=tuple(exclude or ()),
            minutes_generate=minutes_generate,
            self_prompts=self_prompts,
            layers=layers,
            taps=tapped,
            block_size=block_size,
            mask_token_id=mask_token_id,
            max_new=max_new,
            max_bytes=max_bytes,
            data_list=data_list,
        )
        run_stages(with_device_defaults(run, rows, blocks), stage)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        _refuse(str(error).splitlines()[0], 1)


def _refuse(text: str, code: int) -> NoReturn:
    typer.echo(f"ddtree train-drafter: {text}", err=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(train_drafter)
