"""Poisson sampling: every example tosses its own coin at every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lambdacgd.errors import integer
from lambdacgd.keys import SecretKey, prf64_range
from lambdacgd.sampling.base import DEFAULT_RUN, Indices, Sampling


@dataclass(frozen=True)
class Poisson(Sampling):
    """Each example takes part in each step with probability q = 1/b, independently of everything else.

    Guarantee
    ---------
    To anyone without the key all coins are independent (up to ChaCha20) and fall with probability ⌊2⁶⁴/b⌋/2⁶⁴: never
    above 1/b, and below it by less than 2⁻⁶⁴. Batches are never truncated or padded. The accountant for this
    sampling covers independent noise (DP-SGD) only.
    """

    name: ClassVar[str] = "poisson"

    @property
    def rate(self) -> float:
        """q = 1/b."""
        return 1.0 / self.steps_per_epoch

    def members(self, key: SecretKey, step: int, *, run: str = DEFAULT_RUN) -> Indices:
        """Draw the batch of one step: a pure function of key, run, step and example.

        Args:
            key: the secret key.
            step: 1 … n.
            run: the run's id.

        Returns:
            The indices of those who take part, in increasing order.

        Raises:
            InvalidInput: the step is beyond the horizon, or the sampling is not bound.
        """
        step = integer("step", step, maximum=self.steps, why=": the horizon is fixed")
        if self.steps_per_epoch == 1:
            return np.arange(self.examples)
        words = prf64_range(key.derive("run", run, "poisson", step), self.examples)
        return np.flatnonzero(words < np.uint64((1 << 64) // self.steps_per_epoch)).astype(np.int64)

    def _batches(self, key: SecretKey, run: str, start_step: int) -> Iterator[Indices]:
        for step in range(start_step, self.steps + 1):
            yield self.members(key, step, run=run)
