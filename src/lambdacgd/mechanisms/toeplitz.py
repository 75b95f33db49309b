"""Algebra of lower-triangular Toeplitz matrices through their first columns.

Such matrices are power series cut off at degree n: products are convolutions, inverses are reciprocals. Nothing
here builds an n×n matrix.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.signal import fftconvolve, lfilter

Array = NDArray[np.float64]


def series_inverse(column: Array, n: int) -> Array:
    """First n coefficients of 1 / (column_0 + column_1 x + …)."""
    column = np.asarray(column, dtype=np.float64)[:n]
    impulse = np.zeros(n)
    impulse[0] = 1.0
    if len(column) <= 256:
        return lfilter([1.0], column, impulse)
    # Newton's iteration y ← y(2 − cy) doubles the number of correct coefficients: n log n for dense columns.
    inverse = np.array([1.0 / column[0]])
    while len(inverse) < n:
        size = min(2 * len(inverse), n)
        residual = -multiply(column[:size], inverse, size)
        residual[0] += 2.0
        inverse = multiply(inverse, residual, size)
    return inverse


def multiply(left: Array, right: Array, n: int) -> Array:
    """First n coefficients of the product of two series."""
    product = fftconvolve(left, right)[:n] if min(len(left), len(right)) > 64 else np.convolve(left, right)[:n]
    return np.pad(product, (0, n - len(product)))


def inverse_pullback(column: Array, inverse: Array, gradient: Array) -> Array:
    """Gradient with respect to ``column`` of a function of ``inverse = series_inverse(column, n)``.

    From c·a = 1: da = −a·a·dc, so the pulled-back gradient is −Tᵀ(a·a) g, cut to the length of ``column``.
    """
    n = len(inverse)
    square = multiply(inverse, inverse, n)
    correlation = fftconvolve(gradient, square[::-1])[n - 1 :]
    return -correlation[: len(column)]
