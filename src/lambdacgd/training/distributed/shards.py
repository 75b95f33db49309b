"""Where FSDP2 keeps a parameter: which rows of it are here, and how gradients go back to it."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lambdacgd.clipping import accumulator
from lambdacgd.validation import InvalidInput


def is_sharded(p: Tensor) -> bool:
    """Whether a parameter is a DTensor, of which this process holds a part."""
    return hasattr(p, "device_mesh") and hasattr(p, "placements")


def local(p: Any) -> Tensor:
    """This process's part of a tensor, without autograd."""
    return p._local_tensor if is_sharded(p) else p


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
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or id(value) in seen:
            continue
        seen.add(id(value))
        whole = gathered(value)
        if keep:
            found[name] = whole.detach().cpu().contiguous()
    return found


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


def gradient_like(p: Any, value: Tensor) -> Tensor:
    """``value`` as ``p.grad``: in the parameter's type, device, strides and distribution."""
    own = local(p).detach()
    value = value.to(device=own.device, dtype=own.dtype)
    if value.stride() != own.stride():  # channels_last: fused optimizers walk both through memory side by side
        value = torch.empty_like(own).copy_(value)
    if not is_sharded(p):
        return value
    from torch.distributed.tensor import DTensor

    return DTensor(value, p._spec, requires_grad=False)  # from_local would move it back to the mesh's device


@dataclass(frozen=True)
class Place:
    """Rows of a parameter of shape [n, …]: rank r of ``ranks`` holds rows r·c … (r+1)·c with c = ⌈n/ranks⌉."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rank: int
    ranks: int

    @property
    def row(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[1:])

    @property
    def rows(self) -> int:
        """Rows that one rank holds at most."""
        return -(-self.shape[0] // self.ranks)

    @property
    def chunk(self) -> int:
        """Elements that travel to each rank, padded."""
        return self.rows * self.row

    @property
    def offset(self) -> int:
        """The row-major index of the first element held here: what names the shard in the noise field."""
        return min(self.rank * self.rows, self.shape[0]) * self.row

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (max(0, min(self.rows, self.shape[0] - self.rank * self.rows)), *self.shape[1:])

    @property
    def count(self) -> int:
        return math.prod(self.local_shape)

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
    kinds = [str(placement) for placement in p.placements]
    shards = [k for k, placement in enumerate(p.placements) if not placement.is_replicate()]
    last = p.device_mesh.ndim - 1
    if p.device_mesh.ndim > 2 or shards != [last] or not p.placements[last].is_shard(0):
        raise InvalidInput(
            "model",
            f"parameter {name!r} placed as {', '.join(kinds)}",
            "fully_shard must shard dimension 0 over one mesh dimension (replicated over another at most). Tensor "
            "parallelism and shard_placement_fn with other dimensions are not supported: leave them out",
        )
    ranks = p.device_mesh.size(last)
    place = Place(name, tuple(p.shape), accumulator(p.dtype), p.device_mesh.get_local_rank(last), ranks)
    if tuple(local(p).shape) != place.local_shape:
        raise InvalidInput(
            "model",
            f"parameter {name!r} with a local part of shape {tuple(local(p).shape)} where {place.local_shape} belongs",
            "shard it with torch.distributed.fsdp.fully_shard",
        )
    return place
