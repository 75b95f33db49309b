"""Linear layers with inputs of two or more dimensions, and Hugging Face's ``Conv1D`` (a Linear stored transposed)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lambdacgd.clipping.backward import ColumnSum, Record, direct, outer
from lambdacgd.clipping.bounds import without_autocast
from lambdacgd.clipping.rules import Call, Layer, autocast_dtype, register
from lambdacgd.torch_private import foreach_copy_, own_parameters, quick_apply


def tokens(x: Tensor) -> Tensor:
    """[B, ..., d] as [B, T, d]."""
    if x.dim() == 3:
        return x
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)


def linear_records(
    gradient: Tensor, x: Tensor, *, weight: str | None, bias: str | None, shape: torch.Size, transposed: bool = False
) -> Iterator[Record]:
    """Weight: Σ_t b_t x_tᵀ. Bias: Σ_t b_t."""
    b = tokens(gradient)
    keeps_b = False
    if weight is not None:
        kept = outer(weight, tokens(x), b, shape, transposed=transposed)
        keeps_b = b.shape[1] > 1 and not direct(kept.sizes, patches=False)
        yield kept
    if bias is not None:
        later = ColumnSum(bias, b)
        yield later if keeps_b else later.formed()


class LinearTap(torch.autograd.Function):
    """``F.linear`` whose backward gives the input's gradient and delivers (input, output gradient).

    One node instead of two: transformers have hundreds of Linear layers and are bound by launches in bfloat16.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        ctx.call, ctx.dtype = call, x.dtype
        forward_pass = call.layer.forward_pass
        low = autocast_dtype(x)
        if low is not None:
            ready = forward_pass.cast_weights.get(call.layer)
            x = forward_pass.cast_input(x, low)
            if ready is not None and ready[0].dtype == low:
                weight, bias = ready
            else:
                weight, bias = weight.to(low), None if bias is None else bias.to(low)
        if x.dim() > 2 and bias is not None:  # F.linear would return a view here: see Tap
            y = x.new_empty(*x.shape[:-1], weight.shape[0])
            torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight.t(), out=y.view(-1, weight.shape[0]))
        else:
            y = F.linear(x, weight, bias)
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[1] else None)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        below = None
        if weight is not None:
            below = without_autocast(torch.matmul, gradient, weight)
            if below.dtype != ctx.dtype:
                below = below.to(ctx.dtype)
        ctx.call.deliver(gradient, x)
        return None, below, None, None, None


apply_linear = quick_apply(LinearTap)


def tapped_linear(
    layer: Layer,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    names: tuple[str | None, str | None],
    *,
    transposed: bool,
) -> Tensor:
    """``F.linear(x, weight, bias)`` recorded under the model's names of weight and bias (None: frozen or absent)."""
    shape = weight.t().shape if transposed else weight.shape
    recorder = partial(linear_records, weight=names[0], bias=names[1], shape=shape, transposed=transposed)
    anchor, call = layer.anchor, Call(layer, recorder)
    return apply_linear(anchor, x, weight.detach(), None if bias is None else bias.detach(), call)


@register(nn.Linear, pointwise=True)
def linear(layer: Layer, input: Tensor) -> Tensor:
    own = own_parameters(layer.module)
    weight, bias = own["weight"].detach(), own["bias"]  # type: ignore[union-attr]
    if layer.recorder is None:
        names = {"weight": layer.names.get("weight"), "bias": layer.names.get("bias")}
        layer.recorder = partial(linear_records, **names, shape=weight.shape)  # type: ignore[arg-type]
    bias = None if bias is None else bias.detach()  # type: ignore[assignment]
    return apply_linear(layer.anchor, input, weight, bias, Call(layer, layer.recorder))


@register("transformers.pytorch_utils.Conv1D", pointwise=True)
def conv1d_of_hugging_face(layer: Layer, x: Tensor) -> Tensor:
    module = layer.module
    names = (layer.names.get("weight"), layer.names.get("bias"))
    return tapped_linear(layer, x, module.weight.t(), module.bias, names, transposed=True)  # type: ignore[operator, arg-type]


def cast_weights(linears: list[Layer]) -> dict[Layer, tuple[Tensor, Tensor | None]]:
    """On CUDA, weights and biases of Linear layers in autocast's type, by one launch instead of two for each layer.

    Made anew in every forward pass, as autocast does, since the backward pass needs the values of its own forward pass.
    """
    if not torch.is_autocast_enabled("cuda") or not linears:
        return {}
    low = torch.get_autocast_dtype("cuda")
    modules: list[nn.Linear] = [layer.module for layer in linears]  # type: ignore[misc]
    whole: list[Tensor] = [p for m in modules for p in (m.weight, m.bias) if p is not None]
    whole.sort(key=lambda p: p.numel() % 8 != 0)  # odd sizes last: the others stay aligned
    flat = torch.empty(sum(p.numel() for p in whole), dtype=low, device=whole[0].device)
    parts = [part.view(p.shape) for p, part in zip(whole, flat.split([p.numel() for p in whole]), strict=True)]
    with torch.no_grad():
        foreach_copy_(parts, whole)
    cast = {id(p): part for p, part in zip(whole, parts, strict=True)}
    return {layer: (cast[id(m.weight)], cast.get(id(m.bias))) for layer, m in zip(linears, modules, strict=True)}
