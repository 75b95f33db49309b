"""Bad set-ups, one function each, run by two ranks together. Each must fail on both ranks and hang neither."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F

import lambdacgd as lc
from lambdacgd import clipping
from lambdacgd.training import Private, privatize
from lambdacgd.training.distributed.reduction import all_reduce_
from lambdacgd.training.distributed.world import World
from tests.training import oracle
from tests.training.distributed import jobs

MISTAKES: dict[str, Callable[[int], Any]] = {}


def mistake(function: Callable[[int], Any]) -> Callable[[int], Any]:
    MISTAKES[function.__name__] = function
    return function


def bind(kind: str = "plain", **changes: Any) -> tuple[Private, Any, torch.optim.Optimizer]:
    model = changes.pop("model", None) or jobs.wrap(jobs.net(), kind)
    optimizer = changes.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"max_grad_norm": 1.0, "key": oracle.key()} | changes
    dataset, plan = settings.pop("dataset", None) or jobs.data(), settings.pop("plan", None) or jobs.plan()
    private = privatize(model, optimizer, dataset, plan, **settings)
    private.run._id = jobs.RUN  # the same bins every time, of four examples and more
    return private, model, optimizer


@mistake
def other_plan(rank: int) -> None:
    bind(plan=jobs.plan("cgd" if rank == 0 else "identity"))


@mistake
def other_key(rank: int) -> None:
    bind(key=lc.SecretKey.from_bytes(bytes([rank]) * 32))


@mistake
def key_on_the_wrong_rank(rank: int) -> None:
    bind(key=oracle.key() if rank == 1 else None)


@mistake
def shorter_dataset(rank: int) -> None:
    bind(dataset=jobs.data(examples=48 - rank))


@mistake
def shuffled_dataset(rank: int) -> None:
    """Each rank shuffles by itself: somebody's example would be at two places, so in two bins."""
    order = torch.randperm(48, generator=torch.Generator().manual_seed(rank))
    x, y = jobs.data().tensors
    bind(dataset=torch.utils.data.TensorDataset(x[order], y[order]))


@mistake
def other_clipping_norm(rank: int) -> None:
    bind(max_grad_norm=1.0 + rank)


@mistake
def other_clipping_mode(rank: int) -> None:
    bind(clipping_mode="flat" if rank == 0 else "per-layer")


@mistake
def other_physical_batch(rank: int) -> None:
    bind(max_physical_batch_size=2 + rank)


@mistake
def other_sharded_modules(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model = jobs.net()
    fully_shard(model.block if rank == 0 else model.last)
    bind(model=fully_shard(model))


@mistake
def other_model(rank: int) -> None:
    bind(model=nn.Linear(5, 3 + rank).double())


@mistake
def layers_in_another_order(rank: int) -> None:
    """Same names, same shapes, so the same layout; their sums would land on each other."""
    parts = {"a": nn.Linear(5, 5), "b": nn.Linear(5, 5)}

    class Swapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in sorted(parts, reverse=rank == 1):
                self.add_module(name, parts[name])

        def forward(self, x: torch.Tensor) -> Any:
            return self.b(self.a(x))

    bind(model=Swapped().double())


@mistake
def other_learning_rate(rank: int) -> None:
    """Shards that nobody else holds: no comparison of weights would ever notice."""
    model = jobs.wrap(jobs.net(), "fsdp")
    bind(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank)))


@mistake
def other_optimizer(rank: int) -> None:
    """Also where a rank has settings that the first one lacks."""
    model = jobs.wrap(jobs.net(), "fsdp")
    bind(model=model, optimizer=(torch.optim.AdamW if rank else torch.optim.SGD)(model.parameters(), lr=0.1))


