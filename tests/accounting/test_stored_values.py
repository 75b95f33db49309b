"""Forty certified σ. Whatever changes inside the accountants, these stay, to 1e-9: the number of BLAS threads moves the
last digits.

The exact accountants end their searches at round numbers, so their σ do not hang on where a search began or on the
order of additions. A change that makes a bound tighter changes a σ here, downwards, and says so in the CHANGELOG. That
no certified σ lies below the truth is asserted against quadrature and simulation: here for normalised columns (for all
exact rows with ``-m slow``), in tests/accounting/exact and composed, and in benchmarks/accounting_truth.py.
The three rows at the end were sampled certificates before every claim became deterministic.
"""

from __future__ import annotations

import pytest

import lambdacgd as lc
from lambdacgd import cache
from lambdacgd.accounting.accountants import accountant_for
from reproduce.sampled import Sampled
from reproduce.simulated import simulate


def fixed(b: int, k: int) -> lc.Sampling:
    return lc.BallsInBins(examples=100 * b, steps_per_epoch=b, epochs=k, bins="fixed")


def fresh(b: int, k: int) -> lc.Sampling:
    return lc.BallsInBins(examples=100 * b, steps_per_epoch=b, epochs=k, bins="fresh")


def poisson(b: int, k: int) -> lc.Sampling:
    return lc.Poisson(examples=100 * b, steps_per_epoch=b, epochs=k)


def cyclic(b: int, k: int) -> lc.Sampling:
    return lc.Cyclic(examples=100 * b, steps_per_epoch=b, epochs=k, batch_size=100)


STORED = [
    (lc.Identity(), cyclic(40, 3), 2.0, 1e-05, 3.4533844566177656, "analytic"),
    (lc.LambdaCGD(0.9), cyclic(390, 10), 8.0, 1e-05, 4.3545193650591125, "analytic"),
    (lc.LambdaCGD(0.9, True), cyclic(40, 3), 0.5, 1e-07, 15.734877301472102, "analytic"),
    (lc.BISR(4), cyclic(40, 3), 1.0, 1e-06, 9.320513507115654, "analytic"),
    (lc.BandMF(4), cyclic(20, 3), 4.0, 1e-05, 2.6307080732507306, "analytic"),
    (lc.BLT(2, (0.9, 0.4), (0.45, 0.06)), cyclic(20, 3), 1.0, 1e-05, 10.057315858608641, "analytic"),
    (lc.BandInvMF(3), cyclic(20, 2), 2.0, 1e-06, 4.66147276835607, "analytic"),
    (lc.Identity(), poisson(40, 3), 2.0, 1e-05, 0.9780888707157479, "pld"),
    (lc.Identity(), poisson(10, 2), 8.0, 1e-06, 0.7366584979753789, "pld"),
    (lc.Identity(), poisson(100, 1), 0.5, 1e-05, 1.1426261223866583, "pld"),
    (lc.Identity(), fixed(40, 3), 2.0, 1e-05, 1.4158, "transfer-matrix"),
    (lc.Identity(), fixed(390, 10), 8.0, 1e-05, 1.2114, "transfer-matrix"),
    (lc.LambdaCGD(0.5), fixed(20, 2), 1.0, 0.0001, 2.1778, "transfer-matrix"),
    (lc.LambdaCGD(0.9), fixed(40, 3), 2.0, 1e-05, 5.31, "transfer-matrix"),
    (lc.LambdaCGD(0.9), fixed(20, 1), 4.0, 1e-06, 2.0146, "transfer-matrix"),
    (lc.LambdaCGD(0.7), fixed(2, 3), 0.5, 1e-05, 19.742, "transfer-matrix"),
    (lc.LambdaCGD(0.97), fixed(10, 4), 3.0, 0.001, 10.458, "transfer-matrix"),
    (lc.LambdaCGD(0.7, True), fixed(40, 3), 2.0, 1e-05, 1.6458, "transfer-matrix"),
    (lc.LambdaCGD(0.9, True), fixed(12, 2), 6.0, 0.0001, 0.9579, "transfer-matrix"),
    (lc.LambdaCGD(0.6), fixed(1, 4), 1.0, 1e-06, 14.718, "transfer-matrix"),
    (lc.BISR(2), fixed(20, 2), 2.0, 1e-05, 1.605, "transfer-matrix"),
    (lc.LambdaCGD(0.998), fixed(60, 2), 3.0, 0.001, 12.85, "transfer-matrix"),
    (lc.LambdaCGD(0.8), fixed(30, 1), 12.0, 1e-05, 0.593, "transfer-matrix"),
    (lc.LambdaCGD(0.5), fixed(5, 2), 0.1, 0.0001, 28.355, "transfer-matrix"),
    (lc.Identity(), fresh(40, 3), 2.0, 1e-05, 0.9242, "transfer-matrix-composed"),
    (lc.Identity(), fresh(390, 10), 8.0, 1e-05, 0.4866, "transfer-matrix-composed"),
    (lc.Identity(), fresh(10, 20), 0.5, 1e-06, 11.435, "transfer-matrix-composed"),
    (lc.LambdaCGD(0.5), fresh(10, 3), 1.0, 0.0001, 3.244, "transfer-matrix-composed"),
    (lc.LambdaCGD(0.7), fresh(20, 2), 2.0, 1e-05, 2.038, "transfer-matrix-composed"),
    (lc.LambdaCGD(0.9), fresh(3, 5), 4.0, 1e-05, 2.853, "transfer-matrix-composed"),
    (lc.LambdaCGD(0.8, True), fresh(10, 3), 2.0, 1e-05, 2.464, "transfer-matrix-composed"),
    (lc.LambdaCGD(0.5, True), fresh(4, 2), 6.0, 0.0001, 0.7654, "transfer-matrix-composed"),
    (lc.LambdaCGD(0.7), fresh(30, 1), 2.0, 1e-05, 1.4134, "transfer-matrix"),
    (lc.LambdaCGD(0.7), fresh(1, 9), 1.0, 1e-06, 12.674036680654746, "transfer-matrix-composed"),
    (lc.BISR(3), fresh(8, 2), 2.0, 0.0001, 1.8975, "transfer-matrix-composed"),
    (lc.BandInvMF(3), fresh(8, 3), 4.0, 0.0001, 1.292, "transfer-matrix-composed"),
    (lc.BSR(3), fresh(6, 2), 1.0, 0.001, 2.678, "transfer-matrix-composed"),
    (lc.BISR(4), fixed(20, 3), 3.0, 0.0001, 1.6858, "transfer-matrix"),
    (lc.BSR(4), fixed(10, 2), 1.0, 0.001, 2.6075, "transfer-matrix"),
    (lc.LambdaCGD(0.99995), fixed(4, 2), 1.0, 0.001, 9.343, "transfer-matrix"),
]


