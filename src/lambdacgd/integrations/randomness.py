"""Training's random numbers (dropout), apart from those that evaluation, workers and callbacks draw in between.

A resumed run does not evaluate again what the broken one evaluated after its last checkpoint. For both to end with the
same bits, training goes on with the generators as its own last step left them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lambdacgd.training.checkpoint import generators, set_generators


class TrainingRandomness:
    """``state`` is that of all generators after the last training step, None before the first."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None

    def keep(self) -> None:
        """Go on from the generators as they are now: a checkpoint has just been loaded."""
        self.state = generators()

    def put_back(self) -> None:
        """The generators as training left them: a checkpoint is about to be saved."""
        if self.state is not None:
            set_generators(self.state)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One training step's computations."""
        self.put_back()
        yield
        self.keep()
