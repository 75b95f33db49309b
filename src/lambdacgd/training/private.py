"""`Private`: a plan bound to a model, an optimizer and a dataset."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lambdacgd.clipping import Clipper
from lambdacgd.noise import Layout, NonFiniteSum
from lambdacgd.planning import Plan
from lambdacgd.training import schedulers
from lambdacgd.training.captured import CapturedStep
from lambdacgd.training.cycle import Cycle, Phase
from lambdacgd.training.distributed.compare import compare_weights
from lambdacgd.training.distributed.reduction import all_reduce_
from lambdacgd.training.distributed.sharded import ShardedTotals
from lambdacgd.training.distributed.shards import fsdp_modules, is_sharded
from lambdacgd.training.distributed.world import World
from lambdacgd.training.distributed.wrapping import check_not_sharded_since
from lambdacgd.training.ema import EMA
from lambdacgd.training.errors import TrainingError, warn_of_noise_alone
from lambdacgd.training.gradients import Gradients
from lambdacgd.training.loader import Chunk, Epoch, Loader
from lambdacgd.training.resuming import Resuming
from lambdacgd.training.run import Run
from lambdacgd.training.sample import Sample
from lambdacgd.training.scaler import announce, refuse_scaler
from lambdacgd.training.spent import Spent, epsilon_after_epochs
from lambdacgd.training.stage import NoiseStage, noise_stage
from lambdacgd.training.trained import ATTACHED, Trained, remember
from lambdacgd.validation import InvalidInput

_ALONE = (
    "a step failed on this rank, and other ranks may have gone on: none goes on alone. Stop the job and resume all "
    "ranks from the newest checkpoint"
)


class Private(Resuming):
    """What ``privatize`` returns: the loader, the position in the run, and the way back to a plain model.

    Guarantee
    ---------
    Under the plan's conditions the weights after any number of steps are (ε, δ)-DP for zero-out of one example: every
    ``optimizer.step()`` that acts uses Σ_i clip(g_i, ζ) of the plan's own batch plus the plan's noise at ζσ, divided
    by ``plan.batch_size``, added exactly once; clipping leaves room for its own rounding, so no contribution exceeds
    ζ. The optimizer only post-processes. Losses, norms and batch sizes seen on the way are not private.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Any,
        plan: Plan,
        *,
        max_grad_norm: float,
        clipper: Clipper,
        run: Run,
        views: int,
        max_physical_batch_size: int | None,
        data_fingerprint: str | None,
        loader_options: dict[str, Any],
        undo: list[Callable[[], None]],
        world: World,
        reduce_every_batch: bool = False,
    ) -> None:
        self.world = world
        self._broken: str | None = None  # why this run must not go on in this process
        self._loading = False
        self.model, self.optimizer, self.dataset, self._plan = model, optimizer, dataset, plan
        self._max_grad_norm, self.clipper, self.run, self.augmentations = max_grad_norm, clipper, run, views
        self.data_fingerprint = data_fingerprint
        # With several ranks this process has read a few already, to compare them.
        readable = data_fingerprint is None and (world.many or not loader_options.get("num_workers"))
        self.sample = Sample(dataset, plan.examples, readable=readable)
        self.max_physical_batch_size = max_physical_batch_size
        self.layout = Layout.of({name: tuple(p.shape) for name, p in clipper.parameters.items()})
        self._sharded_modules = len(fsdp_modules(model))
        self.shards: ShardedTotals | None = None
        if any(is_sharded(p) for p in clipper.parameters.values()):
            self.shards = ShardedTotals(model, clipper.parameters, world, reduce_every_batch=reduce_every_batch)
            clipper.keep_sums_in(self.shards)
            clipper.may_probe = False  # until a batch of which every rank has two examples
        self.cycle = Cycle(plan.steps, lambda: clipper.norms.numel())
        self.loader = Loader(self, max_physical_batch_size=max_physical_batch_size, views=views, options=loader_options)
        self.averages: list[EMA] = []
        self.after_step: list[Callable[[], None]] = []
        self.trained = Trained(
            plan, run, max_grad_norm, clipper.mode, views, world=world, optimizer=weakref.ref(optimizer)
        )
        remember(model, self.trained)
        ATTACHED.add(model)
        self.gradients = Gradients(clipper.parameters, optimizer)
        self._stage: NoiseStage | None = None
        self.hooks_rest = False  # while a step is captured, which does all of it by itself
        clipper.before_adding = self._before_adding
        self._undo = [*undo, run.close]
        self._undo.append(optimizer.register_step_pre_hook(self._before_step).remove)
        self._undo.append(optimizer.register_step_post_hook(self._after_step).remove)
        self._undo.append(optimizer.register_load_state_dict_pre_hook(self._before_load).remove)
        self._undo.append(announce(optimizer))
        self._attached = True

    @property
    def plan(self) -> Plan:
        """What is trained by: fixed for a run."""
        return self._plan

    @property
    def max_grad_norm(self) -> float:
        """ζ, fixed for a run."""
        return self._max_grad_norm

    # --- where the run stands ----------------------------------------------------------------------------------------

    @property
    def steps_taken(self) -> int:
        """Logical steps done, of ``plan.steps``."""
        return self.cycle.done

    @property
    def finished(self) -> bool:
        """Whether all steps of the plan are done."""
        return self.cycle.done >= self.plan.steps

    def epochs(self) -> Iterator[Epoch]:
        """The rest of the run, epoch by epoch: ``for epoch in private.epochs(): for batch in epoch: …``."""
        self.check_usable()
        try:
            while not self.finished:
                done = self.cycle.done
                epoch = self.loader.untouched = Epoch(self, done // self.plan.steps_per_epoch + 1)
                yield epoch
                if self.loader.untouched is epoch and self.cycle.done == done:  # it would come again, for ever
                    raise TrainingError(
                        f"epoch {epoch.number} was passed over: its batches were not asked for. Epochs cannot be "
                        "skipped (private.load goes to where a run stopped): for batch in epoch: …"
                    )
        finally:
            self.loader.untouched = None

    def spent(self, *, after_epochs: bool = False) -> Spent:
        """The plan's (ε, δ) with its certificate, and the share of steps taken.

        ``after_epochs=True`` also computes the ε of runs planned over fewer epochs, for information only: stopping
        early keeps the plan's claim.
        """
        plan = self.plan
        informational = epsilon_after_epochs(plan) if after_epochs else None
        return Spent(plan.epsilon, plan.delta, plan.certificate, self.steps_taken, plan.steps, informational)

    @property
    def between_steps(self) -> bool:
        """Whether no logical batch is under way: then, and only then, a checkpoint can be saved."""
        return self.cycle.phase is Phase.IDLE

    # --- what goes along with a run ----------------------------------------------------------------------------------

    def ema(self, decay: float) -> EMA:
        """An average of the weights, updated after every logical step and part of checkpoints. Costs no privacy."""
        average = EMA(self.model, decay)
        self.averages.append(average)
        self.after_step.append(average.update)
        return average

    def captured_step(
        self, loss: Callable[..., Tensor], data: Sequence[Tensor], *, padded: int | None = None
    ) -> CapturedStep:
        """A fast step for small models on CUDA: ``step = private.captured_step(loss, (x, y)); step.run()``.

        ``loss(model, *batch)`` computes the loss of a batch; ``data`` are the dataset's examples as CUDA tensors, in
        its order. Batches are padded to one of three widths, the largest of them ``padded`` (by default B + 3√B,
        rounded up), and split where larger.
        """
        if self.world.many or self.shards is not None:
            raise TrainingError("a captured step is for one process; with several, loop over private.loader")
        return CapturedStep(self, loss, data, padded)

    # --- schedulers, and the way back --------------------------------------------------------------------------------

    def attach(self, scheduler: LRScheduler) -> None:
        """Let a scheduler made inside the loop rest between physical batches; earlier ones are found anyway."""
        if scheduler.optimizer is not self.optimizer:
            raise InvalidInput(
                "scheduler", type(scheduler).__name__, "it must be a scheduler of the privatized optimizer"
            )
        self.check_usable()
        schedulers.watch(self.optimizer, lambda: self.cycle.schedulers_act)
        schedulers.attach(scheduler)

    def detach(self) -> None:
        """Give back a plain model and optimizer. A logical batch under way is dropped."""
        if not self._attached:
            return
        self._attached = False
        self.trained.optimizer = None
        ATTACHED.discard(self.model)
        self.loader.restart()
        for undo in reversed(self._undo):
            undo()
        schedulers.release(self.optimizer)
        self.gradients.clear()
        self._stage = None
        self.run.hand_over(self.steps_taken)

    # --- for the loader ----------------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise where this run has ended in this process: detached, or weights that are not those of a step."""
        if not self._attached:
            raise TrainingError("this run was detached; call privatize again (and load a checkpoint to go on)")
        self.check_whole()

    def check_whole(self) -> None:
        """Refuse weights that are not those of a step, on this rank or on others."""
        if self.shards is not None and self.shards.failed and self.world.many:
            raise TrainingError(_ALONE)
        if self._broken is not None:
            raise TrainingError(self._broken)

    def check_dataset(self) -> None:
        """Raise where the dataset is no longer the plan's."""
        if len(self.dataset) != self.plan.examples:
            raise TrainingError(
                f"the dataset now has {len(self.dataset)} examples and the plan {self.plan.examples}; it must not "
                "change mid-run"
            )

    def begin(self) -> None:
        """Before the first batch of a loop: schedulers that exist by now are known."""
        check_not_sharded_since(self.model, self._sharded_modules)
        if self.max_physical_batch_size is not None:
            schedulers.watch(self.optimizer, lambda: self.cycle.schedulers_act)

    def hand_out(self, chunk: Chunk) -> None:
        """The loader gives this physical batch to the loop next."""
        self.gradients.drop_zeroed()
        if self.cycle.phase is Phase.IDLE:
            self.clipper.zero()  # what a backward pass outside any batch left behind is not the plan's batch
        self.cycle.batch(chunk.step, len(chunk.indices), last=chunk.last)
        if self.shards is not None:
            self.shards.expect(chunk.step, last=chunk.last)
            self.clipper.may_probe = chunk.least > 1
        self.clipper.weigh(torch.zeros(1) if chunk.empty else None)

    def drop_batch(self) -> None:
        """Forget the logical batch under way. Nothing of it was released."""
        self.cycle.drop()
        self.clipper.zero()
        self.clipper.weigh(None)

    # --- around optimizer.step() -------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.hooks_rest:
            return
        self.check_usable()
        if any(x is not None for x in args[1:]) or kwargs.get("closure") is not None:
            raise TrainingError(
                "optimizer.step(closure) runs the model again, which would use the batch twice. Call backward() and "
                "then optimizer.step() without a closure"
            )
        refuse_scaler(optimizer, self.drop_batch)
        self.gradients.check_parameters()
        try:
            whole = self.cycle.may_act()
        except TrainingError:
            if (
                self.cycle.phase in (Phase.GATHERING, Phase.WHOLE)
                and self.clipper.norms.numel() > self.cycle.handed_out
            ):
                self.drop_batch()  # too many backward passes: the sums are spoilt, the loader yields the batch again
            raise
        if self.cycle.phase is not Phase.NOISED:
            self.gradients.check_clear(self.cycle.done)
            if whole:
                if self.cycle.done % self.plan.steps_per_epoch == 0:  # now and then: it waits for the device
                    warn_of_noise_alone(self.clipper.dropped, self.cycle.handed_out, self.cycle.current)
                self._write_gradients()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.hooks_rest or self.cycle.phase is not Phase.NOISED:
            return
        self.cycle.acted()
        self.trained.steps_taken = self.cycle.done
        if self.cycle.done % self.plan.steps_per_epoch == 0:
            compare_weights(self)
        for act in self.after_step:
            act()

    def _before_adding(self) -> None:
        """A backward pass is about to write the buffers that p.grad shares with the clipper.

        Noised gradients that the optimizer has not finished with must not become sums without noise, and nobody may
        change sums by way of a gradient that was not set to None in time.
        """
        if self.hooks_rest:
            return
        self.cycle.refuse_half_done()
        self.gradients.part()

    @torch.no_grad()
    def _write_gradients(self) -> None:
        step = self.cycle.current
        try:
            sums = self.clipper.take()
            if self.shards is None:
                all_reduce_(sums, step, self.world)
            self._add_noise(sums, step)
        except BaseException:  # a sum that is not finite, Ctrl-C
            self.drop_batch()  # the sums are spoilt; the loader yields the batch again
            self._broken = _ALONE if self.world.many else None
            raise
        torch._foreach_div_(list(sums.values()), self.plan.batch_size)
        self.gradients.write(sums)
        self.cycle.phase = Phase.NOISED

    def _add_noise(self, sums: dict[str, Tensor], step: int) -> None:
        if self.plan.sigma == 0:
            if not all(math.isfinite(float(total.sum())) for total in sums.values()):
                raise NonFiniteSum(
                    "a gradient sum holds a NaN or an infinity, so this step is refused. Look for overflow in the "
                    "loss or the model"
                )
            return
        if self._stage is None:
            self._stage = noise_stage(
                self.plan, self.run.key, run_id=self.run.id, layout=self.layout, max_grad_norm=self.max_grad_norm
            )
        self._stage.add_(sums, step, offsets=None if self.shards is None else self.shards.offsets)

    def __repr__(self) -> str:
        return f"<Private {self.plan.mechanism.name}, {self.spent()}>"
