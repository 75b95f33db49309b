"""Fresh bins: δ, ε and σ computed by composing the exact accountant's single epoch. The proof is docs/fresh-bins.md.

**The pair** (P', Q') dominates (P, Q) because its δ(ε) lies above a certified one at every real ε. With W = dP/dQ and
x = e^ε, δ_remove is h(x) = E_Q (W − x)₊: convex, falling, h(0) = 1. The put E_Q (x − W)₊, which is h(x) − 1 + x, equals
x·δ_add(−log x), so the two directions at ε > 0 give h on both sides of x = 1. Upper bounds at some nodes, joined by
chords, bound h everywhere, because h is convex; so does their lower convex hull, whose every piece is a chord. Such a
piecewise linear function is itself the h of a pair whose W' takes the nodes' values only: Q' has the changes of slope
as masses, P' those times x. What is left of h behind the last node is P'-mass on W' = ∞, what is left of δ_add behind
its last node Q'-mass on W' = 0.

**The composition.** The composed loss is a sum of k independent ones. Its tail is found by the fast Fourier transform
of *tilted* masses x_i = p_i e^{θl_i}/M(θ), with θ the saddle point: then the losses near ε are the likely ones, and
rounding is small beside δ however small δ is. Nothing is truncated and nothing wraps around.

**Rounding.** For masses that sum to 1, a transform of length N = 2^L errs by at most 8uL of its Euclidean norm
(Higham 2002, Theorem 24.2, with weights accurate to u = 2⁻⁵³); |x̂| ≤ 1, so raising to the k-th power errs by k times
that, and by 4u a multiplication; transforming back errs as before. With Parseval, the composed tilted masses err by at
most u‖x‖₂(8L(1.01k + 1) + 4k) in the Euclidean norm, and δ by that times the norm of what they are multiplied with. On
top of that comes a relative error: each tilted mass is computed to 1e-12, and k of them are multiplied.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile

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
    jensen,
    loss_law,
)
from lambdacgd.accounting.exact.accountant import (
    LARGEST_EPSILON as LARGEST_OF_AN_EPOCH,
)
from lambdacgd.accounting.exact.lattice import Columns
from lambdacgd.accounting.gaussian import gaussian_delta, gaussian_epsilon, gaussian_sigma, one_bin_delta
from lambdacgd.accounting.root import Secant, bisect, find_root, log_ratio, smallest, smallest_certified
from lambdacgd.errors import AccountingError

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
    core: DiscretePair | None = None
    """about the same pair without the slack of its bounds; no claim, and nothing rests on it"""

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
    def span(self) -> int:
        """From the smallest loss to the largest, in cells."""
        return int(self.index[-1] - self.index[0])

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


# Composition

LONGEST = 1 << 24
"""of a transform: about half a gigabyte"""
_UNIT = 2.0**-53


@dataclass(frozen=True)
class Tail:
    """δ(ε) ≤ ``delta``, of which ``infinite`` comes from infinite losses and ``rounding`` is the margin."""

    delta: float
    infinite: float
    rounding: float


class Composition:
    """``copies`` independent copies of ``pair``, in both directions."""

    def __init__(self, pair: DiscretePair, copies: int) -> None:
        self.pair, self.copies = pair, copies
        # Tilted masses err by under 1e-12 each, and k of them are multiplied; the other half covers the last sum.
        self.relative = max(1e-9, 2e-12 * copies)
        self.length = 1 << max(4, int(copies * pair.span + 1).bit_length())
        if self.length > LONGEST:
            raise AccountingError(
                f"{copies} epochs of {pair.span} cells each need a transform beyond {LONGEST:,} numbers"
            )

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
            return smallest(self.delta, delta, rtol=rtol, limits=(1e-6, 1e4))
        except AccountingError:
            raise AccountingError(f"so little noise has no ε at δ = {delta:g}; use more, or a larger δ") from None

    def _tail(self, epsilon: float, way: OneWay) -> Tail:
        k, pair = self.copies, self.pair
        index, masses, infinite = pair.index, pair.p, pair.p_infinite
        if way == "add":  # losses change sign
            index, masses, infinite = -pair.index[::-1], pair.q[::-1], pair.q_infinite
        # One infinite loss makes the sum infinite; the other copies' masses add up to `whole` at most.
        whole = float(masses.sum()) + infinite
        lost = k * infinite * max(whole, 1.0) ** (k - 1)
        if epsilon >= k * pair.quantum * float(index[-1]):
            return Tail(lost * (1 + self.relative), lost, 0.0)
        index, masses = index[masses > 0], masses[masses > 0]
        losses, logs = index * pair.quantum, np.log(masses)

        def cumulant(theta: float) -> float:
            return k * float(logsumexp(logs + theta * losses)) - theta * epsilon

        # Tilted so that losses near ε are the likely ones.
        most = 600.0 / max(float(np.abs(losses).max()), 1e-12)
        theta = float(minimize_scalar(cumulant, bounds=(0.0, most), method="bounded").x)
        log_mgf = float(logsumexp(logs + theta * losses))
        dense = np.zeros(int(index[-1] - index[0]) + 1)
        dense[index - index[0]] = np.exp(logs + theta * losses - log_mgf)
        composed = irfft(_power(rfft(dense, self.length), k), self.length)
        first, last = k * int(index[0]), k * int(index[-1])
        start = max(math.floor(epsilon / pair.quantum) + 1, first)
        beyond = np.arange(start, last + 1) * pair.quantum
        weights = np.maximum(-np.expm1(epsilon - beyond), 0.0) * np.exp(k * log_mgf - theta * beyond)
        value = float(weights @ composed[start - first : last - first + 1])
        units = 8 * math.log2(self.length) * (1.01 * k + 1) + 4 * k
        margin = _UNIT * units * float(np.linalg.norm(dense)) * float(np.linalg.norm(weights))
        return Tail((max(value, 0.0) + margin + lost) * (1 + self.relative), lost, margin)


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


# One epoch: certified δ(ε) at nodes that are chosen as the curve is walked

Values = dict[int, Evaluation]
"""bounds on one direction's δ at the nodes ε = index·quantum"""


