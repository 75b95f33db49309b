"""Normalisation within an example: LayerNorm, RMSNorm, GroupNorm, InstanceNorm. All are a scale and a shift of x̂."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lambdacgd.clipping import bounds, gpu
from lambdacgd.clipping.backward import Record, Stored
from lambdacgd.clipping.rules import Call, Layer, autocast_dtype, detached, fused_tap, register, tap
from lambdacgd.errors import ClippingError
from lambdacgd.torch_private import own_parameters

_NAMES = ("weight", "bias")
_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default
_group_norm_backward = torch.ops.aten.native_group_norm_backward.default


def affine_records(
    gradient: Tensor,
    x: Tensor,
    *statistics: Tensor,
    normalise: Callable[..., Tensor],
    over: slice,
    names: dict[str, str],
    kernel: Callable[..., tuple[Tensor, Tensor] | None] | None = None,
    shape: torch.Size | None = None,
) -> list[Record]:
    """Scale: Σ b∘x̂, shift: Σ b, over the dimensions the parameters are broadcast along; on CUDA in one launch, where
    there is a ``kernel`` that fits, which is told the parameters' ``shape``.
    """
    if kernel is not None and shape is not None and x.device.type == gpu.DEVICE:
        sums = kernel(x, gradient.contiguous(), *statistics)
        if sums is not None:
            pairs = zip(_NAMES, sums if len(shape) == 1 else [s.view(-1, *shape) for s in sums], strict=True)
            return [Stored(names[kind], total) for kind, total in pairs if kind in names]
    kept = bounds.accumulator(gradient.dtype)
    dims = tuple(range(gradient.dim())[over])
    records: list[Record] = []
    if "weight" in names:
        product = gradient * normalise(x.to(torch.promote_types(x.dtype, kept)), *statistics)
        records.append(Stored(names["weight"], product.sum(dims, dtype=kept) if dims else product.to(kept)))
    if "bias" in names:
        records.append(Stored(names["bias"], gradient.sum(dims, dtype=kept) if dims else gradient.to(kept)))
    return records


def _trailing(module: nn.Module) -> slice:
    return slice(1, -len(module.normalized_shape))  # type: ignore[arg-type]


def _ready(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias, detached, where the statistics of the forward pass can be kept: parameters of the module's own,
    float32 or float64. None elsewhere.
    """
    own: dict[str, Any] = own_parameters(m)
    weight = own.get("weight")
    if weight is None or "bias" not in own or weight.dtype != x.dtype or x.dtype not in (torch.float32, torch.float64):
        return None
    return weight.detach(), detached(own["bias"])


@register(nn.LayerNorm, pointwise=True)
def layer_norm(layer: Layer, input: Tensor) -> Tensor:
    m: nn.LayerNorm = layer.module  # type: ignore[assignment]
    x = input.float() if autocast_dtype(input) is not None else input
    ready = _ready(m, x)
    if ready is None:
        normalise = partial(F.layer_norm, normalized_shape=m.normalized_shape, eps=m.eps)
        recorder = partial(affine_records, normalise=normalise, over=_trailing(m), names=layer.names)
        return tap(layer, layer.hidden(input), recorder, input)
    (weight, bias), shape, eps = ready, m.normalized_shape, m.eps

    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        return y, x, weight, mean, rstd

    def backward(gradient: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
        given = (gradient, x, shape, mean, rstd, weight, bias, (True, False, False))
        return _layer_norm_backward(*given)[0]

    if layer.recorder is None:
        kernel = partial(gpu.layer_norm_sums, size=weight.numel())
        layer.recorder = partial(
            affine_records,
            normalise=_standardised,
            over=_trailing(m),
            names=layer.names,
            kernel=kernel,
            shape=weight.shape,
        )
    return fused_tap(x, weight, forward, backward, Call(layer, layer.recorder))


def _standardised(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return (x - mean) * rstd


@register(nn.RMSNorm, pointwise=True)
def rms_norm(layer: Layer, x: Tensor) -> Tensor:
    m: nn.RMSNorm = layer.module  # type: ignore[assignment]
    # The default eps is the machine epsilon of the *input's* type: fixed here, since x̂ is computed in a wider one.
    eps = torch.finfo(x.dtype).eps if m.eps is None else m.eps
    normalise = partial(F.rms_norm, normalized_shape=m.normalized_shape, eps=eps)
    recorder = partial(affine_records, normalise=normalise, over=_trailing(m), names=layer.names)
    return tap(layer, layer.hidden(x), recorder, x)


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
    x = input.float() if autocast_dtype(input) is not None else input
    ready = _ready(m, x) if x.is_contiguous() else None
    if ready is None:
        normalise = partial(F.group_norm, num_groups=groups, eps=m.eps)
        recorder = partial(affine_records, normalise=normalise, over=slice(2, None), names=layer.names)
        return tap(layer, layer.hidden(input), recorder, input)
    (weight, bias), eps = ready, m.eps
    sizes = (x.shape[0], x.shape[1], math.prod(x.shape[2:]), groups)

    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y, mean, rstd = torch.native_group_norm(x, weight, bias, *sizes, eps)
        return y, x, weight, mean, rstd

    def backward(gradient: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
        given = (gradient.contiguous(), x, mean, rstd, weight, *sizes, (True, False, False))
        return _group_norm_backward(*given)[0]

    if layer.recorder is None:
        how: dict[str, Any] = {"over": slice(2, None), "names": layer.names, "shape": weight.shape}
        layer.recorder = partial(affine_records, normalise=_standardised_by_group, kernel=gpu.group_norm_sums, **how)
    return fused_tap(x, weight, forward, backward, Call(layer, layer.recorder))


def _standardised_by_group(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return _standardised(x.view(*mean.shape, -1), mean.unsqueeze(2), rstd.unsqueeze(2)).view_as(x)


@register(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(layer: Layer, input: Tensor) -> Tensor:
    m: nn.InstanceNorm1d = layer.module  # type: ignore[assignment]
    normalise = partial(F.instance_norm, eps=m.eps)
    recorder = partial(affine_records, normalise=normalise, over=slice(2, None), names=layer.names)
    return tap(layer, layer.hidden(input), recorder, input)
