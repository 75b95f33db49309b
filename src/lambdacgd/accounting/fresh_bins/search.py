"""σ(ε, δ) over all epochs: quick compositions find its neighbourhood, and only the last few are fine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lambdacgd.accounting.base import AccountingError
from lambdacgd.accounting.search import Bracket, walk_to

if TYPE_CHECKING:
    from lambdacgd.accounting.fresh_bins.accountant import ComposedBound, FreshBins

FAR = 3.0
"""|log δ/target| beyond which the secant is not believed"""
QUICK_RTOL = 3e-3
QUICK_EXCESS = 0.12
"""about the logarithm of a quick δ over a fine one"""


class _Secant(Bracket):
    """Looks next where the secant through the nearest points says."""

    def add(self, x: float, value: float) -> None:
        near = [p for p in self.points if p[0] != x and abs(p[1]) < 2 * FAR]
        if near and abs(value) < 2 * FAR:
            other = min(near, key=lambda p: abs(p[1]))
            slope = (value - other[1]) / (x - other[0])
            self.slope = slope if slope < -0.5 else self.slope
        self.points.append((x, value))

    def next(self, aim: float) -> float:
        """Where the value should be −aim."""
        x, value = min(self.points, key=lambda p: abs(p[1] + aim))
        if abs(value) > FAR:
            if math.isfinite(self.width):
                return 0.5 * (self.failed + self.passed)
            x = self.failed if value > 0 else self.passed  # onwards from the last point, though all may look alike
        return self.inside(x - min(max(value + aim, -FAR), FAR) / self.slope, 0.05)


def calibrate_sigma(
    accountant: FreshBins, epsilon: float, delta: float, *, rtol: float, start: float
) -> tuple[float, ComposedBound]:
    """Quick steps until δ is near where a fine one meets its target, then fine ones until one passes closely."""
    smallest = math.log(accountant.one_epoch.smallest_sigma * 1.001)
    secant = _Secant(-12.0)
    best: ComposedBound | None = None

    def value_at(x: float, *, quick: bool) -> float:
        nonlocal best
        found = accountant.evaluate(math.exp(x), epsilon, delta, quick=quick)
        if found.delta <= delta and (best is None or found.sigma < best.sigma):
            best = found
        value = math.log(found.delta / delta)
        secant.add(x, value)
        return value

    def pass_closely(x: float, *, quick: bool) -> None:
        walk_to(
            x,
            lambda at: value_at(at, quick=quick),
            lambda: max(secant.next(0.4 * rtol * abs(secant.slope)), smallest),
            lambda value: -rtol * abs(secant.slope) <= value <= 0 or secant.width <= rtol,
            most=40 if quick else 12,
        )

    x = max(math.log(start), smallest)
    if rtol >= QUICK_RTOL:
        pass_closely(x, quick=True)
    else:

        def following() -> float:
            return max(secant.next(-QUICK_EXCESS), smallest)

        walk_to(
            x, lambda at: value_at(at, quick=True), following, lambda value: abs(value - QUICK_EXCESS) < 0.2, most=40
        )
        x, best = following(), None
        secant.restart()
        pass_closely(x, quick=False)
    if best is None:
        raise AccountingError(f"no σ was found that keeps δ(ε = {epsilon:g}) below {delta:g}; ask for a larger ε or δ")
    return best.sigma, accountant.checked(best)


def estimate_sigma(
    accountant: FreshBins, epsilon: float, delta: float, *, start: float, slope: float
) -> tuple[float, float]:
    """σ and −d log δ/d log σ: quick steps until δ is within a third of its target, then the secant's word for it."""
    smallest = math.log(accountant.one_epoch.smallest_sigma * 1.001)
    secant = _Secant(-slope)

    def value_at(x: float) -> float:
        value = math.log(accountant.evaluate(math.exp(x), epsilon, delta, quick=True).delta / delta)
        secant.add(x, value)
        return value

    x, value = walk_to(
        max(math.log(start), smallest),
        value_at,
        lambda: max(secant.next(0.0), smallest),
        lambda value: abs(value) < 0.3,
        most=30,
    )
    return math.exp(x - value / secant.slope), -secant.slope
