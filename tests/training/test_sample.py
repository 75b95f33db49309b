"""A run goes on with the examples that it began with, in their order."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from lambdacgd.keys import SecretKey
from lambdacgd.training import CheckpointError
from lambdacgd.training.data import Sample, sample_of
from tests.training import oracle
from tests.training.saved import start, steps

KEY = SecretKey.from_bytes(bytes(range(32)))


def saved(folder, **options):
    private = start(folder, **options)
    steps(private, 2)
    private.save(folder / "c")
    private.detach()


def shuffled(seed):
    data = oracle.data()
    return Subset(data, torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist())


def test_a_dataset_shuffled_anew_is_refused(tmp_path):
    saved(tmp_path, dataset=shuffled(1))
    with pytest.raises(CheckpointError, match="in another order"):
        start(tmp_path, dataset=shuffled(2)).load(tmp_path / "c")
    again = start(tmp_path, dataset=shuffled(1))
    again.load(tmp_path / "c")
    assert again.steps_taken == 2


def test_who_names_the_data_vouches_for_it(tmp_path):
    saved(tmp_path, dataset=shuffled(1))
    private = start(tmp_path, dataset=shuffled(2), data_fingerprint="the same, decoded otherwise")
    private.load(tmp_path / "c")
    assert private.steps_taken == 2


class Noisy(Dataset):
    """Random numbers of its own, which nobody can set."""

    def __init__(self):
        self.inner, self.reads = oracle.data(), 0
        self.random = np.random.default_rng()

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        self.reads += 1
        x, y = self.inner[index]
        return x + float(self.random.random()), y


def test_reading_that_is_random_tells_nothing(tmp_path):
    saved(tmp_path, dataset=Noisy())
    private = start(tmp_path, dataset=Noisy())
    private.load(tmp_path / "c")
    assert private.steps_taken == 2


def test_where_workers_read_this_process_does_not(tmp_path):
    data = Noisy()
    private = start(tmp_path, dataset=data, num_workers=1)
    private.save(tmp_path / "c")
    assert data.reads == 0


def test_seals_tell_nothing_without_the_key():
    data = oracle.data()
    seals = [Sample(data, len(data), readable=True).seal(KEY) for _ in range(2)]
    assert seals[0] != seals[1]  # of two runs on the same data
    assert sample_of(data, len(data)) not in repr(seals)
    for sample in seals:
        Sample(data, len(data), readable=True).check(sample, KEY)
        with pytest.raises(CheckpointError):
            Sample(data, len(data), readable=True).check(sample, SecretKey.from_bytes(bytes(32)))


def test_every_kind_of_item_counts():
    pillow = pytest.importorskip("PIL.Image")
    item = {
        "tensor": torch.ones(2, 2), "array": np.arange(3), "list": [1, "a", None, (2.5, b"b")],
        "image": pillow.new("RGB", (2, 2)),
    }  # fmt: skip
    other = {name: copy.deepcopy(value) for name, value in item.items()}
    assert sample_of([item], 1, plain=True) == sample_of([other], 1, plain=True) is not None
    other["image"].putpixel((0, 0), (1, 0, 0))
    assert sample_of([item], 1, plain=True) != sample_of([other], 1, plain=True)
    assert sample_of([item | {"set": {1, 2}}], 1, plain=True) is None  # its order is the process's own
    assert sample_of([item | {"set": {1, 2}}], 1) is not None
