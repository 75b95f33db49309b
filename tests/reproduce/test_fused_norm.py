"""GroupNorm, ReLU and pooling in one kernel against PyTorch's three."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lambdacgd.clipping import attach
from reproduce.bench_models import CNN
from reproduce.fused_norm import NormReLU, fuse

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)
DEVICES = ["cpu", CUDA]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3, 32, 32, 32), (5, 64, 16, 16), (2, 128, 8, 8), (0, 32, 8, 8), (2, 24, 6, 10)])
@pytest.mark.parametrize("pool", [False, True])
def test_output_and_gradient_are_pytorchs(device: str, shape: tuple[int, ...], pool: bool) -> None:
    torch.manual_seed(1)
    x = (2 * torch.randn(shape, device=device) + 0.3).requires_grad_()
    with torch.no_grad():
        x[:1].round_()  # equals inside a window: the first takes the gradient
    steps = [nn.GroupNorm(8, shape[1], affine=False), nn.ReLU(), *([nn.MaxPool2d(2)] if pool else [])]
    slow = nn.Sequential(*steps)(x)
    fast = NormReLU(8, 1e-5, pool=pool)(x)
    weight = torch.randn_like(slow)
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=5e-6)
    (expected,) = torch.autograd.grad((slow * weight).sum(), x)
    (found,) = torch.autograd.grad((fast * weight).sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_number_that_is_not_finite_stays_in_its_example(device: str) -> None:
    x = torch.randn(4, 32, 8, 8, device=device)
    x[1, 3, 2, 2] = float("nan")
    out = NormReLU(8, 1e-5, pool=False)(x)
    assert not out[1].isfinite().all()
    assert out[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_clipped_sums_of_the_fused_model_are_the_models(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(2)
    plain = CNN().to(device)
    fused = fuse(copy.deepcopy(plain))
    assert [name for name, _ in fused.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert sum(isinstance(layer, NormReLU) for layer in fused) == 6
    x, y = torch.randn(5, 3, 32, 32, device=device), torch.arange(5, device=device)
    sums = []
    for model in (plain, fused):
        clipper = attach(model, max_grad_norm=0.3)
        nn.functional.cross_entropy(model(x), y).backward()
        sums.append(clipper.take())
        clipper.detach()
    for name, value in sums[0].items():
        assert (sums[1][name] - value).norm() <= 1e-3 * value.norm() + 1e-6, name


@pytest.mark.parametrize("shape", [(8, 8, 8), (3, 4, 8, 8), (2, 8, 5, 8), (2, 8, 128, 128)])
def test_shapes_that_do_not_fit_are_left_to_pytorch(shape: tuple[int, ...]) -> None:
    assert NormReLU(8, 1e-5, pool=True)._fits(torch.randn(2, 8, 8, 8))
    assert not NormReLU(8, 1e-5, pool=True)._fits(torch.randn(shape))


def test_only_what_the_kernel_computes_is_replaced() -> None:
    def layers(*more: nn.Module) -> list[type]:
        return [type(layer) for layer in fuse(nn.Sequential(nn.Conv2d(3, 8, 3), *more))]

    norm = nn.GroupNorm(2, 8, affine=False)
    assert layers(norm, nn.ReLU()) == [nn.Conv2d, NormReLU, nn.Identity]
    assert layers(nn.GroupNorm(2, 8), nn.ReLU()) == [nn.Conv2d, nn.GroupNorm, nn.ReLU]
    assert layers(norm, nn.Tanh()) == [nn.Conv2d, nn.GroupNorm, nn.Tanh]
    assert layers(norm) == [nn.Conv2d, nn.GroupNorm]
    for pool in (
        nn.MaxPool2d(3),
        nn.MaxPool2d(2, stride=1),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, ceil_mode=True),
    ):
        fused = fuse(nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), pool))
        assert isinstance(fused[1], NormReLU)
        assert not fused[1].pool
        assert fused[3] is pool