@dataclass(frozen=True)
class Resolution:
    """How finely one epoch is computed. None of it affects validity."""

    smoothing: float
    """κ where δ is near 1, where most of the composed loss comes from; it widens as δ^{−1/6} to four times as much"""
    gap: float
    """distance of nodes in units of 1/slope: chords add about gap²/8 of δ between them"""
    lattice: float
    """the share of δ that the Poisson factors may add, and the shared scales"""
    slack: float
    """the share of δ that all inequalities together may add at a node"""
    work: float
    """the most real operations spent on one direction's curve; from there on analytic bounds take over"""

    def precision(self, delta: float) -> Precision:
        widening = min(4.0, max(1.0, (0.1 / delta) ** (1 / 6)))
        return replace(
            FINE,
            smoothing=self.smoothing * widening,
            lattice=self.lattice,
            scales=self.lattice,
            rounding=0.2,
            extended=False,
        )

    def coarse_tail(self, delta: float) -> Precision:
        """The same where δ is large; below a thousandth three times the smoothing and ten times the lattice's share."""
        fine = self.precision(delta)
        if delta > 1e-3:
            return fine
        lattice = min(10 * self.lattice, 1e-2)
        return replace(fine, smoothing=min(3 * fine.smoothing, 0.4), lattice=lattice, scales=lattice)


QUICK = Resolution(smoothing=0.1, gap=0.3, lattice=2e-3, slack=0.3, work=1.5e11)
FINAL = Resolution(smoothing=0.05, gap=0.08, lattice=2e-4, slack=0.05, work=6e11)
AFFORDABLE = 4e8
"""real operations a frequency before a dominating chain is taken: a curve has a thousand frequencies"""

SMALLEST_CELL = 1e-7
"""of the losses: e^loss differs from one cell to the next by a billion units in the last place"""
CELLS = 6
"""cells of the loss grid to a gap at ε = 0, where the slope is smallest"""
ADD_FLOOR = 10.0
"""δ_add is followed down to this many floors only. It seldom decides ε, and its far tail costs the most."""
SHALLOW_FLOOR = 200.0
"""and down to this many, coarsely, where it is only to be seen that it does not decide; then analytic bounds follow"""


