"""The transfer-matrix accountant: δ(σ, ε), ε(σ, δ) and σ(ε, δ) of DP-λCGD under Balls-in-Bins, computed."""

from __future__ import annotations

import contextlib
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy.signal import lfilter

from lambdacgd.accounting.certificate import SMALLEST_EPSILON, Bound, OneWay, real, tell
from lambdacgd.accounting.exact.evaluation import (
    COARSE,
    FINE,
    LARGEST_LOSS_VARIANCE,
    SLACK_SHARE,
    Evaluation,
    Precision,
    Scale,
    add_at,
    evaluate_add,
    evaluate_remove,
    governing_budget,
    jensen,
    loss_law,
    remove_at,
)
from lambdacgd.accounting.exact.lattice import (
    Chain,
    Columns,
    normalized_chain,
    plain_chain,
    power_cost,
    spacing_ratio,
    stretches,
)
from lambdacgd.accounting.gaussian import one_bin_delta
from lambdacgd.accounting.root import Secant, log_ratio, smallest, smallest_certified
from lambdacgd.errors import AccountingError

METHOD = "transfer-matrix"
LARGEST_LAMBDA = 0.9999
SMALLEST_LAMBDA = 1e-6
LARGEST_EPSILON = 20.0
EPSILONS = (SMALLEST_EPSILON, LARGEST_EPSILON)
MOST_STEPS = 10_000_000
"""steps per epoch, and epochs: a few arrays of this length are made"""
SMALLEST_DELTA = 1e-12
ROUNDING_SHARE = 0.3
"""a rounding margin above this share of δ is refused: sampling does better there"""
FINE_SECONDS = 15.0
"""about what all fine evaluations of a search take over one coarse one"""
RTOL = 2e-4
"""relative accuracy of σ and ε unless another one is asked for"""


