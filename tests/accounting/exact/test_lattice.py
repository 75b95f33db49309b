"""The chain, its lattice and its emissions: Gram matrices, dominating chains, convex order, two-sided errors."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import ndtr
from scipy.stats import norm

from lambdacgd.accounting.exact.lattice import (
    MOST_RUNS,
    Chain,
    Stretch,
    TransferProduct,
    grid_top,
    lattice,
    lognormal_excess,
    normalized_chain,
    plain_chain,
    poisson_eta,
    round_lognormal,
    spacing_ratio,
    stretches,
    value_grid,
)
from lambdacgd.accounting.exact.plane import PlaneProduct, plane
from lambdacgd.accounting.gaussian import jensen_add, one_bin_delta
from lambdacgd.errors import AccountingError
from reproduce.reference import gram, quadrature

lams = st.floats(0.01, 0.995)
sizes = st.integers(2, 12)
repeats = st.integers(1, 6)


@settings(max_examples=60, deadline=None)
@given(lams, sizes, repeats)
def test_gram_matrix_is_that_of_the_strategy(lam: float, b: int, k: int) -> None:
    np.testing.assert_allclose(plain_chain(lam, b, k, 1.7).gram(), gram(lam, b, k) / 1.7**2, rtol=1e-9)


@settings(max_examples=60, deadline=None)
@given(lams, sizes, repeats, st.floats(0.0, 1.0))
def test_innovations_and_closing_relation_are_independent(lam: float, b: int, k: int, tail: float) -> None:
    """The b variables ξ_0 … ξ_{b−2}, ζ of Lemma 1 have the stated variances and no correlation."""
    chain = plain_chain(lam, b, k, 1.0)
    chain = type(chain)(lam, b, k, 1.0, tail)
    p, q, v = chain.closing
    change = np.zeros((b, b))
    for j in range(b - 1):
        change[j, j], change[j, j + 1] = 1.0, -lam
    change[b - 1, b - 1] += p
    change[b - 1, 0] -= q
    expected = np.diag([1 - lam**2] * (b - 1) + [v])
    np.testing.assert_allclose(change @ chain.gram() @ change.T, expected, atol=1e-9 * (1 + v + p * p * k))
    assert abs(np.linalg.det(change)) == pytest.approx(1.0, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(lams, sizes, repeats)
def test_scales_and_mean_loss(lam: float, b: int, k: int) -> None:
    chain = plain_chain(lam, b, k, 1.3)
    dense = chain.gram()
    variances = chain.gain * chain.variance(0.0) - 2 * chain.log_scales
    np.testing.assert_allclose(np.diag(dense), variances, rtol=1e-8)
    assert np.all(np.diff(chain.log_scales) >= 0)
    mean, variance = chain.mean_loss
    assert mean == pytest.approx(-np.diag(dense).mean() / 2, rel=1e-9)
    assert variance == pytest.approx(dense.mean(), rel=1e-7)


@settings(max_examples=40, deadline=None)
@given(lams, sizes, repeats)
def test_mean_loss_of_normalised_columns(lam: float, b: int, k: int) -> None:
    chain = normalized_chain(lam, b, k, 1.3)
    dense = chain.gram()
    mean, variance = chain.mean_loss
    assert mean == pytest.approx(-np.diag(dense).mean() / 2, rel=1e-9)
    assert variance == pytest.approx(dense.mean(), rel=1e-7)
    assert chain.loss_variance == pytest.approx(np.diag(dense).max(), rel=1e-9)


@pytest.mark.parametrize(
    ("lam", "b", "k", "most"),
    [(0.95, 390, 1, 1e-3), (0.98, 29, 1, 1e-9), (0.999, 31, 1, 1e-9), (0.9, 3, 1, 1e-9), (0.99, 1000, 1, 3e-3),
     (0.98, 29, 2, 0.023), (0.99, 3, 8, 3e-3), (0.7, 200, 1, 1e-3), (0.99, 1, 4, 0.0)],
)  # fmt: skip
def test_normalised_columns_are_followed_closely(lam: float, b: int, k: int, most: float) -> None:
    """Runs and amplitudes dominate every entry, and add little to the mean over all of them, which σ² goes with."""
    truth, chain = gram(lam, b, k, normalized=True), normalized_chain(lam, b, k, 1.0)
    assert np.all(truth <= chain.gram() * (1 + 1e-12))
    assert sum(count for count, _ in chain.runs) in (0, b)
    assert len(chain.runs) <= MOST_RUNS
    if b > 1:
        assert 0.5 * math.log(chain.mean_loss[1] / truth.mean()) <= most


@settings(max_examples=40, deadline=None)
@given(lams, sizes, repeats)
def test_dominating_chains_dominate_entrywise(lam: float, b: int, k: int) -> None:
    exact = plain_chain(lam, b, k, 1.0)
    slack = 1 + 1e-9
    longer = type(exact)(lam, b, k, exact.gain, 0.0)
    assert np.all(exact.gram() <= longer.gram() * slack)
    assert np.all(gram(lam, b, k, normalized=True) <= normalized_chain(lam, b, k, 1.0).gram() * slack)
    for group in (g for g in range(2, b + 1) if b % g == 0):
        for start in (exact, longer):
            small = start.lumped(group).gram()
            assert np.all(start.gram() <= np.kron(small, np.ones((group, group))) * slack)
    for fewer in range(2, b):
        # Whichever run of neighbouring bins is left out, the rest is dominated by the shorter cycle (Lemma 9).
        short = longer.shortened(fewer).gram()
        for first in range(b):
            kept = sorted(set(range(b)) - {(first + i) % b for i in range(b - fewer)})
            assert np.all(longer.gram()[np.ix_(kept, kept)] <= short * slack)


def test_a_lump_must_divide_the_bins() -> None:
    with pytest.raises(AccountingError, match="cannot be lumped in groups of 4"):
        plain_chain(0.9, 10, 2, 1.0).lumped(4)


@pytest.mark.parametrize("ratio", [0.05, 0.5, 2.0, 9.0])
@pytest.mark.parametrize("epsilon", [0.05, 1.0, 8.0])
def test_one_bin_is_the_gaussian_mechanism(ratio: float, epsilon: float) -> None:
    exact = norm.cdf(ratio / 2 - epsilon / ratio) - math.exp(epsilon) * norm.cdf(-ratio / 2 - epsilon / ratio)
    assert one_bin_delta(epsilon, ratio) == pytest.approx(exact, rel=1e-8, abs=1e-15)


@pytest.mark.parametrize(
    ("lam", "k", "sigma", "epsilon"), [(0.8, 2, 4.0, 2.0), (0.3, 1, 0.9, 0.5), (0.95, 3, 6.0, 3.0)]
)
def test_jensen_bounds_add(lam: float, k: int, sigma: float, epsilon: float) -> None:
    _, add = quadrature(gram(lam, 3, k), sigma, epsilon)
    assert add <= jensen_add(*plain_chain(lam, 3, k, sigma).mean_loss, epsilon)


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


def product_of(chain: Chain, *, ratio: float, reach: float, fine: float = 2e-3, top: float = 1e5) -> TransferProduct:
    """Every bin with its own scale, nothing shared (but a run's correlation)."""
    plan = [Stretch(1, float(c), float(c)) for c in chain.log_scales[1:-1][::-1]]
    if chain.runs or chain.amplitudes:
        plan = stretches(chain, 0.0)
    grid = value_grid(fine, 0.02, top)
    if chain.second:
        return PlaneProduct(chain, plane(chain, ratio, reach), grid, plan)
    return TransferProduct(chain, lattice(chain, ratio, reach), grid, plan)


def mean_of(product: TransferProduct, z: float) -> float:
    """E W e^{zW} by a complex step."""
    return float(product(np.array([z + 1e-60j]), "up")[0].imag / 1e-60)


@pytest.mark.parametrize("ratio", [0.8, 1.1, 1.6, 2.4])
def test_poisson_factor(ratio: float) -> None:
    shifts = np.linspace(0, 1, 101)[:, None]
    lattice_points = (np.arange(-200, 201)[None, :] + shifts) * ratio
    sums = ratio * np.sum(np.exp(-(lattice_points**2) / 2), axis=1) / math.sqrt(2 * math.pi)
    eta = poisson_eta(ratio)
    assert np.max(np.abs(sums - 1)) <= eta * (1 + 1e-9) + 1e-14
    assert np.max(np.abs(sums - 1)) >= 0.99 * eta - 1e-14


def test_spacing_meets_its_tolerance_and_eta_is_kept_small() -> None:
    for links in (1, 390, 10**6):
        assert links * poisson_eta(spacing_ratio(links, 1e-4)) <= 1e-4
    with pytest.raises(AccountingError, match="too coarse"):
        poisson_eta(5.0)


CHAINS = [
    pytest.param(plain_chain(0.9, 390, 10, 5.5), id="paper"),
    pytest.param(plain_chain(0.9, 390, 1, 1.5), id="one epoch"),
    pytest.param(plain_chain(0.999, 40, 3, 60.0), id="lambda^b near 1"),
    pytest.param(plain_chain(0.05, 30, 4, 1.5), id="small lambda"),
    pytest.param(plain_chain(0.7, 2, 5, 4.0), id="two bins"),
    pytest.param(plain_chain(0.7, 2, 1, 1.2), id="two bins, one epoch"),
    pytest.param(Chain(0.9, 60, 4, 1.2, 0.0), id="stationary continuation"),
    pytest.param(Chain(0.9, 60, 4, 1.2, 0.6), id="between"),
    pytest.param(normalized_chain(0.95, 60, 1, 1.1), id="normalised, one epoch"),
    pytest.param(replace(normalized_chain(0.95, 60, 1, 1.1), nugget=0.3), id="runs with a nugget"),
    pytest.param(normalized_chain(0.98, 12, 3, 2.5), id="normalised, short epochs"),
    pytest.param(Chain(0.9, 40, 1, 0.8, 0.7, 0.3, second=(0.6, 0.5), hold=3), id="two chains"),
]


@pytest.mark.parametrize("chain", CHAINS)
def test_mass_mean_and_second_moment(chain: Chain) -> None:
    """E 1 = 1, E W = 1 and E W² = b⁻² Σ e^{G_ij/σ²}: the last sees every covariance, the corner too."""
    product = product_of(chain, ratio=0.75, reach=8.0, fine=2e-4)
    mass, mean = float(product(np.array([0.0]), "up")[0]), mean_of(product, 0.0)
    assert mass == pytest.approx(1.0, abs=1e-9)
    assert mean == pytest.approx(1.0, abs=1e-8)
    second = (mean_of(product, 1e-6) - mean_of(product, -1e-6)) / 2e-6
    expected = float(np.mean(np.exp(chain.gram())))
    # The grid's rounding adds variance: at most Σ step²/6 with steps of 2e-4 or 2%.
    assert expected * (1 - 1e-6) <= second <= expected * (1 + 0.02**2) + chain.bins * (2e-4) ** 2


@pytest.mark.parametrize("chain", CHAINS[:4] + CHAINS[-3:])
@pytest.mark.parametrize("reach", [2.0, 3.0])
def test_truncation_loses_no_more_than_its_bound(chain: Chain, reach: float) -> None:
    product = product_of(chain, ratio=0.75, reach=reach, top=1e7)
    mass, mean = float(product(np.array([0.0]), "up")[0]), mean_of(product, 0.0)
    assert 0 <= 1 - mass <= product.lattice.exit_add
    assert -1e-9 <= 1 - mean <= product.lattice.exit_remove


def test_unshifted_lattice_is_smaller_and_claims_nothing_about_remove() -> None:
    chain = plain_chain(0.9, 50, 3, 3.0)
    small, large = lattice(chain, 1.0, 6.0, shifted=False), lattice(chain, 1.0, 6.0)
    assert small.states < large.states
    assert small.exit_remove == math.inf
