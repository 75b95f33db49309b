"""The Gaussian mechanism, exactly (Balle & Wang 2018): no amplification, any mechanism of known sensitivity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import erfcx, log_ndtr, ndtr

from lambdacgd.accounting.certificate import Bound
from lambdacgd.accounting.root import smallest
from lambdacgd.errors import number
from lambdacgd.mechanisms import Horizon, Mechanism, Sensitivity, sensitivity

_ROOT_HALF = math.sqrt(0.5)
_ROOT_HALF_PI = math.sqrt(math.pi / 2)


def gaussian_delta(epsilon: float, sigma: float) -> float:
    """The smallest δ for which N(0, σ²) noise on a sum of sensitivity 1 is (ε, δ)-DP; both directions agree.

    δ = Φ(a) − e^ε Φ(a − 1/σ) with a = 1/(2σ) − εσ. The two terms nearly cancel when δ is small; written with the
    Mills ratio M(x) = Φ(−x)/φ(x) they share the factor φ(a), because φ(a) = e^ε φ(a − 1/σ).

    Args:
        epsilon: ε.
        sigma: σ over the sensitivity.

    Returns:
        δ, accurate to about nine digits however small it is.
    """
    if sigma == 0.0:
        return 1.0
    near = epsilon * sigma - 0.5 / sigma
    far = epsilon * sigma + 0.5 / sigma
    if near < 0:  # δ is large and nothing cancels
        return float(math.exp(log_ndtr(-near)) - math.exp(epsilon + log_ndtr(-far)))
    mills = _ROOT_HALF_PI * (erfcx(near * _ROOT_HALF) - erfcx(far * _ROOT_HALF))
    return float(math.exp(-0.5 * near * near) / math.sqrt(2 * math.pi) * mills)


def gaussian_sigma(epsilon: float, delta: float) -> float:
    """The smallest σ at sensitivity 1.

    >>> round(gaussian_sigma(8.0, 1e-5), 5)
    0.60023
    """
    epsilon = number("epsilon", epsilon, above=0)
    delta = number("delta", delta, above=0, below=1)
    return smallest(lambda sigma: gaussian_delta(epsilon, sigma), delta, rtol=1e-13)


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """The smallest ε ≥ 0 at sensitivity 1."""
    sigma = number("sigma", sigma, above=0)
    delta = number("delta", delta, above=0, below=1)
    if gaussian_delta(0.0, sigma) <= delta:
        return 0.0
    return smallest(lambda epsilon: gaussian_delta(epsilon, sigma), delta, rtol=1e-13)


def one_bin_delta(epsilon: float, deviation: float) -> float:
    """δ(ε) of a single bin whose privacy loss has this standard deviation: δ without amplification.

    It is ``gaussian_delta(epsilon, 1 / deviation)`` computed from logarithms of tails, to about 1e-11 of δ. The exact
    accountant begins its searches here, and its σ stay what they were to the bit only with this formula.
    """
    half, ratio = deviation / 2, epsilon / deviation
    return _tail_difference(half - ratio, -half - ratio, epsilon)


def jensen_add(mean: float, variance: float, epsilon: float) -> float:
    """A bound on δ_add(ε) without sampling or lattice (Lemma 6 of docs/exact-accountant.md).

    By Jensen, W ≥ exp of the mean loss N over all bins, one Gaussian. So δ_add(ε) ≤ E (1 − e^{ε+N})₊.

    Args:
        mean: of N.
        variance: of N.
        epsilon: ε.
    """
    if variance <= 0:
        return max(0.0, -math.expm1(epsilon + mean))
    spread = math.sqrt(variance)
    h = -(epsilon + mean) / spread
    # The terms nearly cancel where the spread is small: what rounding does to both log Φ is relative to Φ(h), not to δ.
    rounding = 1e-15 * (1 - float(log_ndtr(h))) * float(ndtr(h))
    return _tail_difference(h, h - spread, epsilon + mean + variance / 2) * (1 + 1e-9) + rounding


def _tail_difference(near: float, far: float, log_factor: float) -> float:
    """Φ(near) − e^log_factor·Φ(far), from logarithms."""
    upper = log_ndtr(near)
    return float(np.exp(upper) * -np.expm1(min(0.0, log_factor + log_ndtr(far) - upper)))


METHOD = "analytic"


@dataclass(frozen=True)
class Unamplified:
    """Accountant of any mechanism whose examples take part in a fixed order: σ = sens(C)·σ_{ε,δ}.

    Args:
        mechanism: resolved, for the whole run or, if noise restarts, for one epoch.
        horizon: b and k.
        restart_every: b, if the noise restarts every epoch.

    Guarantee
    ---------
    (ε, δ)-DP under zero-out of one example, in both directions, for any order of the data and any adaptive choice of
    gradients: C·G + σZ is a Gaussian mechanism of sensitivity sens(C) (Denisov et al. 2022), and G + σC⁻¹Z is a
    function of it. Nothing is estimated.
    """

    mechanism: Mechanism
    horizon: Horizon
    restart_every: int | None = None

    def delta(self, sigma: float, epsilon: float) -> Bound:
        return self._bound(sigma, epsilon, gaussian_delta(epsilon, sigma / self._sensitivity.value))

    def epsilon(self, sigma: float, delta: float) -> Bound:
        return self._bound(sigma, gaussian_epsilon(sigma / self._sensitivity.value, delta), delta)

    def sigma(self, epsilon: float, delta: float) -> Bound:
        return self._bound(self.quick_sigma(epsilon, delta), epsilon, delta)

    def quick_sigma(self, epsilon: float, delta: float, *, start: float | None = None) -> float:
        return self._sensitivity.value * gaussian_sigma(epsilon, delta)

    @cached_property
    def _sensitivity(self) -> Sensitivity:
        return sensitivity(self.mechanism, self.horizon, restart_every=self.restart_every)

    def _bound(self, sigma: float, epsilon: float, delta: float) -> Bound:
        known = self._sensitivity
        said = {"sensitivity_is": "exact" if known.exact else "upper bound", "because": known.because}
        return Bound(sigma, epsilon, delta, delta, METHOD, details=said)
