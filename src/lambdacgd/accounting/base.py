"""What an accountant answers with, and the one search that calibrates all of them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from numbers import Real
from typing import Any, ClassVar, Literal

from scipy.optimize import toms748

from lambdacgd.errors import AccountingError, DeviceError

Direction = Literal["both", "remove", "add"]

SMALLEST_EPSILON = 1e-3
"""of Balls-in-Bins: below it differences of Gaussian tails lose more digits than the certificates' margins cover"""


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

    def __post_init__(self) -> None:
        named = self.kind in ("bound", "estimate") and self.direction in ("both", "remove", "add")
        sure = real("confidence", self.confidence)
        claims = 0 < sure <= 1 or (sure == 0 and self.kind == "estimate")
        if not (named and claims and isinstance(self.details, dict)):
            raise AccountingError(f"{self!r} is no certificate: its kind, direction, confidence or details say nothing")

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as plan files hold them."""
        return asdict(self)


@dataclass(frozen=True)
class TwoWayBound:
    """δ(ε) ≤ ``delta`` at noise multiplier ``sigma``; ``budget`` says what each inequality can have added to it."""

    sigma: float
    epsilon: float
    delta_remove: float
    delta_add: float
    budget: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    method: ClassVar[str]

    @property
    def delta(self) -> float:
        return max(self.delta_remove, self.delta_add)

    @property
    def direction(self) -> Direction:
        """The direction that governs."""
        return "remove" if self.delta_remove >= self.delta_add else "add"

    def certificate(self, delta: float | None = None) -> Certificate:
        """This bound as a certificate, of ``delta`` if that is asked for and not smaller than the bound."""
        claimed = self.delta if delta is None else delta
        if not self.delta <= claimed < 1:
            raise AccountingError(
                f"δ = {claimed!r} is not certified at σ = {self.sigma:g}: the bound is {self.delta:.4g}"
            )
        details = {"delta_remove": self.delta_remove, "delta_add": self.delta_add, "budget": self.budget} | self.details
        return Certificate(self.method, "both", 1.0, self.epsilon, claimed, "bound", details)


@dataclass(frozen=True)
class Calibration:
    """The noise multiplier σ (relative to the clipping norm) with the certificate that covers it."""

    sigma: float
    certificate: Certificate


def device() -> str:
    """What ``LAMBDACGD_ACCOUNTING_DEVICE`` asks for: "auto" (if it is not set), "cpu", "cuda" or "cuda:1" and so on.

    With "auto" the exact accountant takes CUDA where there is one, where it pays and where it is right (see
    ``transfer_matrix.devices``); Monte Carlo stays on the CPU, so that its random numbers do not depend on what happens
    to be plugged in.
    """
    asked = os.environ.get("LAMBDACGD_ACCOUNTING_DEVICE") or "auto"
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", asked):
        raise DeviceError(f"LAMBDACGD_ACCOUNTING_DEVICE is {asked!r}; it must be auto, cpu, cuda or cuda:0, cuda:1, …")
    return asked


def real(name: str, value: Any) -> float:
    """``value`` as a Python float: with a NumPy float32 everything would be computed, and rounded, in its precision."""
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    raise AccountingError(f"{name} is {value!r}; it must be a number")


def calibrate(
    delta_at: Callable[[float], float],
    delta: float,
    *,
    start: float = 1.0,
    spread: float = 2.0,
    rtol: float = 1e-6,
    limits: tuple[float, float] = (1e-6, 1e9),
) -> float:
    """Smallest x > 0 with ``delta_at(x) ≤ delta``, to relative accuracy ``rtol`` and never below it.

    ``delta_at`` must decrease in x (a noise multiplier, or ε). The returned x was itself evaluated and passed; a
    negative or NaN δ counts as a failure, so a broken accountant cannot be calibrated to. ``start`` and ``spread``
    are a guess and its first uncertainty factor; the search widens them as it must, within ``limits``.
    """
    low, high = -math.inf, math.inf  # logarithms of the largest failure and the smallest success so far

    def excess(x: float) -> float:
        nonlocal low, high
        value = delta_at(math.exp(x))
        if 0.0 <= value <= delta:
            high = min(high, x)
            return min(math.log(max(value, 1e-300) / delta), -1e-15)
        low = max(low, x)
        return max(math.log(value / delta), 1e-15) if delta < value < math.inf else 50.0

    bottom, top = math.log(limits[0]), math.log(limits[1])
    x, step = math.log(start), math.log(spread)
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
    while high - low > rtol and low < (middle := (low + high) / 2) < high:
        excess(middle)
    return math.exp(high)
