"""Adding up what the ranks gathered, once a logical step, in float32 or float64.

Guarantee
---------
Every bucket that is reduced carries two numbers that only agree if all ranks are at the same step: sums of different
steps are never added and released. Ranks receive the same bits, so they add the same noise to the same sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from lambdacgd import torch_private
from lambdacgd.clipping import Record, Totals, accumulator, compute_device
from lambdacgd.clipping.backward import holders
from lambdacgd.errors import InvalidInput, TrainingError
from lambdacgd.training.distributed.models import Place, fsdp_modules, is_sharded, place_of
from lambdacgd.training.distributed.world import World

BUCKET_BYTES = 25 << 20  #: tensors below this travel together (DDP's own bucket size); larger ones alone, uncopied
TAGS = 2  #: numbers added to a bucket


def tag(step: int) -> list[float]:
    """(s, s²) with s = step mod 32. Over any ranks, mean s² = (mean s)² only if all s are equal.

    Added exactly in float32 by 4 096 ranks. That steps 32 apart have the same tag does no harm: all ranks begin at one
    place, and reductions are collective, so the k-th of one rank meets the k-th of the others. After one that succeeded
    a rank goes on to the next step or, where its batch was dropped, to the same one; ranks that part do so as t and
    t + 1, and that reduction fails on all ranks, of which none goes on.
    """
    s = step % 32
    return [float(s), float(s * s)]


def check_tag(received: Tensor, step: int, ranks: int) -> None:
    """Refuse a bucket whose parts come from different steps."""
    if received.tolist() != [ranks * t for t in tag(step)]:
        raise TrainingError(
            f"this rank reduced its sums at step {step} and another rank at another: they have drifted apart (an error "
            "caught on one of them?). Stop the job and resume all ranks from the newest checkpoint"
        )


def all_reduce_(sums: dict[str, Tensor], step: int, world: World) -> None:
    """Replace each rank's sums by their sum over all ranks, in place."""
    if not world.many:
        return
    large = [t for t in sums.values() if t.numel() * t.element_size() >= BUCKET_BYTES and t.is_contiguous()]
    taken = {id(t) for t in large}
    works = [dist.all_reduce(t, async_op=True) for t in large]
    flats: list[tuple[Tensor, list[Tensor]]] = []
    for members in _buckets(t for t in sums.values() if id(t) not in taken):
        like = members[0] if members else next(iter(sums.values()))
        parts = [t.reshape(-1) for t in members]
        if not flats:
            parts.append(torch.tensor(tag(step), dtype=like.dtype, device=like.device))
        flat = torch.cat(parts)
        works.append(dist.all_reduce(flat, async_op=True))
        flats.append((flat, members))
    for work in works:
        work.wait()
    check_tag(flats[0][0][-TAGS:], step, world.size)
    for flat, members in flats:
        if members:
            sizes = [t.numel() for t in members]
            parts = flat[: sum(sizes)].split(sizes)
            torch_private.foreach_copy_(members, [part.view(t.shape) for part, t in zip(parts, members, strict=True)])


def _buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors of one dtype and device together, up to the bucket's size; one bucket at least, for the tag."""
    open_: dict[Any, list[Tensor]] = {}
    done, filled = [], dict[Any, int]()
    for t in tensors:
        kind, size = (t.dtype, t.device), t.numel() * t.element_size()
        if kind in open_ and filled[kind] + size > BUCKET_BYTES:
            done.append(open_.pop(kind))
        if kind not in open_:
            open_[kind], filled[kind] = [], 0
        open_[kind].append(t)
        filled[kind] += size
    return done + list(open_.values()) or [[]]


# --- sharded models --------------------------------------------------------------------------------------------------

# Its name since torch 2.13; the older one warns there.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(eq=False)
class Group:
    """Parameters whose sums travel together, and the memory that receives this rank's part of them."""

    places: list[Place]
    ranks: Any
    received: Tensor


