"""`Private`: a plan bound to a model, an optimizer and a dataset."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lambdacgd.clipping import Clipper
from lambdacgd.errors import TrainingError
from lambdacgd.noise import Layout
from lambdacgd.planning import Plan
from lambdacgd.training import checkpoint
from lambdacgd.training.captured import CapturedStep
from lambdacgd.training.card import Card, History, Spent, card, epsilon_after_epochs
from lambdacgd.training.data import Sample
from lambdacgd.training.distributed.models import is_sharded
from lambdacgd.training.distributed.reduction import ShardedTotals
from lambdacgd.training.distributed.world import World
from lambdacgd.training.ema import EMA
from lambdacgd.training.loader import Epoch, Loader
from lambdacgd.training.loop import Loop, Phase
from lambdacgd.training.run import Run
from lambdacgd.training.step import PrivateStep, floating_point_of


class Private(Loop):
    """What ``privatize`` returns: the loader, the position in the run, and the way back to a plain model.

    Attributes:
        optimizer: The user's optimizer.
        dataset: The examples, by index.
        loader: Iterates the remaining batches of the run.
        after_step: Functions that are called after every logical step.

    The other attributes are for checkpoints and integrations of this package.

    Guarantee
    ---------
    Under the plan's conditions the weights after any number of steps are (ε, δ)-DP for zero-out of one example: every
    ``optimizer.step()`` that acts uses Σ_i clip(g_i, ζ) of the plan's own batch plus the plan's noise at ζσ, divided
    by ``plan.batch_size``, added exactly once; clipping leaves room for its own rounding, so no contribution exceeds
    ζ. It holds of the floating-point numbers that leave, whose cost is part of ε and δ (docs/noise-proof.md). The
    optimizer only post-processes. Losses, norms and batch sizes seen on the way are not private.
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
        layout = Layout.of({name: tuple(p.shape) for name, p in clipper.parameters.items()})
        shards: ShardedTotals | None = None
        if any(is_sharded(p) for p in clipper.parameters.values()):
            shards = ShardedTotals(model, clipper.parameters, world, reduce_every_batch=reduce_every_batch)
            clipper.keep_sums_in(shards)
            clipper.allow_probe(False)  # until a batch of which every rank has two examples
        step = PrivateStep(plan, run, layout, max_grad_norm=max_grad_norm, world=world, shards=shards)
        super().__init__(model, optimizer, clipper, step, world=world, shards=shards, history=history)
        self.dataset, self.run, self.layout = dataset, run, layout
        self.augmentations, self.data_fingerprint = views, data_fingerprint
        self.loss_checked = False  # whether anybody has seen that the loss adds examples up
        # With several ranks this process has read a few already, to compare them.
        readable = data_fingerprint is None and (world.many or not loader_options.get("num_workers"))
        self.sample = Sample(dataset, plan.examples, readable=readable)
        self.loader = Loader(
            self,
            dataset,
            max_physical_batch_size=max_physical_batch_size,
            views=views,
            options=loader_options,
        )
        self._undo = [*undo, run.close]

    # --- where the run stands ----------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """What is trained by: fixed for a run."""
        return self.private_step.plan

    @property
    def max_grad_norm(self) -> float:
        """ζ, fixed for a run."""
        return self.private_step.max_grad_norm

    @property
    def steps_taken(self) -> int:
        """Logical steps done, of ``plan.steps``."""
        return self.cycle.done

    @property
    def finished(self) -> bool:
        """Whether all steps of the plan are done."""
        return self.steps_taken >= self.plan.steps

    @property
    def between_steps(self) -> bool:
        """Whether no logical batch is under way.

        Then, and only then, a checkpoint can be saved. Schedulers that count logical steps act then, too:
        ``if private.between_steps: scheduler.step()``.
        """
        return self.cycle.phase is Phase.IDLE

    def epochs(self) -> Iterator[Epoch]:
        """The rest of the run, epoch by epoch: ``for epoch in private.epochs(): for batch in epoch: …``.

        Raises:
            TrainingError: An epoch was passed over without asking for its batches, or the run was detached.
        """
        return self.loader.epochs()

    def spent(self, *, after_epochs: bool = False) -> Spent:
        """The plan's (ε, δ) with its certificate, and the share of steps taken.

        Args:
            after_epochs: Also compute the ε of runs planned over fewer epochs. For information only: stopping early
                keeps the plan's claim.

        Returns:
            The claim of this run, which releasing its weights costs after any number of steps.
        """
        plan = self.plan
        informational = epsilon_after_epochs(plan) if after_epochs else None
        return Spent(
            plan.epsilon,
            plan.delta,
            plan.certificate,
            self.steps_taken,
            plan.steps,
            informational,
            key_for_tests=self.run.key.is_for_tests,
        )

    def card(self) -> Card:
        """The privacy card of the weights that the model holds now: what ``lc.export`` writes beside them.

        Returns:
            A dictionary of public facts, as JSON can hold them.

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
            loss_checked=self.loss_checked,
            floating_point=floating_point_of(self.plan, self.layout.elements),
            key_for_tests=self.run.key.is_for_tests,
        )

    def check_loss(
        self, loss: Callable[[nn.Module, Any], Tensor], items: Sequence[Any], collate: Callable[[list[Any]], Any]
    ) -> None:
        """See whether the training loss adds examples up as declared; the card then says that it was looked at.

        ``privatize(…, loss=loss)`` does it with examples of the dataset. Nothing is trained or added.

        Args:
            loss: ``loss(model, batch)``, the training loss of a batch as the loader gives it.
            items: A few examples as the dataset gives them.
            collate: What makes a batch of them.

        Raises:
            ClippingError: The loss of an example depends on others of its batch, or ``loss_reduction`` does not
                describe the loss.
        """
        self.clipper.check_loss(loss, items, collate)
        self.loss_checked = True

    # --- what goes along with a run ----------------------------------------------------------------------------------

    def ema(self, decay: float) -> EMA:
        """An average of the weights, updated after every logical step and part of checkpoints. Costs no privacy.

        Args:
            decay: β in [0, 1): the share of the average that a step keeps.

        Returns:
            The average. ``with average.applied():`` puts it into the model.
        """
        average = EMA(self.model, decay, exchanged=self.weights.exchanged, before_update=self.note_changes)
        self.averages.append(average)
        self.after_step.append(average.update)
        return average

    def captured_step(
        self, loss: Callable[..., Tensor], data: Sequence[Tensor], *, padded: int | None = None
    ) -> CapturedStep:
        """A fast step for small models on CUDA: ``step = private.captured_step(loss, (x, y)); step.run()``.

        Args:
            loss: ``loss(model, *batch)`` computes the loss of a batch.
            data: The dataset's examples as CUDA tensors, in its order.
            padded: The largest of the three widths that batches are padded to; larger batches are split. By default
                B + 3√B, rounded up.

        Returns:
            What does the next logical step when it is called, and the rest of the run by ``run()``.

        Raises:
            TrainingError: Several processes train together.
            InvalidInput: The model, the data, the mechanism or the optimizer does not allow it.
        """
        if self.world.many or self.shards is not None:
            raise TrainingError("a captured step is for one process; with several, loop over private.loader")
        return CapturedStep(self, self.loader, loss, data, padded)

    # --- saving, going on, and the way back --------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, extra: dict[str, Any] | None = None, frozen: bool = True) -> None:
        """Write a checkpoint, whole or not at all, and enter it in the ledger. Every rank must call this.

        Args:
            path: A folder that any number of processes can go on from, on a file system that all of them see.
            extra: Anything of yours made of tensors, numbers, strings, lists and dicts (a scheduler's
                ``state_dict()``).
            frozen: Whether to write frozen parameters, too. False makes small checkpoints of adapters: the model that
                loads them brings the rest.

        Raises:
            CheckpointError: A logical batch is under way, the key has no file, or the disk is full. The previous
                checkpoint and the ledger are then as they were.
        """
        checkpoint.save(self, path, extra, frozen=frozen)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Go on from a checkpoint, which must be the run's newest release.

        Args:
            path: What was given to ``save``.

        Returns:
            What was given as ``extra``.

        Raises:
            CheckpointError: It is damaged, of another run, model, plan, key or dataset, or not the newest release.
        """
        return checkpoint.load(self, path)

    def resume(self, path: str | os.PathLike[str]) -> dict[str, Any] | None:
        """``load`` if there is a checkpoint at ``path``, else None: for jobs that may be started again at any time."""
        exists = self.world.from_first("looking for a checkpoint", lambda: checkpoint.exists(self, path))
        return self.load(path) if exists else None

    def detach(self) -> None:
        """Give back a plain model and optimizer. A logical batch under way is dropped."""
        if not self.attached:
            return
        self.remove_hooks()
        try:
            half_done = self.cycle.phase is Phase.NOISED  # the weights may hold the noise of the step under way
            self.run.hand_over(self.steps_taken + half_done)
        finally:
            for undo in reversed(self._undo):
                undo()

    def __repr__(self) -> str:
        return f"<Private {self.plan.mechanism.name}, {self.spent()}>"
