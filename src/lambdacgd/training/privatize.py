"""`privatize`: two lines that make an ordinary PyTorch loop private."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.utils.data import DataLoader, IterableDataset

from lambdacgd import clipping
from lambdacgd.clipping import LossReduction, Mode
from lambdacgd.keys import SecretKey
from lambdacgd.planning import Plan
from lambdacgd.training.augmentation import examples_in, run_by_view
from lambdacgd.training.distributed.run import SharedRun
from lambdacgd.training.distributed.shards import is_sharded
from lambdacgd.training.distributed.start import start_together
from lambdacgd.training.distributed.world import World
from lambdacgd.training.distributed.wrapping import follow, unwrap
from lambdacgd.training.errors import NotPrivateWarning, check_claim
from lambdacgd.training.loader import Collate
from lambdacgd.training.private import Private
from lambdacgd.training.repeats import check_no_repeats
from lambdacgd.training.run import Run
from lambdacgd.training.trained import ATTACHED, remember
from lambdacgd.validation import InvalidInput, integer, number


def privatize(
    model: nn.Module,
    optimizer: Optimizer,
    dataset: Any,
    plan: Plan,
    *,
    max_grad_norm: float,
    max_physical_batch_size: int | None = None,
    key: SecretKey | None = None,
    run_id: str | None = None,
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
    data_fingerprint: str | None = None,
    process_group: Any = None,
    reduce_every_batch: bool = False,
) -> Private:
    """Bind a plan to a model, an optimizer and a map-style dataset. All three stay what they are, and so does the loop.

    ::

        private = lc.privatize(model, optimizer, dataset, plan, max_grad_norm=1.0, max_physical_batch_size=64)
        for x, y in private.loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    ``max_grad_norm`` is ζ. ``max_physical_batch_size`` splits logical batches to fit memory: until one is whole,
    ``p.grad`` is None and ``step``, ``zero_grad`` and the optimizer's schedulers do nothing. ``key`` is a
    ``SecretKey`` (a new one in memory by default; give one with a file to be able to save checkpoints). ``run_id``
    names a run prepared with ``key.ledger().new_run()``, for data sorted by its bins (``BinSortedParquet``).
    ``loss_reduction`` says what your loss does with the examples of a batch: "mean", "sum", or "none" (a vector,
    ``loss.sum().backward()``). ``clipping_mode`` is "flat", "per-layer" or "automatic". ``augmentations`` = K reads
    every example K times and averages its gradients before clipping. ``batch_of(args, kwargs)`` tells the number of
    examples where it is not the first dimension of the model's first tensor. ``data_fingerprint`` is any string of
    yours that names the data; a checkpoint of other data is then refused. The rest goes to
    ``torch.utils.data.DataLoader``.

    Where ``torch.distributed`` is initialised, all ranks of ``process_group`` (by default all) train one model: call it
    on each, with the model wrapped in DistributedDataParallel, sharded by ``fully_shard``, or as it is.
    ``max_physical_batch_size`` is then each rank's, and only rank 0 needs a ``key``. ``reduce_every_batch`` reduces the
    sums of sharded models after every physical batch, which takes less memory and more traffic.

    With ε = inf the same loop runs without noise or clipping, for debugging, and says so.
    """
    world = World.of(process_group)
    private: Private | None = None
    try:
        with world.together("privatize"):
            _check_plan(plan)
            check_claim(plan)
            given, model = model, unwrap(model, world)
            optimizer = _bare(optimizer)
            _check_model_and_optimizer(model, optimizer)
            _check_dataset(dataset, plan)
            number("max_grad_norm", max_grad_norm, above=0, include=(math.inf,) if math.isinf(plan.epsilon) else ())
            if max_physical_batch_size is not None:
                integer("max_physical_batch_size", max_physical_batch_size)
            integer("num_workers", num_workers, minimum=0)
            views = integer("augmentations", augmentations)
            if math.isinf(plan.epsilon):
                max_grad_norm = math.inf
                warnings.warn(
                    "NOT PRIVATE: the plan has ε = inf, so this run adds no noise and clips nothing. Use it for "
                    "debugging only and never on data that needs protection",
                    NotPrivateWarning,
                    stacklevel=2,
                )
            if views > 1 and batch_of is not None:
                raise InvalidInput(
                    "batch_of", "a function", "with augmentations the batch must be the first dimension; leave it out"
                )
            clipper = clipping.attach(
                model,
                max_grad_norm,
                loss_reduction=loss_reduction,
                mode="flat" if math.isinf(max_grad_norm) else clipping_mode,
                batch_of=examples_in(views) if views > 1 else batch_of,
            )
            undo = [clipper.detach]
            try:
                undo += follow(model, given, world)
                _check_same_parameters(clipper.parameters, optimizer)
                clipper.leave_room()  # σ is then the plan's own
                if views > 1:
                    undo.append(run_by_view(model, views))
                    clipper.views = views
                    clipper.loss_scale = float(views) if loss_reduction != "mean" else 1.0
                options = {
                    "num_workers": num_workers,
                    "collate_fn": collate_fn,
                    "pin_memory": pin_memory,
                    "prefetch_factor": prefetch_factor,
                    "worker_init_fn": worker_init_fn,
                    "multiprocessing_context": multiprocessing_context,
                }
                private = Private(
                    model,
                    optimizer,
                    dataset,
                    plan,
                    max_grad_norm=max_grad_norm,
                    clipper=clipper,
                    run=_run(world, key, run_id, plan),
                    views=views,
                    max_physical_batch_size=max_physical_batch_size,
                    data_fingerprint=data_fingerprint,
                    loader_options=options,
                    undo=undo,
                    world=world,
                    reduce_every_batch=reduce_every_batch,
                )
            except BaseException:
                for step in reversed(undo):
                    step()
                raise
        start_together(private)
    except BaseException:
        if private is not None:
            private.detach()
        raise
    if given is not model:
        remember(given, private.trained)
    return private


def _run(world: World, key: SecretKey | None, prepared: str | None, plan: Plan) -> Run:
    if world.many:
        return SharedRun(world, key, prepared=prepared, plan=plan.digest)
    return Run(key, prepared=prepared, plan=plan.digest)


def _check_plan(plan: Any) -> None:
    if not isinstance(plan, Plan):
        raise InvalidInput(
            "plan", type(plan).__name__, "training takes a Plan: lc.plan(…) makes one, Plan.load reads one"
        )


def _bare(optimizer: Any) -> Any:
    """The optimizer inside accelerate's, which only passes calls on and has no hooks of its own."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if type(optimizer).__name__ == "AcceleratedOptimizer" and inner is not None else optimizer