class ShardedTotals(Totals):
    """Takes the place of the clipper's buffers: ``filled`` holds this rank's shards of sums over all ranks.

    FSDP2 gathers parameters for the forward and backward passes and never sees a gradient, because clipping keeps
    gradients away from autograd. When a logical batch's last backward pass has ended and the clip factors are known,
    the sums of each group (the parameters of one ``fully_shard`` call) are formed whole, reduce-scattered in float32,
    and let go: beyond the shards, no rank ever holds more than two groups' sums, which is the traffic of ordinary FSDP2
    training. Physical batches before the last are added up locally, which takes whole sums.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], world: World) -> None:
        super().__init__()
        self._world, self._parameters = world, dict(parameters)
        self.device = compute_device(next(iter(self._parameters.values())))
        self.places = {name: place_of(name, p) for name, p in self._parameters.items() if is_sharded(p)}
        self._groups = self._make_groups(model)
        self._apart = [name for name in self._parameters if name not in self.places]  # replicated: not under FSDP2
        self._step, self._reduces = 0, False
        self.failed = False
        self._whole: dict[str, Tensor] = {}
        self._waiting: dict[str, tuple[Record, Tensor, Tensor | None]] = {}

    @property
    def offsets(self) -> dict[str, int]:
        """Where each shard begins in the noise field."""
        return {name: place.offset for name, place in self.places.items()}

    def expect(self, step: int, *, last: bool) -> None:
        """The next backward pass is of this step; ``last``: the logical batch is then whole."""
        self._step, self._reduces = step, last

    # --- what the clipper calls --------------------------------------------------------------------------------------

    def add(self, record: Record, like: Tensor, factor: Tensor, keep: Tensor | None) -> None:
        if self._reduces:
            self._waiting[record.name] = (record, factor, keep)  # formed when its group's turn comes
        else:
            self._form(record, factor, keep)

    def finish(self, keep: Tensor | None) -> None:
        """Form and reduce all sums, if the logical batch is whole. Every rank goes through the groups in one order."""
        if not self._reduces:
            return
        self.failed = True  # until all is done: whoever fails half-way must not try again alone
        tags: list[Tensor] = []
        arriving: deque[Callable[[], Tensor]] = deque()
        for group in self._groups:
            arriving.append(self._send(group))  # formed while the group before is on its way
            if len(arriving) > 1:
                tags.append(arriving.popleft()())
        tags += [receive() for receive in arriving]
        for received in torch.stack(tags).cpu().unbind(0) if tags else ():  # one wait for the device
            check_tag(received, self._step, self._world.size)
        apart = {}
        for name in self._apart:
            total, p = self._sum_of(name), self._parameters[name]
            if total is None:
                total = torch.zeros(p.shape, dtype=accumulator(p.dtype), device=self.device)
            apart[name] = total
        if apart:
            all_reduce_(apart, self._step, self._world)
            self.filled.update(apart)
        self.failed = False

    def leave(self) -> None:
        for group in self._groups if not self.filled else ():
            if holders(group.received) > 1:
                group.received = torch.zeros_like(group.received)

    def clear(self) -> None:
        super().clear()
        self._whole, self._waiting, self._reduces = {}, {}, False

    def zeros(self, name: str, like: Tensor) -> Tensor:
        raise TrainingError(f"the sums of {name!r} were not reduced: the last physical batch had no backward pass")

    # --- the reduction -----------------------------------------------------------------------------------------------

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

    def _send(self, group: Group) -> Callable[[], Tensor]:
        """Form a group's sums and send them; returns what waits for this rank's part of them."""
        flat = torch.zeros(self._world.size, group.received.numel(), dtype=group.received.dtype, device=self.device)
        start = 0
        for place in group.places:
            total = self._sum_of(place.name)
            if total is not None:
                place.scatter_into(flat, start, total)
            start += place.chunk
        flat[:, start:] = torch.tensor(tag(self._step), dtype=flat.dtype, device=self.device)
        if not self._world.many:  # nothing is sent
            group.received.copy_(flat[0])
            return partial(self._receive, group, None, flat)
        work = _reduce_scatter(group.received, flat.view(-1), group=group.ranks, async_op=True)
        return partial(self._receive, group, work, flat)

    def _receive(self, group: Group, work: Any, flat: Tensor) -> Tensor:
        """Wait for a group's sums, whose ``flat`` must live until then, and hand out its shards; returns their tag."""
        if work is not None:
            work.wait()
        start = 0
        for place in group.places:
            self.filled[place.name] = group.received[start : start + place.count].view(place.local_shape)
            start += place.chunk
        return group.received[-TAGS:].to(torch.float64)

    def _make_groups(self, model: nn.Module) -> list[Group]:
        by_owner: dict[tuple[Any, ...], list[Place]] = {}
        paths = sorted((path for path, _ in fsdp_modules(model)), key=len, reverse=True)
        for name, place in self.places.items():
            owner = next((path for path in paths if path == "" or name.startswith(path + ".")), "")
            if place.ranks != self._world.size:
                both = f"{name!r} is on a mesh of {place.ranks} processes, and {self._world.size} train together"
                raise InvalidInput("model", f"{both}: shard over all of them.")
            mesh = self._parameters[name].device_mesh  # type: ignore[attr-defined]
            by_owner.setdefault((owner, place.dtype, mesh), []).append(place)
        groups = []
        for (_, dtype, mesh), places in by_owner.items():
            width = sum(place.chunk for place in places) + TAGS
            groups.append(Group(places, mesh.get_group(), torch.zeros(width, dtype=dtype, device=self.device)))
        return groups
