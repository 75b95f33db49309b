"""Gradients have their parameters' strides: fused optimizers walk both through memory side by side."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lambdacgd.training import privatize
from tests.training import oracle


def test_a_fused_optimizer_trains_a_channels_last_model():
    """On CUDA torch raises where strides differ; on the CPU it updates the wrong elements in silence."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    model = model.to(memory_format=torch.channels_last)
    p = oracle.plan()
    dataset = TensorDataset(torch.randn(p.examples, 3, 4, 4), torch.randint(3, (p.examples,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    private = privatize(model, optimizer, dataset, p, max_grad_norm=1.0, key=oracle.key())
    for x, y in private.loader:
        before = [q.detach().clone() for q in model.parameters()]
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        for q, old in zip(model.parameters(), before, strict=True):
            assert q.grad.stride() == q.stride()
            torch.testing.assert_close(q.detach(), old - 0.1 * q.grad)
        optimizer.zero_grad()
