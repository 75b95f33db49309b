"""Fresh bins: δ, ε and σ computed by composing the exact accountant's single epoch. The proof is docs/fresh-bins.md.

**The pair** (P', Q') dominates (P, Q) because its δ(ε) lies above a certified one at every real ε. With W = dP/dQ and
x = e^ε, δ_remove is h(x) = E_Q (W − x)₊: convex, falling, h(0) = 1. The put E_Q (x − W)₊, which is h(x) − 1 + x, equals
x·δ_add(−log x), so the two directions at ε > 0 give h on both sides of x = 1. Upper bounds at some nodes, joined by
chords, bound h everywhere, because h is convex; so does their lower convex hull, whose every piece is a chord. Such a
piecewise linear function is itself the h of a pair whose W' takes the nodes' values only: Q' has the changes of slope
as masses, P' those times x. What is left of h behind the last node is P'-mass on W' = ∞, what is left of δ_add behind
its last node Q'-mass on W' = 0.

**The sum of k losses**, for Poisson sampling too, is found by the fast Fourier transform of *tilted* masses
x_i = p_i e^{θl_i}/M(θ), with θ the saddle point: then the losses near ε are the likely ones, and rounding is small
beside δ however small δ is. The transform is as long as the likely losses, what wraps around only adds, and Chernoff
bounds what lies beyond (docs/poisson.md).

**Rounding.** For masses that sum to 1, a transform of length N = 2^L errs by at most 8uL of its Euclidean norm
(Higham 2002, Theorem 24.2, with weights accurate to u = 2⁻⁵³); |x̂| ≤ 1, so raising to the k-th power errs by k times
that, and by 4u a multiplication; transforming back errs as before. With Parseval, the composed tilted masses err by at
most u‖x‖₂(8L(1.01k + 1) + 4k) in the Euclidean norm, and δ by that times the norm of what they are multiplied with. On
top of that comes a relative error: each tilted mass is computed to 1e-12, and k of them are multiplied. Where one of
the factors is of another law, ‖x‖₂ is the larger norm of the two: its own transform errs by as much as any of the k.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, rfft
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp

from lambdacgd.accounting.certificate import SMALLEST_EPSILON, Array, Bound, OneWay, real, tell
from lambdacgd.accounting.exact.accountant import (
    FINE,
    Evaluation,
    Precision,
    Scale,
    TransferMatrix,
    cost,
    evaluate_panel,
    flat,
    loss_law,
)
from lambdacgd.accounting.exact.accountant import LARGEST_EPSILON as LARGEST_SINGLE
from lambdacgd.accounting.exact.lattice import Columns, log_correlations
from lambdacgd.accounting.gaussian import gaussian_delta, gaussian_epsilon, gaussian_sigma, jensen_add, one_bin_delta
from lambdacgd.accounting.root import Secant, bisect, find_root, log_ratio, smallest, smallest_certified
from lambdacgd.errors import AccountingError

Index = NDArray[np.int64]

LONGEST = 1 << 24  #: of a transform: about half a gigabyte
SAFETY = 1e-9  #: relative: bounds are enlarged by this before float64 computes with them
LARGEST_LOSS = 700.0  #: e to its power is still a float64
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


def composed(losses: Losses, copies: int, epsilon: float, other: Losses | None = None) -> Tail:
    """An upper bound on E (1 − e^{ε − L})₊, L the sum of so many independent losses; infinite ones count in full.

    ``other`` is the law of one more loss in the sum, of the same quantum.
    """
    laws, total = [(losses, copies)], copies
    if other is not None:
        if other.quantum != losses.quantum:
            raise AccountingError("losses of different quanta are not composed")
        laws, total = [*laws, (other, 1)], copies + 1
    # One infinite loss makes the sum infinite; the other copies' masses add up to `whole` at most.
    whole = max(1.0, *(float(law.masses.sum()) + law.infinite for law, _ in laws))
    lost = sum(count * law.infinite for law, count in laws)
    lost *= math.exp(min((total - 1) * math.log(whole), 700.0))  # beyond e^700 δ is 1 anyway
    # Tilted masses err by under 1e-12 each, and so many of them are multiplied; the other half covers the last sum.
    safety = 1 + max(1e-9, 2e-12 * total)
    h, met = losses.quantum, [(law.index[law.masses != 0], law.masses[law.masses != 0], n) for law, n in laws]
    first, last = (sum(n * int(index[end]) for index, _, n in met) for end in (0, -1))
    if epsilon >= last * h:
        return Tail(lost * safety, lost, 0.0)
    parts = [(index * h, np.log(masses), n) for index, masses, n in met]

    def cumulants(theta: Any) -> list[Any]:
        return [logsumexp(logs + np.multiply.outer(theta, values), axis=-1) for values, logs, _ in parts]

    def cumulant(theta: Any) -> Any:
        """Of the sum."""
        return sum(n * each for (_, _, n), each in zip(parts, cumulants(theta), strict=True))

    # Tilted so that losses near ε are the likely ones.
    most = 600.0 / max(1e-12, *(float(np.abs(values).max()) for values, _, _ in parts))
    tilt = float(minimize_scalar(lambda t: cumulant(t) - t * epsilon, bounds=(0.0, most), method="bounded").x)
    each, log_mgf = cumulants(tilt), float(cumulant(tilt))
    tilted = [np.exp(logs + tilt * values - own) for (values, logs, _), own in zip(parts, each, strict=True)]
    # Chernoff: beyond `high`, and below `low`, lies at most e^−40 of the tilted law.
    variance = sum(n * float(x @ (v - x @ v) ** 2) for (v, _, n), x in zip(parts, tilted, strict=True))
    moves = np.geomspace(0.1, 100.0, 40) / (math.sqrt(variance) + h)
    ends = (40 + cumulant(tilt + moves) - log_mgf) / moves
    high, far = float(ends.min()), tilt + float(moves[ends.argmin()])
    low = -float(((40 + cumulant(tilt - moves) - log_mgf) / moves).min())
    start = max(math.floor(min(low, epsilon) / h), first)
    stop = min(math.ceil(max(high, epsilon + 2 * h) / h), last + 1)
    beyond = math.exp(min(float(cumulant(far)) - far * stop * h, 0.0)) if stop <= last else 0.0
    length = 1 << max(4, (stop - start).bit_length())
    if length > LONGEST:
        raise TooLong(total)
    dense = [np.bincount((index - index[0]) % length, x, length) for (index, _, _), x in zip(met, tilted, strict=True)]
    powers = [_power(rfft(x, length), n) for (_, _, n), x in zip(met, dense, strict=True)]
    sums = irfft(math.prod(powers[1:], start=powers[0]), length)
    cells = np.arange(max(start, math.floor(epsilon / h) + 1), stop)
    weights = -np.expm1(np.minimum(epsilon - cells * h, 0.0)) * np.exp(log_mgf - tilt * cells * h)
    value = float(weights @ np.maximum(sums[(cells - first) % length], 0.0))
    units = 8 * math.log2(length) * (1.01 * total + 1) + 4 * total
    norm = max(float(np.linalg.norm(x)) for x in dense)
    margin = 2.0**-53 * units * norm * float(np.linalg.norm(weights))
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
    index = np.array([point.index for point in hull[1:]], dtype=np.int64)
    p = q * np.array([point.x for point in hull[1:]])
    q_infinite = first.value / first.x * (1 + SAFETY) + GUARD
    pair = DiscretePair(quantum, index, p, q, last.value + GUARD, q_infinite)
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


def gaussian_pair(quantum: float, deviation: float) -> DiscretePair:
    """A pair that dominates the Gaussian mechanism whose loss has this standard deviation."""
    nodes: dict[int, float] = {}
    step = max(1, round(0.1 * deviation / quantum))  # chords add .2% to the variance
    while not nodes or min(nodes.values()) > 1e-15:
        at = (len(nodes) + 1) * step
        if at * quantum > LARGEST_LOSS:
            raise AccountingError(f"what all bins share has losses beyond {LARGEST_LOSS:g}; use a larger σ")
        nodes[at] = min(max(one_bin_delta(at * quantum, deviation) * (1 + 1e-9), 1e-300), 1.0)
    return dominating_pair(quantum, nodes, nodes)


@dataclass(frozen=True)
class Composition:
    """``copies`` independent copies of ``pair``, in both directions, each with a Gaussian mechanism beside it."""

    pair: DiscretePair
    copies: int
    core: DiscretePair | None = None  #: about the same pair without the slack of its bounds; nothing rests on it
    shared: float = 0.0  #: the variance of each Gaussian loss

    def tail(self, way: OneWay, epsilon: float) -> Tail:
        """δ of (P'^k, Q'^k), or of (Q'^k, P'^k)."""
        other = None if self._gaussian is None else self._gaussian.side(way)
        return composed(self.pair.side(way), self.copies, epsilon, other)

    @cached_property
    def _gaussian(self) -> DiscretePair | None:
        """All Gaussian mechanisms together are one."""
        return gaussian_pair(self.pair.quantum, math.sqrt(self.copies * self.shared)) if self.shared else None

    def delta(self, epsilon: float) -> float:
        """The larger of both directions."""
        return max(self.tail("remove", epsilon).delta, self.tail("add", epsilon).delta)

    def epsilon(self, delta: float) -> float:
        """The smallest ε > 0 with δ(ε) ≤ ``delta``, from above."""
        try:
            return smallest(self.delta, delta, rtol=1e-5, limits=(1e-6, 1e4))
        except AccountingError:
            raise AccountingError(f"so little noise has no ε at δ = {delta:g}; use more, or a larger δ") from None


# One epoch: certified δ(ε) at nodes that are chosen as the curve is walked

Values = dict[int, Evaluation]  #: bounds on one direction's δ at the nodes ε = index·quantum


@dataclass(frozen=True)
class Resolution:
    """How finely one epoch is computed. None of it affects validity."""

    smoothing: float  #: κ where δ is near 1, whence most of the composed loss comes; as δ^{−1/6} up to four times that
    gap: float  #: distance of nodes in units of 1/slope: chords add about gap²/8 of δ between them
    lattice: float  #: the share of δ that the Poisson factors may add, and the shared scales
    slack: float  #: the share of δ that all inequalities together may add at a node
    work: float  #: the most real operations spent on one direction's curve; from there on analytic bounds take over

    def precision(self, delta: float, *, tail: bool) -> Precision:
        """Where an epoch's δ is ``delta``. A tail has three times the smoothing, ten times the lattice's share."""
        smoothing, lattice = self.smoothing * min(4.0, max(1.0, (0.1 / delta) ** (1 / 6))), self.lattice
        if tail and delta <= 1e-3:
            smoothing, lattice = min(3 * smoothing, 0.4), min(10 * lattice, 1e-2)
        return replace(FINE, smoothing=smoothing, lattice=lattice, scales=lattice, rounding=0.2, extended=False)


QUICK = Resolution(smoothing=0.1, gap=0.3, lattice=2e-3, slack=0.3, work=1.5e11)
FINAL = Resolution(smoothing=0.05, gap=0.08, lattice=2e-4, slack=0.05, work=6e11)
AFFORDABLE = 4e8  #: operations a frequency before a dominating chain is taken: a curve has a thousand frequencies

SMALLEST_CELL = 1e-7  #: of the losses: e^loss differs from one cell to the next by a billion units in the last place
CELLS = 6  #: cells of the loss grid to a gap at ε = 0, where the slope is smallest
ADD_FLOOR = 10.0  #: floors down to which δ_add is followed. It seldom decides ε, and its far tail costs the most.
SHALLOW_FLOOR = 200.0  #: the same, coarsely, where it is only to be seen that it does not decide
FAR_TAIL = 100.0  #: floors up to which δ is followed coarsely: so little of the composed δ comes from there
PANEL = 2.3  #: a panel ends where δ has fallen by e^PANEL,
WIDEST_PANEL = 0.6  #: or where ε has grown by this much


def _core(pair: DiscretePair, remove: Values, add: Values) -> DiscretePair:
    """The pair through every node's value less what its bound, and the chords beside it, can have added."""
    chords = np.maximum(pair.heights, np.append(pair.heights[1:], 0.0))
    cores: tuple[dict[int, float], dict[int, float]] = ({}, {})
    for i, chord in zip(pair.index.tolist(), chords.tolist(), strict=True):
        # δ_add is h's put divided by x.
        value, chord = (remove[i], chord) if i > 0 else (add[-i], chord * math.exp(-i * pair.quantum))
        cores[i < 0][abs(i)] = max(value.core - chord, 1e-9 * value.delta)
    return dominating_pair(pair.quantum, *cores)


