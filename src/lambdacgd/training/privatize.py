"""`privatize`: two lines that make an ordinary PyTorch loop private; what it returns, and what it refuses."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.data import default_collate

from lambdacgd import clipping
from lambdacgd.clipping import SMALLEST_CLIP, LossReduction, Mode, Replaced
from lambdacgd.errors import InvalidInput, NotPrivateWarning, TrainingError, integer, number
from lambdacgd.keys import SecretKey
from lambdacgd.noise import Layout
from lambdacgd.planning import Plan
from lambdacgd.training import checkpoint
from lambdacgd.training.captured import CapturedStep
from lambdacgd.training.card import Card, GivenCard, History, Spent, card, epsilon_after_epochs
from lambdacgd.training.data import Collate, KeepsApart, Sample, a_few, check_dataset, sample_of
from lambdacgd.training.distributed import models
from lambdacgd.training.distributed.models import is_sharded
from lambdacgd.training.distributed.reduction import ShardedTotals
from lambdacgd.training.distributed.world import World
from lambdacgd.training.loop import EMA, Epoch, Loader, Loop, Phase
from lambdacgd.training.run import Run
from lambdacgd.training.step import PrivateStep, check_plan, floating_point_of
from lambdacgd.version import __version__

_LOOKED_AT = 6  #: examples that a loss is looked at with


def privatize(
    model: nn.Module,
    optimizer: Optimizer,
    dataset: Any,
    plan: Plan,
    *,
    max_grad_norm: float,
    max_physical_batch_size: int | None = None,
    pad_batches: int = 1,
    key: SecretKey | None = None,
    loss_reduction: LossReduction = "mean",
    clipping_mode: Mode = "flat",
    augmentations: int = 1,
    collate_fn: Collate | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    multiprocessing_context: Any = None,
    batch_of: Callable[[tuple[Any, ...], dict[str, Any]], int] | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    data_fingerprint: str | None = None,
    earlier: Iterable[GivenCard] | None = None,
) -> Private:
    """Bind a plan to a model, an optimizer and a map-style dataset. All three stay what they are, and so does the loop.

    ```python
    private = lc.privatize(model, optimizer, dataset, plan, max_grad_norm=1.0)
    for x, y in private.loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    ```

    Where ``torch.distributed`` is initialised, all ranks train one model: call it on each, with the model wrapped in
    DistributedDataParallel, sharded by ``fully_shard``, or as it is. With ε = inf the same loop runs without noise or
    clipping, for debugging, and says so.

    Args:
        model: Any module whose layers keep examples apart. It is trained in place.
        optimizer: Any first-order ``torch.optim`` optimizer over all trainable parameters of the model.
        dataset: Map-style, of the length that the plan was made for. The plan decides which examples come when.
        plan: From ``lc.plan``.
        max_grad_norm: ζ, the norm that every example's gradient is clipped to.
        max_physical_batch_size: Splits logical batches to fit memory: until one is whole, ``p.grad`` is None and
            ``step`` and ``zero_grad`` do nothing. Schedulers act between logical batches:
            ``if private.between_steps: scheduler.step()``. With several ranks it is each rank's.
        pad_batches: Fills physical batches up to a multiple of this with examples of weight exactly zero, so that
            sampled batches come in few sizes: memory then grows no more with every new one. The loss that you print
            counts them.
        key: A ``SecretKey``; by default a new one in memory. Give one with a file to be able to save checkpoints. With
            several ranks only rank 0 needs one.
        loss_reduction: What your loss does with the examples of a batch: "mean", "sum", or "none" (a vector,
            ``loss.sum().backward()``).
        clipping_mode: "flat", "per-layer" or "automatic".
        augmentations: K reads every example K times and averages its gradients before clipping.
        collate_fn: As ``torch.utils.data.DataLoader`` takes it, as are ``num_workers``, ``pin_memory``,
            ``prefetch_factor``, ``worker_init_fn`` and ``multiprocessing_context``.
        batch_of: ``batch_of(args, kwargs)`` tells the number of examples where it is not the first dimension of the
            model's first tensor.
        loss: ``loss(model, batch)``, what your loop computes for a batch of the loader and calls ``backward`` on. It
            is looked at before the first step, with a few examples of the dataset and ``collate_fn``: an example's
            gradient must not depend on the others (a mean over all tokens of a padded batch, a root of the mean).
            Without it the card says that the loss was not checked.
        data_fingerprint: Any string of yours that names the data; a checkpoint of other data is then refused.
        earlier: Privacy cards of runs whose weights this one begins with (dictionaries, paths of
            ``privacy-card.json`` or of export folders); this run's card adds them up. ``[]`` declares that the weights
            have seen no private data. None declares nothing, and the card says so.

    Returns:
        The run: its loader, position, checkpoints, and the way back (``detach``).

    Raises:
        InvalidInput: Something given cannot be trained privately; the message says what to do.
        ClippingError: A layer of the model cannot be clipped per example.
        TrainingError: The ranks did not bring the same things.
    """
    world = World.here()
    with contextlib.ExitStack() as undo:  # gives model and optimizer back, unless all goes well
        with world.together("privatize"):
            check_plan(plan)
            given, model = model, models.unwrap(model, world)
            optimizer = _bare(optimizer)
            _check_model_and_optimizer(model, optimizer)
            check_dataset(dataset, plan)
            number(
                "max_grad_norm",
                max_grad_norm,
                above=SMALLEST_CLIP,
                include=(math.inf,) if math.isinf(plan.epsilon) else (),
            )
            integer("max_physical_batch_size", 1 if max_physical_batch_size is None else max_physical_batch_size)
            integer("num_workers", num_workers, minimum=0)
            integer("pad_batches", pad_batches)
            views = integer("augmentations", augmentations)
            history = History.of(earlier)
            if math.isinf(plan.epsilon):
                max_grad_norm = math.inf
                no_noise = "NOT PRIVATE: the plan has ε = inf, so this run adds no noise and clips nothing"
                warnings.warn(no_noise, NotPrivateWarning, stacklevel=2)
            if views > 1 and batch_of is not None:
                raise InvalidInput("batch_of", "With augmentations the batch comes first: leave batch_of out.")
            clipper = clipping.attach(
                model,
                max_grad_norm,
                loss_reduction=loss_reduction,
                mode="flat" if math.isinf(max_grad_norm) else clipping_mode,
                batch_of=batch_of,
            )
            undo.callback(clipper.detach)
            models.follow(model, given, world, undo)
            _check_same_parameters(clipper.parameters, optimizer)
            floating_point_of(plan, sum(p.numel() for p in clipper.parameters.values()))
            clipper.leave_room(plan.batch_size)  # σ is then the plan's own
            clipper.expect_views(views)
            run = Run(key, world=world, plan=plan.digest)
            undo.callback(run.close)
            shards = None
            if any(map(is_sharded, clipper.parameters.values())):
                shards = ShardedTotals(model, clipper.parameters, world)
                clipper.keep_sums_in(shards)
                clipper.allow_probe(False)  # until a batch of which every rank has two examples
            layout = Layout.of({name: tuple(p.shape) for name, p in clipper.parameters.items()})
            step = PrivateStep(plan, run, layout, max_grad_norm=max_grad_norm, shards=shards)
            private = Private(model, optimizer, clipper, step, undo)
            private.dataset, private.history, private.extra = dataset, history, {}
            # With several ranks this process reads a few examples in any case, to compare them.
            readable = data_fingerprint is None and (world.many or not num_workers)
            private.sample = Sample(dataset, readable=readable)
            private.plan_json = plan.to_json()
            private.settings = {
                "plan": plan.digest,
                "layout": layout.digest,
                "max_grad_norm": max_grad_norm,
                "clipping_mode": clipper.mode,
                "augmentations": views,
                "loss_reduction": clipper.loss_reduction,
                "examples": len(dataset),
                "data_fingerprint": data_fingerprint,
                "optimizer": type(optimizer).__name__,
            }
            private.loader = Loader(
                private,
                dataset,
                max_physical_batch_size=max_physical_batch_size,
                pad_batches=pad_batches,
                views=views,
                num_workers=num_workers,
                collate_fn=None if collate_fn is None else KeepsApart(collate_fn, in_order=views * pad_batches > 1),
                pin_memory=pin_memory,
                prefetch_factor=prefetch_factor,
                worker_init_fn=worker_init_fn,
                multiprocessing_context=multiprocessing_context,
            )
        if world.many:
            _start_together(private, max_physical_batch_size)
        if loss is not None and views == 1 and shards is None:
            with world.together("looking at the loss"):
                private.check_loss(loss, a_few(dataset, _LOOKED_AT), collate_fn or default_collate)
        private.undo = undo.pop_all()
    return private


class Private(Loop):
    """What ``privatize`` returns: the loader, the position in the run, and the way back to a plain model.

    Attributes:
        optimizer: The user's optimizer.
        dataset: The examples, by index.
        loader: Iterates the remaining batches of the run.
        extra: What was given as ``extra`` to the ``save`` whose checkpoint this run went on from; at first empty.
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

    dataset: Any
    loader: Loader
    extra: dict[str, Any]
    sample: Sample
    #: What is fixed for a run: the same on every rank, and for whoever goes on from a checkpoint.
    settings: Mapping[str, Any]
    #: The plan, for checkpoints.
    plan_json: str
    #: Gives a plain model and optimizer back.
    undo: contextlib.ExitStack

    # --- where the run stands ----------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan that the run follows, fixed for a run."""
        return self.private_step.plan

    @property
    def run(self) -> Run:
        """The run's key, id and ledger."""
        return self.private_step.run

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

        Returns:
            An iterator of epochs, each of which iterates its remaining batches and has a ``number`` from 1.

        Raises:
            TrainingError: No step was taken in an epoch, or the run was detached.
        """
        plan, cycle = self.plan, self.cycle
        self.check_usable()
        while not self.finished:
            done = cycle.done
            number = done // plan.steps_per_epoch + 1
            yield Epoch(self.loader, number, number * plan.steps_per_epoch)
            if cycle.done == done:  # it would come again, for ever
                raise TrainingError(f"epoch {number} was passed over: no step in it. Write for batch in epoch: …")

    def spent(self, *, after_epochs: bool = False) -> Spent:
        """The plan's (ε, δ) with its certificate, and the share of steps taken.

        Args:
            after_epochs: Also compute the ε of runs planned over fewer epochs. For information only: stopping early
                keeps the plan's claim.

        Returns:
            The claim of this run, which releasing its weights costs after any number of steps.
        """
        plan, for_tests = self.plan, self.run.key.is_for_tests
        informational = epsilon_after_epochs(plan) if after_epochs else None
        return Spent(plan.epsilon, plan.delta, plan.certificate, self.steps_taken, plan.steps, informational, for_tests)

    def card(self) -> Card:
        """The privacy card of the weights that the model holds now: what ``lc.export`` writes beside them.

        Returns:
            A dictionary of public facts, as JSON can hold them.

        Raises:
            TrainingError: Something other than the run has changed the weights since its last step.
        """
        self.weights.check()
        return card(
            self.plan,
            self.history,
            self.settings,
            steps_taken=self.steps_taken,
            loss_checked=self.loss_checked,
            floating_point=self.private_step.floating_point,
            key_for_tests=self.run.key.is_for_tests,
        )

    def check_loss(
        self, loss: Callable[[nn.Module, Any], Tensor], items: Sequence[Any], collate: Callable[[list[Any]], Any]
    ) -> None:
        """See whether the training loss adds examples up as declared; the card then says so, if it could be seen.

        ``privatize(…, loss=loss)`` does it with examples of the dataset. Nothing is trained or added.

        Args:
            loss: ``loss(model, batch)``, the training loss of a batch as the loader gives it.
            items: A few examples as the dataset gives them.
            collate: What makes a batch of them.

        Raises:
            ClippingError: The loss of an example depends on others of its batch, or ``loss_reduction`` does not
                describe the loss.
        """
        self.loss_checked = self.clipper.check_loss(loss, items, collate)

    # --- what goes along with a run ----------------------------------------------------------------------------------

    def ema(self, decay: float) -> EMA:
        """An average of the weights, updated after every logical step and part of checkpoints. Costs no privacy.

        Args:
            decay: β in [0, 1): the share of the average that a step keeps.

        Returns:
            The average. ``with average.applied():`` puts it into the model.
        """
        average = EMA(self, decay)
        self.averages.append(average)
        self.after_step.append(average.update)
        return average

    def captured_step(
        self, loss: Callable[..., Tensor], data: Sequence[Tensor], *, padded: int | None = None
    ) -> CapturedStep:
        """A fast step for small models on CUDA: ``step = private.captured_step(loss, (x, y)); step.run()``.

        Args:
            loss: ``loss(model, *batch)`` computes the loss of a batch. With ``augmentations=K`` every example comes as
                K neighbouring rows, all alike: what makes views of them is the loss's (docs/training.md).
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
        return CapturedStep(self, loss, data, padded)

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

    def resume(self, path: str | os.PathLike[str]) -> bool:
        """``load`` if there is a checkpoint, else nothing: for jobs that may be started again at any time.

        Args:
            path: What was given to ``save``.

        Returns:
            Whether there was one; ``private.extra`` then holds what was given as ``extra``.

        Raises:
            CheckpointError: As for ``load``.
        """
        exists = self.world.from_first("looking for a checkpoint", lambda: checkpoint.exists(self, path))
        if exists:
            self.load(path)
        return exists

    def detach(self) -> None:
        """Give back a plain model and optimizer. A logical batch under way is dropped."""
        self.undo.close()

    def __repr__(self) -> str:
        return f"<Private {self.plan.mechanism.name}, {self.spent()}>"


