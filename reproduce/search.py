"""The search for hyperparameters as a conversation: it asks for runs, hears results, and ends with a row.

A search is a generator that yields lists of ``TrainingRun`` and is sent their results in order. It neither trains nor
waits, so one process can hold many searches and train what all of them ask for (``pool``), in order of importance.
Every method gets the same moves, from the same learning rates and clipping norm.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from reproduce.problems import TRAINING_EXAMPLES, sizes
from reproduce.runs import PlanBook, Result, RunStore, Schedule, TrainingRun, method

Cell = dict[str, Any]
Row = dict[str, Any]
Search = Generator[list[TrainingRun], list[Result], Row]
# Where learning rates begin, by ε, at ζ = 0.3: the same for all methods. Cells may have their own.
CENTRES = {8.0: 2.0, 4.0: 1.4, 2.0: 1.0, 1.0: 0.7, 0.5: 0.4, 0.25: 0.25}
NEIGHBOURS = {4.0: (8.0, 2.0), 1.0: (2.0, 0.5), 0.25: (0.5, 2.0)}  # ε that learn from two others, the nearest first
SMALLER_CLIP = 1 / 3
MOVES = ("edge", "other", "linear")
REVISION = 2  # of the search; 1 let a rate at the edge use up the run that would have tried the schedule


def best(runs: Sequence[TrainingRun], results: Sequence[Result]) -> tuple[TrainingRun, str, float]:
    """The run of the highest accuracy, whose weights (last or an average) had it, and that accuracy."""
    scored = [(score, -i, which) for i, result in enumerate(results) for which, score in result["accuracy"].items()]
    score, place, which = max(scored)
    return runs[-place], which, score


def start(cell: Cell, *, epsilon: float | None = None) -> TrainingRun:
    """Where the search of a cell begins (for another ε, if given)."""
    epsilon = cell["epsilon"] if epsilon is None else epsilon
    known = {float(e): rate for e, rate in cell.get("learning_rates", {}).items()} or CENTRES
    centre = cell.get("learning_rate") or known[min(known, key=lambda e: abs(math.log(e / epsilon)))]
    return TrainingRun(
        task=cell["task"],
        model=cell["model"],
        method=cell["method"],
        epsilon=epsilon,
        batch_size=cell["batch_size"],
        epochs=cell["epochs"],
        learning_rate=centre,
        max_grad_norm=cell["max_grad_norm"],
        lam=cell.get("lam", method(cell["method"]).first(epsilon)),
        examples=cell.get("examples"),
    )


def tune(cell: Cell, *, epsilon: float | None = None) -> Generator[list[TrainingRun], list[Result], dict[str, Any]]:
    """``cell["tries"]`` runs on the validation split, and one more for each rate at the edge.

    Three learning rates a factor of two apart; then, from the best so far, the moves in ``cell["moves"]`` that apply:
    "edge", a rate further out if the best is outermost; "other", another λ, or for methods without λ a smaller ζ;
    "linear", a schedule that falls to a twentieth. An edge does not count, so every method tries the rest, however
    well its first rates were guessed. Returns the best run, whose weights, its accuracy, and all tried.
    """
    first = start(cell, epsilon=epsilon)
    tries: int = cell["tries"]
    runs = [replace(first, learning_rate=first.learning_rate * factor) for factor in (1.0, 0.5, 2.0)][:tries]
    results = list((yield runs))
    for move in cell.get("moves", MOVES):
        more = _moved(move, best(runs, results)[0], runs)
        if more is not None and (move == "edge" or len(runs) < tries):
            tries += move == "edge"
            runs.append(more)
            results += yield [more]
    return _tuned(runs, results)


def _moved(move: str, top: TrainingRun, runs: Sequence[TrainingRun]) -> TrainingRun | None:
    """The run that a move from the best so far leads to, if it applies."""
    if move == "linear":
        return replace(top, schedule="linear", learning_rate=1.5 * top.learning_rate)
    if move == "other":
        known = method(top.method)
        second = known.second(top.epsilon)
        if second is not None:
            return replace(top, lam=second if top.lam != second else known.first(top.epsilon))
        return replace(
            top, max_grad_norm=top.max_grad_norm * SMALLER_CLIP, learning_rate=top.learning_rate / SMALLER_CLIP
        )
    rates = [run.learning_rate for run in runs]
    if len(set(rates)) > 1 and top.learning_rate in (min(rates), max(rates)):
        return replace(top, learning_rate=top.learning_rate * (2.0 if top.learning_rate == max(rates) else 0.5))
    return None


def tune_between(cell: Cell) -> Generator[list[TrainingRun], list[Result], dict[str, Any]]:
    """Two runs around the learning rate that the searches of two other ε suggest; the rest as the nearest found it.

    Between the two ε the rate is their geometric mean; beyond them it goes on falling as it did, at most by half.
    """
    near, far = NEIGHBOURS[cell["epsilon"]]
    nearer = yield from tune(cell, epsilon=near)
    further = yield from tune(cell, epsilon=far)
    a, b = (tuned["run"].learning_rate * tuned["run"].max_grad_norm for tuned in (nearer, further))
    between = min(near, far) < cell["epsilon"] < max(near, far)
    reach = math.sqrt(a * b) if between else a * min(1.0, max(0.5, math.sqrt(a / b)))
    middle = replace(nearer["run"], epsilon=cell["epsilon"], learning_rate=_round(reach / nearer["run"].max_grad_norm))
    if middle.lam is not None:
        middle = replace(middle, lam=_known(cell, middle.lam))
    runs = [replace(middle, learning_rate=_round(middle.learning_rate * f)) for f in (0.7, 1.4)][: cell["tries"]]
    results = list((yield runs))
    return _tuned(runs, results)


def _known(cell: Cell, lam: float) -> float | None:
    known = method(cell["method"])
    first, second = known.first(cell["epsilon"]), known.second(cell["epsilon"])
    return lam if lam in (first, second) else first


def _round(rate: float) -> float:
    return float(f"{rate:.3g}")


def _tuned(runs: list[TrainingRun], results: list[Result]) -> dict[str, Any]:
    top, which, score = best(runs, results)
    seconds = sum(result["seconds"] for result in results)
    tried = everything_tried(runs, results, "learning_rate", "max_grad_norm", "lam", "schedule")
    return {"run": top, "which": which, "validation": score, "tried": tried, "seconds": seconds}


def everything_tried(runs: Sequence[TrainingRun], results: Sequence[Result], *names: str) -> list[Row]:
    """The runs of a search by their settings, with what came out."""
    pairs = zip(runs, results, strict=True)
    return [{name: getattr(run, name) for name in names} | {"accuracy": result["accuracy"]} for run, result in pairs]


def at_edge(row: Row, tried: Sequence[Row] | None = None) -> bool:
    """Whether a search ended at the smallest or the largest rate · ζ of those tried: a longer one might find more."""
    reaches = [run["learning_rate"] * run["max_grad_norm"] for run in (row["tried"] if tried is None else tried)]
    reach = row["learning_rate"] * row["max_grad_norm"]
    return len(reaches) > 1 and not min(reaches) * 1.01 < reach < max(reaches) / 1.01


def possibly_short(searches: Sequence[str]) -> str:
    """What a page says of the searches that ended at an edge."""
    return f"Ended at the edge of what was tried: {'; '.join(searches)}." if searches else ""


def tested(
    run: TrainingRun, which: str, seeds: int
) -> Generator[list[TrainingRun], list[Result], tuple[Row, list[Result]]]:
    """Train on everything with new seeds and test: what came out, and the results. ``which`` weights count."""
    results = yield [replace(run, split="test", seed=1 + i) for i in range(seeds)]
    scores = [result["accuracy"][which] for result in results]
    row: Row = {name: results[0].get(name) for name in ("sigma", "rmse", "certificate")}
    row |= {"scores": scores, "test": statistics.mean(scores), "standard_error": standard_error(scores)}
    row |= {"unproven": True} if any(result.get("unproven") for result in results) else {}
    return row | {"training_seconds": round(sum(float(result["seconds"]) for result in results), 2)}, results


def method_search(cell: Cell) -> Search:
    """Tune a method on the validation split, then train it on everything with ``cell["seeds"]`` seeds, and test."""
    tuned = yield from (tune_between(cell) if cell.get("between") else tune(cell))
    row, results = yield from tested(tuned["run"], tuned["which"], cell["seeds"])
    last = statistics.mean(result["accuracy"]["last"] for result in results)
    return row | _chosen(tuned) | {"last": last, "training_seconds": _seconds(tuned, results)}


def given_search(cell: Cell) -> Search:
    """No search: train with the cell's own settings and ``cell["seeds"]`` seeds on everything, and test."""
    row, results = yield from tested(start(cell), "last", cell["seeds"])
    averaged = {name: statistics.mean(r["accuracy"][name] for r in results) for name in results[0]["accuracy"]}
    return row | {"averaged": averaged, "diverged": sum("diverged" in result for result in results)}


