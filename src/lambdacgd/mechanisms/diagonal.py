"""The optimal diagonal factorisation of full-batch training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lambdacgd.mechanisms.base import Array, BandedInverse, Mechanism


@dataclass(frozen=True)
class Diagonal(Mechanism):
    """C = diag(n^¼, (n−1)^¼, …, 1): independent noise that grows over the run.

    Among diagonal C it has the least RMSE when every example takes part in every step (b = 1, k = n), namely
    (1/√n) Σ_j √j, against √(n(n+1)/2) for DP-SGD and the lower bound √((n+1)(2n+1)/6).
    """

    name: ClassVar[str] = "diagonal"

    def recurrence(self, n: int) -> BandedInverse:
        return BandedInverse((1.0,))

    def column_scales(self, n: int) -> Array:
        return np.arange(n, 0, -1, dtype=np.float64) ** -0.25
