"""Do all ranks hold the same weights, and change them alike? A few numbers each, compared now and then."""

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
    """An error on every rank unless replicas, of parameters or of shards, are equal to the bit. All must call it.

    Shards that nobody else holds cannot be compared: that the optimizers' settings agree is what keeps them together.
    """
    world = private.world
    if not world.many:
        return
    world.agree(f"after step {private.steps_taken}", optimizer_settings(private), {})
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
            f"of the ranks before. {_DRIFTED if private.steps_taken else _BEGIN_ALIKE}"
        )


_DRIFTED = (
    "They have drifted apart: different hardware or libraries, or weights changed by hand on some. Resume all from the "
    "newest checkpoint, on equal machines"
)
_BEGIN_ALIKE = "They must begin alike: build the model from one seed on every rank, or load the same weights on all"


def optimizer_settings(private: Private) -> dict[str, Any]:
    """What the optimizer does to the weights: its class and, a fact each, the settings of its parameter groups."""
    found: dict[str, Any] = {"optimizer": type(private.optimizer).__name__}
    for k, group in enumerate(groups_by_name(private)):
        for name, value in group.items():
            if isinstance(value, Tensor):
                value = value.tolist()
            if value is None or isinstance(value, (bool, int, float, str, list, tuple)):
                found[f"{name} of the optimizer's group {k}"] = value
    return found


def groups_by_name(private: Private) -> list[dict[str, Any]]:
    """The optimizer's parameter groups with names in place of parameters (frozen parameters have none)."""
    names = {id(p): name for name, p in private.clipper.parameters.items()}
    return [
        {key: value for key, value in group.items() if key != "params"}
        | {"names": [names.get(id(p), f"frozen {k}") for k, p in enumerate(group["params"])]}
        for group in private.optimizer.param_groups
    ]


@torch.no_grad()
def fingerprint(parameters: Iterable[Tensor]) -> tuple[int, int]:
    """Two 64-bit numbers that change when a bit of a parameter changes; computed where the parameters are."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    plain, weighted = 0, 0
    for p in parameters:
        flat = p.detach().contiguous().view(-1)
        for part in flat.view(kinds[flat.element_size()]).split(1 << 24):
            bits = part.to(torch.int64)
            place = 2 * torch.arange(bits.numel(), device=bits.device) + 1  # a shard may be empty
            plain = (plain * 31 + int(bits.sum())) % (1 << 63)
            weighted = (weighted * 37 + int((bits * place).sum())) % (1 << 63)
    return plain, weighted
