"""Lower bounds hold at their confidence, and are those of the papers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

import lambdacgd as lc
from lambdacgd.auditing import lower_bound
from lambdacgd.auditing.bounds import (
    bound_of_counts,
    ideal_scores,
    in_blocks,
    likelihood_ratios,
    strategy_matrix,
)

MECHANISMS = [lc.Identity(), lc.LambdaCGD(0.7), lc.LambdaCGD(0.7, normalized=True), lc.BISR(3), lc.BSR(2)]


def small_plan(mechanism: lc.Mechanism, sampling: lc.Sampling) -> lc.Plan:
    return lc.plan(60, 20, epochs=2, epsilon=2.0, delta=1e-3, mechanism=mechanism, sampling=sampling)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: m.name)
def test_scores_are_the_likelihood_ratio_of_the_dominating_pair(mechanism: lc.Mechanism) -> None:
    plan = small_plan(mechanism, lc.BallsInBins("fixed"))
    matrix, sigma = strategy_matrix(plan), plan.sigma
    whitened = np.random.default_rng(0).standard_normal((6, 5))
    means = [matrix[:, j] + matrix[:, j + 3] for j in range(3)]
    expected = [
        math.log(sum(stats.multivariate_normal.pdf(w, mean / sigma) for mean in means) / 3)
        - stats.multivariate_normal.logpdf(w, np.zeros(6))
        for w in whitened.T
    ]
    np.testing.assert_allclose(likelihood_ratios(plan, whitened), expected, rtol=1e-9)


def test_scores_of_fresh_bins_add_up_over_epochs() -> None:
    plan = small_plan(lc.LambdaCGD(0.7), lc.BallsInBins("fresh"))
    matrix, sigma = strategy_matrix(plan), plan.sigma
    assert matrix.shape == (3, 3)
    whitened = np.random.default_rng(0).standard_normal((6, 4))
    expected = np.zeros(4)
    for epoch in (whitened[:3], whitened[3:]):
        for i, w in enumerate(epoch.T):
            densities = [stats.multivariate_normal.pdf(w, matrix[:, j] / sigma) for j in range(3)]
            expected[i] += math.log(sum(densities) / 3) - stats.multivariate_normal.logpdf(w, np.zeros(3))
    np.testing.assert_allclose(likelihood_ratios(plan, whitened), expected, rtol=1e-9)


def test_scores_of_poisson_add_up_over_steps() -> None:
    plan = small_plan(lc.Identity(), lc.Poisson())
    whitened = np.random.default_rng(0).standard_normal((6, 4))
    ratio = stats.norm.pdf(whitened, 1 / plan.sigma) / stats.norm.pdf(whitened)
    np.testing.assert_allclose(likelihood_ratios(plan, whitened), np.log(2 / 3 + ratio / 3).sum(0), rtol=1e-9)


def test_scores_of_cyclic_poisson_add_up_over_the_steps_of_a_group() -> None:
    plan = small_plan(lc.BSR(2), lc.Poisson())
    assert plan.sampling.kind == "cyclic poisson, 2 groups"
    matrix, whitened = strategy_matrix(plan) / plan.sigma, np.random.default_rng(0).standard_normal((6, 4))
    groups, expected = np.array([0, 1, 1, 0]), np.zeros(4)
    for i, group in enumerate(groups):
        for t in range(group, 6, 2):
            rows = slice(t, t + 2)
            out = stats.norm.pdf(whitened[rows, i]).prod()
            expected[i] += math.log(1 / 3 + 2 / 3 * stats.norm.pdf(whitened[rows, i], matrix[rows, t]).prod() / out)
    np.testing.assert_allclose(likelihood_ratios(plan, whitened, groups), expected, rtol=1e-9)


@pytest.mark.parametrize("mechanism", [lc.LambdaCGD(0.7, normalized=True), lc.BLT(2)], ids=lambda m: m.name)
def test_the_strategy_matrix_undoes_the_noise_of_the_mechanism(mechanism: lc.Mechanism) -> None:
    plan = small_plan(mechanism, lc.Cyclic())
    matrix, n = strategy_matrix(plan), plan.steps
    z = np.random.default_rng(0).standard_normal((n, 2))
    bands = plan.mechanism.noising(n)
    scales = plan.mechanism.column_scales(n)
    noise = np.array([sum(a * z[t - j] for j, a in enumerate(bands) if j <= t) for t in range(n)])
    noise = noise if scales is None else noise * np.asarray(scales)[:, None]
    np.testing.assert_allclose(in_blocks(plan, matrix, noise), z, atol=1e-9)


def test_a_bound_of_randomised_response_holds_at_its_confidence() -> None:
    rng, epsilon = np.random.default_rng(1), 1.0
    keep = math.exp(epsilon) / (1 + math.exp(epsilon))
    bounds = []
    for _ in range(200):
        included = (rng.random(400) < keep).astype(float)
        excluded = (rng.random(400) < 1 - keep).astype(float)
        bounds.append(lower_bound(included, excluded, delta=0.0, confidence=0.9).epsilon)
    above = sum(bound > epsilon for bound in bounds)
    assert above <= stats.binom.isf(1e-6, 200, 0.1)  # false alarms: 1e-6
    assert np.mean(bounds) > 0.6 * epsilon


def test_counts_give_the_clopper_pearson_bound() -> None:
    assert bound_of_counts(100, 100, 0, 100, delta=0.0, error=0.05) == pytest.approx(
        math.log((0.025 ** (1 / 100)) / (1 - 0.025 ** (1 / 100))), rel=1e-9
    )
    assert bound_of_counts(50, 100, 50, 100, delta=0.0, error=0.05) == 0.0
    assert bound_of_counts(5, 100, 0, 100, delta=0.5, error=0.05) == 0.0


def test_scores_that_show_nothing_bound_nothing() -> None:
    scores = np.random.default_rng(0).standard_normal(2000)
    assert lower_bound(scores[:1000], scores[1000:], delta=1e-5).epsilon < 0.1
    assert lower_bound(scores[:2], scores[2:4], delta=1e-5).epsilon == 0.0


@pytest.mark.parametrize("bins", ["fixed", "fresh"])
def test_ideal_canaries_come_near_the_claim_and_not_above(bins: str) -> None:
    sampling = lc.BallsInBins(bins)  # type: ignore[arg-type]
    plan = lc.plan(4000, 1000, epochs=3, epsilon=2.0, delta=1e-2, mechanism=lc.LambdaCGD(0.9), sampling=sampling)
    bound = lower_bound(*ideal_scores(plan, 400_000, np.random.default_rng(3)), delta=1e-2, confidence=0.999)
    assert 0.75 * plan.epsilon < bound.epsilon <= plan.epsilon
