"""Poisson DP-SGD: the paper's row, and the limits that have closed forms."""

from __future__ import annotations

import pytest

from lambdacgd.accounting.gaussian import gaussian_delta
from lambdacgd.accounting.poisson import PoissonSampled
from lambdacgd.errors import AccountingError

TABLE = (1 / 390, 3900)


@pytest.mark.parametrize(
    ("epsilon", "sigma"),
    [(8, 0.4942), (4, 0.5952), (2, 0.7177), (1, 0.9096), (0.5, 1.3407), (0.25, 2.2654)],
)
def test_golden_row(epsilon, sigma):
    result = PoissonSampled(*TABLE).sigma(epsilon, 1e-5)
    assert result.sigma == pytest.approx(sigma, rel=5e-3)
    assert result.certificate.method == "pld"
    assert PoissonSampled(*TABLE).epsilon(result.sigma, 1e-5).epsilon == pytest.approx(epsilon, rel=1e-3)


def test_one_step_of_everybody_is_the_gaussian_mechanism():
    """b = 1: each step takes all examples, so k steps are one Gaussian of sensitivity √k."""
    bound = PoissonSampled(1.0, 4).delta(3.0, 2.0).delta
    exact = gaussian_delta(2.0, 3.0 / 2)
    assert exact <= bound <= exact * 1.01


def test_delta_falls_with_noise_and_epsilon():
    def delta(sigma: float, epsilon: float) -> float:
        return PoissonSampled(1 / 20, 60).delta(sigma, epsilon).delta

    assert delta(1.0, 1.0) > delta(1.2, 1.0) > delta(1.2, 1.3)


def test_delta_below_rounding_is_refused():
    with pytest.raises(AccountingError, match="too close to floating-point error"):
        PoissonSampled(*TABLE).sigma(1.0, 1e-12)
