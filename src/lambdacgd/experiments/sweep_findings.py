"""What the sweeps over λ show, in words computed from their rows: beside theory's λ, over ε, batch size and epochs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lambdacgd.choosing import shrink
from lambdacgd.experiments.framework import Row

TITLES = {"cifar10": "CIFAR-10", "imdb": "IMDb"}
CLOSE = 0.01  # accuracies this near to the best count as good: differences between seeds are of this size
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
    def best(self) -> Row:
        found: Row = max(self.points, key=lambda row: row["accuracy"])
        return found

    @property
    def close(self) -> list[float]:
        """Every λ within ``CLOSE`` of the best."""
        return [row["lam"] for row in self.points if row["accuracy"] >= self.best["accuracy"] - CLOSE]

    @property
    def place(self) -> str:
        """Where the best λ lies: "below", "at" or "above" the one of those tried that is nearest to theory's."""
        nearest = self.nearest(self.theory)["lam"]
        return "at" if self.best["lam"] == nearest else "below" if self.best["lam"] < nearest else "above"

    def nearest(self, lam: float) -> Row:
        """The point of those tried whose λ is nearest, on the scale 1/(1−λ)."""
        found: Row = min(self.points, key=lambda row: abs(_log(row["lam"]) - _log(lam)))
        return found

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


def at_edge(row: Row) -> bool:
    """Whether a search ended at the smallest or the largest of the rates it tried."""
    rates = [run["learning_rate"] for run in row["tried"]]
    return len(rates) > 1 and not min(rates) < row["learning_rate"] < max(rates)


def what_comes_out(settings: list[Setting], error: str) -> str:
    """Findings, each beside what the paper observed; ``error`` names the error behind ``Setting.theory``."""
    lambdas = {row["lam"] for one in settings for row in one.points}
    whole = [one for one in settings if len(one.points) == len(lambdas)]
    if not whole or len(lambdas) < _FEWEST:
        return ""
    findings = [_against_theory(whole, error), _losses(whole, error), _gains(whole)]
    findings += [_over_epsilon(whole), _over_batches(whole, error), _over_epochs(whole, error)]
    parts = ["What comes out (λ on the grid above, “smaller” on the scale 1/(1−λ)):"]
    parts.append("\n".join(f"- {text}" for text in findings if text))
    if len(whole) < len(settings):
        parts.append(f"{len(settings) - len(whole)} settings, not all of whose λ have been run, are left out of this.")
    return "\n\n".join([*parts, edges(settings)])


def _by_task(settings: Iterable[Setting]) -> dict[str, list[Setting]]:
    found: dict[str, list[Setting]] = {}
    for one in settings:
        found.setdefault(TITLES.get(one.task, one.task), []).append(one)
    return found


def _against_theory(settings: list[Setting], error: str) -> str:
    said = []
    for task, some in _by_task(settings).items():
        below = [one for one in some if one.place == "below"]
        by = f" ({_range([one.smaller_by for one in below], '.1f')} times smaller{_doubt(below)})" if below else ""
        counts = {place: sum(one.place == place for one in some) for place in ("at", "above")}
        text = (
            f"on {task} the best λ lies below it in {len(below)} of {len(some)} settings{by}, is the one nearest to it "
        )
        text += f"in {counts['at']} and lies above it in {counts['above']}"
        last = sum(one.best["lam"] == one.points[-1]["lam"] for one in some)
        said.append(text + (f" (in {last} it is the largest tried, so it may lie further out)" if last else ""))
    smaller = "is consistently smaller, typically 2 to 4 times"
    depends = "depends on the task, and on CIFAR-10 is much smaller"
    observed = smaller if "amplified" in error else depends
    return f"**Against the λ of the {error}** (the paper: the best {observed}): {'; '.join(said)}."


def _doubt(settings: list[Setting]) -> str:
    unsure = sum(one.unsure for one in settings)
    return f"; in {unsure} of these a larger λ was left at the outermost rate it tried, so it may win" if unsure else ""


def _losses(settings: list[Setting], error: str) -> str:
    """What those lose who take theory's λ, or under amplification the guideline's, rather than search."""
    takes = {f"that of the {error}": lambda one: one.theory}
    if "amplified" in error:
        takes["the guideline's, a third of it,"] = lambda one: shrink(one.theory)
    said = []
    for name, take in takes.items():
        lost = {task: [100 * one.loss(take(one)) for one in some] for task, some in _by_task(settings).items()}
        texts = [
            f"{sum(each) / len(each):.1f} points on {task} (at most {max(each):.1f})" for task, each in lost.items()
        ]
        said.append(f"{name} loses {', '.join(texts)}")
    return f"**Without a search** for λ (of those tried, the nearest), on average: {'; '.join(said)}."


