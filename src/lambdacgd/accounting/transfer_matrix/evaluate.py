"""One evaluation of δ in each direction, at given (σ, ε), tuned to a guess of how large and how steep δ is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lambdacgd.accounting.base import AccountingError
from lambdacgd.accounting.transfer_matrix.chain import Chain, jensen_add
from lambdacgd.accounting.transfer_matrix.extended import AVAILABLE
from lambdacgd.accounting.transfer_matrix.measure import Measure, Precision, Scale
from lambdacgd.accounting.transfer_matrix.product import Rounding, rounding_unit
from lambdacgd.accounting.transfer_matrix.put import (
    EXTENDED_GAIN,
    Put,
    Window,
    choose_window,
    put,
    weights,
)

LARGEST_WORK = 5e11
"""the most real operations spent on one evaluation (about a minute on one core); beyond it the request is refused"""
EXTENDED_LIMIT = 3e10
"""the most real operations spent in extended precision on one evaluation (half a minute)"""


@dataclass(frozen=True)
class Evaluation:
    """An upper bound on δ in one direction, with what it was tuned to and what each step can have added (absolute)."""

    delta: float
    slope: float
    budget: dict[str, float] = field(default_factory=dict)
    method: str = "fourier"

    @property
    def added(self) -> float:
        """The most that all inequalities together can have added to δ."""
        return sum(self.budget.values())

    @property
    def core(self) -> float:
        """An estimate of δ without its slack (not a bound)."""
        return max(self.delta - self.added, 0.0)


@dataclass(frozen=True)
class Series:
    """Transforms of one law at one window's frequencies: enough for every strike inside the window."""

    law: Measure
    window: Window
    transform: NDArray[Any]
    unit: float
    precision: Precision
    method: str
    width: float
    """of the smoothing, one for all strikes: a wider one at the higher strikes would reach below the window"""

    def put(self, strike: float, width: float) -> Put:
        return put(strike, width, self.window, self.transform, self.unit)


def series(law: Measure, rounding: Rounding, scales: list[Scale], precision: Precision) -> Series:
    """Set up for all of ``scales``: the highest strike, the narrowest smoothing and the smallest value decide."""
    strike, width = max(s.strike for s in scales), min(s.width(precision) for s in scales)
    value = min(s.delta * (s.strike if rounding == "down" else 1.0) for s in scales)
    slope = min(s.slope for s in scales)
    unit, upper_tail = rounding_unit(law.bins), rounding == "up"
    window = choose_window(
        law, rounding, strike, width, slope, value, precision, unit=unit, decreasing_beyond=upper_tail
    )
    work = law.product.flops() * window.count
    if work > LARGEST_WORK:
        raise AccountingError(
            f"{window.count} frequencies of {law.product.flops():.2g} operations each are beyond {LARGEST_WORK:.1g}; "
            "use a smaller λ, a larger ε or δ, or the Monte Carlo accountant"
        )
    extended = precision.extended and _needs_extended(law, strike, width, window, unit, precision.rounding * value)
    transform = law.transform(1j * window.frequencies - window.tilt, rounding, extended=extended)
    unit *= EXTENDED_GAIN if extended else 1.0
    return Series(law, window, transform, unit, precision, "extended" if extended else "fourier", width)


def evaluate_remove(law: Measure, scale: Scale, precision: Precision) -> Evaluation:
    """δ_remove at one strike; ``scale`` says where and what to expect."""
    return next(remove_at(law, [scale], precision))


def evaluate_add(law: Measure, scale: Scale, precision: Precision) -> Evaluation:
    """δ_add at one strike; ``scale`` says where and what to expect."""
    return next(add_at(law, [scale], precision))


