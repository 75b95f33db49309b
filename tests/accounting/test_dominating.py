"""Chains with a nugget: the accountant against quadrature, and what it dominates against Gram matrices made from C."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import lambdacgd as lc
from lambdacgd.accounting import accountant_for
from lambdacgd.accounting import dominating as domination
from lambdacgd.accounting.certificate import Array
from lambdacgd.accounting.composed import FreshBins
from lambdacgd.accounting.dominating import dominating, exact_columns
from lambdacgd.accounting.exact import TransferMatrix
from lambdacgd.accounting.exact.accountant import Precision, Scale, evaluate, loss_law
from lambdacgd.accounting.exact.lattice import Chain, Columns
from lambdacgd.errors import AccountingError, InvalidInput
from reproduce.reference import dense_strategy, quadrature, sampled
from reproduce.sampled import Sampled
from reproduce.simulated import simulate

# Slack turned down until only errors could hide in what is left.
TIGHT = Precision(smoothing=0.02, lattice=1e-6, scales=1e-6, negligible=1e-6, wrap=1e-6, rounding=8e-3)


def buffer(decay: float, zero: float, *, normalized: bool = False) -> lc.BLT:
    """C = (1 − φx)/(1 − θx)."""
    return lc.BLT(1, (decay,), (decay - zero,), normalized=normalized)


def folded(mechanism: lc.Mechanism, b: int, k: int) -> Array:
    """⟨m_i, m_j⟩ straight from C."""
    sums = dense_strategy(mechanism, lc.Horizon(b, k)).reshape(b * k, k, b).sum(axis=1)
    return np.asarray(sums.T @ sums)


def accountant(mechanism: lc.Mechanism, b: int, k: int) -> TransferMatrix:
    same = exact_columns(mechanism, b * k)
    assert same is not None
    return TransferMatrix(same.lam, b, k, columns=same.columns)


def tight(chain: Chain, epsilon: float, remove: float, add: float) -> tuple[float, float]:
    """Both directions with slack of order 1e-3, tuned to the truth."""
    values = []
    for way, value, sign in (("remove", remove, 1), ("add", add, -1)):
        slope = 2.0 * math.log(1 / value) / (1 + epsilon)
        for _ in range(4):
            scale = Scale(math.exp(sign * epsilon), value, max(slope, 1.0))
            found = evaluate(loss_law(chain, scale, TIGHT, direction=way), scale, TIGHT)  # type: ignore[arg-type]
            slope = found.slope
        values.append(found.delta)
    return values[0], values[1]


@pytest.mark.parametrize(("decay", "zero", "b", "k"), [(0.9, 0.5, 7, 1), (0.97, 0.8, 5, 3), (0.6, 0.59, 4, 2)])
def test_one_buffer_is_a_chain_with_a_nugget(decay: float, zero: float, b: int, k: int) -> None:
    chain = accountant(buffer(decay, zero), b, k).chain(1.3)
    np.testing.assert_allclose(chain.gram() * 1.3**2, folded(buffer(decay, zero), b, k), rtol=1e-13)


@pytest.mark.parametrize("zero", [0.0, 0.3, 0.6])
def test_normalised_columns_are_dominated_entry_by_entry(zero: float) -> None:
    mechanism = buffer(0.9, zero, normalized=True)
    above = accountant(mechanism, 12, 1).chain(1.0).gram()
    below = folded(mechanism, 12, 1)
    assert (above >= below).all()
    np.testing.assert_allclose(np.diag(below), 1.0, rtol=1e-12)
    np.testing.assert_allclose(above[:2, :2], below[:2, :2], atol=0.02)


@pytest.mark.parametrize(
    ("decay", "zero", "b", "k", "sigma", "epsilon", "step"),
    [
        (0.9, 0.5, 2, 1, 1.1, 2.0, 0.01),
        (0.9, 0.2, 3, 1, 1.6, 1.0, 0.03),
        (0.97, 0.8, 4, 1, 0.9, 3.0, 0.09),
        (0.7, 0.1, 3, 2, 2.0, 1.5, 0.03),
        (0.95, 0.6, 4, 3, 3.0, 2.0, 0.09),
    ],
)
def test_never_below_quadrature_and_close_to_it(
    decay: float, zero: float, b: int, k: int, sigma: float, epsilon: float, step: float
) -> None:
    mechanism = buffer(decay, zero)
    truth = quadrature(folded(mechanism, b, k), sigma, epsilon, step=step)
    found = tight(accountant(mechanism, b, k).chain(sigma), epsilon, *truth)
    for value, true in zip(found, truth, strict=True):
        assert true * (1 - 1e-7) <= value <= true * 1.002


def grouped_gram(chain: Chain) -> Array:
    """Cov(X) of a chain whose sites hold several bins: they share their site's mean given the lattice."""
    lam, sites, r = chain.lam, chain.bins, chain.repeat
    site = np.repeat(np.arange(sites), r)
    covariance = chain.gain * lam ** np.abs(np.subtract.outer(site, site)).astype(float)
    end = (site == 0) | (site == sites - 1)
    private = chain.gain * np.where(end, 1 - lam, (1 - lam) / (1 + lam))
    covariance -= np.equal.outer(site, site) * private[:, None]
    return np.asarray(covariance + np.diag(private + chain.nugget))


