"""What the model is wrapped in, and how its wrapper is kept from sending gradients that were not clipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lambdacgd.training.distributed.shards import fsdp_modules, is_sharded, reshard
from lambdacgd.training.distributed.world import World
from lambdacgd.training.errors import TrainingError
from lambdacgd.validation import InvalidInput

Undo = Callable[[], None]


def unwrap(model: Any, world: World) -> Any:
    """The user's own module inside DistributedDataParallel; anything else as it is, unless it cannot be trained."""
    if isinstance(model, DistributedDataParallel):
        _check_ddp(model, world)
        model = model.module
    if isinstance(model, nn.Module):
        for path, module in model.named_modules():
            if isinstance(module, DistributedDataParallel):
                raise InvalidInput(
                    "model", f"DistributedDataParallel around its part {path!r}", "wrap the whole model, or nothing"
                )
            if type(module).__name__ == "FullyShardedDataParallel":
                raise InvalidInput(
                    "model",
                    f"FullyShardedDataParallel (FSDP1) at {path!r}",
                    "it flattens parameters, so clipping cannot see layers: use torch.distributed.fsdp.fully_shard",
                )
        reshard(model)
    return model


def _check_ddp(model: DistributedDataParallel, world: World) -> None:
    if dist.get_world_size(model.process_group) != world.size:
        raise InvalidInput(
            "process_group",
            f"{world.size} process(es), where the model is wrapped over {dist.get_world_size(model.process_group)}",
            "pass the group that DistributedDataParallel was given",
        )
    _check_ddp_options(model)


def _check_ddp_options(model: DistributedDataParallel) -> None:
    for name, asked in (("static_graph", model.static_graph), ("mixed_precision", model.mixed_precision)):
        if asked:
            raise InvalidInput(
                "model",
                f"DistributedDataParallel({name}=…)",
                "it hooks into gradients that private training never makes: leave it out (autocast works)",
            )
    known = {id(p) for p in model._module_parameters}
    new = [name for name, p in model.module.named_parameters() if p.requires_grad and id(p) not in known]
    if new:
        raise InvalidInput(
            "model",
            f"{new[0]!r}, which came after wrapping ({len(new)} parameter(s))",
            "DistributedDataParallel does not know it. Convert and change the model first, then wrap it, make the "
            "optimizer, and privatize",
        )


def quiet(model: DistributedDataParallel) -> Undo:
    """Let DistributedDataParallel send nothing: clipped sums are reduced by us, once a logical step.

    Its reducer waits for gradients from autograd, which never come here, and its buffers' broadcast would hold up
    ranks. This is the state that ``no_sync()`` puts it in.
    """
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = False

    def undo() -> None:
        model.require_backward_grad_sync, model.require_forward_param_sync = before

    return undo


def follow(model: nn.Module, given: Any, world: World) -> list[Undo]:
    """Quieten the wrapper ``given``, and any that is put around ``model`` later (as accelerate does)."""
    known: dict[int, Undo] = {}
    if isinstance(given, DistributedDataParallel):
        known[id(given)] = quiet(given)

    def before_forward(module: nn.Module, args: Any) -> None:
        wrapper = DistributedDataParallel._active_ddp_module
        if wrapper is None or wrapper.module is not model or id(wrapper) in known:
            return
        if dist.get_world_size(wrapper.process_group) != world.size:
            raise TrainingError(
                f"the model was wrapped in DistributedDataParallel over {dist.get_world_size(wrapper.process_group)} "
                f"processes after privatize, which knew of {world.size}: each would train by itself. Call "
                "torch.distributed.init_process_group() first, then wrap, then privatize"
            )
        _check_ddp_options(wrapper)
        known[id(wrapper)] = quiet(wrapper)

    def undo() -> None:
        for each in known.values():
            each()

    hook = torch._dynamo.disable(before_forward)
    return [model.register_forward_pre_hook(hook).remove, undo]


def check_not_sharded_since(model: nn.Module, before: int) -> None:
    """``before``: how many modules were sharded when the run was bound."""
    if len(fsdp_modules(model)) != before:
        raise TrainingError(
            "fully_shard was called after privatize, so the optimizer and the clipper hold parameters that the model "
            "does not use. The order is: fully_shard(model), then the optimizer, then privatize"
        )


@torch.no_grad()
def broadcast_(model: nn.Module, world: World) -> None:
    """Rank 0's parameters and buffers on every rank, as wrapping in DistributedDataParallel would do; shards stay."""
    if not world.many:
        return
    seen: set[int] = set()
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        if id(tensor) not in seen and not is_sharded(tensor):
            seen.add(id(tensor))
            held = tensor.detach()
            value = held.contiguous()
            # As bytes: process groups do not know every type (int16, float8).
            dist.broadcast(value.reshape(-1).view(torch.uint8), src=world.source, group=world.group)
            if value is not held and not torch.equal(value, held):  # one that was expanded cannot be written
                held.copy_(value)
