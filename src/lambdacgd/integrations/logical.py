"""Logical steps for loops that count batches: one item of the loader is one whole logical batch.

Trainers of other libraries take one optimizer step, one scheduler step and one tick of every counter per item that
their loader yields. So the loader yields logical batches, and the physical ones are read inside the training step.
Evaluation, checkpoints and callbacks then always fall between logical steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lambdacgd.training import Private, TrainingError
from lambdacgd.training.guards import Phase


class LogicalBatch:
    """The physical batches of one logical step, read when they are asked for, once."""

    def __init__(self, private: Private, data: Iterator[Any]) -> None:
        self._private, self._data, self._used = private, data, False

    def parts(self) -> Iterator[tuple[Any, bool]]:
        """Every physical batch, and whether it is the last: then ``optimizer.step()`` acts."""
        if self._used:
            raise TrainingError(
                "the examples of this logical step were already read once; every example takes part once a step"
            )
        self._used, last = True, False
        while not last:
            part = next(self._data)
            last = self._private.cycle.phase is Phase.WHOLE
            yield part, last


class LogicalLoader:
    """The plan's logical batches, an epoch an iteration, from where the run stands."""

    def __init__(self, private: Private) -> None:
        self.private, self.dataset = private, private.dataset

    def __len__(self) -> int:
        """Logical steps in an epoch."""
        return self.private.plan.steps_per_epoch

    def __iter__(self) -> Iterator[LogicalBatch]:
        private = self.private
        if private.finished:
            return
        end = (private.steps_taken // len(self) + 1) * len(self)
        data = private.loader.until(end)
        while private.steps_taken < end:
            yield LogicalBatch(private, data)
