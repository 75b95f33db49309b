"""Accuracy on IMDb of a small pretrained BERT that is fine-tuned privately: ``fine-tuning``.

The weights are given by ``--weights``; ``reproduce pretrain`` makes some. Each method has its own best batch size,
found by the search of ``frontier``.
"""

from __future__ import annotations

from lambdacgd.errors import InvalidInput
from reproduce.framework import MORE, Cell, Experiment, Row, Settings
from reproduce.frontier import (
    CLIPS,
    COLUMNS,
    DP_SGD,
    OURS,
    PAPER,
    PLANS,
    accuracies,
    at_the_edge,
    comparisons,
    frontier_search,
    settings_found,
)
from reproduce.pretrain import LAYERS, READ, WIDTH
from reproduce.problems import register_weights
from reproduce.runs import PlanBook, method
from reproduce.search import Point, centre
from reproduce.trainer import compute_with

EPOCHS = 5
BATCH_SIZES = {DP_SGD: (128, 256, 512), OURS: (64, 128, 256), PAPER: (64, 128, 256)}
SMALLER = 2.0  # pretrained weights bear half the rates that a CNN from scratch begins with; an eighth was too little


def cells(settings: Settings) -> list[Cell]:
    """The larger ε first."""
    if settings.weights is None:
        raise InvalidInput("weights", None, "fine-tuning needs --weights, a folder with a BERT: `pretrain` makes one")
    common: Cell = {"task": "imdb", "model": register_weights(settings.weights), "max_grad_norm": CLIPS[0]}
    common |= {"splits": ["validation", "test"], "epochs": EPOCHS, "seeds": 5}
    book = PlanBook(None if settings.quick else PLANS, make=True)
    if settings.quick:
        small = common | {"examples": 320, "seeds": 2, "epochs": 1}
        return [_cell(small, name, 8.0, (32, 64), book) for name in (OURS, DP_SGD)]
    return [_cell(common, name, e, sizes, book) for e in (8.0, 2.0) for name, sizes in BATCH_SIZES.items()]


def _cell(common: Cell, name: str, epsilon: float, batch_sizes: tuple[int, ...], book: PlanBook) -> Cell:
    middle, lam = batch_sizes[len(batch_sizes) // 2], "auto" if method(name).lam else None
    cell: Cell = {"method": name, "epsilon": epsilon, **common, "batch_size": middle, "lam": lam}
    rates = {str(size): centre(cell, Point(size, cell["epochs"]), book) / SMALLER for size in batch_sizes}
    return cell | {"rates": rates}


def page(rows: list[Row]) -> str:
    """Accuracies, differences with their intervals, and what the searches chose."""
    first = rows[0]
    parts = [
        f"IMDb (first {READ} word pieces), a BERT of {LAYERS} layers, {WIDTH} wide (the size of BERT-tiny, which the "
        f"paper's sweep over λ fine-tunes), {first['epochs']} epochs, plain SGD, all "
        "weights trained and a new output layer, δ = 1e-5. The BERT was pretrained here (`python -m reproduce "
        "pretrain`) to fill in masked words of the reviews of the *test* split, without labels, so the texts that test "
        "accuracy is measured on have been seen before, by every method alike. Test accuracy in percent, mean ± "
        f"standard error of {len(first['scores'])} seeds; B is each method's own best.",
        accuracies(rows),
        comparisons(rows),
        MORE,
        "Each method was searched on four fifths of the training set, under a plan for those, one seed a run, by the "
        "moves of `frontier` at k = 10, from half of its rates and B = 128 (DP-SGD: 256), where an earlier search with "
        "other weights had ended. The best run's settings then train on all of the training set with new seeds, "
        "which alone see the test set. (ε, δ) does not cover the search. The paper fine-tunes BERT-base and shows a "
        "figure without numbers: not comparable in height.",
        at_the_edge(rows),
        settings_found(rows),
    ]
    return "\n\n".join(part for part in parts if part)


EXPERIMENT = Experiment(
    "fine-tuning",
    "test accuracy on IMDb of a small BERT, pretrained here and fine-tuned privately",
    cells,
    compute_with(frontier_search),
    COLUMNS,
    page,
    title=lambda cell: f"{cell['method']} ε={cell['epsilon']:g}",
    depends=("training",),
)
