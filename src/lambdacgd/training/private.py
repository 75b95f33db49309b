"""`Private`: a plan bound to a model, an optimizer and a dataset."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lambdacgd.clipping import Clipper
from lambdacgd.noise import Layout, NonFiniteSum
from lambdacgd.planning import Plan
from lambdacgd.training import checkpoint
from lambdacgd.training.captured import CapturedStep
from lambdacgd.training.card import History, Spent, card, epsilon_after_epochs
from lambdacgd.training.cycle import Cycle, Phase
from lambdacgd.training.distributed.compare import compare_weights
from lambdacgd.training.distributed.reduction import all_reduce_
from lambdacgd.training.distributed.sharded import ShardedTotals
from lambdacgd.training.distributed.shards import fsdp_modules, is_sharded, local
from lambdacgd.training.distributed.world import World
from lambdacgd.training.distributed.wrapping import check_not_sharded_since
from lambdacgd.training.ema import EMA
from lambdacgd.training.errors import TrainingError, warn_of_noise_alone
from lambdacgd.training.gradients import Gradients
from lambdacgd.training.guards import Weights
from lambdacgd.training.loader import Chunk, Epoch, Loader
from lambdacgd.training.run import Run
from lambdacgd.training.sample import Sample
from lambdacgd.training.scaler import announce, refuse_scaler
from lambdacgd.training.stage import NoiseStage, noise_stage

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


class Private:
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
        history: History,
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
        self.history = history
        self._weights = Weights(model)
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

    def card(self) -> dict[str, Any]:
        """The privacy card of the weights that the model holds now: what ``lc.export`` writes beside them.

        Returns:
            Public facts, as JSON can hold them.

        Raises:
            TrainingError: Something other than the run has changed the weights since its last step.
        """
        self.check_weights()
        return card(
            self.plan,
            self.history,
            steps_taken=self.steps_taken,
            max_grad_norm=self.max_grad_norm,
            clipping=self.clipper.mode,
            augmentations=self.augmentations,
        )

    def check_weights(self) -> None:
        """Raise unless the model holds the weights of the run's last step, or an average of the run's weights."""
        if not any(average.in_use for average in self.averages):
            self._weights.check()

    def adopt(self, saved: dict[str, Any]) -> None:
        """The weights are a checkpoint's now: what they went through besides is what it says (``history.to_dict()``).

        Raises:
            CheckpointError: This run was declared to begin with other runs' weights than the checkpoint's.
        """
        self.history = self.history.resumed(History.from_dict(saved))

    @property
    def between_steps(self) -> bool:
        """Whether no logical batch is under way.

        Then, and only then, a checkpoint can be saved. Schedulers that count logical steps act then, too:
        ``if private.between_steps: scheduler.step()``.
        """
        return self.cycle.phase is Phase.IDLE

    # --- what goes along with a run ----------------------------------------------------------------------------------

    def ema(self, decay: float) -> EMA:
        """An average of the weights, updated after every logical step and part of checkpoints. Costs no privacy."""
        average = EMA(self.model, decay, put_back=self._weights.put_back)
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

    # --- saving and going on -----------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, extra: dict[str, Any] | None = None, frozen: bool = True) -> None:
        """Write a checkpoint, whole or not at all, and enter it in the ledger.

        ``extra`` is anything of yours made of tensors, numbers, strings, lists and dicts (a scheduler's
        ``state_dict()``). ``frozen=False`` leaves frozen parameters out, for small checkpoints of adapters: the model
        that loads it brings them. Where ``torch.distributed`` is initialised, ``path`` becomes a folder that any number
        of processes can go on from, and every rank must call this.
        """
        checkpoint.save(self, path, extra, frozen=frozen)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Go on from a checkpoint, which must be the run's newest release. Returns what was given as ``extra``."""
        return checkpoint.load(self, path)

    def resume(self, path: str | os.PathLike[str]) -> dict[str, Any] | None:
        """``load`` if there is a checkpoint at ``path``, else None: for jobs that may be started again at any time."""
        found = self.world.from_first("looking for a checkpoint", lambda: checkpoint.exists(self, path))
        return self.load(path) if found else None

    # --- the position of a resumed run -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def going_on_from(self, step: int) -> Iterator[None]:
        """Restore weights and the rest in this block, once the run is that of the checkpoint.

        The position comes first: if the block fails and somebody goes on all the same, no step that was released is
        done again under its noise. And nobody goes on.
        """
        with self.loading():
            self.stand_at(step)
            self._broken = _HALF_LOADED
            yield
        self._broken = None

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """The optimizer's state may be loaded in this block, and the run go back: the ledger has been asked."""
        self._loading = True
        try:
            yield
        finally:
            self._loading = False
            self._weights.settle()

    def _before_load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Loading its own state again is nobody's harm: accelerate does so to move it to a device."""
        own = optimizer.state_dict()["state"]
        if not self._loading and state.get("state") and not _same(state["state"], own):
            raise TrainingError(_LOADED_BY_HAND)

    def stand_at(self, step: int) -> None:
        """Set the position of a resumed run. Only loading leads back: noise that was added serves no other sum."""
        forwards = step >= self.cycle.done and self.cycle.phase is Phase.IDLE
        if not forwards and not self._loading:
            raise TrainingError(
                f"the run stands after step {self.cycle.done}, and other sums would get the noise of steps it has "
                "taken or begun; only a checkpoint leads back: private.load(path)"
            )
        self.cycle.done = step
        self.cycle.phase = Phase.IDLE
        self.drop_batch()
        self.loader.restart()
        self.gradients.clear()
        self._stage = None

    # --- the way back ------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Give back a plain model and optimizer. A logical batch under way is dropped."""
        if not self._attached:
            return
        self._attached = False
        self._weights.seal()
        self.loader.restart()
        for undo in reversed(self._undo):
            undo()
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
        """Before the first batch of a loop."""
        check_not_sharded_since(self.model, self._sharded_modules)

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
                self.note_changes()
                if self.cycle.done % self.plan.steps_per_epoch == 0:  # now and then: it waits for the device
                    warn_of_noise_alone(self.clipper.dropped, self.cycle.handed_out, self.cycle.current)
                self._write_gradients()

    def note_changes(self) -> None:
        """Before a step: the card will say it if something else has changed the weights since the step before."""
        if not self.history.changed and self._weights.changed():
            self.history = replace(self.history, changed=True)

    def weights_settled(self) -> None:
        """The weights are what a step of this run made them."""
        self._weights.settle()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.hooks_rest or self.cycle.phase is not Phase.NOISED:
            return
        self.cycle.acted()
        self._weights.settle()
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


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(torch.equal(local(a).to(local(b).device), local(b)))
    return type(a) is type(b) and bool(a == b)
