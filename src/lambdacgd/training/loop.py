"""The user's loop around a private step: what its batches, backward passes and ``optimizer.step()`` set going.

The loop stays the user's own. This class stands behind the hooks on the optimizer and on the clipper, holds what
belongs to the run while it goes on, and calls `step.PrivateStep` once for every whole logical batch.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lambdacgd.clipping import Clipper
from lambdacgd.errors import TrainingError
from lambdacgd.training.card import History
from lambdacgd.training.distributed.agreement import compare_weights
from lambdacgd.training.distributed.models import check_not_sharded_since, fsdp_modules, local
from lambdacgd.training.distributed.reduction import ShardedTotals
from lambdacgd.training.distributed.world import World
from lambdacgd.training.ema import EMA
from lambdacgd.training.guards import Cycle, Gradients, Phase, Weights, announce, refuse_scaler
from lambdacgd.training.step import PrivateStep

_ALONE = (
    "a step failed on this rank, and other ranks may have gone on: none goes on alone. Stop the job and resume all "
    "ranks from the newest checkpoint"
)
_LOADED_BY_HAND = (
    "optimizer.load_state_dict() was called on the optimizer of a private run, with the state of another moment. A run "
    "is resumed by private.load(path) or private.resume(path), which go on with its noise and batches and ask its "
    "ledger. State loaded by hand (or by accelerator.load_state) would be a new run behind the old one's weights, "
    "which costs its own (ε, δ). If that is meant, load before privatize"
)
_HALF_LOADED = (
    "loading a checkpoint failed half-way, so the weights may be of two moments, and this run is already the "
    "checkpoint's. Call detach(), build the model and the optimizer anew, privatize, and load again"
)


class Loop:
    """A run under way: its position, its gradients and weights, and what is called around its steps.

    Attributes:
        cycle: The position, and what may happen next.
        gradients: What stands in ``p.grad``.
        history: What the weights went through besides this run's steps.
        averages: Running averages of the weights.
        after_step: Called after every logical step.
        when_moved: Called where the position has changed in another way than by the loader's next batch.
        resting: Whether the hooks do nothing, because a step is being captured that does all of it by itself.
        broken: Why this run must not go on in this process; None if it may.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        clipper: Clipper,
        step: PrivateStep,
        *,
        world: World,
        shards: ShardedTotals | None,
        history: History,
    ) -> None:
        self.model, self.optimizer, self.clipper, self.step = model, optimizer, clipper, step
        self.world, self.shards, self.history = world, shards, history
        self.cycle = Cycle(step.plan.steps, lambda: clipper.norms.numel())
        self.gradients = Gradients(clipper.parameters, optimizer)
        self.weights = Weights(model)
        self.averages: list[EMA] = []
        self.after_step: list[Callable[[], None]] = []
        self.when_moved: list[Callable[[], None]] = []
        self.resting = False
        self.broken: str | None = None
        self._compares = world.many  # weights, at the end of an epoch
        self._steps_per_epoch = step.plan.steps_per_epoch
        self._norms: list[Tensor] = []  # of the examples since the epoch began, to look for what is not finite
        self._sharded_modules = len(fsdp_modules(model))
        self._loading = False
        self.attached = True
        clipper.call_before_adding(self._before_adding)
        self._undo = [
            optimizer.register_step_pre_hook(self._before_step).remove,
            optimizer.register_step_post_hook(self._after_step).remove,
            optimizer.register_load_state_dict_pre_hook(self._before_load).remove,
            announce(optimizer),
        ]

    def detach(self) -> None:
        """Take the hooks away. A logical batch under way is dropped."""
        self.attached = False
        self.weights.seal()
        self.moved()
        for undo in reversed(self._undo):
            undo()
        self.gradients.clear()
        self.step.forget()

    # --- may the run go on? ------------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise where this run has ended in this process: detached, or weights that are not those of a step."""
        if not self.attached:
            raise TrainingError("this run was detached; call privatize again (and load a checkpoint to go on)")
        self.check_whole()

    def check_whole(self) -> None:
        """Refuse weights that are not those of a step, on this rank or on others."""
        if self.shards is not None and self.shards.failed and self.world.many:
            raise TrainingError(_ALONE)
        if self.broken is not None:
            raise TrainingError(self.broken)

    def check_weights(self) -> None:
        """Raise unless the model holds the weights of the run's last step, or an average of the run's weights."""
        self.weights.check()

    # --- batches -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A loop over the loader begins. A logical batch under way starts again."""
        self.check_usable()
        self.drop_batch()
        check_not_sharded_since(self.model, self._sharded_modules)

    def hand_out(self, step: int, examples: int, *, last: bool, empty: bool, least: int) -> None:
        """The loader gives the next physical batch to the user.

        Args:
            step: The step that it is part of.
            examples: How many examples it has.
            last: Whether the logical batch is whole with it.
            empty: Whether nobody takes part, so that its one example has weight zero.
            least: Examples that every rank has at least.
        """
        if self.cycle.phase is Phase.IDLE:
            self.clipper.zero()  # what a backward pass outside any batch left behind is not the plan's batch
        self.cycle.batch(step, examples, last=last)
        if self.shards is not None:
            self.shards.expect(step, last=last)
            self.clipper.allow_probe(least > 1)
        self.clipper.weigh(torch.zeros(1) if empty else None)

    def drop_batch(self) -> None:
        """Forget the logical batch under way. Nothing of it was released."""
        self.cycle.drop()
        self.clipper.zero()
        self.clipper.weigh(None)

    # --- the hooks ---------------------------------------------------------------------------------------------------

    def _before_adding(self) -> None:
        """A backward pass is about to write the buffers that p.grad shares with the clipper.

        Noised gradients that the optimizer has not finished with must not become sums without noise, and nobody may
        change sums by way of a gradient that was not set to None in time.
        """
        if not self.resting:
            self.cycle.refuse_half_done()
            self.gradients.part()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """``optimizer.step()`` was called: where the logical batch is whole, write its noised gradients."""
        if self.resting:
            return
        self.check_usable()
        if any(x is not None for x in args[1:]) or kwargs.get("closure") is not None:
            raise TrainingError(
                "optimizer.step(closure) runs the model again, which would use the batch twice. Call backward() and "
                "then optimizer.step() without a closure"
            )
        refuse_scaler(optimizer, self.drop_batch)
        self.gradients.check_parameters()
        if self.cycle.phase is Phase.NOISED:  # the optimizer failed half-way, and is called again
            return
        try:
            whole = self.cycle.may_act()
        except TrainingError:
            if self.cycle.phase is not Phase.IDLE and self.clipper.norms.numel() > self.cycle.handed_out:
                self.drop_batch()  # too many backward passes: the sums are spoilt, the loader yields the batch again
            raise
        self.gradients.check_clear(self.cycle.done)
        if whole:
            self.note_changes()
            self._look_at_norms()
            self._act()

    def _act(self) -> None:
        try:
            self.step(self.clipper, self.cycle.current)
        except BaseException:  # a sum that is not finite, Ctrl-C
            self.gradients.clear()
            self.drop_batch()  # the sums are spoilt; the loader yields the batch again
            self.broken = _ALONE if self.world.many else None
            raise
        self.gradients.remember()
        self.cycle.phase = Phase.NOISED

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.resting or self.cycle.phase is not Phase.NOISED:
            return
        self.acted()
        if self._compares and self.cycle.done % self._steps_per_epoch == 0:
            compare_weights(self.clipper.parameters, self.optimizer, self.cycle.done, self.world)
        for act in self.after_step:
            act()

    def acted(self) -> None:
        """The optimizer has changed the weights."""
        self.cycle.acted()
        self.weights.settle()

    def note_changes(self) -> None:
        """Before weights are used: the card will say it if something else has changed them since the last step.

        Before the first step only where their history was declared: else the card says that it is not known.
        """
        watched = self.cycle.done > 0 or self.history.declared
        if watched and not self.history.changed and self.weights.changed():
            self.history = replace(self.history, changed=True)

    def _look_at_norms(self) -> None:
        """Warn of examples without a finite gradient, which count for nothing. Looked at when an epoch begins, for a
        batch of nothing else, and when it ends: reading waits for the device.
        """
        place = self.cycle.done % self._steps_per_epoch
        if place == 0:
            self._norms.clear()
        self._norms.append(self.clipper.norms)
        if place == 0 and self.clipper.dropped >= self.cycle.handed_out > 0:
            warnings.warn(
                f"no example of step {self.cycle.current} has a finite gradient, so it adds noise and nothing else. "
                "Look for NaN and infinities in the data, the loss and the learning rate (steps are looked at once an "
                "epoch)",
                stacklevel=4,
            )
        if place == self._steps_per_epoch - 1:
            missing = int((~torch.cat(self._norms).isfinite()).sum())
            self._norms.clear()
            if missing:
                warnings.warn(
                    f"{missing} example(s) of the epoch that ends with step {self.cycle.current} had no finite "
                    "gradient and counted for nothing. Look for NaN and infinities in the data and the loss",
                    stacklevel=4,
                )

    # --- a resumed run -----------------------------------------------------------------------------------------------

    def stand_at(self, step: int) -> None:
        """Set the position of a resumed run. Only loading leads back: noise that was added serves no other sum."""
        forwards = step >= self.cycle.done and self.cycle.phase is Phase.IDLE
        if not forwards and not self._loading:
            raise TrainingError(
                f"the run stands after step {self.cycle.done}, and other sums would get the noise of steps it has "
                "taken or begun; only a checkpoint leads back: private.load(path)"
            )
        self.cycle.done, self.cycle.phase = step, Phase.IDLE
        self.drop_batch()
        self.gradients.clear()
        self.step.forget()
        self.moved()

    def moved(self) -> None:
        """Whoever reads ahead begins anew at the current step."""
        for act in self.when_moved:
            act()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """The optimizer's state may be loaded in this block, and the run go back: the ledger has been asked."""
        self._loading = True
        try:
            yield
        finally:
            self._loading = False
            self.weights.settle()

    @contextlib.contextmanager
    def going_on_from(self, step: int) -> Iterator[None]:
        """Restore weights and the rest in this block, once the run is that of the checkpoint.

        The position comes first: if the block fails and somebody goes on all the same, no step that was released is
        done again under its noise. And nobody goes on.
        """
        with self.loading():
            self.stand_at(step)
            self.broken = _HALF_LOADED
            yield
        self.broken = None

    def _before_load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Loading its own state again is nobody's harm: accelerate does so to move it to a device."""
        own = optimizer.state_dict()["state"]
        if not self._loading and state.get("state") and not _same(state["state"], own):
            raise TrainingError(_LOADED_BY_HAND)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(torch.equal(local(a).to(local(b).device), local(b)))
    return type(a) is type(b) and bool(a == b)
