"""The command line of a checkout: ``python -m reproduce rmse-table``, ``… train``, ``… bench step``, ``… --list``."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from lambdacgd.cli import guarded
from lambdacgd.cli.options import flag, place_for
from lambdacgd.errors import InvalidInput, integer, number
from reproduce import EXPERIMENTS, bench_noise, bench_step, framework
from reproduce import faults as fault_table
from reproduce.bench_models import CASES
from reproduce.framework import usable_device
from reproduce.made_with import stale
from reproduce.numbers import numbers
from reproduce.pool import bulk
from reproduce.train import train

app = typer.Typer(
    name="reproduce",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The paper's tables and figures, benchmarks, and training on known data sets.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return terminable(typer.main.get_command(app), argv)


def terminable(command: Callable[..., Any], argv: Sequence[str] | None) -> int:
    """``guarded``, and SIGTERM ends the command as Ctrl-C does, so that worker processes end with it."""
    ended_by: list[int] = []
    with _terminable(ended_by):
        code = guarded(command, argv, program="reproduce")
    return 128 + ended_by[0] if ended_by else code  # typer has made 130 of the KeyboardInterrupt


@contextlib.contextmanager
def _terminable(ended_by: list[int]) -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt in this block, and its number is put into ``ended_by``."""

    def end(number: int, frame: FrameType | None) -> None:
        ended_by.append(number)
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # not the main thread: signals do not come here
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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


Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1 …; CUDA where there is one.")]
FINE_TUNING = ("fine-tuning", "lambda-sweep", "amplified-sweep", "epochs-sweep")


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
                "--weights",
                help="fine-tuning and the sweeps: folder with a pretrained BERT (config.json, model.safetensors).",
            ),
        ] = None,
        device: Device = None,
        stop_after: Annotated[
            float | None, typer.Option("--stop-after", help="Begin no new cell after this many seconds.")
        ] = None,
        collect: Annotated[
            bool, flag("--collect", help="Compute nothing: write tables and plots from the finished cells.")
        ] = False,
    ) -> None:
        experiment = framework.load(name)
        if device is not None and not collect:  # cells that another machine finished are drawn anywhere
            device = usable_device(device)
        if stop_after is not None:
            number("stop_after", stop_after, above=0)
        if weights is not None and name not in FINE_TUNING:
            raise InvalidInput("weights", str(weights), f"{name} takes none; {', '.join(FINE_TUNING)} fine-tune them")
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
app.command()(numbers)
app.command()(stale)
app.command("faults")(fault_table.write)


@app.command("pretrain")
def make_weights(
    seconds: Annotated[float, typer.Option("--seconds", help="How long to train.")] = 600.0,
    data: Annotated[Path | None, typer.Option("--data", help="Folder with IMDb.")] = None,
    device: Device = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the weights, as --weights takes it.")] = Path("bert"),
) -> None:
    """Pretrain a small BERT on the reviews of IMDb's other split, without labels, for --weights."""
    import torch

    from reproduce import pretrain

    number("seconds", seconds, above=0)
    pretrain.learn(data, out, seconds, torch.device(usable_device(device)))


bench = typer.Typer(no_args_is_help=True, help="Measure the noise, or a whole training step, on this machine.")

Out = Annotated[Path | None, typer.Option("--out", help="Write JSON here, after every measurement.")]
StepModel = Annotated[
    list[str] | None,
    typer.Option(
        "--model", help=f"{', '.join(CASES)}; may be given more than once. Default: all, which on a CPU takes hours."
    ),
]
Precision = Annotated[
    list[str] | None,
    typer.Option("--precision", help="fp32, tf32 or bf16; may be given more than once. Default: tf32 and bf16."),
]
Batch = Annotated[int | None, typer.Option("--batch", help="Examples in a batch. Default: each model's own.")]


def _check(batch: int | None, out: Path | None, **counts: int) -> None:
    """Before the first model is built: a benchmark records what fails and goes on, for hours."""
    if batch is not None:
        integer("batch", batch)
    for name, value in counts.items():
        integer(name, value, minimum=0 if name == "warm_up" else 1)
    place_for("out", out)


@bench.command()
def noise(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help=f"{', '.join(bench_noise.MODELS)}; may be given more than once. Default: all; on a CPU cnn, wrn-40-4 "
            "and flat-20m.",
        ),
    ] = None,
    device: Device = None,
    bands: Annotated[list[int] | None, typer.Option("--bands", help="Default: 2, 4 and 16.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="Seconds for each contender.")] = 0.5,
    buffer_gib: Annotated[float, typer.Option("--buffer-gib", help="Skip noise buffers larger than this.")] = 8.0,
    out: Out = None,
) -> None:
    """Noise alone: ours, Opacus's loop, the paper's rewinding generator, a plain copy, and noise buffers."""
    number("seconds", seconds, above=0)
    number("buffer_gib", buffer_gib, above=0, include=(0,))
    place_for("out", out)
    place = usable_device(device)
    bench_noise.run(model, place, bands=bands or (2, 4, 16), seconds=seconds, buffer_gib=buffer_gib, out=out)


@bench.command()
def step(
    model: StepModel = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            "--mode",
            help=f"{', '.join(bench_step.MODES)}, which are the default; {', '.join(bench_step.LOOPS)}. May be given "
            "more than once.",
        ),
    ] = None,
    precision: Precision = None,
    device: Device = None,
    batch: Batch = None,
    warm_up: Annotated[int, typer.Option("--warm-up", help="Steps before the clock starts.")] = 5,
    repeats: Annotated[int, typer.Option("--repeats", help="Steps measured; the median counts.")] = 20,
    out: Out = None,
) -> None:
    """A whole training step: non-private, Opacus (hooks and ghost), and ours; time and peak memory."""
    _check(batch, out, warm_up=warm_up, repeats=repeats)
    bench_step.run(
        model or list(CASES),
        precisions=precision or ["tf32", "bf16"],
        modes=mode or list(bench_step.MODES),
        device=usable_device(device),
        warm_up=warm_up,
        repeats=repeats,
        batch=batch,
        out=out,
    )


@bench.command()
def pair(
    model: StepModel = None,
    precision: Precision = None,
    device: Device = None,
    batch: Batch = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Of twelve steps each; at least 6.")] = 40,
    out: Out = None,
) -> None:
    """λCGD's whole step over DP-SGD's, to a fraction of a percent: one model, the two noises taking turns."""
    _check(batch, out, rounds=rounds)
    bench_step.run_pair(
        model or list(CASES),
        precisions=precision or ["tf32", "bf16"],
        device=usable_device(device),
        batch=batch,
        rounds=rounds,
        out=out,
    )


@bench.command()
def captured(out: Out = None) -> None:
    """Ten epochs of the sweeps' CNN on CUDA: by captured steps, cold and warm, and by the plain loop."""
    place_for("out", out)
    bench_step.run_captured(out=out)


app.add_typer(bench, name="bench")
app.add_typer(bulk, name="bulk")

if __name__ == "__main__":
    sys.exit(main())
