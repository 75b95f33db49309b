"""``lambdacgd train``: one private training run, watched."""

from __future__ import annotations

import math
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from lambdacgd.cli.options import number_or_auto
from lambdacgd.validation import InvalidInput

# What may change when a run is resumed: where and how fast it runs, not what it computes.
_CHANGEABLE = ("device", "workers", "data", "physical_batch_size")
_OPERATOR_NOTE = (
    "NOT PRIVATE. These logs hold training losses and accuracies, which no noise protects. They are for the operator "
    "of this\n"
    "run and must not be published or shared with the model.\n"
)


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
        typer.Option("--bins", help="fresh (redrawn every epoch; default for λCGD and DP-SGD) or fixed Balls-in-Bins."),
    ] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Epochs k.")] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", help="Expected batch size B.")] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate.")] = None,
    clip: Annotated[float | None, typer.Option("--clip", help="Clipping norm ζ.")] = None,
    optimizer: Annotated[str | None, typer.Option("--optimizer", help="sgd (default) or adamw.")] = None,
    ema: Annotated[float | None, typer.Option("--ema", help="Keep an average of the weights with this decay.")] = None,
    physical_batch_size: Annotated[
        int | None, typer.Option("--physical-batch-size", help="At most this many examples in memory at once.")
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", help="Processes that read data ahead.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, …")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Initial weights and dropout; never noise or batches.")
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", help="Folder with the data set's files.")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="A plan file of lambdacgd plan --out.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="TOML file with any of these settings.")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="Go on with the run in this folder.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="New folder for the run (default runs/TASK-TIME).")] = None,
) -> None:
    """Train a model privately, and write weights that may be released."""
    given = {
        "epsilon": epsilon,
        "delta": delta,
        "mechanism": mechanism,
        "lam": number_or_auto("lam", lam),
        "bands": bands,
        "sampling": sampling,
        "bins": bins,
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "clip": clip,
        "optimizer": optimizer,
        "ema": ema,
        "physical_batch_size": physical_batch_size,
        "workers": workers,
        "device": device,
        "seed": seed,
        "data": str(data) if data else None,
    }
    run(task, {name: value for name, value in given.items() if value is not None}, plan, config, resume, out)


def run(
    task: str | None,
    given: dict[str, Any],
    plan: Path | None,
    config: Path | None,
    resume: Path | None,
    out: Path | None,
) -> None:
    """Start or resume a run, train it to the end, and write its release and report."""
    from rich.console import Console

    from lambdacgd.errors import NotPrivateWarning
    from lambdacgd.training.session import Interrupted

    console = Console()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotPrivateWarning)  # said below, in red
        session = (
            _resume(resume, task, given, plan, config, out)
            if resume
            else _start(task, given, plan, config, out, console)
        )
    spent = session.private.spent()
    if math.isinf(session.plan.epsilon):
        console.print("[bold red]NOT PRIVATE: ε = inf adds no noise and clips nothing. For debugging only.")
    elif session.plan.certificate.kind != "bound":
        console.print("[bold red]NOT CERTIFIED: the plan's σ is a point estimate, which claims nothing.")
    where = f"{session.config.task}, {session.plan.mechanism.name}, {spent}"
    console.print(f"{where}\nfolder {session.folder}", highlight=False)
    try:
        _train(session, console)
    except Interrupted:
        console.print(
            f"stopped at a checkpoint; go on with: lambdacgd train --resume {session.folder}", highlight=False
        )
        raise typer.Exit(130) from None
    _finish(session, console)


