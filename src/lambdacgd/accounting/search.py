"""What the searches for σ and ε share: points of a falling function, and the walk to its root.

The function is f(x) = log(δ(x)/target), x the logarithm of σ or ε. An evaluation takes seconds and its slack changes
with its precision, so each accountant knows best where to look next; ``base.calibrate`` serves those that do not care.
"""

from __future__ import annotations

import math
from collections.abc import Callable


class Bracket:
    """The points (x, f(x)) seen so far, a slope of f, and the interval they leave for the root."""

    def __init__(self, slope: float) -> None:
        self.points: list[tuple[float, float]] = []
        self.slope = slope

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

    @property
    def width(self) -> float:
        return self.passed - self.failed

    def inside(self, x: float, share: float) -> float:
        """x, moved into the interval if there is one, at least this share of its width away from both ends."""
        if not math.isfinite(self.width):
            return x
        return min(max(x, self.failed + share * self.width), self.passed - share * self.width)


def walk_to(
    x: float,
    f: Callable[[float], float],
    following: Callable[[], float],
    near: Callable[[float], bool],
    *,
    most: int,
) -> tuple[float, float]:
    """Evaluate f where ``following`` says until its value is ``near`` enough, or it says the same place again."""
    value = f(x)
    for _ in range(most - 1):
        if near(value) or (after := following()) == x:
            break
        x, value = after, f(after)
    return x, value
