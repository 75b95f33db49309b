"""``lambda-sweep``, ``amplified-sweep``, ``epochs-sweep``: validation accuracy over λ, each λ with its own rate."""

from __future__ import annotations

import math
from typing import Any

from lambdacgd.experiments.framework import Cell, Experiment, Row, Settings
from lambdacgd.experiments.runs import DELTA
from lambdacgd.experiments.search import sweep_search
from lambdacgd.experiments.show import panels, table
from lambdacgd.experiments.sweep_findings import CLOSE, TITLES, Setting, what_comes_out
from lambdacgd.experiments.training import compute_with

LAMBDAS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.975, 0.9875)
EPSILONS = (8.0, 2.0, 0.5)
COLUMNS = (
    "task", "method", "batch_size", "epochs", "epsilon", "lam", "accuracy", "standard_error", "learning_rate",
    "weights", "sigma", "training_seconds",
)  # fmt: skip
# Three rates, which move outwards until the best is inside, or three times: else a λ that wants another rate than the
# first guess looks worse than it is.
POINT = {"max_grad_norm": 0.3, "tries": 6, "seeds": 3, "splits": ["validation"], "moves": ["edge"] * 3}
CIFAR = {"task": "cifar10", "model": "cnn"}
IMDB = {"task": "imdb", "model": "words"}
# Searches of methods-cifar and methods-imdb ended near one value of rate · RMSE / B, whatever method and ε: what noise
# adds to the weights in all is the same. Points begin there, below the rate that is too large without noise.
_REACH, _LARGEST = {"cifar10": 0.1, "imdb": 0.7}, {"cifar10": 4.0, "imdb": 64.0}
_GAIN = {8.0: 1.5, 2.0: 2.5, 0.5: 4.0}  # of RMSE from Balls-in-Bins, roughly, for every λ
QUICK = {"examples": 320, "batch_size": 64, "epochs": 1, "tries": 1, "seeds": 1}


def _point(base: dict[str, Any], name: str, size: int, epochs: int, epsilon: float, lam: float, rate: float) -> Cell:
    point = {"method": name, "batch_size": size, "epochs": epochs, "epsilon": epsilon, "lam": lam}
    return POINT | base | point | {"learning_rate": rate}


def _points(
    base: dict[str, Any], name: str, sizes: tuple[int, ...], epochs: tuple[int, ...], epsilons: tuple[float, ...]
) -> list[Cell]:
    """Every λ of every setting, each with the rate at which its search begins."""
    return [
        _point(base, name, size, k, epsilon, lam, _rate(base["task"], name, size, k, epsilon, lam))
        for size in sizes
        for k in epochs
        for epsilon in epsilons
        for lam in LAMBDAS
    ]


