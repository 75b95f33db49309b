"""Releasing a model: its weights and its privacy card, and nothing else."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from pathlib import Path

from safetensors.torch import save_model
from torch import nn

from lambdacgd.training.card import card, to_json, to_markdown
from lambdacgd.training.errors import TrainingError
from lambdacgd.training.trained import trained_by

WEIGHTS, CARD_JSON, CARD_MARKDOWN = "model.safetensors", "privacy-card.json", "PRIVACY.md"


def export(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Write ``model.safetensors``, ``privacy-card.json`` and ``PRIVACY.md`` into a new folder ``path``.

    Guarantee
    ---------
    The folder holds the model's state_dict and public facts: no key, no fingerprint, no run id, no loss, norm, batch
    size or bin. The release is entered in the ledger (if the key has one) before the folder gets its name.
    """
    trained = trained_by(model)
    target = Path(path)
    if target.exists():
        raise TrainingError(f"{target} exists; a release is never overwritten. Choose another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.draft")
    draft.mkdir()
    try:
        save_model(model, str(draft / WEIGHTS))
        facts = card(trained)
        (draft / CARD_JSON).write_text(to_json(facts))
        (draft / CARD_MARKDOWN).write_text(to_markdown(facts))
        for name in (WEIGHTS, CARD_JSON, CARD_MARKDOWN):
            with open(draft / name, "rb") as file:
                os.fsync(file.fileno())
        digest = hashlib.sha256((draft / WEIGHTS).read_bytes()).hexdigest()
        trained.run.release(trained.steps_taken, digest=digest, kind="export")
        os.rename(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return target
