"""The Gaussians of one cycle of bins, as a Markov chain that closes on itself (Lemma 1), and its dominating relatives.

For every bin j the privacy loss needs u_j ∝ ⟨x, m_j⟩ with x ~ N(0, σ²I). Scaled by √((1−λ²)/k)/σ these numbers satisfy
u_j = λ u_{j+1} + ξ_j for j ≤ b−2, and one closing relation p·u_{b−1} − q·u_0 = ζ ties the cycle's end to its start.
Nothing here is approximate; the dominating chains are larger in Kahane's order (Lemma 7).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import log_ndtr, ndtr

from lambdacgd.accounting.base import AccountingError
from lambdacgd.mechanisms.base import Array


@dataclass(frozen=True)
class Chain:
    """u_0 … u_{b−1} with correlation ``lam`` between neighbours, seen over ``epochs`` repetitions of ``bins`` bins.

    The privacy loss of bin j is X_j = √gain·u_j − gain·Var(u_j)/2. ``tail`` says what follows the last step: 1 nothing
    (the true Gram matrix), 0 a stationary continuation (G_ext, which dominates it), values between lie between.
    """

    lam: float
    bins: int
    epochs: int
    gain: float
    tail: float

    @cached_property
    def alpha(self) -> float:
        """Σ_{m≥0} (1 − m/k) λ^{mb}; also the p of the closing relation."""
        return 1.0 + self.gamma * self.lam**self.bins

    @cached_property
    def gamma(self) -> float:
        """(1/k) Σ_{e=1}^{k−1} (1 − λ^{eb})/(1 − λ^b), written as a sum of positive terms."""
        repeats = np.arange(1, self.epochs)
        return float(np.sum((1 - repeats / self.epochs) * self.lam ** ((repeats - 1.0) * self.bins)))

    def covariance(self, distance: ArrayLike) -> Array:
        """Cov(u_i, u_j) of the stationary continuation at |i − j| = ``distance`` (half steps allowed)."""
        d = np.asarray(distance, dtype=float)
        return self.alpha * self.lam**d + self.gamma * self.lam ** (self.bins - d)

    def end_effect(self, position: ArrayLike) -> Array:
        """h(s) with Cov(u_s, u_s') = covariance(|s − s'|) − tail·h(s)·h(s'): what the end of training takes away."""
        if self.lam == 0:
            return np.zeros(np.shape(position))
        log_lam = math.log(self.lam)
        ratio = math.expm1(self.epochs * self.bins * log_lam) / math.expm1(self.bins * log_lam)
        return self.lam ** (self.bins - np.asarray(position, dtype=float)) * (ratio / math.sqrt(self.epochs))

    @cached_property
    def peak_variance(self) -> float:
        """The largest Var(u_j): that of bin 0."""
        return self.peak_covariance(0.0)

    def peak_covariance(self, distance: float) -> float:
        """An upper bound on Cov(u_i, u_j) over all pairs at this distance (h increases along the cycle)."""
        return float(self.covariance(distance) - self.tail * self.end_effect(0.0) ** 2)

    @cached_property
    def log_scales(self) -> Array:
        """log c_j ≥ 0, increasing in j: e^{X_j} = c_j · exp(√gain·u_j − gain·peak_variance/2)."""
        h = self.end_effect(np.arange(self.bins))
        return 0.5 * self.gain * self.tail * (h - h[0]) * (h + h[0])

    @property
    def closing(self) -> tuple[float, float, float]:
        """(p, q, v) of Lemma 1: p·u_{b−1} − q·u_0 ~ N(0, v), independent of the ξ_j. One epoch: p = 1, q = 0."""
        q = self.gamma * self.lam
        h = float(self.end_effect(self.bins - 1.0))
        last = float(self.covariance(0.0)) - self.tail * h * h
        return self.alpha, q, last - q * q * -math.expm1(2 * (self.bins - 1) * math.log(self.lam))

    @cached_property
    def mean_loss(self) -> tuple[float, float]:
        """Mean and variance of (1/b) Σ_j X_j, a Gaussian."""
        h = self.end_effect(np.arange(self.bins))
        diagonal = float(self.covariance(0.0)) - self.tail * float(np.mean(h * h))
        d = np.arange(1, self.bins)
        total = self.bins * float(self.covariance(0.0)) + 2 * float(np.sum((self.bins - d) * self.covariance(d)))
        spread = (total - self.tail * float(h.sum()) ** 2) / self.bins**2
        return -self.gain * diagonal / 2, self.gain * max(spread, 0.0)

    def lumped(self, group: int) -> Chain:
        """Lemma 8: ``group`` neighbouring bins made equal; dominates this chain. The bins must divide evenly."""
        if self.bins % group:
            raise AccountingError(f"{self.bins} bins cannot be lumped in groups of {group}; use a divisor")
        stretch = self.lam ** (group - 1)
        return Chain(self.lam**group, self.bins // group, self.epochs, self.gain / stretch, self.tail * stretch)

    def shortened(self, bins: int) -> Chain:
        """Lemma 9: fewer bins amplify less; dominates this chain (through its stationary continuation)."""
        return self if bins == self.bins else replace(self, bins=bins, tail=0.0)

    def gram(self) -> Array:
        """Cov(X) as a dense matrix, for references and tests."""
        j = np.arange(self.bins)
        h = self.end_effect(j)
        return self.gain * (self.covariance(np.abs(j[:, None] - j[None])) - self.tail * np.outer(h, h))


def plain_chain(lam: float, bins: int, epochs: int, sigma: float) -> Chain:
    """The exact chain of C_λ: gain k/((1−λ²)σ²), nothing after the last step."""
    return Chain(lam, bins, epochs, epochs / ((1 - lam) * (1 + lam) * sigma**2), 1.0)


def normalized_chain(lam: float, bins: int, epochs: int, sigma: float) -> Chain:
    """Dominates C_λD⁻¹: unit columns have inner products at most λ^{|s−s'|} (Lemma 7)."""
    return Chain(lam, bins, epochs, epochs / sigma**2, 0.0)


def gaussian_delta(mean_shift: float, epsilon: float) -> float:
    """δ(ε) of the Gaussian mechanism at sensitivity/σ = ``mean_shift`` (both directions agree)."""
    half = mean_shift / 2
    ratio = epsilon / mean_shift
    upper = log_ndtr(half - ratio)
    return float(np.exp(upper) * -np.expm1(min(0.0, epsilon + log_ndtr(-half - ratio) - upper)))


def jensen_add(mean: float, variance: float, epsilon: float) -> float:
    """Lemma 6: δ_add(ε) ≤ E (1 − e^{ε+N})₊ with N ~ N(mean, variance), because W ≥ exp of the mean loss."""
    if variance <= 0:
        return max(0.0, -math.expm1(epsilon + mean))
    spread = math.sqrt(variance)
    h = -(epsilon + mean) / spread
    upper = float(log_ndtr(h))
    gap = epsilon + mean + variance / 2 + float(log_ndtr(h - spread)) - upper
    # The factor covers the rounding of log Φ where the two terms nearly cancel.
    return float(np.exp(upper) * -np.expm1(min(gap, 0.0))) * (1 + 1e-9) + 1e-15 * float(ndtr(h))
