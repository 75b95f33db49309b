"""Discrete losses and sums of independent ones: what fresh bins and Poisson sampling compose.

**The pair** (P', Q') dominates (P, Q) because its δ(ε) lies above a certified one at every real ε. With W = dP/dQ and
x = e^ε, δ_remove is h(x) = E_Q (W − x)₊: convex, falling, h(0) = 1. The put E_Q (x − W)₊, which is h(x) − 1 + x, equals
x·δ_add(−log x), so the two directions at ε > 0 give h on both sides of x = 1. Upper bounds at some nodes, joined by
chords, bound h everywhere, because h is convex; so does their lower convex hull, whose every piece is a chord. Such a
piecewise linear function is itself the h of a pair whose W' takes the nodes' values only: Q' has the changes of slope
as masses, P' those times x. What is left of h behind the last node is P'-mass on W' = ∞, what is left of δ_add behind
its last node Q'-mass on W' = 0.

**The sum of k losses** is found by the fast Fourier transform of *tilted* masses x_i = p_i e^{θl_i}/M(θ), with θ the
saddle point: then the losses near ε are the likely ones, and rounding is small beside δ however small δ is. The
transform is as long as the likely losses, what wraps around only adds, and Chernoff bounds what lies beyond
(docs/poisson.md).

**Rounding.** For masses that sum to 1, a transform of length N = 2^L errs by at most 8uL of its Euclidean norm
(Higham 2002, Theorem 24.2, with weights accurate to u = 2⁻⁵³); |x̂| ≤ 1, so raising to the k-th power errs by k times
that, and by 4u a multiplication; transforming back errs as before. With Parseval, the composed tilted masses err by at
most u‖x‖₂(8L(1.01k + 1) + 4k) in the Euclidean norm, and δ by that times the norm of what they are multiplied with. On
top of that comes a relative error: each tilted mass is computed to 1e-12, and k of them are multiplied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, rfft
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp

from lambdacgd.accounting.certificate import Array, OneWay
from lambdacgd.accounting.root import smallest
from lambdacgd.errors import AccountingError

Index = NDArray[np.int64]

LONGEST = 1 << 24  #: of a transform: about half a gigabyte
SAFETY = 1e-9  #: relative: bounds are enlarged by this before float64 computes with them
GUARD = 1e-14  #: absolute: added to the masses of infinite losses, for the rounding of sums of masses near 1


class TooLong(AccountingError):
    """So many losses need a transform that is too long."""

    def __init__(self, copies: int) -> None:
        super().__init__(f"{copies} losses need a transform beyond {LONGEST:,} numbers; ask for another ε or rate")


@dataclass(frozen=True)
class Losses:
    """The law of a privacy loss: upper bounds on the masses at ``index``·``quantum``, and on that of infinite ones."""

    quantum: float
    index: Index
    masses: Array
    infinite: float

    def delta(self, epsilon: float) -> float:
        """E (1 − e^{ε − L})₊ at any real ε."""
        return float(-np.expm1(np.minimum(epsilon - self.index * self.quantum, 0.0)) @ self.masses) + self.infinite


@dataclass(frozen=True)
class Tail:
    """δ(ε) ≤ ``delta``, of which ``infinite`` comes from infinite losses and ``rounding`` is the margin."""

    delta: float
    infinite: float
    rounding: float
    transform: int = 0  #: its length


def composed(losses: Losses, copies: int, epsilon: float) -> Tail:
    """An upper bound on E (1 − e^{ε − L})₊, L the sum of so many independent losses; infinite ones count in full."""
    # One infinite loss makes the sum infinite; the other copies' masses add up to `whole` at most.
    whole = max(float(losses.masses.sum()) + losses.infinite, 1.0)
    lost = copies * losses.infinite * math.exp(min((copies - 1) * math.log(whole), 700.0))  # beyond e^700 δ is 1 anyway
    # Tilted masses err by under 1e-12 each, and so many of them are multiplied; the other half covers the last sum.
    safety = 1 + max(1e-9, 2e-12 * copies)
    h, index, masses = losses.quantum, losses.index[losses.masses != 0], losses.masses[losses.masses != 0]
    first, last = copies * int(index[0]), copies * int(index[-1])
    if epsilon >= last * h:
        return Tail(lost * safety, lost, 0.0)
    values, logs = index * h, np.log(masses)

    def cumulant(theta: float) -> float:
        return float(logsumexp(logs + theta * values))

    # Tilted so that losses near ε are the likely ones.
    most = 600.0 / max(float(np.abs(values).max()), 1e-12)
    tilt = float(minimize_scalar(lambda t: copies * cumulant(t) - t * epsilon, bounds=(0.0, most), method="bounded").x)
    log_mgf = cumulant(tilt)
    tilted = np.exp(logs + tilt * values - log_mgf)
    # Chernoff: beyond `high`, and below `low`, lies at most e^−40 of the tilted law.
    spread = math.sqrt(copies * float(tilted @ (values - tilted @ values) ** 2)) + h
    moves = np.geomspace(0.1, 100.0, 40) / spread
    high, far = min(((40 + copies * (cumulant(tilt + t) - log_mgf)) / t, tilt + t) for t in moves)
    low = max((40 + copies * (cumulant(tilt - t) - log_mgf)) / -t for t in moves)
    start = max(math.floor(min(low, epsilon) / h), first)
    stop = min(math.ceil(max(high, epsilon + 2 * h) / h), last + 1)
    beyond = math.exp(min(copies * cumulant(far) - far * stop * h, 0.0)) if stop <= last else 0.0
    length = 1 << max(4, (stop - start).bit_length())
    if length > LONGEST:
        raise TooLong(copies)
    dense = np.bincount((index - index[0]) % length, tilted, length)
    sums = irfft(_power(rfft(dense, length), copies), length)
    cells = np.arange(max(start, math.floor(epsilon / h) + 1), stop)
    weights = -np.expm1(np.minimum(epsilon - cells * h, 0.0)) * np.exp(copies * log_mgf - tilt * cells * h)
    value = float(weights @ np.maximum(sums[(cells - first) % length], 0.0))
    units = 8 * math.log2(length) * (1.01 * copies + 1) + 4 * copies
    margin = 2.0**-53 * units * float(np.linalg.norm(dense)) * float(np.linalg.norm(weights))
    return Tail((value + margin + beyond + lost) * safety, lost, margin, length)


def _power(base: NDArray[np.complex128], exponent: int) -> NDArray[np.complex128]:
    """baseᵏ by repeated squaring: k − 1 products in all, as far as rounding is concerned."""
    result: NDArray[np.complex128] | None = None
    while exponent:
        if exponent & 1:
            result = base if result is None else result * base
        exponent >>= 1
        if exponent:
            base = base * base
    assert result is not None
    return result


# A pair from bounds on δ


@dataclass(frozen=True)
class DiscretePair:
    """Losses ``index``·``quantum`` with masses ``p`` under P' and ``q`` under Q', and the masses of infinite losses."""

    quantum: float
    index: Index
    p: Array
    q: Array
    p_infinite: float
    q_infinite: float

    def side(self, way: OneWay) -> Losses:
        """The loss under P', or minus the loss under Q'."""
        if way == "remove":
            return Losses(self.quantum, self.index, self.p, self.p_infinite)
        return Losses(self.quantum, -self.index[::-1], self.q[::-1], self.q_infinite)

    @property
    def heights(self) -> Array:
        """About the most by which each chord lies above h: from 0 to the first node (none), then from node to node.

        width²/8 times the curvature that the masses at both ends say, and not more than lines through them allow.
        """
        width = np.diff(np.exp(self.index * self.quantum))
        between = 0.5 * (np.append(0.0, width) + np.append(width, 0.0))
        curvature = self.q / np.maximum(between, 1e-300)
        left, right = self.q[:-1], self.q[1:]
        lines = width * left * right / np.maximum(left + right, 1e-300)
        return np.append(0.0, np.minimum(width**2 / 8 * np.maximum(curvature[:-1], curvature[1:]), lines))


@dataclass(frozen=True)
class _Point:
    """A bound on h at x: as h itself above 1, as the put h − 1 + x below, whichever is small."""

    index: int
    x: float
    value: float

    @property
    def below(self) -> bool:
        return self.x < 1


def _rise(a: _Point, b: _Point) -> float:
    """1 + slope of h between two points: from puts where both lie below 1."""
    return (b.value - a.value) / (b.x - a.x) if b.below else 1.0 - _fall(a, b)


def _fall(a: _Point, b: _Point) -> float:
    """Minus the slope of h between two points: from calls where both lie above 1."""
    if not a.below:
        return (a.value - b.value) / (b.x - a.x)
    return 1.0 - _rise(a, b) if b.below else (a.value - b.value + 1.0 - a.x) / (b.x - a.x)


def _bends(a: _Point, b: _Point, c: _Point) -> float:
    """The change of slope at b on the way from a to c: negative where b lies above the chord."""
    return _rise(b, c) - _rise(a, b) if b.below else _fall(a, b) - _fall(b, c)


def dominating_pair(quantum: float, remove: dict[int, float], add: dict[int, float]) -> DiscretePair:
    """From upper bounds on δ_remove and δ_add at ε = index·``quantum`` > 0, at least one each.

    Guarantee
    ---------
    If ``remove[i]`` ≥ δ_remove(i·quantum) and ``add[i]`` ≥ δ_add(i·quantum) at all given i, then δ of (P', Q') is at
    least δ_remove and δ of (Q', P') at least δ_add at every real ε. So (P', Q') dominates (P, Q), and products of k
    copies of one dominate those of the other, adaptive choices included (Zhu, Dong & Wang 2022, arXiv 2106.08567).
    """
    if not remove or not add or min(*remove, *add) < 1:
        raise AccountingError("bounds on δ are needed at positive ε in both directions")
    values = np.array([*remove.values(), *add.values()])
    if not (np.isfinite(values).all() and (values > 0).all() and (values <= 1).all()):
        raise AccountingError("a bound on δ that is not in (0, 1] certifies nothing")
    points = [_Point(0, 0.0, 0.0)]  # h(0) = 1
    for i in sorted(add, reverse=True):
        x = math.exp(-i * quantum)
        points.append(_Point(-i, x, add[i] * (1 + SAFETY) * x))
    for i in sorted(remove):
        points.append(_Point(i, math.exp(i * quantum), remove[i] * (1 + SAFETY)))
    hull: list[_Point] = []
    for point in points:
        while len(hull) > 1 and _bends(hull[-2], hull[-1], point) <= 0:
            hull.pop()
        hull.append(point)
    while len(hull) > 2 and _fall(hull[-2], hull[-1]) <= 0:  # h falls: the value before the last one is lower
        hull.pop()
    # The pair whose h' passes through the hull's points, the first of which is (0, 1).
    first, last = hull[1], hull[-1]
    if last.below or first.index >= 0:
        raise AccountingError("the bounds on δ say nothing on one side of ε = 0")
    q = np.array([*(_bends(*hull[i - 1 : i + 2]) for i in range(1, len(hull) - 1)), _fall(hull[-2], last)])
    index, x = np.array([point.index for point in hull[1:]], dtype=np.int64), np.array([point.x for point in hull[1:]])
    q_infinite = first.value / first.x * (1 + SAFETY) + GUARD
    pair = DiscretePair(quantum, index, q * x, q, last.value + GUARD, q_infinite)
    _check(pair, hull)
    return pair


def _check(pair: DiscretePair, hull: list[_Point]) -> None:
    """Fail closed: the masses must reproduce every point of the hull, from above, to much less than was added to it."""
    good = bool(np.isfinite(pair.p).all() and (pair.q >= 0).all() and pair.p_infinite <= 1.01)
    remove, add = pair.side("remove"), pair.side("add")
    for point in hull[1:]:
        loss = math.log(point.x)
        found, wanted = (add.delta(-loss), point.value / point.x) if point.below else (remove.delta(loss), point.value)
        good &= found >= wanted * (1 - 0.9 * SAFETY)
    if not good:
        raise AccountingError("the discrete pair misses its bounds; please report this as an error in lambdacgd")


@dataclass(frozen=True)
class Composition:
    """``copies`` independent copies of ``pair``, in both directions."""

    pair: DiscretePair
    copies: int
    core: DiscretePair | None = None  #: about the same pair without the slack of its bounds; nothing rests on it

    def tail(self, way: OneWay, epsilon: float) -> Tail:
        """δ of (P'^k, Q'^k), or of (Q'^k, P'^k)."""
        return composed(self.pair.side(way), self.copies, epsilon)

    def delta(self, epsilon: float) -> float:
        """The larger of both directions."""
        return max(self.tail("remove", epsilon).delta, self.tail("add", epsilon).delta)

    def epsilon(self, delta: float) -> float:
        """The smallest ε > 0 with δ(ε) ≤ ``delta``, from above."""
        try:
            return smallest(self.delta, delta, rtol=1e-5, limits=(1e-6, 1e4))
        except AccountingError:
            raise AccountingError(f"so little noise has no ε at δ = {delta:g}; use more, or a larger δ") from None