def sweep_search(cell: Cell) -> Search:
    """A point of a sweep over λ: the learning rate tuned on the validation split, then the mean over seeds there."""
    tuned = yield from tune(cell)
    chosen: TrainingRun = tuned["run"]
    runs = [replace(chosen, seed=seed) for seed in range(cell["seeds"])]  # the first of them is the search's own
    results = yield runs
    scores = [result["accuracy"][tuned["which"]] for result in results]
    row = _chosen(tuned) | {"sigma": results[0]["sigma"], "scores": scores}
    row |= {"training_seconds": _seconds(tuned, results[1:])}
    return row | {"accuracy": statistics.mean(scores), "standard_error": standard_error(scores)}


def _chosen(tuned: dict[str, Any]) -> Row:
    run: TrainingRun = tuned["run"]
    return {
        "learning_rate": run.learning_rate,
        "max_grad_norm": run.max_grad_norm,
        "lambda": run.lam,
        "schedule": run.schedule,
        "weights": tuned["which"],
        "validation": tuned["validation"],
        "tried": tuned["tried"],
    }


def _seconds(tuned: dict[str, Any], more: Sequence[Result]) -> float:
    return round(tuned["seconds"] + sum(float(result["seconds"]) for result in more), 2)


# Climbing: a search over batch sizes and epochs too. Rates are comparable between these, and between methods, as
# rate · RMSE / B, the size of the noise in the weights, so they are kept as multiples of the one where that is REACH.
REACH = 0.15  # rate · RMSE / B that searches begin with
HIGHEST = 6.0  # that searches begin with: where noise is small, rates above 8 diverged in the sweeps
CONSTANT = 1 / 1.5  # a constant rate, as a share of where a falling one begins
CLIP = 0.3  # ζ that searches begin with
NEAR = (0.5, 2.0)  # rates tried beside the best