# --- at the door -----------------------------------------------------------------------------------------------------


def _facts(private: Private, max_physical_batch_size: int | None) -> dict[str, Any]:
    """What all ranks must agree on: digests and settings, nothing secret."""
    return {
        **private.settings,
        # In their order, which is that of the sums in buckets: the layout has names in alphabetical order.
        "parameters": [f"{name} {p.dtype}" for name, p in private.clipper.parameters.items()],
        # With a data_fingerprint the user vouches for the data, also where reading it draws random numbers of its own.
        "sample": None if private.settings["data_fingerprint"] else sample_of(private.dataset),
        "max_physical_batch_size": max_physical_batch_size,
        "earlier": asdict(private.history),
        "device": private.clipper.anchor.device.type,
        "sharded modules": [path for path, _ in models.fsdp_modules(private.model)],
        "version": __version__,
        **models.optimizer_settings(private.clipper.parameters, private.optimizer),
    }


_ADVICE = {
    "plan": "Make the plan on one rank and load its file on all",
    "layout": "Build the same model on every rank: names and shapes of trainable parameters must match",
    "parameters": "Define layers in the same order and types on every rank: sums are added up by their place",
    "sample": "Give every rank the whole dataset in one order (no shuffling, no part for each rank). If reading it is "
    "random in a way of its own, name the data with data_fingerprint",
    "device": "Noise of different kinds of device agrees only to rounding: use one kind",
    "sharded modules": "Call fully_shard on the same modules on every rank, or on none",
}


