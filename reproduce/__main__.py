"""The command line of a checkout: ``python -m reproduce rmse-table``, ``… train``, ``… bench step``, ``… --list``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from lambdacgd.cli import guarded
from lambdacgd.cli.options import flag
from lambdacgd.validation import InvalidInput, number
from reproduce import EXPERIMENTS
from reproduce.cli_bench import bench
from reproduce.cli_train import train

app = typer.Typer(
    name="reproduce",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The paper's tables and figures, benchmarks, and training on known data sets.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return guarded(typer.main.get_command(app), argv, program="reproduce")


def _list(show: bool) -> None:
    if show:
        for name, (_, what) in EXPERIMENTS.items():
            print(f"{name:<18} {what}")
        raise typer.Exit


@app.callback()
def root(
    show: Annotated[bool, flag("--list", callback=_list, is_eager=True, help="Name what can be reproduced.")] = False,
) -> None:
    """The paper's tables and figures, benchmarks, and training on known data sets."""


def _command(name: str) -> Callable[..., None]:
    """The command that computes one experiment."""

    def compute(
        out: Annotated[
            Path, typer.Option("--out", help="Folder; CSV, JSON, Markdown and plots go to a folder NAME in it.")
        ] = Path("out"),
        quick: Annotated[bool, flag("--quick", help="A small version that ends in a minute or two.")] = False,
        data: Annotated[
            Path | None, typer.Option("--data", help="Folder with the data set, where the experiment trains on one.")
        ] = None,
        weights: Annotated[
            Path | None,
            typer.Option(
                "--weights", help="methods-imdb: folder with a pretrained BERT (config.json, model.safetensors)."
            ),
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
        from reproduce import framework

        experiment = framework.load(name)
        if device is not None and not collect:  # cells that another machine finished are drawn anywhere
            from reproduce.session import usable_device

            device = usable_device(device)
        if stop_after is not None:
            number("stop_after", stop_after, above=0)
        if weights is not None and name != "methods-imdb":
            raise InvalidInput("weights", str(weights), f"{name} takes none; methods-imdb fine-tunes them")
        settings = framework.Settings(quick=quick, data=data, weights=weights, device=device)
        folder = out / experiment.name
        framework.reproduce(experiment, folder, settings=settings, stop_after=stop_after, collect=collect)
        print(folder / f"{experiment.name}.md")

    return compute


for _name, (_, _what) in EXPERIMENTS.items():
    app.command(_name, help=f"{_what[0].upper()}{_what[1:]}. An interrupted run goes on where it stopped.")(
        _command(_name)
    )
app.command()(train)
app.add_typer(bench, name="bench")

if __name__ == "__main__":
    sys.exit(main())
