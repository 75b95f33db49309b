"""A private run from beginning to end."""

from __future__ import annotations

import torch

from lambdacgd.training import privatize
from tests.training import oracle

ZETA = 0.7


def train(module, p, *, optimizer=None, dataset=None, zeta=ZETA, **options):
    dataset = dataset or oracle.data(p.examples)
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.5)
    private = privatize(module, optimizer, dataset, p, max_grad_norm=zeta, key=oracle.key(), **options)
    oracle.loop(private, module, optimizer)
    return private


def same(a, b, tolerance):
    for name, value in oracle.weights(a).items():
        torch.testing.assert_close(value, oracle.weights(b)[name], rtol=tolerance, atol=tolerance, msg=name)
