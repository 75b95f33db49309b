"""Estimates against brute force, closed forms, quadrature and golden values."""

import math

import numpy as np
import pytest

from lambdacgd import cache
from lambdacgd.accounting.certificate import OneWay
from lambdacgd.accounting.gaussian import gaussian_delta, gaussian_epsilon, gaussian_sigma
from lambdacgd.accounting.monte_carlo import MonteCarlo
from lambdacgd.accounting.monte_carlo.estimate import add_bound
from lambdacgd.accounting.monte_carlo.gram import gram_of
from lambdacgd.accounting.reference import brute_force_delta, dense_strategy
from lambdacgd.errors import InvalidInput
from lambdacgd.mechanisms import BISR, BSR, Horizon, Identity, LambdaCGD, Mechanism

PAPER = Horizon(390, 10)


@pytest.fixture(autouse=True)
def no_cache() -> object:
    with cache.disabled():
        yield


@pytest.mark.parametrize(
    ("mechanism", "epsilon", "sigma"),
    [
        (LambdaCGD(0.8), 0.5, 4.0),
        (LambdaCGD(0.5), 1.5, 1.2),
        (LambdaCGD(0.9, normalized=True), 0.3, 2.0),
        (BISR(3), 1.0, 1.5),
        (BSR(4), 0.4, 3.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_agrees_with_brute_force_in_n_dimensions(
    mechanism: Mechanism, epsilon: float, sigma: float, direction: OneWay
) -> None:
    """Within 5 joint standard errors: false alarm below 6e-7 a case."""
    horizon = Horizon(9, 3)
    slow, slow_error = brute_force_delta(
        dense_strategy(mechanism, horizon), horizon, epsilon, sigma, samples=200_000, seed=21
    )[direction]
    fast = MonteCarlo(mechanism, horizon).estimate_delta(epsilon, sigma, samples=16_384, direction=direction)
    assert abs(fast.value - slow) < 5 * math.hypot(fast.standard_error, slow_error)
    assert fast.direction == direction


def test_one_bin_is_the_gaussian_mechanism() -> None:
    accountant = MonteCarlo(LambdaCGD(0.5), Horizon(1, 1))
    for epsilon, sigma in ((0.1, 2.0), (1.0, 1.0), (4.0, 1.0)):
        found = accountant.estimate_delta(epsilon, sigma, samples=32_768)
        assert found.value == pytest.approx(gaussian_delta(epsilon, sigma), abs=5 * found.standard_error)
        assert found.relative_error < 0.02
    assert accountant.estimate_sigma(1.0, 1e-5).sigma == pytest.approx(gaussian_sigma(1.0, 1e-5), rel=0.01)
    assert accountant.estimate_epsilon(2.0, 1e-5) == pytest.approx(gaussian_epsilon(2.0, 1e-5), rel=0.01)


def test_independent_noise_over_k_epochs_is_one_epoch_with_less_noise() -> None:
    """C = I: k epochs at σ equal one epoch at σ/√k, with the same random numbers to rounding."""
    many = MonteCarlo(Identity(), Horizon(20, 9)).estimate_delta(0.7, 3.0, samples=4096)
    one = MonteCarlo(Identity(), Horizon(20, 1)).estimate_delta(0.7, 1.0, samples=4096)
    assert many.value == pytest.approx(one.value, rel=1e-6)


def test_independent_noise_against_random_allocation() -> None:
    """A deterministic accountant of 1-of-b allocation gives ε(1e-5) between 8.102 and 8.173 here."""
    assert 8.09 < MonteCarlo(Identity(), PAPER).estimate_epsilon(1.2, 1e-5, samples=8192) < 8.19


@pytest.mark.parametrize(
    ("lam", "b", "k", "epsilon", "delta", "sigma"),
    [
        (0.8, 3, 2, 2.0, 1e-5, 4.451754),
        (0.6, 4, 5, 0.7, 1e-4, 11.455930),
        (0.9, 4, 3, 3.0, 1e-6, 6.767768),
        (0.85, 5, 4, 5.0, 1e-5, 4.096688),
        (0.9, 16, 5, 3.0, 1e-5, 7.1057),
        (0.95, 24, 2, 1.5, 1e-4, 8.9210),
        (0.8, 50, 10, 6.0, 1e-5, 2.7852),
    ],
)
def test_sigma_against_quadrature_and_other_programs(
    lam: float, b: int, k: int, epsilon: float, delta: float, sigma: float
) -> None:
    found = MonteCarlo(LambdaCGD(lam), Horizon(b, k)).estimate_sigma(epsilon, delta)
    assert abs(found.sigma - sigma) < 6 * found.standard_error + 2e-4 * sigma
    assert found.standard_error < 0.005 * sigma


@pytest.mark.parametrize(
    ("mechanism", "epsilon", "sigma"),
    [
        (LambdaCGD(0.9), 8.0, 2.9288),
        pytest.param(LambdaCGD(0.95), 1.0, 13.2534, marks=pytest.mark.slow),
        pytest.param(LambdaCGD(0.9), 0.25, 21.5712, marks=pytest.mark.slow),
        pytest.param(BISR(2), 2.0, 2.252, marks=pytest.mark.slow),
        (BISR(16), 0.5, 8.03),
    ],
    ids=str,
)
def test_golden_values_of_the_papers_setting(mechanism: Mechanism, epsilon: float, sigma: float) -> None:
    found = MonteCarlo(mechanism, PAPER).estimate_sigma(epsilon, 1e-5, relative_error=0.03)
    assert found.sigma == pytest.approx(sigma, rel=0.01)


@pytest.mark.parametrize("lam", [0.0, 0.9, 0.995])
@pytest.mark.parametrize("epsilon", [0.1, 16.0])
def test_the_corners_of_the_range_are_estimated_well(lam: float, epsilon: float) -> None:
    accountant = MonteCarlo(LambdaCGD(lam), Horizon(100, 5))
    found = accountant.estimate_sigma(epsilon, 1e-5, relative_error=0.04)
    assert found.delta.relative_error < 0.1
    assert found.sigma < accountant.without_amplification(epsilon, 1e-5)


def test_both_directions_are_looked_at() -> None:
    """At low ε the two are close; published values at λ = .9, ε = .25, σ = 21.5 are 1.08e-5 and .99e-5."""
    accountant = MonteCarlo(LambdaCGD(0.9), PAPER)
    remove = accountant.estimate_delta(0.25, 21.5, samples=16_384, direction="remove")
    add = accountant.estimate_delta(0.25, 21.5, samples=16_384, direction="add")
    assert remove.value == pytest.approx(1.08e-5, rel=0.1)
    assert add.value == pytest.approx(0.99e-5, rel=0.1)
    both = accountant.estimate_delta(0.25, 21.5, samples=16_384)
    assert both.value == max(remove.value, add.value)


def test_the_bound_on_add_is_a_bound() -> None:
    for lam, epsilon, sigma in ((0.9, 0.3, 6.0), (0.5, 0.2, 2.0), (0.99, 1.0, 8.0)):
        horizon = Horizon(12, 3)
        found = MonteCarlo(LambdaCGD(lam), horizon).estimate_delta(epsilon, sigma, samples=16_384, direction="add")
        assert add_bound(gram_of(LambdaCGD(lam), horizon), epsilon, sigma) > found.value - 5 * found.standard_error


def test_delta_falls_with_sigma_and_epsilon_and_rises_with_lambda() -> None:
    horizon = Horizon(30, 4)

    def delta(lam: float, epsilon: float, sigma: float) -> float:
        return MonteCarlo(LambdaCGD(lam), horizon).estimate_delta(epsilon, sigma, samples=8192).value

    assert (np.diff([delta(0.8, 1.0, s) for s in (2.0, 2.2, 2.5, 3.0)]) < 0).all()
    assert (np.diff([delta(0.8, e, 2.5) for e in (0.5, 0.7, 1.0, 2.0)]) < 0).all()
    assert (np.diff([delta(lam, 1.0, 2.5) for lam in (0.0, 0.4, 0.7, 0.8, 0.9)]) > 0).all()


def test_answers_are_reproducible_whatever_the_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    first = MonteCarlo(BISR(3), Horizon(9, 2)).estimate_delta(1.0, 1.5)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert MonteCarlo(BISR(3), Horizon(9, 2)).estimate_delta(1.0, 1.5) == first


def test_a_huge_sigma_needs_no_epsilon() -> None:
    assert MonteCarlo(Identity(), Horizon(5, 1)).estimate_epsilon(100.0, 0.5) == 0.0


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda a: a.estimate_delta(-1.0, 1.0), "epsilon"),
        (lambda a: a.estimate_delta(1.0, math.nan), "sigma"),
        (lambda a: a.estimate_delta(1.0, 1.0, samples=0), "samples"),
        (lambda a: a.estimate_delta(1.0, 1.0, direction="up"), "direction"),
        (lambda a: a.estimate_sigma(1.0, 1.0), "delta"),
        (lambda a: a.estimate_epsilon(1.0, 0.0), "delta"),
        (lambda a: a.certify(1.0, 1e-5, failure_probability=1e-4), "failure_probability"),
    ],
)
def test_bad_input_names_the_parameter(call: object, name: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{name} is"):
        call(MonteCarlo(Identity(), Horizon(2, 1)))  # type: ignore[operator]
