"""Models that read reviews in order: ``lstm-imdb`` trains one from scratch, ``bert-path`` is fine-tuning's way once."""

from __future__ import annotations

from reproduce.framework import Cell, Experiment, Row, Settings
from reproduce.methods_table import COLUMNS, FIRST, IMDB, method_cell, methods_page, percent, plot, sizes_of
from reproduce.search import method_search
from reproduce.training import compute_with

_PAIRS = (("lambda-cgd", "dp-sgd", ""), ("lambda-cgd-fresh", "dp-sgd", ""))


def lstm_cells(settings: Settings) -> list[Cell]:
    """DP-SGD and λCGD at two ε."""
    base, rates = IMDB | {"model": "lstm"}, {"8": 32.0, "2": 16.0}
    if settings.quick:
        small = {"examples": 160, "batch_size": 32, "epochs": 1, "tries": 1, "seeds": 2}
        return [method_cell(base, name, 8.0, learning_rates=rates, **small) for name in ("lambda-cgd", "dp-sgd")]
    return [method_cell(base, name, epsilon, learning_rates=rates) for epsilon in (8.0, 2.0) for name in FIRST]


def lstm_page(rows: list[Row]) -> str:
    about = (
        "IMDb (first 128 word pieces, the 8 192 most frequent), embeddings in 16 dimensions, an LSTM of 32, the mean "
        f"of its states, and a linear layer, trained from scratch, {sizes_of(rows)}. How it is built, and where rates "
        "begin, came from a few trials of λCGD on validation reviews."
    )
    beside = (
        "The bag of words of `methods-imdb`, which sees twice as many word pieces and not their order, is ahead at the "
        "same ε and takes a fraction of the time, so the comparison of all methods is made with that. The paper "
        "fine-tunes a pretrained BERT."
    )
    return methods_page(rows, about, beside, _PAIRS)


def bert_cells(settings: Settings) -> list[Cell]:
    """One epoch of a BERT with random weights: that the path works, not what it is worth."""
    small = {"examples": 160, "batch_size": 32} if settings.quick else {"batch_size": 128}
    bert = {"model": "bert-tiny", "epochs": 1, "tries": 1, "seeds": 1, "learning_rate": 0.5} | small
    return [method_cell(IMDB, "lambda-cgd", 8.0, **bert)]


def bert_page(rows: list[Row]) -> str:
    row = rows[0]
    return (
        "BERT-tiny (two layers, width 128) with random weights on IMDb reviews, one epoch of DP-λCGD through "
        f"`lc.privatize` ({sizes_of(rows)}, ε = {row['epsilon']:g}, σ = {row['sigma']:.3g}): test accuracy "
        f"{percent(row)}%, {row['training_seconds']:.0f} s of training. Random weights learn little in an epoch; this "
        "shows that the path that fine-tuning takes is whole. With weights from a hub, "
        "`methods-imdb --weights DIR` compares methods and `LambdaCGDTrainer` fine-tunes."
    )


LSTM = Experiment(
    "lstm-imdb",
    "test accuracy of an LSTM on IMDb, every method tuned alike",
    lstm_cells,
    compute_with(method_search),
    COLUMNS,
    lstm_page,
    plot,
    lambda cell: f"{cell['method']} ε={cell['epsilon']:g}",
)
BERT_PATH = Experiment(
    "bert-path",
    "a BERT with random weights on IMDb, end to end",
    bert_cells,
    compute_with(method_search),
    COLUMNS,
    bert_page,
    title=lambda cell: cell["model"],
)
