"""Two chains and a nugget, one epoch: the law of W on a lattice in the plane (Lemma 2b of docs/exact-accountant.md).

X_j = √g₁·w_{⌊j/hold⌋} + √g₂·v_j + √ν·z_j − Var(X_j)/2, w and v independent chains. Given all X, every w and every v is
Gaussian with a variance that ν keeps above zero, so they may be summed over lattices; given w and v the bins are
independent lognormals. Both spacings are multiples of one unit of X, so that one short table serves all bins. A vector
over the plane, v along its rows and w along its columns, goes from the last bin to the first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from lambdacgd.accounting.certificate import Array, OneWay
from lambdacgd.accounting.exact.lattice import (
    BATCH,
    IN_CACHE,
    MEMORY,
    REPORT,
    Chain,
    Lattice,
    Site,
    Stretch,
    TransferProduct,
    Waves,
    poisson_eta,
)
from lambdacgd.errors import AccountingError


@dataclass(frozen=True)
class Plane(Lattice):
    """Its sites' kernels have the plane's shape; ``moves`` take each chain from one of its places to the one before."""

    moves: tuple[Array, ...] = ()
    places: tuple[int, ...] = ()  #: of each chain

    @property
    def cost(self) -> float:
        """Real operations for one complex z, but for emissions."""
        (n, m), (first, second) = map(len, self.moves), self.places
        return 4.0 * n * m * (m * second + n * first + 4 * second)


def spacing(chain: Chain, ratio: float) -> tuple[float, tuple[int, int]]:
    """The unit of X, and each chain's spacing in units: at most ``ratio`` deviations of w or v given all else."""
    held = zip(chain.parts, (chain.hold, 1), strict=True)
    precisions = [(1 + c.lam**2) / (1 - c.lam**2) + n * c.gain / chain.nugget for c, n in held]
    first, second = (ratio * math.sqrt(c.gain / p) for c, p in zip(chain.parts, precisions, strict=True))
    times = max(first, second) / min(first, second)
    low, high = math.floor(times), math.ceil(times)
    stride = low if times**2 <= low * high else high  # whichever spacing has to shrink less
    unit = min(first, second, max(first, second) / stride)
    return unit, ((1, stride) if first < second else (stride, 1))


def plane(chain: Chain, ratio: float, reach: float, *, shifted: bool = True) -> Plane:
    """Build it; the arguments are those of ``lattice``."""
    (unit, strides), eta = spacing(chain, ratio), poisson_eta(ratio)
    places = tuple(part.bins for part in chain.parts)
    links = sum(places)
    ends, moves, starts, exit_remove, exit_add = np.zeros(2), [], [], 0.0, 0.0
    for part, stride in zip(chain.parts, strides, strict=True):
        gap, shift = unit * stride / math.sqrt(part.gain), math.sqrt(part.gain) if shifted else 0.0
        n = np.arange(math.floor(-reach / gap), math.ceil((reach + shift) / gap) + 1)
        v = np.asarray(n * gap, dtype=np.float64)
        moves.append(gap * _normal(v[None, :] - part.lam * v[:, None], (1 - part.lam) * (1 + part.lam)))
        starts.append(gap * _normal(v, part.variance(part.bins - 1.0)))
        ends += stride * n[0], stride * n[-1]
        # Drawing a bin moves the mean by at most √g·λ^d at distance d, where at most two of the chain's places lie.
        means = shift * part.lam ** np.arange(part.bins)
        if v[-1] < means[0]:
            raise AccountingError(f"the lattice does not cover its own means; {REPORT}")
        below = part.bins * float(ndtr(v[0]))
        exit_remove += 2 * float(np.sum(ndtr(means - v[-1]))) + below
        exit_add += part.bins * float(ndtr(-v[-1])) + below
    start = np.outer(starts[1], starts[0])
    means = unit / math.sqrt(chain.gain) * np.arange(ends[0], ends[1] + 1)
    last = Site(start, strides[::-1], means, 0.0)
    other, grown = Site(np.ones_like(start), strides[::-1], means, 0.0), (1 + eta) ** links
    exit_remove = exit_remove * grown if shifted else math.inf
    return Plane((other,), other, last, links, eta, exit_remove, exit_add * grown, tuple(moves), places)


def _normal(x: Array, variance: float) -> Array:
    return np.asarray(np.exp(-(x**2) / (2 * variance)) / math.sqrt(2 * math.pi * variance))


class PlaneProduct(TransferProduct):
    """E e^{zW'} on the plane. Real and imaginary parts are kept apart, because the moves are real."""

    def __init__(self, chain: Chain, path: Plane, grid: Array, plan: list[Stretch]) -> None:
        super().__init__(chain, path, grid, plan)
        self.hold, self.moves, self.cost, self.size = chain.hold, path.moves, path.cost, path.left.kernel.size

    def flops(self) -> float:
        return self.cost + 4.0 * len(self.grid) * self.left.table.shape[1] * (len(self.plan) + 2)

    def _batch(self) -> int:
        return max(1, min(BATCH, MEMORY // (96 * self.size)))

    def _evaluate(self, z: NDArray[Any], direction: OneWay) -> NDArray[Any]:
        waves, at = Waves(self.grid, z, self.ends[1]), self.bins - 1
        vector = _parts(self.right.matrices(self.right.transform(waves)))
        across, down = self.moves[0], np.ascontiguousarray(self.moves[1].T)
        some = max(1, IN_CACHE // (16 * self.size))
        scales = [(s.count, s.up if direction == "remove" else s.down) for s in self.plan]
        for count, scale in [*scales, (1, self.ends[0])]:
            waves = waves.at(scale)
            factors = _parts(self.left.matrices(self.left.transform(waves)))
            for part in (slice(i, i + some) for i in range(0, len(z), some)):
                own = vector[:, part]
                for j in range(at, at - count, -1):
                    own = down @ own
                    if j % self.hold == 0:
                        own = own @ across
                    own = _times(own, factors[:, part])
                vector[:, part] = own
            at -= count
        total = vector.sum(axis=(2, 3))
        return np.asarray(total[0] + 1j * total[1] if len(total) == 2 else total[0])


def _parts(values: NDArray[Any]) -> NDArray[Any]:
    """Real and imaginary part; of real numbers that one alone."""
    return np.stack([values.real, values.imag]) if np.iscomplexobj(values) else values[None]


def _times(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """The product of numbers in parts."""
    product = a[0] * b
    if len(a) == 2:
        product[0] -= a[1] * b[1]
        product[1] += a[1] * b[0]
    return np.asarray(product)
