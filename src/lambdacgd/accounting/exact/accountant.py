"""The transfer-matrix accountant: δ(σ, ε), ε(σ, δ) and σ(ε, δ) of DP-λCGD under Balls-in-Bins, computed.

One evaluation of δ in each direction, at given (σ, ε), tuned to a guess of how large and how steep δ is.

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
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter
from scipy.special import ndtri

from lambdacgd.accounting.certificate import SMALLEST_EPSILON, Array, Bound, OneWay, real, tell
from lambdacgd.accounting.exact.lattice import (
    AVAILABLE,
    REPORT,
    TOO_LARGE,
    Chain,
    Columns,
    TransferProduct,
    grid_top,
    lattice,
    lognormal_excess,
    normalized_chain,
    plain_chain,
    power_cost,
    rounding_unit,
    spacing_ratio,
    stretches,
    value_grid,
)
from lambdacgd.accounting.exact.plane import Plane, PlaneProduct, plane
from lambdacgd.accounting.gaussian import jensen_add, one_bin_delta
from lambdacgd.accounting.root import Secant, find_root, log_ratio, rounded_up, smallest, smallest_certified
from lambdacgd.errors import AccountingError

SLACK_SHARE = 0.05  #: an answer whose inequalities can have added more than this share of δ is refined
LARGEST_LOSS_VARIANCE = 500.0  #: Var(X) beyond which e^X comes near the largest float


@dataclass(frozen=True)
class Precision:
    """How finely to compute. Each number is a share of δ that an approximation may add; none affects validity."""

    smoothing: float  #: κ: the smoothing's width in units of e^ε over the slope; costs about κ²/2 of δ
    lattice: float  #: all Poisson factors together
    scales: float  #: bins that share one scale
    negligible: float  #: each of: lattice exits, the grid's top, the window's far end, the Fourier tail
    wrap: float  #: periodic copies
    rounding: float  #: float64's rounding margin; above it extended precision is used
    extended: bool = True  #: whether extended precision may be used at all
    work: float = 5e11  #: the most real operations on one transform (some ten seconds of one core)


FINE = Precision(smoothing=0.14, lattice=3e-4, scales=4e-4, negligible=1e-4, wrap=5e-4, rounding=8e-3)
COARSE = Precision(smoothing=0.4, lattice=1e-2, scales=5e-3, negligible=1e-3, wrap=1e-2, rounding=0.2)


@dataclass(frozen=True)
class Scale:
    """What the set-up is tuned to: where the strike is, and how large and how steep δ is there."""

    strike: float
    delta: float
    slope: float  #: −d log δ / d ε

    def width(self, precision: Precision) -> float:
        """ς of the smoothing: κ·K/slope, less where it would carry the bulk of W (near 1) across the strike."""
        unit = self.strike / self.slope
        reach = math.sqrt(2 * math.log(max(self.strike, 1.0) / (precision.negligible * self.delta)))
        return min(precision.smoothing * unit, max(abs(self.strike - 1) / reach, 0.1 * unit))

    def learnt(self, core: float, delta: float, slope: float, *, floor: float = 0.0) -> Scale:
        """What an evaluation says about δ's size (``core`` is it without slack) and steepness, at most tripled."""
        steepness = min(max(slope, self.slope / 3, 0.3), 3 * self.slope)
        return replace(self, delta=min(max(core, delta * 1e-3, floor), 1.0), slope=steepness)


@dataclass(frozen=True)
class LossLaw:
    """The truncated, rounded law of W for one direction, with its error terms."""

    product: TransferProduct
    direction: OneWay
    cap: float  #: E Σ (Y_j − top)₊, for remove
    scale_gap: float  #: relative share of δ that shared scales can add, estimated from the slope
    stretched: float  #: the most by which a shared scale exceeds a bin's own

    def transform(self, z: NDArray[Any], *, extended: bool = False) -> NDArray[Any]:
        """E' e^{zW'}, shared scales rounded as the direction allows."""
        return self.product(z, self.direction, extended=extended)

    def mass_and_mean(self, *, extended: bool = False) -> tuple[np.longdouble, np.longdouble]:
        """E' 1 and E' W', by a complex step: the imaginary part carries the derivative exactly."""
        step = 2.0**-330
        value = self.transform(np.array([1j * step]), extended=extended)[0]
        mass, mean = np.longdouble(value.real), np.longdouble(value.imag) / np.longdouble(step)
        # Lemma 3 in numbers: a self-check that would notice a wrong kernel, a lattice too short or a lost table.
        path = self.product.lattice
        least, most = 2 - path.growth - 1e-9, path.growth + 1e-9
        least_mean = least - path.exit_remove - self.cap if self.direction == "remove" else 0.0
        mass_fits = least - path.exit_add <= mass <= most
        mean_fits = max(least_mean, 0.0) <= mean <= most * self.stretched
        if not (mass_fits and mean_fits):
            raise AccountingError(f"self-check failed: total mass {mass!r}, mean {mean!r}; {REPORT}")
        return mass, mean


