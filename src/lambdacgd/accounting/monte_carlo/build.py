"""From a mechanism to its Gram matrix, without ever building an n×n matrix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lambdacgd.accounting.base import AccountingError
from lambdacgd.accounting.monte_carlo.folded_gram import FoldedGram
from lambdacgd.accounting.monte_carlo.gram import DenseGram, Gram
from lambdacgd.accounting.monte_carlo.lambda_gram import LambdaGram
from lambdacgd.mechanisms import LambdaCGD
from lambdacgd.mechanisms.base import Horizon, Mechanism

Array = NDArray[np.float64]

LARGEST_DENSE = 6000  # bins; three b×b matrices of float64 stay below 1 GB
CLOSEST_TO_ONE = 1e-6  # 1 − λ below which the closed form's difference of two large numbers loses digits


def gram_of(mechanism: Mechanism, horizon: Horizon) -> Gram:
    """The Gram matrix of a mechanism: closed form and O(b) sampling for λCGD, sums of positive terms for the rest.

    ``mechanism`` must be resolved. A strategy with negative entries is refused: the dominating pair of
    Balls-in-Bins is proven for C ≥ 0 only.
    """
    n = horizon.steps
    scales = mechanism.column_scales(n)
    if type(mechanism) is LambdaCGD and scales is None and 1.0 - mechanism.resolved_lam >= CLOSEST_TO_ONE:
        return LambdaGram(mechanism.resolved_lam, horizon)
    column = np.asarray(mechanism.strategy(n), dtype=np.float64)
    require_nonnegative(column)
    if horizon.steps_per_epoch > LARGEST_DENSE:
        return FoldedGram(column, np.asarray(mechanism.noising(n)), scales, horizon)
    return DenseGram(toeplitz_gram(column, horizon) if scales is None else scaled_gram(column, scales, horizon))


def require_nonnegative(entries: Array) -> None:
    if not np.isfinite(entries).all():
        raise AccountingError("C has entries that are not finite numbers")
    if (lowest := float(entries.min())) < 0:
        raise AccountingError(
            f"C has negative entries (the lowest is {lowest:.3g}); Balls-in-Bins accounting is proven for C ≥ 0 only. "
            "Choose another mechanism or number of bands, or cyclic sampling (no amplification)"
        )


def gram_of_matrix(strategy: Array, horizon: Horizon) -> DenseGram:
    """The Gram matrix of a dense strategy C (n×n, lower-triangular, non-negative)."""
    strategy = np.asarray(strategy, dtype=np.float64)
    n = horizon.steps
    if strategy.shape != (n, n):
        raise AccountingError(
            f"C has shape {strategy.shape}, but the horizon is k·b = {horizon.epochs}·{horizon.steps_per_epoch} = {n} "
            f"steps; C must be {n}×{n}"
        )
    require_nonnegative(strategy)
    if np.triu(strategy, 1).any():
        raise AccountingError("C has entries above its diagonal; a mechanism that runs in time is lower-triangular")
    centres = strategy.reshape(n, horizon.epochs, horizon.steps_per_epoch).sum(axis=1)
    return DenseGram(centres.T @ centres)


def toeplitz_gram(column: Array, horizon: Horizon) -> Array:
    """G for Toeplitz C without C: m_j is m_0 moved down by j, so G_ij − G_{i+1,j+1} = m_0[n−1−i]·m_0[n−1−j]."""
    n, b = horizon.steps, horizon.steps_per_epoch
    centre = folded_centre(column, horizon)
    tail = centre[n - b :][::-1]  # m_0[n−1−i], i = 0 … b−1
    gram = np.outer(tail, tail)
    last = centre[: n - b + 1]
    gram[:, -1] = [float(centre[b - 1 - i : n - i] @ last) for i in range(b)]
    gram[-1, :] = gram[:, -1]
    for i in range(b - 2, -1, -1):  # all terms are ≥ 0: nothing cancels
        gram[i, :-1] += gram[i + 1, 1:]
    return np.triu(gram) + np.triu(gram, 1).T


def folded_centre(column: Array, horizon: Horizon) -> Array:
    """m_0 = Σ_e C[:, eb] for Toeplitz C with first column ``column``."""
    n, b = horizon.steps, horizon.steps_per_epoch
    centre = np.zeros(n)
    for epoch in range(horizon.epochs):
        centre[epoch * b :] += column[: n - epoch * b]
    return centre


def scaled_gram(column: Array, scales: Array, horizon: Horizon) -> Array:
    """G for C = T·D⁻¹, accumulated over blocks of rows of M so that no n×n matrix is built."""
    n, b, k = horizon.steps, horizon.steps_per_epoch, horizon.epochs
    padded = np.concatenate([np.zeros(n), column])  # padded[n + i − s] = T[i, s]
    gram = np.zeros((b, b))
    weights = 1.0 / np.asarray(scales, dtype=np.float64)
    block = max(1, 4_000_000 // b)
    for top in range(0, n, block):
        rows = np.arange(top, min(top + block, n))
        centres = np.zeros((len(rows), b))
        for epoch in range(k):
            steps = epoch * b + np.arange(b)
            centres += padded[n + rows[:, None] - steps[None, :]] * weights[steps]
        gram += centres.T @ centres
    return gram
