"""The transfer product in x87 extended precision (64-bit mantissa): slow, and 2000 times more accurate than float64.

It serves two purposes: where a rounding margin of float64 would be too large beside δ (large ε, small δ), and as the
yardstick with which that margin was measured. It uses the same float64 tables and kernels, which define the (slightly
perturbed) measure; only what is computed from them, and cancels, is carried further.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lambdacgd.accounting.transfer_matrix.product import (
    IndependentProduct,
    Rounding,
    TransferProduct,
    power_of_transform,
    squarings,
)

AVAILABLE = bool(np.finfo(np.longdouble).eps < 1e-18)


class ExtendedProduct:
    """E e^{zW'} of a TransferProduct, evaluated in np.longdouble."""

    def __init__(self, product: TransferProduct) -> None:
        self.product = product
        self._grid = product.grid.astype(np.longdouble)

    def __call__(self, z: NDArray[Any], rounding: Rounding) -> NDArray[Any]:
        wide = np.clongdouble if np.iscomplexobj(z) else np.longdouble
        return np.array([self._one(wide(value), rounding) for value in z])

    def _one(self, z: Any, rounding: Rounding) -> Any:
        product = self.product
        first, last = product.ends
        strip = self._matrix(product.right, z, last)
        for stretch in product.plan:
            matrix = self._matrix(product.interior, z, stretch.log_scale(rounding))
            s = squarings(stretch.count, matrix.shape[0], strip.shape[1])
            for bit in range(s):
                if stretch.count >> bit & 1:
                    strip = matrix @ strip
                matrix = matrix @ matrix
            for _ in range(stretch.count >> s):
                strip = matrix @ strip
        return (self._matrix(product.left, z, first).T * strip).sum()

    def _matrix(self, site: Any, z: Any, log_scale: float) -> NDArray[Any]:
        scale = np.longdouble(np.exp(log_scale))
        transform = np.exp(z * (scale * self._grid)) @ site.table.cpu().numpy().astype(np.longdouble)
        size = transform.itemsize
        rows, columns = site.kernel.shape
        view = np.lib.stride_tricks.as_strided(
            transform, (rows, columns), (size * site.strides[0], size * site.strides[1])
        )
        return np.asarray(site.kernel.cpu().numpy() * view)


def extended_transform(
    product: TransferProduct | IndependentProduct, z: NDArray[Any], rounding: Rounding
) -> NDArray[Any]:
    """E e^{zW'} in extended precision."""
    if isinstance(product, TransferProduct):
        return ExtendedProduct(product)(z, rounding)
    wide = np.clongdouble if np.iscomplexobj(z) else np.longdouble
    grid, table = product.grid.astype(np.longdouble), product.table.astype(np.longdouble)
    return power_of_transform(z.astype(wide), grid, table, product.bins)
