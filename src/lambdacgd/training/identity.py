"""What a run's state must agree on before anybody goes on from it, and a digest that notices any change to it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lambdacgd.training.errors import CheckpointError

# What each entry is called when it differs, and what to do about it.
_MEANING = {
    "plan": "the plan: noise, horizon or sampling would not be those of the run. Load the run's own plan",
    "layout": "the trainable parameters (names or shapes): noise could not cancel. Build the same model",
    "max_grad_norm": "the clipping norm: it is fixed for a run",
    "clipping_mode": "the clipping mode: it is fixed for a run",
    "augmentations": "the number of augmentations: it is fixed for a run",
    "loss_reduction": "the loss reduction: it is fixed for a run",
    "examples": "the length of the dataset",
    "data_fingerprint": "the data fingerprint: this is other data",
    "optimizer": "the optimizer's class, whose state goes on: use the one that the run was started with",
    "key": "the key (by its fingerprint): use the key file that the run was started with",
}


def check_identity(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Refuse a state of another run, plan, model, key or dataset, naming everything that differs."""
    differs = [name for name in _MEANING if name in current and saved.get(name) != current[name]]
    if saved.get("data_fingerprint") is None and "data_fingerprint" in differs:
        differs.remove("data_fingerprint")  # a name where there was none: whoever gives it vouches for the data
    if "optimizer" not in saved and "optimizer" in differs:
        differs.remove("optimizer")  # a checkpoint of versions that did not say
    if differs:
        lines = [
            f"- {_MEANING[name]} (saved {_short(saved.get(name))}, here {_short(current[name])})" for name in differs
        ]
        raise CheckpointError("this checkpoint does not belong here. What differs:\n" + "\n".join(lines))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 16 else text[:13] + "…'"


def content_digest(state: Any) -> str:
    """SHA-256 over all keys, numbers and tensor bytes of a nested state; the same after saving and loading it."""
    running = hashlib.sha256()
    _feed(running, state)
    return running.hexdigest()


# NumPy's numbers are numbers too: learning rates often come from np.logspace, and torch would not read them again.
_NUMPY_NUMBERS: list[Any] = [
    np.float64(0).__reduce__()[0],
    np.dtype,
    *(type(np.dtype(kind)) for kind in (np.bool_, np.int32, np.int64, np.float32, np.float64)),
]


def read_state(path: Path) -> Any:
    """What ``torch.save`` wrote of a state that `content_digest` accepts; runs no code of the file's."""
    with torch.serialization.safe_globals(_NUMPY_NUMBERS):
        return torch.load(path, map_location="cpu", weights_only=True)


def _feed(running: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        running.update(f"tensor {value.dtype} {tuple(value.shape)}\n".encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            running.update(flat.view(torch.uint8).numpy().data)
    elif isinstance(value, dict):
        running.update(f"dict {len(value)}\n".encode())
        for key, item in value.items():
            running.update(f"key {key!r}\n".encode())
            _feed(running, item)
    elif isinstance(value, (list, tuple)):
        running.update(f"list {len(value)}\n".encode())
        for item in value:
            _feed(running, item)
    elif value is None or isinstance(value, (bool, int, float, str, bytes, np.bool_, np.integer, np.floating)):
        running.update(f"{type(value).__name__} {value!r}\n".encode())
    else:
        raise CheckpointError(
            f"a {type(value).__name__} cannot be part of a checkpoint: give tensors, numbers, strings, lists and dicts "
            "(a state_dict, not the object itself)"
        )
