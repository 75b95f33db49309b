"""Lemma 1 (the chain), Lemmas 6 to 9 (Jensen and the dominating chains) against dense matrices."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from lambdacgd.accounting.exact.lattice import normalized_chain, plain_chain
from lambdacgd.accounting.gaussian import jensen_add, one_bin_delta
from lambdacgd.accounting.reference import gram, quadrature
from lambdacgd.errors import AccountingError

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
    variances = chain.gain * chain.peak_variance - 2 * chain.log_scales
    np.testing.assert_allclose(np.diag(dense), variances, rtol=1e-8)
    assert np.all(np.diff(chain.log_scales) >= 0)
    mean, variance = chain.mean_loss
    assert mean == pytest.approx(-np.diag(dense).mean() / 2, rel=1e-9)
    assert variance == pytest.approx(dense.mean(), rel=1e-7)


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
