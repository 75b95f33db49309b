"""E e^{zW} over the truncated lattice, for many z at once: the trace of a product of transfer matrices (Lemma 5).

Bins whose scale c_j is (rounded to be) equal share one matrix, and a stretch of n equal matrices costs log n products.

**Extended precision** (x87, 64-bit mantissa) is slow, and 2000 times more accurate than float64. It serves where the
rounding margin of float64 would be too large beside δ (large ε, small δ), and as the yardstick with which that margin
was measured. It uses the same float64 tables and kernels, which define the (slightly perturbed) measure; only what is
computed from them, and cancels, is carried further.

**In the cache.** Products of a matrix and a vector read the whole matrix for two operations a number. A few frequencies
at a time, whose matrices fit into a core's cache, are multiplied five times as fast as all of them together.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lambdacgd.accounting.certificate import Array
from lambdacgd.accounting.exact.lattice import Chain, Lattice, Site, round_lognormal
from lambdacgd.errors import AccountingError

Rounding = Literal["up", "down"]
MEMORY = 384 * 2**20
"""bytes that one evaluation may use at once"""
IN_CACHE = 2**19
"""bytes of matrices that are multiplied together"""
BATCH = 64
"""frequencies whose emissions are transformed together"""
NEVER = 1e-30
"""a grid point less likely than this, whatever the lattice says, is left out: far below the tables' own rounding"""
LARGEST_TABLE = 10_000_000
"""numbers in one emission table; a few temporaries of this size exist while it is made"""


SQUARING = 0.5
"""what squaring a matrix takes, in units of multiplying it by as many vectors as it has rows, one by one"""


@dataclass(frozen=True)
class Stretch:
    """``count`` neighbouring bins that share one scale: log c rounded up (remove) or down (add) by monotonicity."""

    count: int
    up: float
    down: float

    def log_scale(self, rounding: Rounding) -> float:
        return self.up if rounding == "up" else self.down


def stretches(log_scales: Array, allowed: float) -> list[Stretch]:
    """Cut the interior bins 1 … b−2 into stretches, from the end of the cycle to its start.

    log c_j falls geometrically away from the end, so far bins are all alike: one long stretch; then groups as long as
    they fit; then single bins. ``allowed`` bounds Σ_j (log c rounded up − log c_j).
    """
    interior = log_scales[1:-1]
    n = len(interior)
    if n == 0:
        return []
    total = np.concatenate([[0.0], np.cumsum(interior)])

    def longest(start: int, budget: float) -> int:
        """How many bins from ``start`` on fit into one stretch (its cost grows with its length)."""

        def fits(length: int) -> bool:
            cost = length * interior[start + length - 1] - (total[start + length] - total[start])
            return bool(cost <= budget)

        return n - start - bisect_left(range(n - start, 1, -1), True, key=fits)

    cuts, start = [], 0
    budget = allowed / 2
    while start < n:
        length = longest(start, budget)
        if length < 4:  # too short to pay: the remaining bins one by one, exactly
            cuts += [(j, 1) for j in range(start, n)]
            break
        cuts.append((start, length))
        start += length
        budget = allowed / 8 if len(cuts) <= 4 else 0.0
    return [Stretch(m, float(interior[j + m - 1]), float(interior[j])) for j, m in reversed(cuts)]


def power_cost(count: int, size: int, columns: int) -> tuple[float, int]:
    """The cheapest way to M^count R (M size×size, R size×columns).

    Returns:
        Its cost, in units of a matrix times a vector, and how many squarings to spend before multiplying by the powers
        one by one.
    """
    costs = [(float(count * columns), 0)]
    for s in range(1, count.bit_length()):
        products = (count >> s) + (count & ((1 << s) - 1)).bit_count()
        costs.append((SQUARING * s * size + products * columns, s))
    return min(costs)


def rounding_unit(bins: int) -> float:
    """Rounding margin of one transform relative to E' e^{−θW'}: more than twice the largest ever measured.

    A product of b matrices carries up to b times the rounding of one (see docs/exact-accountant.md).
    """
    return 2e-14 + 4e-16 * bins


