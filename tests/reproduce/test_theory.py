"""The theory figures: constants, orders and small cases with known answers."""

from __future__ import annotations

import math

import pytest

from reproduce import lambda_theory, normalized_ratio
from reproduce.framework import Row, Settings
from reproduce.paper import FULL_BATCH, FULL_BATCH_GAPS

SETTINGS = Settings()


def test_full_batch_constants() -> None:
    found = lambda_theory.compute({"part": "full batch", "epochs": 1000}, SETTINGS)
    for name, constant in FULL_BATCH.items():
        assert found["closed"][name] / 1000 == pytest.approx(constant, rel=2e-3)
    for name, value in found["computed"].items():
        assert value == pytest.approx(found["closed"][name], rel=1e-9)
    # The error is flat to rounding there, and how sums are rounded depends on the number of threads.
    assert max(found["best_lambda_rmse"], found["best_lambda_maxse"]) < 1e-6
    trivial, diagonal, bound = found["closed"].values()
    gaps = (trivial / diagonal, trivial / bound, diagonal / bound)
    assert gaps == pytest.approx(tuple(FULL_BATCH_GAPS.values()), abs=8e-3)


def test_one_step_is_its_own_bound() -> None:
    found = lambda_theory.compute({"part": "full batch", "epochs": 1}, SETTINGS)
    assert list(found["closed"].values()) == [1.0, 1.0, 1.0]


def test_objectives_come_in_the_papers_order() -> None:
    cell = {"part": "lambda", "batch_size": 2048, "epochs": 4, "epsilon": 2.0, "delta": 1e-5, "examples": 50_000}
    found = lambda_theory.compute(cell, SETTINGS)
    assert found["steps_per_epoch"] == 24
    assert 1 > found["maxse"] > found["rmse"] > found["amplified-rmse"] > found["guideline"] >= 0
    assert 1 / (1 - found["guideline"]) == pytest.approx(1 / (1 - found["amplified-rmse"]) / 3)
    page = lambda_theory.page([cell | found, {"part": "full batch", "epochs": 1} | _full(1)])
    assert "holds in 1 of 1 settings" in page
    assert "| 2048 | 24 | 4 | 2 |" in page


def _full(n: int) -> Row:
    return lambda_theory.compute({"part": "full batch", "epochs": n}, SETTINGS)


def test_normalisation_of_two_steps_by_hand() -> None:
    """k = 1, b = 2: B̃ = [[d₁, 0], [d₁ − λd₂, d₂]] with d₁² = 1 + λ², d₂ = 1, and sens = 1."""
    found = normalized_ratio.compute({"epochs": 1, "steps_per_epoch": 2}, SETTINGS)
    lam = found["lambda_normalized"]
    first = math.sqrt(1 + lam**2)
    by_hand = math.sqrt((first**2 + (first - lam) ** 2 + 1) / 2)
    assert found["rmse_normalized"] == pytest.approx(by_hand)
    plain = found["lambda_plain"]
    assert found["rmse_plain"] == pytest.approx(math.sqrt((1 + (1 - plain) ** 2 / 2) * (1 + plain**2)))


@pytest.mark.parametrize("b", [4, 64])
def test_fewer_epochs_gain_more_from_normalisation(b: int) -> None:
    found = [normalized_ratio.compute({"epochs": k, "steps_per_epoch": b}, SETTINGS) for k in (1, 2, 8)]
    ratios = [row["ratio"] for row in found]
    assert ratios == sorted(ratios)
    assert ratios[0] < 1
    assert all(row["ratio"] <= row["ratio_same_lambda"] + 1e-9 for row in found)


def test_full_batches_gain_nothing() -> None:
    assert normalized_ratio.compute({"epochs": 5, "steps_per_epoch": 1}, SETTINGS)["ratio"] == 1.0


def test_losses_are_named() -> None:
    row = {"epochs": 3, "steps_per_epoch": 2, "ratio": 1.01}
    assert "loses a little at k = 3, b = 2 (1.0100)" in normalized_ratio.page([row])
    assert "Nowhere" in normalized_ratio.page([row | {"ratio": 0.9}])
