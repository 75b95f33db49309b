"""E (K − W)₊ from the transform of W: smoothing, a tilted Fourier series, and what it leaves out (Lemmas 10 to 12).

1. Smoothing: W is replaced by W + N(0, ς²); Jensen makes this an upper bound, and it confines the transform.
2. The T-periodic extension q of e^{θw}(K − w)₊ on [low, low + T): e^{−θW} q(W) ≥ (K − W)₊ for every W ≥ low, since the
   copies beyond the window only add, and the tilt makes them small.
3. Below the window: a Chernoff bound with the transform at real arguments.
4. The Fourier series is cut where the smoothing has made it negligible; the rest is bounded by a geometric series.
5. Rounding: a margin proportional to the sum of absolute values of all terms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lambdacgd.accounting.base import AccountingError
from lambdacgd.accounting.transfer_matrix.extended import AVAILABLE
from lambdacgd.accounting.transfer_matrix.measure import Measure, Precision
from lambdacgd.accounting.transfer_matrix.product import Rounding
from lambdacgd.mechanisms.base import Array

Wide = np.longdouble

EXTENDED_GAIN = 5e-4
"""how much smaller the rounding margin is in extended precision (its unit is 2048 times smaller)"""
TWO_PI = np.longdouble("6.283185307179586476925286766559005768")
MOST_FREQUENCIES = 20_000


@dataclass(frozen=True)
class Window:
    """The Fourier series' period, tilt and frequencies."""

    low: float
    step: float
    """distance of the frequencies: 24 bits, so that all multiples are exact and belong to one exact period"""
    count: int
    tilt: float
    total: float
    """E' e^{−θW'}, which bounds every |transform|"""
    far_tilts: Array
    far_transforms: Array

    @property
    def period(self) -> float:
        return 2 * math.pi / self.step

    @property
    def high(self) -> float:
        return self.low + self.period

    @property
    def frequencies(self) -> Array:
        return np.asarray(self.step * np.arange(self.count + 1), dtype=np.float64)


@dataclass(frozen=True)
class Put:
    """E' (K − W' − N)₊ ≤ series + far + tail + rounding."""

    series: np.longdouble
    far: float
    tail: float
    rounding: float

    @property
    def added(self) -> float:
        return self.far + self.tail + self.rounding


def phase_unit(window: Window, strike: float) -> float:
    """Rounding of the coefficients' phases ω·K: covered by the margin where there is no extended precision."""
    return 0.0 if AVAILABLE else 4e-16 * (1 + float(window.frequencies[-1]) * strike)


def coefficients(strike: float, window: Window) -> NDArray[Any]:
    """Fourier coefficients of q: (1/T) ∫_low^K e^{θw}(K − w) e^{−iωw} dw, in extended precision where there is one."""
    s = Wide(window.tilt) - 1j * window.frequencies.astype(Wide)
    depth = Wide(strike) - Wide(window.low)
    x = s * depth
    small = np.abs(x) < 2e-2
    series = sum((-1) ** n * (n + 1) / Wide(math.factorial(n + 2)) * x**n for n in range(9))
    safe = np.where(small, Wide(1), x)
    body = np.where(small, series, (1 - np.exp(-safe) * (1 + safe)) / safe**2)
    period = TWO_PI / Wide(window.step)
    return np.asarray(np.exp(s * Wide(strike)) * body * depth**2 / period)


def weights(strike: float, width: float, window: Window) -> NDArray[Any]:
    """What multiplies the transform at each frequency: coefficients, smoothing, and 2 for the frequency −ω."""
    z = 1j * window.frequencies.astype(Wide) - Wide(window.tilt)
    values = coefficients(strike, window) * np.exp((z * Wide(width)) ** 2 / 2)
    values[1:] *= 2
    return np.asarray(values)


def series_bound(strike: float, window_low: float, period: float, tilt: float, omega: float) -> float:
    """An upper bound on |coefficient| at frequencies from ``omega`` on (it decreases)."""
    depth = strike - window_low
    size = math.hypot(tilt, omega)
    return math.exp(tilt * strike) * (1 + math.exp(-tilt * depth) * (1 + size * depth)) / size**2 / period


