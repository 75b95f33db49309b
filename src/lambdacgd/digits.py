"""1 797 handwritten digits of 8×8 pixels, for the demo and the examples: they need no download and no scikit-learn.

``digits.npz`` holds the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, 1998, UCI
Machine Learning Repository, https://doi.org/10.24432/C50P49, licence CC BY 4.0), pixels and labels as scikit-learn's
``load_digits`` gives them, stored as bytes and compressed.
"""

from __future__ import annotations

from importlib import resources

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

TRAIN = 1437


def load() -> tuple[TensorDataset, TensorDataset]:
    """Read the digits.

    Returns:
        1 437 training and 360 test examples, pixels in [−1, 1] and labels 0 to 9, split by a fixed public shuffle.
    """
    with resources.files("lambdacgd").joinpath("digits.npz").open("rb") as file:
        stored = np.load(file, allow_pickle=False)
        pixels, digits = stored["images"], stored["labels"]
    order = np.random.default_rng(0).permutation(len(digits))
    images = torch.from_numpy(pixels[order]).float().div_(8).sub_(1).unsqueeze(1)
    labels = torch.from_numpy(digits[order]).long()
    return TensorDataset(images[:TRAIN], labels[:TRAIN]), TensorDataset(images[TRAIN:], labels[TRAIN:])


def model() -> nn.Module:
    """A network for these images with one hidden layer of 128: 9 610 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