def test_bins_that_share_a_site_dominate_and_are_computed() -> None:
    """Lemma 8b: the grouped chain dominates the one it stands for, and its δ is quadrature's of its own Gram matrix."""
    chain = Columns(1.0, 0.4).over(0.9, 4, 1, 0.9)
    group = chain.lumped(2)
    assert (group.bins, group.repeat) == (2, 2)
    covariance = grouped_gram(group)
    assert (covariance >= chain.gram() * (1 - 1e-14)).all()
    np.testing.assert_allclose(np.diag(covariance), np.diag(chain.gram()), rtol=1e-14)  # out of the nugget
    truth = quadrature(covariance, 1.0, 1.5, step=0.1)
    for value, true in zip(tight(group, 1.5, *truth), truth, strict=True):
        assert true * (1 - 1e-7) <= value <= true * 1.002
    mean, variance = group.mean_loss
    assert mean == pytest.approx(-np.diag(covariance).mean() / 2)
    assert variance == pytest.approx(covariance.mean())


def test_more_sites_of_several_bins() -> None:
    """An interior site too; the false-alarm rate at 5 standard errors is below 1e-6 (seed 3)."""
    group = Columns(1.0, 0.4).over(0.9, 9, 1, 0.9).lumped(3)
    covariance = grouped_gram(group)
    assert (covariance >= Columns(1.0, 0.4).over(0.9, 9, 1, 0.9).gram() * (1 - 1e-14)).all()
    assert group.mean_loss[1] == pytest.approx(covariance.mean())
    (remove, remove_error), (add, add_error) = sampled(covariance, 1.0, 1.0, samples=400_000, seed=3)
    found = tight(group, 1.0, remove, add)
    assert abs(found[0] - remove) < 5 * remove_error + 2e-3 * remove
    assert abs(found[1] - add) < 5 * add_error + 2e-3 * add


OTHERS = [lc.BISR(4), lc.BandInvMF(4), lc.BLT(2), lc.BSR(8), lc.BandMF(6), lc.GammaBIFR(3, 0.7), lc.Diagonal(),
          lc.BLT(2, normalized=True), lc.BandInvMF(3, coefficients=(1.0, 0.4, -0.3)),
          lc.BandInvMF(4, normalized=True), lc.BandInvMF(3, coefficients=(1.0, -0.2, -0.7), normalized=True),
          lc.BandInvMF(3, coefficients=(1.0, 0.4, -0.3), normalized=True)]  # fmt: skip


def splits(difference: Array) -> bool:
    """Whether it is a positive semidefinite matrix plus one without negative entries.

    That is seen up to a thousandth of the diagonal, by alternating projections onto the semidefinite matrices P and
    those with P ≤ difference.
    """
    limit = difference + 1e-3 * np.diag(np.diag(difference)) + 1e-7 * np.eye(len(difference))
    part = np.minimum(limit, 0.0)
    part[np.diag_indices_from(part)] = np.diag(limit)
    for _ in range(3000):
        values, vectors = np.linalg.eigh(part)
        part = (vectors * np.maximum(values, 0.0)) @ vectors.T
        if (part <= limit + 1e-9).all():
            return True
        part = np.minimum(part, limit)
    return False


