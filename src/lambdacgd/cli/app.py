"""The commands and their options. Heavy imports wait until a command runs, so that ``--help`` is instant."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lambdacgd.cli.options import flag, place_for, plan_flags, with_flags
from lambdacgd.errors import InvalidInput, at_least
from lambdacgd.version import __version__

AsJson = Annotated[bool, flag("--json", help="Print JSON and nothing else.")]

RUN: dict[str, Any] = {
    "examples": Annotated[int, typer.Option(help="Training examples N.")],
    "batch_size": Annotated[
        int, typer.Option(help="Batch size B: an epoch has b = ⌊N/B⌋ steps, of N/b examples on average.")
    ],
    "epochs": Annotated[int, typer.Option(help="Epochs k.")],
    "delta": Annotated[float, typer.Option(help="Privacy budget δ, below 1/N.")],
    "steps_per_epoch": Annotated[int | None, typer.Option(help="Steps per epoch b (default ⌊N/B⌋).")],
}
"""The flags of every planned run, by the arguments of ``lc.plan``."""
BUDGET = {
    "epsilon": Annotated[float | None, typer.Option(help="Privacy budget ε; inf means no noise at all.")],
    "noise_multiplier": Annotated[
        float | None, typer.Option(help="σ, instead of ε: which ε it gives is computed. Give --lambda, too.")
    ],
}
COMPARED = ("bands", "buffers", "sampling", "bins", "schedule", "warmup", "final_rate")
"""Of the flags that describe a mechanism and a sampling, those of ``compare``."""


def command(arguments: Sequence[str] = ()) -> Any:
    """Build the command tree for a call with these arguments.

    The flags of ``plan`` and ``compare`` follow from the mechanisms' and samplings' dataclasses, which need NumPy and
    SciPy: they are read only where one of the two commands is called.
    """
    app = typer.Typer(
        name="lambdacgd",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="Differentially private training whose noise cancels itself.",
    )
    described = plan_flags() if {"plan", "compare"} & set(arguments) else {}
    compared = {name: described[name] for name in COMPARED if name in described}
    app.callback()(root)
    app.command()(with_flags(plan, RUN | BUDGET | described))
    app.command()(with_flags(compare, RUN | {"epsilon": Annotated[float, typer.Option(help="ε.")]} | compared))
    for other in (epsilon, check, audit, verify, demo):
        app.command()(other)
    return typer.main.get_command(app)


def _version(show: bool) -> None:
    if show:
        print(__version__)
        raise typer.Exit


def root(
    version: Annotated[bool, flag("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Differentially private training whose noise cancels itself."""


def plan(
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option(help="Write the plan to this file: Plan.load reads it.")] = None,
    **request: Any,
) -> None:
    """How much noise a private training run needs, and how wrong it makes the model."""
    from lambdacgd.cli import planner

    planner.show_plan(request, as_json=as_json, out=out)


def compare(
    as_json: AsJson = False,
    **request: Any,
) -> None:
    """What each noise mechanism would cost, side by side. The first time may take minutes; answers are cached."""
    from lambdacgd.cli import planner

    planner.show_comparison(request, as_json=as_json)


def epsilon(
    delta: Annotated[float | None, typer.Option(help="δ; a plan's own if not given.")] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan file, of any mechanism and sampling.")] = None,
    sampling_rate: Annotated[
        float | None, typer.Option(help="q, the chance of an example to take part in a step (Poisson sampling).")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps taken.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="σ, relative to the clipping norm.")] = None,
    as_json: AsJson = False,
) -> None:
    """The ε of a run: DP-SGD with Poisson sampling, as Opacus trains it, or the run of a plan."""
    from lambdacgd import questions
    from lambdacgd.planning import Plan

    loaded = None if plan is None else Plan.load(plan)
    if loaded is None and None in (delta, sampling_rate, steps, noise_multiplier):
        raise ValueError("Give --plan FILE, or all of --sampling-rate, --steps, --noise-multiplier and --delta.")
    delta = loaded.delta if delta is None and loaded is not None else delta
    assert delta is not None
    run = {"noise_multiplier": noise_multiplier, "sampling_rate": sampling_rate}
    answer = questions.epsilon(loaded, delta=delta, steps=steps, **run)
    if as_json:
        print(json.dumps({"epsilon": answer, "delta": delta}))
        return
    drawn = "Poisson sampling" if loaded is None else loaded.sampling.kind
    print(f"ε = {at_least(answer)} at δ = {delta:g} ({drawn}; zero-out of one example)")


