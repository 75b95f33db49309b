"""The Gram matrix of a mechanism under Balls-in-Bins: all that its accounting depends on.

An example in bin j adds m_j = Σ_{e<k} C[:, j+eb] to the (whitened) output. Only the b inner products
G_ij = ⟨m_i, m_j⟩ matter: instead of n numbers one samples u = Mᵀx ~ N(0, G), b of them. No n×n matrix is ever built.

Three forms sample it: ``LambdaGram`` (DP-λCGD, in closed form, O(b) a sample), ``DenseGram`` (any mechanism, by its
Cholesky factor) and ``FoldedGram`` (too many bins for that: n numbers are drawn and folded to b).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy.signal import fftconvolve, lfilter

from lambdacgd.accounting.certificate import Array
from lambdacgd.errors import AccountingError
from lambdacgd.mechanisms import Horizon, LambdaCGD, Mechanism
from lambdacgd.mechanisms.error import participation_sum

Index = NDArray[np.intp]

_ROUNDING = 2.0**-40  # relative; far above the rounding of the sums and the factorisation below


class Gram(Protocol):
    """What the sampler asks of G. A *window* is a run of bins ``start … start+length−1``, taken cyclically."""

    @property
    def diagonal(self) -> Array:
        """G_jj."""

    def sample(self, rng: np.random.Generator, count: int) -> Array:
        """``count`` draws of N(0, G), one per row."""

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


class LambdaGram:
    """G_ij = ((k+S)λ^d + Sλ^{−d})/(1−λ²) − h_i h_j with d = |i−j|, cyclic corner included.

    From ⟨C_s, C_t⟩ = (λ^{|s−t|} − λ^{2n−s−t})/(1−λ²), summed over all pairs of epochs: S = Σ_{r=1}^{k−1}(k−r)λ^{rb}
    collects the pairs r epochs apart (Sλ^{−d} is the cyclic corner), and h_i = Σ_e λ^{n−i−eb}/√(1−λ²) is what the
    end of training cuts off.

    Sampling: with unit-variance scaling, u_j = λu_{j+1} + ξ_j for j ≤ b−2 and u_{b−1} = η + γλ Σ_j λ^jξ_j, with ξ
    and η independent. γ = (1/k) Σ_{e=1}^{k−1}(1−λ^{eb})/(1−λ^b) is the covariance of the last bin with the first
    bin's *next* turn; η fills up the variance of u_{b−1}.
    """

    def __init__(self, lam: float, horizon: Horizon) -> None:
        b, k, n = horizon.steps_per_epoch, horizon.epochs, horizon.steps
        self.size, self._lam = b, lam
        energy = 1.0 / (1.0 - lam**2)
        apart = np.arange(1, k)
        powers = lam ** (b * (apart - 1.0))  # λ^{(r−1)b}; the missing λ^b joins λ^{−d} below, which cannot overflow
        corner = float(((k - apart) * powers).sum())
        distance = np.arange(b, dtype=np.float64)
        stationary = energy * ((k + corner * lam**b) * lam**distance + corner * lam ** (b - distance))
        epochs = np.arange(k)[:, None]
        self._cut = np.sqrt(energy) * (lam ** (n - np.arange(b)[None, :] - epochs * float(b))).sum(axis=0)
        # _both[m] = Σ of the stationary part over lags −(b−1) … −(b−1)+m−1, for sums over windows
        self._both = np.concatenate([[0.0], np.cumsum(np.concatenate([stationary[:0:-1], stationary]))])
        self._stationary = stationary
        self._cut_sums = np.concatenate([[0.0], np.cumsum(self._cut)])

        gamma = float((1.0 - lam ** (b * apart.astype(np.float64))).sum() / (k * (1.0 - lam**b))) if k > 1 else 0.0
        self._unit = np.sqrt(k * energy)
        last = self.diagonal[-1] / (k * energy)
        self._closing = gamma * lam * lam ** np.arange(b - 1, dtype=np.float64)
        self._closing_deviation = np.sqrt(max(last - (1.0 - lam**2) * float(self._closing @ self._closing), 0.0))

    @property
    def diagonal(self) -> Array:
        return self._stationary[0] - self._cut**2

    def sample(self, rng: np.random.Generator, count: int) -> Array:
        noise = rng.standard_normal((count, self.size))  # column 0 is η, the rest ξ_{b−2} … ξ_0: the filter's order
        noise[:, 1:] *= np.sqrt(1.0 - self._lam**2)
        noise[:, 0] *= self._closing_deviation
        noise[:, 0] += noise[:, 1:] @ self._closing[::-1]
        walk = lfilter([1.0], [1.0, -self._lam], noise, axis=1)
        walk *= self._unit
        return walk[:, ::-1]

    def rows(self, starts: Index, length: int) -> Array:
        b = self.size
        shifted = sliding_window_view(self._both, b)  # shifted[b−x][i] = _both[i−x+b]: lags up to i−x
        ends = starts + length
        wrapped = ends > b
        sums = shifted[b - starts] - shifted[b - np.where(wrapped, ends - b, ends)]
        if wrapped.any():
            sums[wrapped] += shifted[b] - shifted[0]
        sums /= length
        return sums - self._cut_mean(starts, length)[:, None] * self._cut[None, :]

    def variances(self, starts: Index, length: int) -> Array:
        b = self.size
        partial = np.concatenate([[0.0], np.cumsum(self._stationary)])  # Σ_{d<m}
        double = np.concatenate([[0.0], np.cumsum(partial[1:])])  # Σ_{i<m} Σ_{d≤i}
        inside = np.minimum(b - starts, length)  # before the wrap
        beyond = length - inside

        def block(size: Index) -> Array:
            return 2.0 * double[size] - size * self._stationary[0]

        across = double[b] - double[b - inside] - double[b - beyond] + double[b - inside - beyond]
        total = block(inside) + block(beyond) + 2.0 * np.where(beyond > 0, across, 0.0)
        return total / length**2 - self._cut_mean(starts, length) ** 2

    def mean_variance(self) -> float:
        return float(self.variances(np.zeros(1, dtype=np.intp), self.size)[0])

    def _cut_mean(self, starts: Index, length: int) -> Array:
        return window_sums(self._cut_sums[None, :], starts, length, axis=1)[0] / length


_SHORT = 64  # bands up to which a recursive filter beats the fast Fourier transform


class FoldedGram:
    """G = MᵀM through the products Mx and Mᵀx of C = T·D⁻¹: O(n) (or O(n log n)) a sample, no b×b matrix."""

    def __init__(self, column: Array, noising: Array, scales: Array | None, horizon: Horizon) -> None:
        self._column, self._noising, self._horizon = column, noising, horizon
        self._weights = np.ones(horizon.steps) if scales is None else 1.0 / np.asarray(scales, dtype=np.float64)
        self._toeplitz = scales is None
        self.size = horizon.steps_per_epoch
        self._diagonal = self.variances(np.arange(self.size), 1)

    @property
    def diagonal(self) -> Array:
        return self._diagonal

    def sample(self, rng: np.random.Generator, count: int) -> Array:
        return self._fold(rng.standard_normal((count, self._horizon.steps)))

    def rows(self, starts: Index, length: int) -> Array:
        return self._fold(self._spread(starts, length))

    def variances(self, starts: Index, length: int) -> Array:
        variances = np.empty(len(starts))
        inside = (starts + length <= self.size) & self._toeplitz
        if inside.any():
            # The window that starts at s is the first window moved down by s, and cut off at n.
            first = self._spread(np.zeros(1, dtype=np.intp), length)[0]
            energy = np.concatenate([[0.0], np.cumsum(first**2)])
            variances[inside] = energy[self._horizon.steps - starts[inside]]
        rest = np.flatnonzero(~inside)
        step = max(1, 4_000_000 // self._horizon.steps)
        for at in range(0, len(rest), step):
            part = rest[at : at + step]
            variances[part] = (self._spread(starts[part], length) ** 2).sum(axis=1)
        return variances

    def mean_variance(self) -> float:
        return float(self.variances(np.zeros(1, dtype=np.intp), self.size)[0])

    def _spread(self, starts: Index, length: int) -> Array:
        """M a for the uniform weights a on each window."""
        b = self.size
        inputs = np.zeros((len(starts), self._horizon.epochs, b))
        bins = (starts[:, None] + np.arange(length)[None, :]) % b
        inputs[np.arange(len(starts))[:, None], :, bins] = 1.0 / length
        return self._filter(inputs.reshape(len(starts), -1) * self._weights)

    def _fold(self, outputs: Array) -> Array:
        """Mᵀ x for each row x."""
        steps = self._filter(outputs[:, ::-1])[:, ::-1] * self._weights
        return steps.reshape(len(outputs), self._horizon.epochs, self.size).sum(axis=1)

    def _filter(self, rows: Array) -> Array:
        if len(self._noising) <= _SHORT:
            return lfilter([1.0], self._noising, rows, axis=1)
        return fftconvolve(rows, self._column[None, :], axes=1)[:, : self._horizon.steps]


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


def toeplitz_gram(column: Array, horizon: Horizon) -> Array:
    """G for Toeplitz C without C: m_j is m_0 moved down by j, so G_ij − G_{i+1,j+1} = m_0[n−1−i]·m_0[n−1−j]."""
    n, b = horizon.steps, horizon.steps_per_epoch
    centre = participation_sum(column, horizon)
    tail = centre[n - b :][::-1]  # m_0[n−1−i], i = 0 … b−1
    gram = np.outer(tail, tail)
    last = centre[: n - b + 1]
    gram[:, -1] = [float(centre[b - 1 - i : n - i] @ last) for i in range(b)]
    gram[-1, :] = gram[:, -1]
    for i in range(b - 2, -1, -1):  # all terms are ≥ 0: nothing cancels
        gram[i, :-1] += gram[i + 1, 1:]
    return np.triu(gram) + np.triu(gram, 1).T


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
