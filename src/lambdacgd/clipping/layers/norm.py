"""Normalisation within an example: LayerNorm, RMSNorm, GroupNorm, InstanceNorm. All are a scale and a shift of x̂."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lambdacgd.clipping import bounds, gpu
from lambdacgd.clipping.backward import Record, Stored
from lambdacgd.clipping.rules import Call, Layer, autocast_dtype, computed, register, tap
from lambdacgd.errors import ClippingError
from lambdacgd.torch_private import quick_apply


def affine_records(
    gradient: Tensor, x: Tensor, *, normalise: Callable[[Tensor], Tensor], over: slice, names: dict[str, str]
) -> Iterator[Record]:
    """Scale: Σ b∘x̂, shift: Σ b, over the dimensions the parameters are broadcast along."""
    kept = bounds.accumulator(gradient.dtype)
    dims = tuple(range(gradient.dim())[over])
    if "weight" in names:
        product = gradient * normalise(x.to(torch.promote_types(x.dtype, kept)))
        yield Stored(names["weight"], product.sum(dims, dtype=kept) if dims else product.to(kept))
    if "bias" in names:
        yield Stored(names["bias"], gradient.sum(dims, dtype=kept) if dims else gradient.to(kept))


def _trailing(module: nn.Module) -> slice:
    return slice(1, -len(module.normalized_shape))  # type: ignore[arg-type]


class LayerNormTap(torch.autograd.Function):
    """Layer normalisation that delivers (input, mean, 1/deviation) with the output gradient; float32 and float64
    only.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, shape: Any, weight: Any, bias: Any, eps: float, call: Call
    ) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.call, ctx.shape = call, shape
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, mean, rstd, weight, bias = ctx.saved_tensors
        below = None
        if ctx.needs_input_grad[1]:
            mask = (True, False, False)
            below = torch.ops.aten.native_layer_norm_backward.default(
                gradient, x, ctx.shape, mean, rstd, weight, bias, mask
            )[0]
        ctx.call.deliver(gradient, x, mean, rstd)
        return None, below, None, None, None, None, None


apply_layer_norm = quick_apply(LayerNormTap)


@register(nn.LayerNorm, pointwise=True)
def layer_norm(layer: Layer, input: Tensor) -> Tensor:
    m: nn.LayerNorm = layer.module  # type: ignore[assignment]
    x = input.float() if autocast_dtype(input) is not None else input
    if computed(m) or x.dtype not in (torch.float32, torch.float64) or m.weight.dtype != x.dtype:
        normalise = partial(F.layer_norm, normalized_shape=m.normalized_shape, eps=m.eps)
        recorder: Any = partial(affine_records, normalise=normalise, over=_trailing(m), names=layer.names)
        return tap(layer, layer.hidden(input), recorder, input)
    weight, bias = m.weight.detach(), None if m.bias is None else m.bias.detach()
    if layer.recorder is None:
        layer.recorder = partial(layer_norm_records, shape=m.weight.shape, over=_trailing(m), names=layer.names)
    return apply_layer_norm(layer.anchor, x, m.normalized_shape, weight, bias, m.eps, Call(layer, layer.recorder))


def layer_norm_records(
    gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, *, shape: torch.Size, over: slice, names: dict[str, str]
) -> Iterator[Record]:
    """As `affine_records`, from the statistics of the forward pass; one launch on CUDA."""
    sums = gpu.layer_norm_sums(x, gradient, mean, rstd, shape.numel()) if x.device.type == gpu.DEVICE else None
    if sums is None:
        yield from affine_records(gradient, x, normalise=lambda v: (v - mean) * rstd, over=over, names=names)
        return
    for local, total in zip(("weight", "bias"), sums, strict=True):
        if local in names:
            yield Stored(names[local], total.view(-1, *shape))


@register(nn.RMSNorm, pointwise=True)
def rms_norm(layer: Layer, x: Tensor) -> Tensor:
    m: nn.RMSNorm = layer.module  # type: ignore[assignment]
    # The default eps is the machine epsilon of the *input's* type: fixed here, since x̂ is computed in a wider one.
    eps = torch.finfo(x.dtype).eps if m.eps is None else m.eps
    normalise = partial(F.rms_norm, normalized_shape=m.normalized_shape, eps=eps)
    recorder = partial(affine_records, normalise=normalise, over=_trailing(m), names=layer.names)
    return tap(layer, layer.hidden(x), recorder, x)


