"""Fresh bins: δ, ε and σ computed by composing the exact accountant's single epoch. The proof is docs/fresh-bins.md.

One epoch is bounded at nodes that are chosen as its curve δ(ε) is walked. They make a discrete pair, of which k copies
are composed (``composition``).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile

import numpy as np

from lambdacgd.accounting.certificate import SMALLEST_EPSILON, Bound, OneWay, real, tell
from lambdacgd.accounting.composition import LONGEST, Composition, DiscretePair, dominating_pair
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
from lambdacgd.accounting.exact.lattice import Columns
from lambdacgd.accounting.gaussian import gaussian_delta, gaussian_epsilon, gaussian_sigma, jensen_add, one_bin_delta
from lambdacgd.accounting.root import Secant, bisect, find_root, log_ratio, smallest_certified
from lambdacgd.errors import AccountingError

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
        return TransferMatrix(self.lam, self.steps_per_epoch, 1, self.normalized, self.columns, AFFORDABLE)

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
        return Composition(pair, k, _core(pair, remove, add))

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
        high = max(math.log(math.sqrt(k * self.one_epoch.chain(1.0).loss_variance) / mu) + 1.0, low + 1.0)
        return math.exp(bisect(lambda x: k * moment(x) <= mu**2, low, high, width=1e-7))

    def _log_moment(self) -> Callable[[float], float]:
        """log E W² of one epoch at noise e^x, as a function of x."""
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

        def at(log_sigma: float) -> float:
            scale = math.exp(-2 * log_sigma)
            if peak * scale > 600:
                return math.inf
            excess = float(np.expm1(middle * scale).mean()) / b
            excess += float((np.expm1(covariances * scale) @ pairs).mean())
            return math.log1p(max(excess, 1e-15))

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
        return math.sqrt(self.epochs) * (math.sqrt(self.one_epoch.chain(1.0).loss_variance) if self.columns else 1.0)


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
