"""What accountants answer with, the protocol of what bounds δ, and what they share."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from numbers import Real
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from lambdacgd.errors import AccountingError

Direction = Literal["both", "remove", "add"]
OneWay = Literal["remove", "add"]
Array = NDArray[np.float64]

SMALLEST_EPSILON = 1e-3
"""Smallest ε of Balls-in-Bins. Below it, differences of Gaussian tails lose more digits than the margins cover."""


@dataclass(frozen=True)
class Certificate:
    """Why a noise multiplier suffices: which method says so, and in which direction.

    ``confidence`` and ``kind`` are those of plan files: every certificate made today is a "bound" of confidence 1. In
    earlier releases some were sampled, with the chance of an error counted into δ, and an "estimate" claimed nothing.
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
class Calibration:
    """The noise multiplier σ (relative to the clipping norm) with the certificate that covers it."""

    sigma: float
    certificate: Certificate


@dataclass(frozen=True)
class Bound:
    """δ(ε) ≤ ``delta`` in both directions at noise multiplier ``sigma``.

    ``budget`` says how much each inequality can have added to the larger direction. ``slope`` is about −d log δ/dε.
    """

    sigma: float
    epsilon: float
    delta_remove: float
    delta_add: float
    method: str
    budget: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    slope: float = math.nan

    @property
    def delta(self) -> float:
        return max(self.delta_remove, self.delta_add)

    @property
    def slack(self) -> float:
        """The most that all inequalities together can have added to δ."""
        return sum(self.budget.values())

    @property
    def slack_share(self) -> float:
        """``slack`` over δ: some of the budget are estimates, which can exceed by far what was added."""
        return min(self.slack / self.delta, 1.0)

    @property
    def direction(self) -> Direction:
        """The direction that governs."""
        return "remove" if self.delta_remove >= self.delta_add else "add"

    def certificate(self, delta: float | None = None) -> Certificate:
        """This bound as a certificate.

        Args:
            delta: the δ to certify, by default the bound itself.

        Returns:
            The certificate, with both directions and the budget in its details.

        Raises:
            AccountingError: ``delta`` is smaller than the bound, or not below 1.
        """
        claimed = self.delta if delta is None else delta
        if not self.delta <= claimed < 1:
            raise AccountingError(f"δ = {claimed!r} is not certified: at σ = {self.sigma:g} it is {self.delta:.4g}")
        details = {"delta_remove": self.delta_remove, "delta_add": self.delta_add, "budget": self.budget} | self.details
        details |= {"slack_share": self.slack_share} if self.budget else {}
        return Certificate(self.method, "both", 1.0, self.epsilon, claimed, "bound", details)


DELTA_SHARE = 2.0**-8  #: of a plan's δ, set aside for floating point (``accounting.floating_point``); for ε see below


def set_aside(epsilon: float, delta: float) -> dict[str, float]:
    """What a plan for (ε, δ) keeps for floating point: 2⁻¹⁰ + 2⁻¹¹ε, at most 2⁻⁷ε, and 2⁻⁸δ."""
    return {"epsilon": min(epsilon * 2.0**-7, 2.0**-10 + epsilon * 2.0**-11), "delta": delta * DELTA_SHARE}


def claimed_epsilon(real: float) -> float:
    """The ε of a plan whose mechanism has ε = ``real`` in real numbers: with what is set aside for floating point."""
    return min(real / (1 - 2.0**-7), (real + 2.0**-10) / (1 - 2.0**-11))


class Bounding(Protocol):
    """Bounds δ for one mechanism under one sampling."""

    def delta(self, sigma: float, epsilon: float) -> Bound:
        """The smallest δ that is certified at noise multiplier σ and ε."""

    def epsilon(self, sigma: float, delta: float) -> Bound:
        """The smallest ε that is certified at noise multiplier σ and δ."""

    def sigma(self, epsilon: float, delta: float) -> Bound:
        """The smallest noise multiplier σ that is certified for (ε, δ)."""

    def quick_sigma(self, epsilon: float, delta: float, *, start: float | None = None) -> float:
        """About that σ, to 0.5%, for comparing mechanisms. It claims nothing. ``start`` is a guess that saves time."""


def real(
    name: str, value: Any, low: float = -math.inf, high: float = math.inf, *, whole: bool = False, below: bool = False
) -> float:
    """``value`` as a Python float: with a NumPy float32 everything would be computed, and rounded, in its precision.

    Args:
        name: how a refusal calls it.
        value: what was given.
        low: the smallest value that is allowed.
        high: the largest one; a limited value must be finite in any case.
        whole: whether it must be a whole number.
        below: whether it must lie below ``high``.

    Raises:
        AccountingError: it is not a number, or out of range.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise AccountingError(f"{name} is {value!r}; it must be a number")
    number = float(value)
    limited = (low, high) != (-math.inf, math.inf)
    fits = low <= number < high if below else low <= number <= high
    if limited and not (fits and math.isfinite(number) and (not whole or number.is_integer())):
        where = f"between {low:,g} and {high:,g}" if high < math.inf else f"finite and at least {low:.3g}"
        raise AccountingError(f"{name} is {value!r}; it must be {'an integer ' if whole else ''}{where}")
    return number


_listener: ContextVar[Callable[[float, float], None] | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def listening(listener: Callable[[float, float], None] | None) -> Iterator[None]:
    """Inside, ``listener(σ, seconds)`` hears about which σ an accountant will certify, and in about how long."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def tell(sigma: float, seconds: float) -> None:
    """Tell whoever listens."""
    if (listener := _listener.get()) is not None:
        listener(sigma, seconds)


_PATIENCE = 2.0  # seconds


@contextlib.contextmanager
def progress(description: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A progress bar for work that takes longer than two seconds; yields ``tick(amount)``.

    It stays silent where standard error is not a terminal and where another bar is already shown.
    """
    from rich.console import Console
    from rich.errors import LiveError
    from rich.progress import Progress

    started, bar = time.monotonic(), Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task(description, total=total)

    def tick(amount: int) -> None:
        bar.update(task, advance=amount)
        if bar.console.is_terminal and not bar.live.is_started and time.monotonic() - started > _PATIENCE:
            with contextlib.suppress(LiveError):  # the caller's own bar
                bar.start()

    try:
        yield tick
    finally:
        if bar.live.is_started:
            bar.stop()
