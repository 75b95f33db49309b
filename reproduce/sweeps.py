"""``lambda-sweep``, ``amplified-sweep``, ``epochs-sweep``: validation accuracy over λ, each λ with its own rate.

A page says what its rows show, in words computed from them: beside theory's λ, over ε, batch size and epochs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lambdacgd import choose_lambda
from lambdacgd.accounting.gaussian import gaussian_sigma
from lambdacgd.choosing import shrink
from lambdacgd.mechanisms import Horizon, LambdaCGD, rmse
from reproduce.framework import RESULTS, Cell, Experiment, Row, Settings, panels, table, value_range
from reproduce.problems import TRAINING_EXAMPLES, is_pretrained, register_weights
from reproduce.runs import DELTA
from reproduce.search import at_edge, sweep_search
from reproduce.trainer import compute_with

TITLES = {"cifar10": "CIFAR-10", "imdb": "IMDb"}
_FEWEST = 3  # of fewer λ nothing is said


@dataclass(frozen=True)
class Setting:
    """Task, B, k and ε with its points in the order of λ, and the λ that the first of theory's errors picks."""

    task: str
    batch_size: int
    epochs: int
    epsilon: float
    points: list[Row]
    theory: float

    @property
    def title(self) -> str:
        return TITLES.get(self.task, self.task)

    @property
    def best(self) -> Row:
        top: Row = max(self.points, key=lambda row: row["accuracy"])
        return top

    @property
    def place(self) -> str:
        """Where the best λ lies: "below", "at" or "above" the one of those tried that is nearest to theory's."""
        nearest = self.nearest(self.theory)["lam"]
        return "at" if self.best["lam"] == nearest else "below" if self.best["lam"] < nearest else "above"

    def nearest(self, lam: float) -> Row:
        """The point of those tried whose λ is nearest, on the scale 1/(1−λ)."""
        point: Row = min(self.points, key=lambda row: abs(_log(row["lam"]) - _log(lam)))
        return point

    def loss(self, lam: float) -> float:
        """What the point nearest to a λ loses to the best."""
        return float(self.best["accuracy"] - self.nearest(lam)["accuracy"])

    @property
    def smaller_by(self) -> float:
        """Theory's 1/(1−λ) over the best's."""
        return float((1 - self.best["lam"]) / (1 - self.theory))

    @property
    def gain(self) -> float | None:
        """What the best λ adds to λ = 0, DP-SGD; None where that is missing."""
        zero = next((row for row in self.points if row["lam"] == 0), None)
        return None if zero is None else float(self.best["accuracy"] - zero["accuracy"])

    @property
    def unsure(self) -> bool:
        """Whether a λ above the best was left at the outermost rate it tried: more could have been in it."""
        return any(row["lam"] > self.best["lam"] and at_edge(row) for row in self.points)


def _log(lam: float) -> float:
    return -math.log(1 - lam)


def what_comes_out(settings: list[Setting], error: str) -> str:
    """Findings, each beside what the paper observed; ``error`` names the error behind ``Setting.theory``."""
    lambdas = {row["lam"] for setting in settings for row in setting.points}
    whole = [setting for setting in settings if len(setting.points) == len(lambdas)]
    if not whole or len(lambdas) < _FEWEST:
        return ""
    findings = [_against_theory(whole, error), _losses(whole, error), _gains(whole), _over_poisson(whole, error)]
    findings += [_over(*names, whole) for names in _OVER]
    parts = ["What comes out (λ on the grid above, “smaller” on the scale 1/(1−λ)):"]
    parts.append("\n".join(f"- {text}" for text in findings if text))
    if len(whole) < len(settings):
        parts.append(f"{len(settings) - len(whole)} settings, not all of whose λ have been run, are left out of this.")
    return "\n\n".join([*parts, edges(settings)])


def _by_task(settings: Iterable[Setting]) -> dict[str, list[Setting]]:
    by_task: dict[str, list[Setting]] = {}
    for setting in settings:
        by_task.setdefault(setting.title, []).append(setting)
    return by_task


