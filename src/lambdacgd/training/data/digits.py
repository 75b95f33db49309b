"""The handwritten digits that scikit-learn ships: 1 797 images of 8×8, ten classes. Needs no download."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from lambdacgd.training.data.base import Examples, Splits
from lambdacgd.validation import InvalidInput

TRAIN = 1437


def load(folder: Path | None = None) -> Splits:
    """1 437 training and 360 test examples, pixels in [−1, 1], by a fixed public shuffle."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InvalidInput(
            "task", "digits", "its data comes with scikit-learn: pip install 'lambdacgd[train]'"
        ) from None
    raw = load_digits()
    order = np.random.default_rng(0).permutation(len(raw.target))
    images = torch.from_numpy(raw.images[order]).float().div_(8).sub_(1).unsqueeze(1)
    labels = torch.from_numpy(raw.target[order]).long()
    return Splits(Examples(images[:TRAIN], labels[:TRAIN]), Examples(images[TRAIN:], labels[TRAIN:]), 10)
