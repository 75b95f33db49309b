"""Releasing a model: its weights and its privacy card, and nothing else."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file, save_model
from torch import nn

from lambdacgd.training.card import card, to_json, to_markdown
from lambdacgd.training.distributed.shards import is_sharded, whole_state
from lambdacgd.training.errors import TrainingError
from lambdacgd.training.trained import Trained, trained_by

WEIGHTS, CARD_JSON, CARD_MARKDOWN = "model.safetensors", "privacy-card.json", "PRIVACY.md"


def export(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Write ``model.safetensors``, ``privacy-card.json`` and ``PRIVACY.md`` into a new folder ``path``.

    Guarantee
    ---------
    The folder holds the model's state_dict and public facts: no key, no fingerprint, no run id, no loss, norm, batch
    size or bin. The release is entered in the ledger (if the key has one) before the folder gets its name.

    With several processes rank 0 writes. A sharded model is gathered for it, so every rank must call this; with
    replicas, calling it on rank 0 is enough.
    """
    trained = trained_by(model)
    target = Path(path)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    if any(is_sharded(p) for p in model.parameters()):
        whole = whole_state(model, keep=trained.world.first)
        trained.world.from_first("export", lambda: _write(target, trained, lambda file: save_file(whole, file)))
    elif trained.world.first:
        _write(target, trained, lambda file: save_model(model, file))
    return target


def _write(target: Path, trained: Trained, save: Callable[[str], None]) -> None:
    if target.exists():
        raise TrainingError(f"{target} exists; a release is never overwritten. Choose another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.draft")
    draft.mkdir()
    try:
        save(str(draft / WEIGHTS))
        facts = card(trained)
        (draft / CARD_JSON).write_text(to_json(facts), encoding="utf-8")
        (draft / CARD_MARKDOWN).write_text(to_markdown(facts), encoding="utf-8")
        for name in (WEIGHTS, CARD_JSON, CARD_MARKDOWN):
            with open(draft / name, "rb") as file:
                os.fsync(file.fileno())
        digest = hashlib.sha256((draft / WEIGHTS).read_bytes()).hexdigest()
        trained.run.release(trained.steps_taken, digest=digest, kind="export")
        os.rename(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
