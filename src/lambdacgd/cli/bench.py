"""``lambdacgd bench``: how long the noise and a whole step take here, beside a peer measured in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

bench = typer.Typer(no_args_is_help=True, help="Measure the noise stage or a whole training step on this machine.")

Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1 …; CUDA where there is one.")]
Out = Annotated[Path | None, typer.Option("--out", help="Write JSON here, after every measurement.")]


@bench.command()
def noise(
    model: Annotated[
        list[str] | None, typer.Option("--model", help="May be given more than once; default: all.")
    ] = None,
    device: Device = None,
    bands: Annotated[list[int] | None, typer.Option("--bands", help="Default: 2, 4 and 16.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="Time spent on each contender.")] = 0.5,
    buffer_gib: Annotated[float, typer.Option("--buffer-gib", help="Skip noise buffers larger than this.")] = 8.0,
    out: Out = None,
) -> None:
    """Noise alone: ours, Opacus's loop, the paper's rewinding generator, a plain copy, and noise buffers."""
    from lambdacgd.noise.benchmark import run

    run(model, device, bands=bands or (2, 4, 16), seconds=seconds, buffer_gib=buffer_gib, out=out)


@bench.command()
def step(
    model: Annotated[
        list[str] | None, typer.Option("--model", help="May be given more than once; default: all.")
    ] = None,
    mode: Annotated[list[str] | None, typer.Option("--mode", help="May be given more than once; default: all.")] = None,
    precision: Annotated[
        list[str] | None, typer.Option("--precision", help="fp32, tf32 or bf16; default: both last.")
    ] = None,
    device: Device = None,
    batch: Annotated[
        int | None, typer.Option("--batch", help="Examples in a batch; default: each model's own.")
    ] = None,
    warm_up: Annotated[int, typer.Option("--warm-up", help="Steps before the clock starts.")] = 5,
    repeats: Annotated[int, typer.Option("--repeats", help="Steps measured; the median counts.")] = 20,
    out: Out = None,
) -> None:
    """A whole training step: non-private, Opacus (hooks and ghost), and ours; time and peak memory."""
    import torch

    from lambdacgd.clipping.benchmark import MODES, run
    from lambdacgd.clipping.benchmark_models import CASES

    run(
        model or list(CASES),
        precisions=precision or ["tf32", "bf16"],
        modes=mode or list(MODES),
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
        warm_up=warm_up,
        repeats=repeats,
        batch=batch,
        out=out,
    )


@bench.command()
def pair(
    model: Annotated[
        list[str] | None, typer.Option("--model", help="May be given more than once; default: all.")
    ] = None,
    precision: Annotated[
        list[str] | None, typer.Option("--precision", help="fp32, tf32 or bf16; default: both last.")
    ] = None,
    device: Device = None,
    batch: Annotated[
        int | None, typer.Option("--batch", help="Examples in a batch; default: each model's own.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Of twelve steps each; at least 6.")] = 40,
    out: Out = None,
) -> None:
    """λCGD's whole step over DP-SGD's, to a fraction of a percent: one model, the two noises taking turns."""
    import torch

    from lambdacgd.clipping.benchmark_models import CASES
    from lambdacgd.clipping.benchmark_pair import run

    run(
        model or list(CASES),
        precisions=precision or ["tf32", "bf16"],
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
        batch=batch,
        rounds=rounds,
        out=out,
    )
