"""δ(ε) of k independent copies of a discrete pair: one convolution in floating point, its rounding bounded.

The composed loss is a sum of k independent ones. Its tail is found by the fast Fourier transform of *tilted* masses
x_i = p_i e^{θl_i}/M(θ), with θ the saddle point: then the losses near ε are the likely ones, and rounding is small
beside δ however small δ is. Nothing is truncated and nothing wraps around.

Rounding. For masses that sum to 1, a transform of length N = 2^L errs by at most 8uL of its Euclidean norm
(Higham 2002, Theorem 24.2, with weights accurate to u = 2⁻⁵³); |x̂| ≤ 1, so raising to the k-th power errs by k times
that, and by 4u a multiplication; transforming back errs as before. With Parseval, the composed tilted masses err by at
most u‖x‖₂(8L(1.01k + 1) + 4k) in the Euclidean norm, and δ by that times the norm of what they are multiplied with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, rfft
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp

from lambdacgd.accounting.base import AccountingError, calibrate
from lambdacgd.accounting.fresh_bins.pair import DiscretePair

Array = NDArray[np.float64]
OneWay = Literal["remove", "add"]

LONGEST = 1 << 24
"""of a transform: about half a gigabyte"""
_UNIT = 2.0**-53
_RELATIVE = 1e-9
"""covers the relative rounding of the tilted masses (under 1e-12 each, k of them multiplied) and of the last sum"""


@dataclass(frozen=True)
class Tail:
    """δ(ε) ≤ ``delta``, of which ``infinite`` comes from infinite losses and ``rounding`` is the margin."""

    delta: float
    infinite: float
    rounding: float


@dataclass(frozen=True)
class Exposure:
    """To first order, k copies whose h is larger by s at the nodes and by c between them have a δ larger by
    k·(nodes·s + cells·c)."""

    nodes: Array
    """of the pair: how likely the other copies' losses ask for h there (between two nodes, for a part of each)"""
    cells: Array
    """from 0 to the first node, and from node to node: how likely they ask for h there"""