def _check_model_and_optimizer(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidInput(
            "model",
            type(model).__name__,
            "it must be a torch.nn.Module; put several models into one module whose forward calls them",
        )
    if any(module in ATTACHED for module in model.modules()):
        raise InvalidInput(
            "model", "privatized already", "call detach() on what privatize returned for it, then privatize anew"
        )
    if not isinstance(optimizer, Optimizer):
        raise InvalidInput("optimizer", type(optimizer).__name__, "it must be a torch.optim optimizer")
    if isinstance(optimizer, LBFGS):
        raise InvalidInput("optimizer", "LBFGS", "it calls a closure several times a step; use a first-order optimizer")
    if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
        raise InvalidInput("optimizer", "parameters with gradients", "call optimizer.zero_grad() before privatize")


def _check_dataset(dataset: Any, plan: Plan) -> None:
    if isinstance(dataset, DataLoader):
        raise InvalidInput(
            "dataset",
            "a DataLoader",
            "batches come from the plan, not from another loader's shuffling: pass its dataset",
        )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InvalidInput(
            "dataset",
            type(dataset).__name__,
            "it must be map-style, with __len__ and __getitem__: the plan decides which examples come when",
        )
    if len(dataset) != plan.examples:
        raise InvalidInput(
            "dataset",
            f"{len(dataset)} examples",
            f"the plan is for {plan.examples}; make a plan for this dataset: lc.plan(dataset, …)",
        )
    check_no_repeats(dataset)


def _check_same_parameters(clipped: dict[str, nn.Parameter], optimizer: Optimizer) -> None:
    names = {id(p): name for name, p in clipped.items()}
    held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    outside = [p for p in held if id(p) not in names]
    if outside and any(is_sharded(p) for p in clipped.values()):
        raise InvalidInput(
            "optimizer",
            f"{len(outside)} parameter(s) from before sharding",
            "fully_shard replaces a model's parameters: call it first, then make the optimizer, then privatize",
        )
    if outside:
        raise InvalidInput(
            "optimizer",
            f"{len(outside)} parameter(s) outside the model, the first of shape {tuple(outside[0].shape)}",
            "all it trains must be clipped: put the other modules into the model, or give them another optimizer",
        )
    missing = set(names) - {id(p) for p in held}
    if missing:
        name = min(names[i] for i in missing)
        raise InvalidInput(
            "optimizer",
            f"without {name!r} ({len(missing)} trainable parameter(s) missing)",
            "what it does not train would still use up the clipping norm: add it, or freeze it with "
            "requires_grad_(False)",
        )
