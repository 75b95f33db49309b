"""What `privatize` refuses at the door, leaving model and optimizer as they were."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import lambdacgd as lc
from lambdacgd.clipping import ClippingError
from lambdacgd.training import privatize
from tests.training import oracle
from tests.training.disturbed import start


def refused(match, *, module=None, optimizer=None, dataset=None, p=None, error=lc.InvalidInput, **options):
    module = module if module is not None else oracle.model()
    optimizer = optimizer if optimizer is not None else torch.optim.SGD(module.parameters(), lr=0.1)
    options = {"max_grad_norm": 1.0} | options
    with pytest.raises(error, match=match):
        privatize(module, optimizer, dataset if dataset is not None else oracle.data(), p or oracle.plan(), **options)
    assert not module._forward_pre_hooks, "a refused model is left as it was"
    assert not isinstance(optimizer, torch.optim.Optimizer) or not optimizer._optimizer_step_pre_hooks


def test_a_dataset_of_another_length():
    refused("plan is for 48", dataset=oracle.data(47))


def test_an_iterable_dataset():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    refused("map-style", dataset=Stream())


def test_a_loader_instead_of_a_dataset():
    refused("pass its dataset", dataset=DataLoader(oracle.data(), batch_size=4))


def test_batch_norm():
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    refused("GroupNorm", module=module, error=ClippingError)


def test_an_optimizer_with_parameters_outside_the_model():
    module, other = oracle.model(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*module.parameters(), *other.parameters()], lr=0.1)
    refused("outside the model", module=module, optimizer=optimizer)


def test_an_optimizer_that_lacks_a_parameter():
    module = oracle.model()
    refused(
        "lacks '0.bias'",
        module=module,
        optimizer=torch.optim.SGD([module[0].weight, *module[2].parameters()], lr=0.1),
    )


def test_lbfgs():
    module = oracle.model()
    refused("closure", module=module, optimizer=torch.optim.LBFGS(module.parameters()))


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "1"])
def test_a_clipping_norm_that_is_none(value):
    refused("max_grad_norm", max_grad_norm=value)


@pytest.mark.parametrize("value", [0, -2, 1.5])
def test_a_physical_batch_size_that_is_none(value):
    refused("max_physical_batch_size", max_physical_batch_size=value)


def test_things_of_the_wrong_kind():
    refused("SecretKey", key=b"0" * 32)
    refused("plan must be a Plan .*a dict was given", p={"sigma": 1})
    refused("torch.optim", optimizer=object())


def test_a_model_that_is_private_already():
    private, module, optimizer = start()
    for again in (module, nn.Sequential(module)):
        with pytest.raises(lc.InvalidInput, match="privatized already"):
            privatize(again, optimizer, oracle.data(), oracle.plan(), max_grad_norm=1.0)
    private.detach()
    privatize(module, optimizer, oracle.data(), oracle.plan(), max_grad_norm=1.0)


def test_leftover_gradients():
    module = oracle.model()
    F.cross_entropy(module(torch.randn(2, 5)), torch.tensor([0, 1])).backward()
    refused("zero_grad", module=module)


def test_a_plan_that_sets_nothing_aside_for_floating_point():
    """As plans of earlier releases do: their ε and δ are those of real numbers."""
    p = oracle.plan()
    details = {name: value for name, value in p.certificate.details.items() if name != "floating_point"}
    refused("sets no ε and δ aside", p=replace(p, certificate=replace(p.certificate, details=details)))
