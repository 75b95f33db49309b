"""`privatize`: two lines that make an ordinary PyTorch loop private. And what it refuses at the door."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, default_collate

from lambdacgd import clipping
from lambdacgd.clipping import LossReduction, Mode, Replaced
from lambdacgd.errors import InvalidInput, NotPrivateWarning, integer, number
from lambdacgd.keys import SecretKey
from lambdacgd.planning import Plan
from lambdacgd.training.card import GivenCard, History
from lambdacgd.training.distributed.agreement import start_together
from lambdacgd.training.distributed.models import follow, fsdp_modules, is_sharded, unwrap
from lambdacgd.training.distributed.world import World
from lambdacgd.training.loader import Collate, examples_in, random_numbers_of, run_by_view
from lambdacgd.training.private import Private
from lambdacgd.training.run import Run, SharedRun
from lambdacgd.training.sample import sample_of
from lambdacgd.training.step import check_plan, floating_point_of
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
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    data_fingerprint: str | None = None,
    earlier: Iterable[GivenCard] | None = None,
    process_group: Any = None,
    reduce_every_batch: bool = False,
) -> Private:
    """Bind a plan to a model, an optimizer and a map-style dataset. All three stay what they are, and so does the loop.

    ```python
    private = lc.privatize(model, optimizer, dataset, plan, max_grad_norm=1.0)
    for x, y in private.loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    ```

    Where ``torch.distributed`` is initialised, all ranks of ``process_group`` train one model: call it on each, with
    the model wrapped in DistributedDataParallel, sharded by ``fully_shard``, or as it is. With ε = inf the same loop
    runs without noise or clipping, for debugging, and says so.

    Args:
        model: Any module whose layers keep examples apart. It is trained in place.
        optimizer: Any first-order ``torch.optim`` optimizer over all trainable parameters of the model.
        dataset: Map-style, of the length that the plan was made for. The plan decides which examples come when.
        plan: From ``lc.plan``.
        max_grad_norm: ζ, the norm that every example's gradient is clipped to.
        max_physical_batch_size: Splits logical batches to fit memory: until one is whole, ``p.grad`` is None and
            ``step`` and ``zero_grad`` do nothing. Schedulers act between logical batches:
            ``if private.between_steps: scheduler.step()``. With several ranks it is each rank's.
        key: A ``SecretKey``; by default a new one in memory. Give one with a file to be able to save checkpoints. With
            several ranks only rank 0 needs one.
        run_id: Names a run prepared with ``key.ledger().new_run()``, for data sorted by its bins
            (``BinSortedParquet``).
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
        process_group: The ranks that train together; by default all.
        reduce_every_batch: Reduce the sums of sharded models after every physical batch, which takes less memory and
            more traffic.

    Returns:
        The run: its loader, position, checkpoints, and the way back (``detach``).

    Raises:
        InvalidInput: Something given cannot be trained privately; the message says what to do.
        ClippingError: A layer of the model cannot be clipped per example.
        TrainingError: The ranks did not bring the same things.
    """
    world = World.of(process_group)
    private: Private | None = None
    try:
        with world.together("privatize"):
            check_plan(plan, stacklevel=3)
            given, model = model, unwrap(model, world)
            optimizer = _bare(optimizer)
            _check_model_and_optimizer(model, optimizer)
            _check_dataset(dataset, plan)
            number("max_grad_norm", max_grad_norm, above=0, include=(math.inf,) if math.isinf(plan.epsilon) else ())
            if max_physical_batch_size is not None:
                integer("max_physical_batch_size", max_physical_batch_size)
            integer("num_workers", num_workers, minimum=0)
            views = integer("augmentations", augmentations)
            history = History.of(earlier)
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
                    "batch_of", "With augmentations the batch must be the first dimension: leave batch_of out."
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
                floating_point_of(plan, sum(p.numel() for p in clipper.parameters.values()))
                clipper.leave_room()  # σ is then the plan's own
                if views > 1:
                    undo.append(run_by_view(model, views))
                    clipper.expect_views(views)
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
                    history=history,
                    world=world,
                    reduce_every_batch=reduce_every_batch,
                )
            except BaseException:
                for step in reversed(undo):
                    step()
                raise
        if isinstance(private.run, SharedRun):
            with world.together("privatize"):
                facts = _facts(private, max_physical_batch_size, reduce_every_batch)
            with private.loading():  # all ranks begin with rank 0's weights
                start_together(
                    private.run,
                    facts,
                    model=model,
                    parameters=clipper.parameters,
                    optimizer=optimizer,
                    world=world,
                    device=clipper.anchor.device,
                )
        if loss is not None and views == 1 and private.shards is None:
            with world.together("looking at the loss"):
                private.check_loss(loss, _few(dataset), collate_fn or default_collate)
    except BaseException:
        if private is not None:
            private.detach()
        raise
    return private


def _few(dataset: Any) -> list[Any]:
    """A few examples, from all over the dataset: where it is sorted, neighbours are too alike to tell."""
    count = min(_LOOKED_AT, len(dataset))
    places = [k * (len(dataset) - 1) // max(1, count - 1) for k in range(count)]
    with random_numbers_of("looking at the loss", put_back=True):
        return [dataset[place] for place in places]


def _run(world: World, key: SecretKey | None, prepared: str | None, plan: Plan) -> Run:
    if world.many:
        return SharedRun(world, key, prepared=prepared, plan=plan.digest)
    return Run(key, prepared=prepared, plan=plan.digest)


def _facts(private: Private, max_physical_batch_size: int | None, reduce_every_batch: bool) -> dict[str, Any]:
    """What all ranks must agree on: digests and settings, nothing secret."""
    clipper, plan = private.clipper, private.plan
    return {
        "plan": plan.digest,
        "layout": private.layout.digest,
        # In their order, in which sums are put into buckets: the layout knows names in alphabetical order only.
        "parameters": [f"{name} {p.dtype}" for name, p in clipper.parameters.items()],
        "dataset length": len(private.dataset),
        # Whoever names the data vouches for it, also where reading it is random in ways of its own.
        "examples": None if private.data_fingerprint else sample_of(private.dataset, plan.examples),
        "max_grad_norm": private.max_grad_norm,
        "clipping mode": clipper.mode,
        "loss reduction": clipper.loss_reduction,
        "augmentations": private.augmentations,
        "physical batch size": max_physical_batch_size,
        "data fingerprint": private.data_fingerprint,
        "earlier runs": private.history.to_dict(),
        "device": clipper.anchor.device.type,
        "sharded modules": [path for path, _ in fsdp_modules(private.model)],
        "reduce_every_batch": private.shards is not None and reduce_every_batch,
        "version": __version__,
    }


def _bare(optimizer: Any) -> Any:
    """The optimizer inside accelerate's, which only passes calls on and has no hooks of its own."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if type(optimizer).__name__ == "AcceleratedOptimizer" and inner is not None else optimizer


