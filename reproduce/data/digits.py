"""The handwritten digits that come with the package: 1 797 images of 8×8, ten classes. They need no download."""

from __future__ import annotations

from pathlib import Path

from lambdacgd import digits
from reproduce.data.base import Examples, Splits

TRAIN = digits.TRAIN


def load(folder: Path | None = None) -> Splits:
    """1 437 training and 360 test examples, pixels in [−1, 1], by a fixed public shuffle."""
    train, test = digits.load()
    return Splits(Examples(*train.tensors), Examples(*test.tensors), 10)
