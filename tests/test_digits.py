"""The digits that come with the package are scikit-learn's, split as they always were."""

from __future__ import annotations

import hashlib
from importlib import resources

import numpy as np
import pytest
import torch

from lambdacgd import digits

# Of the bytes of scikit-learn 1.9's load_digits(), images and labels as uint8.
IMAGES = "8f26b2bd9d135c256808f68f14fdabddde6d9c7f869ae419704b051f0f14b3b3"
LABELS = "8ba4f891220f5e4c9c819638d1602d74b83618f167043c6da52a2a247841ddf0"


def test_they_are_the_published_ones():
    with resources.files("lambdacgd").joinpath("digits.npz").open("rb") as file:
        stored = np.load(file, allow_pickle=False)
        assert set(stored) == {"images", "labels"}
        assert (stored["images"].shape, stored["images"].dtype) == ((1797, 8, 8), np.uint8)
        assert hashlib.sha256(stored["images"].tobytes()).hexdigest() == IMAGES
        assert hashlib.sha256(stored["labels"].tobytes()).hexdigest() == LABELS


def test_they_are_those_of_scikit_learn():
    published = pytest.importorskip("sklearn.datasets").load_digits()
    order = np.random.default_rng(0).permutation(1797)
    train, test = digits.load()
    images = torch.cat([train.tensors[0], test.tensors[0]])
    assert torch.equal(images, torch.from_numpy(published.images[order]).float().div(8).sub(1).unsqueeze(1))
    assert torch.equal(torch.cat([train.tensors[1], test.tensors[1]]), torch.from_numpy(published.target[order]))


def test_the_splits():
    train, test = digits.load()
    assert (len(train), len(test)) == (digits.TRAIN, 360)
    image, label = train[3]
    assert image.shape == (1, 8, 8)
    assert (float(train.tensors[0].min()), float(train.tensors[0].max())) == (-1, 1)
    assert label.dtype == torch.int64
    assert digits.model()(train.tensors[0][:2]).shape == (2, 10)
