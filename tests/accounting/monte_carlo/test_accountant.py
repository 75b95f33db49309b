"""Certificates: never below the truth, close to the estimate, honest about what they cannot do."""

import math

import numpy as np
import pytest

from lambdacgd import cache
from lambdacgd.accounting.gaussian import gaussian_delta, gaussian_sigma
from lambdacgd.accounting.monte_carlo import MonteCarlo
from lambdacgd.accounting.monte_carlo import accountant as module
from lambdacgd.accounting.monte_carlo.estimate import Estimator
from lambdacgd.accounting.monte_carlo.gram import gram_of
from lambdacgd.errors import AccountingError, InvalidInput
from lambdacgd.mechanisms import BISR, Horizon, LambdaCGD

SMALL = Horizon(20, 3)


@pytest.fixture(autouse=True)
def no_cache() -> object:
    with cache.disabled():
        yield


@pytest.mark.parametrize("mechanism", [LambdaCGD(0.9), BISR(4)], ids=str)
@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_a_certified_sigma_is_safe_and_close(mechanism: LambdaCGD | BISR, epsilon: float) -> None:
    accountant = MonteCarlo(mechanism, SMALL)
    found = accountant.certify(epsilon, 1e-5)
    estimate = accountant.estimate_sigma(epsilon, 1e-5)
    assert 1.0 < found.sigma / estimate.sigma < 1.04
    claim = found.certificate
    assert (claim.kind, claim.method, claim.direction) == ("bound", "monte-carlo", "both")
    assert claim.confidence == 1 - 1e-9
    assert claim.details["tests"][-1]["passed"]


def test_against_the_exact_answer() -> None:
    """b = 1 is the Gaussian mechanism, whose σ is known."""
    found = MonteCarlo(LambdaCGD(0.0), Horizon(1, 1)).certify(1.0, 1e-5)
    exact = gaussian_sigma(1.0, 1e-5)
    assert exact <= found.sigma < 1.04 * exact


def test_the_wager_rejects_what_is_not_true() -> None:
    """At a σ whose δ is above the limit, the chance of passing is at most β; with β = .05 and 40 runs, more than 9
    passes have probability below 1e-4 even if every run used up its β. Then the same wager on a true claim passes."""
    estimator = Estimator(gram_of(LambdaCGD(0.0), Horizon(1, 1)))
    limit = gaussian_delta(1.0, 1.0)
    passes = 0
    for entropy in range(40):
        wager = module.prepare(estimator, 1.0, 1.0, "remove", limit=limit, failure=0.05)
        passes += module.settle(wager, failure=0.05, max_samples=40_960, entropy=entropy).passed
    assert passes <= 9
    wager = module.prepare(estimator, 1.0, 1.1, "remove", limit=limit, failure=1e-6)
    assert module.settle(wager, failure=1e-6, max_samples=409_600, entropy=1).passed


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_upper_bounds_cover_the_truth(direction: str) -> None:
    """60 bounds at β = .1 on a known δ: more than 17 misses have probability below 1e-4."""
    estimator = Estimator(gram_of(LambdaCGD(0.0), Horizon(1, 1)))
    truth = gaussian_delta(0.5, 2.0)
    bounds = [
        module.upper_bound(estimator, 0.5, 2.0, direction, failure=0.1, samples=4096)  # type: ignore[arg-type]
        for _ in range(60)
    ]
    assert sum(bound < truth for bound in bounds) <= 17
    assert np.median(bounds) < 1.3 * truth


def test_certified_delta_is_above_the_estimate_and_not_by_much() -> None:
    accountant = MonteCarlo(LambdaCGD(0.8), SMALL)
    estimate = accountant.estimate_delta(1.0, 3.5)
    bound = accountant.certify_delta(1.0, 3.5, samples=200_000)
    assert estimate.value < bound < 1.5 * estimate.value


