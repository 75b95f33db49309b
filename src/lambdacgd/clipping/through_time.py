"""A recurrence over time: from the input projections of all steps to the states of all steps, and back.

``px`` [T, B, gates] is W_ih x_t + b_ih for every step; a recurrence adds W_hh h_{t−1} + b_hh and bends. Its gradient b
with respect to ``px`` is all that the gradients of the weights are made of. Two ways to it, where the weights need no
gradient from autograd; `recurrent.plain` is their twin in ordinary operations, some forty a step.

* `by_hand`: one node for all steps with a backward pass of its own. What the gates contribute is computed for all
  steps at once, which leaves two to five operations a step.
* `fused` (CUDA): PyTorch's own kernel, cuDNN's where it can be. It gives no gradients of the gates, but those of its
  input; so it is fed ``px``, with the identity in place of W_ih.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.backends.cudnn.rnn
from torch import _VF, Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lambdacgd.clipping.capture import fast_apply, uncast

#: h of all steps [T, B, H], the last h and (LSTM) the last c, [B, H], and GRU's reset gates, where they are at hand.
States = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
_FUSED: dict[str, Any] = {"LSTM": _VF.lstm, "GRU": _VF.gru, "RNN_TANH": _VF.rnn_tanh, "RNN_RELU": _VF.rnn_relu}
_sigmoid_backward = torch.ops.aten.sigmoid_backward
_tanh_backward = torch.ops.aten.tanh_backward


@dataclass(frozen=True)
class Span:
    """When the sequences of a batch end. Recurrences see them longest first and from their first step on."""

    sizes: list[int]  # how many sequences are not over at each step
    lengths: Tensor | None = None  # longest first, on the CPU; None: all are equally long
    order: Tensor | None = None  # that of the batch, where it is not theirs
    inverse: Tensor | None = None

    @classmethod
    def of(cls, packed: PackedSequence) -> Span:
        sizes = packed.batch_sizes
        lengths = (sizes.unsqueeze(1) > torch.arange(int(sizes[0]), device=sizes.device)).sum(0)
        return cls(sizes.tolist(), lengths, packed.sorted_indices, packed.unsorted_indices)

    def sort(self, x: Tensor, dim: int = 0) -> Tensor:
        return x if self.order is None else x.index_select(dim, self.order)

    def unsort(self, x: Tensor, dim: int = 0) -> Tensor:
        return x if self.inverse is None else x.index_select(dim, self.inverse)

    def arrange(self, x: Tensor, backwards: bool) -> Tensor:
        """[T, B, …] as a recurrence wants it; ``backwards``: every sequence from its last step on."""
        x = self.sort(x, 1)
        return self._flip(x) if backwards else x

    def restore(self, x: Tensor, backwards: bool) -> Tensor:
        """The inverse of `arrange`."""
        return self.unsort(self._flip(x) if backwards else x, 1)

    def _flip(self, x: Tensor) -> Tensor:
        if self.lengths is None:
            return x.flip(0)
        ends = self.lengths
        step = torch.arange(len(self.sizes), device=ends.device).unsqueeze(1)
        source = torch.where(step < ends, ends - 1 - step, step).to(x.device)
        return x.gather(0, source.unsqueeze(2).expand_as(x))

    def last(self, x: Tensor) -> Tensor:
        """[B, …] from [T, B, …]: what every sequence ends with."""
        if self.lengths is None:
            return x[-1]
        ends = self.lengths.to(x.device)
        return x[ends - 1, torch.arange(len(ends), device=x.device)]

    def clear(self, x: Tensor) -> Tensor:
        """Zeros where sequences are over."""
        if self.lengths is None:
            return x
        over = torch.arange(len(self.sizes), device=self.lengths.device).unsqueeze(1) >= self.lengths
        return x.masked_fill_(over.to(x.device).unsqueeze(2), 0)

    def steps(self, views: Iterable[Tensor]) -> list[tuple[Tensor, ...]]:
        """At each step, the part of each [T or T + 1, B, …] for the sequences that are not over."""
        rows = zip(*(x.unbind(0)[: len(self.sizes)] for x in views), strict=True)
        if self.lengths is None:
            return list(rows)
        return [tuple(x[:n] for x in row) for row, n in zip(rows, self.sizes, strict=True)]


# --- PyTorch's kernels ------------------------------------------------------------------------------------------------


def fused(mode: str, px: Tensor, h: Tensor, c: Tensor | None, w_hh: Tensor, b_hh: Tensor | None, span: Span) -> States:
    """``px`` is the input, so that the gradient of the input is b. In TF32 (``torch.backends.cudnn.allow_tf32``) the
    product with the identity rounds ``px`` and b as that with W_ih would round x and b.
    """
    gates, hidden = w_hh.shape
    weights = [torch.eye(gates, dtype=px.dtype, device=px.device), w_hh.detach().clone()]
    if b_hh is not None:
        weights += [torch.zeros_like(b_hh), b_hh.detach().clone()]
    if _flattens(px):  # as nn.LSTM does
        with torch.no_grad(), torch.cuda.device_of(px):
            number = torch.backends.cudnn.rnn.get_cudnn_mode(mode)
            torch._cudnn_rnn_flatten_weight(weights, len(weights), gates, number, hidden, 0, 1, False, False)
    states: Any = h.unsqueeze(0).contiguous()
    if c is not None:
        states = (states, c.unsqueeze(0).contiguous())
    how = (weights, b_hh is not None, 1, 0.0, True, False)  # one layer, no dropout, training, one direction
    if span.lengths is None:
        y, *ends = _FUSED[mode](px, states, *how, False)
    else:
        packed = pack_padded_sequence(px, span.lengths)
        data, *ends = _FUSED[mode](packed.data, packed.batch_sizes, states, *how)
        y = pad_packed_sequence(PackedSequence(data, packed.batch_sizes))[0]
    return y, ends[0].squeeze(0), ends[1].squeeze(0) if c is not None else None, None


def _flattens(px: Tensor) -> bool:
    """Whether cuDNN will want the weights in one piece. PyTorch's own question does not know that it takes bfloat16."""
    asked = px.new_empty(0, dtype=torch.float16) if px.dtype == torch.bfloat16 else px
    return torch.backends.cudnn.is_acceptable(asked) and torch._use_cudnn_rnn_flatten_weight()