@mistake
def schedules_that_part(rank: int) -> None:
    """As one that follows each rank's own training loss."""
    model = jobs.wrap(jobs.net(), "fsdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9 - 0.1 * rank)
    private, _, _ = bind(model=model, optimizer=optimizer)
    for x, y in private.loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@mistake
def other_kind_of_device(rank: int) -> None:
    module = sys.modules[privatize.__module__]
    facts, changed = module._facts, {"device": "cuda"} if rank == 1 else {}
    with mock.patch.object(module, "_facts", lambda *given: facts(*given) | changed):
        bind()


@mistake
def invalid_on_one_rank(rank: int) -> None:
    bind(max_grad_norm=1.0 if rank == 0 else -1.0)


@mistake
def optimizer_before_sharding(rank: int) -> None:
    model = jobs.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bind(model=jobs.shard(model), optimizer=optimizer)


@mistake
def sharding_after_privatize(rank: int) -> None:
    private, model, _ = bind()
    jobs.shard(model)
    next(iter(private.loader))


@mistake
def sharding_columns(rank: int) -> None:
    from torch.distributed.tensor import Shard

    place = {"shard_placement_fn": lambda p: Shard(1) if p.dim() > 1 else None}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    bind(model=fully_shard(model, mesh=init_device_mesh("cpu", (2,)), **place))


@mistake
def static_graph(rank: int) -> None:
    bind("ddp", model=jobs.wrap(jobs.net(), "ddp", static_graph=True))


@mistake
def static_graph_after_privatize(rank: int) -> None:
    private, model, _ = bind()
    x, _ = next(iter(private.loader))
    jobs.wrap(model, "ddp", static_graph=True)(x)


@mistake
def wrapped_part(rank: int) -> None:
    model = jobs.net()
    model.block = nn.parallel.DistributedDataParallel(model.block)
    bind(model=model)


@mistake
def convert_after_wrapping(rank: int) -> None:
    clipping.convert(jobs.wrap(jobs.net(), "ddp"))


@mistake
def convert_after_sharding(rank: int) -> None:
    clipping.convert(jobs.wrap(jobs.net(), "fsdp"))


@mistake
def new_layer_after_wrapping(rank: int) -> None:
    model = jobs.wrap(jobs.net(), "ddp")
    model.module.last = nn.Linear(7, 3).double()
    bind(model=model)


@mistake
def clip_a_wrapped_model(rank: int) -> None:
    clipping.attach(jobs.wrap(jobs.net(), "ddp"))


@mistake
def stray_gradient_of_a_gathered_weight(rank: int) -> None:
    model = jobs.net()
    forward = model.forward
    model.forward = lambda x: forward(x) + model.first.weight.sum()  # type: ignore[method-assign]
    jobs.shard(model)
    private, model, _ = bind(model=model)
    x, y = next(iter(private.loader))
    F.cross_entropy(model(x), y).backward()


@mistake
def unknown_stray_gradient(rank: int) -> None:
    """One that reaches p.grad by FSDP2's own reduction, past every hook: the step finds it."""
    private, model, optimizer = bind("fsdp")
    x, y = next(iter(private.loader))
    F.cross_entropy(model(x), y).backward()
    p = model.last.weight
    p.grad = torch.ones_like(p)
    optimizer.step()


@mistake
def weights_changed_on_one_rank(rank: int) -> None:
    private, model, optimizer = bind()
    for step, (x, y) in enumerate(private.loader):
        if rank == 1 and step == 2:
            with torch.no_grad():
                model.scale += 1e-9
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@mistake
def sums_of_different_steps(rank: int) -> None:
    all_reduce_({"w": torch.ones(3)}, 7 + rank, World.here())


def _drifted(kind: str, rank: int) -> None:
    private, model, optimizer = bind(kind)
    if rank == 1:
        private.stand_at(1)
    before = jobs.weights(model)
    try:
        jobs.loop(private, model, optimizer)
    finally:
        # Whoever catches it and steps all the same would release sums of two steps.
        for go_on in (optimizer.step, lambda: next(iter(private.loader))):
            with pytest.raises(lc.TrainingError, match="none goes on alone"):
                go_on()
        after = jobs.weights(model)
        assert all(torch.equal(before[name], after[name]) for name in before), "a rank stepped alone"


@mistake
def a_rank_at_another_step(rank: int) -> None:
    _drifted("plain", rank)


@mistake
def a_shard_at_another_step(rank: int) -> None:
    _drifted("fsdp", rank)


@mistake
def save_with_a_key_in_memory(rank: int) -> None:
    private, _, _ = bind("ddp")
    private.save("nowhere")


@mistake
def captured_step(rank: int) -> None:
    bind()[0].captured_step(lambda model, x: model(x).sum(), [])


@mistake
def infinite_sum(rank: int) -> None:
    """Without noise and clipping a sum can overflow: all ranks refuse the step, and the run stops on all."""
    private, model, optimizer = bind(plan=oracle.plan(epsilon=math.inf))
    x, y = next(iter(private.loader))
    (F.cross_entropy(model(x), y) * (math.inf if rank == 1 else 1.0)).backward()
    for total in private.clipper.sums.values():
        total.fill_(math.inf)
    optimizer.step()


def commit(names: list[str]) -> list[tuple[str, str] | None]:
    """Make every mistake in turn; the error's type and text, or None where nothing was refused."""
    rank, found = dist.get_rank(), []
    for name in names:
        try:
            MISTAKES[name](rank)
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        else:
            found.append(None)
        dist.barrier()
    return found
