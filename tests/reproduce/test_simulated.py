"""The simulation against quadrature and against certificates; other mechanisms through a dominating chain."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lambdacgd.accounting import Calibration, accountant_for
from lambdacgd.accounting.composed import METHOD, FreshBins
from lambdacgd.mechanisms import BISR, BLT, BSR, BandInvMF, BandMF, Diagonal, GammaBIFR, Horizon, LambdaCGD, Mechanism
from lambdacgd.sampling import BallsInBins, Bins
from reproduce.reference import dense_strategy, gram, quadrature
from reproduce.simulated import Simulation, estimate_sigma, simulate

STEPS = 12
BLOCK = Horizon(STEPS, 1)
MECHANISMS = [
    BISR(4), BSR(3), BandMF(4), BLT(2), GammaBIFR(3, 0.7), BandInvMF(2), Diagonal(), LambdaCGD(0.7, normalized=True),
]  # fmt: skip


def fresh_bins(mechanism: Mechanism, horizon: Horizon, *, epsilon: float, delta: float) -> Calibration:
    return accountant_for(mechanism, fresh(horizon)).sigma(epsilon, delta)


def fresh(horizon: Horizon, bins: Bins = "fresh") -> BallsInBins:
    b, k = horizon.steps_per_epoch, horizon.epochs
    return BallsInBins(examples=b, steps_per_epoch=b, epochs=k, bins=bins)


@pytest.mark.parametrize("way", ["remove", "add"])
def test_one_simulated_epoch_meets_quadrature(way: str) -> None:
    """4 standard errors of 16 pools: a false alarm in about one of 2 000 runs (seeds 0 to 15)."""
    simulation = Simulation(LambdaCGD(0.7), 4)
    values = np.array([simulation.pool(1.5, samples=4000, seed=s).delta(way, 1, 1.0) for s in range(16)])  # type: ignore[arg-type]
    truth = quadrature(gram(0.7, 4, 1), 1.5, 1.0)[0 if way == "remove" else 1]
    assert abs(values.mean() - truth) < 4 * values.std(ddof=1) / 4


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: m.name)
def test_inner_products_are_those_of_the_matrix(mechanism: Mechanism) -> None:
    resolved = mechanism.resolve(BLOCK)
    strategy = dense_strategy(resolved, BLOCK)
    points = np.random.default_rng(1).standard_normal((3, STEPS))
    simulation = Simulation(resolved, STEPS)
    assert simulation.inner(points) == pytest.approx(points @ strategy, rel=1e-9, abs=1e-9)
    assert simulation.squares == pytest.approx((strategy**2).sum(axis=0))


def test_the_certificate_lies_just_above_the_simulation_over_all_epochs() -> None:
    """5 standard errors below (a false alarm in a million runs, seed 0), at most a few percent above."""
    horizon = Horizon(40, 6)
    sigma = fresh_bins(LambdaCGD(0.7), horizon, epsilon=3.0, delta=1e-4).sigma
    drawn = simulate(LambdaCGD(0.7), horizon, sigma=sigma, epsilon=3.0, samples=100_000)
    value, error = float(drawn["delta"]), float(drawn["standard_error"])
    assert value - 5 * error <= 1e-4 <= value + 5 * error + 4e-6


def test_delta_meets_the_simulation() -> None:
    found = simulate(LambdaCGD(0.5), Horizon(20, 4), sigma=2.0, epsilon=1.0)
    bound = FreshBins(0.5, 20, 4).delta(2.0, 1.0).delta
    assert found["delta"] - 5 * found["standard_error"] <= bound <= 1.05 * found["delta"] + 5 * found["standard_error"]


def test_estimated_noise_is_close_to_the_exact_one() -> None:
    exact = FreshBins(0.6, 30, 5).sigma(2.0, 1e-5).sigma
    for start in (None, exact, 1.5 * exact):  # a search that begins at its end must learn the slope too
        found = estimate_sigma(LambdaCGD(0.6), Horizon(30, 5), epsilon=2.0, delta=1e-5, samples=49_152, start=start)
        assert found.sigma == pytest.approx(exact, rel=0.01)
        assert abs(found.sigma - exact) < 5 * found.standard_error + 1e-3 * exact


def test_other_mechanisms_are_certified_above_what_they_need() -> None:
    horizon = Horizon(24, 4)
    mechanism = BISR(3).resolve(Horizon(24, 1))
    certified = fresh_bins(mechanism, horizon, epsilon=2.0, delta=1e-5)
    estimated = estimate_sigma(mechanism, horizon, epsilon=2.0, delta=1e-5)
    assert (certified.certificate.method, certified.certificate.kind) == (METHOD, "bound")
    assert 0.99 * estimated.sigma < certified.sigma < 1.04 * estimated.sigma


@pytest.mark.parametrize("mechanism", [LambdaCGD(0.5), BISR(3)], ids=lambda m: m.name)
def test_epsilon_grows_epoch_by_epoch(mechanism: Mechanism) -> None:
    horizon = Horizon(20, 4)
    sigma = fresh_bins(mechanism, horizon, epsilon=2.0, delta=1e-5).sigma
    found = accountant_for(mechanism, fresh(horizon)).epsilon_after_epochs(sigma, 2.0, 1e-5)
    assert found[-1] == pytest.approx(2.0, rel=1e-2)
    assert len(found) == 4
    assert list(found) == sorted(found)
    assert math.isfinite(found[-1])