def reset_gates(px: Tensor, h: Tensor, y: Tensor, w_hh: Tensor, b_hh: Tensor | None) -> Tensor:
    """GRU's r at all steps, from the states of all steps."""
    part, kind = slice(w_hh.shape[1]), px.dtype
    bias = None if b_hh is None else b_hh[part].to(kind)
    return torch.sigmoid(px[..., part] + F.linear(before(h.to(kind), y.to(kind)), w_hh[part].to(kind), bias))


def before(first: Tensor, states: Tensor) -> Tensor:
    """The states before each step."""
    return torch.cat([first.unsqueeze(0), states[:-1]])


# --- by hand ----------------------------------------------------------------------------------------------------------


class ThroughTime(torch.autograd.Function):
    """h of every step, for LSTM c of every step too, and the gates, which are written over ``px`` (for RNN they are h).
    The weights get no gradient here.
    """

    @staticmethod
    def forward(
        ctx: Any, px: Tensor, h: Tensor, c: Tensor | None, w_hh: Tensor, b_hh: Tensor | None, mode: str, span: Span
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(px)
        ctx.mode, ctx.span = mode, span
        if mode == "LSTM":
            y, *saved = _lstm(px, h, c, w_hh, b_hh, span)
        elif mode == "GRU":
            y, *saved = _gru(px, h, w_hh, b_hh, span)
        else:
            y, *saved = _rnn(mode, px, h, w_hh, b_hh, span)
        ctx.save_for_backward(w_hh, px, *saved)
        return span.clear(y), None if c is None else saved[0][1:], None if y is px else px

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dc: Tensor | None, _: None) -> tuple[Any, ...]:
        w_hh, gates, *saved = ctx.saved_tensors
        shape, span = (*gates.shape[:2], w_hh.shape[1]), ctx.span
        with uncast(gates):
            dh = _below(dy, gates, shape)
            if ctx.mode == "LSTM":
                dc = _below(dc, gates, shape)
                b = _lstm_backward(span, dh, dc, w_hh, gates, *saved)
            elif ctx.mode == "GRU":
                b = _gru_backward(span, dh, w_hh, gates, *saved)
            else:
                b = _rnn_backward(span, dh, w_hh, gates, ctx.mode)
            return span.clear(b), dh[0], None if dc is None else dc[0], None, None, None, None


_apply = fast_apply(ThroughTime)


def by_hand(
    mode: str, px: Tensor, h: Tensor, c: Tensor | None, w_hh: Tensor, b_hh: Tensor | None, span: Span
) -> States:
    """One node for all steps. ``px`` is written over."""
    y, cells, gates = _apply(px, h, c, w_hh, b_hh, mode, span)
    reset = gates.detach()[:, :, : w_hh.shape[1]] if mode == "GRU" else None
    return y, span.last(y), None if c is None else span.last(cells), reset


def _after(first: Tensor, steps: int) -> Tensor:
    """Room for the states before each step and after the last one."""
    states = first.new_empty(steps + 1, *first.shape)
    states[0] = first
    return states