def loss_law(chain: Chain, scale: Scale, precision: Precision, *, direction: OneWay) -> LossLaw:
    """Set up the law of W for strikes near ``scale.strike``, as finely as ``precision`` asks, for one direction."""
    negligible = precision.negligible * scale.delta
    bins, variance = chain.all_bins, chain.loss_variance
    if not variance <= LARGEST_LOSS_VARIANCE:
        factor = math.sqrt(variance / LARGEST_LOSS_VARIANCE)
        raise AccountingError(f"the privacy loss has variance {variance:.3g}: multiply σ by at least {factor:.3g}")
    width = scale.width(precision)
    # Rounding variance: Σ_j (c_j·fine)²/6 from the many small bins, (ratio·W)²/6 at most from the few large ones.
    spread = math.sqrt(chain.repeat * float(np.sum(np.exp(2 * chain.log_scales))))
    fine, ratio = 0.8 * width / spread, min(1.2 * width / scale.strike, 0.25)
    log_mean, deviation = -variance / 2 - math.log(bins), math.sqrt(variance)
    top = grid_top(log_mean, deviation, negligible / bins)
    if direction == "add":
        # A put asks no more of W than whether it exceeds the strike: cutting off there is free (Lemma 4).
        top = min(top, scale.strike + 12 * width)
    grid = value_grid(fine, ratio, max(top, 4 * fine))
    reach = max(4.0, -float(ndtri(min(negligible / (4 * bins), 0.1))))
    ratio, shifted = spacing_ratio(chain.bins, precision.lattice), direction == "remove"
    path = (plane if chain.second else lattice)(chain, ratio, reach, shifted=shifted)
    if path.eta * path.links >= 0.5:
        raise AccountingError(f"the lattice is too coarse to certify anything; {REPORT}")
    plan = stretches(chain, precision.scales * bins / (1 + scale.slope))
    gap = sum(s.count * (s.up - s.down) for s in plan) / bins * (1 + scale.slope)
    stretched = max((math.exp(s.up - s.down) for s in plan), default=1.0)
    cap = bins * float(lognormal_excess(log_mean, deviation, float(grid[-1]))) * path.growth * stretched
    product = (
        PlaneProduct(chain, path, grid, plan) if isinstance(path, Plane) else TransferProduct(chain, path, grid, plan)
    )
    return LossLaw(product, direction, cap, gap, stretched)


# A put from the transform

Wide = np.longdouble

EXTENDED_GAIN = 5e-4  #: how much smaller the rounding margin is in extended precision (its unit is 2048 times smaller)
TWO_PI = np.longdouble("6.283185307179586476925286766559005768")
MOST_FREQUENCIES = 20_000
NARROW = 60.0  #: −d log δ/dε from which W counts as narrow
#: widths, in units of the strike over that slope, of the part of a window that lies above it
NARROW_GAPS = np.array([3.0, 5.0, 8.0, 12.0, 20.0, 40.0, 80.0])
GAPS = np.array([0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0])  #: the same in units of the strike


@dataclass(frozen=True)
class Window:
    """The Fourier series' period, tilt and frequencies."""

    low: float
    step: float  #: distance of the frequencies: 24 bits, so that all multiples are exact and belong to one exact period
    count: int
    tilt: float
    total: float  #: E' e^{−θW'}, which bounds every |transform|
    far_tilts: Array
    far_transforms: Array
    beyond: float = 1.0  #: about E' e^{−θW'} of W' above the window, over e^{−θ·high}: only to choose and to tell slack

    @property
    def period(self) -> float:
        return 2 * math.pi / self.step

    @property
    def high(self) -> float:
        return self.low + self.period

    @property
    def frequencies(self) -> Array:
        return np.asarray(self.step * np.arange(self.count + 1), dtype=np.float64)


def coefficients(strike: float, window: Window) -> NDArray[Any]:
    """Fourier coefficients of q: (1/T) ∫_low^K e^{θw}(K − w) e^{−iωw} dw, in extended precision where there is one."""
    s = Wide(window.tilt) - 1j * window.frequencies.astype(Wide)
    depth = Wide(strike) - Wide(window.low)
    x = s * depth
    small = np.abs(x) < 2e-2
    safe = np.where(small, Wide(1), x)
    body = (1 - np.exp(-safe) * (1 + safe)) / safe**2
    body[small] = sum((-1) ** n * (n + 1) / Wide(math.factorial(n + 2)) * x[small] ** n for n in range(9))
    period = TWO_PI / Wide(window.step)
    return np.asarray(np.exp(s * Wide(strike)) * body * depth**2 / period)


def frequency_weights(strike: float, width: float, window: Window) -> NDArray[Any]:
    """What multiplies the transform at each frequency: coefficients, smoothing, and 2 for the frequency −ω."""
    z = 1j * window.frequencies.astype(Wide) - Wide(window.tilt)
    values = coefficients(strike, window) * np.exp((z * Wide(width)) ** 2 / 2)
    values[1:] *= 2
    return np.asarray(values)


