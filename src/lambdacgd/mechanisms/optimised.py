"""Mechanisms whose coefficients are optimised for a horizon: BandInvMF, BandMF and BLT.

All three minimise the same objective, the logarithm of the squared RMSE,

    RMSE² = (mean_t Σ_{s≤t} B_s²) · ‖m_0‖²,

with B = A·T⁻¹ for prefix sums and m_0 the participation sum of |T|. They differ only in how T's column c and T⁻¹'s
column a depend on their parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

from lambdacgd import cache
from lambdacgd.errors import InvalidInput, integer
from lambdacgd.mechanisms.base import (
    Array,
    Auto,
    BandedInverse,
    BandedStrategy,
    BufferedToeplitz,
    Horizon,
    Mechanism,
    inverse_pullback,
    parameter,
    series_inverse,
)
from lambdacgd.mechanisms.error import participation_sum
from lambdacgd.mechanisms.families import BISR, BSR, Banded


def log_squared_rmse(strategy: Array, noising: Array, horizon: Horizon) -> tuple[float, Array, Array]:
    """log RMSE² and its gradients with respect to c (length n) and a (length n)."""
    n, b, k = horizon.steps, horizon.steps_per_epoch, horizon.epochs
    left = np.cumsum(noising)
    rows_containing = np.arange(n, 0, -1) / n  # B_s enters the squared norms of the last n − s rows
    error = float(rows_containing @ left**2)
    by_left = 2 * rows_containing * left / error
    by_noising = np.cumsum(by_left[::-1])[::-1]

    together = participation_sum(np.abs(strategy), horizon)
    squared = float(together @ together)
    by_together = (2 * together / squared).reshape(k, b)
    by_strategy = np.cumsum(by_together[::-1], axis=0)[::-1].reshape(-1) * np.sign(strategy)
    return float(np.log(error) + np.log(squared)), by_strategy, by_noising


Smooth = Callable[[Array], tuple[float, Array]]
"""A function to be minimised: its value and its gradient."""


def minimize_smooth(objective: Smooth, starts: list[Array], *, upper: float | None = None) -> Array:
    """Minimise by L-BFGS from each of ``starts`` and keep the best: deterministic, so the same on every machine."""
    return min((_descend(objective, start, upper) for start in starts), key=lambda reached: reached[0])[1]


def _descend(objective: Smooth, start: Array, upper: float | None) -> tuple[float, Array]:
    # The first trial step of L-BFGS has length up to 1, which throws a banded inverse into divergence. In units of
    # 1/scale that step is small. L-BFGS starts again from where it ended until it gains nothing more.
    scale = 100.0

    def scaled(x: Array) -> tuple[float, Array]:
        # A diverging series gets a huge value, so that the search turns back.
        with np.errstate(over="ignore", invalid="ignore"):
            value, gradient = objective(x / scale)
        if not np.isfinite(value) or not np.all(np.isfinite(gradient)):
            return 1e10, np.zeros_like(x)
        return value, gradient / scale

    bounds = None if upper is None else [(None, upper * scale)] * len(start)
    options = {"maxiter": 5000, "maxfun": 10000, "ftol": 1e-15, "gtol": 1e-9, "maxcor": 30}
    x, value = start * scale, np.inf
    for _ in range(10):
        result = minimize(scaled, x, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        gained, value, x = value - result.fun, float(result.fun), result.x
        if not gained > 1e-10:
            break
    return value, np.asarray(x / scale, dtype=np.float64)


@dataclass(frozen=True)
class _Optimised(Mechanism):
    def _optimised_for(self, horizon: Horizon) -> Self:
        question = {"mechanism": self.to_dict(), "b": horizon.steps_per_epoch, "k": horizon.epochs}
        numbers = cache.cached("mechanism", question, lambda: self._optimize(horizon))
        return replace(self, **{name: tuple(values) for name, values in numbers.items()})

    def _optimize(self, horizon: Horizon) -> dict[str, list[float]]:
        """The fields of ``optimised``, by name."""
        raise NotImplementedError


def column_norms(column: Array) -> Array:
    """The norms of the columns of a lower triangular Toeplitz matrix, given by the first of them."""
    return np.sqrt(np.cumsum(column**2))[::-1].copy()


_NORMALIZED = parameter(
    False, "Column-normalised λCGD, BandInvMF or BLT.", symbol="normalised", request=True, kw_only=True
)
_AMPLIFIED = parameter(
    False,
    "Optimise BandInvMF, or BLT with one buffer, for the amplified RMSE, the accountant in the loop.",
    request=True,
    kw_only=True,
)


def _check_flags(mechanism: BandInvMF | BLT) -> None:
    for name in ("normalized", "amplified"):
        if not isinstance(getattr(mechanism, name), bool):
            raise InvalidInput(name, getattr(mechanism, name), "it must be True or False")


@dataclass(frozen=True)
class _OptimizedBands(_Optimised, Banded):
    """``coefficients`` are the optimised entries, the first of them 1; ``resolve(horizon)`` fills them in."""

    coefficients: tuple[float, ...] | None = None
    optimised: ClassVar[tuple[str, ...]] = ("coefficients",)
    bands_are_of_the_inverse: ClassVar[bool]

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.coefficients
        if given is None:
            return
        if len(given) != self.bands or not np.all(np.isfinite(given)) or given[0] != 1.0:
            raise InvalidInput("coefficients", given, f"it must be {self.bands} finite numbers, the first of them 1")
        object.__setattr__(self, "coefficients", tuple(float(value) for value in given))

    def _minimise(self, horizon: Horizon, start: Array, *, upper: float | None = None) -> Array:
        """The coefficients with the smallest RMSE, the first of them 1, searched from ``start`` for the others."""
        if not len(start):  # SciPy before 1.17 refuses to minimise over no numbers
            return np.ones(1)
        n = horizon.steps

        def objective(tail: Array) -> tuple[float, Array]:
            bands = np.concatenate([[1.0], tail])
            inverse, padded = series_inverse(bands, n), np.pad(bands, (0, n - len(bands)))
            if self.bands_are_of_the_inverse:
                value, by_inverse, by_bands = log_squared_rmse(inverse, padded, horizon)
            else:
                value, by_bands, by_inverse = log_squared_rmse(padded, inverse, horizon)
            gradient = by_bands[: len(bands)] + inverse_pullback(bands, inverse, by_inverse)
            return value, gradient[1:]

        return np.concatenate([[1.0], minimize_smooth(objective, [start], upper=upper)])


@dataclass(frozen=True)
class BandInvMF(_OptimizedBands):
    """C⁻¹ with p bands, optimised for RMSE over a horizon (arXiv 2505.12128). Two bands are λCGD with the best λ.

    Only C without negative entries are searched, because Balls-in-Bins accounting is proven for those. With many bands
    the optimum over all C lies just outside them, and little is lost.

    Args:
        bands: p.
        coefficients: the p noising coefficients, the first of them 1. Not given, they are optimised.
        normalized: divide every column of C by its norm d_t, so that the noise of step t is scaled by d_t. Optimised
            without amplification the coefficients are those of C as it was, which are as good to .05% of the RMSE.
        amplified: optimise them for the amplified RMSE, with the Balls-in-Bins accountant in the loop. That depends
            on the privacy budget, so only ``lc.plan`` can do it.

    Raises:
        InvalidInput: a value cannot be used, or ``amplified`` is given where nothing is to be optimised.
    """

    normalized: bool = _NORMALIZED
    amplified: bool = _AMPLIFIED
    bands_are_of_the_inverse: ClassVar[bool] = True
    name: ClassVar[str] = "bandinvmf"
    title: ClassVar[str] = "BandInvMF"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_flags(self)
        if self.amplified and self.coefficients is not None:
            raise InvalidInput("amplified", "amplified says how coefficients are optimised: leave it or them out.")

    def recurrence(self, n: int) -> BandedInverse:
        return BandedInverse(self._known("coefficients"))

    def column_scales(self, n: int) -> Array | None:
        return column_norms(self.strategy(n)) if self.normalized else None

    def _optimize(self, horizon: Horizon) -> dict[str, list[float]]:
        n = horizon.steps
        start = BISR(self.bands).noising(n)[1:]
        best = self._minimise(horizon, start)
        if not _inverse_is_non_negative(best, n):
            # C = 1/a(x) has no negative entry if a_0 is the only positive coefficient.
            best = _first_non_negative(best, self._minimise(horizon, start, upper=0.0), n)
        return {"coefficients": best.tolist()}


def _inverse_is_non_negative(noising: Array, n: int) -> bool:
    return bool(series_inverse(noising, n).min() >= 0)


def _first_non_negative(noising: Array, safe: Array, n: int) -> Array:
    """Walk from ``noising`` towards ``safe``, whose inverse is non-negative, until the inverse is non-negative.

    The first such point is found by bisection. An entry of the inverse is zero there, so that its sign would be up to
    rounding: the result lies one hundredth further.
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
        bands: p; or "auto", with Poisson sampling: then ``lc.plan`` takes the power of two with the smallest RMSE, as
            more bands cancel more noise and leave less amplification.
        coefficients: the p entries of C's column, the first of them 1. Not given, they are optimised.

    Raises:
        InvalidInput: a value cannot be used.
    """

    bands: int | Auto = parameter(  # type: ignore[assignment]  # only here it can be "auto"
        4, "Bands p of a banded mechanism (default 4); auto for bandmf with poisson.", symbol="p"
    )
    bands_are_of_the_inverse: ClassVar[bool] = False
    name: ClassVar[str] = "bandmf"
    title: ClassVar[str] = "BandMF"

    def __post_init__(self) -> None:
        if self.bands != "auto":
            super().__post_init__()
        elif self.coefficients is not None:
            raise InvalidInput("bands", "auto", "coefficients are given: say how many there are")

    def validate(self, horizon: Horizon) -> None:
        if self.bands != "auto":
            super().validate(horizon)

    def recurrence(self, n: int) -> BandedStrategy:
        return BandedStrategy(self._known("coefficients"))

    def _optimize(self, horizon: Horizon) -> dict[str, list[float]]:
        assert self.bands != "auto"
        best = self._minimise(horizon, BSR(self.bands).strategy(horizon.steps)[1 : self.bands])
        return {"coefficients": best.tolist()}


@dataclass(frozen=True)
class BLT(_Optimised):
    """c_0 = 1, c_i = Σ_j ω_j θ_j^{i−1}, optimised for RMSE over a horizon.

    Every output depends on the first step, so the noise cannot be regenerated: one vector is stored per buffer. With
    one buffer C⁻¹ = (1 − θx)/(1 − (θ − ω)x), whose accountant is exact where ω ≤ θ.

    Args:
        buffers: how many geometric series.
        decays: θ, one number in (0, 1) per buffer. Not given, they are optimised, and so are the weights.
        weights: ω, one positive number per buffer.
        normalized: divide every column of C by its norm d_t, so that the noise of step t is scaled by d_t.
        amplified: with one buffer, optimise it for the amplified RMSE, with the Balls-in-Bins accountant in the loop.
            That depends on the privacy budget, so only ``lc.plan`` can do it.

    Raises:
        InvalidInput: a value cannot be used, only one of ``decays`` and ``weights`` is given, or ``amplified`` where
            nothing is to be optimised or there is more than one buffer.
    """

    buffers: int = parameter(3, "Buffers of BLT (default 3).", symbol="m")
    decays: tuple[float, ...] | None = None
    weights: tuple[float, ...] | None = None
    normalized: bool = _NORMALIZED
    amplified: bool = _AMPLIFIED
    optimised: ClassVar[tuple[str, ...]] = ("decays", "weights")
    name: ClassVar[str] = "blt"
    title: ClassVar[str] = "BLT"

    def __post_init__(self) -> None:
        buffers = integer("buffers", self.buffers, maximum=16, why=" (beyond three or four nothing is gained)")
        object.__setattr__(self, "buffers", buffers)
        if (self.decays is None) != (self.weights is None):
            raise InvalidInput("weights", "Decays and weights go together: give both or neither.")
        _check_flags(self)
        if self.amplified and (self.decays is not None or buffers > 1):
            raise InvalidInput("amplified", "amplified optimises BLT with one buffer whose numbers are not given.")
        if self.decays is None:
            return
        for name, top in (("decays", 1.0), ("weights", np.inf)):
            given = getattr(self, name)
            values = np.asarray(given, dtype=np.float64)
            if values.shape != (self.buffers,) or not np.all((values > 0) & (values < top)):
                raise InvalidInput(name, given, f"it must be {self.buffers} numbers above 0 and below {top:g}")
            object.__setattr__(self, name, tuple(values.tolist()))

    def recurrence(self, n: int) -> BufferedToeplitz:
        return BufferedToeplitz(self._known("decays"), self._known("weights"))

    def column_scales(self, n: int) -> Array | None:
        return column_norms(self.strategy(n)) if self.normalized else None

    def _optimize(self, horizon: Horizon) -> dict[str, list[float]]:
        m, n = self.buffers, horizon.steps
        exponents = np.arange(n - 1, dtype=np.float64)[:, None]

        def split(x: Array) -> tuple[Array, Array]:
            return expit(x[:m]), np.exp(x[m:])

        def objective(x: Array) -> tuple[float, Array]:
            decays, weights = split(x)
            powers = decays[None, :] ** exponents
            both = BufferedToeplitz(tuple(decays), tuple(weights))
            strategy, noising = both.strategy(n), both.noising(n)
            value, by_strategy, by_noising = log_squared_rmse(strategy, noising, horizon)
            gradient = (by_strategy + inverse_pullback(strategy, noising, by_noising))[1:]
            by_weights = gradient @ powers
            slopes = exponents[1:] * powers[:-1]  # d θ^{i−1} / d θ
            by_decays = weights * (gradient[1:] @ slopes)
            return value, np.concatenate([by_decays * decays * (1 - decays), by_weights * weights])

        # Half-lives spread geometrically between one step and the horizon; several spreads, the best wins.
        starts = []
        for slowest in (n, horizon.steps_per_epoch, np.sqrt(n)):
            half_lives = max(float(slowest), 3.0) ** ((np.arange(m, 0, -1) - 0.5) / m) + 0.5
            decays = 1 - 1 / half_lives
            starts.append(np.concatenate([np.log(decays / (1 - decays)), np.log(np.full(m, 0.5 / m))]))
        decays, weights = split(minimize_smooth(objective, starts))
        order = np.argsort(-decays)
        return {"decays": decays[order].tolist(), "weights": weights[order].tolist()}
