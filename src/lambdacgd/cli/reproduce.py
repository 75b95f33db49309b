"""``lambdacgd reproduce``: the paper's tables and figures, from scratch, at one command each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lambdacgd.cli.options import flag, usable_device
from lambdacgd.experiments import EXPERIMENTS
from lambdacgd.validation import InvalidInput, number


def reproduce(
    name: Annotated[str | None, typer.Argument(help="Which one; --list names them.")] = None,
    show: Annotated[bool, flag("--list", help="Name what can be reproduced.")] = False,
    out: Annotated[
        Path, typer.Option("--out", help="Folder; CSV, JSON, Markdown and plots go to a folder NAME in it.")
    ] = Path("out"),
    quick: Annotated[bool, flag("--quick", help="A small version that ends in a minute or two.")] = False,
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder with the data set, where the experiment trains on one.")
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", help="methods-imdb: folder with a pretrained BERT (config.json, model.safetensors)."),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda, cuda:1 …; CUDA where there is one.")
    ] = None,
    stop_after: Annotated[
        float | None, typer.Option("--stop-after", help="Begin no new cell after this many seconds.")
    ] = None,
    collect: Annotated[
        bool, flag("--collect", help="Compute nothing: write tables and plots from the finished cells.")
    ] = False,
) -> None:
    """Regenerate one of the paper's tables or figures. Interrupted runs go on where they stopped."""
    if show:
        for title, (_, what) in EXPERIMENTS.items():
            print(f"{title:<18} {what}")
        return
    from lambdacgd.experiments import framework

    experiment = framework.load(name)
    if device is not None and not collect:  # cells that another machine finished are drawn anywhere
        device = usable_device(device)
    if stop_after is not None:
        number("stop_after", stop_after, above=0)
    if weights is not None and name != "methods-imdb":
        raise InvalidInput("weights", str(weights), f"{name} takes none; methods-imdb fine-tunes them")
    settings = framework.Settings(quick=quick, data=data, weights=weights, device=device)
    folder = out / experiment.name
    framework.reproduce(experiment, folder, settings=settings, stop_after=stop_after, collect=collect)
    print(folder / f"{experiment.name}.md")
