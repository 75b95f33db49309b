"""What the noisy gradients are used for: A maps the sequence of gradients to the sequence of models."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from lambdacgd.errors import number


@dataclass(frozen=True)
class Workload:
    """SGD with momentum β and weight decay: A is Toeplitz with column Σ_{j≤i} α^{i−j} β^j.

    ``momentum`` is β in [0, 1); ``decay`` is α in (0, 1], what is left of a weight after one step (1 − lr·weight
    decay). The default is plain SGD, whose A is the prefix-sum matrix of ones.
    """

    momentum: float = 0.0
    decay: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "momentum", number("momentum", self.momentum, above=0, below=1, include=(0,)))
        object.__setattr__(self, "decay", number("decay", self.decay, above=0, below=1, include=(1,)))

    def column(self, n: int) -> NDArray[np.float64]:
        """First column of A (length n), the coefficients of 1 / ((1 − αx)(1 − βx))."""
        impulse = np.zeros(n)
        impulse[0] = 1.0
        return lfilter([1.0], [1.0, -(self.decay + self.momentum), self.decay * self.momentum], impulse)


PREFIX_SUM = Workload()