@dataclass(frozen=True)
class Point:
    """A place to climb to. ``factor`` is the learning rate, as a multiple of the one that its (B, k) begins with."""

    batch_size: int
    epochs: int
    factor: float = 1.0
    schedule: Schedule = "linear"
    clip: float = CLIP


def run_at(cell: Cell, point: Point, centre: float = 1.0) -> TrainingRun:
    """Train at a point, where ``centre`` is the rate that its (B, k) begins with. Rate · ζ is kept where ζ changes."""
    rate = centre * point.factor * (1.0 if point.schedule == "linear" else CONSTANT) * CLIP / point.clip
    return TrainingRun(
        task=cell["task"],
        model=cell["model"],
        method=cell["method"],
        epsilon=cell["epsilon"],
        batch_size=point.batch_size,
        epochs=point.epochs,
        learning_rate=float(f"{rate:.3g}"),
        max_grad_norm=point.clip,
        lam=cell["lam"],
        schedule=point.schedule,
        examples=cell.get("examples"),
    )


def centre(cell: Cell, point: Point, plans: PlanBook) -> float:
    """The learning rate where rate · RMSE / B is ``REACH``, under the plan of the validation split."""
    run = run_at(cell, point)
    plan = plans.for_run(run, sizes(TRAINING_EXAMPLES[run.task], run)[0])
    return float(f"{min(REACH * point.batch_size / plan.rmse, HIGHEST):.3g}")


