"""The root finder of all accountants.

Every search solves f(x) = 0 for a function that falls with x: f = log(δ/target), and x is the logarithm of σ or ε.
``find_root`` evaluates f where a ``Secant`` says, until a value is near enough: for an f that takes seconds, has a
known slope, and says little more than its sign far away. ``smallest_certified`` does so at round numbers. ``smallest``
serves cheap functions (TOMS 748), ``bisect`` functions that only say yes or no.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy.optimize import toms748

from lambdacgd.accounting.certificate import Bound
from lambdacgd.errors import AccountingError

FAR = 3.0  #: |log δ/target| beyond which a slope is not believed
STEEPEST = 300.0  #: −df/dx beyond which two points contradict each other; up to about 100 were seen


class Secant:
    """Follows the secant through the newest point and the one nearest to the root, ``largest`` at most at a time.

    It keeps the points (x, f(x)) evaluated so far and the interval they leave for the root.
    """

    def __init__(
        self, slope: float, *, largest: float = math.inf, limits: tuple[float, float] = (-math.inf, math.inf)
    ) -> None:
        self.points: list[tuple[float, float]] = []
        self.slope, self.largest, self.limits = slope, largest, limits

    def add(self, x: float, value: float) -> None:
        # Evaluations are tuned to those before them, so the newest is the best. A point that contradicts it is dropped.
        self.points = [p for p in self.points if p[0] == x or -STEEPEST < (value - p[1]) / (x - p[0]) <= 0]
        near = [p for p in self.points if p[0] != x and abs(p[1]) < 2 * FAR]
        if near and abs(value) < 2 * FAR:
            other = min(near, key=lambda p: abs(p[1]))
            slope = (value - other[1]) / (x - other[0])
            self.slope = slope if slope < -0.5 else self.slope
        self.points.append((x, value))

    def next(self) -> float:
        """Where to evaluate f next: inside the interval, if there is one, and not at its ends."""
        x, value = min(self.points, key=lambda p: abs(p[1]))
        low, high = self.failed, self.passed
        bracketed = math.isfinite(high - low)
        if abs(value) > FAR:
            # Far away a bound says little more than its sign (it is tuned to the target): bisect, or a long step.
            if bracketed:
                return self.within_limits(0.5 * (low + high))
            x = low if value > 0 else high  # onwards from the last point, though all may look alike
        step = -min(max(value, -FAR), FAR) / self.slope
        x += min(max(step, -self.largest), self.largest)
        if bracketed:
            x = min(max(x, low + 0.03 * (high - low)), high - 0.03 * (high - low))
        return self.within_limits(x)

    def restart(self) -> None:
        """Forget the points, which a finer evaluation would move, and keep the slope."""
        self.points = []

    @property
    def failed(self) -> float:
        """The largest x with f > 0."""
        return max((x for x, value in self.points if value > 0), default=-math.inf)

    @property
    def passed(self) -> float:
        """The smallest x with f ≤ 0."""
        return min((x for x, value in self.points if value <= 0), default=math.inf)

    def within_limits(self, x: float) -> float:
        return min(max(x, self.limits[0]), self.limits[1])


def find_root(
    f: Callable[[float], float],
    x: float,
    strategy: Secant,
    near: Callable[[float], bool],
    *,
    place: Callable[[float], float] = lambda x: x,
    most: int = 40,
) -> tuple[float, float]:
    """Evaluate f where ``strategy`` says until a value is near enough.

    Args:
        f: a falling function.
        x: where to begin.
        strategy: says where to look next. It is told every point and keeps them.
        near: whether a value is near enough to stop.
        place: the next x that may be evaluated, from x on.
        most: evaluations of f at most.

    Returns:
        The last x and f(x): near enough, or the strategy named a place again, or ``most`` were evaluated.
    """
    x = place(x)
    value = f(x)
    strategy.add(x, value)
    for _ in range(most - 1):
        if near(value) or (after := place(strategy.next())) in (x, strategy.failed, strategy.passed):
            break
        x, value = after, f(after)
        strategy.add(x, value)
    return x, value


def log_ratio(delta: float, target: float) -> float:
    """log(δ/target); far below zero where δ is so small that it has become 0."""
    return math.log(max(delta, 1e-300) / target)


def round_step(value: float, rtol: float) -> float:
    """The largest of 1, 2 and 5 times a power of ten that is at most ``rtol`` of ``value``.

    >>> round_step(1.4363, 5e-4)
    0.0005
    """
    power = 10.0 ** math.floor(math.log10(rtol * value) + 1e-12)
    return max(m * power for m in (1, 2, 5) if m * power <= rtol * value * (1 + 1e-12))


def rounded_up(value: float, rtol: float) -> float:
    """``value`` rounded up to a multiple of ``round_step``: a short decimal number.

    >>> rounded_up(1.43631, 5e-4)
    1.4365
    """
    step = round_step(value, rtol)
    return round(math.ceil(value / step - 1e-9) * step, max(0, 1 - math.floor(math.log10(step))))


def smallest_certified(
    evaluate: Callable[[float], Bound],
    target: float,
    start: float,
    strategy: Secant,
    *,
    rtol: float,
    most: int = 25,
    enough: float = 0.0,
) -> tuple[Bound | None, float]:
    """The bound at the smallest value (of σ or ε) with δ ≤ ``target``, of round numbers only (``rounded_up``).

    So where the search ends does not hang on the last bits of what it met on its way, and two machines certify the same
    number.

    Args:
        evaluate: bounds δ at a value.
        target: the δ to reach.
        start: the value to begin with.
        strategy: where to look next, on the logarithm of the value.
        rtol: relative accuracy of the value.
        most: evaluations at most.
        enough: how near, relatively, a value that passes may be to the smallest one and end the search.

    Returns:
        The best bound that passed, or None, and the last log(δ/target). A bound in hand is returned also where
        ``evaluate`` refuses to go on.

    Raises:
        AccountingError: ``evaluate`` refused before any bound passed.
    """
    best: tuple[float, Bound] | None = None

    def f(x: float) -> float:
        nonlocal best
        value = rounded_up(math.exp(x), rtol)
        bound = evaluate(value)
        if bound.delta <= target and (best is None or value < best[0]):
            best = (value, bound)
        return log_ratio(bound.delta, target)

    def place(x: float) -> float:
        value = rounded_up(math.exp(x), rtol)
        below = math.log(value - round_step(value, rtol))
        # Onto a number that passed already: the one below it, unless that failed.
        return below if math.log(value) >= strategy.passed and below > strategy.failed + 1e-12 else math.log(value)

    def near(value: float) -> bool:
        """Whether it passes, and the next round number (or one that is near enough) would not."""
        at = math.exp(strategy.points[-1][0])
        return -max(round_step(at, rtol) / at, enough) * abs(strategy.slope) <= value <= 0

    value = math.nan
    try:
        _, value = find_root(f, math.log(start), strategy, near, place=place, most=most)
    except AccountingError:
        if best is None:
            raise
    return (None if best is None else best[1]), value


def smallest(
    delta_at: Callable[[float], float],
    delta: float,
    *,
    start: float = 1.0,
    rtol: float = 1e-6,
    limits: tuple[float, float] = (1e-6, 1e9),
) -> float:
    """The smallest x > 0 with ``delta_at(x) ≤ delta``, to relative accuracy ``rtol`` and never below it.

    Args:
        delta_at: decreases in x (a noise multiplier, or ε). A negative or NaN δ counts as a failure, so a broken
            accountant cannot be calibrated to.
        delta: the target.
        start: a guess of x.
        rtol: relative accuracy of x.
        limits: the range of x.

    Returns:
        An x that was itself evaluated and passed.

    Raises:
        AccountingError: nothing within the limits passes.
    """
    low, high = -math.inf, math.inf  # logarithms of the largest failure and the smallest success so far

    def excess(x: float) -> float:
        nonlocal low, high
        value = delta_at(math.exp(x))
        if 0.0 <= value <= delta:
            high = min(high, x)
            return min(log_ratio(value, delta), -1e-15)
        low = max(low, x)
        return max(math.log(value / delta), 1e-15) if delta < value < math.inf else 50.0

    bottom, top = math.log(limits[0]), math.log(limits[1])
    x, step = math.log(start), math.log(2.0)
    passed = excess(x) < 0
    while (low == -math.inf) if passed else (high == math.inf):
        if passed and x <= bottom:
            return math.exp(high)
        if not passed and x >= top:
            raise AccountingError(f"no value up to {limits[1]:g} reaches δ = {delta:g}; ask for a larger δ or ε")
        x = max(x - step, bottom) if passed else min(x + step, top)
        step *= 1.5
        excess(x)
    if high - low > rtol:
        toms748(excess, low, high, xtol=rtol / 2, rtol=1e-15, maxiter=60, disp=False)
    if high - low > rtol:
        bisect(lambda x: excess(x) < 0, low, high, width=rtol)
    return math.exp(high)


def bisect(passes: Callable[[float], bool], low: float, high: float, *, width: float = 0.0, most: int = 100) -> float:
    """The smallest point found that passes, between ``low``, which is taken to fail, and ``high``, to pass.

    It stops when the interval is at most ``width`` wide, or after ``most`` halvings.
    """
    for _ in range(most):
        middle = 0.5 * (low + high)
        if high - low <= width or not low < middle < high:
            break
        low, high = (low, middle) if passes(middle) else (middle, high)
    return high
