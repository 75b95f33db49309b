"""Clipped sums of an FSDP2 model: formed one group of parameters at a time, reduce-scattered at once.

FSDP2 gathers parameters for the forward and backward passes and never sees a gradient, because clipping keeps
gradients away from autograd. When a backward pass has ended and the clip factors are known, the sums of each group (the
parameters of one ``fully_shard`` call) are formed whole, reduce-scattered in float32, and let go: beyond the shards, no
rank ever holds more than two groups' sums. That is the traffic of ordinary FSDP2 training with float32 reductions.

With physical batches, all but the last of a logical batch are added up locally, which takes whole sums (as
``set_requires_gradient_sync(False)`` does in ordinary training); ``reduce_every_batch`` reduces each instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from lambdacgd.clipping import Record, Totals, accumulator, compute_device
from lambdacgd.training.distributed.reduction import TAGS, all_reduce_, check_tag, tag
from lambdacgd.training.distributed.shards import Place, fsdp_modules, is_sharded, place_of
from lambdacgd.training.distributed.world import World
from lambdacgd.training.errors import TrainingError
from lambdacgd.validation import InvalidInput

# Its name since torch 2.13; the older one warns there.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(eq=False)
class Group:
    """Parameters whose sums travel together, and the memory that receives this rank's part of them."""

    places: list[Place]
    shard_group: Any
    replicas: Any | None  # the process group of ranks with the same shards (HSDP)
    received: Tensor

    @property
    def ranks(self) -> int:
        return self.places[0].ranks