@pytest.mark.parametrize(("mechanism", "sampling", "epsilon", "delta", "sigma", "method"), STORED)
def test_a_certified_sigma_is_the_stored_one(
    mechanism: lc.Mechanism, sampling: lc.Sampling, epsilon: float, delta: float, sigma: float, method: str
) -> None:
    with cache.disabled():
        calibration = accountant_for(mechanism.resolve(sampling.block), sampling).sigma(epsilon, delta)
    assert calibration.sigma == pytest.approx(sigma, rel=1e-9)
    assert calibration.certificate.method == method
    assert (calibration.certificate.kind, calibration.certificate.epsilon) == ("bound", epsilon)
    assert calibration.certificate.delta == delta


def test_there_are_forty_of_them() -> None:
    assert len(STORED) == 40


def _simulated(slow: bool) -> list[tuple]:  # type: ignore[type-arg]
    """The rows of exact accountants with more than one bin: those of normalised columns, or all others."""
    exact = [row for row in STORED if row[5].startswith("transfer") and row[1].steps_per_epoch > 1]
    return [row for row in exact if getattr(row[0], "normalized", False) is not slow]


def _check_against_simulation(stored: tuple) -> None:  # type: ignore[type-arg]
    mechanism, sampling, epsilon, delta, sigma, _ = stored
    resolved = mechanism.resolve(sampling.block)
    if sampling.restart_every is None:
        drawn = Sampled(resolved, sampling.horizon).delta(epsilon, sigma)
        value, error = drawn.value, drawn.standard_error
    else:
        found = simulate(resolved, sampling.horizon, sigma=sigma, epsilon=epsilon)
        value, error = found["delta"], found["standard_error"]
    assert value - 4 * error <= delta  # a false alarm: 3e-5 a row, with a fixed seed


@pytest.mark.parametrize("stored", _simulated(slow=False), ids=str)
def test_simulation_stays_below_what_is_certified_for_normalised_columns(stored: tuple) -> None:  # type: ignore[type-arg]
    _check_against_simulation(stored)


@pytest.mark.slow
@pytest.mark.parametrize("stored", _simulated(slow=True), ids=str)
def test_simulation_stays_below_what_is_certified(stored: tuple) -> None:  # type: ignore[type-arg]
    _check_against_simulation(stored)