def tail_bound(strike: float, low: float, period: float, tilt: float, last: int, width: float, total: float) -> float:
    """Lemma 12: the Fourier terms beyond number ``last``, at most a geometric series, with |transform| ≤ ``total``."""
    step = 2 * math.pi / period
    omega = (last + 1) * step
    decay = math.exp(-omega * step * width**2)
    if decay >= 1:
        return math.inf
    gauss = math.exp(min((tilt**2 - omega**2) * width**2 / 2, 700.0))
    # |coefficient| at frequencies from omega on is at most this: it decreases.
    depth, size = strike - low, math.hypot(tilt, omega)
    largest = math.exp(tilt * strike) * (1 + math.exp(-tilt * depth) * (1 + size * depth)) / size**2 / period
    return 2 * largest * gauss / (1 - decay) * total


def far_bound(strike: float, low: float, width: float, tilts: Array, transforms: Array) -> float:
    """Lemma 11: E (K − W'')₊ below the window ≤ (K − low) e^{θ'·low} E e^{−θ'W''}, the best θ' ≥ 1/(K − low)."""
    allowed = tilts * (strike - low) >= 1
    if not np.any(allowed):
        return math.inf
    t = tilts[allowed]
    exponents = np.minimum(t * low + (t * width) ** 2 / 2, 700.0) + np.log(np.maximum(transforms[allowed], 1e-300))
    return (strike - low) * math.exp(min(float(np.min(exponents)), 700.0))


def choose_window(
    law: LossLaw, strike: float, width: float, slope: float, value: float, precision: Precision, *, unit: float
) -> Window:
    """Find a window whose omissions are negligible beside ``value``, with as few frequencies as possible.

    For remove the strike lies in the upper tail: P(W > w) falls as w^{−slope} above it. For add all of the mass lies
    above the strike and only the tilt keeps its copies small.
    """
    decreasing_beyond = law.direction == "remove"
    allowed = precision.negligible * value
    tilts = np.exp2(np.arange(0, 12)) / strike
    tilts = tilts[tilts * width < 12]
    transforms = np.asarray(law.transform(-tilts))
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
    for largest in (100.0, 400.0) if narrow and not decreasing_beyond and tilts[0] < 100 else ():
        with contextlib.suppress(AccountingError), np.errstate(over="ignore"):  # e^{θW} may overflow
            above = np.log(np.asarray(law.transform(tilts[tilts < largest])))
            rising = tilts[tilts < largest]
    rated: list[tuple[float, float, float, float]] = []
    # Where W hardly varies (a large slope) a window of a few widths of its law is enough.
    for gap in np.concatenate([NARROW_GAPS / slope, GAPS]) if narrow else GAPS:
        period = depth + gap * strike
        falls = slope * math.log1p(gap)
        copies = math.log(slope * depth / strike) - falls if decreasing_beyond else math.log(depth / value)
        beyond = float(np.min(above - rising * (low + period), initial=0.0))
        copies += beyond
        tilt = max(max(copies - math.log(precision.wrap), 0.0) / period, 1.0 / strike)
        # Cost: frequencies ∝ period; rounding ∝ e^{θK}/θ, which is to stay below its limit.
        noise = unit * strike * math.exp(min(tilt * strike, 500.0)) / (tilt * strike) / value
        cost = period / depth * (1.0 if noise < 0.5 * precision.rounding else 1e3 * noise)
        rated.append((cost, period, tilt, beyond))
    _, period, tilt, beyond = min(rated, key=lambda item: item[0])
    total = float(law.transform(np.array([-tilt]))[0])
    if not total > 1e-250:
        raise AccountingError(f"E e^(−θW) = {total:g} underflows at strike {strike:.3g}: ε is too large")

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


# δ in each direction

#: the most real operations spent in extended precision on one evaluation (half a minute), and on all of a search,
#: after which the best bound in hand is returned
EXTENDED_LIMIT, MOST_EXTENDED = 3e10, 1e11


@dataclass(frozen=True)
class Evaluation:
    """An upper bound on δ in one direction, with what it was tuned to and what each step can have added (absolute)."""

    delta: float
    slope: float
    budget: dict[str, float] = field(default_factory=dict)
    method: str = "fourier"
    work: float = 0.0  #: real operations spent, together with the other strikes of its panel

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

    window: Window
    width: float  #: of the smoothing, one for all strikes: a wider one at higher strikes would reach below the window
    transform: NDArray[Any]
    unit: float  #: of rounding
    extended: bool = False
    work: float = 0.0

    def put(self, strike: float) -> tuple[np.longdouble, dict[str, float]]:
        """E' (K − W' − N)₊ is at most this value and these margins."""
        window, width = self.window, self.width
        weights = frequency_weights(strike, width, window)
        # Without extended precision the phases ω·K of the coefficients are rounded too.
        phases = 0.0 if AVAILABLE else 4e-16 * (1 + float(window.frequencies[-1]) * strike)
        rounding = (self.unit + phases) * float(np.sum(np.abs(weights))) * window.total
        tail = tail_bound(strike, window.low, window.period, window.tilt, window.count, width, window.total)
        return (weights * self.transform).real.sum(), {
            "window": far_bound(strike, window.low, width, window.far_tilts, window.far_transforms),
            "fourier tail": tail,
            "rounding": rounding,
        }


