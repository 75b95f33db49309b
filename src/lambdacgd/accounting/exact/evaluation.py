"""One evaluation of δ in each direction, at given (σ, ε), tuned to a guess of how large and how steep δ is.

**The law of W** is a transform E e^{zW'} and what each approximation can have hidden. For F ≥ 0 convex,
E F(W) ≤ inflation · ( E' F(W') + exit + cap ), where E' runs over the truncated lattice, W' is the sum of rounded
emissions, and the last two terms depend on the direction (Lemmas 2 to 4).

**A put** E (K − W)₊ follows from that transform (Lemmas 10 to 12):

1. Smoothing: W is replaced by W + N(0, ς²); Jensen makes this an upper bound, and it confines the transform.
2. The T-periodic extension q of e^{θw}(K − w)₊ on [low, low + T): e^{−θW} q(W) ≥ (K − W)₊ for every W ≥ low, since the
   copies beyond the window only add, and the tilt makes them small.
3. Below the window: a Chernoff bound with the transform at real arguments.
4. The Fourier series is cut where the smoothing has made it negligible; the rest is bounded by a geometric series.
5. Rounding: a margin proportional to the sum of absolute values of all terms.

**δ_remove** is a call, E W − K plus a put at K = e^ε; **δ_add** is a put at e^{−ε}, times e^ε.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from lambdacgd.accounting.certificate import Array
from lambdacgd.accounting.exact.lattice import (
    AVAILABLE,
    Chain,
    IndependentProduct,
    Rounding,
    TransferProduct,
    extended_transform,
    grid_top,
    lattice,
    lognormal_excess,
    rounding_unit,
    spacing_ratio,
    stretches,
    value_grid,
)
from lambdacgd.accounting.gaussian import jensen_add
from lambdacgd.errors import AccountingError

SLACK_SHARE = 0.05
"""an answer whose inequalities can have added more than this share of δ is refined"""
LARGEST_LOSS_VARIANCE = 500.0
"""Var(X) beyond which e^X comes near the largest float"""


@dataclass(frozen=True)
class Precision:
    """How finely to compute. Each number is a share of δ that an approximation may add; none affects validity."""

    smoothing: float
    """κ: the smoothing's width in units of e^ε over the slope; costs about κ²/2 of δ"""
    lattice: float
    """all Poisson factors together"""
    scales: float
    """bins that share one scale"""
    negligible: float
    """each of: lattice exits, the grid's top, the window's far end, the Fourier tail"""
    wrap: float
    """periodic copies"""
    rounding: float
    """float64's rounding margin; above it extended precision is used"""
    extended: bool = True
    """whether extended precision may be used at all"""
    work: float = 5e11
    """the most real operations spent on one transform (some ten seconds of one core); beyond it is refused"""


FINE = Precision(smoothing=0.14, lattice=3e-4, scales=4e-4, negligible=1e-4, wrap=5e-4, rounding=8e-3)
COARSE = Precision(smoothing=0.4, lattice=1e-2, scales=5e-3, negligible=1e-3, wrap=1e-2, rounding=0.2)


@dataclass(frozen=True)
class Scale:
    """What the set-up is tuned to: where the strike is, and how large and how steep δ is there."""

    strike: float
    delta: float
    slope: float
    """−d log δ / d ε"""

    def width(self, precision: Precision) -> float:
        """ς of the smoothing: κ·K/slope, less where it would carry the bulk of W (near 1) across the strike."""
        unit = self.strike / self.slope
        reach = math.sqrt(2 * math.log(max(self.strike, 1.0) / (precision.negligible * self.delta)))
        return min(precision.smoothing * unit, max(abs(self.strike - 1) / reach, 0.1 * unit))

    def learnt(self, core: float, delta: float, slope: float, *, floor: float = 0.0) -> Scale:
        """What an evaluation says about δ's size (``core`` is it without slack) and steepness, at most tripled."""
        steepness = min(max(slope, self.slope / 3, 0.3), 3 * self.slope)
        return replace(self, delta=min(max(core, delta * 1e-3, floor), 1.0), slope=steepness)

    def settled_since(self, before: Scale) -> bool:
        """Whether the last evaluation changed little."""
        return abs(math.log(self.delta / before.delta)) < 1 and abs(math.log(self.slope / before.slope)) < 0.3


