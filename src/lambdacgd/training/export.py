"""Releasing a model: its weights and its privacy card, and nothing else."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

from torch import Tensor

from lambdacgd.errors import InvalidInput, TrainingError
from lambdacgd.files import sync_folder
from lambdacgd.questions import verify
from lambdacgd.training.card import PUBLIC, write_card
from lambdacgd.training.checkpoint import frozen_names, write_tensors
from lambdacgd.training.distributed.models import is_sharded, whole_state
from lambdacgd.training.privatize import Private

WEIGHTS = "model.safetensors"


def export(private: Private, path: str | os.PathLike[str], *, frozen: bool = True) -> Path:
    """Write the model's weights and their privacy card into a new folder.

    The folder holds ``model.safetensors``, ``privacy-card.json`` and ``PRIVACY.md``. With several processes rank 0
    writes. A sharded model is gathered for it, so every rank must call this; with replicas, calling it on rank 0 is
    enough.

    Args:
        private: What ``privatize`` returned, attached or detached. Its model may hold an average (``ema.applied()``).
        path: The folder to be made. A release is never overwritten.
        frozen: Whether to write frozen parameters, too. False makes small releases of adapters.

    Returns:
        The folder.

    Raises:
        InvalidInput: The plan's σ is too small for its claim: it was edited, or came from an edited file.
        TrainingError: Something other than the run has changed the weights since its last step, or ``path`` exists.

    Guarantee
    ---------
    The folder holds the model's state_dict and public facts: no key, no fingerprint, no run id, no loss, norm, batch
    size or bin. The release is entered in the ledger (if the key has one) before the folder gets its name. The card
    says what this run and its checkpoints know about the weights, and what they do not know. The plan's σ is certified
    again for it, without the cache.
    """
    if not isinstance(private, Private):
        raise InvalidInput.of_type("private", private, "what privatize returned, as in lc.export(private, path)")
    target, model, world = Path(path), private.model, private.world
    left_out = set() if frozen else frozen_names(model)

    def write(weights: dict[str, Tensor]) -> None:
        facts = private.card()
        if target.exists():
            raise TrainingError(f"{target} exists; a release is never overwritten. Choose another name")
        if math.isfinite(private.plan.epsilon):
            verify(private.plan)  # the plan's file, its digest and the cache are anybody's to edit
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)  # a killed process left it: weights that the ledger does not know
        draft.mkdir()
        try:
            written = {name: value for name, value in weights.items() if name not in left_out}
            digest = write_tensors(draft / WEIGHTS, written, mode=PUBLIC)
            write_card(facts, draft)
            sync_folder(draft)
            private.run.release(private.steps_taken, digest=digest, kind="export")
            os.rename(draft, target)
            sync_folder(target.parent)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    if any(is_sharded(p) for p in model.parameters()):
        with world.together("export"):
            private.weights.check()
        weights = whole_state(model, keep=world.first)
        world.from_first("export", lambda: write(weights))
    elif world.first:
        write(whole_state(model, keep=True))
    return target
