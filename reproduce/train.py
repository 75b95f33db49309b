"""``python -m reproduce train``: one private training run, watched, and the report of it."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from lambdacgd.cli.options import number_or_auto
from lambdacgd.errors import InvalidInput, NotPrivateWarning
from lambdacgd.integrations.shared import default_key_path
from lambdacgd.planning import Plan
from lambdacgd.training.card import to_markdown
from reproduce.session import Config, Interrupted, Session, resolve

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
        typer.Option("--bins", help="fresh (redrawn every epoch; default) or fixed Balls-in-Bins."),
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
    weights: Annotated[
        Path | None, typer.Option("--weights", help="imdb: folder with a pretrained BERT to fine-tune.")
    ] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="A plan file of lambdacgd plan --out.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="TOML file with any of these settings.")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="Go on with the run in this folder.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="New folder for the run (default runs/TASK-TIME).")] = None,
) -> None:
    """Train a model privately, and write weights that may be released."""
    given = dict(locals())
    for name in ("task", "plan", "config", "resume", "out"):
        del given[name]
    given |= {"lam": number_or_auto("lam", lam), "data": data and str(data), "weights": weights and str(weights)}
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
    except Interrupted as stopped:
        console.print(
            f"stopped at a checkpoint; go on with: python -m reproduce train --resume {session.folder}", highlight=False
        )
        raise typer.Exit(128 + stopped.signal) from None
    _finish(session, console)


def _start(
    task: str | None, given: dict[str, Any], plan: Path | None, config: Path | None, out: Path | None, console: Any
) -> Any:
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
            "batch_size": known.requested_batch_size,
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
    try:
        return Plan.load(path)
    except FileNotFoundError:
        raise InvalidInput("plan", str(path), "there is no such file; lambdacgd plan --out writes one") from None


def _resume(
    folder: Path, task: str | None, given: dict[str, Any], plan: Path | None, config: Path | None, out: Path | None
) -> Any:
    fixed = {"task": task, "plan": plan, "config": config, "out": out}
    fixed |= {name: value for name, value in given.items() if name not in _CHANGEABLE}
    for name, value in fixed.items():
        if value is not None:
            raise InvalidInput(name, str(value), "it is fixed for a run; with --resume leave it out")
    return Session.resume(folder, given)


def _train(session: Any, console: Any) -> None:
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
        console.print("(no TensorBoard logs: pip install tensorboard)", style="dim", highlight=False)
        return None
    place = folder / "operator"
    place.mkdir(exist_ok=True, mode=0o700)  # its files are readable, the folder is not
    (place / "NOT-PRIVATE.txt").write_text(_OPERATOR_NOTE)
    return SummaryWriter(str(place))  # type: ignore[no-untyped-call, unused-ignore]


def _finish(session: Any, console: Any) -> None:
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
    place = default_key_path(session.folder).parent
    console.print(
        f"the key in {place} can subtract the noise: keep it as you keep the data, or destroy it", highlight=False
    )


REPORT, FIGURE = "report.md", "report.png"


def noise_spectrum(plan: Plan, points: int = 512) -> tuple[np.ndarray, np.ndarray]:
    """(frequency in cycles a step, power relative to independent noise of the same σ): |Σ_j a_j e^{−2πijf}|²."""
    column = plan.mechanism.noising(plan.block.steps)
    frequency = np.linspace(0.0, 0.5, points)
    response = np.exp(-2j * np.pi * np.outer(frequency, np.arange(len(column)))) @ column
    return frequency, np.abs(response) ** 2


def write_report(folder: Path, config: Config, plan: Plan, *, test_accuracy: float, card: dict[str, object]) -> Path:
    """``report.md`` and ``report.png`` in the run's folder."""
    _figure(folder / FIGURE, plan, test_accuracy)
    described = ", ".join(f"{k} = {v}" for k, v in plan.mechanism.to_dict().items() if k != "name" and v is not None)
    text = f"""# {config.task}: {plan.mechanism.name}

Test accuracy **{100 * test_accuracy:.2f}%** after {plan.steps} steps ({plan.epochs} epochs of {plan.steps_per_epoch},
expected batch size {plan.described_batch_size}).

| | |
|---|---|
| mechanism | {plan.mechanism.name}{": " + described if described else ""} |
| noise multiplier σ | {plan.sigma:.6g} |
| clipping norm | {config.clip:g} |
| learning rate | {config.lr:g} ({config.optimizer}) |
| RMSE of prefix sums | {plan.rmse:.6g} |

![Theoretical noise spectrum]({FIGURE})

The figure shows the theoretical power of the noise over frequency, relative to independent noise of the same σ: slow
drifts of the weights are where training is hurt, and where correlated noise is small.

{to_markdown(card).replace("# Privacy card", "## Privacy card")}"""
    path = folder / REPORT
    path.write_text(text, encoding="utf-8")
    return path


def _figure(path: Path, plan: Plan, test_accuracy: float) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    frequency, power = noise_spectrum(plan)
    axes.plot(frequency, np.maximum(power, 1e-8), label=f"{plan.mechanism.name}, σ = {plan.sigma:.3g}")
    axes.axhline(1.0, linestyle="--", color="gray", label="independent noise of the same σ")
    axes.set(
        yscale="log",
        xlabel="frequency (cycles a step)",
        ylabel="noise power, relative",
        title=f"(ε = {plan.epsilon:g}, δ = {plan.delta:g}), test accuracy {100 * test_accuracy:.1f}%",
    )
    axes.legend()
    figure.savefig(path, dpi=150)