@dataclass(frozen=True)
class TransferMatrix:
    """Accountant of ``C_λ`` (or its column-normalised form) under Balls-in-Bins with bins kept for all epochs.

    Args:
        lam: λ, from 0 to 0.9999.
        steps_per_epoch: b, the number of bins.
        epochs: k.
        normalized: whether the columns of C are scaled to norm 1.
        columns: account for any matrix whose columns have these inner products, or smaller ones, instead.

    Raises:
        AccountingError: a parameter is outside what this accountant takes.

    Guarantee
    ---------
    Every δ returned is an upper bound on max(δ_remove, δ_add) of the dominating pair of Balls-in-Bins,
    P = (1/b) Σ_j N(m_j, σ²I) and Q = N(0, σ²I), under zero-out adjacency of one example. The bound is proven
    (docs/exact-accountant.md); the float64 rounding of its evaluation is covered by an explicit margin. That this pair
    dominates adaptive training is the Balls-in-Bins paper's lemma (arXiv 2410.06266).
    """

    lam: float
    steps_per_epoch: int
    epochs: int
    normalized: bool = False
    columns: Columns | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "lam", real("λ", self.lam, 0, LARGEST_LAMBDA))
        if self.columns and 0 < self.lam < SMALLEST_LAMBDA:
            raise AccountingError(f"λ is {self.lam!r}; with columns it is 0 or at least {SMALLEST_LAMBDA:g}")
        for name in ("steps_per_epoch", "epochs"):
            object.__setattr__(self, name, int(real(name, getattr(self, name), 1, MOST_STEPS, whole=True)))

    # The four questions

    def delta(self, sigma: float, epsilon: float) -> Bound:
        """Upper bounds on δ_remove(ε) and δ_add(ε) at noise multiplier σ, refined until their slack is small.

        Raises:
            AccountingError: σ or ε is out of range, or δ is too small to certify.
        """
        sigma, epsilon = real("σ", sigma, self.smallest_sigma), real("ε", epsilon, *EPSILONS)
        scale = self.settle(sigma, epsilon)
        best: Bound | None = None
        for _ in range(8):  # a slope far off is corrected by at most a factor of three each time
            bound = self.evaluate(sigma, epsilon, scale, FINE)
            best = bound if best is None or bound.delta < best.delta else best
            if bound.slack <= SLACK_SHARE * bound.delta:
                break
            before, scale = scale, _next_scale(scale, bound)
            if scale == before:
                break
        assert best is not None
        return self._checked(best)

    def sigma(self, epsilon: float, delta: float, *, rtol: float = RTOL, start: float | None = None) -> Bound:
        """The bound at the smallest σ whose certified δ(ε) is at most ``delta``.

        Args:
            epsilon: ε, from 0.001 to 20.
            delta: δ, from 1e-12 on.
            rtol: relative accuracy of σ; a larger one makes the last evaluations coarser too.
            start: a guess of σ that saves time.

        Returns:
            A bound whose σ was itself evaluated and passed.

        Raises:
            AccountingError: an argument is out of range, or no σ was certified.
        """
        epsilon, delta = real("ε", epsilon, *EPSILONS), real("δ", delta, SMALLEST_DELTA, 1, below=True)
        for name, value in (("rtol", rtol), ("start", start)):
            if value is not None:
                real(name, value, 1e-300)
        low = math.log(self.smallest_sigma * 1.001)
        # Without amplification the Gaussian mechanism needs this much (Kahane: no two bins correlate more than fully).
        alone = math.sqrt(self.chain(1.0).loss_variance)
        most = smallest(lambda sigma: one_bin_delta(epsilon, alone / sigma), delta, start=alone, rtol=1e-3)
        strategy = Secant(-10.0, largest=0.35, limits=(low, math.log(most * 1.01)))
        begin = min(max(start or 0.35 * most, math.exp(low)), most)
        scale = Scale(math.exp(epsilon), delta, _first_slope(epsilon, delta))
        return self._solve(lambda sigma: (sigma, epsilon), begin, strategy, scale, delta, float(rtol))

    def epsilon(self, sigma: float, delta: float, *, rtol: float = RTOL) -> Bound:
        """The bound at the smallest ε (to relative accuracy ``rtol``) whose certified δ(ε) is at most ``delta``.

        Raises:
            AccountingError: an argument is out of range, or no ε was certified.
        """
        sigma, delta = real("σ", sigma, self.smallest_sigma), real("δ", delta, SMALLEST_DELTA, 1, below=True)
        limits = (math.log(SMALLEST_EPSILON), math.log(LARGEST_EPSILON))
        strategy = Secant(-1.4 * math.log(1 / min(delta, 0.1)), largest=0.7, limits=limits)
        scale = Scale(math.e, delta, _first_slope(1.0, delta))
        return self._solve(lambda epsilon: (sigma, epsilon), 1.0, strategy, scale, delta, float(rtol))

    def curve(self, sigma: float, epsilons: Sequence[float]) -> list[Bound]:
        """Bounds at many ε for one σ, tight in both directions.

        Together the two directions give δ_remove at negative ε: δ_remove(−ε) = 1 − e^{−ε} + e^{−ε} δ_add(ε).
        """
        sigma = real("σ", sigma, self.smallest_sigma)
        asked = [real("ε", epsilon, *EPSILONS) for epsilon in epsilons]
        if self.steps_per_epoch == 1 or not asked:
            return [self.delta(sigma, epsilon) for epsilon in asked]
        ordered = sorted(set(asked))
        remove = dict(walk(self, sigma, among(ordered), self.settle(sigma, ordered[0]), "remove"))
        chain = self.chain(sigma)
        by_jensen = {epsilon: jensen(chain, epsilon) for epsilon in ordered}
        # Where Jensen's bound is already negligible beside remove, nothing finer is needed.
        open_end = [e for e in ordered if by_jensen[e].delta > NEGLIGIBLE * remove[e].delta]
        add = dict(by_jensen)
        if open_end:
            reached, latest = open_end[0], add[open_end[0]]
            size, slope = min(remove[reached].delta, latest.delta), max(remove[reached].slope, 1.0)
            scale = settled(self, sigma, Scale(math.exp(-reached), size, slope), "add")
            with contextlib.suppress(AccountingError):  # from there on Jensen's bound stands
                for epsilon, value in walk(self, sigma, among(open_end), scale, "add"):
                    latest = min(value, add[epsilon], key=lambda item: item.delta)
                    reached, add[epsilon] = epsilon, latest
                    if latest.delta <= NEGLIGIBLE * remove[epsilon].delta:
                        break
            # δ_add falls with ε, so the last value bounds all later ones.
            for epsilon in ordered:
                if epsilon > reached:
                    add[epsilon] = min(latest, add[epsilon], key=lambda item: item.delta)
        bounds = {}
        for epsilon in ordered:
            here, there = remove[epsilon], add[epsilon]
            budget = governing_budget(here, there)
            details = {"remove": here.method, "add": there.method}
            bounds[epsilon] = Bound(sigma, epsilon, here.delta, there.delta, METHOD, budget, details, here.slope)
        return [bounds[epsilon] for epsilon in asked]

    # What to compute with

    def chain(self, sigma: float) -> Chain:
        """The exact chain at this σ (for the normalised form, the one that dominates it)."""
        columns = self.columns or (Columns() if self.lam == 0 else None)
        make = columns.over if columns else normalized_chain if self.normalized else plain_chain
        # Every entry of G grows with λ, so a tiny λ may be rounded up (Lemma 7).
        lam = max(self.lam, SMALLEST_LAMBDA) if self.lam else 0.0
        return make(lam, self.steps_per_epoch, self.epochs, sigma)

    @property
    def smallest_sigma(self) -> float:
        """Below this e^X comes near overflow."""
        return math.sqrt(self.chain(1.0).loss_variance / LARGEST_LOSS_VARIANCE)

    @cached_property
    def normalizing_loss(self) -> float:
        """About how much σ, where it is large, grows because a chain stands in for normalised columns (Lemma 7)."""
        steps = self.steps_per_epoch * self.epochs
        if not self.normalized or self.columns or self.lam == 0 or steps > MOST_STEPS:
            return 0.0
        norms = np.sqrt(-np.expm1(2 * np.arange(steps, 0, -1) * math.log(self.lam)) / (1 - self.lam**2))
        together = np.asarray(lfilter([1.0], [1.0, -self.lam], 1 / norms)) / self.steps_per_epoch  # the mean column
        return 0.5 * math.log(self.chain(1.0).mean_loss[1] / float(together @ together))

    def working_chain(
        self, sigma: float, slope: float, *, coarse: bool, affordable: float | None = None
    ) -> tuple[Chain, float]:
        """The exact chain or an affordable one that dominates it, and by how much σ is expected to grow for it."""
        exact = self.chain(sigma)
        if self.lam == 0 or self.steps_per_epoch == 1:
            return exact, 0.0
        chosen, expected_loss = select(exact, slope, AFFORDABLE if affordable is None else affordable)
        expected_loss += self.normalizing_loss
        if coarse and chosen.tail and (1 + slope) * float(chosen.log_scales.mean()) < 0.2:
            longer = replace(chosen, tail=0.0)
            if collective_loss(longer, chosen) < 0.25:  # else it says nothing about δ's size
                return longer, expected_loss
        return chosen, expected_loss

    # One evaluation

    def evaluate(self, sigma: float, epsilon: float, scale: Scale, precision: Precision) -> Bound:
        """Both directions at one (σ, ε), tuned to ``scale``. Valid whatever the tuning; tight only if it fits."""
        if self.steps_per_epoch == 1:
            value = one_bin_delta(epsilon, math.sqrt(self.chain(sigma).loss_variance)) * (1 + 1e-9)
            details: dict[str, Any] = {"remove": "gaussian", "add": "gaussian"}
            return Bound(sigma, epsilon, value, value, METHOD, {}, details, scale.slope)
        chain, expected_loss = self.working_chain(sigma, scale.slope, coarse=precision is COARSE)
        law = loss_law(chain, scale, precision, direction="remove")
        remove = evaluate_remove(law, scale, precision)
        add = self._add(chain, epsilon, remove, precision)
        details = {
            "remove": remove.method,
            "add": add.method,
            "bins": float(chain.bins),
            "tail": chain.tail,
            "dominating_chain_sigma_loss": expected_loss,
        }
        budget = governing_budget(remove, add)
        return Bound(sigma, epsilon, remove.delta, add.delta, METHOD, budget, details, remove.slope)

    def _add(self, chain: Chain, epsilon: float, remove: Evaluation, precision: Precision) -> Evaluation:
        """The cheapest bound on δ_add that does not govern; the finest one where add does govern."""
        best = jensen(chain, epsilon)
        slope, size = max(remove.slope, 1.0), min(remove.delta, best.delta)
        for step in (COARSE, COARSE, COARSE, precision, precision):
            if best.delta <= remove.delta:
                break
            scale = Scale(math.exp(-epsilon), size, slope)
            try:
                law = loss_law(chain, scale, step, direction="add")
                fourier = evaluate_add(law, scale, step)
            except AccountingError:
                break  # Jensen's bound stands
            size = min(max(fourier.core, fourier.delta * 1e-2), 1.0)
            slope = max(fourier.slope, 1.0)
            best = min(best, fourier, key=lambda item: item.delta)
        return best

    def settle(self, sigma: float, epsilon: float, *, affordable: float | None = None) -> Scale:
        """Learn how large and how steep δ_remove is from coarse evaluations, flat ones first: those are cheap."""
        first = Scale(math.exp(epsilon), 1e-3, min(_first_slope(epsilon, 1e-3), 4.0))
        scale = settled(self, sigma, first, "remove", affordable=affordable)
        if scale.delta < SMALLEST_DELTA / 10:
            raise AccountingError(
                f"at σ = {sigma:g}, ε = {epsilon:g} δ lies below {SMALLEST_DELTA:g}, the smallest this accountant "
                "certifies; ask at a smaller σ or ε"
            )
        return scale

    def _solve(
        self,
        place: Callable[[float], tuple[float, float]],
        start: float,
        strategy: Secant,
        scale: Scale,
        delta: float,
        rtol: float,
    ) -> Bound:
        """Search for a value; ``place(value)`` is the (σ, ε) that belongs to it. Each is tuned to those before it."""
        precision, guess = _final_precision(rtol), scale.slope
        began, coarse, told = time.monotonic(), 0, False

        def evaluate(value: float, fine: bool) -> Bound:
            nonlocal scale, coarse, told
            sigma, epsilon = place(value)
            if fine and not told:
                tell(sigma, FINE_SECONDS * (time.monotonic() - began) / max(coarse, 1))
            coarse, told = coarse + (not fine), fine
            # A rounded slope: what an evaluation says does not hang on the last bits of the one before.
            tuned = replace(scale, strike=math.exp(epsilon), slope=1.1 ** round(math.log(scale.slope, 1.1)))
            bound = self.evaluate(sigma, epsilon, tuned, precision if fine else COARSE)
            excess = log_ratio(bound.delta, delta)
            if abs(excess) < 4:
                scale = replace(scale, slope=min(max(bound.slope, 0.3), 3 * scale.slope))
            elif excess > 0:  # a slope learnt where δ is nearly flat smooths so widely that nothing passes any more
                scale = replace(scale, slope=max(scale.slope, guess))
            return bound

        bound, value = smallest_certified(evaluate, delta, start, strategy, rtol=rtol)
        if bound is None:
            raise AccountingError(f"δ = {delta:g} is out of reach: the last bound was {math.exp(value) * delta:.3g}")
        return self._checked(bound)

    def _checked(self, bound: Bound) -> Bound:
        """The bound, unless rounding is most of it. How much of it may be slack its budget says, however much that is.

        Some of the budget are estimates, such as that of periodic copies, which can exceed by far what was added.
        """
        rounding = bound.budget.get("rounding", 0.0)
        if rounding > ROUNDING_SHARE * bound.delta:
            raise AccountingError(
                f"δ near {bound.delta:.2g} cannot be certified at ε = {bound.epsilon:g}: rounding may reach "
                f"{rounding:.2g}; the smallest δ reachable there is about {rounding / ROUNDING_SHARE:.1g}"
            )
        return replace(bound, details=bound.details | {"slack_share": min(bound.slack / bound.delta, 1.0)})


