"""Do all ranks hold the same weights? A few numbers each, compared now and then."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lambdacgd.training.distributed.shards import is_sharded, local
from lambdacgd.training.errors import TrainingError

if TYPE_CHECKING:
    from lambdacgd.training.private import Private


def compare_weights(private: Private) -> None:
    """An error on every rank unless replicas, of parameters or of shards, are equal to the bit. All must call it."""
    world = private.world
    if not world.many:
        return
    parameters: list[Any] = list(private.clipper.parameters.values())
    plain = (private.steps_taken, *fingerprint(p for p in parameters if not is_sharded(p)))
    shards = [p for p in parameters if is_sharded(p) and p.device_mesh.ndim == 2]
    place = shards[0].device_mesh.get_local_rank(1) if shards else 0
    found = world.gather((plain, place, fingerprint(local(p) for p in shards)))
    first = {index: shard for _, index, shard in reversed(found)}  # the first rank's that holds this shard
    odd = [rank for rank, (own, index, shard) in enumerate(found) if own != found[0][0] or shard != first[index]]
    if odd:
        raise TrainingError(
            f"after step {private.steps_taken} the weights of rank(s) {', '.join(map(str, odd[:4]))} differ from those "
            "of the ranks before. They have drifted apart: different hardware or libraries, or weights changed by hand "
            "on some. Resume all from the newest checkpoint, on equal machines"
        )


@torch.no_grad()
def fingerprint(parameters: Iterable[Tensor]) -> tuple[int, int]:
    """Two 64-bit numbers that change when a bit of a parameter changes; computed where the parameters are."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    plain, weighted = 0, 0
    for p in parameters:
        flat = p.detach().contiguous().view(-1)
        for part in flat.view(kinds[flat.element_size()]).split(1 << 24):
            bits = part.to(torch.int64)
            place = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)
            plain = (plain * 31 + int(bits.sum())) % (1 << 63)
            weighted = (weighted * 37 + int((bits * place).sum())) % (1 << 63)
    return plain, weighted
