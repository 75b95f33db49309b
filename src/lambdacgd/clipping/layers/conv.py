"""Convolutions and transposed convolutions as matrix products over patches.

Patches are strided views of the padded input, copied group of examples by group of examples: ``F.unfold`` launches one
kernel per example. The weight's per-example gradient is Σ_t b_t p_tᵀ over output positions t with patches p_t; a
transposed convolution is the same with the roles of input and output gradient exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lambdacgd.clipping import bounds, gpu
from lambdacgd.clipping.backward import Outer, Record, Stored, direct, in_chunks, same_type
from lambdacgd.clipping.rules import Call, Layer, autocast_dtype, computed, register, tap
from lambdacgd.torch_private import quick_apply, repeated_padding


def patches(
    x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...], out: tuple[int, ...]
) -> Tensor:
    """A view [B, C, *out, *kernel] of a padded input [B, C, *space]; ``out`` positions are taken in each dimension."""
    x = x.contiguous()
    strides = x.stride()
    size = (*x.shape[:2], *out, *kernel)
    moves = tuple(s * step for s, step in zip(strides[2:], stride, strict=True))
    taps = tuple(s * step for s, step in zip(strides[2:], dilation, strict=True))
    return x.as_strided(size, (*strides[:2], *moves, *taps))


def pad_to_fit(x: Tensor, geometry: dict[str, Any], out: tuple[int, ...]) -> Tensor:
    """Zero-pad ``x`` by the convolution's padding, and on the far side as far as ``out`` positions reach."""
    widths: list[int] = []
    for d in reversed(range(x.dim() - 2)):
        low = geometry["padding"][d]
        reach = (out[d] - 1) * geometry["stride"][d] + (geometry["kernel"][d] - 1) * geometry["dilation"][d] + 1
        widths += [low, max(0, reach - x.shape[2 + d] - low)]
    return F.pad(x, widths) if any(widths) else x


