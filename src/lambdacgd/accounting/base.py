"""What an accountant answers with, and the one bisection that calibrates all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Direction = Literal["both", "remove", "add"]


@dataclass(frozen=True)
class Certificate:
    """Why a noise multiplier suffices: which method says so, in which direction, and how surely.

    ``confidence`` is the probability that the method's claim δ(ε) ≤ ``delta`` holds; 1 for deterministic methods.
    ``kind`` tells a certificate ("bound") from a point estimate ("estimate"), which is not a privacy claim.
    """

    method: str
    direction: Direction
    confidence: float
    epsilon: float
    delta: float
    kind: Literal["bound", "estimate"] = "bound"
    details: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Calibration:
    """The noise multiplier σ (relative to the clipping norm) with the certificate that covers it."""

    sigma: float
    certificate: Certificate


class AccountingError(ValueError):
    """A request no accountant here can answer; the message says why and what can be asked instead."""


def calibrate(
    delta_at: Callable[[float], float],
    delta: float,
    *,
    start: float = 1.0,
    rtol: float = 1e-6,
    limits: tuple[float, float] = (1e-6, 1e9),
) -> float:
    """Smallest σ with ``delta_at(σ) ≤ delta``, to relative accuracy ``rtol`` and never below it.

    ``delta_at`` must decrease in σ. The returned σ was itself evaluated and passed; NaN counts as a failure, so a
    broken accountant cannot be calibrated to.
    """

    def passes(sigma: float) -> bool:
        value = delta_at(sigma)
        return value <= delta and value >= 0.0

    low, high = start, start
    if passes(start):
        while passes(low):
            high, low = low, low / 2
            if low < limits[0]:
                return high
    else:
        while not passes(high):
            low, high = high, high * 2
            if high > limits[1]:
                raise AccountingError(f"no σ up to {limits[1]:g} reaches δ = {delta:g}; ask for a larger δ or ε")
    while math.log(high / low) > rtol:
        middle = math.sqrt(low * high)
        if passes(middle):
            high = middle
        else:
            low = middle
    return high
