"""Banded matrices optimised for RMSE: of C⁻¹ (BandInvMF) and of C (BandMF)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import numpy as np

from lambdacgd.errors import InvalidInput, integer
from lambdacgd.mechanisms.base import Array, BandedInverse, BandedStrategy, Horizon, Mechanism, not_chosen
from lambdacgd.mechanisms.optimize import cached_parameters, log_squared_rmse, minimize_smooth
from lambdacgd.mechanisms.square_root import BANDS_HELP, BISR, BSR, check_bands
from lambdacgd.mechanisms.toeplitz import inverse_pullback, series_inverse


@dataclass(frozen=True)
class _OptimizedBands(Mechanism):
    """``coefficients`` are the optimised entries, the first of them 1; ``resolve(horizon)`` fills them in."""

    bands: int = field(default=4, metadata=BANDS_HELP)
    coefficients: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "bands", integer("bands", self.bands))
        given = self.coefficients
        if given is None:
            return
        if len(given) != self.bands or not np.all(np.isfinite(given)) or given[0] != 1.0:
            raise InvalidInput("coefficients", given, f"it must be {self.bands} finite numbers, the first of them 1")
        object.__setattr__(self, "coefficients", tuple(float(value) for value in given))

    @property
    def resolved(self) -> bool:
        """Whether all numbers are known."""
        return self.coefficients is not None

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

    Only C without negative entries are searched, because Balls-in-Bins accounting is proven for those. With many bands
    the optimum over all C lies just outside them, and little is lost.

    Args:
        bands: p.
        coefficients: the p noising coefficients, the first of them 1. Not given, they are optimised.
        amplified: optimise them for the amplified RMSE, with the Balls-in-Bins accountant in the loop. That depends
            on the privacy budget, so only ``lc.plan`` can do it.

    Raises:
        InvalidInput: a value cannot be used, or ``amplified`` is given where nothing is to be optimised.
    """

    amplified: bool = field(
        default=False,
        kw_only=True,
        metadata={"request": True, "help": "Optimise BandInvMF for the amplified RMSE, the accountant in the loop."},
    )
    name: ClassVar[str] = "bandinvmf"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.amplified, bool):
            raise InvalidInput("amplified", self.amplified, "it must be True or False")
        if self.amplified and self.coefficients is not None:
            raise InvalidInput("amplified", True, "it says how coefficients are found; leave it or them out")

    def resolve(self, horizon: Horizon) -> Self:
        """Optimise the coefficients for the RMSE over ``horizon``, if they are not given; see ``Mechanism.resolve``."""
        self.validate(horizon)
        if self.amplified:
            raise not_chosen(self)
        return super().resolve(horizon)

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

    Args:
        bands: p.
        coefficients: the p entries of C's column, the first of them 1. Not given, they are optimised.

    Raises:
        InvalidInput: a value cannot be used.
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
