"""Who answers for a mechanism under a sampling. One door; what is behind it may change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lambdacgd.accounting.balls_in_bins import exact_accountant
from lambdacgd.accounting.base import Calibration, Certificate
from lambdacgd.accounting.calibration import calibrate_noise, cross_check
from lambdacgd.accounting.fresh_bins import exact_accountant as composed_accountant
from lambdacgd.accounting.spending import certify_noise
from lambdacgd.mechanisms import Mechanism
from lambdacgd.sampling import BallsInBins, Sampling


@dataclass(frozen=True)
class Accountant:
    """Answers for one mechanism, resolved, under one sampling."""

    mechanism: Mechanism
    sampling: Sampling

    def sigma(self, epsilon: float, delta: float, *, estimate: bool = False) -> Calibration:
        """The smallest σ that is certified for (ε, δ), with its certificate."""
        return calibrate_noise(self.mechanism, self.sampling, epsilon=epsilon, delta=delta, estimate=estimate)

    def epsilon(self, sigma: float, delta: float) -> Certificate:
        """The smallest ε that is certified for σ and δ."""
        return certify_noise(self.mechanism, self.sampling, sigma=sigma, delta=delta)

    def cross_check(self, sigma: float, epsilon: float) -> dict[str, float]:
        """δ(ε) at this σ by Monte Carlo, which shares no code with the exact accountant, with its standard error."""
        return cross_check(self.mechanism, self.sampling, sigma=sigma, epsilon=epsilon)

    def curve(self, sigma: float, epsilons: Sequence[float], delta: float) -> list[tuple[float, float]]:
        """(ε, δ) at this σ where they are computed exactly, fine down to about ``delta``; nothing elsewhere."""
        if not isinstance(self.sampling, BallsInBins):
            return []
        horizon = self.sampling.horizon
        if self.sampling.restart_every is not None and horizon.epochs > 1:
            composed = composed_accountant(self.mechanism, horizon)
            bounds = [] if composed is None else composed.curve(sigma, list(epsilons), delta=delta)
            return [(bound.epsilon, bound.delta) for bound in bounds]
        fixed = exact_accountant(self.mechanism, horizon)
        return [] if fixed is None else [(b.epsilon, b.delta) for b in fixed.curve(sigma, list(epsilons))]


def accountant_for(mechanism: Mechanism, sampling: Sampling) -> Accountant:
    """The accountant of this pair; a pair without a proof is refused."""
    return Accountant(mechanism, sampling)
