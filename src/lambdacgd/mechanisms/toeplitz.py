"""Algebra of lower-triangular Toeplitz matrices through their first columns.

Such matrices are power series cut off at degree n: products are convolutions, inverses are reciprocals. Nothing
here builds an n×n matrix.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.signal import fftconvolve, lfilter

Array = NDArray[np.float64]

# A direct recursion costs n·p multiplications and is accurate term by term; beyond this many the FFT takes over.
DIRECT_LIMIT = 1_000_000_000


def series_inverse(column: Array, n: int) -> Array:
    """First n coefficients of 1 / (column_0 + column_1 x + …).

    >>> series_inverse(np.array([1.0, -0.5]), 4)
    array([1.   , 0.5  , 0.25 , 0.125])
    """
    column = np.asarray(column, dtype=np.float64)[:n]
    if len(column) * n <= DIRECT_LIMIT:
        impulse = np.zeros(n)
        impulse[0] = 1.0
        return lfilter([1.0], column, impulse)
    # Newton's iteration y ← y(2 − cy) doubles the number of correct coefficients.
    inverse = np.array([1.0 / column[0]])
    while len(inverse) < n:
        size = min(2 * len(inverse), n)
        residual = -multiply(column[:size], inverse, size)
        residual[0] += 2.0
        inverse = multiply(inverse, residual, size)
    return inverse


def multiply(left: Array, right: Array, n: int) -> Array:
    """First n coefficients of the product of two series."""
    left, right = left[:n], right[:n]
    direct = len(left) * len(right) <= DIRECT_LIMIT
    product = (np.convolve(left, right) if direct else fftconvolve(left, right))[:n]
    return np.pad(product, (0, n - len(product)))


def inverse_pullback(column: Array, inverse: Array, gradient: Array) -> Array:
    """Gradient with respect to ``column`` of a function of ``inverse = series_inverse(column, n)``.

    With T the Toeplitz matrix of ``column``: d(inverse) = −T⁻¹ T(d column) inverse, so the pulled-back gradient is
    −⟨shift_j(inverse), T⁻ᵀ gradient⟩ for each j.
    """
    n, p = len(inverse), len(column)
    if p * n <= DIRECT_LIMIT:
        adjoint = lfilter([1.0], column, gradient[::-1])[::-1]
    else:
        adjoint = multiply(inverse, gradient[::-1], n)[::-1]
    return -fftconvolve(adjoint, inverse[::-1])[n - 1 : n - 1 + p]
