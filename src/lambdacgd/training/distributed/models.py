"""How the model is spread over processes: wrapped in DistributedDataParallel, or sharded by FSDP2's ``fully_shard``.

Which rows of a parameter are here; how wrappers are kept from sending gradients that were not clipped; and that all
ranks begin with the same weights and keep them.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lambdacgd.clipping import accumulator
from lambdacgd.clipping.probe import fingerprints
from lambdacgd.errors import InvalidInput, TrainingError
from lambdacgd.torch_private import active_ddp, ddp_parameters, local_tensor, not_compiled
from lambdacgd.training.distributed.world import World

# --- parameters and their shards -------------------------------------------------------------------------------------


def is_sharded(p: Any) -> bool:
    """Whether a tensor is a DTensor, of which this process holds a part."""
    return hasattr(p, "device_mesh") and hasattr(p, "placements")


def local(p: Any) -> Tensor:
    """This process's part of a tensor, without autograd."""
    return local_tensor(p) if is_sharded(p) else p


def fsdp_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """The modules that ``fully_shard`` was called on, with their paths."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes a second, and who shards has done so
    return [] if fsdp is None else [(path, m) for path, m in model.named_modules() if isinstance(m, fsdp.FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Let go of gathered parameters: after a forward pass without a backward pass the root keeps them, and would
    compute with old values once its shards change.
    """
    for _, module in fsdp_modules(model):
        module.reshard()


