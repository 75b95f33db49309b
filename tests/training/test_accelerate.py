"""A loop written for accelerate, with its wrapped optimizer and scheduler, ends like the plain one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lambdacgd.training import privatize
from tests.training import oracle


def train(accelerated):
    module = oracle.model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    private = privatize(
        module, optimizer, oracle.data(), oracle.plan(), max_grad_norm=1.0, max_physical_batch_size=5, key=oracle.key()
    )
    private.run._id = "one"
    if accelerated:
        accelerate = pytest.importorskip("accelerate")
        accelerator = accelerate.Accelerator(cpu=True)
        model, wrapped, schedule = accelerator.prepare(module, optimizer, scheduler)
        backward = accelerator.backward
    else:
        model, wrapped, schedule, backward = module, optimizer, scheduler, torch.Tensor.backward
    for x, y in private.loader:
        backward(F.cross_entropy(model(x), y))
        wrapped.step()
        if private.between_steps:
            schedule.step()
        wrapped.zero_grad()
    assert private.finished
    return oracle.weights(module), optimizer.param_groups[0]["lr"]


def test_an_accelerate_loop():
    (plain, rate), (wrapped, other) = train(False), train(True)
    assert rate == other
    assert all(torch.equal(value, wrapped[name]) for name, value in plain.items())
