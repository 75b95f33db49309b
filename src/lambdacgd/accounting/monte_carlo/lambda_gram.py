"""The Gram matrix of DP-λCGD in closed form, sampled in O(b)."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy.signal import lfilter

from lambdacgd.accounting.monte_carlo.gram import window_sums
from lambdacgd.mechanisms.base import Horizon

Array = NDArray[np.float64]
Index = NDArray[np.intp]


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
