"""E e^{zW} over the truncated lattice, for many z at once: the trace of a product of transfer matrices (Lemma 5).

Bins whose scale c_j is (rounded to be) equal share one matrix, and a stretch of n equal matrices costs log n products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from lambdacgd.accounting.base import AccountingError
from lambdacgd.accounting.transfer_matrix import devices
from lambdacgd.accounting.transfer_matrix.chain import Chain
from lambdacgd.accounting.transfer_matrix.emission import round_lognormal
from lambdacgd.accounting.transfer_matrix.lattice import Lattice, Site
from lambdacgd.accounting.transfer_matrix.workers import in_parallel, workers
from lambdacgd.mechanisms.base import Array

if TYPE_CHECKING:
    import torch

Rounding = Literal["up", "down"]
MEMORY = 384 * 2**20
"""bytes the batched products may use at once"""
SMALLEST_BATCH = 8
"""frequencies that are worth a worker of their own"""
LARGEST_TABLE = 10_000_000
"""numbers in one emission table; a few temporaries of this size exist while it is made"""


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
        low, high = 1, n - start
        while low < high:
            middle = (low + high + 1) // 2
            cost = middle * interior[start + middle - 1] - (total[start + middle] - total[start])
            low, high = (middle, high) if cost <= budget else (low, middle - 1)
        return low

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


def squarings(count: int, size: int, columns: int) -> int:
    """How many squarings to spend on M^count R before multiplying one by one (M size×size, R size×columns)."""
    best, best_cost = 0, float(count * columns)
    for s in range(1, count.bit_length()):
        cost = s * size + ((count >> s) + bin(count & ((1 << s) - 1)).count("1")) * columns
        if cost < best_cost:
            best, best_cost = s, float(cost)
    return best


def rounding_unit(bins: int) -> float:
    """Rounding margin of one transform relative to E' e^{−θW'}: more than twice the largest ever measured.

    A product of b matrices carries up to b times the rounding of one (see docs/exact-accountant.md).
    """
    return 2e-14 + 4e-16 * bins


class TransferProduct:
    """E e^{zW'} on the lattice, W' the sum of the rounded emissions, bins scaled up or down."""

    def __init__(self, chain: Chain, lattice: Lattice, grid: Array, plan: list[Stretch], device: str) -> None:
        import torch

        self.lattice, self.plan, self.device, self.bins = lattice, plan, device, chain.bins
        self.ends = float(chain.log_scales[0]), float(chain.log_scales[-1])
        shift = chain.gain**0.5
        base = -0.5 * chain.gain * chain.peak_variance - np.log(chain.bins)
        self.grid = grid
        longest = max(len(site.means) for site in (lattice.interior, lattice.left, lattice.right))
        if longest * len(grid) > LARGEST_TABLE:
            raise AccountingError(
                f"an emission table of {longest}×{len(grid)} numbers is beyond the cap of {LARGEST_TABLE:,}; use a "
                "smaller λ, a larger ε or δ, or the Monte Carlo accountant"
            )
        self.interior, self.left, self.right = (
            _Tables.of(site, round_lognormal(shift * site.means + base, shift * site.deviation, grid))
            for site in (lattice.interior, lattice.left, lattice.right)
        )
        self._placed = {"cpu": (torch.as_tensor(grid), self.interior, self.left, self.right)}

    def flops(self) -> float:
        """Real operations for one complex z."""
        size, columns = self.lattice.states, self.lattice.closing_states
        matrix, strip = 8.0 * size**3, 8.0 * size**2 * columns
        cost = 0.0
        for stretch in self.plan:
            s = squarings(stretch.count, size, columns)
            cost += s * matrix + ((stretch.count >> s) + bin(stretch.count & ((1 << s) - 1)).count("1")) * strip
        ends = 16.0 * size * columns
        tables = self.left.table.shape[1] + self.right.table.shape[1] + self.interior.table.shape[1] * len(self.plan)
        return cost + ends + 4.0 * len(self.grid) * tables

    def __call__(self, z: NDArray[Any], rounding: Rounding) -> NDArray[Any]:
        """E e^{zW'} for every z (real z are four times cheaper than complex ones)."""
        values = devices.compute(
            lambda device, some: self.on(device, some, rounding),
            z,
            self.device,
            work=self.flops() * len(z),
            unit=rounding_unit(self.bins),
        )
        if not np.all(np.isfinite(values)):
            raise AccountingError("the transfer product overflowed; σ is too small for this ε, ask for a larger σ")
        return values

    def on(self, device: str, z: NDArray[Any], rounding: Rounding) -> NDArray[Any]:
        """E e^{zW'} as this device computes it."""
        import torch

        if device not in self._placed:
            grid, interior, left, right = self._placed["cpu"]
            self._placed[device] = (grid.to(device), interior.to(device), left.to(device), right.to(device))
        values = np.empty(len(z), dtype=np.complex128 if np.iscomplexobj(z) else np.float64)

        def compute(part: slice) -> None:
            values[part] = self._evaluate(torch.as_tensor(z[part], device=device), rounding, device).cpu().numpy()

        parts, at_once = self._batches(len(z), values.itemsize, device)
        in_parallel(compute, parts, at_once=at_once)
        return values

    def _batches(self, count: int, itemsize: int, device: str) -> tuple[list[slice], int]:
        """Parts of all z, and how many of them may be computed at once: together they stay below ``MEMORY``."""
        size = max(self.lattice.states, self.lattice.closing_states)
        each = 5 * itemsize * size * self.lattice.states + 4 * itemsize * len(self.grid)
        if each > MEMORY:
            raise AccountingError(
                f"{self.lattice.states} lattice states need {each / 2**20:.0f} MiB each (cap {MEMORY / 2**20:.0f}); "
                "lump bins or ask for a smaller λ"
            )
        room = int(MEMORY // each)
        at_once = min(workers(), room, -(-count // SMALLEST_BATCH)) if device == "cpu" else 1
        batch = min(room // at_once, 64 if device == "cpu" else 512, -(-count // at_once))
        return [slice(i, min(i + batch, count)) for i in range(0, count, batch)], at_once

    def _evaluate(self, z: torch.Tensor, rounding: Rounding, device: str) -> torch.Tensor:
        grid, interior, left, right = self._placed[device]
        first, last = self.ends
        strip = right.matrices(grid, z, last)
        scale, matrices = None, None
        for stretch in self.plan:
            if matrices is None or stretch.log_scale(rounding) != scale:
                scale = stretch.log_scale(rounding)
                matrices = interior.matrices(grid, z, scale)
            strip = apply_power(matrices, stretch.count, strip)
        return (left.matrices(grid, z, first).transpose(1, 2) * strip).sum((1, 2))


@dataclass(frozen=True)
class _Tables:
    """A Site with its emission table, as tensors on one device."""

    kernel: torch.Tensor
    table: torch.Tensor
    total: torch.Tensor
    strides: tuple[int, int]

    @classmethod
    def of(cls, site: Site, emissions: Array) -> _Tables:
        import torch

        kernel, table, total = (
            torch.as_tensor(array) for array in (site.kernel, emissions.T.copy(), emissions.sum(axis=1))
        )
        return cls(kernel, table, total, site.strides)

    def to(self, device: str) -> _Tables:
        return _Tables(self.kernel.to(device), self.table.to(device), self.total.to(device), self.strides)

    def matrices(self, grid: torch.Tensor, z: torch.Tensor, log_scale: float) -> torch.Tensor:
        """One transfer matrix a z: kernel(v, v')·E[e^{zcY} | v, v']."""
        transform = self.transform(grid * float(np.exp(log_scale)), z)
        # The mean depends on an integer combination of row and column only: a strided view, not a gather.
        spread = transform.as_strided((transform.shape[0], *self.kernel.shape), (transform.shape[1], *self.strides))
        return self.kernel * spread

    def transform(self, values: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """E[e^{zY}], a row a z and a column a neighbourhood.

        b bins repeat the rounding of one, so it is kept out where it can be: the part at real z is 1 + Σ p (e^{zy} − 1)
        where that is close to 1 (and a sum of positive terms where it is small, which keeps its digits), and the
        departure from it at complex z is added as −2 sin²(ωy/2) and sin(ωy).
        """
        import torch

        exponents = torch.outer(z.real if z.is_complex() else z, values)
        damping = torch.exp(exponents)
        departure = torch.expm1(exponents) @ self.table
        real = torch.where(departure > -0.5, self.total + departure, damping @ self.table)
        if not z.is_complex():
            return real
        angle = torch.outer(z.imag, values)
        turned = torch.cat([-2 * damping * torch.sin(angle / 2) ** 2, damping * torch.sin(angle)]) @ self.table
        return torch.complex(real + turned[: len(z)], turned[len(z) :])


def apply_power(matrix: torch.Tensor, count: int, strip: torch.Tensor) -> torch.Tensor:
    """matrix^count · strip, batched."""
    s = squarings(count, matrix.shape[-1], strip.shape[-1])
    for bit in range(s):
        if count >> bit & 1:
            strip = matrix @ strip
        matrix = matrix @ matrix
    for _ in range(count >> s):
        strip = matrix @ strip
    return strip


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
