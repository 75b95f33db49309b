"""The optimiser's gradients against finite differences, its results against perturbations, and its cache."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.optimize import minimize

from lambdacgd import cache
from lambdacgd.mechanisms import BISR, BLT, BandInvMF, BandMF, Horizon, optimised, rmse, sensitivity
from lambdacgd.mechanisms.base import inverse_pullback, multiply, series_inverse
from lambdacgd.mechanisms.error import participation_sum
from lambdacgd.mechanisms.optimised import log_squared_rmse

SEED = 20260131


def test_gradient_of_the_objective_against_finite_differences():
    rng = np.random.default_rng(SEED)
    horizon = Horizon(5, 3)
    strategy, noising = rng.normal(size=15), rng.normal(size=15)
    _, by_strategy, by_noising = log_squared_rmse(strategy, noising, horizon)
    for i in range(15):
        step = np.zeros(15)
        step[i] = 1e-6
        up, down = (
            log_squared_rmse(strategy + step, noising, horizon),
            log_squared_rmse(strategy - step, noising, horizon),
        )
        assert by_strategy[i] == pytest.approx((up[0] - down[0]) / 2e-6, abs=1e-6)
        up, down = (
            log_squared_rmse(strategy, noising + step, horizon),
            log_squared_rmse(strategy, noising - step, horizon),
        )
        assert by_noising[i] == pytest.approx((up[0] - down[0]) / 2e-6, abs=1e-6)


@pytest.mark.parametrize("direct_limit", [10**9, 0], ids=["direct", "fft"])
def test_series_inverse_and_its_pullback(monkeypatch, direct_limit):
    monkeypatch.setattr("lambdacgd.mechanisms.base.DIRECT_LIMIT", direct_limit)
    rng = np.random.default_rng(SEED)
    column, weights = np.concatenate([[1.0], 0.1 * rng.normal(size=3)]), rng.normal(size=40)
    inverse = series_inverse(column, 40)
    np.testing.assert_allclose(multiply(column, inverse, 40), np.eye(40)[0], atol=1e-12)
    gradient = inverse_pullback(column, inverse, weights)
    for i in range(4):
        step = np.zeros(4)
        step[i] = 1e-6
        difference = weights @ (series_inverse(column + step, 40) - series_inverse(column - step, 40)) / 2e-6
        assert gradient[i] == pytest.approx(difference, abs=1e-6)


@pytest.mark.parametrize("mechanism", [BandInvMF(4), BandMF(5), BLT(2)])
def test_optimised_parameters_cannot_be_improved_nearby(mechanism):
    horizon = Horizon(30, 3)
    with cache.disabled():
        best = mechanism.resolve(horizon)
    value = rmse(best, horizon)
    rng = np.random.default_rng(SEED)
    for _ in range(50):
        fields = best.to_dict()
        for name in ("coefficients", "decays", "weights"):
            if name in fields:
                noise = 1 + 0.02 * rng.normal(size=len(fields[name]))
                noise[0] = 1.0 if name == "coefficients" else noise[0]
                fields[name] = tuple(np.asarray(fields[name]) * noise)
        fields.pop("name")
        assert rmse(type(best)(**fields), horizon) >= value * (1 - 1e-8)


@pytest.mark.parametrize(("b", "k", "bands"), [(50, 4, 50), (20, 5, 20), (100, 10, 60), (20, 20, 60), (7, 1, 7)])
def test_band_inv_mf_has_no_negative_entries_and_loses_little_for_it(monkeypatch, b, k, bands):
    horizon = Horizon(b, k)
    with cache.disabled():
        found = BandInvMF(bands).resolve(horizon)
        monkeypatch.setattr("lambdacgd.mechanisms.optimised._inverse_is_non_negative", lambda noising, n: True)
        free = BandInvMF(bands).resolve(horizon)
    strategy = found.strategy(horizon.steps)
    assert strategy.min() >= 0
    assert rmse(free, horizon) <= rmse(found, horizon) < 1.025 * rmse(free, horizon)
    if free.strategy(horizon.steps).min() >= 0:
        assert found == free
    else:  # and not by chance of rounding
        noise = 1 + 1e-12 * np.random.default_rng(SEED).normal(size=bands)
        assert series_inverse(np.asarray(found.coefficients) * noise, horizon.steps).min() >= 0
    assert sensitivity(found, horizon).exact


@pytest.mark.slow  # ten seconds
def test_signed_sensitivity_would_explain_the_papers_value_with_all_bands():
    """The table prints 7.87 for p = b. With C's entries added as they are one gets below it; with |C| far above."""
    horizon, sigma = Horizon(390, 10), 0.60023
    n, p = horizon.steps, 390

    def signed(tail):
        noising = np.concatenate([[1.0], tail])
        strategy = series_inverse(noising, n)
        absolute, _, by_noising = log_squared_rmse(strategy, np.pad(noising, (0, n - p)), horizon)
        together = participation_sum(strategy, horizon)
        by_together = (2 * together / (together @ together)).reshape(10, 390)
        by_signed = np.cumsum(by_together[::-1], axis=0)[::-1].reshape(-1)
        larger = participation_sum(np.abs(strategy), horizon)
        value = absolute - np.log(larger @ larger) + np.log(together @ together)
        return value, (by_noising[:p] + inverse_pullback(noising, strategy, by_signed))[1:]

    tail = minimize(
        lambda x: (lambda value, gradient: (value, gradient / 100))(*signed(x / 100)),
        100 * BISR(p).noising(n)[1:p], jac=True, method="L-BFGS-B", options={"maxiter": 1000, "maxcor": 30},
    ).x / 100  # fmt: skip
    assert sigma * np.exp(signed(tail)[0] / 2) < 7.87
    assert sigma * rmse(BandInvMF(p, (1.0, *tail)), horizon) > 9


