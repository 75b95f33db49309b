"""Lemmas 10 to 12 on laws of W that are known exactly."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.integrate import quad

from lambdacgd.accounting.exact import accountant as evaluation
from lambdacgd.accounting.exact.accountant import (
    COARSE,
    FINE,
    FourierSeries,
    Precision,
    Scale,
    Window,
    choose_window,
    coefficients,
    evaluate,
    far_bound,
    frequency_weights,
    loss_law,
    tail_bound,
)
from lambdacgd.accounting.exact.lattice import plain_chain
from lambdacgd.errors import AccountingError

VALUES = np.array([0.05, 0.3, 0.9, 1.0, 1.3, 4.0, 30.0])
CHANCES = np.array([0.001, 0.1, 0.4, 0.3, 0.15, 0.0489, 0.0001])


class Discrete:
    """A W with finitely many values, in place of a LossLaw."""

    def __init__(self, direction: str = "remove") -> None:
        self.direction = direction

    def transform(self, z: Any) -> Any:
        return np.exp(np.outer(z, VALUES)) @ CHANCES


def window_for(strike: float, width: float, value: float, precision: Precision = FINE) -> Window:
    law: Any = Discrete("remove" if strike > 1 else "add")
    return choose_window(law, strike, width, 3.0, value, precision, unit=1e-15)


def bound(strike: float, width: float, window: Window) -> tuple[float, float]:
    """The bound, and what of it the put itself says may be slack."""
    transform = Discrete().transform(1j * window.frequencies - window.tilt)
    value, margins = FourierSeries(window, width, transform, 1e-15).put(strike)
    added = sum(margins.values())
    return float(value) + added, added


def smoothed(strike: float, width: float) -> float:
    """E (K − W − N)₊ in closed form."""
    z = (strike - VALUES) / width
    cdf = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in z])
    return float(CHANCES @ ((strike - VALUES) * cdf + width * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)))


@pytest.mark.parametrize("strike", [0.5, 2.0, 10.0])
@pytest.mark.parametrize("width", [0.02, 0.2])
def test_put_is_bounded_from_above_and_closely(strike: float, width: float) -> None:
    truth = float(CHANCES @ np.maximum(strike - VALUES, 0))
    found, _ = bound(strike, width, window_for(strike, width, 1e-4))
    assert truth <= found
    assert smoothed(strike, width) <= found <= smoothed(strike, width) + 1e-5


@pytest.mark.parametrize("factor", [0.95, 1.0, 1.7])
@pytest.mark.parametrize("tilt", [0.5, 1.0, 3.0])
def test_another_period_or_tilt_is_as_valid(factor: float, tilt: float) -> None:
    strike, width = 2.0, 0.05
    base = window_for(strike, width, 1e-6)
    total = float(Discrete().transform(np.array([-base.tilt * tilt]))[0])
    other = replace(
        base, step=base.step / factor, count=math.ceil(base.count * factor), tilt=base.tilt * tilt, total=total
    )
    assert strike < other.high
    found, added = bound(strike, width, other)
    # Copies of the mass beyond the window, at most e^{−θT}(K − low) each, are all that may be added.
    copies = (strike - other.low) / math.expm1(other.tilt * other.period)
    assert smoothed(strike, width) <= found <= smoothed(strike, width) + copies + 2 * added


def test_coefficients_against_numerical_integration() -> None:
    window = Window(-0.7, 0.9, 40, 0.8, 1.0, np.array([1.0]), np.array([1.0]))
    strike = 2.5
    computed = coefficients(strike, window)
    for m in (0, 1, 7, 40):
        w = window.step * m
        real = quad(lambda x, w=w: math.exp(0.8 * x) * (strike - x) * math.cos(w * x), -0.7, strike, limit=400)[0]
        imag = quad(lambda x, w=w: -math.exp(0.8 * x) * (strike - x) * math.sin(w * x), -0.7, strike, limit=400)[0]
        assert complex(computed[m]) == pytest.approx(complex(real, imag) / window.period, rel=1e-9, abs=1e-12)


def test_coefficients_near_zero_use_the_series() -> None:
    window = Window(-1e-3, 2 * math.pi, 1, 1e-3, 1.0, np.array([1.0]), np.array([1.0]))
    assert float(coefficients(1e-3, window)[0].real) == pytest.approx((2e-3) ** 2 / 2, rel=1e-5)


@pytest.mark.parametrize("last", [3, 10, 30])
def test_tail_bound_exceeds_the_tail(last: int) -> None:
    strike, width = 2.0, 0.3
    window = replace(window_for(strike, width, 1e-3), count=4000)
    terms = np.abs(frequency_weights(strike, width, window)).astype(float) * window.total
    bounded = tail_bound(strike, window.low, window.period, window.tilt, last, width, window.total)
    assert terms[last + 1 :].sum() <= bounded


def test_far_bound_exceeds_what_lies_below_the_window() -> None:
    strike, width, tilts = 2.0, 0.1, np.exp2(np.arange(8.0))
    transforms = Discrete().transform(-tilts)
    for low in (-0.2, 0.1, 0.5, 1.0):
        grid = np.linspace(-2, low, 4001)
        density = np.exp(-((grid[:, None] - VALUES) ** 2) / 2 / width**2) @ CHANCES / width / math.sqrt(2 * math.pi)
        below = float(np.trapezoid((strike - grid) * density, grid))
        assert below <= far_bound(strike, low, width, tilts, transforms) * (1 + 1e-6)
    assert far_bound(strike, 1.9999, width, np.array([1.0]), np.array([1.0])) == math.inf


def test_coarser_precision_needs_fewer_frequencies() -> None:
    assert window_for(2.0, 0.2, 1e-4, COARSE).count < window_for(2.0, 0.2, 1e-4).count


def test_too_many_frequencies_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "MOST_FREQUENCIES", 20)
    with pytest.raises(AccountingError, match="frequencies"):
        window_for(2.0, 1e-3, 1e-4)


@pytest.mark.parametrize("precision", [COARSE, FINE])
def test_a_steep_tail_at_a_low_strike_is_computed(precision: Precision) -> None:
    """Tilts begin at 1/strike: none is small enough to look at what lies above the window."""
    scale = Scale(math.exp(-5.0), 1e-9, 70.0)
    law = loss_law(plain_chain(0.5, 10, 1, 1.0), scale, precision, direction="add")
    assert 0 < evaluate(law, scale, precision).delta < 1e-6