def fourier_series(law: LossLaw, scales: list[Scale], precision: Precision) -> FourierSeries:
    """Set up for all of ``scales``: the highest strike, the narrowest smoothing and the smallest value decide."""
    strike, width = max(s.strike for s in scales), min(s.width(precision) for s in scales)
    value = min(s.delta * (1.0 if law.direction == "remove" else s.strike) for s in scales)
    unit, slope = rounding_unit(law.product.bins), min(s.slope for s in scales)
    window = choose_window(law, strike, width, slope, value, precision, unit=unit)
    work = law.product.flops() * window.count
    if work > precision.work:
        raise AccountingError(f"{work:.2g} operations are beyond {precision.work:.1g}; {TOO_LARGE}")
    margin = unit * (float(np.sum(np.abs(frequency_weights(strike, width, window)))) * window.total + strike)
    too_rough = margin > precision.rounding * value
    extended = precision.extended and too_rough and AVAILABLE and work <= EXTENDED_LIMIT
    transform = law.transform(1j * window.frequencies - window.tilt, extended=extended)
    return FourierSeries(window, width, transform, unit * (EXTENDED_GAIN if extended else 1.0), extended, work)


def evaluate(law: LossLaw, scale: Scale, precision: Precision) -> Evaluation:
    """δ in the law's direction at one strike; ``scale`` says where and what to expect."""
    return next(evaluate_panel(law, [scale], precision))


def evaluate_panel(law: LossLaw, scales: list[Scale], precision: Precision) -> Iterator[Evaluation]:
    """δ in the law's direction at every strike of ``scales``, from one series.

    δ_remove(ε) = E (W − e^ε)₊ = E W − e^ε + E (e^ε − W)₊, an identity on the truncated lattice (Lemma 10).
    δ_add(ε) = e^ε E (e^{−ε} − W)₊ is a put with no parity and so less cancellation.
    """
    series, remove, path = fourier_series(law, scales, precision), law.direction == "remove", law.product.lattice
    window = series.window
    mass, mean = law.mass_and_mean(extended=series.extended)

    def at(strike: float) -> tuple[float, dict[str, float]]:
        """δ but for the lattice, and what of it is margin."""
        put, margins = series.put(strike)
        if remove:
            margins["rounding"] += series.unit * float(mean + strike * mass)
            return float(mean - strike * mass + put), margins
        return float(put) / strike, {name: margin / strike for name, margin in margins.items()}

    for scale in scales:
        strike, slope = scale.strike, scale.slope
        core, budget = at(strike)
        step = min(0.02, 0.2 / slope)
        other, _ = at(strike * (1 + step if remove else 1 - step))
        if core > other > 0:  # −d log δ/dε from two strikes of the same series
            slope = math.log(core / other) / math.log(1 + step if remove else 1 / (1 - step))
        if remove:
            # Copies: e^{−θT}(K − low) on {W > high}, whose probability Markov's inequality bounds at a strike between.
            between = max(strike, window.high - strike / slope)
            beyond = abs(at(between)[0]) / (window.high - between)
            budget |= {"lattice exits": path.exit_remove, "grid top": law.cap}
        else:
            beyond = window.beyond / strike
            budget |= {"lattice exits": path.exit_add}
        delta = path.inflation * (core + sum(budget.values()))
        copies = beyond * (strike - window.low) / math.expm1(window.tilt * window.period)
        budget |= _estimated(law, series.width / strike, slope, max(core, 0.0)) | {"periodic copies": copies}
        # Fail closed: what is not a positive finite number is not an answer.
        if not (math.isfinite(delta) and delta > 0 and np.isfinite(list(budget.values())).all()):
            raise AccountingError(f"the evaluation gave δ = {delta!r}, which certifies nothing; ask for a larger δ")
        yield Evaluation(min(delta, 1.0), slope, budget, "extended" if series.extended else "fourier", series.work)


def _estimated(law: LossLaw, relative_width: float, slope: float, value: float) -> dict[str, float]:
    """What the inequalities without an explicit term can have added."""
    # ½ ς² times the density of W at the strike, which is slope·(slope + 1)·value/K² where δ falls as K^{−slope}.
    smoothing, path = 0.5 * relative_width**2 * slope * (slope + 1) * value, law.product.lattice
    return {
        "smoothing": smoothing,
        # The grid's steps are .8 ς/√b and 1.2 ς/K: each squared over 6 is the variance of rounding onto it.
        "grid rounding": smoothing * ((0.8**2 + 1.2**2) / 6),
        "lattice spacing": (path.inflation * path.growth - 1) * value,
        "shared scales": law.scale_gap * value,
    }


