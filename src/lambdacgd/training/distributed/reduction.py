"""Adding up what the ranks gathered, once a logical step, in float32 or float64.

Guarantee
---------
Every bucket that is reduced carries two numbers that only agree if all ranks are at the same step: sums of different
steps are never added and released. Ranks receive the same bits, so they add the same noise to the same sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from lambdacgd.training.distributed.world import World
from lambdacgd.training.errors import TrainingError

BUCKET_BYTES = 25 << 20  #: tensors below this travel together (DDP's own bucket size); larger ones alone, uncopied
TAGS = 2  #: numbers added to a bucket


def tag(step: int, *, begins: bool) -> list[float]:
    """(s, s²) with s = 2·(step mod 32), plus one unless the reduction ``begins`` its logical batch.

    Over any ranks, mean s² = (mean s)² only if all s are equal; small enough to be added exactly in float32 by 4 096
    ranks. That steps 32 apart have the same tag does no harm. All ranks begin at one place (they agree on it when they
    start or resume), and reductions are collective: the k-th of one rank meets the k-th of the others. After one that
    succeeded, a rank goes on to the next reduction of its logical batch, or to the first of the next step, or, where
    its batch was dropped, back to the first of the same step; in no other way does its step change. So ranks that part
    do so as (t, later) or (t + 1, first) against (t, first), which are three different tags, and that reduction fails
    on all ranks, of which none goes on.
    """
    s = 2 * (step % 32) + (not begins)
    return [float(s), float(s * s)]


def check_tag(received: Tensor, step: int, ranks: int, *, begins: bool) -> None:
    """Refuse a bucket whose parts come from different steps, or from different parts of a step's batch."""
    if received.tolist() != [ranks * t for t in tag(step, begins=begins)]:
        raise TrainingError(
            f"this rank reduced its sums at step {step}, and another rank at another step or another part of its "
            "batch. The ranks have drifted apart (an error caught on one of them, a loop that breaks at different "
            "steps). Nothing was released at this step: stop the job and resume all ranks from the newest checkpoint"
        )


def all_reduce_(sums: dict[str, Tensor], step: int, world: World, *, begins: bool = True) -> None:
    """Replace each rank's sums by their sum over all ranks, in place. ``begins``: the first time in this step."""
    if not world.many:
        return
    large = [t for t in sums.values() if t.numel() * t.element_size() >= BUCKET_BYTES and t.is_contiguous()]
    taken = {id(t) for t in large}
    works = [dist.all_reduce(t, group=world.group, async_op=True) for t in large]
    flats: list[tuple[Tensor, list[Tensor]]] = []
    for members in _buckets(t for t in sums.values() if id(t) not in taken):
        like = members[0] if members else next(iter(sums.values()))
        parts = [t.reshape(-1) for t in members]
        if not flats:
            parts.append(torch.tensor(tag(step, begins=begins), dtype=like.dtype, device=like.device))
        flat = torch.cat(parts)
        works.append(dist.all_reduce(flat, group=world.group, async_op=True))
        flats.append((flat, members))
    for work in works:
        work.wait()
    check_tag(flats[0][0][-TAGS:], step, world.size, begins=begins)
    for flat, members in flats:
        _copy_back(flat, members)


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


def _copy_back(flat: Tensor, members: list[Tensor]) -> None:
    if not members:
        return
    parts = flat[: sum(t.numel() for t in members)].split([t.numel() for t in members])
    torch._foreach_copy_(members, [part.view(t.shape) for part, t in zip(parts, members, strict=True)])
