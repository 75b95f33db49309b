"""BandInvMF optimised for amplified error beats what it starts from."""

import pytest

from lambdacgd.accounting.monte_carlo import MonteCarlo
from lambdacgd.mechanisms import BISR, BandInvMF, Horizon, Mechanism, error_norms
from lambdacgd.tuning import amplified_band_inv_mf, choose_gamma
from lambdacgd.validation import InvalidInput

SMALL = Horizon(30, 3)


def error(mechanism: Mechanism) -> float:
    sigma = MonteCarlo(mechanism, SMALL).estimate_sigma(1.0, 1e-4, relative_error=0.03).sigma
    return error_norms(mechanism, SMALL.steps)[0] * sigma


def test_it_is_better_than_every_start() -> None:
    """Estimates of σ are good to about .2%; 1% is allowed for."""
    found = amplified_band_inv_mf(3, SMALL, epsilon=1.0, delta=1e-4)
    assert found.coefficients is not None
    assert all(value < 0 for value in found.coefficients[1:])
    best = error(found)
    assert best < 1.01 * error(BISR(3))
    assert best < 1.01 * error(BandInvMF(3).resolve(SMALL))
    gamma = choose_gamma(3, SMALL, objective="amplified-rmse", epsilon=1.0, delta=1e-4)
    assert best < 1.01 * {c.objective: c.rmse for c in gamma.candidates}["amplified-rmse"]


def test_bad_input() -> None:
    with pytest.raises(InvalidInput, match=r"^bands is 17"):
        amplified_band_inv_mf(17, SMALL, epsilon=1.0, delta=1e-4)
    with pytest.raises(InvalidInput, match=r"^epsilon is"):
        amplified_band_inv_mf(3, SMALL, epsilon=0.0, delta=1e-4)