def one_epoch(
    accountant: TransferMatrix,
    sigma: float,
    *,
    floor: float,
    resolution: Resolution,
    shallow: bool = False,
    copies: int = 1,
) -> DiscretePair:
    """A pair that dominates one epoch's (P₁, Q₁) at this σ, down to δ = ``floor`` (add: ten times that).

    The cells are so wide that about ``copies`` of it can be composed. ``shallow``: the lattice is left for analytic
    bounds earlier on the side of add, whose far tail costs the most.

    Guarantee
    ---------
    Every node's value is a proven bound: the transfer-matrix accountant's, or, where that is larger, the Gaussian
    mechanism's without amplification (convexity), or for add the Gaussian one of Lemma 6.
    """
    if accountant.epochs != 1:
        raise AccountingError("one epoch at a time is composed")
    # Where there is much noise the losses of one epoch are small: ε is near 0 where it is small beside them.
    spread = math.sqrt(accountant.chain(sigma).mean_loss[1])
    scale = accountant.settle(sigma, flat(min(SMALLEST_EPSILON, 0.05 * spread)), affordable=AFFORDABLE)
    # δ(0) is about .4 deviations of the loss. A normal loss is followed over so many of them, to both sides.
    span = 2 * scale.delta / 0.4 * math.sqrt(2 * math.log(max(scale.delta / floor, 2.0)))
    quantum = max(resolution.gap / scale.slope / CELLS, SMALLEST_CELL, span * copies / LONGEST)
    remove = _curve(accountant, sigma, scale, quantum, floor, floor, resolution, "remove")
    leave = (SHALLOW_FLOOR if shallow else ADD_FLOOR) * floor
    add = _curve(accountant, sigma, scale, quantum, ADD_FLOOR * floor, leave, resolution, "add")
    pair = dominating_pair(
        quantum, {i: value.delta for i, value in remove.items()}, {i: value.delta for i, value in add.items()}
    )
    return replace(pair, core=_core(pair, remove, add))


def _core(pair: DiscretePair, remove: Values, add: Values) -> DiscretePair:
    """The pair through every node's value less what its bound, and the chords beside it, can have added."""
    chords = np.maximum(pair.heights, np.append(pair.heights[1:], 0.0))
    cores: tuple[dict[int, float], dict[int, float]] = ({}, {})
    for i, chord in zip(pair.index.tolist(), chords.tolist(), strict=True):
        # δ_add is h's put divided by x.
        value, chord = (remove[i], chord) if i > 0 else (add[-i], chord * math.exp(-i * pair.quantum))
        cores[i < 0][abs(i)] = max(value.core - chord, 1e-9 * value.delta)
    return dominating_pair(pair.quantum, *cores)


