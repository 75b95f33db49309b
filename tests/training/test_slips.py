"""A batch is what was handed out, whatever goes wrong between that and the step."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from lambdacgd.clipping import ClippingError
from lambdacgd.clipping.backward import Totals
from lambdacgd.training import privatize
from tests.training import oracle


def loss(module, batch):
    return F.cross_entropy(module(batch[0]), batch[1])


def begin(module, **options):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    private = privatize(module, optimizer, oracle.data(), oracle.plan(), max_grad_norm=0.1, key=oracle.key(), **options)
    return private, optimizer, iter(private.loader)


def clipped(private):
    """The sum of the first step's own examples, computed one by one."""
    own = next(private.private_step.batches(1))
    x, y = (tensor[own] for tensor in oracle.data().tensors)
    return oracle.clipped_sum(oracle.per_example(oracle.model(), x, y), 0.1), len(own)


def assert_own_examples_alone(private, rows):
    expected, own = clipped(private)
    assert rows > own
    for name, total in private.clipper.sums.items():
        torch.testing.assert_close(total, expected[name], rtol=2e-3, atol=1e-5)


def test_padding_weighs_nothing_when_a_backward_pass_is_made_again():
    """Out of memory, caught, and tried again: with weight one an example that fills up would count many times."""
    private, _, batches = begin(module := oracle.model(), pad_batches=40)
    batch = next(batches)
    with (
        mock.patch.object(Totals, "add_pack", side_effect=torch.OutOfMemoryError),
        pytest.raises(torch.OutOfMemoryError),
    ):
        loss(module, batch).backward()
    loss(module, batch).backward()
    assert_own_examples_alone(private, len(batch[0]))


def test_padding_weighs_nothing_after_a_look_at_the_loss():
    private, _, batches = begin(module := oracle.model(), pad_batches=40)
    batch = next(batches)
    data = oracle.data()
    private.check_loss(loss, [data[i] for i in range(len(batch[0]))], default_collate)
    loss(module, batch).backward()
    assert_own_examples_alone(private, len(batch[0]))


def test_a_forward_pass_of_an_earlier_batch_is_refused():
    """Of a single layer autograd needs no weights, so it does not see that they have changed."""
    private, optimizer, batches = begin(module := nn.Linear(5, 3), pad_batches=40)
    batch = next(batches)
    stale = loss(module, batch)
    loss(module, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    next(batches)
    with pytest.raises(ClippingError, match="saw an earlier one"):
        stale.backward()
    assert private.clipper.examples == 0


def test_sums_of_a_dropped_batch_are_gone():
    """A gradient that somebody kept (an optimizer in its state, which checkpoints hold) shares memory with them."""
    private, optimizer, batches = begin(module := oracle.model())
    loss(module, next(batches)).backward()
    optimizer.step()
    kept = [p.grad for p in module.parameters()]
    optimizer.zero_grad()
    loss(module, next(batches)).backward()
    iter(private.loader)
    assert private.between_steps
    assert not any(bool(gradient.any()) for gradient in kept)
