"""``lower-noise``: accuracy of what might need less noise than the default (``uncertified``, and one buffer)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lambdacgd.mechanisms import Workload, error_norms
from lambdacgd.planning import Plan
from reproduce.framework import Cell, Experiment, Row, Settings, table
from reproduce.frontier import FIRST_EPOCHS, OURS, PLANS, climb_cell, frontier_cells, frontier_search, welch
from reproduce.problems import TRAINING_EXAMPLES
from reproduce.runs import DELTA, FALLING, LAST_RATE, VARIANTS, PlanBook, method
from reproduce.search import NEAR, Point, Search, centre, climb, climbed, run_at
from reproduce.trainer import compute_with

# (variant, ε) in the order of worth. Variants whose RMSE is less than 2% below the default's are not trained.
TRAINED = (
    ("bands-4-epochs", 8.0), ("bands-4-epochs", 2.0), ("bands-4", 8.0), ("epochs", 2.0), ("epochs", 8.0),
    ("bands-3", 8.0), ("one-buffer", 8.0), ("one-buffer", 2.0), (FALLING.name, 8.0), (FALLING.name, 2.0),
)  # fmt: skip
COLUMNS = (
    "method", "epsilon", "test", "standard_error", "batch_size", "learning_rate", "max_grad_norm", "schedule",
    "weights", "sigma", "rmse", "validation", "gpu_seconds",
)  # fmt: skip


def cells(settings: Settings) -> list[Cell]:
    """In the order of worth. Each begins where the frontier's search for the default ended, at k = 10."""
    begin = {c["epsilon"]: c for c in reversed(frontier_cells(settings)) if c["method"] == OURS and "after" not in c}
    trained = (("bands-4-epochs", 8.0),) if settings.quick else TRAINED
    return [_cell(begin[epsilon], variant) for variant, epsilon in trained]


def _cell(begin: Cell, variant: str) -> Cell:
    cell = begin | {"method": variant, "lam": None, "after": begin}
    plans = PlanBook(None if "examples" in begin else PLANS, make=True)
    size = cell["batch_size"]
    return cell | {"rates": {str(size): centre(cell, Point(size, cell["epochs"]), plans)}}


def plans_compared() -> list[tuple[str, Plan]]:
    """Every variant's plan for all examples, as they are stored; its certificate says who says so."""
    setting = {"examples": TRAINING_EXAMPLES["cifar10"], "batch_size": 128, "epochs": FIRST_EPOCHS, "delta": DELTA}
    book, wanted = PlanBook(PLANS), [(variant, epsilon) for epsilon in (8.0, 2.0) for variant in VARIANTS]
    return [
        (variant, book.get(setting | {"epsilon": epsilon} | method(variant).request(None)))
        for variant, epsilon in wanted
    ]


def search(cell: Cell) -> Search:
    """The rate where the default's search ended, half and twice of it, one further out; then new seeds and the test."""
    if cell["method"] == FALLING.name:
        return (yield from _falling(cell))
    ended: Point = (yield from climb_cell(cell["after"]))["point"]
    ((size, rate),) = cell["rates"].items()
    top = replace(ended, batch_size=int(size))

    def beside(move: str, best: Point, tried: Sequence[Point]) -> list[Point]:
        return [replace(best, factor=best.factor * near) for near in NEAR]

    first = [top, *beside("", top, ())]
    tuned = yield from climb(first, ("rate",), beside, lambda point: run_at(cell, point, rate))
    row, _ = yield from climbed(cell, tuned)
    return _beside(row, (yield from frontier_search(cell["after"])))


def _beside(row: Row, ours: Row) -> Row:
    kept = ("scores", "test", "standard_error", "rmse", "batch_size")
    return row | {"default": {name: ours[name] for name in kept}}


def _falling(cell: Cell) -> Search:
    """The default's best run with a falling rate, and the same with the λ chosen for one: new seeds and the test."""
    tuned = yield from climb_cell(cell["after"])
    falling = [run for run in tuned["tried"] if run["schedule"] == "linear"]
    best = max(falling, key=lambda run: max(run["accuracy"].values()))
    which = max(best["accuracy"], key=best["accuracy"].get)
    settings = {name: best[name] for name in ("batch_size", "learning_rate", "max_grad_norm", "schedule")}
    tuned |= {"run": replace(tuned["run"], **settings), "which": which, "validation": best["accuracy"][which]}
    plan = PlanBook(PLANS).for_run(tuned["run"], TRAINING_EXAMPLES[cell["task"]])
    ours, _ = yield from climbed(cell, tuned)
    row, _ = yield from climbed(cell, tuned | {"run": replace(tuned["run"], method=cell["method"], lam=None)})
    falls = Workload(schedule="linear", final_rate=LAST_RATE)  # what the row's own plan measures its error on
    norm = error_norms(plan.mechanism, plan.steps, falls, restart_every=plan.restart_every)[0]
    return _beside(row, ours | {"rmse": norm * plan.sigma})


def page(rows: list[Row]) -> str:
    """Each variant beside the default: RMSE, accuracy, the difference with its interval."""
    lines = []
    for row in sorted(rows, key=lambda row: (-row["epsilon"], row["rmse"])):
        ours = row["default"]
        middle, low, high = (100 * value for value in welch(row["scores"], ours["scores"]))
        lines.append(
            [
                f"{row['epsilon']:g}", method(row["method"]).title, f"{row['sigma']:.4g}", f"{row['rmse']:.2f}",
                f"{100 * (row['rmse'] / ours['rmse'] - 1):+.1f}%", _percent(row), _percent(ours),
                f"{middle:+.1f} ({low:+.1f} to {high:+.1f})",
            ]
        )  # fmt: skip
    header = ["ε", "variant", "σ", "RMSE", "beside the default's", "its accuracy", "the default's", "difference"]
    first = rows[0]
    return "\n\n".join(
        (
            "What might need less noise than the default, normalised λCGD with fresh bins: "
            f"CIFAR-10, the CNN and the search of `frontier`, k = {first['epochs']}, B = {first['batch_size']}, "
            "δ = 1e-5. Test accuracy in percent, mean ± standard error of "
            f"{len(first['scores'])} seeds; Welch intervals of 95%.",
            table(header, lines),
            "All but the buffer, which is as large as the model, store nothing. One σ is certified. A σ for each epoch "
            "is *simulated*: nothing may be claimed for these runs, and the library trains no such thing. Each variant "
            "began where the default's search ended, tried half and twice that rate (rate · RMSE / B kept) and one "
            "further out, so B, ζ and the schedule are those that suit the default. The default's runs are "
            "`frontier`'s.",
            f"Under “{FALLING.title}” that λ and the default's were trained with one falling rate, the best for the "
            "default in the search of `frontier`, five new seeds each; RMSE is of such a rate."
            if any(row["method"] == FALLING.name for row in rows)
            else "",
        )
    ).strip()


def _percent(row: Row) -> str:
    return f"{100 * row['test']:.1f} ± {100 * (row['standard_error'] or 0):.1f}"


EXPERIMENT = Experiment(
    "lower-noise",
    "test accuracy on CIFAR-10 of what might need less noise than the default (needs the data: --data)",
    cells,
    compute_with(search),
    COLUMNS,
    page,
    title=lambda cell: f"{cell['method']} ε={cell['epsilon']:g}",
    depends=("training",),
)