def _first_slope(epsilon: float, delta: float) -> float:
    """A guess of −d log δ/dε before anything was computed."""
    return max(1.4 * math.log(1 / min(delta, 0.1)) / epsilon, 1.5)


def _next_scale(scale: Scale, bound: Bound) -> Scale:
    """What the last evaluation says about δ's size and steepness."""
    return scale.learnt(bound.delta - bound.slack, bound.delta, bound.slope)


def _final_precision(rtol: float) -> Precision:
    """FINE at the default accuracy, proportionally coarser where a coarser answer is asked for."""
    if rtol <= RTOL:
        return FINE
    factor = min(rtol / RTOL, 8.0)
    return Precision(
        smoothing=min(FINE.smoothing * math.sqrt(factor), 0.4),
        lattice=FINE.lattice * factor,
        scales=FINE.scales * factor,
        negligible=FINE.negligible * factor,
        wrap=FINE.wrap * factor,
        rounding=FINE.rounding,
    )


# δ(ε) at many ε for one σ: neighbouring ε share one lattice and one set of transforms, a panel at a time

NEGLIGIBLE = 1e-3
"""share of δ_remove below which δ_add is not made tighter"""
PANEL = 2.3
"""a panel ends where δ has fallen by e^PANEL"""
WIDEST_PANEL = 0.6
"""or where ε has grown by this much"""