def whole_state(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """The state_dict with sharded tensors gathered, one after another, in host memory; tied ones once.

    All ranks must call it; those that do not ``keep`` get nothing.
    """
    reshard(model)
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or id(value) in seen:
            continue
        seen.add(id(value))
        whole = gathered(value)
        if keep:
            state[name] = whole.detach().cpu().contiguous()
    return state


def gathered(p: Any) -> Tensor:
    """The whole of a tensor, wherever its shards are kept. All ranks must call it."""
    if not is_sharded(p):
        whole: Tensor = p
        return whole
    from torch.distributed.tensor import DTensor

    # from_local moves shards kept in host memory to the mesh's device, where its process group can send them.
    shape = {"shape": p.shape, "stride": p.stride()}
    moved = DTensor.from_local(local(p).detach(), p.device_mesh, p.placements, run_check=False, **shape)
    return moved.full_tensor()


class Place:
    """Rows of a parameter of shape [n, …]: rank r of ``ranks`` holds rows r·c … (r+1)·c with c = ⌈n/ranks⌉."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, rank: int, ranks: int) -> None:
        self.name, self.dtype, self.ranks = name, dtype, ranks
        row, rows = math.prod(shape[1:]), -(-shape[0] // ranks)
        self.chunk = rows * row  # elements that travel to each rank, padded
        self.first = min(rank * rows, shape[0])  # the first row held here
        self.offset = self.first * row  # the row-major index of its first element, which names it in the noise field
        self.local_shape = (min(rows, shape[0] - self.first), *shape[1:])
        self.count = math.prod(self.local_shape)

    def scatter_into(self, flat: Tensor, start: int, total: Tensor) -> None:
        """Put rank r's rows of ``total`` into ``flat[r, start:]``."""
        whole = total.reshape(-1)
        if self.chunk == 0:
            return
        full = whole.numel() // self.chunk
        flat[:full, start : start + self.chunk].copy_(whole[: full * self.chunk].view(full, self.chunk))
        rest = whole[full * self.chunk :]
        if rest.numel():
            flat[full, start : start + rest.numel()].copy_(rest)


def place_of(name: str, p: Any) -> Place:
    """Where a sharded parameter lies; refused if its shard is not a run of whole rows."""
    if p.device_mesh.ndim != 1 or not p.placements[0].is_shard(0):
        raise InvalidInput(
            "model",
            f"Parameter {name!r} is placed as {', '.join(map(str, p.placements))}. Shard dimension 0 alone: without "
            "HSDP, tensor parallelism and shard_placement_fn.",
        )
    place = Place(name, tuple(p.shape), accumulator(p.dtype), p.device_mesh.get_local_rank(), p.device_mesh.size())
    if tuple(local(p).shape) != place.local_shape:
        here = f"The local part of {name!r} has shape {tuple(local(p).shape)}, not {place.local_shape}"
        raise InvalidInput("model", f"{here}: shard it with fully_shard.")
    return place


# --- wrappers --------------------------------------------------------------------------------------------------------


def unwrap(model: Any, world: World) -> Any:
    """The user's own module inside DistributedDataParallel; anything else as it is, unless it cannot be trained."""
    if isinstance(model, DistributedDataParallel):
        _check_ddp(model, world, dict(model.module.named_parameters()))
        model = model.module
    if isinstance(model, nn.Module):
        for path, module in model.named_modules():
            if isinstance(module, DistributedDataParallel):
                raise InvalidInput("model", f"DistributedDataParallel wraps {path!r}. Wrap the whole model.")
            if type(module).__name__ == "FullyShardedDataParallel":
                raise InvalidInput("model", f"FSDP1, at {path!r}, hides layers. Use FSDP2's fully_shard.")
        reshard(model)
    return model


def _check_ddp(model: DistributedDataParallel, world: World, parameters: dict[str, nn.Parameter]) -> None:
    ranks = dist.get_world_size(model.process_group)
    if ranks != world.size:
        wrapped = f"DistributedDataParallel wraps the model over {ranks} of {world.size} processes"
        raise InvalidInput("model", f"{wrapped}: wrap it over all.")
    if model.static_graph or model.mixed_precision:
        raise InvalidInput("model", "DistributedDataParallel has static_graph or mixed_precision. Leave them out.")
    known = {id(p) for p in ddp_parameters(model)}
    new = [name for name, p in parameters.items() if p.requires_grad and id(p) not in known]
    if new:
        late = f"DistributedDataParallel does not know {new[0]!r}: change the model first"
        raise InvalidInput("model", f"{late}, then wrap it, make the optimizer, and privatize.")


def follow(model: nn.Module, given: Any, world: World, undo: contextlib.ExitStack) -> None:
    """Let DistributedDataParallel send nothing: clipped sums are reduced by us, once a logical step.

    Its reducer waits for gradients from autograd, which never come here, and its buffers' broadcast would hold up
    ranks. The wrapper ``given``, and any that is put around ``model`` later (as accelerate does), is put into the state
    that ``no_sync()`` puts it in. A process that trains by itself has no process group, and its forward pass no hook.
    """
    if not world.job:
        return
    silenced: set[int] = set()
    own = dict(model.named_parameters())  # as they are: in the clipper's first passes others stand in for them

    def silence(wrapper: DistributedDataParallel) -> None:
        silenced.add(id(wrapper))
        for name in ("require_backward_grad_sync", "require_forward_param_sync"):
            of_wrappers.callback(setattr, wrapper, name, getattr(wrapper, name))
            setattr(wrapper, name, False)

    def before_forward(module: nn.Module, args: Any) -> None:
        wrapper = active_ddp()
        if wrapper is not None and wrapper.module is model and id(wrapper) not in silenced:
            _check_ddp(wrapper, world, own)
            silence(wrapper)

    of_wrappers = undo.enter_context(contextlib.ExitStack())  # wrappers come later, too
    if isinstance(given, DistributedDataParallel):
        silence(given)
    undo.callback(model.register_forward_pre_hook(not_compiled(before_forward)).remove)


def check_spread_as_before(model: nn.Module, sharded_modules: int, world: World) -> None:
    """Refuse a model that was sharded, or a job that was begun, since the run was bound."""
    if len(fsdp_modules(model)) != sharded_modules:
        raise TrainingError("fully_shard was called after privatize: shard, then make the optimizer, then privatize")
    if not world.job and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise TrainingError(
            f"torch.distributed was initialised over {dist.get_world_size()} processes after privatize: each would "
            "train by itself. Call init_process_group() first, then wrap, then privatize"
        )


@torch.no_grad()
def broadcast_(model: nn.Module, world: World) -> None:
    """Rank 0's parameters and buffers on every rank, as wrapping in DistributedDataParallel would do; shards stay."""
    if not world.many:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        if not is_sharded(tensor):
            held = tensor.detach()
            value = held.contiguous()
            # As bytes: process groups do not know every type (int16, float8).
            dist.broadcast(value.reshape(-1).view(torch.uint8), src=0)
            if value is not held and not torch.equal(value, held):  # one that was expanded cannot be written
                held.copy_(value)


# --- do all ranks begin with the same weights, and keep them? --------------------------------------------------------


def compare_weights(parameters: Mapping[str, nn.Parameter], optimizer: Optimizer, step: int, world: World) -> None:
    """An error on every rank unless replicas are equal to the bit. All must call it.

    Shards, which nobody else holds, cannot be compared: that the optimizers' settings agree keeps them together.
    """
    if world.many:
        bits = fingerprints(p for p in parameters.values() if not is_sharded(p))
        facts = optimizer_settings(parameters, optimizer) | {"steps taken": step, "weights": bits}
        drifted = "They have drifted apart: other hardware or libraries, or weights changed by hand"
        world.agree(f"after step {step}", facts, {"weights": f"{drifted}. Resume all from the newest checkpoint"})


def optimizer_settings(parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> dict[str, Any]:
    """What the optimizer does to the weights: its class and, a fact each, the settings of its parameter groups."""
    settings: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    for k, group in enumerate(groups_by_name(parameters, optimizer)):
        for name, value in group.items():
            if isinstance(value, Tensor):
                value = value.tolist()
            if value is None or isinstance(value, (bool, int, float, str, list, tuple)):
                settings[f"{name} of the optimizer's group {k}"] = value
    return settings


def groups_by_name(parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> list[dict[str, Any]]:
    """The optimizer's parameter groups with names in place of parameters (frozen parameters have none)."""
    names = {id(p): name for name, p in parameters.items()}
    return [
        {key: value for key, value in group.items() if key != "params"}
        | {"names": [names.get(id(p), f"frozen {k}") for k, p in enumerate(group["params"])]}
        for group in optimizer.param_groups
    ]