def climb(
    points: Sequence[Point],
    moves: Sequence[str],
    moved: Callable[[str, Point, Sequence[Point]], list[Point]],
    run_of: Callable[[Point], TrainingRun],
) -> Generator[list[TrainingRun], list[Result], dict[str, Any]]:
    """Search on the validation split.

    Args:
        points: Where to begin.
        moves: What is tried after that, one move after another.
        moved: Where a move leads from the best point, given all that were tried.
        run_of: The run at a point.

    Returns:
        The best point and its run, whose weights, its accuracy, and all that was tried.
    """
    tried: list[Point] = []
    runs: list[TrainingRun] = []
    results: list[Result] = []
    top = points[0]
    for move in (None, *moves):
        more = points if move is None else [p for p in moved(move, top, tried) if p not in tried]
        if more:
            tried, asked = [*tried, *more], [run_of(point) for point in more]
            runs, results = runs + asked, results + (yield asked)
            top = tried[runs.index(best(runs, results)[0])]
    chosen, which, score = best(runs, results)
    kept = everything_tried(runs, results, "batch_size", "epochs", "learning_rate", "max_grad_norm", "schedule")
    return {"point": top, "run": chosen, "which": which, "validation": score, "tried": kept}


def climbed(cell: Cell, tuned: dict[str, Any]) -> Generator[list[TrainingRun], list[Result], tuple[Row, list[Result]]]:
    """Test what a climb ended with; the row that is kept of it, and the results of the test runs."""
    run: TrainingRun = tuned["run"]
    row, results = yield from tested(run, tuned["which"], cell["seeds"])
    for name in ("batch_size", "learning_rate", "max_grad_norm", "schedule"):
        row[name] = getattr(run, name)
    row |= {"weights": tuned["which"], "validation": tuned["validation"], "tried": tuned["tried"]}
    alone = [result["seconds"] / result["sharing"] for result in results if "sharing" in result]
    row["gpu_seconds"] = round(statistics.mean(alone), 2) if len(alone) == len(results) else None
    return row | {"lambda": results[0].get("lambda")}, results


def standard_error(scores: Sequence[float]) -> float | None:
    """Of the mean; None for a single score."""
    return statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else None


Train = Callable[[TrainingRun, float | None], Result]


@dataclass
class Asked:
    """A search under way: the runs it waits for, and the row it ended with."""

    name: str
    search: Search
    waiting: list[TrainingRun] = field(default_factory=list)
    row: Row | None = None
    over: str = ""  # why it will not go on


class Known(Protocol):
    """Where results are looked up."""

    def get(self, run: TrainingRun) -> Result | None: ...


def stored(search: Search, known: Known) -> Row | None:
    """What a search ends with if every result is known; None where one is missing."""
    asked = Asked("", search)
    advance(asked, known, first=True)
    return asked.row


def answer(search: Search, store: RunStore, train: Train, *, until: float | None = None) -> Row:
    """Drive one search here, training what the store lacks."""
    asked = Asked("", search)
    advance(asked, store, first=True)
    while asked.row is None:
        for run in asked.waiting:
            if store.get(run) is None:
                store.add(run, train(run, until))
        advance(asked, store)
    return asked.row


def advance(asked: Asked, store: Known, *, first: bool = False) -> None:
    """Hand a search all the results that are there, until it waits for a missing one or ends."""
    try:
        if first:
            asked.waiting = next(asked.search)
        while True:
            results = [store.get(run) for run in asked.waiting]
            if any(result is None for result in results):
                return
            asked.waiting = asked.search.send([result for result in results if result is not None])
    except StopIteration as end:
        asked.waiting, asked.row = [], end.value