def tail_bound(strike: float, low: float, period: float, tilt: float, last: int, width: float, total: float) -> float:
    """Lemma 12: the Fourier terms beyond number ``last``, at most a geometric series, with |transform| ≤ ``total``."""
    step = 2 * math.pi / period
    omega = (last + 1) * step
    decay = math.exp(-omega * step * width**2)
    if decay >= 1:
        return math.inf
    gauss = math.exp(min((tilt**2 - omega**2) * width**2 / 2, 700.0))
    return 2 * series_bound(strike, low, period, tilt, omega) * gauss / (1 - decay) * total


def far_bound(strike: float, low: float, width: float, tilts: Array, transforms: Array) -> float:
    """Lemma 11: E (K − W'')₊ below the window ≤ (K − low) e^{θ'·low} E e^{−θ'W''}, the best θ' ≥ 1/(K − low)."""
    allowed = tilts * (strike - low) >= 1
    if not np.any(allowed):
        return math.inf
    t = tilts[allowed]
    exponents = np.minimum(t * low + (t * width) ** 2 / 2, 700.0) + np.log(np.maximum(transforms[allowed], 1e-300))
    return (strike - low) * math.exp(min(float(np.min(exponents)), 700.0))


def choose_window(
    law: Measure,
    rounding: Rounding,
    strike: float,
    width: float,
    slope: float,
    value: float,
    precision: Precision,
    *,
    unit: float,
    decreasing_beyond: bool,
) -> Window:
    """Find a window whose omissions are negligible beside ``value``, with as few frequencies as possible.

    ``decreasing_beyond``: whether P(W > w) falls as w^{−slope} above the strike (remove: the strike lies in the upper
    tail); otherwise all of the mass lies above the strike and only the tilt keeps its copies small.
    """
    allowed = precision.negligible * value
    tilts = np.exp2(np.arange(0, 12)) / strike
    tilts = tilts[tilts * width < 12]
    transforms = np.asarray(law.transform(-tilts, rounding))
    logs = np.log(np.maximum(transforms, 1e-300))
    ends = (math.log(allowed / (2 * strike)) - logs - (tilts * width) ** 2 / 2) / tilts
    low = min(float(np.max(ends)), strike - 1.5 * width)
    while far_bound(strike, low, width, tilts, transforms) > allowed:
        low -= 0.5 * width
    depth = strike - low
    best: tuple[float, float, float] | None = None
    for gap in np.array([0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0]):
        period = depth + gap * strike
        if decreasing_beyond:
            copies = math.log(slope * depth / strike) - slope * math.log1p(gap)
        else:
            copies = math.log(depth / value)
        need = max(copies - math.log(precision.wrap), 0.0) / period
        tilt = max(need, 1.0 / strike)
        # Cost: frequencies ∝ period; rounding ∝ e^{θK}/θ, which is to stay below its limit.
        noise = unit * strike * math.exp(min(tilt * strike, 500.0)) / (tilt * strike) / value
        cost = period / depth * (1.0 if noise < 0.5 * precision.rounding else 1e3 * noise)
        if best is None or cost < best[0]:
            best = (cost, period, tilt)
    assert best is not None
    _, period, tilt = best
    total = float(law.transform(np.array([-tilt]), rounding)[0])
    if not total > 1e-250:
        raise AccountingError(
            f"E e^(−θW) = {total:g} underflows at strike {strike:.3g}: ε is too large for this direction"
        )
    low_m, high_m = 1, 2
    while tail_bound(strike, low, period, tilt, high_m, width, total) > allowed:
        low_m, high_m = high_m, 2 * high_m
        if high_m > 2 * MOST_FREQUENCIES:
            raise AccountingError(f"more than {MOST_FREQUENCIES} frequencies would be needed; ask for a larger ε or δ")
    while high_m - low_m > 1:
        middle = (low_m + high_m) // 2
        if tail_bound(strike, low, period, tilt, middle, width, total) > allowed:
            low_m = middle
        else:
            high_m = middle
    return Window(low, float(np.float32(2 * math.pi / period)), high_m, tilt, total, tilts, transforms)


def put(strike: float, width: float, window: Window, transform: NDArray[Any], unit: float) -> Put:
    """The bound itself, from the transform E' e^{(iω−θ)W'} at the window's frequencies."""
    factors = weights(strike, width, window)
    value = (factors * transform).real.sum()
    far = far_bound(strike, window.low, width, window.far_tilts, window.far_transforms)
    tail = tail_bound(strike, window.low, window.period, window.tilt, window.count, width, window.total)
    rounding = (unit + phase_unit(window, strike)) * float(np.sum(np.abs(factors))) * window.total
    return Put(value, far, tail, rounding)
