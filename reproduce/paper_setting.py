"""``paper-setting``: CIFAR-10 with the hyperparameters that the paper prints, nothing tuned.

The paper's table of hyperparameters has B = 128, ζ = 8 and, for each method and ε, λ and a learning rate. It does not
say what its CNN of 0.3M parameters looks like, so they train ours with GroupNorm and the same one without.
"""

from __future__ import annotations

from reproduce.framework import Cell, Experiment, Row, Settings, table
from reproduce.runs import method
from reproduce.search import given_search
from reproduce.trainer import compute_with

MODELS = {"cnn-plain": "without normalisation", "cnn": "with GroupNorm(8)"}
# The paper's: (λ, learning rate) by method and ε.
GIVEN: dict[str, dict[float, tuple[float | None, float]]] = {
    "lambda-cgd": {8.0: (0.95, 0.5)},
    "dp-sgd": {8.0: (None, 0.2)},
}
COLUMNS = ("method", "model", "epsilon", "test", "standard_error", "learning_rate", "lam", "sigma", "diverged")


def cells(settings: Settings) -> list[Cell]:
    """The CNN without normalisation first."""
    size = {"examples": 320, "batch_size": 64, "epochs": 1, "seeds": 2} if settings.quick else {}
    base: Cell = {"task": "cifar10", "batch_size": 128, "epochs": 10, "seeds": 5, "splits": ["test"]}
    return [
        base | {"method": name, "model": model, "epsilon": epsilon, "max_grad_norm": 8.0} | _given(name, epsilon) | size
        for model in MODELS
        for name, by_epsilon in GIVEN.items()
        for epsilon in by_epsilon
    ]


def _given(name: str, epsilon: float) -> Cell:
    lam, rate = GIVEN[name][epsilon]
    return {"lam": lam, "learning_rate": rate}


def page(rows: list[Row]) -> str:
    """Accuracies, models down and ε across."""
    by = {(row["model"], row["method"], row["epsilon"]): row for row in rows}
    epsilons = sorted({row["epsilon"] for row in rows}, reverse=True)
    lines = []
    for model, title in MODELS.items():
        for name in GIVEN:
            mine = [by.get((model, name, e)) for e in epsilons]
            if any(mine):
                lines.append([title, method(name).title, *(None if row is None else _text(row) for row in mine)])
    first = rows[0]
    return (
        f"The paper's hyperparameters as printed, nothing tuned here: B = {first['batch_size']}, "
        f"k = {first['epochs']}, ζ = {first['max_grad_norm']:g}, plain SGD, a constant rate, "
        "the last weights; λCGD with fixed bins, DP-SGD under Poisson sampling. "
        "Test accuracy in percent, mean ± standard error of "
        f"{len(first['scores'])} seeds; δ = 1e-5. The paper does not print its CNN, so ours of 0.3M parameters stands "
        "in, without normalisation and with.\n\n"
        + table(["our CNN", "method", *(f"ε = {e:g}" for e in epsilons)], lines)
        + "\n\nWith ζ = 8 few gradients are clipped and the noise is 27 times that of ζ = 0.3 at the same rate, so "
        "what comes out says what these rates do to our CNN, not which method is better: `frontier` tunes each."
    )


def _text(row: Row) -> str:
    blown = f", {row['diverged']} of {len(row['scores'])} diverged" if row["diverged"] else ""
    given = f"rate {row['learning_rate']:g}" + ("" if row["lam"] is None else f", λ = {row['lam']:g}")
    return f"{100 * row['test']:.1f} ± {100 * (row['standard_error'] or 0):.1f} ({given}{blown})"


EXPERIMENT = Experiment(
    "paper-setting",
    "test accuracy on CIFAR-10 with the paper's own hyperparameters",
    cells,
    compute_with(given_search),
    COLUMNS,
    page,
    title=lambda cell: f"{cell['method']} {cell['model']} ε={cell['epsilon']:g}",
    depends=("training",),
)
