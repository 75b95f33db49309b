"""Any mechanism with too many bins for a dense Gram matrix: every sample is drawn in n numbers and folded to b."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.signal import fftconvolve, lfilter

from lambdacgd.mechanisms.base import Horizon

Array = NDArray[np.float64]
Index = NDArray[np.intp]

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
        found = np.empty(len(starts))
        inside = (starts + length <= self.size) & self._toeplitz
        if inside.any():
            # The window that starts at s is the first window moved down by s, and cut off at n.
            first = self._spread(np.zeros(1, dtype=np.intp), length)[0]
            energy = np.concatenate([[0.0], np.cumsum(first**2)])
            found[inside] = energy[self._horizon.steps - starts[inside]]
        rest = np.flatnonzero(~inside)
        step = max(1, 4_000_000 // self._horizon.steps)
        for at in range(0, len(rest), step):
            part = rest[at : at + step]
            found[part] = (self._spread(starts[part], length) ** 2).sum(axis=1)
        return found

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
