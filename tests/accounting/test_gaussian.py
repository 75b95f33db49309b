"""The analytic Gaussian mechanism against 60-digit arithmetic, and the search that calibrates it."""

from __future__ import annotations

import math

import mpmath
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lambdacgd.accounting.gaussian import Unamplified, gaussian_delta, gaussian_epsilon, gaussian_sigma, jensen_add
from lambdacgd.mechanisms import BandInvMF, Horizon, Identity, LambdaCGD


def exact_delta(epsilon: float, sigma: float) -> mpmath.mpf:
    with mpmath.workdps(60):
        e, s = mpmath.mpf(epsilon), mpmath.mpf(sigma)
        near, far = 1 / (2 * s) - e * s, -1 / (2 * s) - e * s
        return mpmath.ncdf(near) - mpmath.exp(e) * mpmath.ncdf(far)


@settings(max_examples=150)
@given(st.floats(math.log(1e-3), math.log(100)), st.floats(math.log(1e-12), math.log(0.5)))
def test_calibrated_sigma_meets_delta_to_nine_digits(log_epsilon, log_delta):
    epsilon, delta = math.exp(log_epsilon), math.exp(log_delta)
    sigma = gaussian_sigma(epsilon, delta)
    assert float(exact_delta(epsilon, sigma) / mpmath.mpf(delta)) == pytest.approx(1, rel=1e-9)


@given(st.floats(math.log(1e-7), 0), st.floats(-1, 9.5))
def test_jensens_bound_is_not_below_sixty_digits_however_small_the_losses(log_spread, near):
    """N(−v/2, v) is one bin: Jensen loses nothing, so all there is above the truth is the margin for rounding."""
    spread = math.exp(log_spread)
    epsilon = max(1e-7, near * spread - spread**2 / 2)
    with mpmath.workdps(60):
        v, e = mpmath.mpf(spread**2), mpmath.mpf(epsilon)
        deviation, h = mpmath.sqrt(v), (v / 2 - e) / mpmath.sqrt(v)
        truth = mpmath.ncdf(h) - mpmath.exp(e) * mpmath.ncdf(h - deviation)
        assert jensen_add(-(spread**2) / 2, spread**2, epsilon) >= truth


@given(st.floats(1e-3, 100), st.floats(0.02, 1e4))
def test_delta_against_sixty_digits(epsilon, sigma):
    truth = exact_delta(epsilon, sigma)
    assume(truth > 1e-290)
    assert gaussian_delta(epsilon, sigma) == pytest.approx(float(truth), rel=1e-9)


@pytest.mark.parametrize(
    ("epsilon", "sigma"),
    [(8, 0.60023), (4, 1.08116), (2, 1.99381), (1, 3.73063), (0.5, 7.03183), (0.25, 13.28553)],
)
def test_golden_values(epsilon, sigma):
    assert gaussian_sigma(epsilon, 1e-5) == pytest.approx(sigma, abs=6e-6)


@given(st.floats(0.05, 20), st.floats(1e-9, 1e-2))
def test_epsilon_inverts_sigma(epsilon, delta):
    assert gaussian_epsilon(gaussian_sigma(epsilon, delta), delta) == pytest.approx(epsilon, rel=1e-7)


def test_epsilon_is_zero_where_delta_alone_suffices():
    assert gaussian_epsilon(1e4, 0.1) == 0.0
    assert gaussian_delta(1.0, 0.0) == 1.0


def test_without_amplification_multiplies_by_the_sensitivity():
    horizon = Horizon(390, 10)
    result = Unamplified(Identity(), horizon).sigma(8.0, 1e-5)
    assert result.sigma == pytest.approx(math.sqrt(10) * 0.6002290722, rel=1e-9)
    claim = result.certificate(1e-5)
    assert (claim.method, claim.direction, claim.confidence) == ("analytic", "both", 1)
    signed = BandInvMF(2, (1.0, 0.5))  # C alternates in sign: |C| bounds it, and the certificate says so
    assert Unamplified(signed, horizon).sigma(8.0, 1e-5).details["sensitivity_is"] == "upper bound"
    assert Unamplified(LambdaCGD(0.9), horizon).sigma(8.0, 1e-5).details["sensitivity_is"] == "exact"


@pytest.mark.parametrize(
    "bad", [{"epsilon": 0.0}, {"epsilon": math.nan}, {"epsilon": math.inf}, {"delta": 0.0}, {"delta": 1.0}]
)
def test_bad_input(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        gaussian_sigma(**({"epsilon": 1.0, "delta": 1e-5} | bad))
