"""Saving a run and going on from it, exactly.

A checkpoint holds the weights, the optimizer's state, torch's and Python's generators, and what identifies the run. It
holds no key, no noise and no sum. It exists only between logical steps, and every one is entered in the ledger beside
the key before its file gets its final name, so that a run never goes back behind weights that left the process.

Guarantee
---------
A run killed at any moment resumes from its newest checkpoint by itself: a draft that the ledger knows is completed,
any other is discarded. On one device with the same libraries the resumed run ends with the same bits. Resuming from
anything older than the newest release is refused unless the later ones are declared destroyed.
"""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lambdacgd.keys import LedgerError
from lambdacgd.training.card import History
from lambdacgd.training.cycle import Phase
from lambdacgd.training.distributed import folder
from lambdacgd.training.distributed.compare import compare_weights
from lambdacgd.training.errors import CheckpointError
from lambdacgd.training.identity import check_identity, content_digest, read_state
from lambdacgd.version import __version__

if TYPE_CHECKING:
    from lambdacgd.training.private import Private

FORMAT = "lambdacgd-checkpoint-1"


def identity(private: Private) -> dict[str, Any]:
    return {
        "plan": private.plan.digest,
        "layout": private.layout.digest,
        "max_grad_norm": private.max_grad_norm,
        "clipping_mode": private.clipper.mode,
        "augmentations": private.augmentations,
        "loss_reduction": private.clipper.loss_reduction,
        "examples": len(private.dataset),
        "data_fingerprint": private.data_fingerprint,
        "optimizer": type(private.optimizer).__name__,
        "key": private.run.key.fingerprint(),
        "sample": private.sample.seal(private.run.key),
        "history": private.history.to_dict(),
    }


def check_belongs(private: Private, saved: dict[str, Any]) -> None:
    """Refuse a checkpoint whose ``identity`` is not that of this run."""
    check_identity(saved, identity(private))
    private.history.resumed(History.from_dict(saved["history"]))
    private.sample.check(saved.get("sample"), private.run.key)


def adopt(private: Private, saved: dict[str, Any]) -> None:
    """The weights are the checkpoint's now: what they went through before is what it says."""
    private.adopt(saved["history"])


def check_savable(private: Private) -> None:
    """Refuse to save within a step, with averaged weights in the model, or what nobody could resume."""
    private.check_whole()
    if private.cycle.phase is not Phase.IDLE:
        raise CheckpointError(
            f"a checkpoint exists only between logical steps, and step {private.cycle.current} is under way. Save "
            "after an optimizer.step() that acted (private.between_steps is then True)"
        )
    if any(average.in_use for average in private.averages):
        raise CheckpointError(
            "the model holds an average of its weights now (ema.applied()), and training would go on from that. Leave "
            "that block before saving; averages are part of every checkpoint"
        )
    private.run.check_ledger()


def gather(private: Private, extra: dict[str, Any] | None, *, frozen: bool = True) -> dict[str, Any]:
    """The run's state as it is: tensors are those in use, not copies. ``frozen=False`` leaves frozen parameters out."""
    check_savable(private)
    return {
        "format": FORMAT,
        "version": __version__,
        "identity": identity(private),
        "run": private.run.id,
        "step": private.steps_taken,
        "plan": private.plan.to_json(),
        "model": _weights(private, frozen),
        "optimizer": private.optimizer.state_dict(),
        "averages": [average.state_dict() for average in private.averages],
        "generators": generators(),
        "extra": {} if extra is None else extra,
    }


def _weights(private: Private, frozen: bool) -> dict[str, Any]:
    left_out = set() if frozen else _frozen(private)
    return {name: value for name, value in private.model.state_dict().items() if name not in left_out}


def _frozen(private: Private) -> set[str]:
    """Names of parameters that training does not change: whoever builds the model again has them."""
    return {name for name, p in private.model.named_parameters(remove_duplicate=False) if not p.requires_grad}


def apply(private: Private, state: dict[str, Any]) -> None:
    """Go on from a state: everything is checked before anything changes."""
    with private.world.together("loading"):
        _check(private, state)
    try:
        private.run.resume(state["run"], state["step"], content_digest(state))
    except LedgerError as error:
        raise CheckpointError(str(error)) from error
    with private.going_on_from(state["step"]):
        with private.world.together("loading"):
            kept = {name: value for name, value in private.model.state_dict().items() if name not in state["model"]}
            own = {name: kept[name] for name in _frozen(private) & kept.keys()}
            private.model.load_state_dict(state["model"] | own)
            private.optimizer.load_state_dict(state["optimizer"])
            for average, saved in zip(private.averages, state["averages"], strict=True):
                average.load_state_dict(saved)
            set_generators(state["generators"])
        compare_weights(private)
    adopt(private, state["identity"])