def walk(
    accountant: TransferMatrix,
    sigma: float,
    choose: Callable[[float | None, float], list[float]],
    scale: Scale,
    direction: OneWay,
    *,
    precision: Callable[[float], Precision] = lambda delta: FINE,
    slack: float = SLACK_SHARE,
    floor: float = 0.0,
    affordable: float | None = None,
    work: float = math.inf,
) -> Iterator[tuple[float, Evaluation]]:
    """Panel after panel; a panel that turns out steeper than expected is cut short and the next starts there.

    ``choose(latest, slope)`` names increasing ε beyond the latest one done, those of one panel at most being used, or
    none to end. ``precision`` is asked for at the size of δ where a panel starts. Values below ``floor`` need no
    relative accuracy: slack of that size is accepted there. ``affordable`` bounds the operations a frequency, by taking
    a dominating chain, and ``work`` those of all panels, by ending the walk.

    Raises:
        AccountingError: a panel stayed loose, or the work is done.
    """
    evaluate: Callable[..., Iterator[Evaluation]] = remove_at if direction == "remove" else add_at
    sign = 1.0 if direction == "remove" else -1.0
    done, tries = None, 0
    while ahead := choose(done, scale.slope):
        first = ahead[0]
        panel = [e for e in ahead if (e - first) * scale.slope <= PANEL and e - first <= WIDEST_PANEL]
        scales = [
            Scale(math.exp(sign * e), max(scale.delta * math.exp(-scale.slope * (e - first)), floor), scale.slope)
            for e in panel
        ]
        chain, _ = accountant.working_chain(sigma, scale.slope, coarse=False, affordable=affordable)
        how = precision(scales[0].delta)
        how = replace(how, work=min(how.work, work))
        # The law is tuned to the narrowest smoothing and the smallest δ of the panel.
        finest = Scale(min(s.strike for s in scales), scales[-1].delta, scale.slope)
        law = loss_law(chain, finest, how, direction=direction)
        latest, spent = None, 0.0
        for epsilon, value in zip(panel, evaluate(law, scales, how), strict=True):
            spent = value.work
            # Rounding is no matter of tuning: whoever asked decides how much of it is worth having.
            if value.added - value.budget["rounding"] > slack * value.delta + floor:
                break
            yield epsilon, value
            latest, done, tries = (epsilon, value), epsilon, 0
        work -= spent
        if latest is not None:
            following = choose(done, scale.slope)
            step = following[0] - latest[0] if following else 0.0
            slope = max(latest[1].slope, 0.3)
            scale = Scale(
                math.exp(sign * (latest[0] + step)), max(latest[1].delta * math.exp(-slope * step), floor), slope
            )
        else:
            tries += 1
            if tries > 4:
                raise AccountingError(f"the bound at σ = {sigma:g}, ε = {first:g} stayed loose; slack {value.budget}")
            scale = scale.learnt(value.core, value.delta, value.slope, floor=floor)


