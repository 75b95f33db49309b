"""Chains that follow columns of norm 1: they dominate them, and are computed as what they are."""

from __future__ import annotations

import math

import numpy as np
import pytest

import lambdacgd as lc
from lambdacgd.accounting import accountant_for
from lambdacgd.accounting.certificate import Array
from lambdacgd.accounting.composed import FreshBins
from lambdacgd.accounting.dominating import dominating, first_guess
from lambdacgd.accounting.exact.lattice import Columns, normalized_runs
from lambdacgd.accounting.gaussian import gaussian_sigma
from lambdacgd.accounting.scaled import followed, unit_column
from lambdacgd.errors import AccountingError
from reproduce.reference import dense_strategy, quadrature
from reproduce.simulated import simulate
from tests.accounting.test_dominating import tight


def bands(*tail: float) -> lc.BandInvMF:
    return lc.BandInvMF(len(tail) + 1, (1.0, *tail), normalized=True)


def gram(mechanism: lc.Mechanism, b: int) -> Array:
    """Straight from |C|."""
    strategy = np.abs(dense_strategy(mechanism, lc.Horizon(b, 1)))
    return np.asarray(strategy.T @ strategy)


SOME = [
    (bands(-0.43, -0.01, -0.49), 60), (bands(-0.34, -0.6), 41), (bands(-0.95), 30), (bands(-0.2, -0.75), 25),
    (bands(0.5, -0.3), 20), (bands(-0.05, -0.02, -0.9), 33), (lc.BLT(2, (0.95, 0.4), (0.1, 0.3), normalized=True), 50),
    (lc.BandInvMF(7, normalized=True).resolve(lc.Horizon(90, 1)), 90),
]  # fmt: skip


@pytest.mark.parametrize(("mechanism", "b"), SOME, ids=str)
@pytest.mark.parametrize("epsilon", [8.0, 0.5])
def test_what_entries_lack_is_on_the_diagonal(mechanism: lc.Mechanism, b: int, epsilon: float) -> None:
    """Lemma 1d: where the chain is too small, its diagonal outweighs what its row lacks. All in dense matrices."""
    column = unit_column(mechanism, b)
    assert column is not None
    found = followed(column, gaussian_sigma(epsilon, 1e-5) ** -2 / 5)
    difference = found.columns.over(found.lam, b, 1, 1.0).gram() - gram(mechanism, b)
    lacking = np.minimum(difference, 0.0)
    np.fill_diagonal(lacking, 0.0)
    assert (np.diag(difference) + lacking.sum(axis=1) >= 0).all()
    assert found.loss >= 0


def test_a_chain_of_runs_with_a_nugget_is_computed_as_it_is() -> None:
    """Quadrature of its own Gram matrix; three runs of one bin each."""
    runs = normalized_runs(0.9, 3)
    assert len(runs) == 3
    chain = Columns(0.8, 0.3, runs=runs).over(max(r for _, r in runs), 3, 1, 1.2)
    truth = quadrature(chain.gram(), 1.0, 1.5, step=0.03)
    for value, true in zip(tight(chain, 1.5, *truth), truth, strict=True):
        assert true * (1 - 1e-7) <= value <= true * 1.002
    mean, variance = chain.mean_loss
    assert mean == pytest.approx(-np.diag(chain.gram()).mean() / 2)
    assert variance == pytest.approx(chain.gram().mean())


@pytest.mark.parametrize("seed", range(8))
def test_random_bands_are_never_certified_below_quadrature(seed: int) -> None:
    rng = np.random.default_rng(seed)
    b = int(rng.integers(3, 5))
    tail = -rng.dirichlet(np.ones(b - 1)) * rng.uniform(0.3, 0.99)
    tail *= np.where(rng.random(b - 1) < 0.2, -1, 1)  # a few C have negative entries
    mechanism = bands(*tail)
    sigma, epsilon = float(rng.uniform(0.6, 1.4)), float(rng.uniform(0.3, 2.5))
    truth = quadrature(gram(mechanism, b), sigma, epsilon, step={3: 0.03, 4: 0.1}[b])
    found = dominating(mechanism, lc.Horizon(b, 1), epsilon=epsilon, delta=1e-4)
    column = unit_column(mechanism, b)
    assert column is not None
    for by in (found, followed(column, 0.5)):
        bound = FreshBins(by.lam, b, 1, columns=by.columns).delta(sigma, epsilon)
        assert bound.delta_remove >= truth[0]
        assert bound.delta_add >= truth[1]


def test_composed_they_meet_simulation() -> None:
    """Fresh bins, straight from C; 5 standard errors, seed 0. What dominates adds about 1.4% to σ, 15% to δ."""
    mechanism, horizon = bands(-0.5, -0.1, -0.25), lc.Horizon(60, 4)
    sampling = lc.BallsInBins("fresh", examples=60, steps_per_epoch=60, epochs=4)
    certified = accountant_for(mechanism, sampling).sigma(2.0, 1e-4)
    assert certified.certificate.method == "transfer-matrix-composed"
    assert certified.certificate.details["dominated_by"]["sigma_loss"] < 0.02
    drawn = simulate(mechanism, horizon, sigma=certified.sigma, epsilon=2.0, samples=200_000)
    value, error = float(drawn["delta"]), float(drawn["standard_error"])
    assert value - 5 * error <= 1e-4 <= value + 5 * error + 2.5e-5


def test_the_guess_is_of_what_is_certified() -> None:
    """E W² of the chain that dominates meets what a Gaussian mechanism of (ε, δ) has, within 1% of σ."""
    horizon, budget = lc.Horizon(240, 6), gaussian_sigma(4.0, 1e-5) ** -2 / 6
    for mechanism in (bands(-0.43, -0.01, -0.45), bands(-0.6, -0.3)):
        found = dominating(mechanism, horizon, epsilon=4.0, delta=1e-5)
        assert found.columns.runs
        chain = found.columns.over(found.lam, 240, 1, 1.0).gram()
        sigma = first_guess(mechanism, horizon, epsilon=4.0, delta=1e-5)
        more, less = (math.log1p(float(np.expm1(chain / (way * sigma) ** 2).mean())) for way in (0.99, 1.01))
        assert less < budget < more


def test_only_columns_of_norm_one_are_followed() -> None:
    assert unit_column(lc.Diagonal(), 20) is None
    assert unit_column(lc.BISR(3), 20) is None
    assert unit_column(bands(-0.5), 2) is None
    runs = ((5, 0.9), (5, 0.8))
    for lam, b, k in ((0.9, 11, 1), (0.9, 10, 2), (0.8, 10, 1)):
        with pytest.raises(AccountingError, match="of one epoch of 10 steps"):
            Columns(1.0, 0.1, runs=runs).over(lam, b, k, 1.0)