def remove_at(law: Measure, scales: list[Scale], precision: Precision) -> Iterator[Evaluation]:
    """δ_remove(ε) = E (W − e^ε)₊ = E W − e^ε + E (e^ε − W)₊, an identity on the truncated lattice (Lemma 10)."""
    shared = series(law, "up", scales, precision)
    window, unit, width = shared.window, shared.unit, shared.width
    mass, mean = law.mass_and_mean("up", extended=shared.method == "extended")

    def call(k: float, width: float) -> tuple[float, dict[str, float]]:
        part = shared.put(k, width)
        margin = part.rounding + unit * float(mean + k * mass)
        return float(mean - k * mass + part.series), {"window": part.far, "fourier tail": part.tail, "rounding": margin}

    for scale in scales:
        strike = scale.strike
        core, parts = call(strike, width)
        nearby = min(1.02, 1 + 0.2 / scale.slope)
        slope = _slope(core, call(strike * nearby, width)[0], nearby, scale.slope)
        # Copies: e^{−θT}(K − low) on {W > high}, whose probability Markov's inequality bounds at a strike in between.
        between = max(strike, window.high - strike / slope)
        beyond = abs(call(between, width)[0]) / (window.high - between)
        copies = beyond * (strike - window.low) / math.expm1(window.tilt * window.period)
        budget = parts | {"lattice exits": law.exit_remove, "grid top": law.cap}
        delta = law.inflation * (core + sum(budget.values()))
        budget |= _estimated(law, width / strike, slope, max(core, 0.0)) | {"periodic copies": copies}
        yield _checked(Evaluation(delta, slope, budget, shared.method))


def add_at(law: Measure, scales: list[Scale], precision: Precision) -> Iterator[Evaluation]:
    """δ_add(ε) = e^ε E (e^{−ε} − W)₊: a put with no parity and so less cancellation."""
    law.mass_and_mean("down")  # the self-check only
    shared = series(law, "down", scales, precision)
    window, width = shared.window, shared.width
    for scale in scales:
        strike = scale.strike
        part = shared.put(strike, width)
        core = float(part.series) / strike
        nearby = 1 - min(0.02, 0.2 / scale.slope)
        slope = _slope(
            core, float(shared.put(strike * nearby, width).series) / (strike * nearby), 1 / nearby, scale.slope
        )
        budget = {"window": part.far / strike, "fourier tail": part.tail / strike, "rounding": part.rounding / strike}
        budget |= {"lattice exits": law.exit_add}
        delta = law.inflation * (core + sum(budget.values()))
        copies = (strike - window.low) / math.expm1(window.tilt * window.period) / strike
        budget |= _estimated(law, width / strike, slope, max(core, 0.0)) | {"periodic copies": copies}
        yield _checked(Evaluation(delta, slope, budget, shared.method))


def _estimated(law: Measure, relative_width: float, slope: float, value: float) -> dict[str, float]:
    """What the inequalities without an explicit term can have added."""
    # ½ ς² times the density of W at the strike, which is slope·(slope + 1)·value/K² where δ falls as K^{−slope}.
    smoothing = 0.5 * relative_width**2 * slope * (slope + 1) * value
    return {
        "smoothing": smoothing,
        "grid rounding": smoothing * _GRID_SHARE,
        "lattice spacing": (law.inflation * law.growth - 1) * value,
        "shared scales": law.scale_gap * value,
    }


def _needs_extended(law: Measure, strike: float, width: float, window: Window, unit: float, allowed: float) -> bool:
    """Whether float64's rounding margin would be too large, and extended precision can help."""
    margin = unit * (float(np.sum(np.abs(weights(strike, width, window)))) * window.total + strike)
    return margin > allowed and AVAILABLE and law.product.flops() * window.count <= EXTENDED_LIMIT


def _slope(core: float, other: float, ratio: float, fallback: float) -> float:
    """−d log δ/dε from two strikes of the same series."""
    return math.log(core / other) / math.log(ratio) if core > other > 0 else fallback


def jensen(chain: Chain, epsilon: float) -> Evaluation:
    """Lemma 6 as an evaluation: no lattice, often already below remove."""
    return Evaluation(jensen_add(*chain.mean_loss, epsilon), math.nan, {}, "jensen")


def governing_budget(remove: Evaluation, add: Evaluation) -> dict[str, float]:
    """What can have been added to the larger direction; to Jensen's bound, what lifts it above δ_remove and no more."""
    if remove.delta >= add.delta:
        return remove.budget
    return remove.budget | {"jensen": add.delta - remove.delta} if add.method == "jensen" else add.budget


_GRID_SHARE = (0.8**2 + 1.2**2) / 6
"""variance of the grid's rounding over the smoothing's: steps of .8 ς/√b and 1.2 ς/K, each squared over 6"""


def _checked(result: Evaluation) -> Evaluation:
    """Fail closed: what is not a positive finite number is not an answer."""
    if not (math.isfinite(result.delta) and result.delta > 0 and np.isfinite(list(result.budget.values())).all()):
        raise AccountingError(f"the evaluation gave δ = {result.delta!r}, which certifies nothing; ask for a larger δ")
    return replace(result, delta=min(result.delta, 1.0))
