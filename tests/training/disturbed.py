"""A run that something happens to, and where it must end all the same."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from lambdacgd.training import privatize
from tests.training import oracle


def start(module=None, *, p=None, lr=0.5, optimizer=None, dataset=None, run="one", **options):
    module = module if module is not None else oracle.model()
    p = p or oracle.plan()
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=lr)
    private = privatize(module, optimizer, dataset or oracle.data(), p, max_grad_norm=0.7, key=oracle.key(), **options)
    private.run._id = run
    return private, module, optimizer


def backward(module, batch):
    x, y = batch
    F.cross_entropy(module(x), y).backward()


def undisturbed(**options):
    private, module, optimizer = start(**options)
    oracle.loop(private, module, optimizer)
    return oracle.weights(module)


def check_same_end(private, module, optimizer, **options):
    """Whatever happened, the run goes on and ends where an undisturbed one ends."""
    oracle.loop(private, module, optimizer)
    assert private.finished
    expected = undisturbed(**options)
    for name, value in oracle.weights(module).items():
        assert torch.equal(value, expected[name]), name
