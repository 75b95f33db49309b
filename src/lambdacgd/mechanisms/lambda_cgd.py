"""DP-λCGD, the paper's mechanism, and DP-SGD, its special case λ = 0."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lambdacgd.mechanisms.base import Array, BandedInverse, Horizon, Mechanism
from lambdacgd.validation import InvalidInput, number


@dataclass(frozen=True)
class Identity(Mechanism):
    """Independent noise at every step: C = I. This is DP-SGD."""

    name: ClassVar[str] = "dp-sgd"

    def recurrence(self, n: int) -> BandedInverse:
        return BandedInverse((1.0,))


@dataclass(frozen=True)
class LambdaCGD(Mechanism):
    """Each step takes back a λ-fraction of the previous step's noise: C_ij = λ^{i−j}, C⁻¹ = (1, −λ).

    ``normalized`` divides every column of C by its norm d_t, so that the noise of step t is scaled by d_t.

    >>> LambdaCGD(0.9).noising(5)
    array([ 1. , -0.9])
    """

    lam: float
    normalized: bool = False
    name: ClassVar[str] = "lambda-cgd"

    def __post_init__(self) -> None:
        object.__setattr__(self, "lam", number("lam", self.lam, above=0, below=1, include=(0,)))
        if not isinstance(self.normalized, bool):
            raise InvalidInput("normalized", self.normalized, "it must be True or False")

    def recurrence(self, n: int) -> BandedInverse:
        return BandedInverse((1.0, -self.lam))

    def column_scales(self, n: int) -> Array | None:
        if not self.normalized:
            return None
        if self.lam == 0.0:
            return np.ones(n)
        # d_t² = (1 − λ^{2(n−t+1)}) / (1 − λ²), through expm1 so that λ near 1 keeps its digits.
        rate = 2 * math.log(self.lam)
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
