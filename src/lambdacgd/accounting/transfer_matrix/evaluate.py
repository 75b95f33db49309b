"""One evaluation of δ in each direction, at given (σ, ε), tuned to a guess of how large and how steep δ is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from lambdacgd.accounting.base import AccountingError
from lambdacgd.accounting.transfer_matrix.chain import Chain, jensen_add
from lambdacgd.accounting.transfer_matrix.extended import AVAILABLE
from lambdacgd.accounting.transfer_matrix.measure import Measure, Precision, Scale
from lambdacgd.accounting.transfer_matrix.put import EXTENDED_GAIN, Window, choose_window, put, rounding_unit, weights

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


def evaluate_remove(law: Measure, epsilon: float, scale: Scale, precision: Precision) -> Evaluation:
    """δ_remove(ε) = E (W − e^ε)₊ = E W − e^ε + E (e^ε − W)₊, an identity on the truncated lattice (Lemma 10)."""
    strike = math.exp(epsilon)
    width = scale.width(precision)
    unit = rounding_unit(law.bins)
    window = choose_window(
        law, "up", strike, width, scale.slope, scale.delta, precision, unit=unit, decreasing_beyond=True
    )
    extended = _needs_extended(law, strike, width, window, unit, precision.rounding * scale.delta)
    unit *= EXTENDED_GAIN if extended else 1.0
    mass, mean = law.mass_and_mean("up", extended=extended)
    transform = law.transform(1j * window.frequencies - window.tilt, "up", extended=extended)

    def call(k: float) -> tuple[float, dict[str, float]]:
        part = put(k, width, window, transform, unit)
        margin = part.rounding + unit * float(mean + k * mass)
        return float(mean - k * mass + part.series), {"window": part.far, "fourier tail": part.tail, "rounding": margin}

    core, parts = call(strike)
    nearby = min(1.02, 1 + 0.2 / scale.slope)
    slope = _slope(core, call(strike * nearby)[0], nearby, scale.slope)
    smoothing = _smoothing_cost(width / strike, slope, max(core, 0.0))
    # Copies: e^{−θT}(K − low) on {W > high}, whose probability Markov's inequality bounds at a strike in between.
    between = max(strike, window.high - strike / slope)
    beyond = abs(call(between)[0]) / (window.high - between)
    copies = beyond * (strike - window.low) / math.expm1(window.tilt * window.period)
    budget = parts | {"lattice exits": law.exit_remove, "grid top": law.cap}
    delta = law.inflation * (core + sum(budget.values()))
    budget |= {
        "smoothing": smoothing,
        "grid rounding": smoothing * _GRID_SHARE,
        "periodic copies": copies,
        "lattice spacing": (law.inflation * law.growth - 1) * max(core, 0.0),
        "shared scales": law.scale_gap * max(core, 0.0),
    }
    return _checked(Evaluation(delta, slope, budget, "extended" if extended else "fourier"))


def evaluate_add(law: Measure, epsilon: float, scale: Scale, precision: Precision) -> Evaluation:
    """δ_add(ε) = e^ε E (e^{−ε} − W)₊: a put with no parity and so less cancellation."""
    strike = math.exp(-epsilon)
    width = scale.width(precision)
    unit = rounding_unit(law.bins)
    value = scale.delta * strike
    window = choose_window(
        law, "down", strike, width, scale.slope, value, precision, unit=unit, decreasing_beyond=False
    )
    extended = _needs_extended(law, strike, width, window, unit, precision.rounding * value)
    unit *= EXTENDED_GAIN if extended else 1.0
    law.mass_and_mean("down")  # the self-check only
    transform = law.transform(1j * window.frequencies - window.tilt, "down", extended=extended)
    part = put(strike, width, window, transform, unit)
    core = float(part.series)
    nearby = 1 - min(0.02, 0.2 / scale.slope)
    other = float(put(strike * nearby, width, window, transform, unit).series) / nearby
    slope = _slope(core, other, 1 / nearby, scale.slope)
    smoothing = _smoothing_cost(width / strike, slope, max(core, 0.0))
    delta = law.inflation * ((core + part.added) / strike + law.exit_add)
    budget = {
        "window": part.far / strike,
        "fourier tail": part.tail / strike,
        "rounding": part.rounding / strike,
        "lattice exits": law.exit_add,
        "smoothing": smoothing / strike,
        "grid rounding": smoothing / strike * _GRID_SHARE,
        "periodic copies": (strike - window.low) / math.expm1(window.tilt * window.period) / strike,
        "lattice spacing": (law.inflation * law.growth - 1) * max(core, 0.0) / strike,
        "shared scales": law.scale_gap * max(core, 0.0) / strike,
    }
    return _checked(Evaluation(delta, slope, budget, "extended" if extended else "fourier"))


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


_GRID_SHARE = (0.8**2 + 1.2**2) / 6
"""variance of the grid's rounding over the smoothing's: steps of .8 ς/√b and 1.2 ς/K, each squared over 6"""


def _smoothing_cost(relative_width: float, slope: float, value: float) -> float:
    """½ ς² times the density of W at the strike, which is slope·(slope + 1)·value/K² where δ falls as K^{−slope}."""
    return 0.5 * relative_width**2 * slope * (slope + 1) * value


def _checked(result: Evaluation) -> Evaluation:
    """Fail closed: what is not a positive finite number is not an answer."""
    if not (math.isfinite(result.delta) and result.delta > 0 and np.isfinite(list(result.budget.values())).all()):
        raise AccountingError(f"the evaluation gave δ = {result.delta!r}, which certifies nothing; ask for a larger δ")
    return replace(result, delta=min(result.delta, 1.0))
