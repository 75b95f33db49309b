"""The frontier's search on made-up results, its plans, its estimate, and its comparisons."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from reproduce import frontier
from reproduce.framework import Settings
from reproduce.frontier import DP_SGD, OURS, PLANS, epochs_for, frontier_cells, frontier_search, welch
from reproduce.pool import Chosen, estimate
from reproduce.runs import PlanBook, Result, RunStore, TrainingRun
from reproduce.search import stored
from reproduce.trainer import plan_requests


class Landscape:
    """Accuracy falls with the distance, in factors of two, from a best batch size and rate; ``asked`` keeps runs."""

    def __init__(self, batch_size: int, rate: float, *, schedule: str = "linear", clip: float = 0.3) -> None:
        self.best, self.schedule, self.clip = (batch_size, rate), schedule, clip
        self.asked: list[TrainingRun] = []

    def get(self, run: TrainingRun) -> Result:
        self.asked.append(run)
        reach = run.learning_rate * run.max_grad_norm / 0.3 * (1.0 if run.schedule == "linear" else 1.5)
        far = abs(math.log2(run.batch_size / self.best[0])) + abs(math.log2(reach / self.best[1]))
        other = (run.schedule != self.schedule) + (run.max_grad_norm != self.clip)
        score = 0.8 - 0.05 * far - 0.02 * other + 0.001 * run.seed
        facts: dict[str, Any] = {"sigma": 1.0, "rmse": 1.0, "lambda": None, "certificate": {}, "seconds": 2.0}
        return facts | {"accuracy": {"last": score}, "sharing": 2}


def cell(name: str, epsilon: float, epochs: int) -> dict[str, Any]:
    cells = frontier_cells(Settings())
    return next(c for c in cells if (c["method"], c["epsilon"], c["epochs"]) == (name, epsilon, epochs))


@pytest.mark.parametrize("batch_size", [256, 512, 1024])
@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0])
def test_a_search_finds_its_best_batch_size_rate_schedule_and_clip(batch_size: int, factor: float) -> None:
    asked = cell(DP_SGD, 2.0, 10)
    for how in ({}, {"schedule": "constant"}, {"clip": 0.1}, {"clip": 1.0}):
        known = Landscape(batch_size, asked["rates"][str(batch_size)] * factor, **how)
        row = stored(frontier_search(asked), known)
        assert row is not None
        assert (row["batch_size"], row["schedule"], row["max_grad_norm"]) == (
            batch_size,
            how.get("schedule", "linear"),
            how.get("clip", 0.3),
        )
        assert len(row["tried"]) <= 12
        assert len(row["scores"]) == 5
        assert {run.seed for run in known.asked if run.split == "test"} == {1, 2, 3, 4, 5}
        assert row["gpu_seconds"] == 1.0


def test_a_search_that_ended_at_the_edge_tries_one_further_batch_size() -> None:
    asked = cell(DP_SGD, 2.0, 10)
    known = Landscape(128, asked["rates"]["128"])
    row = stored(frontier_search(asked), known)
    assert row is not None
    assert (row["batch_size"], row["tried"][-1]["batch_size"]) == (128, 128)
    later = Landscape(128, asked["rates"]["128"])
    assert stored(frontier_search(cell(DP_SGD, 2.0, 20)), later) is not None
    assert 128 not in {run.batch_size for run in later.asked}  # begins where ten epochs ended before


def test_every_method_is_searched_by_the_same_number_of_runs() -> None:
    counts = set()
    for name in (DP_SGD, OURS, frontier.PAPER, frontier.BISR, frontier.PLAIN, frontier.BANDMF):
        asked = cell(name, 8.0, 10)
        row = stored(frontier_search(asked), Landscape(asked["batch_size"], asked["rates"][str(asked["batch_size"])]))
        assert row is not None
        counts.add(len(row["tried"]))
    assert counts == {8}  # three rates, two other B, another schedule, two other ζ


def test_more_epochs_begin_where_ten_ended() -> None:
    asked = cell(OURS, 8.0, 40)
    known = Landscape(64, asked["after"]["rates"]["64"] * 2)
    row = stored(frontier_search(asked), known)
    first = next(run for run in known.asked if run.epochs == 40)
    assert row is not None
    assert (first.batch_size, first.learning_rate) == (64, pytest.approx(2 * asked["rates"]["64"], rel=0.01))
    assert {run.epochs for run in known.asked if run.split == "test"} == {40}
    assert len(row["tried"]) <= 5


def test_the_plans_of_all_runs_are_in_the_repository() -> None:
    book = PlanBook(PLANS)
    for asked in frontier_cells(Settings()):
        for request in plan_requests(asked):
            assert request in book


def test_rates_are_comparable() -> None:
    book = PlanBook(PLANS)
    for asked in frontier_cells(Settings()):
        for request in plan_requests(asked):
            if request["examples"] == 40_000:
                rate = asked["rates"][str(request["batch_size"])]
                reach = rate * book.get(request).rmse / request["batch_size"]
                assert reach == pytest.approx(frontier.REACH, rel=0.01) or rate == frontier.HIGHEST


def test_an_estimate_trains_nothing(tmp_path: Path) -> None:
    store, said = RunStore(tmp_path / "runs.jsonl"), list[str]()
    cells = Chosen(["frontier"], None, "8", None, False, "10").cells("frontier")
    assert {c["epochs"] for c in cells} == {10}
    total = estimate([(c["method"], frontier_search(c)) for c in cells], store, said.append)
    assert len(said) == len(cells) >= 5
    assert 20 * len(cells) < total < 300 * len(cells)
    assert not (tmp_path / "runs.jsonl").exists()


def test_welch_is_scipys() -> None:
    a, b = [0.70, 0.71, 0.69, 0.72, 0.70], [0.60, 0.66, 0.58, 0.61, 0.63]
    theirs = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert welch(a, b)[1:] == pytest.approx((theirs.low, theirs.high))
    assert welch(a, b)[0] == pytest.approx(sum(a) / 5 - sum(b) / 5)
    assert welch([0.5, 0.5], [0.25, 0.25]) == (0.25, 0.25, 0.25)


def test_epochs_for_an_accuracy_lie_on_a_line_over_log_k() -> None:
    rows = [{"epochs": 40, "test": 0.7}, {"epochs": 10, "test": 0.6}]
    assert epochs_for(0.65, rows) == pytest.approx(20)
    assert epochs_for(0.6, rows) == 10
    assert epochs_for(0.71, rows) is None
    assert epochs_for(0.59, rows) is None


def test_the_page_compares_at_equal_epochs_and_at_a_quarter() -> None:
    rows = []
    for name, epochs, gain in ((OURS, 10, 0.1), (DP_SGD, 10, 0.0), (DP_SGD, 40, 0.09), (OURS, 40, 0.14)):
        asked = cell(name, 8.0, epochs)
        row = stored(frontier_search(asked), Landscape(128, 1.0))
        assert row is not None
        scores = [0.5 + gain + 0.001 * i for i in range(5)]
        rows.append(asked | row | {"scores": scores, "test": 0.502 + gain, "standard_error": 0.0007})
    text = frontier.page(rows)
    assert "| 8 | 10 | DP-SGD (Poisson), 10 | +10.0 |" in text
    assert "| 8 | 10 | DP-SGD (Poisson), 40 | +1.0 |" in text
    assert "10 epochs for more than 40 at ε = 8" in text
    assert frontier.plot(rows) is not None


def test_the_page_names_the_rows_of_which_nothing_is_proven() -> None:
    asked = cell(frontier.BANDMF, 2.0, 10)
    row = stored(frontier_search(asked), Landscape(128, 1.0))
    assert row is not None
    assert "refuses" not in frontier.page([asked | row])
    assert "refuses to train BandMF, cyclic Poisson at ε = 2 " in frontier.page([asked | row | {"unproven": True}])