def check(
    factory: Annotated[
        str,
        typer.Argument(
            help="module:function of yours that returns a model, a batch of three or more examples and the training "
            "loss as a function of both; or a model, a list of examples, the loss and the collate_fn that makes a "
            "batch of the list.",
            show_default=False,
        ),
    ],
    loss_reduction: Annotated[
        str, typer.Option(help="Whether the loss is the mean or the sum over examples.")
    ] = "mean",
) -> None:
    """Check that a model of yours can be trained privately: its clipped gradients against one example at a time."""
    if loss_reduction not in ("mean", "sum"):
        raise InvalidInput("loss_reduction", loss_reduction, "it must be mean or sum")
    make = _imported("factory", factory)
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise InvalidInput("factory", f"{factory} is called without arguments: {error}") from None
    made = make()
    from torch import nn

    from lambdacgd.clipping import check_model

    fits = isinstance(made, tuple) and len(made) in (3, 4) and isinstance(made[0], nn.Module)
    if not (fits and all(callable(call) for call in made[2:])):
        wanted = "a model, a batch and a loss: return model, (x, y), lambda model, batch: …"
        raise InvalidInput("factory", f"{factory} must return {wanted}")
    model, batch, loss, collate_fn = (*made, None)[:4]
    report = check_model(model, batch, loss=loss, loss_reduction=loss_reduction, collate_fn=collate_fn)  # type: ignore[arg-type]
    print(f"{type(model).__name__} can be trained privately: clipped sums are those of one example at a time. {report}")


def _imported(parameter: str, factory: str) -> Callable[..., Any]:
    """The function that ``factory`` names as module:function; modules of the current folder can be named, too."""
    module, _, name = factory.partition(":")
    if not module or not name:
        raise InvalidInput(parameter, factory, "it must be module:function, such as models:make for make in models.py")
    sys.path.insert(0, "")  # a console script does not look into the current folder, as ``python -m`` does
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if not (module + ".").startswith(f"{error.name}."):
            raise  # something that the user's module needs
        raise InvalidInput(parameter, factory, f"there is no module {module} here") from None
    finally:
        sys.path.remove("")
    if not callable(function):
        raise InvalidInput(parameter, factory, f"{module} has no function {name}")
    return function


def audit(
    plan: Annotated[Path, typer.Argument(help="A plan file: lambdacgd plan --out writes one.", show_default=False)],
    train: Annotated[
        str | None, typer.Option(help="module:function, a loop of yours; by default the plain loop.")
    ] = None,
    runs: Annotated[int | None, typer.Option(help="How often canaries are trained.")] = None,
    canaries: Annotated[int | None, typer.Option(help="How many canaries in a run.")] = None,
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option(help="Write the report to this JSON file.")] = None,
) -> None:
    """Train canaries by a plan and test what is released against its claim. Exit code 1 if something is caught."""
    place_for("out", out)
    loop = None if train is None else _imported("train", train)
    from lambdacgd.auditing import audit
    from lambdacgd.planning import Plan

    report = audit(Plan.load(plan), loop, runs=runs, canaries=canaries)
    if out:
        report.save(out)
    print(json.dumps(report.to_dict(), indent=2) if as_json else report)
    if not report.passed:
        raise typer.Exit(1)


def verify(
    source: Annotated[
        Path, typer.Argument(help="A plan file, or the folder of a release or its card.", show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Certify σ of a plan or a release again, without the cache. Exit code 2 if it is too small for the claim."""
    from rich.console import Console

    from lambdacgd.questions import verify

    with Console(stderr=True).status("certifying σ again …"):
        claim = verify(source)
    line = f"certified anew: ε = {at_least(claim.epsilon)} at δ = {at_least(claim.delta)} ({claim.method})"
    print(json.dumps(claim.to_dict(), indent=2) if as_json else line)


def demo(seeds: Annotated[int, typer.Option(help="Runs of each, with other weights, batches and noise.")] = 5) -> None:
    """Train DP-SGD and DP-λCGD on handwritten digits at the same (ε, δ) and compare their test accuracy."""
    from lambdacgd.cli import demo as digits

    digits.demo(seeds)