def _rate(task: str, name: str, size: int, epochs: int, epsilon: float, lam: float) -> float:
    """Where a search begins: inversely to the error that noise leaves in sums of gradients."""
    from lambdacgd.accounting.gaussian import gaussian_sigma
    from lambdacgd.experiments.problems import TRAINING_EXAMPLES
    from lambdacgd.mechanisms import Horizon, LambdaCGD, rmse

    horizon = Horizon(TRAINING_EXAMPLES[task] * 4 // 5 // size, epochs)
    error = gaussian_sigma(epsilon, DELTA) * rmse(LambdaCGD(lam), horizon)
    error /= _GAIN[epsilon] if name == "lambda-cgd" else 1.0
    rate = float(f"{min(_LARGEST[task], _REACH[task] * size / error):.2g}")
    if task == "cifar10":  # whose best rates are lower where the noise of a single step is large
        rate /= (2 if lam >= 0.95 else 1) * (2 if epsilon < 1 else 1)
    return rate


def lambda_cells(settings: Settings) -> list[Cell]:
    """CIFAR-10 with B = 128, 256, 1024 and IMDb with B = 64, 128, 512; k = 10, no amplification."""
    if settings.quick:
        return [_point(CIFAR, "lambda-cgd-cyclic", 64, 1, 8.0, lam, 0.5) | QUICK for lam in (0.0, 0.9)]
    return [
        *_points(CIFAR, "lambda-cgd-cyclic", (1024, 256, 128), (10,), EPSILONS),
        *_points(IMDB, "lambda-cgd-cyclic", (512, 128, 64), (10,), EPSILONS),
    ]


def amplified_cells(settings: Settings) -> list[Cell]:
    """The same settings with Balls-in-Bins; the paper shows the smallest batches."""
    if settings.quick:
        return [_point(CIFAR, "lambda-cgd", 64, 1, 8.0, lam, 0.5) | QUICK for lam in (0.0, 0.9)]
    return [
        *_points(CIFAR, "lambda-cgd", (1024, 256, 128), (10,), EPSILONS),
        *_points(IMDB, "lambda-cgd", (512, 128, 64), (10,), EPSILONS),
    ]


def epochs_cells(settings: Settings) -> list[Cell]:
    """CIFAR-10 with B = 1024 and IMDb with B = 512, k = 20, 40, 80, no amplification."""
    if settings.quick:
        return [_point(CIFAR, "lambda-cgd-cyclic", 64, k, 8.0, 0.9, 0.5) | QUICK | {"epochs": k} for k in (1, 2)]
    points = [
        *_points(CIFAR, "lambda-cgd-cyclic", (1024,), (20, 40, 80), (8.0,)),
        *_points(IMDB, "lambda-cgd-cyclic", (512,), (20, 40, 80), (8.0,)),
    ]
    return [point | {"seeds": 1} for point in points]


def _groups(rows: list[Row]) -> dict[tuple[str, int, int, float], list[Row]]:
    """Points by setting, as the paper orders its panels: small batches and few epochs first."""
    found: dict[tuple[str, int, int, float], list[Row]] = {}
    for row in sorted(rows, key=lambda r: (r["task"], r["batch_size"], r["epochs"], -r["epsilon"], r["lam"])):
        found.setdefault((row["task"], row["batch_size"], row["epochs"], row["epsilon"]), []).append(row)
    return found


def theory(row: Row) -> dict[str, float]:
    """The λ that errors pick for a row's setting: amplified RMSE under Balls-in-Bins, else RMSE and MaxSE."""
    from lambdacgd.choosing import choose_lambda
    from lambdacgd.experiments.problems import TRAINING_EXAMPLES
    from lambdacgd.mechanisms import Horizon

    kept = row.get("examples") or TRAINING_EXAMPLES[row["task"]]
    horizon = Horizon((kept - kept // 5) // row["batch_size"], row["epochs"])
    if row["method"] == "lambda-cgd":
        found = choose_lambda(horizon, objective="amplified-rmse", epsilon=row["epsilon"], delta=DELTA)
        return {"amplified RMSE": found.value}
    rmse, maxse = choose_lambda(horizon, objective="rmse"), choose_lambda(horizon, objective="maxse")
    return {"RMSE": rmse.value, "MaxSE": maxse.value}


def settings_of(rows: list[Row]) -> list[tuple[Setting, dict[str, float]]]:
    """The settings behind rows, each with the λ that ``theory`` picks; the first of them is the one to compare with."""
    found = []
    for key, points in _groups(rows).items():
        chosen = theory(points[0])
        found.append((Setting(*key, points, next(iter(chosen.values()))), chosen))
    return found


def _page(rows: list[Row]) -> str:
    lambdas = sorted({row["lam"] for row in rows})
    settings = settings_of(rows)
    lines = []
    for one, chosen in settings:
        texts = {row["lam"]: _percent(row) for row in one.points}
        texts[one.best["lam"]] = f"**{texts[one.best['lam']]}**"
        named = ", ".join(f"{name} {lam:.3g}" for name, lam in chosen.items())
        close = ", ".join(f"{lam:g}" for lam in one.close)
        title = f"{TITLES.get(one.task, one.task)} B = {one.batch_size}, k = {one.epochs}, ε = {one.epsilon:g}"
        lines.append([title, *(texts.get(lam) for lam in lambdas), close, named])
    header = ["setting", *(f"λ = {lam:g}" for lam in lambdas), f"within {100 * CLOSE:g} point of the best"]
    error = next(iter(settings[0][1]))
    said = what_comes_out([one for one, _ in settings], error)
    parts = [_about(rows), table([*header, "λ by theory"], lines), said]
    return "\n\n".join(part for part in parts if part)


def _percent(row: Row) -> str:
    error = "" if row["standard_error"] is None else f" ± {100 * row['standard_error']:.1f}"
    return f"{100 * row['accuracy']:.1f}{error}"


def _about(rows: list[Row]) -> str:
    seeds = sorted({len(row["scores"]) for row in rows})
    means = (
        "one run a point, so its error is not known"
        if seeds == [1]
        else f"mean ± standard error over {' or '.join(map(str, seeds))} seeds, the first of which chose the rate"
    )
    runs = []
    for task in sorted({row["task"] for row in rows}):
        tried = sorted({len(row["tried"]) for row in rows if row["task"] == task})
        runs.append(f"{' to '.join(map(str, dict.fromkeys((tried[0], tried[-1]))))} on {TITLES.get(task, task)}")
    words = "; on IMDb a bag of words trained from scratch, where the paper fine-tunes BERT-tiny"
    return (
        f"Validation accuracy in percent (a fifth of the training set held out), {means}. The learning rate is tuned "
        f"for each point ({', '.join(runs)} tried){words if any(row['task'] == 'imdb' for row in rows) else ''}. λ = 0 "
        "is DP-SGD with the same sampling. The paper shows these as figures without numbers: compare shapes."
    )


def _plot(rows: list[Row]) -> Any:
    groups = _groups(rows)
    kinds = list(dict.fromkeys(key[:3] for key in groups))
    figure, axes = panels(min(3, len(kinds)), -(-len(kinds) // 3))
    named: dict[str, Any] = {}  # one legend: panels share colours
    for one, kind in zip(axes, kinds, strict=False):
        for key, points in groups.items():
            if key[:3] == kind:
                errors = [100 * (row["standard_error"] or 0) for row in points]
                drawn = one.errorbar(
                    [-_scale(row["lam"]) for row in points],
                    [100 * row["accuracy"] for row in points],
                    None if any(row["standard_error"] is None for row in points) else errors,
                    fmt="o-", capsize=2, markersize=4,
                )  # fmt: skip
                named[f"ε = {key[3]:g}"] = drawn
                for style, (name, lam) in zip(("--", ":"), theory(points[0]).items(), strict=False):
                    color = drawn[0].get_color() if name == "amplified RMSE" else "gray"  # the others know no ε
                    line = one.axvline(-_scale(lam), color=color, linestyle=style, linewidth=0.8)
                    named.setdefault(f"λ by {name}", line)
        shown = sorted({row["lam"] for key, points in groups.items() if key[:3] == kind for row in points})
        one.set_xticks([-_scale(lam) for lam in shown], [f"{lam:g}" for lam in shown], fontsize=8)
        title = f"{TITLES.get(kind[0], kind[0])}, B = {kind[1]}, k = {kind[2]}"
        one.set(xlabel="λ (on the scale 1/(1−λ))", ylabel="validation accuracy (%)", title=title)
    for unused in axes[len(kinds) :]:
        unused.set_axis_off()
    names = sorted(named, key=lambda name: name.startswith("λ"))
    figure.legend([named[name] for name in names], names, loc="outside lower center", ncols=len(names), fontsize=8)
    return figure


def _scale(lam: float) -> float:
    """log(1−λ): the paper compares λ on the scale 1/(1−λ)."""
    return math.log(1 - lam)


def _experiment(name: str, what: str, cells: Any) -> Experiment:
    return Experiment(
        name,
        what,
        cells,
        compute_with(sweep_search),
        COLUMNS,
        _page,
        _plot,
        lambda cell: (
            f"{cell['task']} B={cell['batch_size']} k={cell['epochs']} ε={cell['epsilon']:g} λ={cell['lam']:g}"
        ),
    )


LAMBDA_SWEEP = _experiment("lambda-sweep", "validation accuracy over λ without amplification", lambda_cells)
AMPLIFIED_SWEEP = _experiment("amplified-sweep", "validation accuracy over λ under Balls-in-Bins", amplified_cells)
EPOCHS_SWEEP = _experiment("epochs-sweep", "validation accuracy over λ for 20, 40 and 80 epochs", epochs_cells)