def _start_together(private: Private, max_physical_batch_size: int | None) -> None:
    """Compare what the ranks brought, then take rank 0's key and weights. All must call it; a difference is an error
    on each. Shards are not sent.
    """
    world = private.world
    with world.together("privatize"):
        facts = _facts(private, max_physical_batch_size)
    world.agree("privatize", facts, _ADVICE)
    given = world.gather(private.run.given)
    for rank, key in enumerate(given):
        if key not in (None, given[0]):
            other = f"privatize: rank {rank} has a key that is not rank 0's, so they would not be one run's"
            raise TrainingError(f"{other}. Give the key on rank 0 alone, or the same on all")
    with private.loading():  # all ranks begin with rank 0's weights
        private.run.share(private.clipper.anchor.device)
        models.broadcast_(private.model, world)
        private.compare_weights()


def _bare(optimizer: Any) -> Any:
    """The optimizer inside accelerate's, which only passes calls on and has no hooks of its own."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if type(optimizer).__name__ == "AcceleratedOptimizer" and inner is not None else optimizer


def _check_model_and_optimizer(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidInput.of_type("model", model, "a torch.nn.Module (whose forward calls all, if they are several)")
    if any(isinstance(vars(module).get("forward"), Replaced) for module in model.modules()):
        raise InvalidInput("model", "This model is privatized already. Call detach() on what privatize returned first.")
    if not isinstance(optimizer, Optimizer):
        raise InvalidInput.of_type("optimizer", optimizer, "a torch.optim optimizer")
    if isinstance(optimizer, LBFGS):
        raise InvalidInput("optimizer", "LBFGS calls a closure several times a step. Use SGD or Adam.")
    if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
        raise InvalidInput("optimizer", "Parameters hold gradients. Call optimizer.zero_grad() before privatize.")


def _check_same_parameters(clipped: dict[str, nn.Parameter], optimizer: Optimizer) -> None:
    names = {id(p): name for name, p in clipped.items()}
    held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    outside = [p for p in held if id(p) not in names]
    if outside and any(is_sharded(p) for p in clipped.values()):
        raise InvalidInput("optimizer", "Call fully_shard first, then make the optimizer, then privatize.")
    if outside:
        raise InvalidInput(
            "optimizer",
            f"The optimizer holds {len(outside)} parameter(s) outside the model, the first of shape "
            f"{tuple(outside[0].shape)}: put their modules into the model, or give them another optimizer.",
        )
    trained = {id(p) for p in held}
    missing = [name for i, name in names.items() if i not in trained]
    if missing:
        lacks = f"The optimizer lacks {missing[0]!r} ({len(missing)} trainable parameter(s) in all)"
        raise InvalidInput("optimizer", f"{lacks}: add it, or freeze it with requires_grad_(False).")
