"""The commands and their options. Heavy imports wait until a command runs, so that ``--help`` is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lambdacgd.cli.options import flag, number_or_auto
from lambdacgd.version import __version__

app = typer.Typer(
    name="lambdacgd",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Differentially private training whose noise cancels itself.",
)


def command() -> Any:
    """The command tree, ready to be called with arguments."""
    return typer.main.get_command(app)


def _version(show: bool) -> None:
    if show:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, flag("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Differentially private training whose noise cancels itself."""


Examples = Annotated[int, typer.Option("--examples", help="Training examples N.")]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Expected batch size B, which sums are divided by.")]
Epochs = Annotated[int, typer.Option("--epochs", help="Epochs k.")]
Epsilon = Annotated[float, typer.Option("--epsilon", help="Privacy budget ε; inf means no noise at all.")]
Delta = Annotated[float, typer.Option("--delta", help="Privacy budget δ, below 1/N.")]
Bands = Annotated[int | None, typer.Option("--bands", help="Bands p of a banded mechanism (default 4).")]
Buffers = Annotated[int | None, typer.Option("--buffers", help="Buffers of BLT (default 3).")]
SamplingName = Annotated[str, typer.Option("--sampling", help="balls-in-bins, poisson or cyclic (no amplification).")]
BinsKind = Annotated[
    str | None,
    typer.Option(
        "--bins",
        help="Balls-in-Bins drawn anew every epoch, where noise restarts (fresh, the default for λCGD and DP-SGD), "
        "or once (fixed, the paper's).",
    ),
]
StepsPerEpoch = Annotated[int | None, typer.Option("--steps-per-epoch", help="Steps per epoch b (default ⌊N/B⌋).")]
AsJson = Annotated[bool, flag("--json", help="Print JSON and nothing else.")]
NoCache = Annotated[bool, flag("--no-cache", help="Compute everything anew, keep nothing on disk.")]
Estimate = Annotated[
    bool,
    flag("--estimate", help="A quick point estimate of σ instead of a certified one. Not a privacy claim."),
]


@app.command()
def plan(
    examples: Examples,
    batch_size: BatchSize,
    epochs: Epochs,
    delta: Delta,
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", help="Privacy budget ε; inf means no noise at all.")
    ] = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option("--noise-multiplier", help="σ, instead of ε: which ε it gives is computed. λ must be given."),
    ] = None,
    mechanism: Annotated[
        str,
        typer.Option(
            "--mechanism", help="dp-sgd, lambda-cgd, bisr, bandinvmf, gamma-bifr, blt, bsr, bandmf or diagonal."
        ),
    ] = "lambda-cgd",
    lam: Annotated[
        str | None, typer.Option("--lambda", help="λ of λCGD: a number in [0, 1) or auto (default).")
    ] = None,
    normalized: Annotated[bool, flag("--normalized", help="Column-normalised λCGD.")] = False,
    bands: Bands = None,
    buffers: Buffers = None,
    gamma: Annotated[
        str | None, typer.Option("--gamma", help="γ of γ-BIFR: a number in [0, 1) or auto (default).")
    ] = None,
    amplified: Annotated[
        bool, flag("--amplified", help="Optimise BandInvMF for the amplified RMSE, the accountant in the loop.")
    ] = False,
    objective: Annotated[
        str | None,
        typer.Option("--objective", help="What auto minimises: guideline, amplified-rmse, rmse or maxse."),
    ] = None,
    sampling: SamplingName = "balls-in-bins",
    bins: BinsKind = None,
    steps_per_epoch: StepsPerEpoch = None,
    estimate: Estimate = False,
    cross_check: Annotated[
        bool, flag("--cross-check", help="Check the certified σ of λCGD against independent Monte Carlo.")
    ] = False,
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option("--out", help="Write the plan to this file, for train --plan.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw RMSE and MaxSE over λ (and δ over ε) to this PNG, SVG or PDF.")
    ] = None,
    no_cache: NoCache = False,
) -> None:
    """How much noise a private training run needs, and how wrong it makes the model."""
    from lambdacgd.cli import planner

    with planner.session(no_cache):
        planner.show_plan(
            examples=examples,
            batch_size=batch_size,
            epochs=epochs,
            epsilon=epsilon,
            noise_multiplier=noise_multiplier,
            delta=delta,
            mechanism=mechanism,
            lam=number_or_auto("lam", lam),
            normalized=normalized or None,
            bands=bands,
            buffers=buffers,
            gamma=number_or_auto("gamma", gamma),
            amplified=amplified or None,
            objective=objective,
            sampling=sampling,
            bins=bins,
            steps_per_epoch=steps_per_epoch,
            estimate=estimate,
            cross_check=cross_check,
            as_json=as_json,
            out=out,
            plot=plot,
        )


@app.command()
def compare(
    examples: Examples,
    batch_size: BatchSize,
    epochs: Epochs,
    epsilon: Epsilon,
    delta: Delta,
    bands: Bands = None,
    buffers: Buffers = None,
    sampling: SamplingName = "balls-in-bins",
    bins: BinsKind = None,
    steps_per_epoch: StepsPerEpoch = None,
    certify: Annotated[
        bool, flag("--certify", help="Certify every σ, not only the exact ones; takes longer still.")
    ] = False,
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the comparison to this PNG, SVG or PDF.")] = None,
    no_cache: NoCache = False,
) -> None:
    """What each noise mechanism would cost, side by side. The first time may take minutes; answers are cached."""
    from lambdacgd.cli import planner

    with planner.session(no_cache):
        planner.show_comparison(
            examples=examples,
            batch_size=batch_size,
            epochs=epochs,
            epsilon=epsilon,
            delta=delta,
            bands=bands,
            buffers=buffers,
            sampling=sampling,
            bins=bins,
            steps_per_epoch=steps_per_epoch,
            estimate=not certify,
            as_json=as_json,
            plot=plot,
        )


@app.command()
def demo(
    seeds: Annotated[int, typer.Option("--seeds", help="Runs of each, with other weights, batches and noise.")] = 5,
) -> None:
    """Train DP-SGD and DP-λCGD on handwritten digits at the same (ε, δ) and compare their test accuracy."""
    from lambdacgd.cli import demo as digits

    digits.demo(seeds)