def among(ordered: list[float]) -> Callable[[float | None, float], list[float]]:
    """``choose`` for ``walk``: those of ``ordered`` that are left."""

    def left(latest: float | None, _: float) -> list[float]:
        return ordered if latest is None else ordered[bisect_right(ordered, latest) :]

    return left


def settled(
    accountant: TransferMatrix, sigma: float, scale: Scale, direction: OneWay, *, affordable: float | None = None
) -> Scale:
    """How large and how steep δ is at ``scale.strike`` in one direction, from coarse evaluations that begin there."""
    evaluate = evaluate_remove if direction == "remove" else evaluate_add
    chain, _ = accountant.working_chain(sigma, scale.slope, coarse=True, affordable=affordable)
    for _ in range(12):
        value = evaluate(loss_law(chain, scale, COARSE, direction=direction), scale, COARSE)
        before, scale = scale, scale.learnt(value.core, value.delta, value.slope)
        if scale.settled_since(before) or scale.delta < SMALLEST_DELTA / 10:
            break
    return scale


# Which chain to compute with: the exact one where it is affordable, else the least loose dominating one

AFFORDABLE = 5e9
"""real operations a frequency that an evaluation may cost before a dominating chain is considered"""
POSSIBLE = 2e11
"""beyond this even the cheapest chain is refused"""
STEEPNESS = 12.0
"""a typical −d log δ / d log σ, used only to compare losses"""


