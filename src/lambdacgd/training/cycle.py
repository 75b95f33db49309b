"""Where a run stands: which step, how much of its logical batch has been handed out, and what may happen next.

No tensors here, only the rules. A logical batch is handed out in one or more physical batches; each must see exactly
one backward pass; when all have, the optimizer acts once. Whatever goes wrong before that, the step can be done again:
nothing was released.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from lambdacgd.training.errors import TrainingError


class Phase(Enum):
    IDLE = "between two logical steps"
    GATHERING = "within a logical batch"
    WHOLE = "a whole logical batch, waiting for optimizer.step()"
    NOISED = "gradients noised, the optimizer has not finished"


@dataclass
class Cycle:
    """``done`` steps of ``steps`` are behind us. ``counted()`` says how many examples the clipper has seen since."""

    steps: int
    counted: Callable[[], int]
    done: int = 0
    phase: Phase = Phase.IDLE
    handed_out: int = 0
    before_last: int = 0

    @property
    def current(self) -> int:
        """The step under way or next, from 1."""
        return self.done + 1

    def before_batch(self) -> None:
        """May the next physical batch be handed out?"""
        if self.phase is Phase.WHOLE:
            self._check_backward()
            raise TrainingError(
                f"the batch of step {self.current} is whole, but optimizer.step() was not called before the next "
                "batch. Call it once after backward(), for every batch that the loader yields; it acts when the "
                "logical batch is whole"
            )
        self.refuse_half_done()
        if self.phase is Phase.GATHERING:
            self._check_backward()

    def batch(self, step: int, examples: int, *, last: bool) -> None:
        """A physical batch was handed out."""
        if step != self.current:
            raise TrainingError(f"a batch of step {step} was handed out, but step {self.current} is next")
        if self.phase is Phase.IDLE:
            self.handed_out = 0
        self.before_last, self.handed_out = self.handed_out, self.handed_out + examples
        self.phase = Phase.WHOLE if last else Phase.GATHERING

    def may_act(self) -> bool:
        """``optimizer.step()`` was called: whether the logical batch is whole (False: do nothing yet)."""
        if self.phase is Phase.IDLE:
            if self.done == self.steps:
                raise TrainingError(
                    f"all {self.steps} steps of the plan are done. The horizon is fixed: more steps need a new plan"
                )
            what = f"step {self.done} is done" if self.done else "no batch was taken"
            raise TrainingError(
                f"optimizer.step() was called without a new batch from private.loader ({what}); the same gradients "
                "are never used twice. Call it once for every batch"
            )
        if self.phase is not Phase.NOISED:
            self._check_backward()
        return self.phase in (Phase.WHOLE, Phase.NOISED)

    def acted(self) -> None:
        """The optimizer has changed the weights."""
        self.done, self.phase = self.done + 1, Phase.IDLE

    def drop(self) -> None:
        """Forget the logical batch under way: it will be handed out again."""
        self.refuse_half_done()
        self.phase = Phase.IDLE

    @property
    def schedulers_act(self) -> bool:
        """Learning-rate schedulers count logical steps, so they rest while a logical batch is being gathered."""
        return self.phase is not Phase.GATHERING

    def refuse_half_done(self) -> None:
        if self.phase is Phase.NOISED:
            raise TrainingError(
                f"the optimizer failed in the middle of step {self.current}: the weights may be half updated, and "
                "the same noise must not serve another sum. Call optimizer.step() again if the cause is gone, or "
                "resume from a checkpoint"
            )

    def _check_backward(self) -> None:
        seen = self.counted()
        if seen == self.handed_out:
            return
        size = self.handed_out - self.before_last
        if seen == self.before_last:
            raise TrainingError(
                f"backward() was not called on the last physical batch ({size} examples). Every batch of the loader "
                "needs one forward pass of the model and one backward()"
            )
        if seen > self.handed_out and (seen - self.before_last) % size == 0:
            raise TrainingError(
                f"backward() was called {(seen - self.before_last) // size} times on one physical batch: its "
                "examples would count as often. Add the losses up and call backward() once. The batch was dropped; "
                "the loader yields it again"
            )
        raise TrainingError(
            f"the backward passes covered {seen - self.before_last} rows for a batch of {size} examples. One item of "
            "the dataset is one example and must be one row of the model's input: check collate_fn, and leave out "
            "other data's losses"
        )
