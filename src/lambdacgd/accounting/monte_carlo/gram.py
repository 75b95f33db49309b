"""The Gram matrix of a mechanism under Balls-in-Bins: all that its accounting depends on.

An example in bin j adds m_j = Σ_{e<k} C[:, j+eb] to the (whitened) output. Only the b inner products
G_ij = ⟨m_i, m_j⟩ matter: instead of n numbers one samples u = Mᵀx ~ N(0, G), b of them.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lambdacgd.accounting.base import AccountingError

Array = NDArray[np.float64]
Index = NDArray[np.intp]

_ROUNDING = 2.0**-40  # relative; far above the rounding of the sums and the factorisation below


class Gram(Protocol):
    """What the sampler asks of G. A *window* is a run of bins ``start … start+length−1``, taken cyclically."""

    @property
    def diagonal(self) -> Array:
        """G_jj."""

    def sample(self, rng: np.random.Generator, count: int) -> Array:
        """``count`` draws of N(0, G), one a row."""

    def rows(self, starts: Index, length: int) -> Array:
        """Mean of the rows of G in each window: the covariance of every u_i with the window's mean."""

    def variances(self, starts: Index, length: int) -> Array:
        """Variance of the mean of u over each window."""

    def mean_variance(self) -> float:
        """Variance of the mean of all b numbers."""


class DenseGram:
    """Any Gram matrix, by its Cholesky factor: b² memory and b² operations a sample.

    *Guarantee.* The matrix used is G + τ(11ᵀ + I) with τ = 2⁻⁴⁰·max G, which exceeds the true one in every entry
    in spite of rounding; by Kahane's inequality δ can only grow by it. It also makes the factorisation succeed
    where G is singular (identical bins).
    """

    def __init__(self, matrix: Array) -> None:
        matrix = np.asarray(matrix, dtype=np.float64)
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not np.isfinite(matrix).all():
            raise AccountingError(f"a Gram matrix is square and finite; this one has shape {matrix.shape}")
        if not np.allclose(matrix, matrix.T, rtol=1e-9, atol=0) or (matrix < 0).any() or (np.diag(matrix) <= 0).any():
            raise AccountingError("a Gram matrix of C ≥ 0 is symmetric, non-negative and positive on its diagonal")
        excess = _ROUNDING * matrix.max()
        self.matrix = matrix + excess
        self.matrix[np.diag_indices_from(self.matrix)] += excess
        try:
            self.factor_t = np.ascontiguousarray(np.linalg.cholesky(self.matrix).T)
        except np.linalg.LinAlgError as error:
            raise AccountingError("the matrix is not positive semi-definite, so it is no Gram matrix") from error
        self._sums = np.vstack([np.zeros(len(matrix)), np.cumsum(self.matrix, axis=0)])

    @property
    def diagonal(self) -> Array:
        return np.diag(self.matrix).copy()

    def sample(self, rng: np.random.Generator, count: int) -> Array:
        return rng.standard_normal((count, len(self.matrix))) @ self.factor_t

    def rows(self, starts: Index, length: int) -> Array:
        if length == 1:
            return self.matrix[starts]
        return window_sums(self._sums, starts, length, axis=0) / length

    def variances(self, starts: Index, length: int) -> Array:
        if length == 1:
            return self.diagonal[starts]
        columns = np.zeros((len(starts), len(self.matrix) + 1))
        np.cumsum(self.rows(starts, length), axis=1, out=columns[:, 1:])
        size, ends = len(self.matrix), starts + length
        here = np.arange(len(starts))
        wrapped = ends > size
        total = columns[here, np.where(wrapped, ends - size, ends)] - columns[here, starts]
        return (total + np.where(wrapped, columns[:, -1], 0.0)) / length

    def mean_variance(self) -> float:
        return float(self.matrix.mean())


def window_sums(cumulative: Array, starts: Index, length: int, *, axis: int) -> Array:
    """Sums over cyclic windows from cumulative sums (a leading zero, then size partial sums) along ``axis``."""
    size = cumulative.shape[axis] - 1
    ends = starts + length
    wrapped = ends > size
    sums = cumulative.take(np.where(wrapped, ends - size, ends), axis=axis)
    sums -= cumulative.take(starts, axis=axis)
    if wrapped.any():
        total = cumulative.take([size], axis=axis)
        if axis == 0:
            sums[wrapped] += total
        else:
            sums[:, wrapped] += total
    return sums