def _below(gradient: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The gradients of the states after each step, as far as they come from outside, behind room for the first's."""
    whole = like.new_zeros(shape[0] + 1, *shape[1:])
    if gradient is not None:
        whole[1:] = gradient
    return whole


def _lstm(gates: Tensor, h: Tensor, c: Any, w_hh: Tensor, b_hh: Tensor | None, span: Span) -> list[Tensor]:
    hidden, w = w_hh.shape[1], w_hh.t()
    if b_hh is not None:
        gates += b_hh
    y, bent = gates.new_empty(2, *gates.shape[:2], hidden).unbind(0)  # bent = tanh c
    cells = _after(c, len(gates))
    views = (gates, *gates.split(hidden, 2), gates[:, :, : 2 * hidden], y, bent, cells, cells[1:])
    for whole, i, f, g, o, i_f, y_t, bent_t, c_t, new in span.steps(views):
        whole.addmm_(h[: len(whole)], w)
        i_f.sigmoid_()
        g.tanh_()
        o.sigmoid_()
        torch.mul(f, c_t, out=new).addcmul_(i, g)
        h = torch.mul(o, torch.tanh(new, out=bent_t), out=y_t)
    return [y, cells, bent]


def _lstm_backward(
    span: Span, dh: Tensor, dc: Tensor, w_hh: Tensor, gates: Tensor, cells: Tensor, bent: Tensor
) -> Tensor:
    """``b`` first holds what the gradients of h and c are multiplied by."""
    hidden = w_hh.shape[1]
    i, f, g, o = gates.split(hidden, 2)
    b = torch.empty_like(gates)
    b_i, b_f, b_g, b_o = b.split(hidden, 2)
    _sigmoid_backward(g, i, grad_input=b_i)
    _sigmoid_backward(cells[:-1], f, grad_input=b_f)
    _tanh_backward(i, g, grad_input=b_g)
    _sigmoid_backward(bent, o, grad_input=b_o)
    views = (b, b.view(*b.shape[:2], 4, hidden)[:, :, :3], b_o, _tanh_backward(o, bent), f, dh[1:], dh, dc[1:], dc)
    for whole, by_c, by_h, bend, f_t, dh_t, dh_below, dc_t, dc_below in reversed(span.steps(views)):
        dc_t.addcmul_(dh_t, bend)
        by_c.mul_(dc_t.unsqueeze(1))
        by_h.mul_(dh_t)
        dh_below.addmm_(whole, w_hh)
        dc_below.addcmul_(dc_t, f_t)
    return b


def _gru(gates: Tensor, h: Tensor, w_hh: Tensor, b_hh: Tensor | None, span: Span) -> list[Tensor]:
    hidden = w_hh.shape[1]
    w_rz, w_n = w_hh[: 2 * hidden].t(), w_hh[2 * hidden :].t()
    inner = gates.new_zeros(*gates.shape[:2], hidden)  # W_hn h + b_hn
    if b_hh is not None:
        gates[:, :, : 2 * hidden] += b_hh[: 2 * hidden]
        inner += b_hh[2 * hidden :]
    states = _after(h, len(gates))
    views = (gates[:, :, : 2 * hidden], *gates.split(hidden, 2), inner, states, states[1:])
    for r_z, r, z, n, inner_t, h_t, new in span.steps(views):
        r_z.addmm_(h_t, w_rz).sigmoid_()
        n.addcmul_(r, inner_t.addmm_(h_t, w_n)).tanh_()
        torch.lerp(n, h_t, z, out=new)
    return [states[1:], states, inner]


def _gru_backward(span: Span, dh: Tensor, w_hh: Tensor, gates: Tensor, states: Tensor, inner: Tensor) -> Tensor:
    """The hidden projection's gradient is that of the input projection, times r in the part that r multiplies; ``b`` is
    the first in the loop and the second behind it.
    """
    hidden = w_hh.shape[1]
    r, z, n = gates.split(hidden, 2)
    b = torch.empty_like(gates)
    b_r, b_z, b_n = b.split(hidden, 2)
    bend = _tanh_backward(1 - z, n)
    _sigmoid_backward(inner, r, grad_input=b_r).mul_(bend)
    _sigmoid_backward(states[:-1] - n, z, grad_input=b_z)
    torch.mul(bend, r, out=b_n)
    views = (b, b.view(*b.shape[:2], 3, hidden), z, dh[1:], dh)
    for whole, three, z_t, dh_t, dh_below in reversed(span.steps(views)):
        three.mul_(dh_t.unsqueeze(1))
        dh_below.addmm_(whole, w_hh).addcmul_(dh_t, z_t)
    torch.mul(dh[1:], bend, out=b_n)
    return b


def _rnn(mode: str, y: Tensor, h: Tensor, w_hh: Tensor, b_hh: Tensor | None, span: Span) -> list[Tensor]:
    bend = Tensor.relu_ if mode == "RNN_RELU" else Tensor.tanh_
    if b_hh is not None:
        y += b_hh
    for (y_t,) in span.steps((y,)):
        h = bend(y_t.addmm_(h[: len(y_t)], w_hh.t()))
    return [y]


def _rnn_backward(span: Span, dh: Tensor, w_hh: Tensor, y: Tensor, mode: str) -> Tensor:
    b = (y > 0).to(y.dtype) if mode == "RNN_RELU" else _tanh_backward(torch.ones_like(y), y)
    for b_t, dh_t, dh_below in reversed(span.steps((b, dh[1:], dh))):
        dh_below.addmm_(b_t.mul_(dh_t), w_hh)
    return b
