"""What all ranks must agree on: what they bring to a run, before its first step, and their weights, now and then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lambdacgd.errors import TrainingError
from lambdacgd.training.distributed.models import broadcast_, fingerprint, is_sharded, local
from lambdacgd.training.distributed.world import World
from lambdacgd.training.run import SharedRun

_ADVICE = {
    "plan": "Make the plan on one rank and load its file on all: noise and batches would not be one run's",
    "layout": "Build the same model on every rank: names and shapes of trainable parameters must match",
    "parameters": "Define layers in the same order and types on every rank: sums are added up by their place",
    "dataset length": "Every rank needs the whole dataset: the plan splits each batch between the ranks itself",
    "examples": "Every rank must read the same example at the same place: give all of them the whole dataset in one "
    "order (no shuffling, no part for each rank). If reading is random in a way of its own, name the data with "
    "data_fingerprint on every rank",
    "device": "Noise of different kinds of device agrees only to rounding: use one kind",
    "physical batch size": "Ranks go through physical batches together",
    "sharded modules": "Call fully_shard on the same modules on every rank, or on none",
    "reduce_every_batch": "Ranks reduce sums together",
}


def start_together(
    run: SharedRun,
    facts: Mapping[str, Any],
    *,
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    optimizer: Optimizer,
    world: World,
    device: torch.device,
) -> None:
    """Compare what the ranks brought, then take rank 0's key and weights. All must call it; a difference is an error
    on each.

    Shards are nobody's copy but where a mesh replicates them: these are not sent, so they are compared.

    Args:
        run: The run, with the key that this rank was given.
        facts: What must be equal, by name: digests and settings, nothing secret.
        model: Takes rank 0's parameters and buffers.
        parameters: Those that are trained, by name.
        optimizer: Its settings are compared.
        world: All ranks that train together.
        device: Where the key's bytes travel by.
    """
    world.agree("privatize", {**facts, **optimizer_settings(parameters, optimizer)}, _ADVICE)
    _check_keys(world.gather(run.given_fingerprint))
    _check_run_ids(world.gather(run.given_id))
    run.share(device)
    broadcast_(model, world)
    compare_weights(parameters, optimizer, 0, world)


def _check_keys(fingerprints: list[str | None]) -> None:
    """Rank 0's key counts; others bring the same one or none."""
    for rank, given in enumerate(fingerprints):
        if given is not None and given != fingerprints[0]:
            first = "none" if fingerprints[0] is None else f"the key {fingerprints[0][:8]}…"
            raise TrainingError(
                f"privatize: rank 0 was given {first} and rank {rank} the key {given[:8]}…: their noise and batches "
                "would not be one run's. Give the key on rank 0 alone (others receive it), or the same file on all"
            )


def _check_run_ids(ids: list[str | None]) -> None:
    """Rank 0's prepared run counts; others name the same one or none."""
    for rank, given in enumerate(ids):
        if given is not None and given != ids[0]:
            raise TrainingError(
                f"privatize: rank 0 was given run_id={ids[0]!r} and rank {rank} run_id={given!r}: data sorted by the "
                "bins of one run would be read as another's. Give the run_id on rank 0 alone, or the same one on all"
            )


def compare_weights(parameters: Mapping[str, nn.Parameter], optimizer: Optimizer, step: int, world: World) -> None:
    """An error on every rank unless replicas, of parameters or of shards, are equal to the bit. All must call it.

    Shards that nobody else holds cannot be compared: that the optimizers' settings agree is what keeps them together.
    """
    if not world.many:
        return
    world.agree(f"after step {step}", optimizer_settings(parameters, optimizer), {})
    every: list[Any] = list(parameters.values())
    plain = (step, *fingerprint(p for p in every if not is_sharded(p)))
    shards = [p for p in every if is_sharded(p) and p.device_mesh.ndim == 2]
    place = shards[0].device_mesh.get_local_rank(1) if shards else 0
    gathered = world.gather((plain, place, fingerprint(local(p) for p in shards)))
    first = {index: shard for _, index, shard in reversed(gathered)}  # the first rank's that holds this shard
    odd = [rank for rank, (own, index, shard) in enumerate(gathered) if own != gathered[0][0] or shard != first[index]]
    if odd:
        raise TrainingError(
            f"after step {step} the weights of rank(s) {', '.join(map(str, odd[:4]))} differ from those "
            f"of the ranks before. {_DRIFTED if step else _BEGIN_ALIKE}"
        )


_DRIFTED = (
    "They have drifted apart: different hardware or libraries, or weights changed by hand on some. Resume all from the "
    "newest checkpoint, on equal machines"
)
_BEGIN_ALIKE = "They must begin alike: build the model from one seed on every rank, or load the same weights on all"


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