@pytest.mark.parametrize(("b", "k", "bands"), [(390, 1, 4), (40, 5, 3)])
def test_coefficients_of_the_plain_columns_are_as_good_for_normalised_ones(b, k, bands):
    """To .05% of the RMSE, as the docstring says."""
    horizon = Horizon(b, k)
    with cache.disabled():
        found = BandInvMF(bands, normalized=True).resolve(horizon)

    def error(tail):
        return rmse(BandInvMF(bands, (1.0, *tail), normalized=True), horizon)

    best = minimize(error, found.coefficients[1:], method="Nelder-Mead", options={"maxfev": 150}).fun
    assert best <= error(found.coefficients[1:]) <= 1.0005 * best
    assert best < rmse(BandInvMF(bands).resolve(horizon), horizon)


@pytest.mark.parametrize("mechanism", [BandInvMF(1), BandMF(1), BandInvMF(6), BandInvMF(4, normalized=True), BLT(1)])
def test_smallest_horizons(mechanism):
    horizon = Horizon(3, 2)
    with cache.disabled():
        resolved = mechanism.resolve(horizon)
    assert np.isfinite(rmse(resolved, horizon))


def test_one_band_needs_no_search(monkeypatch):
    """SciPy before 1.17 refuses to minimise over no numbers."""
    monkeypatch.setattr(optimised, "minimize", None)
    with cache.disabled():
        for mechanism in (BandMF(1), BandInvMF(1)):
            assert mechanism.resolve(Horizon(20, 2)).coefficients == (1.0,)


def test_optimised_parameters_are_cached_by_content(tmp_path, monkeypatch):
    monkeypatch.setenv("LAMBDACGD_CACHE", str(tmp_path))
    first = BandInvMF(3).resolve(Horizon(20, 2))
    (file,) = tmp_path.glob("*.json")
    stored = json.loads(file.read_text())
    stored["answer"] = {"coefficients": [1.0, -0.25, -0.125]}
    asked = json.dumps(stored["asked"], sort_keys=True)
    stored["signature"] = cache._signature(cache._secret(tmp_path), asked, stored["answer"])
    file.write_text(json.dumps(stored))
    assert BandInvMF(3).resolve(Horizon(20, 2)).coefficients == (1.0, -0.25, -0.125)
    assert BandInvMF(3).resolve(Horizon(20, 3)).coefficients != (1.0, -0.25, -0.125)
    file.write_text("torn")
    assert BandInvMF(3).resolve(Horizon(20, 2)) == first
    with cache.disabled():
        assert BandInvMF(3).resolve(Horizon(20, 2)) == first
