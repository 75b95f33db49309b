"""Seeing a layer's inputs and output gradients without its weight gradients being computed.

While a model is attached, ``module.forward`` of each module that owns trainable parameters is replaced on the instance
(and given back on detach). The replacement runs the original with its parameters hidden from autograd, so that the
backward pass computes input gradients only, and taps the output: when its gradient arrives, the layer's rule turns it
and the saved input into records. Saved tensors go through ``save_for_backward``, so non-reentrant checkpointing
recomputes them like any other activation. A parameter used in any other way receives an ordinary gradient, which is an
error (see `clipper`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lambdacgd.clipping.errors import ClippingError
from lambdacgd.clipping.records import Record

if TYPE_CHECKING:
    from lambdacgd.clipping.clipper import Clipper

Recorder = Callable[..., Iterable[Record]]


@dataclass(eq=False)
class Site:
    """A module that owns trainable parameters: ``names`` maps its own names to the model's."""

    clipper: Clipper
    module: nn.Module
    path: str
    names: dict[str, str]
    original: Callable[..., Any]
    recorder: Any = None  # kept by rules whose recorder never changes
    slots: list[tuple[dict[str, Any], str, Tensor]] = field(default_factory=list)  # where its parameters were

    def __str__(self) -> str:
        return f"module '{self.path}'" if self.path else "the model itself"

    def hidden(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward with this module's own parameters hidden from autograd."""
        own = self.module._parameters
        kept = {name: own[name] for name in self.names if name in own}
        for name, parameter in kept.items():
            own[name] = parameter.detach()  # type: ignore[union-attr, assignment]
        try:
            return self.original(*args, **kwargs)
        finally:
            own.update(kept)

    def refuse(self, why: str) -> ClippingError:
        return ClippingError(f"{self} ({type(self.module).__name__}): {why}")


class Call:
    """One use of a site in one forward pass; delivers records once, when the output's gradient arrives."""

    __slots__ = ("batch", "clipper", "generation", "recorder", "site", "spent", "within_backward")

    def __init__(self, site: Site, recorder: Recorder) -> None:
        self.site, self.recorder, self.clipper = site, recorder, site.clipper
        self.batch, self.generation = self.clipper.batch, self.clipper.generation
        self.within_backward = torch._C._current_graph_task_id() != -1
        self.spent = False

    def deliver(self, gradient: Tensor, *saved: Tensor) -> None:
        if self.clipper.expected_rows:
            self._check_rows(gradient)
            return
        if torch.is_grad_enabled():
            raise self.site.refuse("backward(create_graph=True) is not supported: clipped sums have no derivative.")
        if not self.clipper.gathers():
            return
        if self.spent:
            raise self.site.refuse(
                "a second backward pass went through the same forward pass. Every example's gradient is clipped and "
                "added once; add the losses up and call backward() once, or run the model again."
            )
        if self.within_backward:
            raise self.site.refuse(
                "its forward ran inside a backward pass and is now differentiated there: reentrant gradient "
                "checkpointing splits an example's gradient into parts that would be clipped one by one. Use "
                "torch.utils.checkpoint(..., use_reentrant=False)."
            )
        self.spent = True
        _without_autocast(self._deliver, gradient, *saved)

    def _check_rows(self, gradient: Tensor) -> None:
        """Only the first rows of the output are differentiated (`sizing.probe`): theirs are the first rows here."""
        if gradient[self.clipper.expected_rows :].nan_to_num(0.0, 0.0, 0.0).any():
            raise self.site.refuse(
                "the model mixes the examples of a batch, or changes their order (sorts them by length, say): row i of "
                "every layer's input must be example i's alone. Sort when the batch is put together instead. If the "
                "first dimension of its input is not the batch and has its size by chance, start with another size."
            )

    def _deliver(self, gradient: Tensor, *saved: Tensor) -> None:
        self.clipper._receive(self, self.recorder(gradient, *saved))


class Tap(torch.autograd.Function):
    """The identity on a layer's output; its backward delivers. ``mark_dirty`` avoids a view, so in-place ReLUs work."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, call: Call, *saved: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(*saved)
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        ctx.call.deliver(gradient, *saved)
        return (gradient, None, None, *([None] * len(saved)))


def tap(site: Site, output: Tensor, recorder: Recorder, *saved: Tensor) -> Tensor:
    """Deliver ``recorder(gradient of output, *saved)`` when the backward pass reaches ``output``."""
    if not isinstance(output, Tensor):
        raise site.refuse(f"its forward returned {type(output).__name__}; a tensor is needed to follow its gradient.")
    if any(output is s for s in saved):
        output = output.clone()
    saved = tuple(s.detach() for s in saved)
    return apply_tap(output, site.clipper.anchor, Call(site, recorder), *saved)


def computed(m: nn.Module) -> bool:
    """Whether a layer's weight or bias is no parameter of its own but made from others (pruning, weight drop): autograd
    has to see it then.
    """
    return "weight" not in m._parameters or "bias" not in m._parameters


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The type that autocast runs products in on ``x``'s device; None without autocast."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def fast_apply(function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    """``function.apply`` without its checks for functorch wrappers, which cost microseconds on every layer."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


class LinearTap(torch.autograd.Function):
    """``F.linear`` whose backward gives the input's gradient and delivers (input, output gradient).

    One node instead of two: transformers have hundreds of Linear layers and are bound by launches in bfloat16.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        ctx.call, ctx.dtype = call, x.dtype
        low = autocast_dtype(x)
        if low is not None:
            ready = call.clipper.casts.get(call.site)
            x = call.clipper.cast_input(x, low)
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
            below = _without_autocast(torch.matmul, gradient, weight)
            if below.dtype != ctx.dtype:
                below = below.to(ctx.dtype)
        ctx.call.deliver(gradient, x)
        return None, below, None, None, None


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


def uncast(x: Tensor) -> torch.autocast:
    """No autocast, also where backward() was called inside it: norms and sums choose their own precision."""
    return torch.autocast(x.device.type, enabled=False)


def _without_autocast(function: Callable[..., Any], *args: Tensor) -> Any:
    """Entering autocast contexts costs microseconds a layer, so only where backward() was called inside one."""
    if not torch.is_autocast_enabled(args[0].device.type):
        return function(*args)
    with uncast(args[0]):
        return function(*args)


apply_linear, apply_layer_norm, apply_tap = fast_apply(LinearTap), fast_apply(LayerNormTap), fast_apply(Tap)