@dataclass(frozen=True)
class LossLaw:
    """The truncated, rounded law of W with its error terms."""

    product: TransferProduct | IndependentProduct
    inflation: float
    growth: float
    """(1 + η)^links: the most by which the lattice can exceed the truth"""
    exit_remove: float
    exit_add: float
    cap: float
    """E Σ (Y_j − top)₊, for remove"""
    scale_gap: float
    """relative share of δ that shared scales can add, estimated from the slope"""

    bins: int

    def transform(self, z: NDArray[Any], rounding: Rounding, *, extended: bool = False) -> NDArray[Any]:
        return extended_transform(self.product, z, rounding) if extended else self.product(z, rounding)

    def mass_and_mean(self, rounding: Rounding, *, extended: bool = False) -> tuple[np.longdouble, np.longdouble]:
        """E' 1 and E' W', by a complex step: the imaginary part carries the derivative exactly."""
        step = 2.0**-330
        value = self.transform(np.array([1j * step]), rounding, extended=extended)[0]
        mass, mean = np.longdouble(value.real), np.longdouble(value.imag) / np.longdouble(step)
        # Lemma 3 in numbers: a self-check that would notice a wrong kernel, a lattice too short or a lost table.
        least = 2 - self.growth - 1e-9
        most = self.growth + 1e-9
        least_mean = least - self.exit_remove - self.cap if rounding == "up" else 0.0
        mass_fits = least - self.exit_add <= mass <= most
        mean_fits = max(least_mean, 0.0) <= mean <= most * (1 + self._largest_gap())
        if not (mass_fits and mean_fits):
            raise AccountingError(
                f"self-check failed: total mass {mass!r}, mean {mean!r}; please report this as an error in lambdacgd"
            )
        return mass, mean

    def _largest_gap(self) -> float:
        plan = getattr(self.product, "plan", [])
        return max((math.expm1(s.up - s.down) for s in plan), default=0.0)


def loss_law(chain: Chain, scale: Scale, precision: Precision, *, direction: Literal["remove", "add"]) -> LossLaw:
    """Set up the law of W for strikes near ``scale.strike``, as finely as ``precision`` asks, for one direction."""
    negligible = precision.negligible * scale.delta
    bins, variance = chain.all_bins, chain.loss_variance
    guard_overflow(variance)
    width = scale.width(precision)
    # Rounding variance: Σ_j (c_j·fine)²/6 from the many small bins, (ratio·W)²/6 at most from the few large ones.
    spread = math.sqrt(chain.repeat * float(np.sum(np.exp(2 * chain.log_scales))))
    fine, ratio = 0.8 * width / spread, min(1.2 * width / scale.strike, 0.25)
    log_mean, deviation = -variance / 2 - math.log(bins), math.sqrt(variance)
    top = grid_top(log_mean, deviation, negligible / bins)
    if direction == "add":
        # A put asks no more of W than whether it exceeds the strike: cutting off there is free (Lemma 4).
        top = min(top, scale.strike + 12 * width)
    top = max(top, 4 * fine)
    grid = value_grid(fine, ratio, top)
    cap = bins * float(lognormal_excess(log_mean, deviation, float(grid[-1])))
    if chain.lam == 0:
        return LossLaw(IndependentProduct(bins, chain.gain, grid), 1.0, 1.0, 0.0, 0.0, cap, 0.0, bins)
    reach = max(4.0, -float(ndtri(min(negligible / (4 * bins), 0.1))))
    ratio_tau = spacing_ratio(chain.bins, precision.lattice)
    path = lattice(chain, ratio_tau, reach, shifted=direction == "remove")
    plan = stretches(chain.log_scales, precision.scales * bins / (1 + scale.slope))
    gap = sum(s.count * (s.up - s.down) for s in plan) / bins * (1 + scale.slope)
    product = TransferProduct(chain, path, grid, plan)
    if path.eta * path.links >= 0.5:
        raise AccountingError(
            "the lattice is too coarse to certify anything; please report this as an error in lambdacgd"
        )
    growth = (1 + path.eta) ** path.links
    stretched = max((math.exp(s.up - s.down) for s in plan), default=1.0)
    return LossLaw(
        product,
        (1 - path.eta) ** (-path.links),
        growth,
        path.exit_remove,
        path.exit_add,
        cap * growth * stretched,
        gap,
        bins,
    )


def guard_overflow(variance: float) -> None:
    if not variance <= LARGEST_LOSS_VARIANCE:
        raise AccountingError(
            f"the privacy loss has variance {variance:.3g}, beyond {LARGEST_LOSS_VARIANCE:g}: σ is too small; "
            f"multiply it by at least {math.sqrt(variance / LARGEST_LOSS_VARIANCE):.3g}"
        )