def patch_record(name: str, image: Tensor, response: Tensor, geometry: dict[str, Any], shape: torch.Size) -> Record:
    """Record for a weight [response channels, image channels / groups, *kernel] used on patches of ``image``."""
    groups, kernel = geometry["groups"], geometry["kernel"]
    out = tuple(response.shape[2:])
    image = pad_to_fit(image, geometry, out)
    inner = shape.numel() // shape[0]
    examples, outer, positions = response.shape[0], response.shape[1], math.prod(out)
    sizes = (examples, positions, inner, outer)
    one_by_one = all(k == 1 for k in kernel) and all(s == 1 for s in geometry["stride"]) and image.shape[2:] == out
    on_gpu = image.device.type == gpu.DEVICE
    if on_gpu and groups == 1 and not one_by_one and direct(sizes, patches=True):
        formed = gpu.patch_gradients(image, response, geometry)
        if formed is not None:
            return Stored(name, formed[0], formed[1])
    view = partial(patches, kernel=kernel, stride=geometry["stride"], dilation=geometry["dilation"], out=out)
    spatial = len(kernel)
    response = response.flatten(2)

    def rows_of_patches(rows: slice) -> Tensor:
        # [n, C, *out, *kernel] -> [n, C, *kernel, *out] (long runs to copy) -> [n, T, C·K], positions adjacent
        p = view(image[rows])
        order = (0, 1, *range(2 + spatial, 2 + 2 * spatial), *range(2, 2 + spatial))
        return p.permute(order).reshape(p.shape[0], -1, positions).transpose(1, 2)

    if groups == 1:
        a = image.flatten(2).transpose(1, 2) if one_by_one else rows_of_patches
        return Outer(name, a, response.transpose(1, 2), sizes, shape, response.dtype, response.device)
    parts = []
    for rows in in_chunks(examples, positions * inner * groups, response.device):
        p = view(image[rows])
        n = p.shape[0]
        order = (0, 1, 2, *range(3 + spatial, 3 + 2 * spatial), *range(3, 3 + spatial))
        p = p.unflatten(1, (groups, -1)).permute(order).reshape(n * groups, inner, positions).transpose(1, 2)
        r = response[rows].reshape(n * groups, outer // groups, positions)
        parts.append(bounds.bmm(r, p).view(n, *shape))
    return Stored(name, torch.cat(parts))


def conv_records(
    gradient: Tensor, x: Tensor, *, names: dict[str, str], geometry: dict[str, Any], shape: torch.Size
) -> Iterator[Record]:
    if "weight" in names:
        if geometry["mode"] != "zeros":
            x = F.pad(x, geometry["wrap"], mode=geometry["mode"])
        x, response = same_type(x, gradient)
        if geometry["transposed"]:
            yield patch_record(names["weight"], response, x, geometry, shape)
        else:
            yield patch_record(names["weight"], x, response, geometry, shape)
    if "bias" in names:
        yield Stored(names["bias"], gradient.flatten(2).sum(2, dtype=bounds.accumulator(gradient.dtype)))


def _geometry(m: Any) -> dict[str, Any]:
    padding = m.padding
    transposed = bool(m.transposed)
    if m.padding_mode != "zeros" or padding == "valid":
        padding = (0,) * len(m.kernel_size)
    elif padding == "same":
        padding = tuple(d * (k - 1) // 2 for d, k in zip(m.dilation, m.kernel_size, strict=True))
    return {
        "kernel": m.kernel_size, "stride": m.stride, "dilation": m.dilation, "padding": padding, "groups": m.groups,
        "mode": m.padding_mode, "wrap": list(repeated_padding(m)), "transposed": transposed,
    }  # fmt: skip


class ConvTap(torch.autograd.Function):
    """A convolution whose backward gives the input's gradient and delivers (input, output gradient): one node instead
    of two, for models that are bound by the host.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: dict[str, Any], call: Call
    ) -> Tensor:
        ctx.call, ctx.geometry = call, geometry
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[1] else None)
        return torch.convolution(x, weight, bias, *_arguments(geometry))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        below = None
        if weight is not None:
            below = torch.ops.aten.convolution_backward.default(
                gradient, x, weight, None, *_arguments(ctx.geometry), (True, False, False)
            )[0]
        ctx.call.deliver(gradient, x)
        return None, below, None, None, None, None


def _arguments(geometry: dict[str, Any]) -> tuple[Any, ...]:
    zero = (0,) * len(geometry["kernel"])
    return geometry["stride"], geometry["padding"], geometry["dilation"], False, zero, geometry["groups"]


apply_conv = quick_apply(ConvTap)


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def conv(layer: Layer, input: Tensor) -> Tensor:
    m: nn.Conv2d = layer.module  # type: ignore[assignment]
    low = autocast_dtype(input)
    x = input if low is None else input.to(low)
    if layer.recorder is None:
        layer.recorder = partial(conv_records, names=layer.names, geometry=_geometry(m), shape=m.weight.shape)
    recorder = layer.recorder
    weight, bias = m.weight.detach(), None if m.bias is None else m.bias.detach()
    if low is not None:
        weight, bias = weight.to(low), None if bias is None else bias.to(low)
    if computed(m) or not _plain(m) or x.dtype != weight.dtype or x.dim() != 2 + len(m.kernel_size):
        return tap(layer, layer.hidden(x), recorder, x)
    return apply_conv(layer.anchor, x, weight, bias, recorder.keywords["geometry"], Call(layer, recorder))


def _plain(m: Any) -> bool:
    """Padded by zeros, on both sides alike: what the geometry says is what `ConvTap` computes."""
    return m.padding_mode == "zeros" and m.padding != "same"


@register(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def conv_transpose(layer: Layer, input: Tensor, output_size: Any = None) -> Tensor:
    m: nn.ConvTranspose2d = layer.module  # type: ignore[assignment]
    low = autocast_dtype(input)
    x = input if low is None else input.to(low)
    recorder = partial(conv_records, names=layer.names, geometry=_geometry(m), shape=m.weight.shape)
    return tap(layer, layer.hidden(x, output_size), recorder, x)
