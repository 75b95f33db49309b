"""A few examples of a dataset, in place of all: do two ranks, or a run and its resumption, read the same data?

Bins and batches are by index. A dataset that was shuffled or split anew, without a seed, has other examples at the same
places: one of them may then take part twice in an epoch, or in another bin than accounted for.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import secrets
from typing import Any

import numpy as np
import torch

from lambdacgd.errors import CheckpointError
from lambdacgd.keys import SecretKey
from lambdacgd.training.loader import random_numbers_of

_SAMPLES = 8


class _Untold(Exception):
    """An item of unknown things, whose bytes may differ from process to process."""


class Sample:
    """The sample of a run's dataset, sealed in checkpoints.

    Guarantee
    ---------
    A seal is a keyed hash with a salt of its own: whoever has no key learns nothing from it about an example, nor
    whether two runs read the same ones. Equal seals are evidence that the data is the same, not proof.
    """

    def __init__(self, dataset: Any, examples: int, *, readable: bool) -> None:
        """``readable``: whether this process may read examples (not where workers do: they inherit open files)."""
        self._dataset, self._examples, self._readable = dataset, examples, readable
        self._salt = secrets.token_hex(16)
        self._found: str | None = None
        self._looked = False

    def seal(self, key: SecretKey) -> list[str] | None:
        """What a checkpoint keeps; None where reading tells nothing."""
        digest = self._digest()
        return None if digest is None else [self._salt, _seal(key, self._salt, digest)]

    def check(self, saved: Any, key: SecretKey) -> None:
        """Refuse to go on with a run whose examples were others."""
        digest = self._digest()
        if saved is None or digest is None:
            return
        salt, sealed = saved
        if not hmac.compare_digest(sealed, _seal(key, salt, digest)):
            raise CheckpointError(
                "this checkpoint does not belong here: some examples, read again, are not those of the run. The "
                "dataset is in another order or holds other data (shuffled or split anew, without a seed?), and "
                "batches are by index. Build the dataset as it was. If it is the same and only reading it differs "
                "(another library, random numbers of its own), say so with data_fingerprint=…"
            )

    def _digest(self) -> str | None:
        if not self._looked and self._readable:
            first, again = (sample_of(self._dataset, self._examples, plain=True) for _ in range(2))
            self._found = first if first == again else None  # reading is random in a way of its own
        self._looked = True
        return self._found


def _seal(key: SecretKey, salt: str, digest: str) -> str:
    return key.derive("sample", salt, digest).hex()


def sample_of(dataset: Any, examples: int, *, plain: bool = False) -> str | None:
    """A digest of a few examples, read with random numbers set; None where they are made of unknown things.

    ``plain``: things that only pickle knows are unknown too. Its bytes are the same on equal machines that run side by
    side, but not for ever.
    """
    running = hashlib.sha256()
    for index in sorted({k * (examples - 1) // (_SAMPLES - 1) for k in range(_SAMPLES)}):
        with random_numbers_of(f"sample {index}"):
            item = dataset[index]
        try:
            _feed(running, item, plain)
        except Exception:  # whatever it is, it does not tell its bytes
            return None
    return running.hexdigest()


def _feed(running: Any, item: Any, plain: bool) -> None:
    if isinstance(item, torch.Tensor):
        item = item.detach().cpu().contiguous()
        running.update(f"{item.dtype} {tuple(item.shape)} ".encode())
        running.update(item.reshape(-1).view(torch.uint8).numpy().tobytes() if item.numel() else b"")
    elif isinstance(item, np.ndarray) and item.dtype != object:
        running.update(f"{item.dtype} {item.shape} ".encode() + item.tobytes())
    elif isinstance(item, dict):
        for key, value in item.items():
            running.update(f"{key!r}: ".encode())
            _feed(running, value, plain)
    elif isinstance(item, (list, tuple)):
        running.update(f"{len(item)} ".encode())
        for value in item:
            _feed(running, value, plain)
    elif item is None or isinstance(item, (bool, int, float, str, bytes, np.generic)):
        running.update(f"{type(item).__name__} {item!r} ".encode())
    elif hasattr(item, "mode") and hasattr(item, "size") and hasattr(item, "tobytes"):  # an image of Pillow
        running.update(f"{item.mode} {item.size} ".encode() + item.tobytes())
    elif plain:
        raise _Untold
    else:
        running.update(pickle.dumps(item, protocol=4))