# A put from the transform

Wide = np.longdouble

EXTENDED_GAIN = 5e-4
"""how much smaller the rounding margin is in extended precision (its unit is 2048 times smaller)"""
TWO_PI = np.longdouble("6.283185307179586476925286766559005768")
MOST_FREQUENCIES = 20_000
NARROW = 60.0
"""−d log δ/dε from which W counts as narrow"""
NARROW_GAPS = np.array([3.0, 5.0, 8.0, 12.0, 20.0, 40.0, 80.0])
"""widths, in units of the strike over that slope, of the part of a window that lies above it"""
GAPS = np.array([0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0])
"""the same in units of the strike"""


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
    beyond: float = 1.0
    """about E' e^{−θW'} of W' above the window, over e^{−θ·high}: at most 1; only to choose and to tell slack"""

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
class PutBound:
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


def frequency_weights(strike: float, width: float, window: Window) -> NDArray[Any]:
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
    law: LossLaw,
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
    narrow = slope > NARROW
    # Where W hardly varies, little of it lies beyond a window of a few widths of its law, also where all of it lies
    # above the strike: an estimate by Chernoff's bound.
    rising, above = np.zeros(0), np.zeros(0)
    for largest in (100.0, 400.0) if narrow and not decreasing_beyond else ():
        with contextlib.suppress(AccountingError), np.errstate(over="ignore"):  # e^{θW} may overflow
            above = np.log(np.asarray(law.transform(tilts[tilts < largest], rounding)))
            rising = tilts[tilts < largest]
    best: tuple[float, float, float, float] | None = None
    # Where W hardly varies (a large slope) a window of a few widths of its law is enough.
    for gap in np.concatenate([NARROW_GAPS / slope, GAPS]) if narrow else GAPS:
        period = depth + gap * strike
        if decreasing_beyond:
            copies = math.log(slope * depth / strike) - slope * math.log1p(gap)
        else:
            copies = math.log(depth / value)
        beyond = float(np.min(above - rising * (low + period), initial=0.0))
        copies += beyond
        need = max(copies - math.log(precision.wrap), 0.0) / period
        tilt = max(need, 1.0 / strike)
        # Cost: frequencies ∝ period; rounding ∝ e^{θK}/θ, which is to stay below its limit.
        noise = unit * strike * math.exp(min(tilt * strike, 500.0)) / (tilt * strike) / value
        cost = period / depth * (1.0 if noise < 0.5 * precision.rounding else 1e3 * noise)
        if best is None or cost < best[0]:
            best = (cost, period, tilt, beyond)
    assert best is not None
    _, period, tilt, beyond = best
    total = float(law.transform(np.array([-tilt]), rounding)[0])
    if not total > 1e-250:
        raise AccountingError(
            f"E e^(−θW) = {total:g} underflows at strike {strike:.3g}: ε is too large for this direction"
        )

    def few_enough(count: int) -> bool:
        return tail_bound(strike, low, period, tilt, count, width, total) <= allowed

    most = 2
    while not few_enough(most):
        most *= 2
        if most > 2 * MOST_FREQUENCIES:
            raise AccountingError(f"more than {MOST_FREQUENCIES} frequencies would be needed; ask for a larger ε or δ")
    within = range(most // 2 + 1, most)
    count = within[0] + bisect_left(within, True, key=few_enough) if within else most
    return Window(low, float(np.float32(2 * math.pi / period)), count, tilt, total, tilts, transforms, math.exp(beyond))


def put_bound(strike: float, width: float, window: Window, transform: NDArray[Any], unit: float) -> PutBound:
    """The bound itself, from the transform E' e^{(iω−θ)W'} at the window's frequencies."""
    factors = frequency_weights(strike, width, window)
    value = (factors * transform).real.sum()
    far = far_bound(strike, window.low, width, window.far_tilts, window.far_transforms)
    tail = tail_bound(strike, window.low, window.period, window.tilt, window.count, width, window.total)
    rounding = (unit + phase_unit(window, strike)) * float(np.sum(np.abs(factors))) * window.total
    return PutBound(value, far, tail, rounding)


# δ in each direction

EXTENDED_LIMIT = 3e10
"""the most real operations spent in extended precision on one evaluation (half a minute)"""


@dataclass(frozen=True)
class Evaluation:
    """An upper bound on δ in one direction, with what it was tuned to and what each step can have added (absolute)."""

    delta: float
    slope: float
    budget: dict[str, float] = field(default_factory=dict)
    method: str = "fourier"
    work: float = 0.0
    """real operations spent, together with the other strikes of its panel"""

    @property
    def added(self) -> float:
        """The most that all inequalities together can have added to δ."""
        return sum(self.budget.values())

    @property
    def core(self) -> float:
        """An estimate of δ without its slack (not a bound)."""
        return max(self.delta - self.added, 0.0)


@dataclass(frozen=True)
class FourierSeries:
    """Transforms of one law at one window's frequencies: enough for every strike inside the window."""

    law: LossLaw
    window: Window
    transform: NDArray[Any]
    unit: float
    precision: Precision
    method: str
    work: float
    width: float
    """of the smoothing, one for all strikes: a wider one at the higher strikes would reach below the window"""

    def put(self, strike: float, width: float) -> PutBound:
        return put_bound(strike, width, self.window, self.transform, self.unit)


def fourier_series(law: LossLaw, rounding: Rounding, scales: list[Scale], precision: Precision) -> FourierSeries:
    """Set up for all of ``scales``: the highest strike, the narrowest smoothing and the smallest value decide."""
    strike, width = max(s.strike for s in scales), min(s.width(precision) for s in scales)
    value = min(s.delta * (s.strike if rounding == "down" else 1.0) for s in scales)
    slope = min(s.slope for s in scales)
    unit, upper_tail = rounding_unit(law.bins), rounding == "up"
    window = choose_window(
        law, rounding, strike, width, slope, value, precision, unit=unit, decreasing_beyond=upper_tail
    )
    work = law.product.flops() * window.count
    if work > precision.work:
        raise AccountingError(
            f"{window.count} frequencies of {law.product.flops():.2g} operations each are beyond {precision.work:.1g}; "
            "use a smaller λ, a larger ε or δ, or the Monte Carlo accountant"
        )
    extended = precision.extended and _needs_extended(law, strike, width, window, unit, precision.rounding * value)
    transform = law.transform(1j * window.frequencies - window.tilt, rounding, extended=extended)
    unit *= EXTENDED_GAIN if extended else 1.0
    return FourierSeries(law, window, transform, unit, precision, "extended" if extended else "fourier", work, width)


def evaluate_remove(law: LossLaw, scale: Scale, precision: Precision) -> Evaluation:
    """δ_remove at one strike; ``scale`` says where and what to expect."""
    return next(remove_at(law, [scale], precision))


def evaluate_add(law: LossLaw, scale: Scale, precision: Precision) -> Evaluation:
    """δ_add at one strike; ``scale`` says where and what to expect."""
    return next(add_at(law, [scale], precision))


def remove_at(law: LossLaw, scales: list[Scale], precision: Precision) -> Iterator[Evaluation]:
    """δ_remove(ε) = E (W − e^ε)₊ = E W − e^ε + E (e^ε − W)₊, an identity on the truncated lattice (Lemma 10)."""
    shared = fourier_series(law, "up", scales, precision)
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
        yield _checked(Evaluation(delta, slope, budget, shared.method, shared.work))


def add_at(law: LossLaw, scales: list[Scale], precision: Precision) -> Iterator[Evaluation]:
    """δ_add(ε) = e^ε E (e^{−ε} − W)₊: a put with no parity and so less cancellation."""
    law.mass_and_mean("down")  # the self-check only
    shared = fourier_series(law, "down", scales, precision)
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
        copies = window.beyond * (strike - window.low) / math.expm1(window.tilt * window.period) / strike
        budget |= _estimated(law, width / strike, slope, max(core, 0.0)) | {"periodic copies": copies}
        yield _checked(Evaluation(delta, slope, budget, shared.method, shared.work))


def _estimated(law: LossLaw, relative_width: float, slope: float, value: float) -> dict[str, float]:
    """What the inequalities without an explicit term can have added."""
    # ½ ς² times the density of W at the strike, which is slope·(slope + 1)·value/K² where δ falls as K^{−slope}.
    smoothing = 0.5 * relative_width**2 * slope * (slope + 1) * value
    return {
        "smoothing": smoothing,
        "grid rounding": smoothing * _GRID_SHARE,
        "lattice spacing": (law.inflation * law.growth - 1) * value,
        "shared scales": law.scale_gap * value,
    }


def _needs_extended(law: LossLaw, strike: float, width: float, window: Window, unit: float, allowed: float) -> bool:
    """Whether float64's rounding margin would be too large, and extended precision can help."""
    margin = unit * (float(np.sum(np.abs(frequency_weights(strike, width, window)))) * window.total + strike)
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
