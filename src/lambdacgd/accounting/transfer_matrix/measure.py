"""The law of W as the accountant sees it: a transform E e^{zW'}, and what each approximation can have hidden.

For F ≥ 0 convex, E F(W) ≤ inflation · ( E' F(W') + exit + cap ), where E' runs over the truncated lattice, W' is the
sum of rounded emissions, and the last two terms depend on the direction (Lemmas 2 to 4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from lambdacgd.accounting.base import AccountingError
from lambdacgd.accounting.transfer_matrix.chain import Chain
from lambdacgd.accounting.transfer_matrix.emission import grid_top, lognormal_excess, value_grid
from lambdacgd.accounting.transfer_matrix.extended import extended_transform
from lambdacgd.accounting.transfer_matrix.lattice import lattice, spacing_ratio
from lambdacgd.accounting.transfer_matrix.product import (
    IndependentProduct,
    Rounding,
    TransferProduct,
    stretches,
)

SLACK_SHARE = 0.05
"""an answer whose inequalities can have added more than this share of δ is refined, and refused if that fails"""
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


@dataclass(frozen=True)
class Measure:
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


def measure(
    chain: Chain, scale: Scale, precision: Precision, *, direction: Literal["remove", "add"], device: str
) -> Measure:
    """Set up the law of W for strikes near ``scale.strike``, as finely as ``precision`` asks, for one direction."""
    negligible = precision.negligible * scale.delta
    bins, variance = chain.bins, chain.gain * chain.peak_variance
    guard_overflow(variance)
    width = scale.width(precision)
    # Rounding variance: Σ_j (c_j·fine)²/6 from the many small bins, (ratio·W)²/6 at most from the few large ones.
    spread = math.sqrt(float(np.sum(np.exp(2 * chain.log_scales))))
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
        return Measure(IndependentProduct(bins, chain.gain, grid), 1.0, 1.0, 0.0, 0.0, cap, 0.0, bins)
    reach = max(4.0, -float(ndtri(min(negligible / (4 * bins), 0.1))))
    ratio_tau = spacing_ratio(bins, precision.lattice)
    path = lattice(chain, ratio_tau, reach, shifted=direction == "remove")
    plan = stretches(chain.log_scales, precision.scales * bins / (1 + scale.slope))
    gap = sum(s.count * (s.up - s.down) for s in plan) / bins * (1 + scale.slope)
    product = TransferProduct(chain, path, grid, plan, device)
    if path.eta * path.links >= 0.5:
        raise AccountingError(
            "the lattice is too coarse to certify anything; please report this as an error in lambdacgd"
        )
    growth = (1 + path.eta) ** path.links
    stretched = max((math.exp(s.up - s.down) for s in plan), default=1.0)
    return Measure(
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