class TransferProduct:
    """E e^{zW'} on the lattice, W' the sum of the rounded emissions, bins scaled up or down."""

    def __init__(self, chain: Chain, lattice: Lattice, grid: Array, plan: list[Stretch]) -> None:
        self.lattice, self.plan, self.bins = lattice, plan, chain.all_bins
        self.ends = float(chain.log_scales[0]), float(chain.log_scales[-1])
        shift = chain.gain**0.5
        base = -0.5 * chain.loss_variance - np.log(chain.all_bins)
        longest = max(len(site.means) for site in (lattice.interior, lattice.left, lattice.right))
        if longest * len(grid) > LARGEST_TABLE:
            raise AccountingError(
                f"an emission table of {longest}×{len(grid)} numbers is beyond the cap of {LARGEST_TABLE:,}; use a "
                "smaller λ, a larger ε or δ, or the Monte Carlo accountant"
            )
        sites = (lattice.interior, lattice.left, lattice.right)
        emissions = [
            round_lognormal(shift * site.means + base, math.hypot(shift * site.deviation, chain.nugget**0.5), grid)
            for site in sites
        ]
        # Where W hardly varies most of the grid is never met.
        met = np.max([table.max(axis=0) for table in emissions], axis=0) > NEVER
        self.grid = grid[met]
        self.interior, self.left, self.right = (
            _Tables.of(site, table[:, met], chain.repeat) for site, table in zip(sites, emissions, strict=True)
        )

    @cached_property
    def symmetric(self) -> bool:
        """Whether the interior's matrices are: their means depend on the sum of row and column."""
        kernel = self.lattice.interior.kernel
        return self.lattice.interior.strides == (1, 1) and np.array_equal(kernel, kernel.T)

    def flops(self) -> float:
        """Real operations for one complex z."""
        size, columns = self.lattice.states, self.lattice.closing_states
        cost = 8.0 * size**2 * sum(power_cost(stretch.count, size, columns)[0] for stretch in self.plan)
        ends = 16.0 * size * columns
        tables = self.left.table.shape[1] + self.right.table.shape[1] + self.interior.table.shape[1] * len(self.plan)
        return cost + ends + 4.0 * len(self.grid) * tables

    def __call__(self, z: NDArray[Any], rounding: Rounding) -> NDArray[Any]:
        """E e^{zW'} for every z (real z are four times cheaper than complex ones)."""
        batch = self._batch()
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
            values = np.concatenate(
                [self._evaluate(z[first : first + batch], rounding) for first in range(0, len(z), batch)]
            )
        if not np.all(np.isfinite(values)):
            raise AccountingError("the transfer product overflowed; σ is too small for this ε, ask for a larger σ")
        return values

    def _batch(self) -> int:
        """How many z are evaluated together."""
        size = max(self.lattice.states, self.lattice.closing_states)
        each = 16 * (5 * size * self.lattice.states + 4 * len(self.grid))
        if each > MEMORY:
            raise AccountingError(
                f"{self.lattice.states} lattice states need {each / 2**20:.0f} MiB each (cap {MEMORY / 2**20:.0f}); "
                "lump bins or ask for a smaller λ"
            )
        return min(BATCH, int(MEMORY // each))

    def _evaluate(self, z: NDArray[Any], rounding: Rounding) -> NDArray[Any]:
        first, last = self.ends
        strips = self.right.matrices(self.right.transform(self.grid, z, last))
        some = max(1, IN_CACHE // (16 * self.lattice.states**2))
        scale, transforms = None, None
        for stretch in self.plan:
            if transforms is None or stretch.log_scale(rounding) != scale:
                scale = stretch.log_scale(rounding)
                transforms = self.interior.transform(self.grid, z, scale)
            for part in (slice(i, i + some) for i in range(0, len(z), some)):
                matrices = self.interior.matrices(transforms[part])
                strips[part] = apply_power(matrices, stretch.count, strips[part], symmetric=self.symmetric)
        ends = self.left.matrices(self.left.transform(self.grid, z, first))
        return np.asarray((ends.transpose(0, 2, 1) * strips).sum(axis=(1, 2)))


@dataclass(frozen=True)
class _Tables:
    """A Site with its emission table."""

    kernel: Array
    table: Array
    """one row a grid point, one column a lattice neighbourhood"""
    total: Array
    strides: tuple[int, int]
    repeat: int
    """how many such bins the site holds, independent given the lattice"""

    @classmethod
    def of(cls, site: Site, emissions: Array, repeat: int) -> _Tables:
        return cls(site.kernel, np.ascontiguousarray(emissions.T), emissions.sum(axis=1), site.strides, repeat)

    def matrices(self, transforms: NDArray[Any]) -> NDArray[Any]:
        """One transfer matrix per z: kernel(v, v')·E[e^{zcY} | v, v']."""
        # The mean depends on an integer combination of row and column only: a strided view, not a gather.
        row, item = transforms.strides
        steps = (row, item * self.strides[0], item * self.strides[1])
        spread = np.lib.stride_tricks.as_strided(transforms, (len(transforms), *self.kernel.shape), steps)
        return np.asarray(self.kernel * spread)

    def transform(self, grid: Array, z: NDArray[Any], log_scale: float) -> NDArray[Any]:
        """E[e^{zcY}]^repeat: one row per frequency z, one column per lattice neighbourhood.

        b bins repeat the rounding of one, so it is kept out where it can be: the part at real z is 1 + Σ p (e^{zy} − 1)
        where that is close to 1 (and a sum of positive terms where it is small, which keeps its digits), and the
        departure from it at complex z is added as −2 sin²(ωy/2) and sin(ωy). All frequencies of a Fourier series share
        their real part, which is computed once.
        """
        values = grid * float(np.exp(log_scale))
        reals, which = np.unique(z.real, return_inverse=True)
        exponents = np.outer(reals, values)
        damping = np.exp(exponents)
        departure = np.expm1(exponents) @ self.table
        real = self.total + departure
        if (small := departure <= -0.5).any():
            real[small] = (damping @ self.table)[small]
        real = real[which]
        if not np.iscomplexobj(z):
            return power(real, self.repeat)
        half = np.outer(0.5 * z.imag, values)
        sine, damped = np.sin(half), damping[which] if len(reals) > 1 else damping
        turned = np.concatenate([-2 * damped * sine * sine, 2 * damped * sine * np.cos(half)]) @ self.table
        result = np.empty(real.shape, dtype=np.complex128)
        result.real = real + turned[: len(z)]
        result.imag = turned[len(z) :]
        return power(result, self.repeat)


def power(base: NDArray[Any], exponent: int) -> NDArray[Any]:
    """base^exponent, entry by entry, by repeated squaring: fewer roundings than through logarithms."""
    result = base
    for bit in bin(exponent)[3:]:
        result = result * result * base if bit == "1" else result * result
    return result


def apply_power(matrix: Any, count: int, strip: Any, *, symmetric: bool = False) -> Any:
    """matrix^count · strip, of one matrix or a batch of them."""
    _, s = power_cost(count, matrix.shape[-1], strip.shape[-1])
    for bit in range(s):
        if count >> bit & 1:
            strip = matrix @ strip
        matrix = _square(matrix) if symmetric else matrix @ matrix
    for _ in range(count >> s):
        strip = matrix @ strip
    return strip


def _square(matrix: NDArray[Any]) -> NDArray[Any]:
    """matrix², of a batch of symmetric matrices: blocks on and above the diagonal are computed, the others copied."""
    size = matrix.shape[-1]
    cuts = np.linspace(0, size, 1 + min(4, max(1, size // 40))).astype(int)
    square = np.empty_like(matrix)
    for first, stop in itertools.pairwise(cuts.tolist()):
        np.matmul(matrix[..., first:stop, :], matrix[..., first:], out=square[..., first:stop, first:])
        square[..., stop:, first:stop] = square[..., first:stop, stop:].swapaxes(-1, -2)
    return square


class IndependentProduct:
    """λ = 0: the bins are independent, so E e^{zW'} is a power of one bin's transform."""

    def __init__(self, bins: int, gain: float, grid: Array) -> None:
        self.bins, self.grid = bins, grid
        deviation = gain**0.5
        self.table = round_lognormal(np.array([-gain / 2 - np.log(bins)]), deviation, grid)[0]

    def flops(self) -> float:
        return 8.0 * len(self.grid)

    def __call__(self, z: NDArray[Any], rounding: Rounding) -> NDArray[Any]:
        values = power_of_transform(z, self.grid, self.table, self.bins)
        if not np.all(np.isfinite(values)):
            raise AccountingError("the transfer product overflowed; σ is too small for this ε, ask for a larger σ")
        return values


def power_of_transform(z: NDArray[Any], grid: NDArray[Any], table: NDArray[Any], power: int) -> NDArray[Any]:
    """(Σ_i table_i e^{z·grid_i})^power in the precision of its arguments.

    Near 1 it goes through s = Σ table·(e^{zy} − 1), so that the rounding of the 1 is not repeated ``power`` times.
    """
    exponents = np.outer(z, grid)
    direct = np.exp(exponents) @ table
    departure = np.expm1(exponents) @ table
    small = np.abs(departure) < 0.5
    s = np.where(small, departure, 0)
    if np.iscomplexobj(z):
        logarithm = 0.5 * np.log1p(s.real * (2 + s.real) + s.imag**2) + 1j * np.arctan2(s.imag, 1 + s.real)
    else:
        logarithm = np.log1p(s)
    return np.where(small, np.exp(power * logarithm), direct**power)


# Extended precision

AVAILABLE = bool(np.finfo(np.longdouble).eps < 1e-18)


def extended_transform(
    product: TransferProduct | IndependentProduct, z: NDArray[Any], rounding: Rounding
) -> NDArray[Any]:
    """E e^{zW'} in extended precision."""
    wide = np.clongdouble if np.iscomplexobj(z) else np.longdouble
    grid = product.grid.astype(np.longdouble)
    if isinstance(product, TransferProduct):
        return np.array([_extended_product(product, grid, wide(value), rounding) for value in z])
    return power_of_transform(z.astype(wide), grid, product.table.astype(np.longdouble), product.bins)


def _extended_product(product: TransferProduct, grid: NDArray[Any], z: Any, rounding: Rounding) -> Any:
    first, last = product.ends
    strip = _extended_matrix(product.right, grid, z, last)
    for stretch in product.plan:
        matrix = _extended_matrix(product.interior, grid, z, stretch.log_scale(rounding))
        strip = apply_power(matrix, stretch.count, strip)
    return (_extended_matrix(product.left, grid, z, first).T * strip).sum()


def _extended_matrix(site: _Tables, grid: NDArray[Any], z: Any, log_scale: float) -> NDArray[Any]:
    scale = np.longdouble(np.exp(log_scale))
    transform = power(np.exp(z * (scale * grid)) @ site.table.astype(np.longdouble), site.repeat)
    size = transform.itemsize
    rows, columns = site.kernel.shape
    view = np.lib.stride_tricks.as_strided(transform, (rows, columns), (size * site.strides[0], size * site.strides[1]))
    return np.asarray(site.kernel * view)
