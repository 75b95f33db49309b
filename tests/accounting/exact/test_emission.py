"""Lemma 4: rounding a lognormal onto a grid, mean preserved and larger in convex order."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import ndtr

from lambdacgd.accounting.exact.lattice import grid_top, lognormal_excess, round_lognormal, value_grid
from lambdacgd.errors import AccountingError


def lognormal_put(mean: float, deviation: float, strike: float) -> float:
    z = (math.log(strike) - mean) / deviation
    return float(strike * ndtr(z) - math.exp(mean + deviation**2 / 2) * ndtr(z - deviation))


@settings(max_examples=50, deadline=None)
@given(st.floats(-6, 2), st.floats(0.01, 2.5), st.floats(1e-4, 0.05), st.floats(0.005, 0.2), st.floats(0.02, 30))
def test_rounding_is_larger_in_convex_order(
    mean: float, deviation: float, fine: float, ratio: float, strike: float
) -> None:
    grid = value_grid(fine, ratio, 60.0)
    p = round_lognormal(np.array([mean]), deviation, grid)[0]
    assert p.min() >= 0
    assert p.sum() == pytest.approx(1.0, abs=1e-12)
    excess = float(lognormal_excess(mean, deviation, grid[-1]))
    average = math.exp(mean + deviation**2 / 2)
    assert p @ grid + excess == pytest.approx(average, rel=1e-9)
    truth = lognormal_put(mean, deviation, strike)
    assert p @ np.maximum(strike - grid, 0) >= truth - 1e-12 * (strike + average)
    call = truth + average - strike
    assert p @ np.maximum(grid - strike, 0) + excess >= call - 1e-12 * (strike + average)


def test_many_rows_at_once_agree_with_one() -> None:
    grid = value_grid(0.01, 0.05, 20.0)
    means = np.linspace(-3, 2, 7)
    together = round_lognormal(means, 0.4, grid)
    for row, mean in zip(together, means, strict=True):
        np.testing.assert_array_equal(row, round_lognormal(np.array([mean]), 0.4, grid)[0])


def test_excess_against_quadrature() -> None:
    exact = quad(lambda x: (math.exp(x) - 3.0) * math.exp(-((x - 0.2) ** 2) / 2 / 0.49), math.log(3.0), 8.0)[0]
    assert float(lognormal_excess(0.2, 0.7, 3.0)) == pytest.approx(exact / math.sqrt(2 * math.pi * 0.49), rel=1e-9)


def test_grid_top_is_just_high_enough() -> None:
    top = grid_top(-2.0, 1.1, 1e-9)
    assert lognormal_excess(-2.0, 1.1, top) <= 1e-9 < lognormal_excess(-2.0, 1.1, top * 0.98)


def test_grid_is_fine_then_geometric() -> None:
    grid = value_grid(0.01, 0.05, 50.0)
    steps = np.diff(grid)
    assert grid[0] == 0
    assert grid[-1] >= 50
    assert np.all(steps <= np.maximum(0.01, 0.05 * grid[:-1]) * (1 + 1e-9))
    assert len(value_grid(0.01, 0.05, 0.1)) == 11
    with pytest.raises(AccountingError, match="points"):
        value_grid(1e-9, 1e-6, 1.0)
