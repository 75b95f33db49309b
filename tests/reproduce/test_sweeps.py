"""What the pages of the sweeps say: computed from rows, for one seed, missing points and short searches too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reproduce import sweeps
from reproduce.search import at_edge
from reproduce.sweeps import Setting, edges, what_comes_out

LAMBDAS = (0.0, 0.5, 0.9, 0.975)


def _row(lam: float, accuracy: float, *, rate: float = 1.0, seeds: int = 3, **more: Any) -> dict[str, Any]:
    row = {
        "task": "cifar10", "method": "lambda-cgd-cyclic", "batch_size": 128, "epochs": 10, "epsilon": 8.0, "lam": lam,
        "accuracy": accuracy, "standard_error": 0.004 if seeds > 1 else None, "scores": [accuracy] * seeds,
        "learning_rate": rate, "max_grad_norm": 0.3,
        "tried": [{"learning_rate": one, "max_grad_norm": 0.3} for one in (0.5, 1.0, 2.0)],
    }  # fmt: skip
    return row | more


def _rows(accuracies: tuple[float, ...], **more: Any) -> list[dict[str, Any]]:
    return [_row(lam, accuracy, **more) for lam, accuracy in zip(LAMBDAS, accuracies, strict=True)]


def _setting(accuracies: tuple[float, ...], theory: float) -> Setting:
    return Setting("cifar10", 128, 10, 8.0, _rows(accuracies), theory)


@pytest.mark.parametrize(
    ("accuracies", "theory", "place"),
    [
        ((0.4, 0.5, 0.6, 0.5), 0.97, "below"),
        ((0.4, 0.5, 0.6, 0.5), 0.93, "at"),
        ((0.4, 0.5, 0.5, 0.6), 0.93, "above"),
        ((0.6, 0.5, 0.5, 0.4), 0.0, "at"),
    ],
)
def test_where_the_best_lies(accuracies: tuple[float, ...], theory: float, place: str) -> None:
    assert _setting(accuracies, theory).place == place


def test_a_setting_beside_theory_and_dp_sgd() -> None:
    one = _setting((0.4, 0.505, 0.6, 0.595), 0.975)
    assert one.smaller_by == pytest.approx(4)
    assert one.gain == pytest.approx(0.2)
    assert one.loss(one.theory) == pytest.approx(0.005)
    assert one.loss(0.6) == pytest.approx(0.095)


def test_the_page_speaks_of_each_task_batch_and_epsilon() -> None:
    best_in_the_middle, rising = (0.4, 0.5, 0.6, 0.5), (0.4, 0.5, 0.55, 0.6)
    rows = (
        _rows(best_in_the_middle) + _rows(best_in_the_middle, epsilon=2.0) + _rows(rising, task="imdb", batch_size=64)
    )
    page = sweeps._page(rows + _rows((0.4, 0.6, 0.5, 0.5), batch_size=1024))
    assert "mean ± standard error over 3 seeds" in page
    assert "on CIFAR-10 the best λ lies below it in 3 of 3 settings" in page
    assert "on IMDb the best λ lies below it in 0 of 1 settings, is the one nearest to it in 1" in page
    assert "(in 1 it is the largest tried" in page
    assert "the best λ moves on CIFAR-10 from ε = 2 to 8 by +0 steps of the grid" in page
    assert "the best λ moves on CIFAR-10 from B = 128 to 1024 by -1 steps of the grid" in page
    assert "that of the RMSE loses 10.0 points on CIFAR-10 (at most 10.0), 0.0 points on IMDb (at most 0.0)." in page
    assert "**Against λ = 0 with the same sampling** the best λ gains 20.0 points on CIFAR-10" in page
    assert "**Over k**" not in page
    assert "Every search ended between" in page
    assert page.index("B = 128, k = 10, ε = 8") < page.index("B = 128, k = 10, ε = 2") < page.index("B = 1024, k = 10")


def test_what_the_guideline_loses_is_said_under_amplification_only() -> None:
    settings = [_setting((0.4, 0.5, 0.6, 0.57), 0.97), _setting((0.4, 0.6, 0.5, 0.5), 0.9)]
    text = what_comes_out(settings, "amplified RMSE")
    assert "that of the amplified RMSE loses 6.5 points on CIFAR-10 (at most 10.0)" in text
    assert "the guideline's, a third of it, loses 0.0 points on CIFAR-10 (at most 0.0)" in text
    assert "guideline" not in what_comes_out(settings, "RMSE")


def test_under_amplification_the_best_lambda_stands_beside_poisson_dp_sgd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """λ = 0 with fixed bins is a DP-SGD that nobody would choose."""
    (tmp_path / "methods-cifar").mkdir()
    row = {"method": "dp-sgd", "batch_size": 128, "epochs": 10, "epsilon": 8.0, "validation": 0.57}
    (tmp_path / "methods-cifar" / "methods-cifar.json").write_text(json.dumps({"rows": [row]}))
    monkeypatch.setattr(sweeps, "RESULTS", tmp_path)
    text = what_comes_out([_setting((0.4, 0.5, 0.6, 0.57), 0.97)], "amplified RMSE")
    assert "gains +3.0 on CIFAR-10 at ε = 8, B = 128 points" in text
    assert "Poisson" not in what_comes_out([_setting((0.4, 0.5, 0.6, 0.57), 0.97)], "RMSE")


def test_one_seed_has_no_standard_errors() -> None:
    few, many = (0.4, 0.6, 0.5, 0.5), (0.4, 0.5, 0.65, 0.5)
    rows = _rows(few, seeds=1, epochs=20) + _rows(many, seeds=1, epochs=40)
    page = sweeps._page(rows)
    assert "standard error" not in page
    assert "±" not in page
    assert "one run a point" in page
    assert "the best λ moves on CIFAR-10 from k = 20 to 40 by +1 steps of the grid" in page
    assert not any(line.has_yerr for axes in sweeps._plot(rows).axes for line in axes.containers)


def test_settings_with_missing_points_are_left_out_of_what_comes_out() -> None:
    rows = _rows((0.4, 0.5, 0.6, 0.5)) + _rows((0.4, 0.5, 0.5, 0.7), batch_size=256)[:2]
    page = sweeps._page(rows)
    assert "below it in 1 of 1 settings" in page
    assert "1 settings, not all of whose λ have been run, are left out" in page
    assert "| CIFAR-10 B = 256, k = 10, ε = 8 | 40.0 ± 0.4 | **50.0 ± 0.4** | — | — |" in page
    assert "What comes out" not in sweeps._page(rows[:2])


def test_searches_that_ended_at_an_edge_are_counted() -> None:
    assert at_edge(_row(0.9, 0.5, rate=0.5))
    assert at_edge(_row(0.9, 0.5, rate=2.0))
    assert not at_edge(_row(0.9, 0.5))
    assert not at_edge(_row(0.9, 0.5) | {"tried": [{"learning_rate": 1.0, "max_grad_norm": 0.3}]})
    points = _rows((0.4, 0.5, 0.6, 0.5))
    points[3]["learning_rate"] = 0.5
    text = edges([Setting("cifar10", 128, 10, 8.0, points, 0.975)])
    assert "at 1 of 4 points on CIFAR-10 (1 at λ = 0.975)" in text
    doubt = "in 1 of these a larger λ was left at the outermost rate"
    assert doubt in sweeps._page(points)
    points[3]["learning_rate"], points[0]["learning_rate"] = 1.0, 0.5
    assert doubt not in sweeps._page(points)