def _against_theory(settings: list[Setting], error: str) -> str:
    said = []
    for task, some in _by_task(settings).items():
        below = [setting for setting in some if setting.place == "below"]
        by = (
            f" ({value_range([setting.smaller_by for setting in below], '.1f')} times smaller{_doubt(below)})"
            if below
            else ""
        )
        counts = {place: sum(setting.place == place for setting in some) for place in ("at", "above")}
        text = (
            f"on {task} the best λ lies below it in {len(below)} of {len(some)} settings{by}, is the one nearest to it "
        )
        text += f"in {counts['at']} and lies above it in {counts['above']}"
        last = sum(setting.best["lam"] == setting.points[-1]["lam"] for setting in some)
        said.append(text + (f" (in {last} it is the largest tried, so it may lie further out)" if last else ""))
    smaller = "is consistently smaller, typically 2 to 4 times"
    depends = "depends on the task, and on CIFAR-10 is much smaller"
    observed = smaller if "amplified" in error else depends
    return f"**Against the λ of the {error}** (the paper: the best {observed}): {'; '.join(said)}."


def _doubt(settings: list[Setting]) -> str:
    unsure = sum(setting.unsure for setting in settings)
    return f"; in {unsure} of these a larger λ was left at the outermost rate it tried, so it may win" if unsure else ""


def _losses(settings: list[Setting], error: str) -> str:
    """What those lose who take theory's λ, or under amplification the guideline's, rather than search."""
    takes = {f"that of the {error}": lambda setting: setting.theory}
    if "amplified" in error:
        takes["the guideline's, a third of it,"] = lambda setting: shrink(setting.theory)
    said = []
    for name, take in takes.items():
        lost = {
            task: [100 * setting.loss(take(setting)) for setting in some] for task, some in _by_task(settings).items()
        }
        texts = [
            f"{sum(each) / len(each):.1f} points on {task} (at most {max(each):.1f})" for task, each in lost.items()
        ]
        said.append(f"{name} loses {', '.join(texts)}")
    return f"**Without a search** for λ (of those tried, the nearest), on average: {'; '.join(said)}."


def _gains(settings: list[Setting]) -> str:
    said = []
    for task, some in _by_task(settings).items():
        gains = [100 * setting.gain for setting in some if setting.gain is not None]
        if gains:
            said.append(f"{value_range(gains, '.1f')} points on {task}")
    return f"**Against λ = 0 with the same sampling** the best λ gains {', '.join(said)}." if said else ""


def _over_poisson(settings: list[Setting], error: str) -> str:
    """Under Balls-in-Bins nobody would take λ = 0: DP-SGD under Poisson sampling has a smaller σ."""
    said = []
    for setting in settings:
        theirs = _poisson(setting) if "amplified" in error else None
        if theirs is not None:
            gain = 100 * (setting.best["accuracy"] - theirs)
            said.append(f"{gain:+.1f} on {setting.title} at ε = {setting.epsilon:g}, B = {setting.batch_size}")
    return (
        f"**Against DP-SGD under Poisson sampling**, tuned for the same B by `methods-cifar` and `methods-imdb` (its "
        f"best validation run, one seed), the best λ with fixed bins gains {', '.join(said)} points."
        if said
        else ""
    )


def _poisson(setting: Setting) -> float | None:
    name = {"cifar10": "methods-cifar", "imdb": "methods-imdb"}.get(setting.task, "")
    path = RESULTS / name / f"{name}.json"
    rows = json.loads(path.read_text())["rows"] if path.is_file() else []
    wanted = {"method": "dp-sgd"} | {field: getattr(setting, field) for field in ("batch_size", "epochs", "epsilon")}
    return next((row["validation"] for row in rows if wanted.items() <= row.items()), None)


