"""Checkpoint folders of the Trainer: which hold a run, and which of them to go on from.

Every ``checkpoint-N`` folder holds ``run_state``, written by ``Private.save``: trainable weights, optimizer,
scheduler, generators and the run's identity, whole or not at all, entered in the ledger. The Trainer's own files beside
it (weights for ``from_pretrained``, ``trainer_state.json``) are written after that and are not resumed from, but for
the Trainer's counters.
"""

from __future__ import annotations

import re
from pathlib import Path

from lambdacgd.training import CheckpointError

RUN_STATE = "run_state"
_FOLDER = re.compile(r"checkpoint-(\d+)")


def with_runs(output_dir: str | Path) -> list[Path]:
    """Checkpoint folders that hold a run, or one that was being written, the newest first."""
    folder = Path(output_dir)
    found = []
    for child in folder.iterdir() if folder.is_dir() else ():
        match = _FOLDER.fullmatch(child.name)
        if match and _has_run(child):
            found.append((int(match[1]), child))
    return [child for _, child in sorted(found, reverse=True)]


def _has_run(folder: Path) -> bool:
    """A file of one process, a folder of several, or a draft of either."""
    return any((folder / name).exists() for name in (RUN_STATE, f".{RUN_STATE}.draft"))


def candidates(resume_from: str | bool, output_dir: str | Path) -> list[Path]:
    """Folders to try to resume from, in order: the one named, or all of the output folder."""
    if isinstance(resume_from, bool):
        found = with_runs(output_dir)
        if not found:
            raise CheckpointError(
                f"{output_dir} holds no checkpoint of a private run. Start with train(), and set save_strategy and "
                "save_steps so that there will be one"
            )
        return found
    folder = Path(resume_from)
    if not _has_run(folder):
        raise CheckpointError(
            f"{folder} holds no {RUN_STATE}, so it is not a checkpoint that private training can resume from. With "
            "save_only_model=True the Trainer saves weights only"
        )
    return [folder]


def check_fresh(output_dir: str | Path) -> None:
    """A new run does not begin in a folder with another one's checkpoints, which it would mix up."""
    found = with_runs(output_dir)
    if found:
        raise CheckpointError(
            f"{output_dir} holds checkpoints of another run (the newest is {found[0].name}). Go on with it: "
            "train(resume_from_checkpoint=True); or choose another output_dir: a second run has noise of its own and "
            "costs its own (ε, δ)"
        )