class Composition:
    """``copies`` independent copies of ``pair``, in both directions."""

    def __init__(self, pair: DiscretePair, copies: int) -> None:
        self.pair, self.copies = pair, copies
        span = int(pair.index[-1] - pair.index[0])
        self.length = 1 << max(4, int(copies * span + 1).bit_length())
        if self.length > LONGEST:
            raise AccountingError(f"{copies} epochs of {span} cells each need a transform beyond {LONGEST:,} numbers")

    def remove(self, epsilon: float) -> Tail:
        """δ of (P'^k, Q'^k)."""
        return self._tail(epsilon, "remove")

    def add(self, epsilon: float) -> Tail:
        """δ of (Q'^k, P'^k)."""
        return self._tail(epsilon, "add")

    def delta(self, epsilon: float) -> float:
        """The larger of both directions."""
        return max(self.remove(epsilon).delta, self.add(epsilon).delta)

    def epsilon(self, delta: float, *, rtol: float = 1e-5) -> float:
        """The smallest ε > 0 with δ(ε) ≤ ``delta``, from above."""
        try:
            return calibrate(self.delta, delta, rtol=rtol, limits=(1e-6, 1e4))
        except AccountingError:
            raise AccountingError(f"so little noise has no ε at δ = {delta:g}; use more, or a larger δ") from None

    def exposure(self, way: OneWay, epsilon: float) -> Exposure:
        """How far δ(ε) hangs on each value of one copy's h, from the sum of the other k − 1 losses.

        δ of k copies is E h(e^{ε−L}), L the sum of k − 1 losses under P' (add: E e^{ε−L} h(e^{L−ε}), of −L under Q'),
        and h is linear between the pair's nodes and 0.
        """
        index, masses, _ = self._one_way(way)
        others = self._sum(epsilon, index, masses, self.copies - 1)
        # Asked for so far below that it lies beyond the last node, h is infinite losses only.
        start = max(math.floor(epsilon / self.pair.quantum) + 1 - int(index[-1]) - others.first, 0)
        at = epsilon - others.losses(start)
        weights = others.weights(start) * np.maximum(others.masses[start:], 0.0)
        nodes = np.concatenate([[0.0], np.exp(self.pair.losses)])
        x = np.minimum(np.exp(np.minimum(at if way == "remove" else -at, 700.0)), nodes[-1])
        weights = weights if way == "remove" else weights * np.exp(at)
        cell = np.minimum(np.searchsorted(nodes, x, side="right"), len(nodes) - 1) - 1
        right = weights * (x - nodes[cell]) / np.diff(nodes)[cell]

        def totals(places: NDArray[np.int64], amounts: Array) -> Array:
            return np.bincount(places, amounts, len(nodes)).astype(np.float64)

        at_nodes = totals(cell, weights - right) + totals(cell + 1, right)
        return Exposure(at_nodes[1:], totals(cell, weights)[:-1])

    def slack(self, way: OneWay, epsilon: float) -> dict[str, float]:
        """What chords, and each inequality behind one copy's h, can have added to δ(ε), to first order."""
        exposure = self.exposure(way, epsilon)
        found = {f"one epoch: {name}": float(exposure.nodes @ added) for name, added in self.pair.slack.items()}
        found["chords"] = float(exposure.cells @ self.pair.heights)
        return {name: self.copies * value for name, value in found.items()}

    def _one_way(self, way: OneWay) -> tuple[NDArray[np.int64], Array, float]:
        """Losses (in cells), their masses, and the mass of infinite loss; for add the losses change sign."""
        pair = self.pair
        if way == "remove":
            return pair.index, pair.p, pair.p_infinite
        return -pair.index[::-1], pair.q[::-1], pair.q_infinite

    def _tail(self, epsilon: float, way: OneWay) -> Tail:
        k, (index, masses, infinite) = self.copies, self._one_way(way)
        # A copy's infinite loss makes the sum infinite; the others' masses add up to `whole` at most.
        whole = float(masses.sum()) + infinite
        lost = k * infinite * max(whole, 1.0) ** (k - 1)
        if epsilon >= k * self.pair.quantum * float(index[-1]):
            return Tail(lost * (1 + _RELATIVE), lost, 0.0)
        total = self._sum(epsilon, index, masses, k)
        beyond = max(math.floor(epsilon / self.pair.quantum) + 1 - total.first, 0)
        weights = np.maximum(-np.expm1(epsilon - total.losses(beyond)), 0.0) * total.weights(beyond)
        value = float(weights @ total.masses[beyond:])
        units = 8 * math.log2(self.length) * (1.01 * k + 1) + 4 * k
        margin = _UNIT * units * total.norm * float(np.linalg.norm(weights))
        return Tail((max(value, 0.0) + margin + lost) * (1 + _RELATIVE), lost, margin)

    def _sum(self, epsilon: float, index: NDArray[np.int64], masses: Array, copies: int) -> _Sum:
        """The sum of ``copies`` finite losses, tilted so that losses near ε are the likely ones of all k."""
        positive = masses > 0
        index, masses = index[positive], masses[positive]
        losses, logs = index * self.pair.quantum, np.log(masses)

        def cumulant(theta: float) -> float:
            return self.copies * float(logsumexp(logs + theta * losses)) - theta * epsilon

        most = 600.0 / max(float(np.abs(losses).max()), 1e-12)
        theta = float(minimize_scalar(cumulant, bounds=(0.0, most), method="bounded").x)
        log_mgf = float(logsumexp(logs + theta * losses))
        dense = np.zeros(int(index[-1] - index[0]) + 1)
        dense[index - index[0]] = np.exp(logs + theta * losses - log_mgf)
        composed = irfft(_power(rfft(dense, self.length), copies), self.length)
        first, last = copies * int(index[0]), copies * int(index[-1])
        return _Sum(
            self.pair.quantum,
            first,
            composed[: last - first + 1],
            theta,
            copies * log_mgf,
            float(np.linalg.norm(dense)),
        )


@dataclass(frozen=True)
class _Sum:
    """A sum of losses: ``first``·quantum, one cell more, …, with tilted masses."""

    quantum: float
    first: int
    masses: Array
    tilt: float
    log_mgf: float
    norm: float
    """Euclidean, of one copy's tilted masses: what rounding is proportional to"""

    def losses(self, start: int) -> Array:
        """From number ``start`` on."""
        return np.asarray(np.arange(self.first + start, self.first + len(self.masses)) * self.quantum, dtype=np.float64)

    def weights(self, start: int) -> Array:
        """What takes the tilt back, from number ``start`` on."""
        return np.asarray(np.exp(self.log_mgf - self.tilt * self.losses(start)))


def _power(base: NDArray[np.complex128], exponent: int) -> NDArray[np.complex128]:
    """baseᵏ by repeated squaring: k − 1 products in all, as far as rounding is concerned."""
    result: NDArray[np.complex128] | None = None if exponent else np.ones_like(base)
    while exponent:
        if exponent & 1:
            result = base if result is None else result * base
        exponent >>= 1
        if exponent:
            base = base * base
    assert result is not None
    return result