class GroupNormTap(torch.autograd.Function):
    """Group normalisation that delivers (input, mean, 1/deviation) with the output gradient; contiguous float32 and
    float64 only.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, weight: Any, bias: Any, groups: int, eps: float, call: Call
    ) -> Any:
        ctx.call, ctx.sizes = call, (x.shape[0], x.shape[1], math.prod(x.shape[2:]), groups)
        y, mean, rstd = torch.ops.aten.native_group_norm.default(x, weight, bias, *ctx.sizes, eps)
        ctx.save_for_backward(x, mean, rstd, weight)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, mean, rstd, weight = ctx.saved_tensors
        gradient, below = gradient.contiguous(), None
        if ctx.needs_input_grad[1]:
            below = torch.ops.aten.native_group_norm_backward.default(
                gradient, x, mean, rstd, weight, *ctx.sizes, (True, False, False)
            )[0]
        ctx.call.deliver(gradient, x, mean, rstd)
        return None, below, None, None, None, None, None


apply_group_norm = quick_apply(GroupNormTap)


class FittedGroupNorm(nn.GroupNorm):
    """The GroupNorm that `convert` puts in the place of a BatchNorm: as many groups as the input's shape allows.

    A BatchNorm may see [B, C] or [B, C, 1, 1], which only the input tells. Groups of one value would be normalised to
    zero, groups of two to ±1. The number of groups is the largest divisor of the channels, up to ``num_groups``, that
    leaves at least ``LEAST`` values of an example in each group; one group, if none does.
    """

    LEAST = 16

    def __init__(self, groups: int, channels: int, *, eps: float, affine: bool) -> None:
        fitting = max(g for g in range(1, min(groups, channels) + 1) if channels % g == 0)
        super().__init__(fitting, channels, eps=eps, affine=affine)

    def groups_for(self, x: Tensor) -> int:
        """The number of groups for an input of this shape."""
        values = math.prod(x.shape[1:])
        if values == 1:
            raise ClippingError(
                f"a GroupNorm in place of a BatchNorm sees one value for each example (shape {tuple(x.shape)}), of "
                "which nothing is left when it is normalised. Take the BatchNorm out of the model."
            )
        allowed = range(self.num_groups, 0, -1)
        return next((g for g in allowed if self.num_channels % g == 0 and values // g >= self.LEAST), 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.groups_for(x), self.weight, self.bias, self.eps)


@register(nn.GroupNorm, FittedGroupNorm)
def group_norm(layer: Layer, input: Tensor) -> Tensor:
    m: nn.GroupNorm = layer.module  # type: ignore[assignment]
    groups = m.groups_for(input) if isinstance(m, FittedGroupNorm) else m.num_groups
    normalise = partial(F.group_norm, num_groups=groups, eps=m.eps)
    x = input.float() if autocast_dtype(input) is not None else input
    ready = x.dtype in (torch.float32, torch.float64) and x.is_contiguous() and not computed(m)
    if not ready or m.weight.dtype != x.dtype:
        recorder = partial(affine_records, normalise=normalise, over=slice(2, None), names=layer.names)
        return tap(layer, layer.hidden(input), recorder, input)
    recorder = partial(group_norm_records, normalise=normalise, names=layer.names)
    weight, bias = m.weight.detach(), None if m.bias is None else m.bias.detach()
    return apply_group_norm(layer.anchor, x, weight, bias, groups, m.eps, Call(layer, recorder))


def group_norm_records(
    gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, *, normalise: Any, names: dict[str, str]
) -> Iterator[Record]:
    """As `affine_records`, from the statistics of the forward pass in one launch on CUDA."""
    sums = gpu.group_norm_sums(x, gradient, mean, rstd) if x.device.type == gpu.DEVICE else None
    if sums is None:
        yield from affine_records(gradient, x, normalise=normalise, over=slice(2, None), names=names)
        return
    for local, total in zip(("weight", "bias"), sums, strict=True):
        if local in names:
            yield Stored(names[local], total)


@register(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(layer: Layer, input: Tensor) -> Tensor:
    m: nn.InstanceNorm1d = layer.module  # type: ignore[assignment]
    normalise = partial(F.instance_norm, eps=m.eps)
    recorder = partial(affine_records, normalise=normalise, over=slice(2, None), names=layer.names)
    return tap(layer, layer.hidden(input), recorder, input)
