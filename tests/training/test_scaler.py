"""Losses that are scaled, and losses that are not numbers."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional as F

from lambdacgd.training import TrainingError
from tests.training import oracle
from tests.training.disturbed import start


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscaled", [False, True], ids=["", "unscaled before"])
def test_a_gradient_scaler(fused, unscaled):
    def sgd(module):
        return torch.optim.SGD(module.parameters(), lr=0.5, fused=fused)

    module = oracle.model()
    private, module, optimizer = start(module, optimizer=sgd(module))
    scaler = torch.amp.GradScaler("cpu")
    x, y = next(iter(private.loader))
    scaler.scale(F.cross_entropy(module(x), y)).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    before = oracle.weights(module)
    with pytest.raises(TrainingError, match="GradScaler does not fit"):
        scaler.step(optimizer)
    assert all(torch.equal(v, before[n]) for n, v in oracle.weights(module).items())
    assert private.steps_taken == 0
    oracle.loop(private, module, optimizer)
    other = oracle.model()
    again, other, second = start(other, optimizer=sgd(other))
    oracle.loop(again, other, second)
    for name, value in oracle.weights(module).items():
        assert torch.equal(value, oracle.weights(other)[name]), name


def test_a_gradient_scaler_that_is_off():
    private, module, optimizer = start()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    x, y = next(iter(private.loader))
    scaler.scale(F.cross_entropy(module(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert private.steps_taken == 1


@pytest.mark.parametrize("fused", [False, True])
def test_scalers_work_again_once_detached(fused):
    module = oracle.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, fused=fused)
    asked = vars(optimizer).get("_step_supports_amp_scaling")
    private, module, optimizer = start(module, optimizer=optimizer)
    private.detach()
    assert vars(optimizer).get("_step_supports_amp_scaling") == asked
    scaler = torch.amp.GradScaler("cpu")
    x = torch.randn(4, oracle.data()[0][0].numel())
    before = oracle.weights(module)
    scaler.scale(module(x).square().sum()).backward()
    scaler.step(optimizer)
    assert any(not torch.equal(v, before[n]) for n, v in oracle.weights(module).items())


def test_a_loss_that_is_nan_for_all_and_for_one():
    private, module, optimizer = start()
    batches = iter(private.loader)
    x, y = next(batches)
    (F.cross_entropy(module(x), y) * float("nan")).backward()
    assert private.clipper.dropped == len(x)
    with pytest.warns(UserWarning, match="no example of step 1 has a finite gradient"):
        optimizer.step()
    assert all(torch.isfinite(w).all() for w in module.parameters())
    private, module, optimizer = start()
    x, y = next(iter(private.loader))
    assert len(x) > 1
    losses = F.cross_entropy(module(x), y, reduction="none")
    (losses * torch.where(torch.arange(len(x)) == 0, float("nan"), 1.0)).mean().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_one_example_that_is_nan_is_told_at_the_end_of_each_epoch():
    x, y = oracle.data().tensors
    x[17] = float("nan")
    private, module, optimizer = start(dataset=torch.utils.data.TensorDataset(x, y))
    with pytest.warns(UserWarning, match=r"1 example\(s\) of the epoch that ends with step") as told:
        oracle.loop(private, module, optimizer)
    assert [str(w.message).split("step ")[1][0] for w in told] == ["4", "8"]
    assert all(torch.isfinite(w).all() for w in module.parameters())