def _gains(settings: list[Setting]) -> str:
    said = []
    for task, some in _by_task(settings).items():
        gains = [100 * one.gain for one in some if one.gain is not None]
        if gains:
            zero = sum(one.best["lam"] == 0 for one in some)
            said.append(f"{_range(gains, '.1f')} points on {task} (λ = 0 is best in {zero} of {len(some)} settings)")
    return f"**Against DP-SGD**, λ = 0, the best λ gains {', '.join(said)}." if said else ""


def _over_epsilon(settings: list[Setting]) -> str:
    """How far apart on the grid the best λ of one setting lie at its smallest and largest ε."""
    said = []
    for task, some in _by_task(settings).items():
        rows = _rows("epsilon", some)
        steps = [abs(_step(row[0]) - _step(row[-1])) for row in rows]
        if steps:
            counts = {0: "the same in", 1: "one step of the grid apart in"}
            texts = [f"{text} {steps.count(many)}" for many, text in counts.items()]
            more = sum(many > 1 for many in steps)
            texts += [f"further apart in {more}"] if more else []
            ends = f"ε = {rows[0][0].epsilon:g} and {rows[0][-1].epsilon:g}"
            said.append(f"on {task} the best λ of {ends} is {', '.join(texts)} of {len(rows)} settings")
    return f"**Over ε** (the paper: the best λ hardly depends on it): {'; '.join(said)}." if said else ""


def _step(one: Setting) -> int:
    return [row["lam"] for row in one.points].index(one.best["lam"])


def _over_batches(settings: list[Setting], error: str) -> str:
    rows = _rows("batch_size", settings)
    said = [
        f"{TITLES.get(row[0].task, row[0].task)}, ε = {row[0].epsilon:g}, B = {_list(row, 'batch_size')}: "
        f"{_lambdas(row)} ({error} {_list(row, 'theory', '.3g')})"
        for row in rows
    ]
    holds = sum(row[-1].best["lam"] < row[0].best["lam"] for row in rows)
    return (
        f"**Over batch sizes** (the paper: the larger, the closer to DP-SGD is the RMSE's λ): the best λ is smaller at "
        f"the largest batch than at the smallest in {holds} of {len(rows)} series. {'; '.join(said)}."
        if rows
        else ""
    )


def _over_epochs(settings: list[Setting], error: str) -> str:
    rows = _rows("epochs", settings)
    said = []
    for row in rows:
        text = f"{TITLES.get(row[0].task, row[0].task)}, B = {row[0].batch_size}, k = {_list(row, 'epochs')}: "
        text += f"{_lambdas(row)} ({error} {_list(row, 'theory', '.3g')}), accuracy "
        text += ", ".join(f"{100 * one.best['accuracy']:.1f}" for one in row)
        gains = [one.gain for one in row]
        said.append(text + ", over λ = 0 " + ", ".join("—" if g is None else f"{100 * g:+.1f}" for g in gains))
    grows = sum(row[-1].best["lam"] > row[0].best["lam"] for row in rows)
    better = sum(row[-1].best["accuracy"] > row[0].best["accuracy"] for row in rows)
    return (
        f"**Over epochs** (the paper: the more, the larger the best λ, and the better): from fewest to most the best λ "
        f"grows in {grows} of {len(rows)} series, and the best accuracy in {better}. {'; '.join(said)}."
        if rows
        else ""
    )


def _rows(field: str, settings: list[Setting]) -> list[list[Setting]]:
    """Settings that differ in one field only, in its order; those that stand alone are left out."""
    others = [name for name in ("task", "batch_size", "epochs", "epsilon") if name != field]
    found: dict[tuple[object, ...], list[Setting]] = {}
    for one in sorted(settings, key=lambda one: (one.task, getattr(one, field))):
        found.setdefault(tuple(getattr(one, name) for name in others), []).append(one)
    return [row for row in found.values() if len(row) > 1]


def _lambdas(row: list[Setting]) -> str:
    return "λ = " + ", ".join(f"{one.best['lam']:g}" for one in row)


def _list(row: list[Setting], field: str, form: str = "g") -> str:
    return ", ".join(format(getattr(one, field), form) for one in row)


def edges(settings: list[Setting]) -> str:
    """Which searches ended at the outermost rate they tried, and what that leaves open."""
    said = []
    for task, some in _by_task(settings).items():
        points = [row for one in some for row in one.points]
        found = [row["lam"] for row in points if at_edge(row)]
        if found:
            each = ", ".join(f"{found.count(lam)} at λ = {lam:g}" for lam in sorted(set(found)))
            said.append(f"{len(found)} of {len(points)} points on {task} ({each})")
    if not said:
        return "Every search ended between the smallest and the largest rate it tried."
    return (
        f"The best rate was the smallest or the largest tried at {', '.join(said)}: these may be short of their best."
    )


def _range(values: list[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"
