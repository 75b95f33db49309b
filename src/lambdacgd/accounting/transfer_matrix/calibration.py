"""σ(ε, δ) and ε(σ, δ): coarse evaluations bracket the answer, and only the last few are fine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lambdacgd.accounting.base import SMALLEST_EPSILON, AccountingError, calibrate
from lambdacgd.accounting.search import Bracket, walk_to
from lambdacgd.accounting.transfer_matrix.chain import gaussian_delta
from lambdacgd.accounting.transfer_matrix.measure import COARSE, FINE, SLACK_SHARE, Precision, Scale

if TYPE_CHECKING:
    from lambdacgd.accounting.transfer_matrix.accountant import Bound, TransferMatrix


def final_precision(rtol: float) -> Precision:
    """FINE at the default accuracy, proportionally coarser where a coarser answer is asked for."""
    if rtol <= 2e-4:
        return FINE
    factor = min(rtol / 2e-4, 8.0)
    return Precision(
        smoothing=min(FINE.smoothing * math.sqrt(factor), 0.4),
        lattice=FINE.lattice * factor,
        scales=FINE.scales * factor,
        negligible=FINE.negligible * factor,
        wrap=FINE.wrap * factor,
        rounding=FINE.rounding,
    )


def allowed_slack(rtol: float) -> float:
    """The share of δ that inequalities may add: more where a coarser answer is asked for."""
    return SLACK_SHARE * min(max(rtol / 2e-4, 1.0), 8.0)


class _Search(Bracket):
    """Looks next where a secant says that is kept inside its bracket, and evaluates there."""

    def __init__(
        self,
        evaluate: Callable[[float, Scale, Precision], Bound],
        target: float,
        scale: Scale,
        *,
        slope: float,
        limits: tuple[float, float],
    ) -> None:
        super().__init__(slope)
        self.evaluate, self.target, self.scale, self.limits = evaluate, target, scale, limits
        self.guess = scale.slope
        self.best: tuple[float, Bound] | None = None

    def at(self, x: float, precision: Precision) -> float:
        bound = self.evaluate(x, self.scale, precision)
        value = math.log(bound.delta / self.target)
        if abs(value) < 4:
            self.scale = replace(self.scale, slope=min(max(bound.slope, 0.3), 3 * self.scale.slope))
        elif value > 0:  # a slope learnt where δ is nearly flat smooths so widely that nothing passes any more
            self.scale = replace(self.scale, slope=max(self.scale.slope, self.guess))
        self.points.append((x, value))
        if value <= 0 and (self.best is None or x < self.best[0]):
            self.best = (x, bound)
        return value

    def restart(self) -> None:
        super().restart()
        self.best = None

    def next(self, aim: float, largest: float) -> float:
        """Where f should be close to −aim, from the two points nearest to the root; at most ``largest`` further out."""
        nearest = sorted(self.points, key=lambda p: abs(p[1]))[:2]
        x, value = nearest[0]
        if abs(value) > 3:
            # Far away a bound says little more than its sign (it is tuned to the target): bisect, or a fixed step.
            if math.isfinite(self.width):
                x = self.failed + 0.5 * self.width
            else:  # onwards from the last point, though all may look alike
                x = self.failed + largest if value > 0 else self.passed - largest
        else:
            measured = len(nearest) == 2 and nearest[0][0] != nearest[1][0] and abs(nearest[1][1]) < 3
            if measured:
                slope = (value - nearest[1][1]) / (x - nearest[1][0])
                self.slope = slope if slope < 0 else self.slope
            ahead = x + min(max(-(value + aim) / self.slope, -largest), largest)
            if not measured and math.isfinite(self.width) and not self.failed < ahead < self.passed:
                x = self.failed + 0.5 * self.width  # the first guess of a slope is refuted: its steps would creep
            else:
                x = self.inside(ahead, 0.02)
        return min(max(x, self.limits[0]), self.limits[1])


def _solve(search: _Search, x: float, rtol: float, largest: float) -> tuple[float, Bound]:
    """Coarse evaluations until f is near zero, then fine ones until the answer is certified and close."""
    walk_to(
        x,
        lambda at: search.at(at, COARSE),
        lambda: search.next(0.0, largest),
        lambda value: abs(value) < 0.25,
        most=40,
    )
    x = search.next(0.0, largest)
    search.restart()
    precision = final_precision(rtol)
    _, value = walk_to(
        x,
        lambda at: search.at(at, precision),
        lambda: search.next(0.4 * rtol * abs(search.slope), largest),
        lambda value: -rtol * abs(search.slope) <= value <= 0 or search.width <= rtol,
        most=25,
    )
    if search.best is None:
        raise AccountingError(
            f"δ = {search.target:g} is out of reach: the last bound was {math.exp(value) * search.target:.3g}"
        )
    return search.best


def calibrate_sigma(
    accountant: TransferMatrix, epsilon: float, delta: float, *, rtol: float, start: float | None
) -> tuple[float, Bound]:
    """The search over log σ."""
    from lambdacgd.accounting.transfer_matrix.accountant import first_slope

    smallest = math.log(accountant.smallest_sigma * 1.001)
    one = accountant.chain(1.0)
    # Without amplification the Gaussian mechanism needs this much (Kahane: no two bins correlate more than fully).
    alone = math.sqrt(one.gain * one.peak_variance)
    most = calibrate(lambda sigma: gaussian_delta(alone / sigma, epsilon), delta, start=alone, rtol=1e-3)
    guess = start or 0.35 * most
    search = _Search(
        lambda x, scale, precision: accountant.evaluate(math.exp(x), epsilon, scale, precision),
        delta,
        Scale(math.exp(epsilon), delta, first_slope(epsilon, delta)),
        slope=-10.0,
        limits=(smallest, math.log(most * 1.01)),
    )
    _, bound = _solve(search, min(max(math.log(guess), smallest), math.log(most)), rtol, 0.35)
    return bound.sigma, accountant.checked(bound, slack=allowed_slack(rtol))


def calibrate_epsilon(accountant: TransferMatrix, sigma: float, delta: float, *, rtol: float) -> tuple[float, Bound]:
    """The search over log ε."""
    from lambdacgd.accounting.transfer_matrix.accountant import LARGEST_EPSILON, first_slope

    def evaluate(x: float, scale: Scale, precision: Precision) -> Bound:
        return accountant.evaluate(sigma, math.exp(x), replace(scale, strike=math.exp(math.exp(x))), precision)

    search = _Search(
        evaluate,
        delta,
        Scale(math.e, delta, first_slope(1.0, delta)),
        slope=-1.4 * math.log(1 / min(delta, 0.1)),
        limits=(math.log(SMALLEST_EPSILON), math.log(LARGEST_EPSILON)),
    )
    _, bound = _solve(search, 0.0, rtol, 0.7)
    return bound.epsilon, accountant.checked(bound, slack=allowed_slack(rtol))
