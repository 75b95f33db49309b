"""Banded matrices optimised for RMSE: of C⁻¹ (BandInvMF) and of C (BandMF)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from lambdacgd.mechanisms.base import Array, BandedInverse, BandedStrategy, Horizon, Mechanism
from lambdacgd.mechanisms.optimize import cached_parameters, log_squared_rmse, minimize_smooth
from lambdacgd.mechanisms.square_root import BISR, BSR, check_bands
from lambdacgd.mechanisms.toeplitz import inverse_pullback, series_inverse
from lambdacgd.validation import InvalidInput, integer


@dataclass(frozen=True)
class _OptimizedBands(Mechanism):
    """``coefficients`` are the optimised entries, the first of them 1; ``resolve(horizon)`` fills them in."""

    bands: int
    coefficients: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "bands", integer("bands", self.bands))
        given = self.coefficients
        if given is None:
            return
        if len(given) != self.bands or not np.all(np.isfinite(given)) or given[0] != 1.0:
            raise InvalidInput("coefficients", given, f"it must be {self.bands} finite numbers, the first of them 1")
        object.__setattr__(self, "coefficients", tuple(float(value) for value in given))

    def validate(self, horizon: Horizon) -> None:
        check_bands(self.bands, horizon)

    def resolve(self, horizon: Horizon) -> Self:
        self.validate(horizon)
        if self.coefficients is not None:
            return self
        found = cached_parameters(self.name, self.bands, horizon, lambda: self._optimize(horizon))
        return replace(self, coefficients=found)

    def _optimize(self, horizon: Horizon) -> Array:
        raise NotImplementedError

    def _known(self) -> tuple[float, ...]:
        if self.coefficients is None:
            raise ValueError(
                f"{self.name} is not resolved: call .resolve(horizon) first, its coefficients depend on it"
            )
        return self.coefficients


@dataclass(frozen=True)
class BandInvMF(_OptimizedBands):
    """C⁻¹ with p bands, optimised for RMSE over a horizon (arXiv 2505.12128). Two bands are λCGD with the best λ.

    Of the C without negative entries: Balls-in-Bins accounting is proven for those. With many bands the optimum over
    all C lies just outside them, and little is lost.
    """

    name: ClassVar[str] = "bandinvmf"

    def recurrence(self, n: int) -> BandedInverse:
        return BandedInverse(self._known())

    def _optimize(self, horizon: Horizon) -> Array:
        n = horizon.steps

        def objective(tail: Array) -> tuple[float, Array]:
            noising = np.concatenate([[1.0], tail])
            strategy = series_inverse(noising, n)
            value, by_strategy, by_noising = log_squared_rmse(strategy, np.pad(noising, (0, n - len(noising))), horizon)
            gradient = by_noising[: self.bands] + inverse_pullback(noising, strategy, by_strategy)
            return value, gradient[1:]

        start = BISR(self.bands).noising(n)[1:]
        free = np.concatenate([[1.0], minimize_smooth(objective, [start])])
        if _inverse_is_non_negative(free, n):
            return free
        # C = 1/a(x) has no negative entry if a has none but a_0 that is positive
        return _first_non_negative(free, np.concatenate([[1.0], minimize_smooth(objective, [start], upper=0.0)]), n)


def _inverse_is_non_negative(noising: Array, n: int) -> bool:
    return bool(series_inverse(noising, n).min() >= 0)


def _first_non_negative(noising: Array, safe: Array, n: int) -> Array:
    """On the way from one series to another, whose inverse is non-negative, the first point where it is; by bisection.

    And a hundredth further: at that point an entry is zero, and its sign is up to rounding.
    """

    def point(way: float) -> Array:
        return (1 - way) * noising + way * safe

    outside, inside = 0.0, 1.0
    for _ in range(40):
        middle = (outside + inside) / 2
        if _inverse_is_non_negative(point(middle), n):
            inside = middle
        else:
            outside = middle
    further = min(1.0, 1.01 * inside)
    return point(further) if _inverse_is_non_negative(point(further), n) else safe


@dataclass(frozen=True)
class BandMF(_OptimizedBands):
    """C with p bands, Toeplitz, optimised for RMSE over a horizon (arXiv 2405.15913).

    For p ≤ b the columns of one example do not overlap, so the optimum is that of a single participation.
    """

    name: ClassVar[str] = "bandmf"

    def recurrence(self, n: int) -> BandedStrategy:
        return BandedStrategy(self._known())

    def _optimize(self, horizon: Horizon) -> Array:
        n = horizon.steps

        def objective(tail: Array) -> tuple[float, Array]:
            bands = np.concatenate([[1.0], tail])
            noising = series_inverse(bands, n)
            value, by_strategy, by_noising = log_squared_rmse(np.pad(bands, (0, n - len(bands))), noising, horizon)
            gradient = by_strategy[: self.bands] + inverse_pullback(bands, noising, by_noising)
            return value, gradient[1:]

        start = BSR(self.bands).strategy(n)[1 : self.bands]
        return np.concatenate([[1.0], minimize_smooth(objective, [start])])