def cost(chain: Chain, slope: float) -> float:
    """Real operations for one complex frequency, from the lattice's size before it is built."""
    tau = math.sqrt((1 - chain.lam) / (1 + chain.lam))
    span = 14 * math.sqrt(chain.peak_variance) + math.sqrt(chain.gain) * max(chain.peak_covariance(0.5), 0.0)
    states = span / (spacing_ratio(chain.bins, FINE.lattice) * tau) + 3
    columns = 1.0 if chain.epochs == 1 else states
    total = 0.0
    for stretch in stretches(chain.log_scales, FINE.scales * chain.bins / (1 + slope)):
        _, s = power_cost(stretch.count, int(states), int(columns))
        rest = (stretch.count >> s) + (stretch.count & ((1 << s) - 1)).bit_count()
        total += 8 * states**2 * (s * states + rest * columns)
    return total + 8 * states**2 * columns


def loss(chain: Chain, exact: Chain, slope: float) -> float:
    """About how much σ grows (relatively) by computing with ``chain`` instead of ``exact``."""
    end = exact.gain * exact.tail * float(np.mean(exact.end_effect(np.arange(exact.bins)) ** 2)) / 2
    kept = chain.tail / exact.tail if exact.tail else 1.0
    group = round(math.log(chain.lam) / math.log(exact.lam))
    amplification = math.log(exact.bins / (chain.bins * group))
    return (
        (1 + slope) * end * (1 - kept) / STEEPNESS + 0.5 * math.log(chain.gain / exact.gain) + amplification / STEEPNESS
    )


def collective_loss(chain: Chain, exact: Chain) -> float:
    """The same where σ is large, few bins stand out, and the loss is about the Gaussian mean over all of them."""
    return 0.5 * math.log(chain.mean_loss[1] / exact.mean_loss[1])


def candidates(exact: Chain) -> list[Chain]:
    """The exact chain, its stationary continuation (Lemma 7), and lumped ones (Lemma 8), shortened if need be (9)."""
    chains = [exact] + ([replace(exact, tail=0.0)] if exact.tail else [])
    longest = min(exact.bins // 2, 1 + int(0.03 / -math.log(exact.lam)))
    if exact.nugget and exact.epochs > 1:
        return chains
    divisors = {g for g in range(2, longest + 1) if exact.bins % g == 0} if longest <= 10_000 else set()
    for group in sorted(divisors | {2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256}):
        if 2 <= group <= longest:
            whole = exact.shortened(exact.bins - exact.bins % group).lumped(group)
            chains += [whole] + ([replace(whole, tail=0.0)] if whole.tail else [])
    return chains


def select(exact: Chain, slope: float, most: float = AFFORDABLE) -> tuple[Chain, float]:
    """The chain to compute with, at ``most`` so many operations a frequency, and what it is expected to add to σ."""
    if cost(exact, slope) <= most:
        if exact.tail:
            longer = replace(exact, tail=0.0)
            alone, together = loss(longer, exact, slope), collective_loss(longer, exact)
            if alone <= 3e-5 and together <= 1e-4:
                return longer, max(alone, together)
        return exact, 0.0
    rated = [(loss(chain, exact, slope), cost(chain, slope), chain) for chain in candidates(exact)]
    affordable = [item for item in rated if item[1] <= most]
    if affordable:
        best = min(affordable, key=lambda item: item[0])
        return best[2], best[0]
    best = min(rated, key=lambda item: item[1])
    if best[1] > POSSIBLE:
        raise AccountingError(
            f"λ = {exact.lam:g} with {exact.bins} steps per epoch needs {best[1]:.1g} operations a frequency, beyond "
            f"{POSSIBLE:.1g}; use a smaller λ or the Monte Carlo accountant"
        )
    return best[2], best[0]
