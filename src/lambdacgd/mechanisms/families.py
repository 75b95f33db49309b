"""Mechanisms with a closed form: DP-SGD, DP-λCGD, roots of the workload, and the optimal diagonal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lambdacgd.errors import InvalidInput, integer
from lambdacgd.mechanisms.base import (
    Array,
    Auto,
    BandedInverse,
    BandedStrategy,
    Horizon,
    Mechanism,
    Objective,
    Workload,
    check_automatic,
    multiply,
    parameter,
)

_OBJECTIVE = "What auto minimises: guideline, amplified-rmse, rmse or maxse."


@dataclass(frozen=True)
class Identity(Mechanism):
    """Independent noise at every step: C = I. This is DP-SGD."""

    name: ClassVar[str] = "dp-sgd"
    title: ClassVar[str] = "DP-SGD"

    def recurrence(self, n: int) -> BandedInverse:
        return BandedInverse((1.0,))


@dataclass(frozen=True)
class LambdaCGD(Mechanism):
    """Each step takes back a λ-fraction of the previous step's noise: C_ij = λ^{i−j}, C⁻¹ = (1, −λ).

    Args:
        lam: λ, a number in [0, 1), or "auto": then ``lc.plan`` chooses it.
        normalized: divide every column of C by its norm d_t, so that the noise of step t is scaled by d_t. "auto", with
            an automatic λ: ``lc.plan`` does so where it lowers the RMSE with fresh bins, and not elsewhere.
        objective: what an automatic λ is chosen by: "rmse", "maxse", "amplified-rmse" or "guideline". By default the
            amplified RMSE with fresh bins, the guideline with fixed ones, and the RMSE without amplification.

    Raises:
        InvalidInput: a value cannot be used, or there is an objective where λ is given.

    Examples:
        >>> LambdaCGD(0.9).noising(5)
        array([ 1. , -0.9])
        >>> print(LambdaCGD(0.99999, normalized=True))
        λCGD λ=0.99999 normalised
    """

    lam: float | Auto = parameter("auto", "λ, the share of noise that λCGD takes back: [0, 1) or auto.", symbol="λ")
    normalized: bool | Auto = parameter(False, "Column-normalised λCGD.", symbol="normalised")
    objective: Objective | None = parameter(None, _OBJECTIVE, request=True, kw_only=True)
    name: ClassVar[str] = "lambda-cgd"
    title: ClassVar[str] = "λCGD"

    def __post_init__(self) -> None:
        check_automatic(self, "lam", self.objective)
        if not (isinstance(self.normalized, bool) or self.normalized == "auto"):
            raise InvalidInput("normalized", self.normalized, "it must be True, False or 'auto'")
        if self.normalized == "auto" and self.lam != "auto":
            raise InvalidInput("normalized", "auto", "it is chosen together with λ: leave lam at 'auto' too")

    @property
    def resolved_lam(self) -> float:
        """λ as a number. Raises ``ValueError`` while it is "auto"."""
        return float(self._known("lam"))

    def recurrence(self, n: int) -> BandedInverse:
        return BandedInverse((1.0, -self.resolved_lam))

    def column_scales(self, n: int) -> Array | None:
        if not self.normalized:
            return None
        lam = self.resolved_lam
        if lam == 0.0:
            return np.ones(n)
        # d_t² = (1 − λ^{2(n−t+1)}) / (1 − λ²), through expm1 so that λ near 1 keeps its digits.
        rate = 2 * math.log(lam)
        return np.sqrt(np.expm1(rate * np.arange(n, 0, -1)) / math.expm1(rate))


def power_series(exponent: float, rate: float, n: int) -> Array:
    """First n coefficients of (1 − rate·x)^exponent."""
    j = np.arange(1, n)
    ratios = (j - 1 - exponent) / j * rate
    return np.concatenate([[1.0], np.cumprod(ratios)])


@dataclass(frozen=True)
class Banded(Mechanism):
    """A mechanism whose C or C⁻¹ has ``bands`` bands, at most as many as there are steps."""

    bands: int = parameter(4, "Bands p of a banded mechanism (default 4).", symbol="p")

    def __post_init__(self) -> None:
        object.__setattr__(self, "bands", integer("bands", self.bands))

    def validate(self, horizon: Horizon) -> None:
        steps = horizon.steps
        integer("bands", self.bands, maximum=steps, why=f" (the steps that noise is correlated over, {steps})")


@dataclass(frozen=True)
class _SquareRoot(Banded):
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
        decay, momentum = power_series(exponent, self.decay, p), power_series(exponent, self.momentum, p)
        return tuple(multiply(decay, momentum, p).tolist())


@dataclass(frozen=True)
class BISR(_SquareRoot):
    """Banded inverse square root: C⁻¹ = the first p coefficients of A^{−1/2} (arXiv 2505.12128).

    Args:
        bands: p.
        momentum: β of the workload whose root is taken; see ``Workload``.
        decay: α of that workload.

    Raises:
        InvalidInput: a value cannot be used.

    Examples:
        >>> BISR(4).noising(10)
        array([ 1.    , -0.5   , -0.125 , -0.0625])
    """

    name: ClassVar[str] = "bisr"
    title: ClassVar[str] = "BISR"

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
    title: ClassVar[str] = "BSR"

    def recurrence(self, n: int) -> BandedStrategy:
        return BandedStrategy(self._series(-0.5))


@dataclass(frozen=True)
class GammaBIFR(Banded):
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

    gamma: float | Auto = parameter("auto", "γ of γ-BIFR: a number in [0, 1) or auto (default).", symbol="γ")
    objective: Objective | None = parameter(None, _OBJECTIVE, request=True, kw_only=True)
    name: ClassVar[str] = "gamma-bifr"
    title: ClassVar[str] = "γ-BIFR"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_automatic(self, "gamma", self.objective)

    def recurrence(self, n: int) -> BandedInverse:
        return BandedInverse(tuple(power_series(self._known("gamma"), 1.0, self.bands).tolist()))


@dataclass(frozen=True)
class Diagonal(Mechanism):
    """C = diag(n^¼, (n−1)^¼, …, 1): independent noise that grows from step to step.

    Among diagonal C it has the least RMSE when every example takes part in every step (b = 1, k = n), namely
    (1/√n) Σ_j √j, against √(n(n+1)/2) for DP-SGD and the lower bound √((n+1)(2n+1)/6).
    """

    name: ClassVar[str] = "diagonal"

    def recurrence(self, n: int) -> BandedInverse:
        return BandedInverse((1.0,))

    def column_scales(self, n: int) -> Array:
        return np.arange(n, 0, -1, dtype=np.float64) ** -0.25
