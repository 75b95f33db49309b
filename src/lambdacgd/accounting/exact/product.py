"""E e^{zW} over the truncated lattice, for many z at once: the trace of a product of transfer matrices (Lemma 5).

Bins whose scale c_j is (rounded to be) equal share one matrix, and a stretch of n equal matrices costs log n products.

**Extended precision** (x87, 64-bit mantissa) is slow, and 2000 times more accurate than float64. It serves where the
rounding margin of float64 would be too large beside δ (large ε, small δ), and as the yardstick with which that margin
was measured. It uses the same float64 tables and kernels, which define the (slightly perturbed) measure; only what is
computed from them, and cancels, is carried further.

**Devices.** The rounding margin was measured on CPUs. Another device adds up in another order, and some emulate float64
with narrower numbers. So a device is not trusted for what it is, but for what it has just computed.

Guarantee
---------
Of every transform computed on a device the first, the middle and the last value are computed on the CPU too, and have
to agree within half of the rounding margin. The CPU's own error is below the other half (docs/exact-accountant.md), so
at these values the margin that the certificate charges covers the device's. The other values come from the same tables
and matrices, in the same batches, from the same kernels; they are not compared one by one.

**Workers.** Torch's own threads meet after every small product and spin while they wait. Where other processes want the
cores too, that burned ten times the processor time of the work itself. So each worker takes whole batches on one torch
thread; workers meet once a transform and sleep while they wait. Rounding no longer depends on the number of threads.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from lambdacgd.accounting.certificate import Array
from lambdacgd.accounting.exact.lattice import Chain, Lattice, Site, round_lognormal
from lambdacgd.errors import AccountingError, DeviceError

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
        Its operations, in units of size² complex multiplications, and how many squarings to spend before multiplying
        by the powers one by one.
    """
    costs = [(float(count * columns), 0)]
    for s in range(1, count.bit_length()):
        costs.append((float(s * size + ((count >> s) + (count & ((1 << s) - 1)).bit_count()) * columns), s))
    return min(costs)


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
        cost = 8.0 * size**2 * sum(power_cost(stretch.count, size, columns)[0] for stretch in self.plan)
        ends = 16.0 * size * columns
        tables = self.left.table.shape[1] + self.right.table.shape[1] + self.interior.table.shape[1] * len(self.plan)
        return cost + ends + 4.0 * len(self.grid) * tables

    def __call__(self, z: NDArray[Any], rounding: Rounding) -> NDArray[Any]:
        """E e^{zW'} for every z (real z are four times cheaper than complex ones)."""
        values = _on_device(
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
        _in_parallel(compute, parts, at_once=at_once)
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
        at_once = min(_worker_count(), room, -(-count // SMALLEST_BATCH)) if device == "cpu" else 1
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
        """One transfer matrix per z: kernel(v, v')·E[e^{zcY} | v, v']."""
        transform = self.transform(grid * float(np.exp(log_scale)), z)
        # The mean depends on an integer combination of row and column only: a strided view, not a gather.
        spread = transform.as_strided((transform.shape[0], *self.kernel.shape), (transform.shape[1], *self.strides))
        return self.kernel * spread

    def transform(self, values: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """E[e^{zY}]: one row per frequency z, one column per lattice neighbourhood.

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


def apply_power(matrix: Any, count: int, strip: Any) -> Any:
    """matrix^count · strip, of torch tensors (batched) or NumPy arrays."""
    _, s = power_cost(count, matrix.shape[-1], strip.shape[-1])
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
    transform = np.exp(z * (scale * grid)) @ site.table.cpu().numpy().astype(np.longdouble)
    size = transform.itemsize
    rows, columns = site.kernel.shape
    view = np.lib.stride_tricks.as_strided(transform, (rows, columns), (size * site.strides[0], size * site.strides[1]))
    return np.asarray(site.kernel.cpu().numpy() * view)


# Devices

SPOTS = 3
"""values of a transform that are computed twice"""
FEWEST = 8 * SPOTS
"""values that make a transform worth a device: below, computing some of them twice takes back what it saves"""
LEAST_WORK = 5e9
"""real operations that make a transform worth a device: some 0.3 s of one CPU core"""

_refused: dict[str, str] = {}
"""devices that failed in this process, and how"""


def _on_device(
    on: Callable[[str, NDArray[Any]], NDArray[Any]], z: NDArray[Any], asked: str, *, work: float, unit: float
) -> NDArray[Any]:
    """``on(device, z)`` on the device that was asked for, or on the CPU if it is small or that device is wrong.

    ``unit`` is the rounding margin relative to the largest value, ``work`` the number of operations.
    """
    device = _resolve(asked)
    if device == "cpu" or len(z) < FEWEST or work < LEAST_WORK:
        return on("cpu", z)
    spots = np.linspace(0, len(z) - 1, SPOTS).astype(int)
    reference = on("cpu", z[spots])
    size = float(np.abs(reference).max())
    if not np.isfinite(size):  # an overflow is no fault of a device
        return on("cpu", z)
    try:
        values = on(device, z)
    except RuntimeError as error:  # out of memory, no kernel for this card, a card that fell off
        fault = f"it failed ({error})"
    else:
        strayed = float(np.abs(values[spots] - reference).max())
        if strayed <= 0.5 * unit * size:  # false for a NaN
            return values
        fault = f"it strayed from the CPU by {strayed / size:.2g}, where rounding is allowed {0.5 * unit:.2g}"
    _refused[device] = fault
    if asked == "auto":
        warnings.warn(f"accounting on the CPU: {device} is not used, because {fault}", RuntimeWarning, stacklevel=2)
        return on("cpu", z)
    raise _unusable(asked, fault)


def _resolve(asked: str) -> str:
    """The device to try: "auto" is CUDA where there is one that has not failed."""
    if asked == "cpu":
        return asked
    import torch

    present = torch.cuda.is_available()
    if asked == "auto":
        return "cuda" if present and "cuda" not in _refused else "cpu"
    if not present:
        raise _unusable(asked, "no CUDA device is here")
    if asked in _refused:
        raise _unusable(asked, _refused[asked])
    return asked


def _unusable(asked: str, fault: str) -> DeviceError:
    return DeviceError(
        f"the exact accountant was asked to compute on {asked!r}, but {fault}; set LAMBDACGD_ACCOUNTING_DEVICE to auto "
        "or cpu to go without"
    )


# Workers

Part = TypeVar("Part")

_lock = threading.Lock()
_users = 0
_threads = 1
"""torch's number of threads before the first of ``_users`` came"""


def _worker_count() -> int:
    """How many batches may be computed at once: the threads that torch has been given."""
    import torch

    with _lock:
        return _threads if _users else torch.get_num_threads()


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Torch on one thread inside; the last one to leave restores what the first one found."""
    import torch

    global _users, _threads
    with _lock:
        if _users == 0:
            _threads = torch.get_num_threads()
            torch.set_num_threads(1)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                torch.set_num_threads(_threads)


def _in_parallel(compute: Callable[[Part], None], parts: Sequence[Part], *, at_once: int) -> None:
    """``compute`` for every part, ``at_once`` of them at a time; an error of any of them is raised."""
    with _one_thread_each():
        if at_once == 1 or len(parts) == 1:
            for part in parts:
                compute(part)
            return
        with ThreadPoolExecutor(at_once) as pool:
            for done in [pool.submit(compute, part) for part in parts]:
                done.result()