# The accountant

METHOD = "transfer-matrix"
LARGEST_LAMBDA = 0.9999
SMALLEST_LAMBDA = 1e-6
LARGEST_EPSILON = 20.0
EPSILONS = (SMALLEST_EPSILON, LARGEST_EPSILON)
MOST_STEPS = 10_000_000  #: steps per epoch, and epochs: a few arrays of this length are made
SMALLEST_DELTA = 1e-12
FINE_SECONDS = 15.0  #: about what all fine evaluations of a search take over one coarse one
RTOL = 2e-4  #: relative accuracy of σ and ε unless another one is asked for
AFFORDABLE = 5e9  #: real operations a frequency that an evaluation may cost before a dominating chain is considered
POSSIBLE = 2e11  #: beyond this even the cheapest chain is refused
STEEPNESS = 12.0  #: a typical −d log δ / d log σ, used only to compare losses


@dataclass(frozen=True)
class TransferMatrix:
    """Accountant of ``C_λ`` (or its column-normalised form) under Balls-in-Bins with bins kept for all epochs.

    Args:
        lam: λ, from 0 to 0.9999.
        steps_per_epoch: b, the number of bins.
        epochs: k.
        normalized: whether the columns of C are scaled to norm 1.
        columns: account for any matrix whose columns have these inner products, or smaller ones, instead.
        affordable: real operations a frequency, beyond which a chain that dominates the exact one is computed with.

    Raises:
        AccountingError: a parameter is outside what this accountant takes.

    Guarantee
    ---------
    Every δ returned is an upper bound on max(δ_remove, δ_add) of the dominating pair of Balls-in-Bins,
    P = (1/b) Σ_j N(m_j, σ²I) and Q = N(0, σ²I), under zero-out adjacency of one example. The bound is proven
    (docs/exact-accountant.md); the float64 rounding of its evaluation is covered by an explicit margin. That this pair
    dominates adaptive training is the Balls-in-Bins paper's lemma (arXiv 2410.06266).
    """

    lam: float
    steps_per_epoch: int
    epochs: int
    normalized: bool = False
    columns: Columns | None = None
    affordable: float = AFFORDABLE

    def __post_init__(self) -> None:
        object.__setattr__(self, "lam", real("λ", self.lam, 0, LARGEST_LAMBDA))
        if self.columns and 0 < self.lam < SMALLEST_LAMBDA:
            raise AccountingError(f"λ is {self.lam!r}; with columns it is 0 or at least {SMALLEST_LAMBDA:g}")
        for name in ("steps_per_epoch", "epochs"):
            object.__setattr__(self, name, int(real(name, getattr(self, name), 1, MOST_STEPS, whole=True)))

    # The four questions

    def delta(self, sigma: float, epsilon: float) -> Bound:
        """Upper bounds on δ_remove(ε) and δ_add(ε) at noise multiplier σ, refined until their slack is small.

        Raises:
            AccountingError: σ or ε is out of range, or δ is too small to certify.
        """
        sigma, epsilon = real("σ", sigma, self.smallest_sigma), real("ε", epsilon, *EPSILONS)
        scale = self.settle(sigma, flat(epsilon))
        if scale.delta < SMALLEST_DELTA / 10:
            raise AccountingError(f"δ lies below {SMALLEST_DELTA:g} at σ = {sigma:g}, ε = {epsilon:g}; ask for less")
        bounds: list[Bound] = []
        for _ in range(8):  # a slope far off is corrected by at most a factor of three each time
            bound = self.evaluate(sigma, epsilon, scale, FINE)
            bounds.append(bound)
            if bound.slack <= SLACK_SHARE * bound.delta:
                break
            before, scale = scale, scale.learnt(bound.delta - bound.slack, bound.delta, bound.slope)
            if scale == before:
                break
        return min(bounds, key=attrgetter("delta"))

    def sigma(self, epsilon: float, delta: float, *, rtol: float = RTOL, start: float | None = None) -> Bound:
        """The bound at the smallest σ whose certified δ(ε) is at most ``delta``.

        Args:
            epsilon: ε, from 0.001 to 20.
            delta: δ, from 1e-12 on.
            rtol: relative accuracy of σ; a larger one makes the last evaluations coarser too.
            start: a guess of σ that saves time.

        Returns:
            A bound whose σ was itself evaluated and passed.

        Raises:
            AccountingError: an argument is out of range, or no σ was certified.
        """
        epsilon, delta = real("ε", epsilon, *EPSILONS), real("δ", delta, SMALLEST_DELTA, 1, below=True)
        low, most = math.log(self.smallest_sigma * 1.001), self.unamplified(epsilon, delta).sigma
        strategy = Secant(-10.0, largest=0.35, limits=(low, math.log(most * 1.01)))
        begin = min(max(start or 0.35 * most, math.exp(low)), most)
        slope = _first_slope(epsilon, delta)
        return self._solve(lambda sigma: (sigma, epsilon), begin, strategy, slope, delta, rtol)

    def unamplified(self, epsilon: float, delta: float) -> Bound:
        """The bound at a σ that suffices whatever the bins do: that of the Gaussian mechanism.

        No two bins correlate more than fully (Lemma 7), and then they are one.
        """
        alone = math.sqrt(self.chain(1.0).loss_variance)

        def value(sigma: float) -> float:
            return one_bin_delta(epsilon, alone / sigma) * (1 + 1e-9)

        sigma = rounded_up(smallest(value, delta, start=alone, rtol=1e-4), RTOL)
        details = {"remove": "gaussian", "add": "gaussian"}
        return Bound(sigma, epsilon, value(sigma), value(sigma), METHOD, {"no amplification": value(sigma)}, details)

    def quick_sigma(self, epsilon: float, delta: float, *, start: float | None = None) -> float:
        """About the smallest σ, to about 0.5%: for comparing λ, no claim."""
        return self.sigma(epsilon, delta, rtol=3e-3, start=start).sigma

    def epsilon(self, sigma: float, delta: float, *, rtol: float = RTOL) -> Bound:
        """The bound at the smallest ε (to relative accuracy ``rtol``) whose certified δ(ε) is at most ``delta``.

        Raises:
            AccountingError: an argument is out of range, or no ε was certified.
        """
        sigma, delta = real("σ", sigma, self.smallest_sigma), real("δ", delta, SMALLEST_DELTA, 1, below=True)
        limits = (math.log(SMALLEST_EPSILON), math.log(LARGEST_EPSILON))
        strategy = Secant(-1.4 * math.log(1 / min(delta, 0.1)), largest=0.7, limits=limits)
        return self._solve(lambda epsilon: (sigma, epsilon), 1.0, strategy, _first_slope(1.0, delta), delta, rtol)

    # What to compute with

    def chain(self, sigma: float) -> Chain:
        """The exact chain at this σ (for the normalised form, the one that dominates it)."""
        columns = self.columns or (Columns() if self.lam == 0 else None)
        make = columns.over if columns else normalized_chain if self.normalized else plain_chain
        # Every entry of G grows with λ, so a tiny λ may be rounded up (Lemma 7).
        lam = max(self.lam, SMALLEST_LAMBDA) if self.lam else 0.0
        return make(lam, self.steps_per_epoch, self.epochs, sigma)

    @property
    def smallest_sigma(self) -> float:
        """Below this e^X comes near overflow."""
        return math.sqrt(self.chain(1.0).loss_variance / LARGEST_LOSS_VARIANCE)

    @cached_property
    def normalizing_loss(self) -> float:
        """About how much σ, where it is large, grows because a chain stands in for normalised columns (Lemma 7)."""
        steps = self.steps_per_epoch * self.epochs
        if not self.normalized or self.columns or self.lam == 0 or steps > MOST_STEPS:
            return 0.0
        norms = np.sqrt(-np.expm1(2 * np.arange(steps, 0, -1) * math.log(self.lam)) / (1 - self.lam**2))
        together = np.asarray(lfilter([1.0], [1.0, -self.lam], 1 / norms)) / self.steps_per_epoch  # the mean column
        return 0.5 * math.log(self.chain(1.0).mean_loss[1] / float(together @ together))

    def working_chain(self, sigma: float, slope: float, *, coarse: bool) -> tuple[Chain, float]:
        """The exact chain or an affordable one that dominates it, and by how much σ is expected to grow for it."""
        exact = self.chain(sigma)
        if self.lam == 0 or self.steps_per_epoch == 1:
            return exact, 0.0
        chosen, expected_loss = select(exact, slope, self.affordable)
        expected_loss += self.normalizing_loss
        if chosen.runs or chosen.amplitudes:
            simple = coarse and collective_loss(chosen.stationary, chosen) < 0.02
            return chosen.stationary if simple else chosen, expected_loss
        if coarse and chosen.tail and (1 + slope) * float(chosen.log_scales.mean()) < 0.2:
            longer = replace(chosen, tail=0.0)
            if collective_loss(longer, chosen) < 0.25:  # else it says nothing about δ's size
                return longer, expected_loss
        return chosen, expected_loss

    # One evaluation

    def evaluate(self, sigma: float, epsilon: float, scale: Scale, precision: Precision) -> Bound:
        """Both directions at one (σ, ε), tuned to ``scale``. Valid whatever the tuning; tight only if it fits."""
        if self.steps_per_epoch == 1:
            value = one_bin_delta(epsilon, math.sqrt(self.chain(sigma).loss_variance)) * (1 + 1e-9)
            details: dict[str, Any] = {"remove": "gaussian", "add": "gaussian", "operations": 0.0}
            return Bound(sigma, epsilon, value, value, METHOD, {}, details, scale.slope)
        chain, expected_loss = self.working_chain(sigma, scale.slope, coarse=precision is COARSE)
        law = loss_law(chain, scale, precision, direction="remove")
        remove = evaluate(law, scale, precision)
        add = self._add(chain, epsilon, remove, precision)
        if remove.delta >= add.delta:
            budget = remove.budget
        elif add.method == "jensen":  # what lifts Jensen's bound above δ_remove, and no more
            budget = remove.budget | {"jensen": add.delta - remove.delta}
        else:
            budget = add.budget
        details = {
            "remove": remove.method,
            "add": add.method,
            "bins": float(chain.bins),
            "tail": chain.tail,
            "operations": remove.work,
            "dominating_chain_sigma_loss": expected_loss,
        }
        return Bound(sigma, epsilon, remove.delta, add.delta, METHOD, budget, details, remove.slope)

    def _add(self, chain: Chain, epsilon: float, remove: Evaluation, precision: Precision) -> Evaluation:
        """The cheapest bound on δ_add that does not govern; the finest one where add does govern."""
        best = Evaluation(jensen_add(*chain.mean_loss, epsilon), math.nan, {}, "jensen")  # often below remove already
        slope, size = max(remove.slope, 1.0), min(remove.delta, best.delta)
        with contextlib.suppress(AccountingError):  # Jensen's bound, or the last one, stands
            for step in (COARSE, COARSE, COARSE, precision, precision):
                if best.delta <= remove.delta:
                    break
                scale = Scale(math.exp(-epsilon), size, slope)
                fourier = evaluate(loss_law(chain, scale, step, direction="add"), scale, step)
                size, slope = min(max(fourier.core, fourier.delta * 1e-2), 1.0), max(fourier.slope, 1.0)
                best = min(best, fourier, key=lambda item: item.delta)
        return best

    def settle(self, sigma: float, scale: Scale, direction: OneWay = "remove") -> Scale:
        """How large and how steep δ is at the strike of ``scale``, from coarse evaluations that begin with it."""
        chain, _ = self.working_chain(sigma, scale.slope, coarse=True)
        for _ in range(12):
            value = evaluate(loss_law(chain, scale, COARSE, direction=direction), scale, COARSE)
            before, scale = scale, scale.learnt(value.core, value.delta, value.slope)
            settled = abs(math.log(scale.delta / before.delta)) < 1 and abs(math.log(scale.slope / before.slope)) < 0.3
            if settled or scale.delta < SMALLEST_DELTA / 10:
                break
        return scale

    def _solve(
        self,
        place: Callable[[float], tuple[float, float]],
        start: float,
        strategy: Secant,
        guess: float,
        delta: float,
        rtol: float,
    ) -> Bound:
        """Search for a value: coarse evaluations first, fine ones last, each tuned to those before it.

        ``place(value)`` is the (σ, ε) that belongs to it, and ``guess`` a slope −d log δ/dε.
        """
        precision, slope, extended = _final_precision(rtol), guess, 0.0

        def evaluate(value: float, precision: Precision) -> Bound:
            nonlocal slope, extended
            sigma, epsilon = place(value)
            if extended > MOST_EXTENDED:
                raise AccountingError(f"{extended:.1g} operations in extended precision did not reach δ = {delta:g}")
            # A rounded slope: what an evaluation says does not hang on the last bits of the one before.
            scale = Scale(math.exp(epsilon), delta, 1.1 ** round(math.log(slope, 1.1)))
            bound = self.evaluate(sigma, epsilon, scale, precision)
            extended += bound.details["operations"] if bound.details["remove"] == "extended" else 0.0
            excess = log_ratio(bound.delta, delta)
            if abs(excess) < 4:
                slope = min(max(bound.slope, 0.3), 3 * slope)
            elif excess > 0:  # a slope learnt where δ is nearly flat smooths so widely that nothing passes any more
                slope = max(slope, guess)
            return bound

        def coarse(x: float) -> float:
            return log_ratio(evaluate(math.exp(x), COARSE).delta, delta)

        began = time.monotonic()
        find_root(coarse, math.log(start), strategy, lambda value: abs(value) < 0.25)
        begin, points = math.exp(strategy.next()), len(strategy.points)
        tell(place(begin)[0], FINE_SECONDS * (time.monotonic() - began) / points)
        strategy.restart()
        bound, value = smallest_certified(lambda x: evaluate(x, precision), delta, begin, strategy, rtol=rtol)
        if bound is None:
            raise AccountingError(f"δ = {delta:g} is out of reach: the last bound was {math.exp(value) * delta:.3g}")
        return bound


