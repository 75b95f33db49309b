"""Batches are the plan's, whatever they are read from; random augmentation depends on the run and the step alone."""

from __future__ import annotations

import copy
import math
import random
from multiprocessing import active_children

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)
from torch.utils.data import TensorDataset

from lambdacgd import ClippingError, SecretKey
from lambdacgd.training import privatize
from tests.training import oracle

# --- batches are the plan's; random augmentation depends on the run and the step alone; schedulers count logical step-


class Indices(torch.utils.data.Dataset):
    """Example i is i itself and three random numbers."""

    def __len__(self):
        return 30

    def __getitem__(self, i):
        return i, torch.rand(1).item(), random.random(), np.random.rand()  # noqa: NPY002


def read(run="one", bins="fixed", **options):
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    p = oracle.binned_plan(30, 5, 2, bins=bins)
    private = privatize(module, optimizer, Indices(), p, max_grad_norm=1.0, key=oracle.key(), **options)
    private.run._id = run
    found: list[list[tuple]] = [[] for _ in range(p.steps)]
    for batch in private.loader:
        found[private.steps_taken].extend(zip(*(column.tolist() for column in batch), strict=True))
        module(batch[0].float().view(-1, 1)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return p, found


@pytest.mark.parametrize("bins", ["fixed", "fresh"])
def test_batches_are_the_samplings(bins):
    p, found = read(bins=bins)
    for step, indices in zip(found, p.sampling.batches(oracle.key(), run="one"), strict=True):
        assert [item[0] for item in step] == (indices.tolist() or [0])
    assert [[i[0] for i in step] for step in read(run="two", bins=bins)[1]] != [[i[0] for i in step] for step in found]


@pytest.mark.parametrize("bins", ["fixed", "fresh"])
def test_workers_and_the_generators_of_the_process_change_nothing(bins):
    torch.manual_seed(1)
    one = read(max_physical_batch_size=4, bins=bins)[1]
    torch.manual_seed(2)
    random.seed(3)
    two = read(max_physical_batch_size=4, num_workers=2, bins=bins)[1]
    assert one == two
    values = [item[1:] for step in one for item in step]
    assert len(set(values)) == len(values), "no random number comes twice"


def test_reading_leaves_the_generators_of_the_process_alone():
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    expected = torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    module = torch.nn.Linear(1, 1, bias=False)
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    private = privatize(module, optimizer, Indices(), oracle.binned_plan(30, 5, 2), max_grad_norm=1.0)
    next(iter(private.loader))
    assert (torch.rand(1), random.random(), np.random.rand()) == expected  # noqa: NPY002


class ItemByItem(TensorDataset):
    """Read and collated one by one: only a plain ``TensorDataset`` is read by rows."""


@pytest.mark.parametrize("options", [{}, {"max_physical_batch_size": 4, "augmentations": 2}, {"num_workers": 1}])
def test_a_tensor_dataset_read_by_rows_gives_the_batches_of_its_items(options):
    seen = []
    for kind in (TensorDataset, ItemByItem):
        module = oracle.model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        data = kind(*oracle.data().tensors)
        key = SecretKey.for_tests(3)  # one run id, so the same batches
        private = privatize(module, optimizer, data, oracle.plan(), max_grad_norm=1.0, key=key, **options)
        batches = []
        for batch in private.loader:
            batches.append(batch)
            F.cross_entropy(module(batch[0]), batch[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        seen.append(batches)
    for one, two in zip(*seen, strict=True):
        assert type(one) is type(two)
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("end", ["the last step", "detach"])
def test_workers_end_with_the_run(end):
    module = oracle.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    private = privatize(module, optimizer, oracle.data(), oracle.plan(), max_grad_norm=1.0, num_workers=1)
    before = set(active_children())
    if end == "detach":
        next(iter(private.loader))
        assert set(active_children()) - before
        private.detach()
    else:
        oracle.loop(private, module, optimizer)
    assert not set(active_children()) - before


def test_length():
    module = oracle.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    private = privatize(module, optimizer, oracle.data(), oracle.plan(), max_grad_norm=1.0)
    assert len(private.loader) == 8
    private.detach()
    private = privatize(module, optimizer, oracle.data(), oracle.plan(), max_grad_norm=1.0, max_physical_batch_size=4)
    with pytest.raises(TypeError, match="physical batches"):
        len(private.loader)


SCHEDULERS = {
    "step": lambda o: StepLR(o, 2, gamma=0.5),
    "cosine": lambda o: CosineAnnealingLR(o, 8),
    "one-cycle": lambda o: OneCycleLR(o, max_lr=1.0, total_steps=10),
    "chained": lambda o: ChainedScheduler([StepLR(o, 2), LambdaLR(o, lambda t: 1 / (1 + t))]),
    "sequential": lambda o: SequentialLR(o, [StepLR(o, 1), CosineAnnealingLR(o, 8)], [3]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_count_logical_steps(name):
    trails = []
    for physical in (None, 5):
        module = oracle.model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        scheduler = SCHEDULERS[name](optimizer)
        private = privatize(
            module, optimizer, oracle.data(), oracle.plan(), max_grad_norm=1.0, max_physical_batch_size=physical
        )
        trail = {}
        for x, y in private.loader:
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
            if private.between_steps:
                scheduler.step()
            optimizer.zero_grad()
            trail[private.steps_taken] = optimizer.param_groups[0]["lr"]
        trail.pop(0, None)  # the first physical batches, before step 1 was whole
        trails.append([trail[t] for t in range(1, 9)])
    assert trails[0] == trails[1]
    assert len(set(trails[0])) > 2


def test_an_epoch_scheduler_acts_between_epochs():
    module = oracle.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    scheduler = StepLR(optimizer, 1, gamma=0.1)
    private = privatize(module, optimizer, oracle.data(), oracle.plan(), max_grad_norm=1.0, max_physical_batch_size=5)
    for epoch in private.epochs():
        for x, y in epoch:
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    assert scheduler.last_epoch == 2
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)


def test_between_physical_batches_gradients_are_none_and_weights_rest():
    module = oracle.model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5)
    private = privatize(module, optimizer, oracle.data(), oracle.plan(), max_grad_norm=1.0, max_physical_batch_size=5)
    for x, y in private.loader:
        before, done = oracle.weights(module), private.steps_taken
        F.cross_entropy(module(x), y).backward()
        assert all(p.grad is None for p in module.parameters())
        optimizer.step()
        moved = any(not torch.equal(v, before[n]) for n, v in oracle.weights(module).items())
        assert moved == (private.steps_taken > done)
        optimizer.zero_grad()


class Noisy(torch.utils.data.Dataset):
    """Random augmentation."""

    def __len__(self):
        return 48

    def __getitem__(self, i):
        x, y = oracle.data()[i]
        return x + torch.randn(x.shape), y


@pytest.mark.parametrize(("views", "size"), [(1, None), (1, 9), (2, 9)])
def test_padded_batches_give_the_same_weights_in_few_sizes(views, size):
    """What fills a batch up has weight zero; augmentation does not move by it."""

    runs = []
    for multiple in (1, 4):
        module = oracle.model(dtype=torch.float64)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        private = privatize(
            module,
            optimizer,
            Noisy(),
            oracle.binned_plan(48, 8, 3),
            max_grad_norm=0.3,
            key=oracle.key(),
            augmentations=views,
            max_physical_batch_size=size,
            pad_batches=multiple,
        )
        private.run._id = "one"
        sizes = set()
        for x, y in private.loader:
            F.cross_entropy(module(x.double()), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            sizes.add(len(x) // views)
        runs.append((sizes, {name: p.detach().clone() for name, p in module.named_parameters()}))
        private.detach()
    (few, weights), (padded, others) = runs
    assert all(n % 4 == 0 or n == size for n in padded)
    assert len(padded) < len(few)
    for name, p in weights.items():
        torch.testing.assert_close(others[name], p, rtol=1e-9, atol=1e-11)


def test_what_is_switched_on_with_an_epoch_is_seen():
    """A model that mixes from a late epoch on: without a look there, 180 of 600 steps went unseen."""

    class Switched(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last, self.mixes = nn.Linear(4, 6), nn.Linear(6, 3), False

        def forward(self, x):
            h = self.first(x).tanh()
            return self.last(h - h.mean(0) if self.mixes else h)

    module = Switched()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    plan, data = oracle.binned_plan(400, 8, 5), oracle.data(400, 4)
    private = privatize(module, optimizer, data, plan, max_grad_norm=0.3, key=oracle.key())
    for epoch in private.epochs():
        module.mixes = epoch.number == 5  # from step 201 on; steps 144 and 233 are looked at anyway
        for x, y in epoch:
            if module.mixes:
                assert len(x) > 1
                with pytest.raises(ClippingError, match="mixes"):
                    module(x)
                return
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


# --- several readings of an example, averaged before clipping --------------------------------------------------------


def test_augmentations_are_averaged_before_clipping():
    p = oracle.plan()
    views = 3

    for reduction in ("mean", "sum"):
        module = oracle.model(dtype=torch.float32)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        private = privatize(
            module,
            optimizer,
            Noisy(),
            p,
            max_grad_norm=0.3,
            augmentations=views,
            max_physical_batch_size=5,
            loss_reduction=reduction,
        )
        total: dict[str, torch.Tensor] = {}
        twin = copy.deepcopy(oracle.model())
        batches = iter(private.loader)
        for _ in range(3):
            x, y = next(batches)
            m = len(x) // views
            F.cross_entropy(module(x), y, reduction=reduction).backward()
            by_row = oracle.per_example(twin, x, y)
            averaged = [
                {n: sum(by_row[views * i + v][n] for v in range(views)) / views for n in by_row[0]} for i in range(m)
            ]
            for n, value in oracle.clipped_sum(averaged, private.clipper.max_grad_norm).items():
                total[n] = total.get(n, 0) + value
            assert not torch.equal(x[0::views], x[1::views])
        for n, value in private.clipper.sums.items():
            torch.testing.assert_close(value, total[n], rtol=1e-3, atol=1e-4)
        private.detach()
        assert "forward" not in module.__dict__


def test_augmentations_do_not_hide_a_table_as_long_as_the_batch():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.randn(24, 4))
            self.mix, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head((x.view(-1, 24, 4) + self.mix(self.table)).tanh().mean(1))

    torch.manual_seed(3)
    module = Positions()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    dataset = oracle.data(features=96)
    private = privatize(
        module, optimizer, dataset, oracle.plan(), max_grad_norm=0.05, key=oracle.key(), augmentations=2
    )
    x, y = next(iter(private.loader))  # 12 examples twice: 24 rows
    F.cross_entropy(module(x), y).backward()
    sums = {name: value.clone() for name, value in private.clipper.sums.items()}
    private.detach()
    expected = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    for i in range(12):
        found = torch.autograd.grad(
            F.cross_entropy(module(x[2 * i : 2 * i + 2]), y[2 * i : 2 * i + 2]), list(module.parameters())
        )
        factor = min(1.0, 0.05 / math.sqrt(sum(float(g.square().sum()) for g in found)))
        for name, g in zip(expected, found, strict=True):
            expected[name] += factor * g
    for name, value in expected.items():
        torch.testing.assert_close(sums[name], value, rtol=2e-3, atol=1e-5)
