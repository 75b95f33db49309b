"""Several readings of an example, averaged before clipping."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

from lambdacgd.training import privatize
from tests.training import oracle


def test_augmentations_are_averaged_before_clipping():
    p = oracle.plan()
    views = 3

    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 48

        def __getitem__(self, i):
            x, y = oracle.data()[i]
            return x + torch.randn(x.shape), y

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
