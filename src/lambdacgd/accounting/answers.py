"""Who answers for a mechanism under a sampling. One door; what is behind it may change."""

from __future__ import annotations

from dataclasses import dataclass

from lambdacgd.accounting.base import Calibration, Certificate
from lambdacgd.accounting.calibration import calibrate_noise
from lambdacgd.accounting.spending import certify_noise
from lambdacgd.mechanisms import Mechanism
from lambdacgd.sampling import Sampling


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


def accountant_for(mechanism: Mechanism, sampling: Sampling) -> Accountant:
    """The accountant of this pair; a pair without a proof is refused."""
    return Accountant(mechanism, sampling)
