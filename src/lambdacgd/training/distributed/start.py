"""Before the first step: every rank brought the same things, or no rank begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lambdacgd.training.distributed.compare import compare_weights, optimizer_settings
from lambdacgd.training.distributed.run import SharedRun
from lambdacgd.training.distributed.shards import fsdp_modules
from lambdacgd.training.distributed.wrapping import broadcast_
from lambdacgd.training.errors import TrainingError
from lambdacgd.training.sample import sample_of
from lambdacgd.version import __version__

if TYPE_CHECKING:
    from lambdacgd.training.private import Private

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


def facts(private: Private) -> dict[str, Any]:
    """What all ranks must agree on: digests and settings, nothing secret."""
    return {
        "plan": private.plan.digest,
        "layout": private.layout.digest,
        # In their order, in which sums are put into buckets: the layout knows names in alphabetical order only.
        "parameters": [f"{name} {p.dtype}" for name, p in private.clipper.parameters.items()],
        "dataset length": len(private.dataset),
        # Whoever names the data vouches for it, also where reading it is random in ways of its own.
        "examples": None if private.data_fingerprint else sample_of(private.dataset, private.plan.examples),
        "max_grad_norm": private.max_grad_norm,
        "clipping mode": private.clipper.mode,
        "loss reduction": private.clipper.loss_reduction,
        "augmentations": private.augmentations,
        "physical batch size": private.max_physical_batch_size,
        "data fingerprint": private.data_fingerprint,
        "device": private.clipper.anchor.device.type,
        "sharded modules": [path for path, _ in fsdp_modules(private.model)],
        "reduce_every_batch": private.shards is not None and private.shards.reduce_every_batch,
        "version": __version__,
        **optimizer_settings(private),
    }


def start_together(private: Private) -> None:
    """Compare, then take rank 0's key and weights. All ranks must call it; a difference is an error on each.

    Shards are nobody's copy but where a mesh replicates them: these are not sent, so they are compared.
    """
    world, run = private.world, private.run
    if not isinstance(run, SharedRun):
        return
    with world.together("privatize"):
        own = facts(private)
    world.agree("privatize", own, _ADVICE)
    _check_keys(world.gather(run.given_fingerprint))
    _check_run_ids(world.gather(run.given_id))
    run.share(private.clipper.anchor.device)
    broadcast_(private.model, world)
    compare_weights(private)


def _check_keys(fingerprints: list[str | None]) -> None:
    """Rank 0's key counts; others bring the same one or none."""
    for rank, found in enumerate(fingerprints):
        if found is not None and found != fingerprints[0]:
            first = "none" if fingerprints[0] is None else f"the key {fingerprints[0][:8]}…"
            raise TrainingError(
                f"privatize: rank 0 was given {first} and rank {rank} the key {found[:8]}…: their noise and batches "
                "would not be one run's. Give the key on rank 0 alone (others receive it), or the same file on all"
            )


def _check_run_ids(ids: list[str | None]) -> None:
    """Rank 0's prepared run counts; others name the same one or none."""
    for rank, found in enumerate(ids):
        if found is not None and found != ids[0]:
            raise TrainingError(
                f"privatize: rank 0 was given run_id={ids[0]!r} and rank {rank} run_id={found!r}: data sorted by the "
                "bins of one run would be read as another's. Give the run_id on rank 0 alone, or the same one on all"
            )
