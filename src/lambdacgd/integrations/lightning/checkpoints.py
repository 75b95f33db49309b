"""The run's identity in Lightning's checkpoints, and the ledger around writing and reading them.

A checkpoint of Lightning holds weights, optimizer and schedulers already. Ours adds who the run is, its step and
training's generators, under ``"lambdacgd"``; the ledger knows a digest over all of that, weights and optimizer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lambdacgd.integrations.randomness import TrainingRandomness
from lambdacgd.keys import LedgerError
from lambdacgd.training import CheckpointError, Private
from lambdacgd.training.checkpoint import adopt, check_belongs, check_savable, generators, identity
from lambdacgd.training.codec import content_digest

ENTRY = "lambdacgd"


@contextlib.contextmanager
def released(
    private: Private, randomness: TrainingRandomness, checkpoint: dict[str, Any], target: Path
) -> Iterator[Path]:
    """Where to write a draft; afterwards it is entered in the ledger and gets its name. All ranks must call it."""
    world = private.world
    with world.together("saving"):
        check_savable(private)
        who = identity(private)
    checkpoint[ENTRY] = {
        "identity": who,
        "run": private.run.id,
        "step": private.steps_taken,
        "resumable": "optimizer_states" in checkpoint,
        "generators": world.gather(generators() if randomness.state is None else randomness.state),
    }
    draft = _draft(target)
    with world.together("saving"):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield draft
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def release() -> None:
        if not draft.is_file():  # before the ledger knows it: a run cannot go on from what was never written
            raise CheckpointError(
                f"{target} was not written: leave out plugins that write checkpoints later or elsewhere"
            )
        private.run.release(private.steps_taken, digest=_digest(checkpoint), kind="checkpoint")
        os.replace(draft, target)

    world.from_first("saving", release)


def settle(private: Private, source: Path) -> None:
    """A draft that the ledger knows was whole when the process died: finish its renaming. Another is discarded."""
    draft = _draft(source)
    if not draft.is_file() or private.run.key.path is None:
        return
    try:
        state = torch.load(draft, map_location="cpu", weights_only=False)
        newest = private.run.key.ledger().newest(state[ENTRY]["run"])
        whole = newest is not None and newest.digest == _digest(state)
    except Exception:  # cut off while it was written
        whole = False
    if whole:
        os.replace(draft, source)
    else:
        draft.unlink(missing_ok=True)


def resume(private: Private, randomness: TrainingRandomness, checkpoint: dict[str, Any], name: str) -> None:
    """Go on from a checkpoint's run, if it belongs here and is the newest release; before any weight is loaded."""
    with private.world.together("loading"):
        entry = checkpoint.get(ENTRY)
        if entry is None or not entry["resumable"]:
            raise CheckpointError(
                f"{name} is not a checkpoint that private training can resume from: it was saved by another strategy "
                "or with save_weights_only=True"
            )
        check_belongs(private, entry["identity"])
        digest = _digest(checkpoint)
    # Every rank reads the file by itself: a stale copy on one would stand at another step, with other weights.
    private.world.agree("loading", {name: digest}, {name: "All ranks must see one file system"})
    try:
        private.run.resume(entry["run"], entry["step"], digest)
    except LedgerError as error:
        raise CheckpointError(str(error)) from error
    with private.loading():
        private.stand_at(entry["step"])
    adopt(private, entry["identity"])
    if len(entry["generators"]) == private.world.size:  # other worlds give ranks other examples, so other dropout
        randomness.state = entry["generators"][private.world.rank]


def _draft(target: Path) -> Path:
    return target.with_name(f".{target.name}.draft")


def _digest(checkpoint: dict[str, Any]) -> str:
    return content_digest([checkpoint.get(part) for part in (ENTRY, "state_dict", "optimizer_states")])
