"""What `privatize` returns: the loop as it is, groups, epochs, what was spent, and the way back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

import lambdacgd as lc
from lambdacgd.training import privatize
from tests.training import oracle
from tests.training.trained import same, train


def test_the_loop_is_the_loop():
    """One function, no line of it about privacy, trains from a DataLoader and from the private loader."""

    def train_on(loader, module, optimizer):
        for x, y in loader:
            loss = F.cross_entropy(module(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    module, dataset = oracle.model(), oracle.data()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    train_on(torch.utils.data.DataLoader(dataset, batch_size=12), module, optimizer)
    private = privatize(module, optimizer, dataset, oracle.plan(), max_grad_norm=1.0, max_physical_batch_size=8)
    train_on(private.loader, module, optimizer)
    assert private.finished
    private.detach()
    train_on(torch.utils.data.DataLoader(dataset, batch_size=12), module, optimizer)


def test_several_parameter_groups_and_frozen_parts():
    p = oracle.plan()
    module = oracle.model()
    module[0].bias.requires_grad_(False)
    frozen = module[0].bias.detach().clone()
    optimizer = torch.optim.AdamW(
        [
            {"params": module[0].parameters(), "lr": 0.01},
            {"params": module[2].parameters(), "lr": 0.0, "weight_decay": 0.0},
        ]
    )
    before = oracle.weights(module)
    train(module, p, optimizer=optimizer)
    after = oracle.weights(module)
    assert torch.equal(after["0.bias"], frozen)
    assert torch.equal(after["2.weight"], before["2.weight"])
    assert not torch.equal(after["0.weight"], before["0.weight"])


def test_two_private_models_in_one_process_do_not_meet():
    p = oracle.plan()
    alone = oracle.model()
    first = privatize(
        alone, a := torch.optim.SGD(alone.parameters(), lr=0.5), oracle.data(), p, max_grad_norm=1.0, key=oracle.key()
    )
    first.run._id = "one"
    oracle.loop(first, alone, a)
    one, two = oracle.model(), oracle.model(seed=2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (one, two)]
    both = [
        privatize(m, o, oracle.data(), p, max_grad_norm=1.0, key=oracle.key())
        for m, o in zip((one, two), optimizers, strict=True)
    ]
    both[0].run._id = "one"
    for batches in zip(both[0].loader, both[1].loader, strict=True):
        for m, o, (x, y) in zip((one, two), optimizers, batches, strict=True):
            F.cross_entropy(m(x), y).backward()
            o.step()
            o.zero_grad()
    same(alone, one, 0)


def test_the_optimizer_and_the_model_come_back_plain():
    p = oracle.plan()
    module, dataset = oracle.model(), oracle.data()
    keys, hooks = list(module.state_dict()), len(module._forward_hooks)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    private = privatize(module, optimizer, dataset, p, max_grad_norm=1.0)
    assert list(module.state_dict()) == keys
    x, y = next(iter(private.loader))
    F.cross_entropy(module(x), y).backward()
    private.detach()
    private.detach()
    assert all(q.grad is None for q in module.parameters())
    assert len(module._forward_hooks) == hooks
    F.cross_entropy(module(x), y).backward()
    assert all(q.grad is not None for q in module.parameters())
    optimizer.step()
    copy.deepcopy(module)
    with pytest.raises(RuntimeError, match="detached"):
        next(iter(private.loader))


def test_what_was_spent():
    p = oracle.plan(epochs=3, mechanism=lc.LambdaCGD(0.9))
    module = oracle.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    private = privatize(module, optimizer, oracle.data(), p, max_grad_norm=1.0)
    assert private.spent().share == 0
    for epoch in private.epochs():
        assert len(epoch) == p.steps_per_epoch
        for x, y in epoch:
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        break
    spent = private.spent(after_epochs=True)
    assert (spent.epsilon, spent.delta, spent.certificate) == (p.epsilon, p.delta, p.certificate)
    assert (spent.steps_taken, spent.share, spent.private) == (p.steps_per_epoch, 1 / 3, True)
    assert spent.after_epochs[-1] == p.epsilon
    assert spent.after_epochs[0] < spent.after_epochs[1] < spent.after_epochs[2]
    one = lc.plan(
        48, 12, epochs=1, epsilon=spent.after_epochs[0], delta=1e-5, mechanism=lc.LambdaCGD(0.9), sampling=lc.Cyclic()
    )
    assert one.sigma == pytest.approx(p.sigma, rel=2e-3)


def test_what_fresh_bins_spend_epoch_by_epoch():
    """Epochs compose: ε after e of them is that of a plan for e epochs with the same σ."""
    small = {"batch_size": 12, "delta": 1e-4, "mechanism": lc.LambdaCGD(0.5), "sampling": lc.BallsInBins("fresh")}
    p = lc.plan(48, epochs=3, epsilon=4.0, **small)
    module = oracle.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    private = privatize(module, optimizer, oracle.data(), p, max_grad_norm=1.0)
    after = private.spent(after_epochs=True).after_epochs
    assert after[0] < after[1] < after[2] == p.epsilon
    for epochs in (1, 2):
        assert lc.plan(48, epochs=epochs, epsilon=after[epochs - 1], **small).sigma == pytest.approx(p.sigma, rel=3e-3)


def test_epochs_go_on_where_the_run_stands():
    p = oracle.plan(epochs=2)
    module = oracle.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    private = privatize(module, optimizer, oracle.data(), p, max_grad_norm=1.0)
    numbers = []
    for epoch in private.epochs():
        numbers.append((epoch.number, len(epoch)))
        for i, (x, y) in enumerate(epoch):
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if i == 2:
                break
    assert numbers == [(1, 4), (1, 1), (2, 4), (2, 1)]
    assert private.finished
