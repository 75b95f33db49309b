"""What may happen when in the loop around a private step, and what must not: each refusal says what to do instead.

`Cycle` knows where the run stands, `Gradients` what stands in ``p.grad``, `Weights` whether something else has changed
the weights. None of them computes anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lambdacgd import torch_private
from lambdacgd.errors import TrainingError
from lambdacgd.training.distributed.models import fingerprint, is_sharded, local, reshard


class Phase(Enum):
    IDLE = "between two logical steps"
    GATHERING = "within a logical batch"
    WHOLE = "a whole logical batch, waiting for optimizer.step()"
    NOISED = "gradients noised, the optimizer has not finished"


@dataclass
class Cycle:
    """Where a run stands: which step, how much of its logical batch has been handed out, and what may happen next.

    A logical batch is handed out in one or more physical batches; each must see exactly one backward pass; when all
    have, the optimizer acts once. Whatever goes wrong before that, the step can be done again: nothing was released.

    Attributes:
        steps: The plan's steps.
        counted: Says how many examples the clipper has seen in this logical batch.
        done: Steps that are behind us.
        phase: What has happened in the step under way.
        handed_out: Examples of this logical batch that the loop has received.
        before_last: The same, without its last physical batch.
    """

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


class Gradients:
    """The gradients of the clipped parameters: None until a step is noised, ours until ``zero_grad()``."""

    def __init__(self, parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        self._clipped = {id(p) for p in parameters.values()}
        self._written: dict[str, tuple[Tensor, int]] = {}  # what a step put into p.grad, and how it then stood

    def check_parameters(self) -> None:
        """The optimizer still holds what it was privatized with, and nothing else that trains."""
        seen = 0
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                if id(p) in self._clipped:
                    seen += 1
                elif p.requires_grad or p.grad is not None:
                    raise TrainingError(
                        f"the optimizer holds a trainable parameter of shape {tuple(p.shape)} that is not clipped: "
                        "it was added or unfrozen after privatize. The layout is fixed for a run: detach, change the "
                        "model, privatize anew"
                    )
        if seen != len(self._clipped):
            raise TrainingError(
                f"the optimizer now holds {seen} of the {len(self._clipped)} parameters it was privatized with; they "
                "are fixed for a run"
            )

    def check_clear(self, done: int) -> None:
        """Nothing is left in ``p.grad`` from step ``done`` or from somebody else."""
        for name, p in self._parameters.items():
            if p.grad is None:
                continue
            tensor, version = self._written.get(name, (None, 0))
            # Several DTensors zeroed at once (foreach) count no change: then only their values tell.
            if p.grad is tensor and torch_private.version(p.grad) == version and bool(local(p.grad).any()):
                self.clear()
                raise TrainingError(
                    f"{name}.grad still holds the gradient of step {done}: call optimizer.zero_grad() after every step"
                )
            if p.grad is not tensor and bool(local(p.grad).any()):
                raise TrainingError(
                    f"{name}.grad was written by something other than this library; it would be lost, and it is not "
                    "private. Leave p.grad alone: clipped sums are kept elsewhere until optimizer.step()"
                )
            p.grad = None  # zero_grad(set_to_none=False): a zero gradient would still decay weights and move momentum
        self._written = {}

    def part(self) -> None:
        """The sums' memory, which gradients share, is about to be written: no gradient may share it any longer.

        One that ``zero_grad(set_to_none=False)`` has zeroed becomes None. One that was not zeroed becomes a copy, so
        that nobody changes sums by way of ``p.grad``.
        """
        for name, (tensor, version) in list(self._written.items()):
            p = self._parameters[name]
            if p.grad is tensor and torch_private.version(tensor) == version:
                p.grad = tensor.clone()
                self._written[name] = (p.grad, torch_private.version(p.grad))
            elif p.grad is tensor or p.grad is None:
                p.grad = None
                del self._written[name]

    def remember(self) -> None:
        """A step has written ``p.grad``: so it stands until ``zero_grad()``."""
        for name, p in self._parameters.items():
            assert p.grad is not None
            self._written[name] = (p.grad, torch_private.version(p.grad))

    def clear(self) -> None:
        """No gradient is left."""
        for p in self._parameters.values():
            p.grad = None
        self._written = {}


class Weights:
    """Whether anything but the run's own steps has changed the model's parameters.

    During a run torch's counters of in-place changes tell, which cost nothing to read. They do not see writes by way
    of ``p.data``. When the run ends, two numbers computed from all trained weights take their place.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._known = {id(p) for p in model.parameters()}
        self._sharded = any(map(is_sharded, self._trained))
        self._fingerprint: tuple[int, int] | None = None  # from when the run has ended
        self._ended_changed = False  # whether the weights had been changed when it ended
        self._versions = self._read()

    def settle(self) -> None:
        """The weights are what a step of the run, or loading its checkpoint, made them."""
        self._versions = self._read()

    def changed(self) -> bool:
        """Whether something wrote to a parameter since ``settle``."""
        if self._ended_changed or self._read() != self._versions:
            return True
        return self._fingerprint is not None and self._fingerprint != self._computed()

    @contextlib.contextmanager
    def exchanged(self) -> Iterator[Callable[[], None]]:
        """A block that puts other weights of the run into the model, and the own ones back at its end.

        It is given a function to call when the others are in place: they too are watched.
        """
        trained, frozen = self._versions
        before, changed = (self._fingerprint, self._ended_changed), self._ended_changed or self._read()[0] != trained

        def in_place() -> None:
            self._versions, self._ended_changed = (self._read()[0], frozen), False
            if self._fingerprint is not None:
                self._fingerprint = self._computed()

        try:
            yield in_place
        finally:
            self._fingerprint, self._ended_changed = before
            self._versions = (trained if changed else self._read()[0]), frozen

    def seal(self) -> None:
        """The run ends: from now on anybody may change the weights, by any means."""
        if self._fingerprint is None:
            self._ended_changed = self.changed()
            self._fingerprint = self._computed()
            self._versions = self._read()

    def check(self) -> None:
        """Raise unless the weights are those of the run's last step."""
        reshard(self._model)
        if not {id(p) for p in self._model.parameters()} <= self._known or self.changed():
            raise TrainingError(
                "these weights are not those of the run's last step: something else has changed them since, and the "
                "run's (ε, δ) may not be theirs. Export before changing them. If the change used no private data, save "
                "the weights yourself and keep the card of that export with them"
            )

    def _read(self) -> tuple[list[int], list[int]]:
        """The counters of the trained parameters, as long as they tell, and of the frozen ones."""
        return self._counted([] if self._fingerprint is not None else self._trained), self._counted(self._frozen)

    def _counted(self, parameters: list[nn.Parameter]) -> list[int]:
        return [torch_private.version(p) for p in (map(local, parameters) if self._sharded else parameters)]

    def _computed(self) -> tuple[int, int]:
        return fingerprint(local(p) for p in self._trained)


