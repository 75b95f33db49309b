"""Linear layers with inputs of two or more dimensions, and Hugging Face's ``Conv1D`` (a Linear stored transposed)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from lambdacgd.clipping.capture import Call, Site, apply_linear
from lambdacgd.clipping.records import ColumnSum, Outer, Record, outer
from lambdacgd.clipping.registry import register


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
    kept: Record | None = None
    if weight is not None:
        kept = outer(weight, tokens(x), b, shape, transposed=transposed).resolve()
        yield kept
    if bias is not None:
        later = ColumnSum(bias, b)
        yield later if isinstance(kept, Outer) and b.shape[1] > 1 else later.formed()


def tapped_linear(
    site: Site,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    names: tuple[str | None, str | None],
    *,
    transposed: bool,
) -> Tensor:
    """``F.linear(x, weight, bias)`` recorded under the model's names of weight and bias (None: frozen or absent)."""
    recorder = partial(
        linear_records, weight=names[0], bias=names[1], shape=_shape(weight, transposed), transposed=transposed
    )
    anchor, call = site.clipper.anchor, Call(site, recorder)
    return apply_linear(anchor, x, weight.detach(), None if bias is None else bias.detach(), call)


def _shape(weight: Tensor, transposed: bool) -> torch.Size:
    return torch.Size((weight.shape[1], weight.shape[0])) if transposed else weight.shape


@register(nn.Linear)
def linear(site: Site, input: Tensor) -> Tensor:
    own = site.module._parameters
    weight, bias = own["weight"].detach(), own["bias"]  # type: ignore[union-attr]
    if site.recorder is None:
        names = {"weight": site.names.get("weight"), "bias": site.names.get("bias")}
        site.recorder = partial(linear_records, **names, shape=weight.shape)  # type: ignore[arg-type]
    bias = None if bias is None else bias.detach()  # type: ignore[assignment]
    return apply_linear(site.clipper.anchor, input, weight, bias, Call(site, site.recorder))


@register("transformers.pytorch_utils.Conv1D")
def conv1d_of_hugging_face(site: Site, x: Tensor) -> Tensor:
    module = site.module
    names = (site.names.get("weight"), site.names.get("bias"))
    return tapped_linear(site, x, module.weight.t(), module.bias, names, transposed=True)  # type: ignore[operator, arg-type]