class ShardedTotals(Totals):
    """Takes the place of the clipper's buffers: ``filled`` holds this rank's shards of sums over all ranks."""

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], world: World, *, reduce_every_batch: bool
    ) -> None:
        super().__init__()
        self._world, self.reduce_every_batch = world, reduce_every_batch
        self._parameters = dict(parameters)
        self.device = compute_device(next(iter(self._parameters.values())))
        self.places = {name: place_of(name, p) for name, p in self._parameters.items() if is_sharded(p)}
        self._groups = self._make_groups(model)
        self._apart = [name for name in self._parameters if name not in self.places]  # replicated: not under FSDP2
        self._step, self._last, self._expects = 0, False, False
        self.failed = False
        self._fresh = True  # nothing reduced yet in this logical batch
        self._whole: dict[str, Tensor] = {}
        self._waiting: dict[str, tuple[Record, Tensor, Tensor | None]] = {}

    @property
    def offsets(self) -> dict[str, int]:
        """Where each shard begins in the noise field."""
        return {name: place.offset for name, place in self.places.items()}

    def expect(self, step: int, *, last: bool) -> None:
        """The next backward pass is of this step; ``last``: the logical batch is then whole."""
        self._step, self._last, self._expects = step, last, True

    # --- what the clipper calls --------------------------------------------------------------------------------------

    def add(self, record: Record, like: Tensor, factor: Tensor, keep: Tensor | None) -> None:
        if self._reduces:
            self._waiting[record.name] = (record, factor, keep)  # formed when its group's turn comes
        else:
            self._form(record, factor, keep)

    def finish(self) -> None:
        """Form and reduce all sums, if the logical batch is whole. Every rank goes through the groups in one order."""
        if not self._reduces:
            return
        self.failed = True  # until all is done: whoever fails half-way must not try again alone
        sent: Sent | None = None
        tags = []
        for group in self._groups:
            following = self._send(group)  # formed while the group before is on its way
            if sent is not None:
                tags.append(self._receive(sent))
            sent = following
        if sent is not None:
            tags.append(self._receive(sent))
        if tags:
            self._check(tags)
        self._reduce_apart()
        self._fresh = self.failed = False

    def clear(self) -> None:
        super().clear()
        self._whole, self._waiting, self._fresh, self._expects = {}, {}, True, False

    def zeros(self, name: str, like: Tensor) -> Tensor:
        raise TrainingError(
            f"the sums of {name!r} were not reduced: the backward pass of the last physical batch has not run"
        )

    # --- the reduction -----------------------------------------------------------------------------------------------

    @property
    def _reduces(self) -> bool:
        """A backward pass outside any batch stays where it is; it is forgotten when the next batch comes."""
        return self._expects and (self._last or self.reduce_every_batch)

    def _form(self, record: Record, factor: Tensor, keep: Tensor | None) -> None:
        total = self._whole.get(record.name)
        fresh = total is None
        if total is None:
            p = self._parameters[record.name]
            total = torch.empty(p.shape, dtype=accumulator(p.dtype), device=self.device)
            self._whole[record.name] = total
        record.add(total, factor.to(total.dtype), keep, fresh=fresh)

    def _sum_of(self, name: str) -> Tensor | None:
        """This rank's whole sum of a parameter, handed over; None where no example used it."""
        if name in self._waiting:
            self._form(*self._waiting.pop(name))
        return self._whole.pop(name, None)

    def _send(self, group: Group) -> Sent:
        flat = torch.zeros(group.ranks, group.received.numel(), dtype=group.received.dtype, device=self.device)
        start = 0
        for place in group.places:
            total = self._sum_of(place.name)
            if total is not None:
                place.scatter_into(flat, start, total)
            start += place.chunk
        flat[:, start:] = torch.tensor(tag(self._step, begins=self._fresh), dtype=flat.dtype, device=self.device)
        out = group.received if self._fresh else torch.empty_like(group.received)
        if group.ranks == 1:
            return Sent(group, flat, out.copy_(flat[0]), None)
        work = _reduce_scatter(out, flat.view(-1), group=group.shard_group, async_op=True)
        return Sent(group, flat, out, work)

    def _receive(self, sent: Sent) -> Tensor:
        """Wait for a group's sums and hand out its shards; returns the bucket's tag."""
        group = sent.group
        if sent.work is not None:
            sent.work.wait()
        if group.replicas is not None:
            dist.all_reduce(sent.out, group=group.replicas)
        tags = sent.out[-TAGS:].to(torch.float64, copy=True)
        if sent.out is not group.received:
            group.received.add_(sent.out)
        start = 0
        for place in group.places:
            self.filled[place.name] = group.received[start : start + place.count].view(place.local_shape)
            start += place.chunk
        return tags

    def _check(self, tags: list[Tensor]) -> None:
        for received in torch.stack(tags).cpu().unbind(0):  # one wait for the device
            check_tag(received, self._step, self._world.size, begins=self._fresh)

    def _reduce_apart(self) -> None:
        sums = {}
        for name in self._apart:
            total, p = self._sum_of(name), self._parameters[name]
            if total is None:
                total = torch.zeros(p.shape, dtype=accumulator(p.dtype), device=self.device)
            sums[name] = total
        if sums:
            all_reduce_(sums, self._step, self._world, begins=self._fresh)
            for name, total in sums.items():
                self.filled[name] = total if self._fresh else self.filled[name].add_(total)

    def _make_groups(self, model: nn.Module) -> list[Group]:
        found: dict[tuple[Any, ...], list[Place]] = {}
        paths = sorted((path for path, _ in fsdp_modules(model)), key=len, reverse=True)
        for name, place in self.places.items():
            owner = next((path for path in paths if path == "" or name.startswith(path + ".")), "")
            mesh = self._parameters[name].device_mesh  # type: ignore[attr-defined]
            if mesh.size() != self._world.size:
                raise InvalidInput(
                    "model",
                    f"parameter {name!r} on a mesh of {mesh.size()} processes, where {self._world.size} train together",
                    "shard over all processes of the job, or pass the mesh's process group as process_group",
                )
            found.setdefault((owner, place.dtype, id(mesh)), []).append(place)
        groups = []
        for places in found.values():
            mesh = self._parameters[places[0].name].device_mesh  # type: ignore[attr-defined]
            width = sum(place.chunk for place in places) + TAGS
            groups.append(
                Group(
                    places,
                    mesh.get_group(mesh.ndim - 1),
                    mesh.get_group(0) if mesh.ndim == 2 else None,
                    torch.zeros(width, dtype=places[0].dtype, device=self.device),
                )
            )
        return groups


@dataclass(eq=False)
class Sent:
    """A group's sums on their way; ``flat`` must live until they have arrived."""

    group: Group
    flat: Tensor
    out: Tensor
    work: Any
