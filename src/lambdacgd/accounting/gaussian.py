"""The Gaussian mechanism, exactly (Balle & Wang 2018): no amplification, any mechanism of known sensitivity."""

from __future__ import annotations

import math

from scipy.special import erfcx, log_ndtr

from lambdacgd.accounting.base import Calibration, Certificate, calibrate
from lambdacgd.mechanisms import Horizon, Mechanism, sensitivity
from lambdacgd.validation import number

_ROOT_HALF = math.sqrt(0.5)
_ROOT_HALF_PI = math.sqrt(math.pi / 2)


def gaussian_delta(epsilon: float, sigma: float) -> float:
    """Smallest δ for which N(0, σ²) noise on a sum of sensitivity 1 is (ε, δ)-DP.

    δ = Φ(a) − e^ε Φ(a − 1/σ) with a = 1/(2σ) − εσ. The two terms nearly cancel when δ is small; written with the
    Mills ratio M(x) = Φ(−x)/φ(x) they share the factor φ(a), because φ(a) = e^ε φ(a − 1/σ).
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
    """Smallest σ at sensitivity 1.

    >>> round(gaussian_sigma(8.0, 1e-5), 5)
    0.60023
    """
    epsilon = number("epsilon", epsilon, above=0)
    delta = number("delta", delta, above=0, below=1)
    return calibrate(lambda sigma: gaussian_delta(epsilon, sigma), delta, rtol=1e-13)


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """Smallest ε ≥ 0 at sensitivity 1."""
    sigma = number("sigma", sigma, above=0)
    delta = number("delta", delta, above=0, below=1)
    if gaussian_delta(0.0, sigma) <= delta:
        return 0.0
    return calibrate(lambda epsilon: gaussian_delta(epsilon, sigma), delta, rtol=1e-13)


def without_amplification(mechanism: Mechanism, horizon: Horizon, *, epsilon: float, delta: float) -> Calibration:
    """σ = sens(C)·σ_{ε,δ} for exactly cyclic participation.

    Guarantee
    ---------
    (ε, δ)-DP under zero-out of one example, in both directions, for any order of the data and any adaptive choice of
    gradients: C·G + σZ is a Gaussian mechanism of sensitivity sens(C) (Denisov et al. 2022), and G + σC⁻¹Z is a
    function of it. Nothing is estimated.
    """
    known = sensitivity(mechanism, horizon)
    details = {"sensitivity_is": "exact" if known.exact else "upper bound", "because": known.because}
    sigma = known.value * gaussian_sigma(epsilon, delta)
    return Calibration(sigma, Certificate("analytic", "both", 1.0, epsilon, delta, details=details))