def _check_model_and_optimizer(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidInput(
            "model",
            f"model must be a torch.nn.Module, and a {type(model).__name__} was given. Put several models into one "
            "module whose forward calls them.",
        )
    if any(isinstance(vars(module).get("forward"), Replaced) for module in model.modules()):
        raise InvalidInput(
            "model",
            "This model is privatized already. Call detach() on what privatize returned for it, then privatize anew.",
        )
    if not isinstance(optimizer, Optimizer):
        raise InvalidInput(
            "optimizer", f"optimizer must be a torch.optim optimizer, and a {type(optimizer).__name__} was given."
        )
    if isinstance(optimizer, LBFGS):
        raise InvalidInput(
            "optimizer", "LBFGS calls a closure several times a step. Use a first-order optimizer such as SGD or Adam."
        )
    if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
        raise InvalidInput(
            "optimizer", "The parameters hold gradients already. Call optimizer.zero_grad() before privatize."
        )


def _check_dataset(dataset: Any, plan: Plan) -> None:
    if isinstance(dataset, DataLoader):
        raise InvalidInput(
            "dataset",
            "This is a DataLoader. The plan decides which examples form a batch, so pass its dataset.",
        )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InvalidInput(
            "dataset",
            f"dataset must be map-style, with __len__ and __getitem__, because the plan decides which examples come "
            f"when; {type(dataset).__name__} is not.",
        )
    if len(dataset) != plan.examples:
        raise InvalidInput(
            "dataset",
            f"The dataset has {len(dataset)} examples, and the plan is for {plan.examples}. Make a plan for this "
            "dataset: lc.plan(dataset, …).",
        )
    check_no_repeats(dataset)


def _check_same_parameters(clipped: dict[str, nn.Parameter], optimizer: Optimizer) -> None:
    names = {id(p): name for name, p in clipped.items()}
    held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    outside = [p for p in held if id(p) not in names]
    if outside and any(is_sharded(p) for p in clipped.values()):
        raise InvalidInput(
            "optimizer",
            f"The optimizer holds {len(outside)} parameter(s) from before sharding. fully_shard replaces a model's "
            "parameters: call it first, then make the optimizer, then privatize.",
        )
    if outside:
        raise InvalidInput(
            "optimizer",
            f"The optimizer holds {len(outside)} parameter(s) outside the model, the first of shape "
            f"{tuple(outside[0].shape)}. All it trains must be clipped: put the other modules into the model, or give "
            "them another optimizer.",
        )
    missing = set(names) - {id(p) for p in held}
    if missing:
        name = min(names[i] for i in missing)
        raise InvalidInput(
            "optimizer",
            f"The optimizer lacks {name!r} ({len(missing)} trainable parameter(s) in all). What it does not train "
            "would still use up the clipping norm: add it, or freeze it with requires_grad_(False).",
        )


# --- does the dataset hold an example twice? -------------------------------------------------------------------------

Places = tuple[np.ndarray, np.ndarray]  # for each item, which dataset it is of, and its index there


def check_no_repeats(dataset: Any) -> None:
    """Refuse a dataset that names one example of another dataset more than once.

    A plan protects one item; what is in two is protected half as well. Oversampling a rare class repeats its examples:
    `Subset` with an index twice, `ConcatDataset` of one dataset with itself, ``select`` of Hugging Face datasets. What
    a dataset of one's own does inside is not seen.
    """
    owners: dict[int, int] = {}
    places = _places(dataset, owners)
    if places is None:
        return
    order = np.lexsort(places)
    whose, index = places[0][order], places[1][order]
    again = np.flatnonzero((whose[1:] == whose[:-1]) & (index[1:] == index[:-1]))
    if len(again):
        first = again[0]
        times = int(((places[0] == whose[first]) & (places[1] == index[first])).sum())
        raise InvalidInput(
            "dataset",
            f"The {type(dataset).__name__} holds example {index[first]} {times} times ({len(again)} repetitions). "
            "Every item is clipped by itself, so an example in two items would move a sum twice as far as the "
            "plan accounts for. Give each example once; to make a class count for more, multiply its examples' losses.",
        )


def _places(dataset: Any, owners: dict[int, int]) -> Places | None:
    """Where the items of a dataset come from; None if they are its own."""
    if isinstance(dataset, Subset):
        inner, chosen = _of(dataset.dataset, owners), np.asarray(dataset.indices, dtype=np.int64)
        return inner[0][chosen], inner[1][chosen]
    if isinstance(dataset, ConcatDataset):
        parts = [_of(part, owners) for part in dataset.datasets]
        return np.concatenate([whose for whose, _ in parts]), np.concatenate([index for _, index in parts])
    selected = _selected(dataset)
    return None if selected is None else (np.zeros(len(selected), dtype=np.int64), selected)


def _of(dataset: Any, owners: dict[int, int]) -> Places:
    places = _places(dataset, owners)
    size, owner = len(dataset), owners.setdefault(id(dataset), len(owners) + 1)
    if places is None:
        return np.full(size, owner), np.arange(size)
    if isinstance(dataset, (Subset, ConcatDataset)):
        return places
    return np.full(size, owner), places[1]


def _selected(dataset: Any) -> np.ndarray | None:
    """The rows that a ``datasets.Dataset`` has selected of its table, if it has."""
    chosen = getattr(dataset, "_indices", None)
    if chosen is None or not hasattr(dataset, "select") or not hasattr(chosen, "column"):
        return None
    return np.asarray(chosen.column(0).to_numpy(), dtype=np.int64)
