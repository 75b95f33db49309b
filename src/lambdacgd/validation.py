"""Checks at the door: one error type that says which parameter, what was given, and what is allowed."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


class InvalidInput(ValueError):
    """A parameter that cannot be used. ``parameter`` and ``complaint`` let the command line name the flag instead."""

    def __init__(self, parameter: str, given: Any, allowed: str) -> None:
        super().__init__(f"{parameter} is {given!r}, but {allowed}")
        self.parameter = parameter
        self.complaint = f"is {given!r}, but {allowed}"


def integer(parameter: str, value: Any, *, minimum: int = 1, maximum: int | None = None, why: str = "") -> int:
    """``value`` as an int within the limits, or an ``InvalidInput``."""
    ok = isinstance(value, Integral) and not isinstance(value, bool)
    if not ok or int(value) < minimum or (maximum is not None and int(value) > maximum):
        limits = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise InvalidInput(parameter, value, f"it must be an integer {limits}{why}")
    return int(value)


def number(
    parameter: str,
    value: Any,
    *,
    above: float = -math.inf,
    below: float = math.inf,
    include: tuple[float, ...] = (),
) -> float:
    """``value`` as a float strictly between the limits (or one of ``include``), or an ``InvalidInput``."""
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            found = float(value)
        except OverflowError:  # an integer or fraction beyond all floats
            found = math.nan
        if above < found < below or found in include:
            return found
    closed_low = above in include
    low = ("at least " if closed_low else "above ") + f"{above:g}" if above > -math.inf else ""
    high = f"below {below:g}" if below < math.inf else ""
    rest = [f"{extra:g}" for extra in include if extra not in (above, below)]
    if below == math.inf and math.inf not in include:
        high = "finite"
    limits = " and ".join(part for part in (low, high) if part)
    raise InvalidInput(
        parameter, value, f"it must be a number {limits}{' or exactly ' + ' or '.join(rest) if rest else ''}"
    )