def _ahead(latest: int, slope: float, quantum: float, gap: float) -> range:
    """Nodes beyond the latest one (0: none yet), gap/slope apart, the first one at most half as far from 0."""
    step = max(1, round(gap / slope / quantum))
    return range(latest + step if latest else max(1, step // 2), int(LARGEST_OF_AN_EPOCH / quantum) + 1, step)


@lru_cache(maxsize=4)
def _curve(
    accountant: TransferMatrix,
    sigma: float,
    scale: Scale,
    quantum: float,
    floor: float,
    leave: float,
    resolution: Resolution,
    direction: OneWay,
) -> Values:
    """Bounds on δ at nodes down to ``floor``: the lattice's as far as it goes or down to ``leave``, then analytic ones.

    The last few are remembered, for an evaluation that goes deeper on the other side.
    """
    chain = accountant.chain(sigma)
    alone = math.sqrt(chain.loss_variance)

    def analytic(epsilon: float) -> float:
        gaussian = one_bin_delta(epsilon, alone)
        return gaussian if direction == "remove" else min(jensen(chain, epsilon).delta, gaussian)

    bounds: Values = {}
    latest, slope = 0, scale.slope
    with contextlib.suppress(AccountingError):  # the analytic bound takes over
        if direction == "add":
            first = _ahead(0, scale.slope, quantum, resolution.gap)[0] * quantum
            guess = Scale(math.exp(-first), scale.delta, max(scale.slope, 1.0))
            scale = accountant.settle(sigma, guess, "add", affordable=AFFORDABLE)
        for latest, value in _walk(accountant, sigma, scale, quantum, leave, leave > floor, resolution, direction):
            smaller = value
            if (other := analytic(latest * quantum)) < value.delta:
                # No more of it is slack than of the lattice's, which lies above it.
                smaller = Evaluation(other, value.slope, {"analytic": min(other, value.added)}, "analytic")
            bounds[latest], slope = smaller, value.slope
            reached = value if direction == "remove" else smaller  # remove is followed as far as the lattice goes
            if reached.delta <= leave or value.budget["rounding"] > 0.5 * value.delta:
                break
    # Further nodes, at which δ is at most an analytic bound and at most what it was before: all of it may be slack.
    before = bounds[latest].delta if latest in bounds else 1.0
    while (not bounds or before > floor) and (ahead := _ahead(latest, slope, quantum, resolution.gap)):
        latest = ahead[0]
        before = max(min(before, analytic(latest * quantum) * (1 + 1e-9)), 1e-300)
        bounds[latest] = Evaluation(before, slope, {"analytic": before}, "analytic")
    return bounds


FAR_TAIL = 100.0
"""floors up to which δ is followed coarsely: so little of the composed δ comes from there"""
PANEL = 2.3
"""a panel ends where δ has fallen by e^PANEL"""
WIDEST_PANEL = 0.6
"""or where ε has grown by this much"""


def _walk(
    accountant: TransferMatrix,
    sigma: float,
    scale: Scale,
    quantum: float,
    floor: float,
    coarse: bool,
    resolution: Resolution,
    direction: OneWay,
) -> Iterator[tuple[int, Evaluation]]:
    """The lattice's bounds at node after node. A panel of neighbours shares one lattice and one set of transforms.

    A panel that turns out steeper than expected is cut short and the next starts there. Values below ``floor`` need no
    relative accuracy: slack of that size is accepted there.

    Raises:
        AccountingError: a panel stayed loose, or the resolution's work is done.
    """
    sign = 1.0 if direction == "remove" else -1.0
    # Where even the largest δ of an epoch is small (many epochs), that one counts as near 1.
    largest = min(scale.delta / 0.1, 1.0)
    done, tries, work = 0, 0, resolution.work
    while ahead := _ahead(done, scale.slope, quantum, resolution.gap):
        first, width = ahead[0], min(PANEL / scale.slope, WIDEST_PANEL)
        panel = list(takewhile(lambda i: (i - first) * quantum <= width, ahead))  # noqa: B023
        scales = [
            Scale(
                math.exp(sign * i * quantum),
                max(scale.delta * math.exp(-scale.slope * (i - first) * quantum), floor),
                scale.slope,
            )
            for i in panel
        ]
        chain, _ = accountant.working_chain(sigma, scale.slope, coarse=False, affordable=AFFORDABLE)
        tail = coarse or scales[0].delta < FAR_TAIL * floor
        precision = (resolution.coarse_tail if tail else resolution.precision)(scales[0].delta / largest)
        precision = replace(precision, work=min(precision.work, work))
        # The law is tuned to the narrowest smoothing and the smallest δ of the panel.
        finest = Scale(min(s.strike for s in scales), scales[-1].delta, scale.slope)
        law = loss_law(chain, finest, precision, direction=direction)
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
                raise AccountingError(f"the bound at σ = {sigma:g}, ε = {first * quantum:g} stayed loose")
            scale = scale.learnt(value.core, value.delta, value.slope, floor=floor)
        elif following := _ahead(done, scale.slope, quantum, resolution.gap):
            step, slope = (following[0] - done) * quantum, max(good.slope, 0.3)
            scale = Scale(scale.strike, max(good.delta * math.exp(-slope * step), floor), slope)


# The accountant

METHOD = "transfer-matrix-composed"
LARGEST_EPSILON = 100.0
SMALLEST_DELTA = 1e-10
EPSILONS, DELTAS = (SMALLEST_EPSILON, LARGEST_EPSILON), (SMALLEST_DELTA, 1.0)
MOST_EPOCHS = 10_000
TAIL_SHARE = 1e-3
"""of δ/k: one epoch's curve is followed down to this value"""
INSTEAD = "ask for a larger δ or a smaller ε, or use fixed bins or cyclic sampling"
RTOL = 5e-4
"""relative accuracy of σ unless another one is asked for"""
MOST_QUICK, MOST_FINE = 12, 6
"""evaluations in one search for σ; after the fine ones the best bound in hand is the answer"""
BOTH_MATTER = 0.7
"""ε up to which δ_add is nearly as large as δ_remove, and computed as finely at once"""
QUICK_EXCESS = 0.11
"""about the logarithm of a quick δ over a fine one"""
OPERATIONS_A_SECOND, FREQUENCIES = 3e10, 900
"""of one core, and of one fine evaluation: only to tell how long an answer will take"""
DEAR, DEAR_ACCURACY = 6e10, 5e-3
"""operations of a fine evaluation (more where there are more than 1000 bins) from which a search ends within this
relative distance of the smallest σ"""
FEWEST_BINS = 12
"""of a thinned chain, about"""
THINNED = 0.82
"""about the correlation between neighbours of the chain that estimates are computed with"""


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "epochs", int(real("epochs", self.epochs, 1, MOST_EPOCHS, whole=True)))
        single = self.one_epoch  # validates
        object.__setattr__(self, "lam", single.lam)
        object.__setattr__(self, "steps_per_epoch", single.steps_per_epoch)

    @property
    def one_epoch(self) -> TransferMatrix:
        return TransferMatrix(self.lam, self.steps_per_epoch, 1, self.normalized, self.columns)

    # The four questions

    def delta(self, sigma: float, epsilon: float, *, epochs: int | None = None, like: float = 1e-6) -> Bound:
        """An upper bound on δ(ε) at noise multiplier σ.

        Args:
            sigma: σ.
            epsilon: ε, from 0.001 to 100.
            epochs: how many epochs to count, by default all.
            like: about the δ that is expected.

        Returns:
            The bound in both directions.

        Raises:
            AccountingError: an argument is out of range, or the composition certifies nothing.
        """
        sigma, epsilon = self._noise(sigma), real("ε", epsilon, *EPSILONS)
        like, k = real("like", like, *DELTAS, below=True), self._counted(epochs)
        if self.steps_per_epoch == 1:
            return self._one_bin(sigma, epsilon, k)
        bound = self.bound(self.composed(sigma, like, epochs=k), sigma, epsilon)
        if bound.delta < like and like > SMALLEST_DELTA:
            like = max(bound.delta - bound.budget["infinite losses"], 0.01 * bound.delta, SMALLEST_DELTA)
            bound = self.bound(self.composed(sigma, like, epochs=k), sigma, epsilon)
        return bound

    def epsilon(self, sigma: float, delta: float, *, epochs: int | None = None) -> Bound:
        """The bound at the smallest ε, from 0.001 on, that is certified for ``delta`` after all epochs or the first.

        Raises:
            AccountingError: an argument is out of range, or no ε is certified.
        """
        sigma, delta, k = self._noise(sigma), real("δ", delta, *DELTAS, below=True), self._counted(epochs)
        if self.steps_per_epoch == 1:
            alone = gaussian_epsilon(sigma / self._sensitivity(k), delta * (1 - 1e-8)) * (1 + 1e-9)
            return self._one_bin(sigma, max(alone, SMALLEST_EPSILON), k)
        composed = self.composed(sigma, delta, epochs=k)
        epsilon = real("ε", max(composed.epsilon(delta), SMALLEST_EPSILON), *EPSILONS)
        return self.bound(composed, sigma, epsilon)

    def epsilons(self, sigma: float, delta: float) -> tuple[float, ...]:
        """ε certified for ``delta`` after 1, 2, …, k epochs, all from one single-epoch curve."""
        sigma, delta = self._noise(sigma), real("δ", delta, *DELTAS, below=True)
        epochs = range(1, self.epochs + 1)
        if self.steps_per_epoch == 1:
            return tuple(self.epsilon(sigma, delta, epochs=k).epsilon for k in epochs)
        pair = self.composed(sigma, delta).pair
        return tuple(Composition(pair, k).epsilon(delta) for k in epochs)

    def curve(self, sigma: float, epsilons: Sequence[float], *, delta: float = 1e-6) -> list[Bound]:
        """Bounds at many ε from one composition; relative accuracy is kept down to about ``delta``."""
        sigma, delta = self._noise(sigma), real("δ", delta, *DELTAS, below=True)
        asked = [real("ε", epsilon, *EPSILONS) for epsilon in epsilons]
        if self.steps_per_epoch == 1 or not asked:
            return [self._one_bin(sigma, epsilon, self.epochs) for epsilon in asked]
        composed = self.composed(sigma, delta)
        return [self.bound(composed, sigma, epsilon) for epsilon in asked]

    def sigma(self, epsilon: float, delta: float, *, rtol: float = RTOL, start: float | None = None) -> Bound:
        """The bound at the smallest σ whose certified δ(ε) is at most ``delta``.

        Args:
            epsilon: ε, from 0.001 to 100.
            delta: δ, from 1e-10 on.
            rtol: relative accuracy of σ, which is a round number (``root.rounded_up``).
            start: a guess of σ that saves time.

        Returns:
            A bound whose σ was itself evaluated and passed.

        Raises:
            AccountingError: an argument is out of range, or no σ was certified.
        """
        epsilon, delta = real("ε", epsilon, *EPSILONS), real("δ", delta, *DELTAS, below=True)
        if self.steps_per_epoch == 1:
            alone = self._sensitivity(self.epochs) * gaussian_sigma(epsilon, delta) * (1 + 1e-9)
            return self._one_bin(alone, epsilon, self.epochs)
        near = _estimate(self, epsilon, delta, start)
        tell(near.sigma, near.seconds)
        strategy = self._strategy(near.slope)

        def evaluate(sigma: float, fine: bool) -> Bound:
            return self._evaluate(sigma, epsilon, delta, FINAL)

        enough = DEAR_ACCURACY if near.work > DEAR * max(1.0, self.steps_per_epoch / 1000) else 0.0
        begin = max(near.sigma, math.exp(strategy.limits[0])) * (1 + enough / 2)
        bound, _ = smallest_certified(
            evaluate, delta, begin, strategy, rtol=rtol, most=MOST_FINE, skip_coarse=True, enough=enough
        )
        if bound is None:
            raise AccountingError(
                f"no σ was found that keeps δ(ε = {epsilon:g}) below {delta:g}; ask for a larger ε or δ"
            )
        searched = {"search_sigma_loss": log_ratio(delta, bound.delta) / -strategy.slope}
        return self._checked(replace(bound, details=bound.details | searched))

    def quick_sigma(self, epsilon: float, delta: float, *, start: float | None = None) -> float:
        """About the smallest σ, to about 0.5%, in a fraction of a second: for comparing λ, no claim."""
        epsilon, delta = real("ε", epsilon, *EPSILONS), real("δ", delta, *DELTAS, below=True)
        if self.steps_per_epoch == 1:
            return self._sensitivity(self.epochs) * gaussian_sigma(epsilon, delta)
        return _estimate(self, epsilon, delta, start).sigma

    # How they are answered

    def composed(
        self,
        sigma: float,
        delta: float,
        *,
        epochs: int | None = None,
        resolution: Resolution = FINAL,
        shallow: bool = False,
    ) -> Composition:
        """All epochs (or fewer) at this σ, fine enough for values of δ down to ``delta``.

        ``shallow``: valid as ever, but fine enough only where δ_add does not govern.
        """
        k = self.epochs if epochs is None else epochs
        floor = TAIL_SHARE * delta / k
        for wider in (1, 2, 4):  # cells, should the transform be too long
            copies = wider * k
            pair = one_epoch(self.one_epoch, sigma, floor=floor, resolution=resolution, shallow=shallow, copies=copies)
            if k * pair.span < LONGEST:
                break
        return Composition(pair, k)

    def bound(self, composed: Composition, sigma: float, epsilon: float) -> Bound:
        """Both directions at one ε."""
        remove, add = composed.remove(epsilon), composed.add(epsilon)
        governing = remove if remove.delta >= add.delta else add
        budget = {"infinite losses": governing.infinite, "rounding": governing.rounding}
        if (core := composed.pair.core) is not None:
            least = getattr(Composition(core, composed.copies), "remove" if governing is remove else "add")(epsilon)
            budget["one epoch"] = max(governing.delta - least.delta - governing.infinite, 0.0)
        _, loss = self.one_epoch.working_chain(sigma, 5.0, coarse=False, affordable=AFFORDABLE)
        details = {
            "nodes": len(composed.pair.index),
            "cell": composed.pair.quantum,
            "transform": composed.length,
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

    def _checked(self, bound: Bound) -> Bound:
        """The bound, with the share of δ that may be slack, however much that is."""
        return replace(bound, details=bound.details | {"slack_share": min(bound.slack / bound.delta, 1.0)})

    def first_guess(self, epsilon: float, delta: float) -> float:
        """σ at which a Gaussian mechanism of the same E W² after k epochs would need (ε, δ).

        A closed form: quick enough to compare many λ, and seen from level with what is certified to 15% below
        it (few epochs at a large ε).
        """
        mu, moment = 1 / gaussian_sigma(epsilon, delta), self._log_moment()
        peak = moment(0.0)[1]
        low = math.log(self.one_epoch.smallest_sigma * 1.01)
        high = max(math.log(math.sqrt(self.epochs * peak) / mu) + 1.0, low + 1.0)
        return math.exp(bisect(lambda x: self.epochs * moment(x)[0] <= mu**2, low, high, width=1e-7))

    def first_slope(self, epsilon: float, delta: float, sigma: float) -> float:
        """About −d log δ/d log σ, from the same Gaussian mechanism."""
        moment, x, h = self._log_moment(), math.log(sigma), 1e-3

        def log_delta(at: float) -> float:
            return math.log(max(gaussian_delta(epsilon, 1 / math.sqrt(self.epochs * moment(at)[0])), 1e-300))

        return min(max((log_delta(x - h) - log_delta(x + h)) / (2 * h), 2.0), 200.0)

    def _log_moment(self) -> Callable[[float], tuple[float, float]]:
        """log E W² of one epoch at noise e^x, as a function of x, beside the largest Var X at noise 1."""
        chain, b = self.one_epoch.chain(1.0), self.steps_per_epoch
        # Beyond the distance where correlations end every pair adds e^0: those need no sum.
        reach = b if chain.lam == 0 else min(b, 2 + math.ceil(30 / -math.log(chain.lam)))
        d = np.arange(1, reach)
        pairs = 2 * (b - d) / b**2
        peak, covariances = chain.loss_variance, chain.gain * chain.covariance(d)
        middle = np.array([peak])
        middles = (np.arange(16)[:, None] + 0.5) / 16
        if chain.runs:  # a mean over places of the epoch, as below
            left, rate = b - middles * (b - d), 2 * math.log(self.lam)
            falling = np.sqrt(np.expm1((left - d) * rate) / np.expm1(left * rate))
            covariances = np.asarray(chain.gain * self.lam**d * falling, dtype=np.float64)
        elif chain.tail and b * (1 - chain.lam) < 20:  # what the end takes away shows
            ends = chain.end_effect(middles * (b - d)) * chain.end_effect(middles * (b - d) + d)
            covariances = covariances - chain.gain * chain.tail * ends
            taken = chain.tail * chain.end_effect(middles[:, 0] * b) ** 2
            middle = chain.gain * (chain.covariance(0.0) - taken) + chain.nugget

        def at(log_sigma: float) -> tuple[float, float]:
            scale = math.exp(-2 * log_sigma)
            if peak * scale > 600:
                return math.inf, peak
            excess = float(np.expm1(middle * scale).mean()) / b
            excess += float((np.expm1(covariances * scale) @ pairs).mean())
            return math.log1p(max(excess, 1e-15)), peak

        return at

    def thinned(self, sigma: float) -> FreshBins:
        """The accountant of a shorter chain, for estimates: as many bins as leave E W² at ``sigma`` what it is.

        Itself where it is short anyway, and where bins have parts of their own, which are not thinned.
        """
        chain = self.one_epoch.chain(1.0)
        if chain.lam <= THINNED or chain.nugget:
            return self
        group = min(round(math.log(THINNED) / math.log(chain.lam)), self.steps_per_epoch // FEWEST_BINS)
        if group < 2:
            return self
        columns = None if chain.runs else Columns(chain.gain, 0.0, chain.tail)
        moment = self._log_moment()(math.log(sigma))[0]

        def shorter(bins: float) -> FreshBins:
            return FreshBins(chain.lam**group, round(bins), self.epochs, columns is None, columns)

        def enough(bins: float) -> bool:
            return shorter(bins)._log_moment()(math.log(sigma))[0] <= moment

        bins = float(self.steps_per_epoch)
        return shorter(bisect(enough, 2.0, bins, width=0.5)) if enough(bins) else self

    def _one_bin(self, sigma: float, epsilon: float, epochs: int) -> Bound:
        """b = 1: every epoch is a Gaussian mechanism, and k of them are one of √k times the sensitivity."""
        value = gaussian_delta(epsilon, sigma / self._sensitivity(epochs)) * (1 + 1e-9)
        return Bound(sigma, epsilon, value, value, METHOD, {}, {"one_bin": "gaussian"})

    def _sensitivity(self, epochs: int) -> float:
        """Of one bin: the norm of its columns, which is 1 unless they are given."""
        return math.sqrt(epochs) * (math.sqrt(self.one_epoch.chain(1.0).loss_variance) if self.columns else 1.0)

    def _noise(self, sigma: float) -> float:
        return real("σ", sigma, self.one_epoch.smallest_sigma)

    def _counted(self, epochs: int | None) -> int:
        """How many epochs are counted: all, unless fewer are asked for."""
        return self.epochs if epochs is None else int(real("epochs", epochs, 1, self.epochs, whole=True))


@dataclass(frozen=True)
class _Near:
    """About the smallest σ, −d log δ/d log σ there, and about what it will take to certify it.

    ``work`` is in operations of one fine evaluation, ``seconds`` are those of all of them.
    """

    sigma: float
    slope: float
    work: float
    seconds: float


@lru_cache(maxsize=256)
def _estimate(accountant: FreshBins, epsilon: float, delta: float, start: float | None) -> _Near:
    """Quick evaluations of a thinned chain until δ is within a tenth of its target, and from there along the secant.

    It is remembered: choosing λ asks for what the search for σ then begins with.
    """
    guess = start or accountant.first_guess(epsilon, delta) * (
        1.01 + 0.1 * min(epsilon / 8, 1.0) / accountant.epochs**0.5
    )
    short = accountant.thinned(guess)
    strategy = accountant._strategy(accountant.first_slope(epsilon, delta, guess))
    began = time.monotonic()

    def value_at(x: float) -> float:
        return log_ratio(short._evaluate(math.exp(x), epsilon, delta, QUICK).delta, delta)

    x, value = find_root(
        value_at,
        strategy.within_limits(math.log(guess)),
        strategy,
        lambda value: abs(value) < 0.1,
        most=MOST_QUICK,
    )
    x -= (value - QUICK_EXCESS) / strategy.slope
    each = (time.monotonic() - began) / len(strategy.points)
    chain, _ = accountant.one_epoch.working_chain(math.exp(x), 5.0, coarse=False, affordable=AFFORDABLE)
    work = FREQUENCIES * cost(chain, 5.0) if chain.lam else 0.0
    return _Near(math.exp(x), -strategy.slope, work, 2 * (4 * each + work / OPERATIONS_A_SECOND))
