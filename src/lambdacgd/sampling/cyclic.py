"""Cyclic sampling: a fixed order, repeated in every epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np

from lambdacgd.errors import InvalidInput, integer
from lambdacgd.keys import SecretKey, prf64
from lambdacgd.sampling.base import DEFAULT_RUN, Indices, Sampling


@dataclass(frozen=True)
class Cyclic(Sampling):
    """A fixed keyed permutation: position p is in step ⌊p/B⌋ of every epoch; the last N − b·B examples are dropped.

    Args:
        batch_size: B, the size of every batch; 0 takes the batch size that the plan is asked for.
        examples: N; see ``Sampling``, as for the other two.
        steps_per_epoch: b.
        epochs: k.

    Raises:
        InvalidInput: a number cannot be used, or b batches of B take more than N examples.

    Guarantee
    ---------
    Every example takes part at most once an epoch, always in the same place: exactly cyclic participation. No
    amplification is claimed, so nothing rests on the order being secret or uniform.
    """

    batch_size: int = field(default=0, kw_only=True)
    name: ClassVar[str] = "cyclic"

    def __post_init__(self) -> None:
        super().__post_init__()
        smallest = 1 if self.bound else 0
        object.__setattr__(self, "batch_size", integer("batch_size", self.batch_size, minimum=smallest))
        if self.steps_per_epoch * self.batch_size > self.examples:
            raise InvalidInput(
                "batch_size",
                self.batch_size,
                f"{self.steps_per_epoch} steps of {self.batch_size} need {self.steps_per_epoch * self.batch_size} "
                f"examples and there are {self.examples}; use at most {self.examples // self.steps_per_epoch} or fewer "
                "steps per epoch",
            )

    def bind(self, *, examples: int, steps_per_epoch: int, epochs: int, batch_size: int | None = None) -> Self:
        """Bind the sampling to a data set and a horizon; see ``Sampling.bind``.

        Args:
            examples: N, the number of training examples.
            steps_per_epoch: b, the steps of an epoch.
            epochs: k, the number of epochs.
            batch_size: B; not given, it is the sampling's own or else ⌊N/b⌋.
        """
        size = batch_size or self.batch_size or examples // steps_per_epoch
        return self._bound_to(examples=examples, steps_per_epoch=steps_per_epoch, epochs=epochs, batch_size=size)

    def order(self, key: SecretKey, *, run: str = DEFAULT_RUN) -> Indices:
        """The permutation of the N examples: sorted by 64 pseudorandom bits each, ties by index."""
        self._check_bound()
        words = prf64(key.derive("run", run, "order"), np.arange(self.examples))
        return np.argsort(words, kind="stable").astype(np.int64)

    def _batches(self, key: SecretKey, run: str, start_step: int) -> Iterator[Indices]:
        order = self.order(key, run=run)
        for step in range(start_step, self.steps + 1):
            place = (step - 1) % self.steps_per_epoch
            yield order[place * self.batch_size : (place + 1) * self.batch_size]