@pytest.mark.parametrize("mechanism", OTHERS, ids=str)
@pytest.mark.parametrize("epsilon", [8.0, 0.5])
@pytest.mark.parametrize("fit", ["best", "_by_program", "two chains", "_by_norm"])
@pytest.mark.parametrize("k", [1, 3])
def test_what_dominates_is_larger_in_both_orders_together(
    mechanism: lc.Mechanism, epsilon: float, fit: str, k: int
) -> None:
    block = lc.Horizon(20, k)
    resolved = mechanism.resolve(block)
    sums = np.abs(dense_strategy(resolved, block)).reshape(20 * k, k, 20).sum(axis=1)
    if fit == "best":
        found = dominating(resolved, lc.Horizon(20, 4 if k == 1 else k), epsilon=epsilon, delta=1e-5, restarts=k == 1)
    elif (resolved.column_scales(20 * k) is not None and fit == "_by_norm") or (k > 1 and fit == "two chains"):
        pytest.skip("for Toeplitz C, or for one epoch")
    else:
        inner = domination._Inner(resolved, block)
        goal = domination._Goal(inner, 0.3 / epsilon)
        if fit == "_by_norm":
            found = domination._by_norm(inner, goal)
        else:
            found = domination._by_program(inner, goal, shared=fit == "_by_program", one=0.9 * (fit == "two chains"))
    chain = replace(found.columns, shared=0.0).over(found.lam, 20, k, 1.0)
    above = chain.gram() if found.lam else chain.gain * np.eye(20)
    assert splits(above + k**2 * found.columns.shared - sums.T @ sums)


def two_chains(rng: np.random.Generator, b: int, sigma: float, hold: int) -> tuple[Chain, Array]:
    """Random columns of two chains at σ, and their Gram matrix written out."""
    (lam, other), (chain, second, nugget) = rng.uniform(0.2, 0.98, 2), rng.uniform(0.05, 1.0, 3)
    tail, i = float(rng.uniform(0, 1)), np.arange(b)
    places, n = i // hold, -(-b // hold)
    gram = chain * (lam ** np.abs(places[:, None] - places) - tail * lam ** (2.0 * n - places[:, None] - places))
    gram += second * other ** np.abs(i[:, None] - i) + nugget * np.eye(b)
    columns = Columns(chain, nugget, tail, second=(other, second), hold=hold)
    return columns.over(float(lam), b, 1, sigma), np.asarray(gram)


@pytest.mark.parametrize("seed", range(12))
def test_two_chains_are_never_certified_below_quadrature(seed: int) -> None:
    """Lemma 2b, both directions, with groups that fill the epoch and ones that do not."""
    rng = np.random.default_rng(seed)
    b, hold = int(rng.integers(2, 5)), int(rng.integers(1, 4))
    sigma, epsilon = float(rng.uniform(0.8, 2.0)), float(rng.uniform(0.3, 3.0))
    chain, gram = two_chains(rng, b, sigma, hold)
    np.testing.assert_allclose(chain.gram() * sigma**2, gram, rtol=1e-12)
    assert chain.mean_loss == pytest.approx((-np.diag(chain.gram()).mean() / 2, chain.gram().mean()))
    truth = quadrature(gram, sigma, epsilon, step={2: 0.01, 3: 0.03, 4: 0.1}[b])
    for value, true in zip(tight(chain, epsilon, *truth), truth, strict=True):
        assert true * (1 - 1e-7) <= value <= true * 1.002


@pytest.mark.parametrize(("b", "hold"), [(23, 1), (24, 4), (25, 3)])
def test_two_chains_over_more_bins(b: int, hold: int) -> None:
    """Against sampling; the false-alarm rate at 5 standard errors is below 1e-6 a value (seed 3)."""
    chain, gram = two_chains(np.random.default_rng(b), b, 0.8, hold)
    (remove, remove_error), (add, add_error) = sampled(gram, 0.8, 1.0, samples=400_000, seed=3)
    found = tight(chain, 1.0, remove, add)
    assert abs(found[0] - remove) < 5 * remove_error + 2e-3 * remove
    assert abs(found[1] - add) < 5 * add_error + 2e-3 * add


def test_two_chains_follow_a_memory_of_two_time_scales() -> None:
    """BLT with two buffers lost 6.6% of σ by one chain (judged by E W²)."""
    found = dominating(lc.BLT(2).resolve(lc.Horizon(390, 1)), lc.Horizon(390, 10), epsilon=8.0, delta=1e-5)
    assert found.columns.second
    assert found.loss < 0.016
    with pytest.raises(AccountingError, match="one epoch"):
        found.columns.over(found.lam, 390, 2, 1.0)


def test_two_chains_are_refused_where_a_chain_would_be_left_out() -> None:
    columns = Columns(1.0, 0.5, second=(0.9, 2.0))
    with pytest.raises(AccountingError, match="above 0"):
        columns.over(0.0, 5, 1, 1.0)
    with pytest.raises(AccountingError, match="no columns"):
        replace(columns, runs=((3, 0.9), (2, 0.5)))


