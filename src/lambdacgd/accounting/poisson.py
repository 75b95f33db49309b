"""Poisson sampling: DP-SGD, and banded C with cyclic groups. The proof of its numbers is in docs/poisson.md.

A step is a Gaussian that a coin decides about, W = dP/dQ = 1 − q + q·e^{z/s − 1/(2s²)} with z ~ N(0, 1) under Q and
s = σ over the sensitivity, and steps compose. W is split between the two nearest nodes e^{ih} such that its mean stays:
by Jensen that enlarges δ in both directions. Sums of k losses come from a Fourier transform of tilted masses.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import ndtr

from lambdacgd.accounting.certificate import Array, Bound
from lambdacgd.accounting.composed import Index, Losses, TooLong, composed
from lambdacgd.accounting.gaussian import gaussian_delta
from lambdacgd.accounting.root import smallest
from lambdacgd.errors import AccountingError, InvalidInput
from lambdacgd.mechanisms import Mechanism
from lambdacgd.mechanisms.error import largest_column_norm
from lambdacgd.sampling import Poisson

METHOD = "pld"
FARTHEST = 10.0  #: deviations of z beyond which a loss counts as infinite: 8e-24 a step
TAILS = 2e-13  #: relative error of Φ: 1.3e-13 was seen down to −30.5, in 40 digits
CELL = 0.02  #: width of the cells in deviations of one step's loss, unless there are very many steps
WIDER = (1, 32, 1024, 32_768)  #: cells are tried
LIMITS = (0.05, 1e7)  #: of σ over the sensitivity


@dataclass(frozen=True)
class PoissonSampled:
    """Accountant of Gaussian steps, each of which an example enters with the same probability.

    Args:
        rate: q, that probability.
        steps: how many such steps an example has: all of DP-SGD's.
        norm: how far it moves one of them, 1 for DP-SGD.
        details: what certificates say besides.

    Guarantee
    ---------
    (ε, δ)-DP under zero-out (equivalently add-or-remove) of one example, both directions. The bound is proven, and the
    rounding of its evaluation is covered by explicit margins (docs/poisson.md).
    """

    rate: float
    steps: int
    norm: float = 1.0
    details: dict[str, Any] = field(default_factory=dict, compare=False)

    def delta(self, sigma: float, epsilon: float) -> Bound:
        return self._bound(sigma, epsilon)

    def epsilon(self, sigma: float, delta: float) -> Bound:
        found = smallest(lambda e: self._bound(sigma, e).delta, delta, rtol=1e-6, limits=(1e-6, 1e4))
        return self._bound(sigma, found)

    def sigma(self, epsilon: float, delta: float) -> Bound:
        found = smallest(lambda s: self._bound(s * self.norm, epsilon).delta, delta, rtol=2e-5, limits=LIMITS)
        return self._bound(found * self.norm, epsilon)

    def quick_sigma(self, epsilon: float, delta: float, *, start: float | None = None) -> float:
        return self.norm * smallest(
            lambda s: self._bound(s * self.norm, epsilon, 4 * CELL).delta, delta, rtol=1e-3, limits=LIMITS
        )

    def _bound(self, sigma: float, epsilon: float, cell: float = CELL) -> Bound:
        s, k = sigma / self.norm, self.steps
        if self.rate == 1 or s > LIMITS[1]:  # everybody takes part: k steps are one, of sensitivity √k
            remove = add = gaussian_delta(epsilon, s / math.sqrt(k)) * (1 + 1e-9)
        elif s < LIMITS[0]:
            raise AccountingError(f"σ = {s:g} of the sensitivity is too little noise to account for")
        else:
            remove, add = self._composed(s, epsilon - k * TAILS, max(cell, math.sqrt(k) * 1e-5))
        return Bound(sigma, epsilon, remove, add, METHOD, details=self.details)

    def _composed(self, s: float, epsilon: float, cell: float) -> list[float]:
        """δ in each direction. Losses so rare that they are large beside their deviation take wider cells."""
        for wider in WIDER:
            with contextlib.suppress(TooLong):
                return [min(composed(one, self.steps, epsilon).delta, 1.0) for one in _step(s, self.rate, wider * cell)]
        raise TooLong(self.steps)


def poisson_accountant(mechanism: Mechanism, sampling: Poisson) -> PoissonSampled:
    """The accountant of a mechanism whose C has at most as many bands as the sampling has groups.

    Args:
        mechanism: resolved for the whole run.
        sampling: with p groups; one group is plain Poisson sampling, where C must be diagonal.

    Raises:
        InvalidInput: C has more bands than there are groups.

    Guarantee
    ---------
    Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization". An example of group g can take part at steps
    t = g, g + p, g + 2p, … only, ⌈n/p⌉ of them at most, and at each by a coin of its own that falls with probability at
    most p/b. Column t of C is zero outside rows t … t + p − 1, so what it adds to C·G at one of these steps and at
    another lies in different rows. Given all earlier rows and all other examples, the rows t … t + p − 1 are therefore
    a Gaussian mechanism that one coin decides about, of sensitivity ‖C[:, t]‖; and the rows of all these steps compose
    adaptively. C may have any sign. The largest column norm stands for all of them.
    """
    n, groups = sampling.steps, max(1, sampling.groups)
    bands = mechanism.strategy_bands(n)
    if bands > groups:
        raise InvalidInput(
            "sampling",
            sampling.kind,
            f"C of {mechanism.name} has {bands} bands, and Poisson sampling with {groups} groups is accounted for up "
            f"to {groups}: an example's columns would overlap. Use balls-in-bins or cyclic, or a mechanism with a "
            "banded C (bandmf, bsr, dp-sgd) and as many groups",
        )
    norm = largest_column_norm(mechanism, n)
    if groups == 1 and norm == 1.0:
        return PoissonSampled(sampling.rate, n)
    steps = math.ceil(n / groups)
    details = {"groups": groups, "steps_of_an_example": steps, "column_norm": norm}
    return PoissonSampled(sampling.rate, steps, norm, details)


@lru_cache(maxsize=16)
def _step(s: float, rate: float, cell: float) -> tuple[Losses, Losses]:
    """One step in each direction: the loss under P, and minus the loss under Q."""
    # The deviation of the loss under P decides how fine the cells are; no validity rests on it.
    z = np.linspace(-FARTHEST, FARTHEST + 1 / s, 4001)
    loss = np.log1p(rate * np.expm1(z / s - 0.5 / s**2))
    weights = np.exp(-(z**2) / 2 + loss)
    weights /= weights.sum()
    quantum = cell * math.sqrt(float(weights @ (loss - weights @ loss) ** 2))
    first, last = math.floor(float(loss[0]) / quantum), math.ceil(float(loss[-1]) / quantum)
    index = _nodes(first, last)
    nodes = index * quantum
    # e^{z/s − 1/(2s²)} at the nodes; 0 or below where W never is. Neither way may lose digits of W = 1 − q + q·y.
    y = 1 + np.expm1(nodes) / rate if rate < 0.5 else (np.exp(nodes) - (1 - rate)) / rate
    edges = np.full(len(y), -math.inf)
    edges[y > 0] = s * np.log(y[y > 0]) + 0.5 / s
    mass, tail = _between(edges)
    moved, moved_tail = _between(edges - 1 / s)  # of y: under the Gaussian that was moved
    width = np.diff(y)
    upper = (moved - y[:-1] * mass) / width
    error = 4 * TAILS * (tail + (moved_tail + np.abs(y[1:]) * tail) / width)
    q = np.zeros(len(y))
    q[1:] += np.maximum(upper, 0.0) + error
    q[:-1] += np.maximum(mass - upper, 0.0) + error
    p = q * np.exp(nodes)
    low, top = float(ndtr(edges[0])), float(ndtr(-edges[-1]))
    top_moved = (1 - rate) * top + rate * float(ndtr(1 / s - edges[-1]))
    # A loss below the first node is enlarged for remove, and infinite for add; above the last one the other way round.
    p[0] += low * math.exp(float(nodes[0])) * (1 + TAILS)
    q[-1] += top * (1 + TAILS)
    remove = Losses(quantum, index, p, top_moved * (1 + 1e-9))
    return remove, Losses(quantum, -index[::-1], q[::-1], low * (1 + 1e-9))


def _nodes(first: int, last: int) -> Index:
    """Whole numbers from ``first`` to ``last``: all near 0, and further away those that are 1/500 apart, relatively."""
    far = np.geomspace(500.0, max(500, last, -first), 1 + int(500 * math.log(max(500, last, -first) / 500))).round()
    index = np.concatenate([-far, np.arange(-500, 501), far, [first, last]]).astype(np.int64)
    return np.unique(index[(index >= first) & (index <= last)])


def _between(edges: Array) -> tuple[Array, Array]:
    """Φ(b) − Φ(a) for neighbouring edges, from the nearer tail, and the size of that tail."""
    below, above = ndtr(edges), ndtr(-edges)
    right = edges[:-1] > 0
    return np.where(right, above[:-1] - above[1:], below[1:] - below[:-1]), np.where(right, above[:-1], below[1:])
