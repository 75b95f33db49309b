"""A run with a key file, which can be saved and gone on with."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import lambdacgd as lc
from lambdacgd.training import privatize
from tests.training import oracle


def start(folder, *, module=None, p=None, name="run.key", key=None, **options):
    if key is None:
        path = folder / name
        if path.exists():
            key = lc.SecretKey.load(path)
        else:
            key = oracle.key()
            key.save(path)
    module = module if module is not None else oracle.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    options = {"max_grad_norm": 0.7, "dataset": oracle.data()} | options
    return privatize(module, optimizer, options.pop("dataset"), p or oracle.plan(), key=key, **options)


def steps(private, count):
    for x, y in private.loader:
        F.cross_entropy(private.model(x), y).backward()
        private.optimizer.step()
        private.optimizer.zero_grad()
        count -= 1
        if count == 0:
            return


def saved(folder, count, name, **options):
    """A run that was saved after so many steps, and has let go."""
    private = start(folder, **options)
    steps(private, count)
    private.save(folder / name)
    private.detach()
    return private


def equal(a, b):
    return all(torch.equal(v, oracle.weights(b)[n]) for n, v in oracle.weights(a).items())