def test_one_epoch_of_two_chains_is_a_point_and_no_curve() -> None:
    """A curve of b = 1000 took more than its most operations: it fell back on no amplification after four minutes."""
    sampling = lc.BallsInBins("fixed", examples=390, steps_per_epoch=390, epochs=1)
    made, by = accountant_for(lc.BLT(2).resolve(sampling.block), sampling)._columns(8.0, 1e-5)  # type: ignore[attr-defined]
    assert by.columns.second
    assert isinstance(made, TransferMatrix)


def test_where_two_chains_are_refused_one_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the run without amplification."""

    def refuses(*_: Any, **__: Any) -> Any:
        raise AccountingError("no plane today")

    monkeypatch.setattr("lambdacgd.accounting.exact.accountant.plane", refuses)
    monkeypatch.setattr("lambdacgd.accounting.dominating.cost", lambda *_: 1.0)
    sampling = lc.BallsInBins("fixed", examples=390, steps_per_epoch=390, epochs=1)
    accountant = accountant_for(lc.BLT(2).resolve(sampling.block), sampling)
    answer = accountant.sigma(8.0, 1e-5)
    assert accountant.quick_sigma(8.0, 1e-5) == pytest.approx(answer.sigma, rel=0.02)
    assert "second" not in answer.certificate.details["dominated_by"]
    assert answer.sigma < 0.7  # 1.04 without amplification, .645 with two chains


@pytest.mark.parametrize("seed", range(6))
def test_random_mechanisms_are_never_certified_below_quadrature(seed: int) -> None:
    rng = np.random.default_rng(seed)
    b = int(rng.integers(2, 5))
    mechanism = lc.BandMF(b, coefficients=(1.0, *rng.uniform(0, 1.2, b - 1)))
    sigma, epsilon = float(rng.uniform(0.7, 1.4)), float(rng.uniform(0.3, 2.0))
    truth = quadrature(folded(mechanism, b, 1), sigma, epsilon, step={2: 0.01, 3: 0.03, 4: 0.1}[b])
    found = dominating(mechanism, lc.Horizon(b, 1), epsilon=epsilon, delta=1e-4)
    bound = FreshBins(found.lam, b, 1, columns=found.columns).delta(sigma, epsilon)
    assert bound.delta_remove >= truth[0]
    assert bound.delta_add >= truth[1]


@pytest.mark.parametrize("seed", range(12))
def test_what_all_bins_share_is_never_certified_below_quadrature(seed: int) -> None:
    """Lemma 9b, both directions, bins kept over 1 to 3 epochs."""
    rng = np.random.default_rng(seed)
    b, k = int(rng.integers(2, 5)), int(rng.integers(1, 4))
    lam, sigma, epsilon = rng.uniform(0.3, 0.95), float(rng.uniform(0.8, 2.0)) * k**0.5, float(rng.uniform(0.3, 3.0))
    columns = Columns(*rng.uniform(0.05, 1.0, 2), float(rng.uniform(0, 1)), float(rng.uniform(0.02, 0.6)) / k)
    gram = replace(columns, shared=0.0).over(lam, b, k, 1.0).gram() + k**2 * columns.shared
    truth = quadrature(gram, sigma, epsilon, step={2: 0.01, 3: 0.03, 4: 0.1}[b])
    bound = FreshBins(lam, b, 1, columns=columns, kept=k).delta(sigma, epsilon)
    for value, true in zip((bound.delta_remove, bound.delta_add), truth, strict=True):
        assert true * (1 - 1e-7) <= value
    assert bound.delta <= max(truth) * 1.05  # 4% where δ is 3e-10, less where it is larger
    with pytest.raises(AccountingError, match="compose"):
        TransferMatrix(lam, b, k, columns=columns).delta(sigma, epsilon)


def test_composed_it_meets_simulation() -> None:
    """Fresh bins, straight from C; 5 standard errors, seed 0."""
    mechanism, horizon = buffer(0.9, 0.6), lc.Horizon(24, 4)
    sampling = lc.BallsInBins(examples=24, steps_per_epoch=24, epochs=4, bins="fresh")
    certified = accountant_for(mechanism, sampling).sigma(2.0, 1e-4)
    assert certified.certificate.kind == "bound"
    assert "dominated_by" not in certified.certificate.details
    drawn = simulate(mechanism, horizon, sigma=certified.sigma, epsilon=2.0, samples=200_000)
    value, error = float(drawn["delta"]), float(drawn["standard_error"])
    assert value - 5 * error <= 1e-4 <= value + 5 * error + 5e-6


def test_fixed_bins_of_one_buffer_are_exact() -> None:
    sampling = lc.BallsInBins(examples=24, steps_per_epoch=24, epochs=3, bins="fixed")
    found = accountant_for(buffer(0.9, 0.6), sampling).sigma(2.0, 1e-4)
    assert found.certificate.method == "transfer-matrix"
    (remove, error), _ = sampled(folded(buffer(0.9, 0.6), 24, 3), found.sigma, 2.0, samples=500_000, seed=1)
    assert remove - 5 * error <= 1e-4 <= remove + 5 * error + 5e-6


def test_a_long_memory_over_many_epochs_loses_little() -> None:
    """The paper's setting, fixed bins: within 2% of the σ that importance sampling estimates straight from C."""
    horizon, sampling = lc.Horizon(390, 10), lc.BallsInBins("fixed", examples=50_000, steps_per_epoch=390, epochs=10)
    mechanism = lc.BandInvMF(4).resolve(horizon)
    certified = accountant_for(mechanism, sampling).sigma(2.0, 1e-5)
    assert certified.certificate.method == "transfer-matrix"
    estimate = Sampled(mechanism, horizon).delta(2.0, certified.sigma / 1.02, samples=16_384)
    assert estimate.value - 5 * estimate.standard_error > 1e-5


