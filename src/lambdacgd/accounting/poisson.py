"""DP-SGD under Poisson sampling, through dp-accounting's privacy loss distributions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lambdacgd.accounting.certificate import Calibration, Certificate
from lambdacgd.accounting.root import smallest
from lambdacgd.errors import AccountingError

# What the FFTs of a composition can be off by: up to 5e-13 was seen (values that are 0 came out as −4e-14).
ROUND_OFF = 2e-12


@dataclass(frozen=True)
class PoissonSampled:
    """Accountant of DP-SGD whose every step draws each example with the same probability.

    Args:
        rate: q, that probability.
        steps: n, the number of steps.

    Guarantee
    ---------
    (ε, δ)-DP under zero-out (equivalently add-or-remove) of one example, both directions. The privacy loss
    distribution is rounded pessimistically ("connect the dots"), so the bound is deterministic up to floating point.
    """

    rate: float
    steps: int

    def delta(self, sigma: float, epsilon: float) -> Certificate:
        return Certificate("pld", "both", 1.0, epsilon, self._delta(sigma, epsilon))

    def epsilon(self, sigma: float, delta: float) -> Certificate:
        _check_delta(delta)
        epsilon = 1.0
        for _ in range(2):  # the first answer says how finely to compute the second
            composed = _composed(sigma, self.rate, self.steps, _interval(epsilon))
            epsilon = float(composed.get_epsilon_for_delta(delta - ROUND_OFF))
        return Certificate("pld", "both", 1.0, epsilon, delta)

    def sigma(self, epsilon: float, delta: float, *, estimate: bool = False) -> Calibration:
        _check_delta(delta)
        sigma = smallest(lambda s: self._delta(s, epsilon), delta, rtol=2e-5, limits=(0.05, 1e7))
        return Calibration(sigma, Certificate("pld", "both", 1.0, epsilon, delta))

    def quick_sigma(self, epsilon: float, delta: float, *, start: float | None = None) -> float:
        return self.sigma(epsilon, delta).sigma

    def _delta(self, sigma: float, epsilon: float) -> float:
        """An upper bound on δ(ε) of n Gaussian steps, each on a Poisson sample."""
        composed = _composed(sigma, self.rate, self.steps, _interval(epsilon))
        return max(float(composed.get_delta_for_epsilon(epsilon)), 0.0) + ROUND_OFF


def _check_delta(delta: float) -> None:
    """Refuse a δ that round-off could reach."""
    if delta < 100 * ROUND_OFF:
        raise AccountingError(
            f"δ = {delta:g} is too close to floating-point error for PLD accounting; use δ ≥ {100 * ROUND_OFF:g}"
        )


def _interval(epsilon: float) -> float:
    """Width of the cells of the privacy loss: fine enough that rounding adds under 0.1% to δ in the paper's setting."""
    return 1e-4 * min(max(epsilon, 0.1), 8.0)


@lru_cache(maxsize=64)
def _composed(sigma: float, rate: float, steps: int, interval: float):  # type: ignore[no-untyped-def]  # dp-accounting is untyped
    from dp_accounting.pld import privacy_loss_distribution as pld

    one_step = pld.from_gaussian_mechanism(
        standard_deviation=sigma,
        value_discretization_interval=interval,
        sampling_prob=rate,
        pessimistic_estimate=True,
        use_connect_dots=True,
    )
    return one_step.self_compose(steps)