# (field, its name, what the paper observed)
_OVER = (
    ("epsilon", "ε", "the best λ hardly depends on it"),
    ("batch_size", "B", "the larger, the closer to DP-SGD is the RMSE's λ"),
    ("epochs", "k", "the more, the larger the best λ"),
)


def _over(field: str, name: str, observed: str, settings: list[Setting]) -> str:
    """By how many steps of the grid the best λ moves along series of settings that differ in one field only."""
    said = []
    for task, some in _by_task(settings).items():
        rows = _rows(field, some)
        if rows:
            steps = ", ".join(f"{_step(row[-1]) - _step(row[0]):+d}" for row in rows)
            first, last = (getattr(rows[0][place], field) for place in (0, -1))
            said.append(f"on {task} from {name} = {first:g} to {last:g} by {steps}")
    moves = f"the best λ moves {'; '.join(said)} steps of the grid"
    return f"**Over {name}** (the paper: {observed}) {moves}." if said else ""


def _step(setting: Setting) -> int:
    return [row["lam"] for row in setting.points].index(setting.best["lam"])


def _rows(field: str, settings: list[Setting]) -> list[list[Setting]]:
    """Settings that differ in one field only, in its order; those that stand alone are left out."""
    others = [name for name in ("task", "batch_size", "epochs", "epsilon") if name != field]
    series: dict[tuple[object, ...], list[Setting]] = {}
    for setting in sorted(settings, key=lambda setting: (setting.task, getattr(setting, field))):
        series.setdefault(tuple(getattr(setting, name) for name in others), []).append(setting)
    return [row for row in series.values() if len(row) > 1]


def edges(settings: list[Setting]) -> str:
    """Which searches ended at the outermost rate they tried, and what that leaves open."""
    said = []
    for task, some in _by_task(settings).items():
        points = [row for setting in some for row in setting.points]
        outermost = [row["lam"] for row in points if at_edge(row)]
        if outermost:
            each = ", ".join(f"{outermost.count(lam)} at λ = {lam:g}" for lam in sorted(set(outermost)))
            said.append(f"{len(outermost)} of {len(points)} points on {task} ({each})")
    if not said:
        return "Every search ended between the smallest and the largest rate it tried."
    return (
        f"The best rate was the smallest or the largest tried at {', '.join(said)}: these may be short of their best."
    )


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
_FINE_TUNING = 1 / 32  # of the rates for a bag of words, as in methods-imdb: a guess, not tried on real weights
_GAIN = {8.0: 1.5, 2.0: 2.5, 0.5: 4.0}  # of RMSE from Balls-in-Bins, roughly, for every λ
QUICK = {"examples": 320, "batch_size": 64, "epochs": 1, "tries": 1, "seeds": 1}


def _point(base: dict[str, Any], name: str, size: int, epochs: int, epsilon: float, lam: float, rate: float) -> Cell:
    point = {"method": name, "batch_size": size, "epochs": epochs, "epsilon": epsilon, "lam": lam}
    return POINT | base | point | {"learning_rate": rate}


def _points(
    settings: Settings, name: str, sizes: dict[str, tuple[int, ...]], epochs: tuple[int, ...] = (10,),
    epsilons: tuple[float, ...] = EPSILONS,
) -> list[Cell]:  # fmt: skip
    """Every λ of every setting, each with the rate at which its search begins; reviews only where weights are given."""
    bases, factor = [CIFAR, IMDB], 1.0
    if settings.weights is not None:
        bases, factor = [IMDB | {"model": register_weights(settings.weights)}], _FINE_TUNING
    return [
        _point(base, name, size, k, epsilon, lam, factor * _rate(base["task"], name, size, k, epsilon, lam))
        for base in bases
        for size in sizes[base["task"]]
        for k in epochs
        for epsilon in epsilons
        for lam in LAMBDAS
    ]


