"""DP-λCGD, the paper's mechanism, and DP-SGD, its special case λ = 0."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from lambdacgd.errors import InvalidInput
from lambdacgd.mechanisms.base import (
    Array,
    Auto,
    BandedInverse,
    Horizon,
    Mechanism,
    Objective,
    check_objective,
    not_chosen,
    number_or_auto,
)


@dataclass(frozen=True)
class Identity(Mechanism):
    """Independent noise at every step: C = I. This is DP-SGD."""

    name: ClassVar[str] = "dp-sgd"

    def recurrence(self, n: int) -> BandedInverse:
        return BandedInverse((1.0,))


@dataclass(frozen=True)
class LambdaCGD(Mechanism):
    """Each step takes back a λ-fraction of the previous step's noise: C_ij = λ^{i−j}, C⁻¹ = (1, −λ).

    Args:
        lam: λ, a number in [0, 1), or "auto": then ``lc.plan`` chooses it.
        normalized: divide every column of C by its norm d_t, so that the noise of step t is scaled by d_t.
        objective: what an automatic λ is chosen by: "rmse", "maxse", "amplified-rmse" or "guideline". By default the
            amplified RMSE with fresh bins, the guideline with fixed ones, and the RMSE without amplification.

    Raises:
        InvalidInput: a value cannot be used, or there is an objective where λ is given.

    >>> LambdaCGD(0.9).noising(5)
    array([ 1. , -0.9])
    """

    lam: float | Auto = field(default="auto", metadata={"help": "λ of λCGD: a number in [0, 1) or auto (default)."})
    normalized: bool = field(default=False, metadata={"help": "Column-normalised λCGD."})
    objective: Objective | None = field(
        default=None,
        kw_only=True,
        metadata={"request": True, "help": "What auto minimises: guideline, amplified-rmse, rmse or maxse."},
    )
    name: ClassVar[str] = "lambda-cgd"

    def __post_init__(self) -> None:
        object.__setattr__(self, "lam", number_or_auto("lam", self.lam))
        check_objective(self.objective, "lam", self.lam)
        if not isinstance(self.normalized, bool):
            raise InvalidInput("normalized", self.normalized, "it must be True or False")

    @property
    def resolved(self) -> bool:
        """Whether all numbers are known."""
        return self.lam != "auto"

    @property
    def resolved_lam(self) -> float:
        """λ as a number. Raises ``ValueError`` while it is "auto"."""
        if self.lam == "auto":
            raise not_chosen(self)
        return self.lam

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


def closed_form_sensitivity(lam: float, horizon: Horizon) -> float:
    """sens of plain λCGD: sqrt((1−λ^{2b}) / ((1−λ²)(1−λ^b)²) · Σ_{j=1..k} (1−λ^{bj})²)."""
    b, k = horizon.steps_per_epoch, horizon.epochs
    if lam == 0.0:
        return math.sqrt(k)
    rate = math.log(lam)
    geometric = np.expm1(rate * b * np.arange(1, k + 1)) / math.expm1(rate * b)
    return math.sqrt(math.expm1(2 * rate * b) / math.expm1(2 * rate) * float(geometric @ geometric))


def closed_form_errors(lam: float, n: int) -> tuple[float, float]:
    """((1/√n)‖AC⁻¹‖_F, ‖AC⁻¹‖_{2→∞}) of plain λCGD for prefix sums."""
    growth = (1 - lam) ** 2 * (n - 1)
    return math.sqrt(1 + growth / 2), math.sqrt(1 + growth)