@dataclass(frozen=True)
class _Side:
    """One direction of one epoch's δ at this σ, bounded at nodes ε = index·quantum."""

    accountant: TransferMatrix
    sigma: float
    direction: OneWay
    quantum: float
    resolution: Resolution

    def ahead(self, latest: int, slope: float) -> range:
        """Nodes beyond the latest one (0: none yet), gap/slope apart, the first one at most half as far from 0."""
        step, last = max(1, round(self.resolution.gap / slope / self.quantum)), int(LARGEST_SINGLE / self.quantum)
        return range(latest + step if latest else max(1, step // 2), last + 1, step)


@lru_cache(maxsize=4)  # for an evaluation that goes deeper on the other side
def _curve(side: _Side, scale: Scale, floor: float, leave: float) -> Values:
    """Bounds on δ at nodes down to ``floor``: the lattice's as far as it goes or down to ``leave``, then analytic ones.

    Every one is proven: the transfer-matrix accountant's or, where that is larger, the Gaussian mechanism's without
    amplification (convexity), or for add the Gaussian one of Lemma 6.
    """
    chain, add, quantum = side.accountant.chain(side.sigma), side.direction == "add", side.quantum
    alone = math.sqrt(chain.loss_variance)

    def analytic(epsilon: float) -> float:
        gaussian = one_bin_delta(epsilon, alone)
        return min(jensen_add(*chain.mean_loss, epsilon), gaussian) if add else gaussian

    bounds: Values = {}
    latest, slope = 0, scale.slope
    with contextlib.suppress(AccountingError):  # the analytic bound takes over
        if add:
            first = Scale(math.exp(-side.ahead(0, slope)[0] * quantum), scale.delta, max(slope, 1.0))
            scale = side.accountant.settle(side.sigma, first, "add")
        for latest, value in _walk(side, scale, leave, leave > floor):
            smaller = value
            if (other := analytic(latest * quantum)) < value.delta:
                # No more of it is slack than of the lattice's, which lies above it.
                smaller = Evaluation(other, value.slope, {"analytic": min(other, value.added)}, "analytic")
            bounds[latest], slope = smaller, value.slope
            reached = smaller if add else value  # remove is followed as far as the lattice goes
            if reached.delta <= leave or value.budget["rounding"] > 0.5 * value.delta:
                break
    # Further nodes, at which δ is at most an analytic bound and at most what it was before: all of it may be slack.
    before = bounds[latest].delta if latest in bounds else 1.0
    while (not bounds or before > floor) and (ahead := side.ahead(latest, slope)):
        latest = ahead[0]
        before = max(min(before, analytic(latest * quantum) * (1 + 1e-9)), 1e-300)
        bounds[latest] = Evaluation(before, slope, {"analytic": before}, "analytic")
    return bounds


def _walk(side: _Side, scale: Scale, floor: float, coarse: bool) -> Iterator[tuple[int, Evaluation]]:
    """The lattice's bounds at node after node. A panel of neighbours shares one lattice and one set of transforms.

    A panel that turns out steeper than expected is cut short and the next starts there. Values below ``floor`` need no
    relative accuracy: slack of that size is accepted there.

    Raises:
        AccountingError: a panel stayed loose, or the resolution's work is done.
    """
    sign, quantum, resolution = 1.0 if side.direction == "remove" else -1.0, side.quantum, side.resolution
    # Where even the largest δ of an epoch is small (many epochs), that one counts as near 1.
    largest = min(scale.delta / 0.1, 1.0)
    done, tries, work = 0, 0, resolution.work
    while ahead := side.ahead(done, scale.slope):
        first, slope = ahead[0], scale.slope
        width = min(PANEL / slope, WIDEST_PANEL)
        panel = list(takewhile(lambda i: (i - first) * quantum <= width, ahead))  # noqa: B023
        expected = [max(scale.delta * math.exp(-slope * (i - first) * quantum), floor) for i in panel]
        scales = [Scale(math.exp(sign * i * quantum), d, slope) for i, d in zip(panel, expected, strict=True)]
        tail = coarse or expected[0] < FAR_TAIL * floor
        precision = resolution.precision(expected[0] / largest, tail=tail)
        precision = replace(precision, work=min(precision.work, work))
        # The law is tuned to the narrowest smoothing and the smallest δ of the panel.
        finest = Scale(min(s.strike for s in scales), expected[-1], slope)
        chain, _ = side.accountant.working_chain(side.sigma, slope, coarse=False)
        law = loss_law(chain, finest, precision, direction=side.direction)
        good: Evaluation | None = None
        for node, value in zip(panel, evaluate_panel(law, scales, precision), strict=True):
            # Rounding is no matter of tuning: whoever asked decides how much of it is worth having.
            slack = QUICK.slack if tail else resolution.slack
            if value.added - value.budget["rounding"] > slack * value.delta + floor:
                break
            yield node, value
            good, done, tries = value, node, 0
        work -= value.work
        if good is None:
            tries += 1
            if tries > 4:
                raise AccountingError(f"the bound at σ = {side.sigma:g}, ε = {first * quantum:g} stayed loose")
            scale = scale.learnt(value.core, value.delta, value.slope, floor=floor)
        elif following := side.ahead(done, slope):
            step, slope = (following[0] - done) * quantum, max(good.slope, 0.3)
            scale = Scale(scale.strike, max(good.delta * math.exp(-slope * step), floor), slope)


# The accountant

METHOD = "transfer-matrix-composed"
LARGEST_EPSILON = 100.0
SMALLEST_DELTA = 1e-10
EPSILONS, DELTAS = (SMALLEST_EPSILON, LARGEST_EPSILON), (SMALLEST_DELTA, 1.0)
MOST_EPOCHS = 10_000
TAIL_SHARE = 1e-3  #: of δ/k: one epoch's curve is followed down to this value
INSTEAD = "ask for a larger δ or a smaller ε, or use fixed bins or cyclic sampling"
RTOL = 5e-4  #: relative accuracy of σ
LIKE = 1e-6  #: the δ that is expected where nothing is known about it
MOST_QUICK, MOST_FINE = 12, 6  #: evaluations in one search for σ; then the best bound in hand is the answer
BOTH_MATTER = 0.7  #: ε up to which δ_add is nearly as large as δ_remove, and computed as finely at once
QUICK_EXCESS = 0.11  #: about the logarithm of a quick δ over a fine one
#: of one core, and of one fine evaluation: only to tell how long an answer will take
OPERATIONS_A_SECOND, FREQUENCIES = 3e10, 900
#: operations of a fine evaluation (more where there are more than 1000 bins) from which a search ends within this
#: relative distance of the smallest σ
DEAR, DEAR_ACCURACY = 6e10, 5e-3
FEWEST_BINS = 12  #: of a thinned chain, about
THINNED = 0.82  #: about the correlation between neighbours of the chain that estimates are computed with


@dataclass(frozen=True)
class FreshBins:
    """Accountant of C_λ (or its column-normalised form), restarted with new bins at every epoch.

    The ``budget`` of its bounds lists the infinite losses and the rounding of the composition, and as "one epoch" about
    what the slack of the exact accountant's curve and the chords between its nodes add. Analytic bounds, which take
    over where the work is capped, add more than it tells.

    Args:
        lam: λ, from 0 to 0.9999.
        steps_per_epoch: b, the number of bins.
        epochs: k, up to 10 000.
        normalized: whether the columns of C are scaled to norm 1.
        columns: account for any matrix whose columns have these inner products over an epoch, or smaller ones, instead.
        kept: epochs over which bins stay and noise goes on, if it is not one: then "epoch" here means so many.

    Raises:
        AccountingError: a parameter is outside what this accountant takes.

    Guarantee
    ---------
    Every δ returned is an upper bound on both directions of the k-fold product of the single-epoch pair
    P₁ = (1/b) Σ_j N(C[:, j], σ²I), Q₁ = N(0, σ²I). That pair dominates training under zero-out of one example if every
    epoch draws its bins and its noise anew and takes nothing back across its boundary (docs/fresh-bins.md). One epoch
    is bounded by the transfer-matrix accountant; chords, composition and rounding only add.
    """

    lam: float
    steps_per_epoch: int
    epochs: int
    normalized: bool = False
    columns: Columns | None = None
    kept: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "epochs", int(real("epochs", self.epochs, 1, MOST_EPOCHS, whole=True)))
        single = self.one_epoch  # validates
        object.__setattr__(self, "lam", single.lam)
        object.__setattr__(self, "steps_per_epoch", single.steps_per_epoch)

    @property
    def one_epoch(self) -> TransferMatrix:
        """The accountant of what changes from bin to bin."""
        columns = self.columns and replace(self.columns, shared=0.0)
        return TransferMatrix(self.lam, self.steps_per_epoch, self.kept, self.normalized, columns, AFFORDABLE)

    @property
    def shared(self) -> float:
        """The variance, at σ = 1, of an epoch's loss that all bins share."""
        return self.kept**2 * self.columns.shared if self.columns else 0.0

    # The four questions

    def delta(self, sigma: float, epsilon: float) -> Bound:
        """An upper bound on δ(ε) at noise multiplier σ, for ε from 0.001 to 100.

        Raises:
            AccountingError: an argument is out of range, or the composition certifies nothing.
        """
        sigma, epsilon = real("σ", sigma, self.one_epoch.smallest_sigma), real("ε", epsilon, *EPSILONS)
        if self.steps_per_epoch == 1:
            return self._one_bin(sigma, epsilon)
        bound = self.bound(self.composed(sigma, LIKE), sigma, epsilon)
        if bound.delta < LIKE:
            like = max(bound.delta - bound.budget["infinite losses"], 0.01 * bound.delta, SMALLEST_DELTA)
            bound = self.bound(self.composed(sigma, like), sigma, epsilon)
        return bound

    def epsilon(self, sigma: float, delta: float) -> Bound:
        """The bound at the smallest ε, from 0.001 on, that is certified for ``delta``.

        Raises:
            AccountingError: an argument is out of range, or no ε is certified.
        """
        sigma, delta = real("σ", sigma, self.one_epoch.smallest_sigma), real("δ", delta, *DELTAS, below=True)
        if self.steps_per_epoch == 1:
            alone = gaussian_epsilon(sigma / self._sensitivity, delta * (1 - 1e-8)) * (1 + 1e-9)
            return self._one_bin(sigma, max(alone, SMALLEST_EPSILON))
        composed = self.composed(sigma, delta)
        epsilon = real("ε", max(composed.epsilon(delta), SMALLEST_EPSILON), *EPSILONS)
        return self.bound(composed, sigma, epsilon)

    def epsilons(self, sigma: float, delta: float) -> tuple[float, ...]:
        """ε certified for ``delta`` after 1, 2, …, k epochs, all from one single-epoch curve."""
        sigma, delta = real("σ", sigma, self.one_epoch.smallest_sigma), real("δ", delta, *DELTAS, below=True)
        epochs = range(1, self.epochs + 1)
        if self.steps_per_epoch == 1:
            return tuple(replace(self, epochs=k).epsilon(sigma, delta).epsilon for k in epochs)
        composed = self.composed(sigma, delta)
        return tuple(replace(composed, copies=k).epsilon(delta) for k in epochs)

    def sigma(self, epsilon: float, delta: float) -> Bound:
        """The bound at the smallest σ, of round numbers, whose certified δ(ε) is at most ``delta``.

        Args:
            epsilon: ε, from 0.001 to 100.
            delta: δ, from 1e-10 on.

        Returns:
            A bound whose σ was itself evaluated and passed.

        Raises:
            AccountingError: an argument is out of range, or no σ was certified.
        """
        epsilon, delta = real("ε", epsilon, *EPSILONS), real("δ", delta, *DELTAS, below=True)
        if self.steps_per_epoch == 1:
            alone = self._sensitivity * gaussian_sigma(epsilon, delta) * (1 + 1e-9)
            return self._one_bin(alone, epsilon)
        near = _estimate(self, epsilon, delta, None)
        tell(near.sigma, near.seconds)
        strategy = self._strategy(near.slope)
        enough = DEAR_ACCURACY if near.work > DEAR * max(1.0, self.steps_per_epoch / 1000) else 0.0
        begin = max(near.sigma, math.exp(strategy.limits[0])) * (1 + enough / 2)

        def evaluate(sigma: float) -> Bound:
            return self._evaluate(sigma, epsilon, delta, FINAL)

        bound, _ = smallest_certified(evaluate, delta, begin, strategy, rtol=RTOL, most=MOST_FINE, enough=enough)
        if bound is None:
            raise AccountingError(f"no σ keeps δ(ε = {epsilon:g}) below {delta:g}; ask for a larger ε or δ")
        searched = {"search_sigma_loss": log_ratio(delta, bound.delta) / -strategy.slope}
        return replace(bound, details=bound.details | searched)

    def quick_sigma(self, epsilon: float, delta: float, *, start: float | None = None) -> float:
        """About the smallest σ, to about 0.5%, in a fraction of a second: for comparing λ, no claim."""
        epsilon, delta = real("ε", epsilon, *EPSILONS), real("δ", delta, *DELTAS, below=True)
        if self.steps_per_epoch == 1:
            return self._sensitivity * gaussian_sigma(epsilon, delta)
        return _estimate(self, epsilon, delta, start).sigma

    # How they are answered

    def composed(
        self, sigma: float, delta: float, *, resolution: Resolution = FINAL, shallow: bool = False
    ) -> Composition:
        """All epochs at this σ, fine enough for values of δ down to ``delta``.

        ``shallow``: the lattice is left for analytic bounds earlier on the side of add, whose far tail costs the most.
        That is valid as ever, but fine enough only where δ_add does not govern.
        """
        single, k, floor = self.one_epoch, self.epochs, TAIL_SHARE * delta / self.epochs
        # Where there is much noise the losses of one epoch are small: ε is near 0 where it is small beside them.
        spread = math.sqrt(single.chain(sigma).mean_loss[1])
        scale = single.settle(sigma, flat(min(SMALLEST_EPSILON, 0.05 * spread)))
        # δ(0) is about .4 deviations of the loss. A normal loss is followed over so many of them, to both sides.
        span = 2 * scale.delta / 0.4 * math.sqrt(2 * math.log(max(scale.delta / floor, 2.0)))
        quantum = max(resolution.gap / scale.slope / CELLS, SMALLEST_CELL, span * k / LONGEST)
        leave = (SHALLOW_FLOOR if shallow else ADD_FLOOR) * floor
        remove = _curve(_Side(single, sigma, "remove", quantum, resolution), scale, floor, floor)
        add = _curve(_Side(single, sigma, "add", quantum, resolution), scale, ADD_FLOOR * floor, leave)
        pair = dominating_pair(quantum, *({i: bound.delta for i, bound in side.items()} for side in (remove, add)))
        return Composition(pair, k, _core(pair, remove, add), self.shared / sigma**2)

    def bound(self, composed: Composition, sigma: float, epsilon: float) -> Bound:
        """Both directions at one ε."""
        remove, add = composed.tail("remove", epsilon), composed.tail("add", epsilon)
        way: OneWay = "remove" if remove.delta >= add.delta else "add"
        governing = remove if way == "remove" else add
        assert composed.core is not None
        core = replace(composed, pair=composed.core).tail(way, epsilon)
        budget = {
            "infinite losses": governing.infinite,
            "rounding": governing.rounding,
            "one epoch": max(governing.delta - core.delta - governing.infinite, 0.0),
        }
        _, loss = self.one_epoch.working_chain(sigma, 5.0, coarse=False)
        details = {
            "nodes": len(composed.pair.index),
            "cell": composed.pair.quantum,
            "transform": governing.transform,
            "dominating_chain_sigma_loss": loss,
        }
        bound = Bound(sigma, epsilon, remove.delta, add.delta, METHOD, budget, details)
        if not 0 < bound.delta <= 1.01 or not math.isfinite(bound.delta):
            raise AccountingError(f"composition gave δ = {bound.delta:.3g}, which certifies nothing; {INSTEAD}")
        return bound

    def _evaluate(self, sigma: float, epsilon: float, delta: float, resolution: Resolution) -> Bound:
        """One step of a search for ``delta``."""
        shallow = epsilon > BOTH_MATTER
        bound = self.bound(self.composed(sigma, delta, resolution=resolution, shallow=shallow), sigma, epsilon)
        if shallow and bound.direction == "add":
            bound = self.bound(self.composed(sigma, delta, resolution=resolution), sigma, epsilon)
        return bound

    def _strategy(self, slope: float) -> Secant:
        """How a search over log σ goes on, ``slope`` being −d log δ/d log σ."""
        return Secant(-slope, limits=(math.log(self.one_epoch.smallest_sigma * 1.001), math.inf))

    def first_guess(self, epsilon: float, delta: float) -> float:
        """σ at which a Gaussian mechanism of the same E W² after k epochs would need (ε, δ).

        A closed form: quick enough to compare many λ, and seen from level with what is certified to 15% below
        it (few epochs at a large ε).
        """
        mu, moment, k = 1 / gaussian_sigma(epsilon, delta), self._log_moment(), self.epochs
        low = math.log(self.one_epoch.smallest_sigma * 1.01)
        most = self.one_epoch.chain(1.0).loss_variance + self.shared
        high = max(math.log(math.sqrt(k * most) / mu) + 1.0, low + 1.0)
        return math.exp(bisect(lambda x: k * moment(x) <= mu**2, low, high, width=1e-7))

    def _log_moment(self) -> Callable[[float], float]:
        """log E W² of one epoch at noise e^x, as a function of x."""
        chain, b = self.one_epoch.chain(1.0), self.steps_per_epoch
        # Beyond the distance where correlations end every pair adds e^0: those need no sum.
        reach = b if chain.lam == 0 or chain.second else min(b, 2 + math.ceil(30 / -math.log(chain.lam)))
        d = np.arange(1, reach)
        pairs = 2 * (b - d) / b**2
        peak, covariances = chain.loss_variance, chain.gain * chain.covariance(d)
        middle = np.array([peak])
        middles = (np.arange(16)[:, None] + 0.5) / 16
        if chain.second:
            dense, places = chain.gram(), (middles * (b - d)).astype(np.int64)
            covariances, middle = dense[places, places + d], np.diag(dense)
        elif self.columns and chain.runs:  # a mean over places of the epoch, as below
            logs, places = log_correlations(chain.runs), (middles * (b - d)).astype(np.int64)
            covariances = np.asarray(chain.gain * np.exp(logs[places + d] - logs[places]), dtype=np.float64)
        elif chain.runs:  # without the steps of the runs, so that it is smooth in λ
            left, rate = b - middles * (b - d), 2 * math.log(self.lam)
            falling = np.sqrt(np.expm1((left - d) * rate) / np.expm1(left * rate))
            covariances = np.asarray(chain.gain * self.lam**d * falling, dtype=np.float64)
        elif chain.tail and b * (1 - chain.lam) < 20:  # what the end takes away shows
            ends = chain.end_effect(middles * (b - d)) * chain.end_effect(middles * (b - d) + d)
            covariances = covariances - chain.gain * chain.tail * ends
            taken = chain.tail * chain.end_effect(middles[:, 0] * b) ** 2
            middle = chain.gain * (chain.covariance(0.0) - taken) + chain.nugget

        def at(log_sigma: float) -> float:
            scale = math.exp(-2 * log_sigma)
            if peak * scale > 600:
                return math.inf
            excess = float(np.expm1(middle * scale).mean()) / b
            excess += float((np.expm1(covariances * scale) @ pairs).mean())
            return math.log1p(max(excess, 1e-15)) + self.shared * scale

        return at

    def thinned(self, sigma: float) -> FreshBins:
        """The accountant of a shorter chain, for estimates: as many bins as leave E W² at ``sigma`` what it is.

        Itself where it is short anyway, and where bins have parts of their own or stay, which is not thinned.
        """
        chain = self.one_epoch.chain(1.0)
        if chain.lam <= THINNED or chain.nugget or self.shared or self.kept > 1:
            return self
        group = min(round(math.log(THINNED) / math.log(chain.lam)), self.steps_per_epoch // FEWEST_BINS)
        if group < 2:
            return self
        columns = None if chain.runs else Columns(chain.gain, 0.0, chain.tail)
        moment = self._log_moment()(math.log(sigma))

        def shorter(bins: float) -> FreshBins:
            return FreshBins(chain.lam**group, round(bins), self.epochs, columns is None, columns)

        def enough(bins: float) -> bool:
            return shorter(bins)._log_moment()(math.log(sigma)) <= moment

        bins = float(self.steps_per_epoch)
        return shorter(bisect(enough, 2.0, bins, width=0.5)) if enough(bins) else self

    def _one_bin(self, sigma: float, epsilon: float) -> Bound:
        """b = 1: every epoch is a Gaussian mechanism, and k of them are one of √k times the sensitivity."""
        value = gaussian_delta(epsilon, sigma / self._sensitivity) * (1 + 1e-9)
        return Bound(sigma, epsilon, value, value, METHOD, {}, {"one_bin": "gaussian"})

    @property
    def _sensitivity(self) -> float:
        """Of one bin over all epochs: the norm of its columns is 1 unless they are given."""
        one = self.one_epoch.chain(1.0).loss_variance + self.shared if self.columns or self.kept > 1 else 1.0
        return math.sqrt(self.epochs * one)


@dataclass(frozen=True)
class _Near:
    """About the smallest σ, −d log δ/d log σ there, and about what it will take to certify it."""

    sigma: float
    slope: float
    work: float  #: operations of one fine evaluation
    seconds: float  #: of all of them


@lru_cache(maxsize=256)  # choosing λ asks for what the search for σ then begins with
def _estimate(accountant: FreshBins, epsilon: float, delta: float, start: float | None) -> _Near:
    """Quick evaluations of a thinned chain until δ is within a tenth of its target, and from there along the secant."""
    larger = 1.01 + 0.1 * min(epsilon / 8, 1.0) / accountant.epochs**0.5
    closed = accountant.first_guess(epsilon, delta)
    slope = math.log(1.1) / math.log(accountant.first_guess(epsilon, delta / 1.1) / closed)
    guess = start or closed * larger
    short, strategy = accountant.thinned(guess), accountant._strategy(min(max(slope, 2.0), 200.0))
    began = time.monotonic()

    def f(x: float) -> float:
        return log_ratio(short._evaluate(math.exp(x), epsilon, delta, QUICK).delta, delta)

    begin = strategy.within_limits(math.log(guess))
    x, value = find_root(f, begin, strategy, lambda value: abs(value) < 0.1, most=MOST_QUICK)
    x -= (value - QUICK_EXCESS) / strategy.slope
    each = (time.monotonic() - began) / len(strategy.points)
    chain, _ = accountant.one_epoch.working_chain(math.exp(x), 5.0, coarse=False)
    work = FREQUENCIES * cost(chain, 5.0) if chain.lam else 0.0
    return _Near(math.exp(x), -strategy.slope, work, 2 * (4 * each + work / OPERATIONS_A_SECOND))
