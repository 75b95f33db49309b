"""``lambdacgd bench``: how long the noise and a whole step take here, beside a peer measured in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lambdacgd.cli.options import place_for
from lambdacgd.validation import integer, number

bench = typer.Typer(no_args_is_help=True, help="Measure the noise stage or a whole training step on this machine.")

Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1 …; CUDA where there is one.")]
Out = Annotated[Path | None, typer.Option("--out", help="Write JSON here, after every measurement.")]
StepModel = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="cnn, wrn-40-4, vit-b, vit-l, vit-h, lstm, bert-tiny, bert-base, bert-large, small-transformer; may be "
        "given more than once. Default: all, which on a CPU takes hours.",
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
            help="cnn, wrn-40-4, vit-b, vit-l, vit-h, bert-tiny, bert-base, bert-large, flat-20m; may be given more "
            "than once. Default: all; on a CPU cnn, wrn-40-4 and flat-20m.",
        ),
    ] = None,
    device: Device = None,
    bands: Annotated[list[int] | None, typer.Option("--bands", help="Default: 2, 4 and 16.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="Time spent on each contender.")] = 0.5,
    buffer_gib: Annotated[float, typer.Option("--buffer-gib", help="Skip noise buffers larger than this.")] = 8.0,
    out: Out = None,
) -> None:
    """Noise alone: ours, Opacus's loop, the paper's rewinding generator, a plain copy, and noise buffers."""
    number("seconds", seconds, above=0)
    number("buffer_gib", buffer_gib, above=0, include=(0,))
    place_for("out", out)
    from reproduce.bench_noise import run
    from reproduce.session import usable_device

    place = usable_device(device)
    run(model, place, bands=bands or (2, 4, 16), seconds=seconds, buffer_gib=buffer_gib, out=out)


@bench.command()
def step(
    model: StepModel = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            "--mode",
            help="non-private, opacus-hooks, opacus-ghost, clip-only, dp-sgd, lambda-cgd; may be given more than once. "
            "Default: all.",
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
    from reproduce.bench_models import CASES
    from reproduce.bench_step import MODES, run
    from reproduce.session import usable_device

    run(
        model or list(CASES),
        precisions=precision or ["tf32", "bf16"],
        modes=mode or list(MODES),
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
    from reproduce.bench_models import CASES
    from reproduce.bench_pair import run
    from reproduce.session import usable_device

    run(
        model or list(CASES),
        precisions=precision or ["tf32", "bf16"],
        device=usable_device(device),
        batch=batch,
        rounds=rounds,
        out=out,
    )
