"""Linear maps: Linear, Hugging Face's ``Conv1D``, convolutions and transposed convolutions.

All are matrix products, so that the weight's per-example gradient is Σ_t b_t a_tᵀ. A convolution's a_t are patches:
strided views of the padded input, copied group of examples by group of examples (``F.unfold`` launches one kernel per
example), and t are output positions. A transposed convolution is the same with the roles of input and output gradient
exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lambdacgd.clipping import bounds, gpu
from lambdacgd.clipping.backward import ColumnSum, Outer, Record, Stored, direct, in_chunks, outer, same_type
from lambdacgd.clipping.rules import (
    Call,
    Layer,
    Recorder,
    autocast_dtype,
    computed,
    detached,
    fused_tap,
    register,
    tap,
)
from lambdacgd.torch_private import foreach_copy_, own_parameters, repeated_padding, unflatten

# --- Linear -----------------------------------------------------------------------------------------------------------


def tokens(x: Tensor) -> Tensor:
    """[B, ..., d] as [B, T, d]."""
    if x.dim() == 3:
        return x
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)


def linear_records(
    gradient: Tensor, x: Tensor, *, weight: str | None, bias: str | None, shape: torch.Size, transposed: bool = False
) -> list[Record]:
    """Weight: Σ_t b_t x_tᵀ. Bias: Σ_t b_t."""
    b, records, keeps_b = tokens(gradient), list[Record](), False
    if weight is not None:
        kept = outer(weight, tokens(x), b, shape, transposed=transposed)
        keeps_b = kept.sizes[1] > 1 and not kept.is_direct
        records.append(kept)
    if bias is not None:
        late = ColumnSum(bias, b) if keeps_b else Stored(bias, b.sum(1, dtype=bounds.accumulator(b.dtype)))
        records.append(late)
    return records


def apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """``F.linear`` whose backward gives the input's gradient and delivers (input, output gradient)."""
    kind, low, forward_pass = x.dtype, autocast_dtype(x), call.layer.forward_pass
    ready = None if low is None else forward_pass.cast_weights.get(call.layer)
    if ready is not None and ready[0].dtype == low:
        weight, bias = ready
    else:
        weight, bias = weight.detach(), detached(bias)
        if low is not None:
            weight, bias = weight.to(low), None if bias is None else bias.to(low)

    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        if low is not None and x.dtype != low:
            x = forward_pass.cast_input(x, low)
        return F.linear(x, weight, bias), x, weight

    def backward(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        below = torch.matmul(gradient, weight)
        return below if below.dtype == kind else below.to(kind)

    return fused_tap(x, weight, forward, backward, call)


def tapped_linear(
    layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None, names: Sequence[str | None], *, transposed: bool
) -> Tensor:
    """``F.linear(x, weight, bias)`` recorded under the model's names of weight and bias (None: frozen or absent)."""
    return apply_linear(x, weight, bias, Call(layer, _recorder(weight, names, transposed=transposed)))


def _recorder(weight: Tensor, names: Sequence[str | None], *, transposed: bool) -> Recorder:
    shape = weight.t().shape if transposed else weight.shape
    return partial(linear_records, weight=names[0], bias=names[1], shape=shape, transposed=transposed)


@register(nn.Linear, pointwise=True)
def linear(layer: Layer, input: Tensor) -> Tensor:
    own: dict[str, Any] = own_parameters(layer.module)
    weight = own["weight"]
    if layer.recorder is None:
        layer.recorder = _recorder(weight, [layer.names.get("weight"), layer.names.get("bias")], transposed=False)
    return apply_linear(input, weight, own["bias"], Call(layer, layer.recorder))


@register("transformers.pytorch_utils.Conv1D", pointwise=True)
def conv1d_of_hugging_face(layer: Layer, x: Tensor) -> Tensor:
    module = layer.module
    names = [layer.names.get("weight"), layer.names.get("bias")]
    return tapped_linear(layer, x, module.weight.t(), module.bias, names, transposed=True)  # type: ignore[operator, arg-type]


def cast_weights(linears: list[Layer]) -> dict[Layer, tuple[Tensor, Tensor | None]]:
    """On CUDA, weights and biases of Linear layers in autocast's type, by one launch instead of two for each layer.

    Made anew in every forward pass, as autocast does, since the backward pass needs the values of its own forward pass.
    """
    if not torch.is_autocast_enabled(gpu.DEVICE) or not linears:
        return {}
    low = torch.get_autocast_dtype(gpu.DEVICE)
    own = [own_parameters(layer.module) for layer in linears]
    whole: list[Tensor] = [p for slots in own for p in (slots["weight"], slots["bias"]) if p is not None]
    sizes = list(map(Tensor.numel, whole))
    if any([size % 8 for size in sizes]):
        whole.sort(key=lambda p: p.numel() % 8 != 0)  # odd sizes last: the others stay aligned
    flat = torch.empty(sum(sizes), dtype=low, device=whole[0].device)
    with torch.no_grad():
        parts = unflatten(flat, whole)
        foreach_copy_(parts, whole)
    cast = dict(zip(map(id, whole), parts, strict=True))
    return {
        layer: (cast[id(slots["weight"])], cast.get(id(slots["bias"])))
        for layer, slots in zip(linears, own, strict=True)
    }


# --- convolutions -----------------------------------------------------------------------------------------------------

_convolution_backward = torch.ops.aten.convolution_backward.default


def pad_to_fit(x: Tensor, geometry: dict[str, Any], out: tuple[int, ...]) -> Tensor:
    """Zero-pad ``x`` by the convolution's padding, and on the far side as far as ``out`` positions reach."""
    widths: list[int] = []
    for d in reversed(range(x.dim() - 2)):
        low = geometry["padding"][d]
        reach = (out[d] - 1) * geometry["stride"][d] + (geometry["kernel"][d] - 1) * geometry["dilation"][d] + 1
        widths += [low, max(0, reach - x.shape[2 + d] - low)]
    return F.pad(x, widths) if any(widths) else x


def patch_record(
    name: str, image: Tensor, response: Tensor, geometry: dict[str, Any], shape: torch.Size, views: int
) -> Record:
    """Record for a weight [response channels, image channels / groups, *kernel] used on patches of ``image``. The
    ``views`` of an example, neighbours, may come back added up.
    """
    groups, kernel = geometry["groups"], geometry["kernel"]
    out = tuple(response.shape[2:])
    inner = shape.numel() // shape[0]
    examples, outer, positions = response.shape[0], response.shape[1], math.prod(out)
    sizes = (examples // views, positions * views, inner, outer)
    one_by_one = all(step == 1 for step in (*kernel, *geometry["stride"]))
    if image.device.type == gpu.DEVICE and groups == 1 and not one_by_one and direct(sizes, patches=True):
        formed = gpu.patch_gradients(image, response, geometry, views)
        if formed is not None:
            return Stored(name, formed[0], formed[1])
    image, response = pad_to_fit(image, geometry, out), response.flatten(2)
    if one_by_one and groups == 1 and image.shape[2:] == out:
        return Outer(name, image.flatten(2).transpose(1, 2), response.transpose(1, 2), shape)
    image, spatial = image.contiguous(), len(kernel)
    strides = image.stride()[2:]
    moves, taps = (
        tuple(s * k for s, k in zip(strides, geometry[steps], strict=True)) for steps in ("stride", "dilation")
    )
    view = image.as_strided((*image.shape[:2], *out, *kernel), (*image.stride()[:2], *moves, *taps))

    def rows_of_patches(rows: slice) -> Tensor:
        # [n, groups, C, *out, *kernel] -> [n, groups, C, *kernel, *out] (long runs to copy) -> [n·groups, T, C·K],
        # positions adjacent
        p = view[rows].unflatten(1, (groups, -1))
        order = (0, 1, 2, *range(3 + spatial, 3 + 2 * spatial), *range(3, 3 + spatial))
        return p.permute(order).reshape(p.shape[0] * groups, -1, positions).transpose(1, 2)

    if groups == 1:
        return Outer(name, rows_of_patches, response.transpose(1, 2), shape, image=image)
    parts = []
    for rows in in_chunks(examples, positions * inner * groups, response.device):
        r = response[rows].reshape(-1, outer // groups, positions)
        parts.append(bounds.bmm(r, rows_of_patches(rows)).view(-1, *shape))
    return Stored(name, torch.cat(parts))


def conv_records(
    gradient: Tensor, x: Tensor, *, names: dict[str, str], geometry: dict[str, Any], shape: torch.Size, views: int
) -> list[Record]:
    records: list[Record] = []
    if "weight" in names:
        if geometry["mode"] != "zeros":
            x = F.pad(x, geometry["wrap"], mode=geometry["mode"])
        x, response = same_type(x, gradient)
        image, response = (response, x) if geometry["transposed"] else (x, response)
        records.append(patch_record(names["weight"], image, response, geometry, shape, views))
    if "bias" in names:
        records.append(Stored(names["bias"], gradient.flatten(2).sum(2, dtype=bounds.accumulator(gradient.dtype))))
    return records


def _views(layer: Layer, x: Tensor) -> int:
    """How many rows of ``x``, neighbours, are views of one example; 1 where it has other rows, too."""
    return layer.backward_pass.views if x.shape[0] == layer.forward_pass.batch else 1


def _geometry(m: Any) -> dict[str, Any]:
    padding = m.padding if isinstance(m.padding, str) else tuple(m.padding)
    sizes = tuple(m.kernel_size), tuple(m.stride), tuple(m.dilation), padding
    return _geometry_of(*sizes, m.groups, m.padding_mode, tuple(repeated_padding(m)), m.transposed)


@lru_cache(maxsize=1024)
def _geometry_of(
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: str | tuple[int, ...],
    groups: int,
    mode: str,
    wrap: tuple[int, ...],
    transposed: bool,
) -> dict[str, Any]:
    if mode != "zeros" or padding == "valid":
        padding = (0,) * len(kernel)
    elif padding == "same":
        padding = tuple(d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True))
    return {
        "kernel": kernel, "stride": stride, "dilation": dilation, "padding": padding, "groups": groups,
        "mode": mode, "wrap": wrap, "transposed": bool(transposed),
    }  # fmt: skip


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def conv(layer: Layer, input: Tensor) -> Tensor:
    m: nn.Conv2d = layer.module  # type: ignore[assignment]
    low = autocast_dtype(input)
    x, weight, bias = input, m.weight.detach(), detached(m.bias)
    if low is not None:
        x, weight, bias = x.to(low), weight.to(low), None if bias is None else bias.to(low)
    geometry = _geometry(m)
    recorder = partial(conv_records, names=layer.names, geometry=geometry, shape=weight.shape, views=_views(layer, x))
    # Padded by zeros, on both sides alike: what the geometry says is what the operation below computes.
    plain = m.padding_mode == "zeros" and m.padding != "same" and not computed(m)
    if not plain or x.dtype != weight.dtype or x.dim() != 2 + len(m.kernel_size):
        return tap(layer, layer.hidden(x), recorder, x)
    how = (m.stride, geometry["padding"], m.dilation, False, (0,) * len(m.kernel_size), m.groups)

    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return torch.convolution(x, weight, bias, *how), x, weight

    def backward(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        given = (gradient, x, weight, None, *how, (True, False, False))
        return _convolution_backward(*given)[0]

    return fused_tap(x, weight, forward, backward, Call(layer, recorder))


@register(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def conv_transpose(layer: Layer, input: Tensor, output_size: Any = None) -> Tensor:
    m: nn.ConvTranspose2d = layer.module  # type: ignore[assignment]
    low = autocast_dtype(input)
    x = input if low is None else input.to(low)
    how: dict[str, Any] = {"geometry": _geometry(m), "shape": m.weight.shape, "views": _views(layer, x)}
    recorder = partial(conv_records, names=layer.names, **how)
    return tap(layer, layer.hidden(x, output_size), recorder, x)