def flat(epsilon: float) -> Scale:
    """Where to begin to learn δ's size and slope at this ε: flat, which is cheap."""
    return Scale(math.exp(epsilon), 1e-3, min(_first_slope(epsilon, 1e-3), 4.0))


def _first_slope(epsilon: float, delta: float) -> float:
    """A guess of −d log δ/dε before anything was computed."""
    return max(1.4 * math.log(1 / min(delta, 0.1)) / epsilon, 1.5)


def _final_precision(rtol: float) -> Precision:
    """FINE at the default accuracy, proportionally coarser where a coarser answer is asked for."""
    factor = min(max(rtol / RTOL, 1.0), 8.0)
    coarser = {name: getattr(FINE, name) * factor for name in ("lattice", "scales", "negligible", "wrap")}
    return replace(FINE, smoothing=min(FINE.smoothing * math.sqrt(factor), 0.4), **coarser)


# Which chain to compute with: the exact one where it is affordable, else the least loose dominating one


def cost(chain: Chain, slope: float) -> float:
    """Real operations for one complex frequency, from the lattice's size before it is built."""
    ratio = spacing_ratio(chain.bins, FINE.lattice)
    if chain.second:
        return plane(chain, ratio, 7.0).cost
    tau = math.sqrt((1 - chain.lam) / (1 + chain.lam))
    span = 14 * math.sqrt(chain.variance(0.0)) + math.sqrt(chain.gain) * max(float(chain.largest_shift(0.5)), 0.0)
    states = span / (ratio * tau) + 3
    columns = 1.0 if chain.epochs == 1 else states
    total = 0.0
    for stretch in stretches(chain, FINE.scales * chain.bins / (1 + slope)):
        _, s = power_cost(stretch.count, int(states), int(columns))
        rest = (stretch.count >> s) + (stretch.count & ((1 << s) - 1)).bit_count()
        total += 8 * states**2 * (s * states + rest * columns)
    return total + 8 * states**2 * columns


