"""``python -m reproduce train``: one private training run, watched."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from lambdacgd.cli.options import flag, number_or_auto
from lambdacgd.errors import InvalidInput, NotPrivateWarning
from lambdacgd.integrations.shared import default_key_path
from lambdacgd.planning import Plan
from reproduce.session import Interrupted, Progress, Session, resolve

# What may change when a run is resumed: where and how fast it runs, not what it computes.
_CHANGEABLE = ("device", "workers", "data", "physical_batch_size")


def train(
    task: Annotated[str | None, typer.Argument(help="digits (no download), cifar10 or imdb.")] = None,
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", help="Privacy budget ε; inf debugs without noise.")
    ] = None,
    delta: Annotated[float | None, typer.Option("--delta", help="Privacy budget δ, below 1/N.")] = None,
    mechanism: Annotated[str | None, typer.Option("--mechanism", help="lambda-cgd (default), dp-sgd, bisr, …")] = None,
    lam: Annotated[
        str | None, typer.Option("--lambda", help="λ of λCGD: a number in [0, 1) or auto (default).")
    ] = None,
    bands: Annotated[int | None, typer.Option("--bands", help="Bands p of a banded mechanism.")] = None,
    sampling: Annotated[
        str | None, typer.Option("--sampling", help="balls-in-bins (default), poisson, cyclic.")
    ] = None,
    bins: Annotated[
        str | None,
        typer.Option("--bins", help="fresh (redrawn every epoch; default) or fixed Balls-in-Bins."),
    ] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Epochs k.")] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", help="Expected batch size B.")] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate.")] = None,
    clip: Annotated[float | None, typer.Option("--clip", help="Clipping norm ζ.")] = None,
    optimizer: Annotated[str | None, typer.Option("--optimizer", help="sgd (default) or adamw.")] = None,
    ema: Annotated[float | None, typer.Option("--ema", help="Keep an average of the weights with this decay.")] = None,
    schedule: Annotated[
        str | None, typer.Option("--schedule", help="Of the learning rate: constant (default) or linear, to 1/20.")
    ] = None,
    views: Annotated[
        int | None, typer.Option("--views", help="cifar10: average each gradient over so many crops and mirror images.")
    ] = None,
    normalized: Annotated[
        bool | None, flag("--normalized", help="Column-normalised λCGD: every column of C divided by its norm.")
    ] = None,
    physical_batch_size: Annotated[
        int | None, typer.Option("--physical-batch-size", help="At most this many examples in memory at once.")
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", help="Processes that read data ahead.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, …")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Initial weights and dropout; never noise or batches.")
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", help="Folder with the data set's files.")] = None,
    weights: Annotated[
        Path | None, typer.Option("--weights", help="imdb: folder with a pretrained BERT to fine-tune.")
    ] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="A plan file of lambdacgd plan --out.")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="Go on with the run in this folder.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="New folder for the run (default runs/TASK-TIME).")] = None,
) -> None:
    """Train a model privately, and write weights that may be released."""
    given = dict(locals())
    for name in ("task", "plan", "resume", "out"):
        del given[name]
    given |= {"lam": number_or_auto("lam", lam), "data": data and str(data), "weights": weights and str(weights)}
    run(task, {name: value for name, value in given.items() if value is not None}, plan, resume, out)


def run(task: str | None, given: dict[str, Any], plan: Path | None, resume: Path | None, out: Path | None) -> None:
    """Start or resume a run, train it to the end, and write its release."""
    console = Console()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotPrivateWarning)  # said below, in red
        session = _resume(resume, task, given, plan, out) if resume else _start(task, given, plan, out, console)
    spent = session.private.spent()
    if math.isinf(session.plan.epsilon):
        console.print("[bold red]NOT PRIVATE: ε = inf adds no noise and clips nothing. For debugging only.")
    where = f"{session.config.task}, {session.plan.mechanism.name}, {spent}"
    console.print(f"{where}\nfolder {session.folder}", highlight=False)
    try:
        _train(session, console)
    except Interrupted as stopped:
        console.print(
            f"stopped at a checkpoint; go on with: python -m reproduce train --resume {session.folder}", highlight=False
        )
        raise typer.Exit(128 + stopped.signal) from None
    _finish(session, console)


def _start(task: str | None, given: dict[str, Any], plan: Path | None, out: Path | None, console: Console) -> Session:
    known = None
    if plan is not None:
        clash = sorted(
            {"epsilon", "delta", "mechanism", "lam", "bands", "sampling", "bins", "epochs", "batch_size", "normalized"}
            & set(given)
        )
        if clash:
            raise InvalidInput(clash[0], given[clash[0]], "it is fixed by --plan; leave it out")
        known = _load_plan(plan)
        given = given | {
            "epsilon": known.epsilon,
            "delta": known.delta,
            "epochs": known.epochs,
            "batch_size": known.requested_batch_size,
        }
        given = given | {"mechanism": known.mechanism.name, "sampling": known.sampling.name}
        given = given | {"bins": getattr(known.sampling, "bins", None)}
    settings = resolve(task or "digits", given)
    folder = out or Path("runs") / f"{settings.task}-{time.strftime('%Y%m%d-%H%M%S')}"
    if known is None:
        with console.status("calibrating the noise"):
            return Session.start(folder, settings)
    return Session.start(folder, replace(settings, lam=None, bands=None), known)


def _load_plan(path: Path) -> Plan:
    try:
        return Plan.load(path)
    except FileNotFoundError:
        raise InvalidInput("plan", str(path), "there is no such file; lambdacgd plan --out writes one") from None


def _resume(folder: Path, task: str | None, given: dict[str, Any], plan: Path | None, out: Path | None) -> Session:
    fixed = {"task": task, "plan": plan, "out": out}
    fixed |= {name: value for name, value in given.items() if name not in _CHANGEABLE}
    for name, value in fixed.items():
        if value is not None:
            raise InvalidInput(name, str(value), "it is fixed for a run; with --resume leave it out")
    return Session.resume(folder, given)


def _train(session: Session, console: Console) -> None:
    """Training losses and accuracies are shown to whoever runs this, and kept nowhere: no noise is on them."""
    columns = (
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(),
    )
    plan, taken = session.plan, session.private.steps_taken
    with Bar(*columns, console=console, transient=False) as bar:
        epoch = min(taken // plan.steps_per_epoch + 1, plan.epochs)
        row = bar.add_task("steps", total=plan.steps, completed=taken, epoch=epoch, shown="")

        def report(now: Progress) -> None:
            shown: dict[str, Any] = {}
            if not math.isnan(now.loss):
                speed = f"{now.examples_per_second:.0f} examples/s"
                shown["shown"] = f"loss {now.loss:.3f}  accuracy {100 * now.accuracy:.1f}%  {speed}"
            bar.update(row, completed=now.step, epoch=now.epoch, **shown)

        session.train(report)


def _finish(session: Session, console: Console) -> None:
    reached = session.test_accuracy()
    folder = session.folder / "release"
    if not folder.exists():
        session.release()
    session.private.detach()
    console.print(f"test accuracy [bold]{100 * reached:.2f}%[/bold], {session.private.spent()}", highlight=False)
    console.print(f"release {folder} (weights and privacy card)", highlight=False)
    place = default_key_path(session.folder).parent
    console.print(
        f"the key in {place} can subtract the noise: keep it as you keep the data, or destroy it", highlight=False
    )
