"""A discrete pair (P', Q') that dominates (P, Q) because its δ(ε) lies above a certified one at every real ε.

With W = dP/dQ and x = e^ε, δ_remove is h(x) = E_Q (W − x)₊: convex, falling, h(0) = 1. The put E_Q (x − W)₊, which is
h(x) − 1 + x, equals x·δ_add(−log x), so the two directions at ε > 0 give h on both sides of x = 1. Upper bounds at some
nodes, joined by chords, bound h everywhere, because h is convex; so does their lower convex hull, whose every piece is
a chord. Such a piecewise linear function is itself the h of a pair whose W' takes the nodes' values only ("connect the
dots", Doroshenko et al., arXiv 2207.04380): Q' has the changes of slope as masses, P' those times x. What is left of h
behind the last node is P'-mass on W' = ∞, what is left of δ_add behind its last node Q'-mass on W' = 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lambdacgd.accounting.base import AccountingError

Array = NDArray[np.float64]
Index = NDArray[np.int64]

SAFETY = 1e-9
"""relative: bounds are enlarged by this before float64 computes with them"""
GUARD = 1e-14
"""absolute: added to the masses of infinite losses, for the rounding of sums of masses near 1"""


@dataclass(frozen=True)
class DiscretePair:
    """Losses ``index``·``quantum`` with masses ``p`` under P' and ``q`` under Q', and the masses of infinite losses."""

    quantum: float
    index: Index
    p: Array
    q: Array
    p_infinite: float
    q_infinite: float
    slack: dict[str, Array] = field(default_factory=dict)
    """what each inequality behind the bounds can have added to h at the nodes; no claim, and nothing rests on it"""

    @property
    def heights(self) -> Array:
        """About the most by which each chord lies above h: from 0 to the first node (none), then from node to node.

        width²/8 times the curvature that the masses at both ends say, and not more than lines through them allow.
        """
        width = np.diff(np.exp(self.losses))
        between = 0.5 * (np.append(0.0, width) + np.append(width, 0.0))
        curvature = self.q / np.maximum(between, 1e-300)
        left, right = self.q[:-1], self.q[1:]
        lines = width * left * right / np.maximum(left + right, 1e-300)
        return np.append(0.0, np.minimum(width**2 / 8 * np.maximum(curvature[:-1], curvature[1:]), lines))

    @property
    def losses(self) -> Array:
        return np.asarray(self.index * self.quantum, dtype=np.float64)

    def remove(self, epsilon: float) -> float:
        """δ of (P', Q') at any real ε: E_P' (1 − e^{ε − L})₊."""
        return float(-np.expm1(np.minimum(epsilon - self.losses, 0.0)) @ self.p) + self.p_infinite

    def add(self, epsilon: float) -> float:
        """δ of (Q', P') at any real ε: E_Q' (1 − e^{ε + L})₊."""
        return float(-np.expm1(np.minimum(epsilon + self.losses, 0.0)) @ self.q) + self.q_infinite


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
    if b.below:
        return (b.value - a.value) / (b.x - a.x)
    return 1.0 - _fall(a, b)


def _fall(a: _Point, b: _Point) -> float:
    """Minus the slope of h between two points: from calls where both lie above 1."""
    if not a.below:
        return (a.value - b.value) / (b.x - a.x)
    if not b.below:
        return (a.value - b.value + 1.0 - a.x) / (b.x - a.x)
    return 1.0 - _rise(a, b)


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
    return _connect(quantum, hull)


def _connect(quantum: float, hull: list[_Point]) -> DiscretePair:
    """The pair whose h' passes through the hull's points, the first of which is (0, 1)."""
    last = hull[-1]
    if last.below or hull[1].index >= 0:
        raise AccountingError("the bounds on δ say nothing on one side of ε = 0")
    q = [_bends(*hull[i - 1 : i + 2]) for i in range(1, len(hull) - 1)]
    q.append(_fall(hull[-2], last))
    index = np.array([point.index for point in hull[1:]], dtype=np.int64)
    x = np.array([point.x for point in hull[1:]])
    masses = np.asarray(q)
    pair = DiscretePair(
        quantum, index, masses * x, masses, last.value + GUARD, hull[1].value / hull[1].x * (1 + SAFETY) + GUARD
    )
    _check(pair, hull)
    return pair


def _check(pair: DiscretePair, hull: list[_Point]) -> None:
    """Fail closed: the masses must reproduce every point of the hull, from above, to much less than was added to it."""
    good = bool(np.isfinite(pair.p).all() and (pair.q >= 0).all() and pair.p_infinite <= 1.01)
    for point in hull[1:]:
        loss = math.log(point.x)
        if point.below:
            good &= pair.add(-loss) >= point.value / point.x * (1 - 0.9 * SAFETY)
        else:
            good &= pair.remove(loss) >= point.value * (1 - 0.9 * SAFETY)
    if not good:
        raise AccountingError("the discrete pair misses its bounds; please report this as an error in lambdacgd")
