"""Fresh bins: δ, ε and σ computed by composing the exact accountant's single epoch.

**λCGD** with bins redrawn every epoch is composed as it is (``FreshBins``).

**Any other mechanism** goes through a chain with a nugget that dominates it (``accounting.dominating``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from lambdacgd.accounting.certificate import SMALLEST_EPSILON, Bound, real, tell
from lambdacgd.accounting.composed.composition import AFFORDABLE, FINAL, QUICK, Composition, Resolution, one_epoch
from lambdacgd.accounting.exact import TransferMatrix
from lambdacgd.accounting.exact.accountant import cost
from lambdacgd.accounting.exact.lattice import Columns
from lambdacgd.accounting.gaussian import gaussian_delta, gaussian_epsilon, gaussian_sigma
from lambdacgd.accounting.root import Secant, bisect, find_root, log_ratio, smallest_certified
from lambdacgd.errors import AccountingError

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
FEWEST_BINS = 8
"""of a thinned chain"""
THINNED = 0.82
"""about the correlation between neighbours of the chain that estimates are computed with"""


@dataclass(frozen=True)
class FreshBins:
    """Accountant of C_λ (or its column-normalised form), restarted with new bins at every epoch.

    The ``budget`` of its bounds lists, to first order: infinite losses and rounding of the composition, chords between
    the nodes of one epoch's curve, and under "one epoch: …" what the exact accountant lists for that curve, carried
    through the composition.

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

        begin = max(near.sigma, math.exp(strategy.limits[0]))
        bound, _ = smallest_certified(evaluate, delta, begin, strategy, rtol=rtol, most=MOST_FINE, skip_coarse=True)
        if bound is None:
            raise AccountingError(
                f"no σ was found that keeps δ(ε = {epsilon:g}) below {delta:g}; ask for a larger ε or δ"
            )
        return self._checked(bound)

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
        pair = one_epoch(self.one_epoch, sigma, floor=floor, resolution=resolution, shallow=shallow)
        return Composition(pair, k)

    def bound(self, composed: Composition, sigma: float, epsilon: float) -> Bound:
        """Both directions at one ε."""
        remove, add = composed.remove(epsilon), composed.add(epsilon)
        governing = remove if remove.delta >= add.delta else add
        budget = {"infinite losses": governing.infinite, "rounding": governing.rounding}
        slack = composed.slack("remove" if governing is remove else "add", epsilon)
        budget |= {name: min(value, governing.delta) for name, value in slack.items()}
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
        if chain.tail and b * (1 - chain.lam) < 20:  # what the end takes away shows: a mean over places on the cycle
            middles = (np.arange(16)[:, None] + 0.5) / 16
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
        lam = chain.lam ** round(math.log(THINNED) / math.log(chain.lam))
        columns = Columns(chain.gain, 0.0, chain.tail)
        moment = self._log_moment()(math.log(sigma))[0]

        def shorter(bins: float) -> FreshBins:
            return FreshBins(lam, round(bins), self.epochs, columns=columns)

        def enough(bins: float) -> bool:
            return shorter(bins)._log_moment()(math.log(sigma))[0] <= moment

        if lam == chain.lam or not enough(self.steps_per_epoch):
            return self
        bins = bisect(enough, 1.0, float(self.steps_per_epoch), width=0.5)
        return shorter(bins) if bins >= FEWEST_BINS else self

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
    """About the smallest σ, −d log δ/d log σ there, and about how many seconds it will take to certify it."""

    sigma: float
    slope: float
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
    dearer = cost(chain, 5.0) / OPERATIONS_A_SECOND if chain.lam else 0.0
    return _Near(math.exp(x), -strategy.slope, 2 * (4 * each + FREQUENCIES * dearer))