def test_a_budget_that_is_too_small_says_what_would_do() -> None:
    accountant = MonteCarlo(LambdaCGD(0.9), Horizon(60, 3))
    with pytest.raises(AccountingError, match=r"max_samples = 5,000; [\d,]+ would do \(up to \d+ s here\)"):
        accountant.certify(8.0, 1e-5, max_samples=5000)


def test_where_every_attempt_fails_amplification_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "settle", lambda *a, **k: module.Outcome(False, 1, 0.0))
    accountant = MonteCarlo(LambdaCGD(0.9), SMALL)
    found = accountant.certify(1.0, 1e-5)
    plain = accountant.without_amplification(1.0, 1e-5)
    assert plain < found.sigma <= plain * (1 + 2e-9)  # the rounding of G is covered here too
    assert found.certificate.details["fallback"] == "no amplification"
    assert len(found.certificate.details["tests"]) == 4


def test_epsilons_beyond_the_margins_are_refused() -> None:
    accountant = MonteCarlo(LambdaCGD(0.5), Horizon(4, 2))
    with pytest.raises(InvalidInput, match=r"from 0.001 on"):
        accountant.certify(1e-6, 1e-5)
    with pytest.raises(InvalidInput, match=r"from 0.001 on"):
        accountant.certify_delta(1e-6, 10.0)
    with pytest.raises(InvalidInput, match="below 300"):
        accountant.certify(400.0, 1e-5)


def test_the_attempts_share_beta(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[float] = []

    def fail(wager: module.Wager, *, failure: float, **rest: object) -> module.Outcome:
        failures.append(failure)
        return module.Outcome(False, 1, 0.0)

    monkeypatch.setattr(module, "settle", fail)
    MonteCarlo(LambdaCGD(0.9), SMALL).certify(1.0, 1e-5, failure_probability=1e-7)
    assert sum(failures) <= 0.5e-7
    assert failures[0] == 0.25e-7


def test_stakes_keep_every_factor_non_negative() -> None:
    estimator = Estimator(gram_of(BISR(4), SMALL))
    for epsilon, sigma in ((0.3, 8.0), (2.0, 2.0)):
        wager = module.prepare(estimator, epsilon, sigma, "remove", limit=1e-5, failure=1e-9)
        assert 1 + wager.stake * (wager.limit - wager.proposal.largest_weight * (1 + 2e-8)) > 0


def test_verification_is_fresh_every_time() -> None:
    estimator = Estimator(gram_of(BISR(4), SMALL))
    wager = module.prepare(estimator, 1.0, 2.5, "remove", limit=1e-5, failure=1e-300)
    runs = {module.settle(wager, failure=1e-300, max_samples=4096).log_capital for _ in range(3)}
    assert len(runs) == 3
    assert all(math.isfinite(capital) for capital in runs)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [LambdaCGD(0.9), BISR(4)], ids=str)
@pytest.mark.parametrize("epsilon", [8.0, 2.0, 0.5])
def test_the_papers_setting(mechanism: LambdaCGD | BISR, epsilon: float) -> None:
    accountant = MonteCarlo(mechanism, Horizon(390, 10))
    ratio = accountant.certify(epsilon, 1e-5).sigma / accountant.estimate_sigma(epsilon, 1e-5).sigma
    assert 1.0 < ratio < 1.04


@pytest.mark.parametrize(
    ("lam", "b", "k", "epsilon", "delta", "sigma"),
    [
        (0.8, 3, 2, 2.0, 1e-5, 4.451754),
        (0.6, 4, 5, 0.7, 1e-4, 11.455930),
        (0.9, 4, 3, 3.0, 1e-6, 6.767768),
        (0.85, 5, 4, 5.0, 1e-5, 4.096688),
    ],
)
def test_never_below_quadrature(lam: float, b: int, k: int, epsilon: float, delta: float, sigma: float) -> None:
    """σ known to 1e-6 by quadrature: a certificate below it is an error of probability at most 1e-9."""
    found = MonteCarlo(LambdaCGD(lam), Horizon(b, k)).certify(epsilon, delta).sigma
    assert sigma * (1 - 1e-6) < found < 1.02 * sigma
