"""A certificate for any mechanism with C ≥ 0: a λCGD chain whose Gram matrix lies above the mechanism's.

δ grows with every entry of the Gram matrix G of one epoch (Kahane's inequality, Lemma 7 of docs/exact-accountant.md).
If G_ij ≤ α·λ^{|i−j|}, then one epoch at noise σ is dominated by the stationary chain of correlation λ at noise σ/√α,
which the exact accountant composes: deterministic, but larger than need be by what the two matrices differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lambdacgd.accounting.base import AccountingError
from lambdacgd.accounting.fresh_bins.accountant import ComposedBound, FreshBins
from lambdacgd.accounting.gaussian import gaussian_sigma
from lambdacgd.accounting.monte_carlo.build import LARGEST_DENSE, require_nonnegative, scaled_gram
from lambdacgd.mechanisms.base import Horizon, Mechanism

Array = NDArray[np.float64]

MOST_STEPS = 100_000
_LAMBDAS = 1.0 - np.geomspace(1.0, 0.003, 60)
_SAFETY = 1.0 + 1e-9
"""for the rounding of sums of non-negative terms in G"""


def largest_by_distance(mechanism: Mechanism, steps: int) -> Array:
    """max over |i − j| = d of ⟨C[:, i], C[:, j]⟩, for d = 0 … b−1."""
    column = np.asarray(mechanism.strategy(steps), dtype=np.float64)
    require_nonnegative(column)
    scales = mechanism.column_scales(steps)
    if steps > (MOST_STEPS if scales is None else LARGEST_DENSE):
        raise AccountingError(f"{steps} steps an epoch are too many to certify {mechanism.name} with fresh bins")
    if scales is None:
        # For Toeplitz C ≥ 0 the earliest pair of columns at each distance has the largest inner product: none cut off.
        return np.correlate(column, column, mode="full")[steps - 1 :]
    gram = scaled_gram(column, np.asarray(scales, dtype=np.float64), Horizon(steps, 1))
    return np.array([np.diagonal(gram, distance).max() for distance in range(steps)])


@dataclass(frozen=True)
class Dominating:
    """The chain ``accountant`` at noise σ/``norm`` dominates the mechanism at noise σ."""

    accountant: FreshBins
    norm: float

    def sigma(self, epsilon: float, delta: float) -> tuple[float, ComposedBound]:
        found, bound = self.accountant.sigma(epsilon, delta)
        return found * self.norm, bound


def dominating(mechanism: Mechanism, horizon: Horizon, *, epsilon: float, delta: float) -> Dominating:
    """The chain that should need the least noise for (ε, δ), judged by E W² after all epochs.

    Guarantee
    ---------
    Whatever λ is chosen, α is such that α·λ^d is at least every inner product of two columns at distance d.
    """
    b = horizon.steps_per_epoch
    inner = largest_by_distance(mechanism, b) * _SAFETY
    distance = np.arange(b)
    pairs = np.concatenate([[1 / b], 2 * (b - distance[1:]) / b**2])
    budget = gaussian_sigma(epsilon, delta) ** -2 / horizon.epochs
    best: tuple[float, float, float] | None = None
    for lam in _LAMBDAS:
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            powers = np.power(lam, distance)
            needed = np.where(inner > 0, inner / powers, 0.0)
        alpha = float(needed.max())
        if math.isfinite(alpha):
            sigma = _matching(alpha * powers, pairs, budget)
            if best is None or sigma < best[0]:
                best = (sigma, float(lam), alpha)
    if best is None:
        raise AccountingError(f"no chain dominates {mechanism.name} over {b} steps an epoch; use bins='fixed'")
    return Dominating(FreshBins(best[1], b, horizon.epochs, normalized=True), math.sqrt(best[2] * _SAFETY))


def _matching(gram: Array, pairs: Array, budget: float) -> float:
    """σ with log E W² = ``budget``."""
    low, high = math.log(math.sqrt(gram[0] / 600)), math.log(math.sqrt(gram[0] / min(budget, 1.0))) + 1.0
    for _ in range(50):
        middle = 0.5 * (low + high)
        moment = float(pairs @ np.exp(gram * math.exp(-2 * middle)))
        low, high = (middle, high) if math.log(moment) > budget else (low, middle)
    return math.exp(high)