def _start(
    task: str | None, given: dict[str, Any], plan: Path | None, config: Path | None, out: Path | None, console: Any
) -> Any:
    from dataclasses import replace

    from lambdacgd.planning import Plan
    from lambdacgd.training.config import resolve
    from lambdacgd.training.session import Session

    known = None
    if plan is not None:
        clash = sorted(
            {"epsilon", "delta", "mechanism", "lam", "bands", "sampling", "bins", "epochs", "batch_size"} & set(given)
        )
        if clash:
            raise InvalidInput(clash[0], given[clash[0]], "it is fixed by --plan; leave it out")
        known = _load_plan(plan)
        given = given | {
            "epsilon": known.epsilon,
            "delta": known.delta,
            "epochs": known.epochs,
            "batch_size": known.batch_size,
        }
        given = given | {"mechanism": known.mechanism.name, "sampling": known.sampling.name}
        given = given | {"bins": getattr(known.sampling, "bins", None)}
    settings = resolve(task, config, given)
    folder = out or Path("runs") / f"{settings.task}-{time.strftime('%Y%m%d-%H%M%S')}"
    if known is None:
        with console.status("calibrating the noise"):
            return Session.start(folder, settings)
    assert isinstance(known, Plan)
    return Session.start(folder, replace(settings, lam=None, bands=None), known)


def _load_plan(path: Path) -> Any:
    from lambdacgd.planning import Plan

    try:
        return Plan.load(path)
    except FileNotFoundError:
        raise InvalidInput("plan", str(path), "there is no such file; lambdacgd plan --out writes one") from None


def _resume(
    folder: Path, task: str | None, given: dict[str, Any], plan: Path | None, config: Path | None, out: Path | None
) -> Any:
    from lambdacgd.training.session import Session

    fixed = {"task": task, "plan": plan, "config": config, "out": out}
    fixed |= {name: value for name, value in given.items() if name not in _CHANGEABLE}
    for name, value in fixed.items():
        if value is not None:
            raise InvalidInput(name, str(value), "it is fixed for a run; with --resume leave it out")
    return Session.resume(folder, given)


def _train(session: Any, console: Any) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    log = _operator_log(session.folder, console)
    columns = (
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(
            "loss {task.fields[loss]}  accuracy {task.fields[accuracy]}  ε {task.fields[epsilon]}  {task.fields[rate]}"
        ),
        TimeRemainingColumn(),
    )
    plan = session.plan
    with Bar(*columns, console=console, transient=False) as bar:
        epsilon = f"{plan.epsilon:g} for the whole run"
        row = bar.add_task(
            "steps",
            total=plan.steps,
            completed=session.private.steps_taken,
            epoch=min(session.private.steps_taken // plan.steps_per_epoch + 1, plan.epochs),
            loss="–",
            accuracy="–",
            epsilon=epsilon,
            rate="",
        )

        def report(now: Any) -> None:
            fields: dict[str, Any] = {"completed": now.step, "epoch": now.epoch}
            if not math.isnan(now.loss):
                fields |= {
                    "loss": f"{now.loss:.3f}",
                    "accuracy": f"{100 * now.accuracy:.1f}%",
                    "rate": f"{now.examples_per_second:.0f} examples/s",
                }
                if log is not None:
                    log.add_scalar("not-private/train-loss", now.loss, now.step)
                    log.add_scalar("not-private/train-accuracy", now.accuracy, now.step)
            bar.update(row, **fields)

        try:
            session.train(report)
        finally:
            if log is not None:
                log.close()


def _operator_log(folder: Path, console: Any) -> Any:
    """TensorBoard, if it is installed, in a folder that says what it is."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        console.print("(no TensorBoard logs: pip install 'lambdacgd\\[train]')", style="dim", highlight=False)
        return None
    place = folder / "operator"
    place.mkdir(exist_ok=True)
    (place / "NOT-PRIVATE.txt").write_text(_OPERATOR_NOTE)
    return SummaryWriter(str(place))  # type: ignore[no-untyped-call, unused-ignore]


def _finish(session: Any, console: Any) -> None:
    from lambdacgd.training.report import write_report

    reached = session.test_accuracy()
    folder = session.folder / "release"
    if not folder.exists():
        session.release()
    report = write_report(
        session.folder, session.config, session.plan, test_accuracy=reached, card=session.private.card()
    )
    session.private.detach()
    console.print(f"test accuracy [bold]{100 * reached:.2f}%[/bold], {session.private.spent()}", highlight=False)
    console.print(f"release {folder} (weights and privacy card), report {report}", highlight=False)
    console.print(
        f"the key in {session.folder / 'private'} can subtract the noise: keep it as you keep the data, or destroy it",
        highlight=False,
    )
