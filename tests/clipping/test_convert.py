"""`convert` keeps what a model computes where it can, and refuses where it would lose something."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lambdacgd.clipping import ClippingError, attach, convert

pytestmark = pytest.mark.usefixtures("seeded")


class BatchNormAct(nn.BatchNorm2d):
    """As timm's ``BatchNormAct2d``: the activation is part of the layer."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x))


class OtherDefaults(nn.BatchNorm2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-3)


def test_a_batch_norm_with_a_forward_of_its_own_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), BatchNormAct(8))
    with pytest.raises(ClippingError, match=r"'1' \(BatchNormAct\).*forward of its own"):
        convert(model)
    assert isinstance(model[1], BatchNormAct)  # and nothing was changed
    bent: Any = nn.BatchNorm2d(8)
    bent.forward = lambda x: F.relu(x)
    with pytest.raises(ClippingError, match="forward of its own"):
        convert(nn.Sequential(bent))


class Called(nn.BatchNorm2d):
    def __call__(self, x: Tensor) -> Tensor:
        return F.relu(super().__call__(x))


def _hooked() -> nn.Module:
    norm = nn.BatchNorm2d(8)
    norm.register_forward_hook(lambda m, args, y: F.relu(y))
    return norm


def _parametrized() -> nn.Module:
    return nn.utils.parametrize.register_parametrization(nn.BatchNorm2d(8), "weight", nn.Softplus())


@pytest.mark.parametrize(
    "make", [lambda: Called(8), _hooked, _parametrized], ids=["__call__", "hook", "parametrization"]
)
def test_whatever_else_a_batch_norm_does_is_not_dropped(make: Any) -> None:
    with pytest.raises(ClippingError, match="forward of its own"):
        convert(nn.Sequential(nn.Conv2d(3, 8, 3), make()))


def test_a_batch_norm_that_is_used_twice_has_one_replacement() -> None:
    norm = nn.BatchNorm1d(8)
    model = convert(nn.Sequential(norm, nn.Sequential(nn.Linear(8, 8), norm)))
    assert isinstance(model[0], nn.GroupNorm)
    assert model[1][1] is model[0]
    assert model[0].weight is norm.weight


def test_a_refused_conversion_changes_nothing() -> None:
    model = nn.Sequential(nn.LSTM(4, 4), nn.BatchNorm1d(4), BatchNormAct(8))
    kinds = [type(m) for m in model]
    with pytest.raises(ClippingError):
        convert(model)
    assert [type(m) for m in model] == kinds


def test_a_batch_norm_that_computes_as_torchs_is_converted() -> None:
    model = convert(nn.Sequential(OtherDefaults(64)))
    assert isinstance(model[0], nn.GroupNorm)
    assert model[0].eps == 1e-3


def test_a_lazy_batch_norm_is_refused_until_it_has_seen_a_batch() -> None:
    with pytest.raises(ClippingError, match="not initialised"):
        convert(nn.Sequential(nn.LazyBatchNorm2d()))


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d(32), (32,)),
        (nn.BatchNorm1d(32), (32, 1)),
        (nn.BatchNorm2d(64), (64, 1, 1)),
        (nn.BatchNorm2d(6), (6, 1, 1)),
    ],
)
@pytest.mark.parametrize("examples", [1, 4])
def test_batch_norms_without_positions_get_groups_of_several_values(norm: Any, shape: Any, examples: int) -> None:
    """A group of one value would be normalised to zero, whatever the input: a constant output."""
    model = convert(nn.Sequential(norm))
    x = torch.randn(examples, *shape, requires_grad=True)
    out = model(x)
    assert float(out.detach().std()) > 0.5
    (gradient,) = torch.autograd.grad(out.flatten() @ torch.linspace(-1, 1, out.numel()), x)
    assert float(gradient.norm(dim=1).min()) > 1e-2


@pytest.mark.parametrize(("norm", "shape"), [(nn.BatchNorm1d(32), (32,)), (nn.BatchNorm2d(64), (64, 1, 1))])
def test_their_clipped_sums_equal_the_reference(oracle: Any, norm: Any, shape: Any) -> None:
    oracle(convert(nn.Sequential(norm)), torch.randn(4, *shape).double(), 4)


def test_groups_stay_as_many_as_asked_where_there_are_positions() -> None:
    new: Any = convert(nn.Sequential(nn.BatchNorm2d(64), nn.BatchNorm2d(6)))
    x, y = torch.randn(2, 64, 4, 4), torch.randn(2, 6, 4, 4)
    torch.testing.assert_close(new[0](x), F.group_norm(x, 32))
    torch.testing.assert_close(new[1](y), F.group_norm(y, 6))
    torch.testing.assert_close(convert(nn.BatchNorm2d(64), groups=8)(x), F.group_norm(x, 8))


def test_one_value_for_each_example_is_refused() -> None:
    model = convert(nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)))
    clipper = attach(model)
    with pytest.raises(ClippingError, match="one value"):
        model(torch.randn(4, 3))
    clipper.detach()
