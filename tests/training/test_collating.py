"""A collate_fn that mixes examples is refused; one that pads, sorts or masks at random is not."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import default_collate

import lambdacgd as lc
from lambdacgd.training import privatize
from lambdacgd.training.data import KeepsApart
from tests.training import oracle

ITEMS = [(torch.randn(3, generator=torch.Generator().manual_seed(i)), i % 2) for i in range(6)]


def mixup(items):
    """As torchvision's: each row with the one before it."""
    x, y = default_collate(items)
    part = float(torch.distributions.Beta(0.4, 0.4).sample())
    return part * x + (1 - part) * x.roll(1, 0), y


def cutmix(items):
    x, y = default_collate(items)
    other = torch.randperm(len(x))
    x = x.clone()
    x[:, 2:] = x[other, 2:]
    return x, y


def centred(items):
    x, y = default_collate(items)
    return {"inputs": [x - x.mean(0)], "labels": y}


def negatives(items):
    """Each example with another one of the batch, which it is not to be like."""
    x, _ = default_collate(items)
    return {"positive": x, "negative": x.flip(0)}


def padded_and_mixed(items):
    batch = pads(items)
    return batch | {"other": batch["x"].flip(0)}


def test_mixing_is_seen_where_the_last_example_is_the_longest():
    items = sorted(ITEMS, key=lambda item: float(item[0][0].abs()))
    assert len({pads(items[:k])["x"].shape[1] for k in (3, 4)}) == 2
    with pytest.raises(lc.TrainingError, match="collate_fn mixes examples"):
        KeepsApart(padded_and_mixed)(items[:4])


@pytest.mark.parametrize("mixes", [mixup, cutmix, centred, negatives])
@pytest.mark.parametrize("size", [2, 6])
def test_mixing_is_refused(mixes, size):
    with pytest.raises(lc.TrainingError, match="collate_fn mixes examples"):
        KeepsApart(mixes)(ITEMS[:size])


def sorts(items):
    return default_collate(sorted(items, key=lambda item: float(item[0].sum())))


def pads(items):
    """Lengths of their own, so that shapes depend on all examples; padding on the left moves every row."""
    longest = max(1 + int(x[0].abs() * 4) for x, _ in items)
    rows = [F.pad(x[: 1 + int(x[0].abs() * 4)], (longest - len(x[: 1 + int(x[0].abs() * 4)]), 0)) for x, _ in items]
    return {"x": torch.stack(rows), "y": torch.tensor([y for _, y in items])}


def masks(items):
    x, y = default_collate(items)
    return x.masked_fill(torch.rand_like(x) < 0.3, 0.0), y


def crops(items):
    """As many random numbers as the example decides; rows after it see others, and rows before it do not."""
    rows = []
    for x, _ in items:
        for _ in range(1 + int(x[0].abs() * 3)):
            shift = random.randrange(3)
        rows.append(x.roll(shift))
    return torch.stack(rows)


def objects(items):
    return items, np.array([y for _, y in items]), "text"


def takes_labels_out(items):
    """As some collators of transformers do: the items are not the same afterwards."""
    batch = [{"x": x, "label": y} for x, y in items] if isinstance(items[0], tuple) else items
    labels = [item.pop("label") for item in batch]
    return {"x": torch.stack([item["x"] for item in batch]), "labels": torch.tensor(labels), "none": torch.ones(6, 0)}


def test_items_that_a_collator_changes():
    items = [{"x": x, "label": y} for x, y in ITEMS]
    assert KeepsApart(takes_labels_out)(items)["labels"].tolist() == [y for _, y in ITEMS]


def strange(items):
    x, y = default_collate(items)
    return {
        "sparse": x.to_sparse(), "text": np.array(["a"] * len(x)), "objects": np.array([None] * len(x)),
        "bits": x > 0, "half": x.bfloat16(), "complex": torch.complex(x, x), "scalar": torch.tensor(1), "y": y,
    }  # fmt: skip


def fails_on_few(items):
    if len(items) < 6:
        raise ValueError("too few")
    return default_collate(items)


def test_what_cannot_be_collated_again_is_let_alone():
    assert torch.equal(KeepsApart(fails_on_few)(ITEMS)[0], default_collate(ITEMS)[0])
    with pytest.raises(ValueError, match="too few"):
        KeepsApart(fails_on_few)(ITEMS[:3])


def flattens(items):
    return torch.cat([x for x, _ in items])[None]


@pytest.mark.parametrize(
    "fine", [default_collate, sorts, pads, masks, crops, objects, flattens, takes_labels_out, strange]
)
@pytest.mark.parametrize("size", [1, 2, 6])
def test_what_keeps_examples_apart_passes_and_moves_no_random_numbers(fine, size):
    def everything():
        return [random.random(), np.random.rand(), torch.rand(3).tolist()]  # noqa: NPY002

    results = []
    for collate in (fine, KeepsApart(fine)):
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)
        results.append((repr(collate(ITEMS[:size])), everything(), repr(collate(ITEMS[:size]))))
    assert results[0] == results[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_looks(workers):
    module = oracle.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    private = privatize(
        module, optimizer, oracle.data(), oracle.plan(), max_grad_norm=1.0, collate_fn=mixup, num_workers=workers
    )
    with pytest.raises(lc.TrainingError, match="collate_fn mixes examples"):
        next(iter(private.loader))
    assert private.steps_taken == 0
