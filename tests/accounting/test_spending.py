"""ε of a given noise multiplier: the inverse of calibration, never below it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lambdacgd as lc
from lambdacgd.accounting import spending
from lambdacgd.accounting.base import AccountingError
from lambdacgd.accounting.calibration import calibrate_noise
from lambdacgd.accounting.gaussian import gaussian_delta
from lambdacgd.accounting.spending import certify_noise

EXACT = [
    (lc.LambdaCGD(0.9), lc.BallsInBins("fixed", examples=2000, steps_per_epoch=40, epochs=3)),
    (lc.LambdaCGD(0.7, normalized=True), lc.BallsInBins("fixed", examples=2000, steps_per_epoch=40, epochs=3)),
    (lc.LambdaCGD(0.7), lc.BallsInBins("fresh", examples=2000, steps_per_epoch=40, epochs=3)),
    (lc.LambdaCGD(0.7), lc.BallsInBins("fresh", examples=2000, steps_per_epoch=40, epochs=1)),
    (lc.Identity(), lc.BallsInBins("fresh", examples=2000, steps_per_epoch=1, epochs=3)),
    (lc.Identity(), lc.Poisson(examples=2000, steps_per_epoch=40, epochs=3)),
    (lc.BISR(4), lc.Cyclic(examples=2000, steps_per_epoch=40, epochs=3, batch_size=50)),
]


@pytest.mark.parametrize(("mechanism", "sampling"), EXACT, ids=str)
@pytest.mark.parametrize("epsilon", [2.0])
def test_inverse_of_calibration(mechanism: lc.Mechanism, sampling: lc.Sampling, epsilon: float) -> None:
    mechanism = mechanism.resolve(sampling.block)
    sigma = calibrate_noise(mechanism, sampling, epsilon=epsilon, delta=1e-5).sigma
    found = certify_noise(mechanism, sampling, sigma=sigma, delta=1e-5)
    assert found.epsilon == pytest.approx(epsilon, rel=2e-3)
    assert found.kind == "bound"
    assert found.details["sampling"] == sampling.kind
    # What is claimed needs no more noise than there is, but for the accuracy of both searches.
    assert calibrate_noise(mechanism, sampling, epsilon=found.epsilon, delta=1e-5).sigma <= sigma * 1.001


@settings(max_examples=30, deadline=None)
@given(sigma=st.floats(0.3, 50), delta=st.floats(1e-9, 0.1), lam=st.floats(0, 0.99))
def test_never_below_the_truth_without_amplification(sigma: float, delta: float, lam: float) -> None:
    sampling = lc.Cyclic(examples=100, steps_per_epoch=10, epochs=2, batch_size=10)
    mechanism = lc.LambdaCGD(lam).resolve(sampling.block)
    found = certify_noise(mechanism, sampling, sigma=sigma, delta=delta)
    sensitivity = lc.sensitivity(mechanism, sampling.horizon).value
    assert gaussian_delta(found.epsilon, sigma / sensitivity) <= delta * (1 + 1e-9)


def test_other_mechanisms_with_fresh_bins_are_dominated() -> None:
    sampling = lc.BallsInBins("fresh", examples=2000, steps_per_epoch=40, epochs=3)
    mechanism = lc.BISR(4).resolve(sampling.block)
    calibration = calibrate_noise(mechanism, sampling, epsilon=2.0, delta=1e-5)
    found = certify_noise(mechanism, sampling, sigma=calibration.sigma, delta=1e-5)
    assert found.epsilon == pytest.approx(2.0, rel=5e-3)
    assert found.method == "transfer-matrix-composed"
    assert found.details["dominated_by"]["norm"] > 1


class Sampled:
    """Stands in for Monte Carlo: certifies σ = needed/ε, and remembers what it was asked."""

    def __init__(self, needed: float) -> None:
        self.needed, self.failures = needed, list[float]()

    def __call__(self, mechanism: object, horizon: object) -> Sampled:
        return self

    def epsilon(self, delta: float, sigma: float) -> float:
        return 1.0

    def certify(self, epsilon: float, delta: float, *, failure_probability: float) -> lc.Calibration:
        self.failures.append(failure_probability)
        claim = lc.Certificate("monte-carlo", "both", 1 - failure_probability, epsilon, delta)
        return lc.Calibration(self.needed / epsilon, claim)


def sampled_epsilon(monkeypatch: pytest.MonkeyPatch, needed: float) -> tuple[Sampled, lc.Certificate]:
    stand_in = Sampled(needed)
    monkeypatch.setattr("lambdacgd.accounting.monte_carlo.MonteCarlo", stand_in)
    monkeypatch.setenv("LAMBDACGD_CACHE", "off")
    sampling = lc.BallsInBins("fixed", examples=2000, steps_per_epoch=40, epochs=3)
    return stand_in, certify_noise(lc.BISR(4).resolve(sampling.block), sampling, sigma=2.0, delta=1e-5)


def test_sampled_certificates_share_their_failure_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in, found = sampled_epsilon(monkeypatch, needed=2.08)
    assert found.epsilon == pytest.approx(1.05)
    assert len(stand_in.failures) == 3
    assert sum(stand_in.failures) <= 1 - found.confidence + 1e-15
    assert found.confidence == 1 - 1e-9


def test_a_sampled_epsilon_that_cannot_be_certified_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AccountingError, match="plan for an ε instead"):
        sampled_epsilon(monkeypatch, needed=9.0)


@pytest.mark.slow
def test_a_sampled_epsilon() -> None:
    sampling = lc.BallsInBins("fixed", examples=2000, steps_per_epoch=40, epochs=3)
    mechanism = lc.BISR(4).resolve(sampling.block)
    sigma = calibrate_noise(mechanism, sampling, epsilon=2.0, delta=1e-5).sigma
    found = certify_noise(mechanism, sampling, sigma=sigma, delta=1e-5)
    assert found.epsilon == pytest.approx(2.0, rel=0.03)
    assert found.method == "monte-carlo"


@pytest.mark.parametrize(
    "sampling",
    [
        lc.Cyclic(examples=100, steps_per_epoch=5, epochs=2, batch_size=20),
        lc.BallsInBins("fresh", examples=100, steps_per_epoch=1, epochs=2),
    ],
    ids=str,
)
def test_much_noise_stays_at_the_smallest_epsilon(sampling: lc.Sampling) -> None:
    assert certify_noise(lc.Identity(), sampling, sigma=1e4, delta=0.1).epsilon == 1e-3


@pytest.mark.parametrize("sigma", [0.02, 0.05, 0.2, 1e5])
def test_noise_beyond_the_accountant_is_refused(sigma: float) -> None:
    sampling = lc.BallsInBins("fresh", examples=2000, steps_per_epoch=40, epochs=3)
    with pytest.raises(AccountingError, match="plan for an ε instead"):
        certify_noise(lc.Identity(), sampling, sigma=sigma, delta=1e-9)


def test_an_infinite_epsilon_is_no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spending, "poisson_epsilon", lambda sigma, delta, horizon: math.inf)
    monkeypatch.setenv("LAMBDACGD_CACHE", "off")
    with pytest.raises(AccountingError, match="no finite ε"):
        certify_noise(lc.Identity(), lc.Poisson(examples=100, steps_per_epoch=5, epochs=2), sigma=0.01, delta=1e-5)


@pytest.mark.parametrize(("name", "value"), [("sigma", 0.0), ("sigma", float("nan")), ("delta", 1.0), ("delta", 0.0)])
def test_bad_numbers(name: str, value: float) -> None:
    with pytest.raises(lc.InvalidInput, match=name):
        certify_noise(
            lc.Identity(),
            lc.Cyclic(examples=10, steps_per_epoch=2, epochs=1, batch_size=5),
            **({"sigma": 1.0, "delta": 1e-5} | {name: value}),
        )


def test_correlated_noise_under_poisson_is_refused() -> None:
    with pytest.raises(lc.InvalidInput, match="Poisson sampling has no tight accountant"):
        certify_noise(lc.LambdaCGD(0.5), lc.Poisson(examples=100, steps_per_epoch=5, epochs=2), sigma=1.0, delta=1e-5)


@pytest.mark.parametrize("epsilon", [1.2345678, 0.12345612, 7.0, 1e-9])
def test_what_is_printed_is_not_less_than_what_was_certified(epsilon: float) -> None:
    said = spending._said(epsilon)
    assert said >= epsilon
    assert float(f"{said:g}") == said
    assert said <= max(epsilon * (1 + 1e-5), 1e-3)