# --- GradScaler: refused with a sentence, instead of an assertion in torch ------------------------------------------

_ASKED = "_step_supports_amp_scaling"  # what GradScaler asks an optimizer that takes care of scales by itself
_GIVEN = ("grad_scale", "found_inf")  # what it then leaves on the optimizer before it calls step()


def announce(optimizer: Any) -> Callable[[], None]:
    """Have ``scaler.step(optimizer)`` come to ``optimizer.step()``, whose hook refuses it; returns the undoing.

    Before the step there are no gradients to look at, and GradScaler would fail on that without saying why.
    """
    had = vars(optimizer).get(_ASKED)
    setattr(optimizer, _ASKED, True)

    def undo() -> None:
        if had is None:
            vars(optimizer).pop(_ASKED, None)
        else:
            setattr(optimizer, _ASKED, had)

    return undo


def refuse_scaler(optimizer: Optimizer, drop_batch: Callable[[], None]) -> None:
    """An error if GradScaler is calling. The losses of this batch were scaled, so its sums are not what was meant."""
    if not any(name in vars(optimizer) for name in _GIVEN):
        return
    for name in _GIVEN:
        vars(optimizer).pop(name, None)
    drop_batch()
    raise TrainingError(
        "GradScaler does not fit: it looks at gradients before they are noised, and its scale would change what is "
        "clipped. Use torch.autocast with bfloat16, which needs no scaler, or GradScaler(enabled=False), and call "
        "loss.backward() and optimizer.step(). The batch was dropped; the loader yields it again"
    )