def _check(private: Private, state: dict[str, Any]) -> None:
    private.check_usable()
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"this is not a checkpoint of format {FORMAT}")
    check_belongs(private, state["identity"])
    if len(state["averages"]) != len(private.averages):
        raise CheckpointError(
            f"the checkpoint has {len(state['averages'])} running averages of the weights and this run "
            f"{len(private.averages)}; make the same ones with private.ema(…) before loading"
        )


def save(private: Private, path: str | os.PathLike[str], extra: dict[str, Any] | None, *, frozen: bool = True) -> None:
    """Write a checkpoint: draft, sync, ledger, rename. A failure leaves the previous file and the ledger alone."""
    target = Path(path)
    # What several processes began, one goes on with: a file could not take the folder's name.
    if private.world.group is not None or private.shards is not None or target.is_dir():
        folder.save(private, target, extra, frozen=frozen)
        return
    state = gather(private, extra, frozen=frozen)
    digest = content_digest(state)
    draft = target.with_name(f".{target.name}.draft")
    try:
        with open(draft, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        draft.stat()  # a second job, started by mistake, may have taken it for a dead one's: before the ledger knows it
    except (OSError, RuntimeError) as error:  # torch reports a short write as a RuntimeError
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise CheckpointError(
            f"{target} could not be written ({error}). The previous checkpoint and the ledger are as they were: make "
            "room or choose another place, and save again"
        ) from error
    private.run.release(private.steps_taken, digest=digest, kind="checkpoint")
    os.replace(draft, target)
    sync_folder(target.parent)


def load(private: Private, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Go on from a checkpoint file or folder; returns its ``extra``."""
    source = Path(path)
    if private.world.from_first("loading", source.is_dir):
        return folder.load(private, source)
    if private.world.many or private.shards is not None:
        raise CheckpointError(
            f"{source} is no checkpoint folder. What one process saved without torch.distributed is a file, which "
            "several cannot go on from: load it in one process with torch.distributed initialised, and save it from "
            "there under another name"
        )
    _settle_drafts(private, source)
    state = _read(source)
    if state is None:
        raise CheckpointError(
            f"{source} is damaged or not a checkpoint. Restore it from a copy; or, if it is lost for good with every "
            "copy, declare it destroyed in the ledger (key.ledger().declare_destroyed(run, step)) and resume from "
            "the one before; or start a new run"
        )
    apply(private, state)
    return dict(state["extra"])


def exists(private: Private, path: str | os.PathLike[str]) -> bool:
    """Whether there is a checkpoint, or what is left of one that a killed process had entered in the ledger."""
    source = Path(path)
    if source.is_dir():
        return folder.exists(private, source)
    _settle_drafts(private, source)
    return source.is_file()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        state = read_state(path)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {path}") from None
    except Exception:  # a damaged file fails in whatever way its damage leads to
        return None
    return state if isinstance(state, dict) and state.get("format") == FORMAT else None


def _settle_drafts(private: Private, source: Path) -> None:
    """A draft that the ledger knows was whole when the process died: finish its renaming. Others never completed.

    What cannot be read is removed only where ``source`` was being written: anything else may be somebody's own.
    """
    if private.run.key.path is None:
        return
    ledger, where = private.run.key.ledger(), source.parent
    for draft in where.glob(".*.draft"):
        if not draft.is_file():  # an export that never completed
            continue
        state = _read(draft)
        with contextlib.suppress(LedgerError):
            newest = None if state is None else ledger.newest(state["run"])
            if newest is not None and newest.digest == content_digest(state):
                os.replace(draft, where / draft.name[1 : -len(".draft")])
                sync_folder(where)
                continue
            ours = state is not None and state["identity"]["key"] == private.run.key.fingerprint()
            if ours or (state is None and draft.name == f".{source.name}.draft"):
                draft.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def generators() -> dict[str, Any]:
    """Dropout's and augmentation's random numbers. They protect nobody: noise and bins come from the key alone."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else [],
        "python": [version, list(words), gauss],
        "numpy": [legacy[0], legacy[1].tolist(), int(legacy[2]), int(legacy[3]), float(legacy[4])],
    }


def set_generators(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, numbers, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.asarray(numbers, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002
