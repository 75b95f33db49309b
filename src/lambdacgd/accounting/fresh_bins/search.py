"""σ(ε, δ) over all epochs: quick compositions find its neighbourhood, and only the last few are fine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lambdacgd.accounting.base import AccountingError

if TYPE_CHECKING:
    from lambdacgd.accounting.fresh_bins.accountant import ComposedBound, FreshBins

FAR = 3.0
"""|log δ/target| beyond which the secant is not believed"""
QUICK_RTOL = 3e-3
QUICK_EXCESS = 0.12
"""about the logarithm of a quick δ over a fine one"""


class _Bracket:
    """The points of log(δ(x)/target) seen so far, x = log σ, and where to look next."""

    def __init__(self, slope: float) -> None:
        self.points: list[tuple[float, float]] = []
        self.slope = slope

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
        failed = max((p[0] for p in self.points if p[1] > 0), default=-math.inf)
        passed = min((p[0] for p in self.points if p[1] <= 0), default=math.inf)
        bracketed = math.isfinite(failed) and math.isfinite(passed)
        if bracketed and abs(value) > FAR:
            return 0.5 * (failed + passed)
        guess = x - min(max(value + aim, -FAR), FAR) / self.slope
        if bracketed:
            guess = min(max(guess, failed + 0.05 * (passed - failed)), passed - 0.05 * (passed - failed))
        return guess

    def width(self) -> float:
        failed = max((p[0] for p in self.points if p[1] > 0), default=-math.inf)
        passed = min((p[0] for p in self.points if p[1] <= 0), default=math.inf)
        return passed - failed


def calibrate_sigma(
    accountant: FreshBins, epsilon: float, delta: float, *, rtol: float, start: float
) -> tuple[float, ComposedBound]:
    """Quick steps until δ is near where a fine one meets its target, then fine ones until one passes closely."""
    smallest = math.log(accountant.one_epoch.smallest_sigma * 1.001)
    best: ComposedBound | None = None

    def value_at(x: float, *, quick: bool) -> float:
        nonlocal best
        found = accountant.evaluate(math.exp(x), epsilon, delta, quick=quick)
        if found.delta <= delta and (best is None or found.sigma < best.sigma):
            best = found
        return math.log(found.delta / delta)

    only_quick = rtol >= QUICK_RTOL
    bracket, x = _Bracket(-12.0), max(math.log(start), smallest)
    for _ in range(40):
        value = value_at(x, quick=True)
        bracket.add(x, value)
        tolerance = rtol * abs(bracket.slope)
        if only_quick and (-tolerance <= value <= 0 or bracket.width() <= rtol):
            break
        if not only_quick and abs(value - QUICK_EXCESS) < 0.2:
            break
        before, x = x, max(bracket.next(0.4 * tolerance if only_quick else -QUICK_EXCESS), smallest)
        if x == before:
            break
    if not only_quick:
        best = None
        x, bracket = max(bracket.next(-QUICK_EXCESS), smallest), _Bracket(bracket.slope)
        for _ in range(12):
            value = value_at(x, quick=False)
            bracket.add(x, value)
            tolerance = rtol * abs(bracket.slope)
            if -tolerance <= value <= 0 or bracket.width() <= rtol:
                break
            before, x = x, max(bracket.next(0.4 * tolerance), smallest)
            if x == before:
                break
    if best is None:
        raise AccountingError(f"no σ was found that keeps δ(ε = {epsilon:g}) below {delta:g}; ask for a larger ε or δ")
    return best.sigma, accountant.checked(best)


def estimate_sigma(
    accountant: FreshBins, epsilon: float, delta: float, *, start: float, slope: float
) -> tuple[float, float]:
    """σ and −d log δ/d log σ: quick steps until δ is within a third of its target, then the secant's word for it."""
    smallest = math.log(accountant.one_epoch.smallest_sigma * 1.001)
    bracket, x = _Bracket(-slope), max(math.log(start), smallest)
    for _ in range(30):
        value = math.log(accountant.evaluate(math.exp(x), epsilon, delta, quick=True).delta / delta)
        bracket.add(x, value)
        if abs(value) < 0.3:
            break
        before, x = x, max(bracket.next(0.0), smallest)
        if x == before:
            break
    return math.exp(x - value / bracket.slope), -bracket.slope