def _rate(task: str, name: str, size: int, epochs: int, epsilon: float, lam: float) -> float:
    """Where a search begins: inversely to the error that noise leaves in sums of gradients."""
    horizon = Horizon(TRAINING_EXAMPLES[task] * 4 // 5 // size, epochs)
    error = gaussian_sigma(epsilon, DELTA) * rmse(LambdaCGD(lam), horizon)
    error /= _GAIN[epsilon] if name == "lambda-cgd" else 1.0
    rate = float(f"{min(_LARGEST[task], _REACH[task] * size / error):.2g}")
    if task == "cifar10":  # whose best rates are lower where the noise of a single step is large
        rate /= (2 if lam >= 0.95 else 1) * (2 if epsilon < 1 else 1)
    return rate


SIZES: dict[str, tuple[int, ...]] = {"cifar10": (1024, 256, 128), "imdb": (512, 128, 64)}


def lambda_cells(settings: Settings, name: str = "lambda-cgd-cyclic") -> list[Cell]:
    """CIFAR-10 with B = 128, 256, 1024 and IMDb with B = 64, 128, 512; k = 10, no amplification."""
    if settings.quick:
        return [_point(CIFAR, name, 64, 1, 8.0, lam, 0.5) | QUICK for lam in (0.0, 0.9)]
    return _points(settings, name, SIZES)


def amplified_cells(settings: Settings) -> list[Cell]:
    """The same settings with Balls-in-Bins; the paper shows the smallest batches."""
    return lambda_cells(settings, "lambda-cgd")


def epochs_cells(settings: Settings) -> list[Cell]:
    """CIFAR-10 with B = 1024 and IMDb with B = 512, k = 20, 40, 80, no amplification."""
    name = "lambda-cgd-cyclic"
    if settings.quick:
        return [_point(CIFAR, name, 64, k, 8.0, 0.9, 0.5) | QUICK | {"epochs": k} for k in (1, 2)]
    largest = {task: sizes[:1] for task, sizes in SIZES.items()}
    return [point | {"seeds": 1} for point in _points(settings, name, largest, (20, 40, 80), (8.0,))]


def _groups(rows: list[Row]) -> dict[tuple[str, int, int, float], list[Row]]:
    """Points by setting, as the paper orders its panels: small batches and few epochs first."""
    groups: dict[tuple[str, int, int, float], list[Row]] = {}
    for row in sorted(rows, key=lambda r: (r["task"], r["batch_size"], r["epochs"], -r["epsilon"], r["lam"])):
        groups.setdefault((row["task"], row["batch_size"], row["epochs"], row["epsilon"]), []).append(row)
    return groups


def theory(row: Row) -> dict[str, float]:
    """The λ that errors pick for a row's setting: amplified RMSE under Balls-in-Bins, else RMSE and MaxSE."""
    kept = row.get("examples") or TRAINING_EXAMPLES[row["task"]]
    horizon = Horizon((kept - kept // 5) // row["batch_size"], row["epochs"])
    if row["method"] == "lambda-cgd":
        chosen = choose_lambda(horizon, objective="amplified-rmse", epsilon=row["epsilon"], delta=DELTA)
        return {"amplified RMSE": chosen.value}
    by_rmse, by_maxse = choose_lambda(horizon, objective="rmse"), choose_lambda(horizon, objective="maxse")
    return {"RMSE": by_rmse.value, "MaxSE": by_maxse.value}


def settings_of(rows: list[Row]) -> list[tuple[Setting, dict[str, float]]]:
    """The settings behind rows, each with the λ that ``theory`` picks; the first of them is the one to compare with."""
    settings = []
    for key, points in _groups(rows).items():
        chosen = theory(points[0])
        settings.append((Setting(*key, points, next(iter(chosen.values()))), chosen))
    return settings


def _page(rows: list[Row]) -> str:
    lambdas = sorted({row["lam"] for row in rows})
    settings = settings_of(rows)
    lines = []
    for setting, chosen in settings:
        texts = {row["lam"]: _percent(row) for row in setting.points}
        texts[setting.best["lam"]] = f"**{texts[setting.best['lam']]}**"
        named = ", ".join(f"{name} {lam:.3g}" for name, lam in chosen.items())
        title = f"{setting.title} B = {setting.batch_size}, k = {setting.epochs}, ε = {setting.epsilon:g}"
        lines.append([title, *(texts.get(lam) for lam in lambdas), named])
    header = ["setting", *(f"λ = {lam:g}" for lam in lambdas)]
    error = next(iter(settings[0][1]))
    said = what_comes_out([setting for setting, _ in settings], error)
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
    words = "; pretrained weights are fine-tuned" if is_pretrained(rows[0].get("model", "")) else words
    return (
        f"Validation accuracy in percent (a fifth of the training set held out), {means}. The learning rate is tuned "
        f"for each point ({', '.join(runs)} tried){words if any(row['task'] == 'imdb' for row in rows) else ''}. λ = 0 "
        "is DP-SGD with the same sampling, not the Poisson sampling that one would choose for it. The paper shows "
        "these as figures without numbers: compare shapes."
    )


def _plot(rows: list[Row]) -> Any:
    groups = _groups(rows)
    kinds = list(dict.fromkeys(key[:3] for key in groups))
    figure, axes = panels(min(3, len(kinds)), -(-len(kinds) // 3))
    named: dict[str, Any] = {}  # one legend: panels share colours
    for pane, kind in zip(axes, kinds, strict=False):
        for key, points in groups.items():
            if key[:3] == kind:
                errors = [100 * (row["standard_error"] or 0) for row in points]
                drawn = pane.errorbar(
                    [-_scale(row["lam"]) for row in points],
                    [100 * row["accuracy"] for row in points],
                    None if any(row["standard_error"] is None for row in points) else errors,
                    fmt="o-", capsize=2, markersize=4,
                )  # fmt: skip
                named[f"ε = {key[3]:g}"] = drawn
                for style, (name, lam) in zip(("--", ":"), theory(points[0]).items(), strict=False):
                    color = drawn[0].get_color() if name == "amplified RMSE" else "gray"  # the others know no ε
                    line = pane.axvline(-_scale(lam), color=color, linestyle=style, linewidth=0.8)
                    named.setdefault(f"λ by {name}", line)
        shown = sorted({row["lam"] for key, points in groups.items() if key[:3] == kind for row in points})
        pane.set_xticks([-_scale(lam) for lam in shown], [f"{lam:g}" for lam in shown], fontsize=8)
        title = f"{TITLES.get(kind[0], kind[0])}, B = {kind[1]}, k = {kind[2]}"
        pane.set(xlabel="λ (on the scale 1/(1−λ))", ylabel="validation accuracy (%)", title=title)
    for unused in axes[len(kinds) :]:
        unused.set_axis_off()
    names = sorted(named, key=lambda name: name.startswith("λ"))
    figure.legend([named[name] for name in names], names, loc="outside lower center", ncols=len(names), fontsize=8)
    return figure


def _scale(lam: float) -> float:
    """log(1−λ): the paper compares λ on the scale 1/(1−λ)."""
    return math.log(1 - lam)


def _experiment(name: str, what: str, cells: Any, theory: str = "choice of λ") -> Experiment:
    return Experiment(
        name,
        what,
        cells,
        compute_with(sweep_search),
        COLUMNS,
        _page,
        _plot,
        depends=("training", theory),
        title=lambda cell: (
            f"{cell['task']} B={cell['batch_size']} k={cell['epochs']} ε={cell['epsilon']:g} λ={cell['lam']:g}"
        ),
    )


LAMBDA_SWEEP = _experiment("lambda-sweep", "validation accuracy over λ without amplification", lambda_cells)
AMPLIFIED_SWEEP = _experiment(
    "amplified-sweep", "validation accuracy over λ under Balls-in-Bins", amplified_cells, "choice of λ, fixed bins"
)
EPOCHS_SWEEP = _experiment("epochs-sweep", "validation accuracy over λ for 20, 40 and 80 epochs", epochs_cells)
