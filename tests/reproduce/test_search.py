"""Searches against a made-up landscape: what they try, what they choose, and that all methods get the same budget."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from reproduce import paper_setting
from reproduce.framework import Settings
from reproduce.methods_table import CIFAR_METHODS, FIRST, cifar_cells, imdb_cells
from reproduce.runs import METHODS, Result, RunStore, TrainingRun
from reproduce.search import (
    CENTRES,
    NEIGHBOURS,
    answer,
    best,
    given_search,
    method_search,
    standard_error,
    stored,
    sweep_search,
)  # fmt: skip
from reproduce.sweeps import amplified_cells, epochs_cells, lambda_cells
from reproduce.trainer import plan_requests, rows_from

CELL = {
    "task": "cifar10", "model": "cnn", "method": "lambda-cgd", "epsilon": 8.0, "batch_size": 128, "epochs": 10,
    "max_grad_norm": 0.3, "tries": 5, "seeds": 3, "splits": ["validation", "test"],
}  # fmt: skip


class Landscape:
    """Accuracy peaks at a learning rate (in units of lr·ζ) and a λ; averages are a little better than last weights."""

    def __init__(self, rate: float, lam: float = 0.9, linear: float = 0.0) -> None:
        self.rate, self.lam, self.linear = rate * 0.3, lam, linear
        self.runs: list[TrainingRun] = []

    def __call__(self, run: TrainingRun, until: float | None) -> dict:
        self.runs.append(run)
        off = math.log2(run.learning_rate * run.max_grad_norm / self.rate)
        score = 0.6 - 0.02 * off**2 - (0 if run.lam is None else abs(run.lam - self.lam))
        score += self.linear if run.schedule == "linear" else 0
        score += 0.001 * run.seed
        return {
            "accuracy": {"last": score - 0.01, "ema-0.99": score}, "seconds": 1.0, "sigma": 1.0,
            "training_examples": 40_000, "certificate": {"method": "pld", "kind": "bound"},
        }  # fmt: skip

    def row(self, cell: dict) -> dict:
        row = answer(method_search(cell), RunStore(None), self)
        assert row is not None
        return row


def test_best_names_run_weights_and_score() -> None:
    land = Landscape(2.0)
    row = land.row(CELL)
    runs = [run for run in land.runs if run.split == "validation"]
    top, which, score = best(runs, [land(run, None) for run in runs])
    assert (top.learning_rate, top.lam, which) == (row["learning_rate"], row["lambda"], "ema-0.99")
    assert score == row["validation"]


def test_a_search_tries_rates_another_lambda_and_a_schedule_then_tests_with_new_seeds() -> None:
    land = Landscape(2.0, lam=0.9)
    row = land.row(CELL)
    tried = [(run.learning_rate, run.lam, run.schedule) for run in land.runs[:5]]
    assert tried == [
        (2.0, 0.95, "constant"), (1.0, 0.95, "constant"), (4.0, 0.95, "constant"), (2.0, 0.9, "constant"),
        (3.0, 0.9, "linear"),
    ]  # fmt: skip
    assert [(run.split, run.seed, run.lam) for run in land.runs[5:]] == [("test", i, 0.9) for i in (1, 2, 3)]
    assert row["test"] == pytest.approx(0.602)
    assert row["standard_error"] == pytest.approx(0.001 / math.sqrt(3))
    assert row["last"] == pytest.approx(0.592)
    assert len(row["tried"]) == 5
    assert row["training_seconds"] == 8.0


@pytest.mark.parametrize(("peak", "expected"), [(16.0, 8.0), (0.25, 0.5)])
def test_a_best_rate_at_the_edge_is_followed(peak: float, expected: float) -> None:
    land = Landscape(peak, lam=0.95, linear=-0.1)
    assert land.row(CELL)["learning_rate"] == expected


def test_methods_without_lambda_try_a_smaller_clipping_norm_instead() -> None:
    land = Landscape(2.0)
    land.row(CELL | {"method": "dp-sgd"})
    other = land.runs[3]
    assert other.max_grad_norm == pytest.approx(0.1)
    assert other.learning_rate * other.max_grad_norm == pytest.approx(0.6)


@pytest.mark.parametrize("peak", [0.01, 0.5, 2.0, 100.0])
def test_every_method_gets_the_same_moves_however_well_its_rates_were_guessed(peak: float) -> None:
    """A rate at the edge is one more run: it must not use up the run that tries the schedule, or λ or ζ."""
    for cell in cifar_cells(Settings()) + imdb_cells(Settings()):
        if cell.get("between"):  # begins with what two such searches chose
            continue
        land = Landscape(peak)
        row = land.row(cell)
        assert {run["schedule"] for run in row["tried"]} == {"constant", "linear"}, cell
        assert len({(run["lam"], run["max_grad_norm"]) for run in row["tried"]}) > 1, cell
        assert len(row["scores"]) == 3


def test_every_method_gets_the_same_number_of_runs() -> None:
    for cell in cifar_cells(Settings()):
        rows = [Landscape(rate).row(cell) for rate in (CENTRES[cell["epsilon"]], 100.0)]
        assert [len(row["tried"]) for row in rows] == ([2, 2] if cell["epsilon"] in NEIGHBOURS else [5, 6]), cell


@pytest.mark.parametrize(
    ("epsilon", "middle"), [(4.0, 1.0), (1.0, math.sqrt(1.0 * 0.8)), (0.25, 0.8 * math.sqrt(0.8 / 1.0))]
)
def test_other_epsilons_begin_where_their_neighbours_ended(epsilon: float, middle: float) -> None:
    land = Landscape(1.0, lam=0.9, linear=-0.1)  # found at ε = 8 and 2; at ε = 0.5 the nearest rate tried is 0.8
    row = land.row(CELL | {"epsilon": epsilon, "between": True})
    mine = [run for run in land.runs if run.epsilon == epsilon and run.split == "validation"]
    assert [run.learning_rate for run in mine] == pytest.approx([0.7 * middle, 1.4 * middle], rel=0.01)
    assert row["lambda"] in (METHODS["lambda-cgd"].first(epsilon), METHODS["lambda-cgd"].second(epsilon))


def test_searches_share_runs() -> None:
    land, store = Landscape(1.0), RunStore(None)
    for epsilon in (8.0, 2.0):
        answer(method_search(CELL | {"epsilon": epsilon}), store, land)
    before = len(land.runs)
    answer(method_search(CELL | {"epsilon": 4.0, "between": True}), store, land)
    assert len(land.runs) - before == 2 + 3


def test_without_training_a_search_is_answered_from_the_store_or_not_at_all() -> None:
    land, store = Landscape(1.0), RunStore(None)
    assert stored(method_search(CELL), store) is None
    row = answer(method_search(CELL), store, land)
    assert stored(method_search(CELL), store) == row


def test_rows_come_with_the_records_behind_them() -> None:
    """A cell names the machine that trained it, whatever other runs the store holds."""
    store = RunStore(None)
    names = {"dp-sgd": "one machine", "lambda-cgd": "another"}
    for name, place in names.items():
        land = Landscape(2.0)
        answer(method_search(CELL | {"method": name}), RunStore(None), land)
        for run in tuple(land.runs):
            store.add(run, land(run, None), where={"device": place})
    experiment = replace(
        CIFAR_METHODS, cells=lambda _: [CELL | {"method": name} for name in (*names, "lambda-cgd-fresh")]
    )
    found = list(rows_from(experiment, method_search, store, Settings()))
    assert [cell["method"] for cell, _, _ in found] == list(names)
    for cell, row, records in found:
        assert {record["machine"]["device"] for record in records} == {names[cell["method"]]}
        assert len(records) == CELL["tries"] + CELL["seeds"]
        assert len(row["scores"]) == CELL["seeds"]


def test_rates_may_move_outwards_more_than_once() -> None:
    land = Landscape(8.0)
    row = land.row(CELL | {"tries": 6, "moves": ["edge", "edge", "other"]})
    assert [run.learning_rate for run in land.runs[:5]] == [2.0, 1.0, 4.0, 8.0, 16.0]
    assert row["learning_rate"] == 8.0


@pytest.mark.parametrize(("away", "tried"), [(1.0, 3), (0.25, 5), (0.01, 6)])
def test_a_point_of_a_sweep_keeps_its_lambda_and_looks_for_its_rate(away: float, tried: int) -> None:
    cell = lambda_cells(Settings())[3]
    land = Landscape(away * cell["learning_rate"])
    row = answer(sweep_search(cell), RunStore(None), land)
    assert row is not None
    assert {run.lam for run in land.runs} == {cell["lam"]}
    assert {run.split for run in land.runs} == {"validation"}
    assert len(row["tried"]) == tried
    assert len(land.runs) == tried + 2  # the search's own seed counts as the first of three
    assert row["learning_rate"] == pytest.approx(cell["learning_rate"] * max(away, 1 / 16))
    assert row["accuracy"] == pytest.approx(sum(row["scores"]) / 3)


def test_reviews_between_two_searches_begin_where_those_ended() -> None:
    cells = {(cell["method"], cell["epsilon"]): cell for cell in imdb_cells(Settings())}
    assert {epsilon for _, epsilon in cells} == set(CENTRES)
    lands = {epsilon: Landscape(20.0) for epsilon in (8.0, 4.0)}
    for epsilon, land in lands.items():
        land.row(cells["dp-sgd", epsilon])
    own = [run for run in lands[8.0].runs if run.split == "validation"]
    assert own[0].learning_rate == 32.0
    assert own == [run for run in lands[4.0].runs if run.epsilon == 8.0]
    assert next(run.learning_rate for run in lands[4.0].runs if run.epsilon == 2.0) == 16.0
    assert len([run for run in lands[4.0].runs if run.epsilon == 4.0]) == 2 + 3


def test_what_matters_most_comes_first() -> None:
    cells = cifar_cells(Settings())
    assert {(cell["method"], cell["epsilon"]) for cell in cells[:9]} == {(m, e) for m in FIRST for e in (8.0, 2.0, 0.5)}
    assert {cell["epsilon"] for cell in cells} == set(CENTRES)
    assert {cell["method"] for cell in cells} == set(METHODS) - {"lambda-cgd-cyclic", "bandmf"}
    assert len({str(cell) for cell in cells}) == len(cells)


@pytest.mark.parametrize("cells", [cifar_cells, imdb_cells, lambda_cells, amplified_cells, epochs_cells])
def test_plans_for_all_that_a_search_may_train_are_known_beforehand(cells) -> None:
    listed = cells(Settings())
    known = [request for cell in listed for request in plan_requests(cell)]
    search = sweep_search if "lam" in listed[0] else method_search
    for lam in (0.5, 0.8, 0.9, 0.95):
        for cell in listed[::5]:
            land = Landscape(1.0, lam=lam)
            answer(search(cell), RunStore(None), land)
            examples = {"cifar10": (40_000, 50_000), "imdb": (20_000, 25_000)}[cell["task"]]
            for run in land.runs:
                assert run.plan_request(examples[run.split == "test"]) in known


def test_standard_error() -> None:
    assert standard_error([0.5]) is None
    assert standard_error([0.4, 0.6]) == pytest.approx(0.1)


def test_searches_that_end_at_the_edge_are_named() -> None:
    from reproduce.methods_table import at_the_edge

    tried = [{"learning_rate": rate, "max_grad_norm": 0.3} for rate in (0.5, 1.0, 2.0)]
    row = {"method": "dp-sgd", "epsilon": 8.0, "max_grad_norm": 0.3, "tried": tried}
    assert "DP-SGD (Poisson) at ε = 8" in at_the_edge([row | {"learning_rate": 0.5}])
    assert "Every search" in at_the_edge([row | {"learning_rate": 1.0}])


def test_the_papers_setting_is_trained_as_printed() -> None:
    cells = paper_setting.cells(Settings())
    assert {(c["max_grad_norm"], c["batch_size"], c["epochs"], c["seeds"]) for c in cells} == {(8.0, 128, 10, 5)}
    asked: list[TrainingRun] = []

    class Known:
        def get(self, run: TrainingRun) -> Result:
            asked.append(run)
            facts = {"sigma": 1.0, "rmse": 2.0, "certificate": {}, "seconds": 1.0}
            if run.model == "cnn-plain" and run.seed == 3:
                return facts | {"accuracy": {"last": 0.0, "ema-0.99": 0.0}, "diverged": "a sum is not finite"}
            return facts | {"accuracy": {"last": 0.5, "ema-0.99": 0.6}}

    rows = [cell | (stored(given_search(cell), Known()) or {}) | {"seconds": 5.0} for cell in cells]
    assert {(run.split, run.schedule, run.lam) for run in asked} == {
        ("test", "constant", 0.95),
        ("test", "constant", None),
    }
    page = paper_setting.page(rows)
    assert "| without normalisation | DP-λCGD | 40.0 ± 10.0 (rate 0.5, λ = 0.95, 1 of 5 diverged) |" in page
    assert "| with GroupNorm(8) | DP-SGD (Poisson) | 50.0 ± 0.0 (rate 0.2) |" in page
