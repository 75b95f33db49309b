"""What the kernels for kept gradients are told, on stand-ins that read memory by the same addresses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lambdacgd.clipping import attach, backward, gpu

SEED = 21


class Patches:
    """`kernels.patch_gradient_kernel` by addresses into the image's memory."""

    launches = 0

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        return self.launch

    def launch(
        self, image: Tensor, response: Tensor, out: Tensor, squares: Tensor, views: int, channels: int, positions: int,
        width: int, columns: int, rows: int, across: int, stride_y: int, stride_x: int, dilation_y: int,
        dilation_x: int, padding_y: int, padding_x: int, *, KERNEL: int, KERNEL_X: int, **tiles: int,
    ) -> None:  # fmt: skip
        self.launches += 1
        examples, inner, height = len(out) * views, columns // KERNEL, positions // width
        whole = image.as_strided((examples, inner, rows, across), (inner * rows * across, rows * across, across, 1))
        image = F.pad(whole, 2 * (padding_x + across,) + 2 * (padding_y + rows,))[:, :, rows:, across:].contiguous()
        channel, row = image.shape[2] * image.shape[3], image.shape[3]
        sizes = (examples, inner, KERNEL // KERNEL_X, KERNEL_X, height, width)
        steps = (inner * channel, channel, dilation_y * row, dilation_x, stride_y * row, stride_x)
        patches = image.as_strided(sizes, steps).reshape(examples, columns, positions)
        flat = response.as_strided((examples, channels, positions), (channels * positions, positions, 1))
        products = flat.float() @ patches.float().transpose(1, 2)
        out.view(len(out), channels, columns).copy_(products.unflatten(0, (-1, views)).sum(1))
        squares.zero_()
        assert squares.shape[1] == len(out)
        squares[0] = out.square().flatten(1).sum(1)


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> Patches:
    found = Patches()
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "kernels", lambda: type("Kernels", (), {"patch_gradient_kernel": found}))
    monkeypatch.setattr(gpu.bounds, "tf32_in_use", lambda device: True)
    monkeypatch.setattr(gpu, "weighted_sum", lambda *args, **kwargs: False)
    monkeypatch.setattr(gpu, "may_use_tables", lambda: False)
    torch.manual_seed(SEED)
    return found


def _channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last)


LAYOUTS = {
    "plain": lambda x: x,
    "channels_last": _channels_last,
    "channels put first": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "every other": lambda x: x.repeat_interleave(2, 0)[::2],
}
LAYERS = {
    "padded": lambda c: nn.Conv2d(c, 4, 3, padding=1),
    "bare": lambda c: nn.Conv2d(c, 4, (3, 2), stride=(2, 1), dilation=(1, 2)),
    "one output": lambda c: nn.Sequential(nn.ConvTranspose2d(c, 1, 3, stride=2), nn.Conv2d(1, 2, 3)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("channels", [1, 3])
def test_examples_are_found_in_every_layout(patches: Patches, layer: str, layout: str, channels: int) -> None:
    """A grey image in channels_last counts as contiguous, with a stride of one for its channel."""
    model = nn.Sequential(LAYERS[layer](channels), nn.Flatten(), nn.LazyLinear(3))
    x, y = LAYOUTS[layout](torch.randn(5, channels, 9, 8)), torch.tensor([0, 1, 2, 0, 1])
    model(x)
    if layout == "channels_last":
        model.to(memory_format=torch.channels_last)
    expected = [torch.zeros_like(p) for p in model.parameters()]
    norms = torch.zeros(5)
    for i in range(5):
        found = torch.autograd.grad(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters()))
        norms[i] = sum(g.square().sum() for g in found) ** 0.5
        expected = [total + g for total, g in zip(expected, found, strict=True)]
    clipper = attach(model, math.inf)
    F.cross_entropy(model(x), y).backward()
    assert patches.launches
    torch.testing.assert_close(clipper.norms, norms, rtol=0.01, atol=0)  # rounded up for TF32
    for total, wanted in zip(clipper.take().values(), expected, strict=True):
        torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kept", [0, 1 << 26])
def test_views_are_added_up_before_their_gradients_are_kept(
    patches: Patches, monkeypatch: pytest.MonkeyPatch, fused: bool, kept: int
) -> None:
    """By the kernel, by patches of all views at once, and (depthwise) by the gradients of each."""
    monkeypatch.setattr(backward, "_KEPT_PATCHES", kept)
    if not fused:
        monkeypatch.setattr(gpu, "DEVICE", "cuda")
    layers = [nn.Conv2d(3, 20, 3), nn.ReLU(), nn.Conv2d(20, 20, 2, groups=4), nn.ConvTranspose2d(20, 4, 2)]
    model, x = nn.Sequential(*layers, nn.Conv2d(4, 40, 3), nn.Flatten()), torch.randn(4, 3, 3, 5, 6)
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for example in x:
        found = torch.autograd.grad(model(example).square().sum(1).mean(), list(model.parameters()))
        factor = min(1.0, 20.0 / float(sum(g.square().sum() for g in found) ** 0.5))
        expected = [total + factor * g for total, g in zip(expected, found, strict=True)]
    clipper = attach(model, 20.0)
    clipper.expect_views(3)
    model(x.flatten(0, 1)).square().sum(1).mean().backward()
    assert bool(patches.launches) == fused
    for total, wanted in zip(clipper.take().values(), expected, strict=True):
        torch.testing.assert_close(total, wanted, rtol=0.01, atol=1e-3)  # norms are rounded up for TF32


def test_a_sum_of_nothing_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "kernels", Anything)
    assert gpu.weighted_sum(torch.empty(0), torch.empty(3, 0), torch.ones(3), torch.ones(3) > 0, fresh=True)


class Anything:
    """Kernels that do nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


def test_what_kernels_write_is_float32_whatever_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 a norm is off by 0.2%, beyond the tolerance."""
    monkeypatch.setattr(gpu, "kernels", Anything)
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu.bounds, "tf32_in_use", lambda device: True)
    monkeypatch.setattr(gpu, "may_use_tables", lambda: True)
    monkeypatch.setattr(gpu, "_table", lambda values, device: torch.tensor(values))
    x, geometry = torch.randn(2, 3, 4, 4), {"kernel": (2, 2), "stride": (1, 1), "dilation": (1, 1), "padding": (0, 0)}
    tokens, some = x.flatten(2), torch.ones(2, 3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found: Any = [
            gpu.patch_gradients(x, x[:, :, 1:, 1:], geometry),
            gpu.group_norm_sums(x, x, some, some),
            gpu.layer_norm_sums(tokens, tokens, some, some, 16),
            gpu.column_sums([tokens, tokens]),
            [grams for _, grams, _ in gpu.gram_norms([(tokens, tokens)])],
        ]
    finally:
        torch.set_default_dtype(before)
    assert [t.dtype for part in found for t in part] == [torch.float32] * 9


@pytest.mark.parametrize(("tokens", "fits"), [(1 << 10, True), (1 << 11, False)])
def test_tokens_too_far_apart_for_an_index_share_no_launch(tokens: int, fits: bool) -> None:
    """[T, B, …] as a recurrence leaves it: the tokens of an example are B · gates numbers apart."""
    b = torch.empty(tokens, 1 << 10, 1 << 10, dtype=torch.bfloat16, device="meta").transpose(0, 1)
    assert (gpu._kind_of(b[..., :8], b) is not None) == fits