def test_negative_entries_count_by_their_size() -> None:
    """Lemma 0: |C| of 1/(1 + x/2) is λCGD with λ = 1/2, which is found."""
    signed = lc.BandInvMF(2, coefficients=(1.0, 0.5))
    sampling = lc.BallsInBins(examples=20, steps_per_epoch=20, epochs=3, bins="fresh")
    found = accountant_for(signed, sampling).sigma(2.0, 1e-5)
    of_sizes = FreshBins(0.5, 20, 3).sigma(2.0, 1e-5).sigma
    assert of_sizes * 0.999 <= found.sigma <= of_sizes * 1.01


def test_a_weight_above_its_decay_has_no_nugget() -> None:
    assert exact_columns(lc.BLT(1, (0.5,), (0.6,)), 10) is None
    with pytest.raises(AccountingError, match="no columns"):
        Columns(1.0, -0.1)


@pytest.mark.slow
def test_a_buffer_is_chosen_and_beats_what_needs_no_memory() -> None:
    request = {"epochs": 5, "epsilon": 8.0, "delta": 1e-5, "sampling": lc.BallsInBins("fresh")}
    without = lc.plan(4000, 50, mechanism=lc.LambdaCGD(normalized=True), **request)  # type: ignore[arg-type]
    errors = []
    for normalized in (False, True):
        mechanism = lc.BLT(1, normalized=normalized, amplified=True)
        found = lc.plan(4000, 50, mechanism=mechanism, **request)  # type: ignore[arg-type]
        assert found.selection is not None
        assert found.selection["objective"] == "amplified-rmse"
        assert lc.Plan.from_json(found.to_json()).mechanism == found.mechanism
        errors.append(found.rmse)
    assert errors[1] < errors[0] < without.rmse
    for wrong in ({"buffers": 2}, {"decays": (0.5,), "weights": (0.2,)}):
        with pytest.raises(InvalidInput, match="amplified"):
            lc.BLT(amplified=True, **wrong)


def test_a_search_that_ends_near_independent_columns_names_a_chain_that_accountants_take() -> None:
    """It named λ = 7e-12, which they refuse: δ of what σ was certified for came out 16 000 times as large."""
    asked = accountant_for(lc.Diagonal(), lc.BallsInBins("fixed", examples=1000, steps_per_epoch=200, epochs=10))
    answer = asked.delta(26.475, 0.2285)
    assert answer.method == "transfer-matrix"
    assert answer.delta <= 1.2e-5


def test_a_few_bands_do_not_lose_to_tapers_that_repeat() -> None:
    """σ of BSR (p = 8) over fresh bins was 1.2% larger with tapers of 96 steps, where cosines of 48 angles mirror."""
    found = dominating(lc.BSR(8).resolve(lc.Horizon(390, 1)), lc.Horizon(390, 10), epsilon=2.0, delta=1e-5)
    assert found.loss < 0.031  # it was 3.8%
