"""Cyclic sampling: a fixed order, repeated in every epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lambdacgd.keys import SecretKey, prf64
from lambdacgd.sampling.base import DEFAULT_RUN, Indices, Sampling
from lambdacgd.validation import InvalidInput, integer


@dataclass(frozen=True)
class Cyclic(Sampling):
    """A fixed keyed permutation: position p is in step ⌊p/B⌋ of every epoch; the last N − b·B examples are dropped.

    Guarantee
    ---------
    Every example takes part at most once an epoch, always in the same place: exactly cyclic participation. No
    amplification is claimed, so nothing rests on the order being secret or uniform.
    """

    batch_size: int
    name: ClassVar[str] = "cyclic"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "batch_size", integer("batch_size", self.batch_size))
        if self.steps_per_epoch * self.batch_size > self.examples:
            raise InvalidInput(
                "batch_size",
                self.batch_size,
                f"{self.steps_per_epoch} steps of {self.batch_size} need {self.steps_per_epoch * self.batch_size} "
                f"examples and there are {self.examples}; use at most {self.examples // self.steps_per_epoch} or fewer "
                "steps per epoch",
            )

    def order(self, key: SecretKey, *, run: str = DEFAULT_RUN) -> Indices:
        """The permutation of the N examples: sorted by 64 pseudorandom bits each, ties by index."""
        words = prf64(key.derive("run", run, "order"), np.arange(self.examples))
        return np.argsort(words, kind="stable").astype(np.int64)

    def _batches(self, key: SecretKey, run: str, start_step: int) -> Iterator[Indices]:
        order = self.order(key, run=run)
        for step in range(start_step, self.steps + 1):
            place = (step - 1) % self.steps_per_epoch
            yield order[place * self.batch_size : (place + 1) * self.batch_size]