def loss(chain: Chain, exact: Chain, slope: float) -> float:
    """About how much σ grows (relatively) by computing with ``chain`` instead of ``exact``."""
    if exact.runs or exact.amplitudes:
        simple = exact.stationary
        return 0.0 if chain is exact else loss(chain, simple, slope) + collective_loss(simple, exact)
    end = exact.gain * exact.tail * float(np.mean(exact.end_effect(np.arange(exact.bins)) ** 2)) / 2
    kept = chain.tail / exact.tail if exact.tail else 1.0
    group = round(math.log(chain.lam) / math.log(exact.lam))
    amplification = math.log(exact.bins / (chain.bins * group))
    return (
        (1 + slope) * end * (1 - kept) / STEEPNESS + 0.5 * math.log(chain.gain / exact.gain) + amplification / STEEPNESS
    )


def collective_loss(chain: Chain, exact: Chain) -> float:
    """The same where σ is large, few bins stand out, and the loss is about the Gaussian mean over all of them."""
    return 0.5 * math.log(chain.mean_loss[1] / exact.mean_loss[1])


def candidates(exact: Chain) -> list[Chain]:
    """The exact chain, its stationary continuation (Lemma 7), and lumped ones (Lemma 8), shortened if need be (9)."""
    if exact.runs or exact.amplitudes:
        return [exact, *candidates(exact.stationary)]
    chains = [exact] + ([replace(exact, tail=0.0)] if exact.tail else [])
    longest = min(exact.bins // 2, 1 + int(0.03 / -math.log(exact.lam)))
    if exact.nugget and exact.epochs > 1:
        return chains
    divisors = {g for g in range(2, longest + 1) if exact.bins % g == 0} if longest <= 10_000 else set()
    for group in sorted(divisors | {2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256}):
        if 2 <= group <= longest:
            whole = exact.shortened(exact.bins - exact.bins % group).lumped(group)
            chains += [whole] + ([replace(whole, tail=0.0)] if whole.tail else [])
    return chains


def select(exact: Chain, slope: float, most: float = AFFORDABLE) -> tuple[Chain, float]:
    """The chain to compute with, at ``most`` so many operations a frequency, and what it is expected to add to σ."""
    if exact.second:  # nothing cheaper dominates two chains
        return exact, 0.0
    if cost(exact, slope) <= most:
        if exact.tail and not exact.amplitudes:
            longer = replace(exact, tail=0.0)
            alone, together = loss(longer, exact, slope), collective_loss(longer, exact)
            if alone <= 3e-5 and together <= 1e-4:
                return longer, max(alone, together)
        return exact, 0.0
    rated = [(loss(chain, exact, slope), cost(chain, slope), chain) for chain in candidates(exact)]
    affordable = [item for item in rated if item[1] <= most]
    best = min(affordable, key=lambda item: item[0]) if affordable else min(rated, key=lambda item: item[1])
    if best[1] > POSSIBLE:
        raise AccountingError(f"λ = {exact.lam:g} and b = {exact.bins} take {best[1]:.1g} operations; {TOO_LARGE}")
    return best[2], best[0]
