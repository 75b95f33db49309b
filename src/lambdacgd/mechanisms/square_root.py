"""Mechanisms read off the power series of the square root of the workload, or of another power of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from lambdacgd.errors import integer
from lambdacgd.mechanisms.base import (
    Array,
    Auto,
    BandedInverse,
    BandedStrategy,
    Horizon,
    Mechanism,
    Objective,
    check_objective,
    not_chosen,
    number_or_auto,
)
from lambdacgd.mechanisms.toeplitz import multiply
from lambdacgd.mechanisms.workload import Workload


def power_series(exponent: float, rate: float, n: int) -> Array:
    """First n coefficients of (1 − rate·x)^exponent."""
    j = np.arange(1, n)
    ratios = (j - 1 - exponent) / j * rate
    return np.concatenate([[1.0], np.cumprod(ratios)])


def check_bands(bands: int, horizon: Horizon) -> None:
    integer("bands", bands, maximum=horizon.steps, why=f" (the steps that noise is correlated over, {horizon.steps})")


BANDS_HELP = {"help": "Bands p of a banded mechanism (default 4)."}


@dataclass(frozen=True)
class _Banded(Mechanism):
    bands: int = field(default=4, metadata=BANDS_HELP)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bands", integer("bands", self.bands))

    def validate(self, horizon: Horizon) -> None:
        check_bands(self.bands, horizon)


@dataclass(frozen=True)
class _SquareRoot(_Banded):
    momentum: float = 0.0
    decay: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        workload = Workload(self.momentum, self.decay)
        object.__setattr__(self, "momentum", workload.momentum)
        object.__setattr__(self, "decay", workload.decay)

    def _series(self, exponent: float) -> tuple[float, ...]:
        """((1 − αx)(1 − βx))^exponent: A is this with exponent −1."""
        p = self.bands
        return tuple(
            multiply(power_series(exponent, self.decay, p), power_series(exponent, self.momentum, p), p).tolist()
        )


@dataclass(frozen=True)
class BISR(_SquareRoot):
    """Banded inverse square root: C⁻¹ = the first p coefficients of A^{−1/2} (arXiv 2505.12128).

    Args:
        bands: p.
        momentum: β of the workload whose root is taken; see ``Workload``.
        decay: α of that workload.

    Raises:
        InvalidInput: a value cannot be used.

    >>> BISR(4).noising(10)
    array([ 1.    , -0.5   , -0.125 , -0.0625])
    """

    name: ClassVar[str] = "bisr"

    def recurrence(self, n: int) -> BandedInverse:
        return BandedInverse(self._series(0.5))


@dataclass(frozen=True)
class BSR(_SquareRoot):
    """Banded square root: C = the first p coefficients of A^{1/2} (arXiv 2405.13763).

    Args:
        bands: p.
        momentum: β of the workload whose root is taken; see ``Workload``.
        decay: α of that workload.

    Raises:
        InvalidInput: a value cannot be used.
    """

    name: ClassVar[str] = "bsr"

    def recurrence(self, n: int) -> BandedStrategy:
        return BandedStrategy(self._series(-0.5))


@dataclass(frozen=True)
class GammaBIFR(_Banded):
    """Banded inverse fractional root: C⁻¹ = the first p coefficients of (1−x)^γ (arXiv 2605.18379).

    Two bands are λCGD with λ = γ; γ = 1/2 is BISR; γ = 0 is DP-SGD.

    Args:
        bands: p.
        gamma: γ, a number in [0, 1), or "auto": then ``lc.plan`` chooses it.
        objective: what an automatic γ is chosen by, as for ``LambdaCGD``. By default the amplified RMSE with
            Balls-in-Bins, and the RMSE without amplification.

    Raises:
        InvalidInput: a value cannot be used, or there is an objective where γ is given.
    """

    gamma: float | Auto = field(default="auto", metadata={"help": "γ of γ-BIFR: a number in [0, 1) or auto (default)."})
    objective: Objective | None = field(
        default=None,
        kw_only=True,
        metadata={"request": True, "help": "What auto minimises: guideline, amplified-rmse, rmse or maxse."},
    )
    name: ClassVar[str] = "gamma-bifr"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "gamma", number_or_auto("gamma", self.gamma))
        check_objective(self.objective, "gamma", self.gamma)

    @property
    def resolved(self) -> bool:
        """Whether all numbers are known."""
        return self.gamma != "auto"

    def recurrence(self, n: int) -> BandedInverse:
        if self.gamma == "auto":
            raise not_chosen(self)
        return BandedInverse(tuple(power_series(self.gamma, 1.0, self.bands).tolist()))
