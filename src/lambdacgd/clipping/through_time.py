"""A recurrence over time: from the input projections of all steps to the states of all steps, and back.

``px`` [T, B, gates] is W_ih x_t + b_ih for every step; a recurrence adds W_hh h_{t−1} + b_hh and bends. Its gradient b
with respect to ``px`` is all that the gradients of the weights are made of. Two ways to it, where the weights need no
gradient from autograd; `recurrent.plain` is their twin in ordinary operations, some forty a step.

* `ThroughTime`: one node for all steps with a backward pass by hand. What the gates contribute is computed for all steps
  at once, which leaves two to five operations a step.
* `fused` (CUDA): PyTorch's own kernel, cuDNN's where it can be. It gives no gradients of the gates, but those of its
  input; so it is fed ``px``, with the identity in place of W_ih.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import _VF, Tensor
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lambdacgd.clipping.capture import fast_apply, uncast

States = tuple[Tensor, Tensor, Tensor | None]  #: h of all steps [T, B, H], the last h and (LSTM) the last c, [B, H]
_FUSED = {"LSTM": _VF.lstm, "GRU": _VF.gru, "RNN_TANH": _VF.rnn_tanh, "RNN_RELU": _VF.rnn_relu}
_sigmoid_backward = torch.ops.aten.sigmoid_backward
_tanh_backward = torch.ops.aten.tanh_backward


@dataclass(frozen=True)
class Span:
    """When the sequences of a batch end. Recurrences see them time first, longest first and from their first step on."""

    sizes: list[int]  # how many sequences are not over at each step
    lengths: Tensor | None = None  # longest first, on the CPU; None: all are equally long
    order: Tensor | None = None  # that of the batch, where it is not theirs
    inverse: Tensor | None = None

    @classmethod
    def of(cls, packed: PackedSequence) -> Span:
        sizes = packed.batch_sizes
        lengths = (sizes.unsqueeze(1) > torch.arange(int(sizes[0]))).sum(0)
        return cls(sizes.tolist(), lengths, packed.sorted_indices, packed.unsorted_indices)

    def sort(self, x: Tensor, dim: int = 0) -> Tensor:
        return x if self.order is None else x.index_select(dim, self.order)

    def unsort(self, x: Tensor, dim: int = 0) -> Tensor:
        return x if self.inverse is None else x.index_select(dim, self.inverse)

    def arrange(self, x: Tensor, backwards: bool) -> Tensor:
        """[B, T, …] as a recurrence wants it; ``backwards``: every sequence from its last step on."""
        x = self.sort(x.transpose(0, 1), 1)
        return self._flip(x) if backwards else x

    def restore(self, x: Tensor, backwards: bool) -> Tensor:
        """The inverse of `arrange`."""
        x = self._flip(x) if backwards else x
        return self.unsort(x, 1).transpose(0, 1)

    def _flip(self, x: Tensor) -> Tensor:
        if self.lengths is None:
            return x.flip(0)
        step, ends = torch.arange(len(self.sizes)).unsqueeze(1), self.lengths
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
        over = torch.arange(len(self.sizes)).unsqueeze(1) >= self.lengths
        return x.masked_fill_(over.to(x.device).unsqueeze(2), 0)

    def steps(self, x: Tensor) -> list[Tensor]:
        """Views of the sequences not over at each step."""
        found = list(x.unbind(0))
        return found if self.lengths is None else [row[:n] for row, n in zip(found, self.sizes, strict=True)]


# --- PyTorch's kernels ------------------------------------------------------------------------------------------------


def fused(
    mode: str, px: Tensor, h: Tensor, c: Tensor | None, w_hh: Tensor, b_hh: Tensor | None, span: Span
) -> States:
    """``px`` is the input, so that the gradient of the input is b. In TF32 (``torch.backends.cudnn.allow_tf32``) the
    product with the identity rounds ``px`` and b as that with W_ih would round x and b.
    """
    gates, hidden = w_hh.shape
    weights = [torch.eye(gates, dtype=px.dtype, device=px.device), w_hh.detach()]
    if b_hh is not None:
        weights += [torch.zeros_like(b_hh), b_hh.detach()]
    if torch.backends.cudnn.is_acceptable(px):  # as nn.LSTM does: else PyTorch would warn, and do it in every call
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
    return y, ends[0].squeeze(0), ends[1].squeeze(0) if c is not None else None


# --- by hand ----------------------------------------------------------------------------------------------------------


class ThroughTime(torch.autograd.Function):
    """All steps of a recurrence: h and, for LSTM, c of every step. The weights get no gradient here."""

    @staticmethod
    def forward(
        ctx: Any, px: Tensor, h: Tensor, c: Tensor | None, w_hh: Tensor, b_hh: Tensor | None, mode: str, span: Span
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.mode, ctx.span = mode, span
        y, cells, saved = _FORWARD[mode](px, h, c, w_hh, b_hh, span)
        ctx.save_for_backward(w_hh, h, c, span.clear(y), cells, *saved)
        return y, cells

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dcells: Tensor | None) -> tuple[Any, ...]:
        w_hh, h, c, y, cells, *saved = ctx.saved_tensors
        span: Span = ctx.span
        with uncast(y):
            dh = torch.zeros_like(y) if dy is None else dy.clone(memory_format=torch.contiguous_format)
            if c is None:
                b, dh_0 = _BACKWARD[ctx.mode](dh, w_hh, h, y, *saved, span)
                return span.clear(b), dh_0, None, None, None, None, None
            dc = torch.zeros_like(y) if dcells is None else dcells.clone(memory_format=torch.contiguous_format)
            b, dh_0, dc_0 = _lstm_backward(dh, dc, w_hh, c, cells, *saved, span)
            return span.clear(b), dh_0, dc_0, None, None, None, None


through_time = fast_apply(ThroughTime)


def _with_bias(px: Tensor, bias: Tensor | None) -> Tensor:
    """A copy, one step after another in memory."""
    gates = torch.empty(px.shape, dtype=px.dtype, device=px.device)
    return gates.copy_(px) if bias is None else torch.add(px, bias, out=gates)


def before(first: Tensor, states: Tensor) -> Tensor:
    """The states before each step."""
    return torch.cat([first.unsqueeze(0), states[:-1]])


def _lstm(px: Tensor, h: Tensor, c: Tensor, w_hh: Tensor, b_hh: Tensor | None, span: Span) -> Any:
    hidden, w = w_hh.shape[1], w_hh.t()
    gates = _with_bias(px, b_hh)
    y, cells, bent = (gates.new_empty(*px.shape[:2], hidden) for _ in range(3))  # bent = tanh c
    lists = (span.steps(x) for x in (gates, *gates.split(hidden, 2), gates[:, :, : 2 * hidden], y, cells, bent))
    for whole, i, f, g, o, i_f, y_t, c_t, bent_t in zip(*lists, strict=True):
        n = len(whole)
        whole.addmm_(h[:n], w)
        i_f.sigmoid_()
        g.tanh_()
        o.sigmoid_()
        torch.mul(f, c[:n], out=c_t).addcmul_(i, g)
        torch.tanh(c_t, out=bent_t)
        torch.mul(o, bent_t, out=y_t)
        h, c = y_t, c_t
    return y, cells, (gates, bent)


def _lstm_backward(
    dh: Tensor, dc: Tensor, w_hh: Tensor, c: Tensor, cells: Tensor, gates: Tensor, bent: Tensor, span: Span
) -> tuple[Tensor, Tensor, Tensor]:
    """``dh``, ``dc`` hold the gradients of the outputs and become those of the states; ``b``, what they are multiplied
    by, becomes the gradient of the gates.
    """
    hidden = w_hh.shape[1]
    i, f, g, o = gates.split(hidden, 2)
    b = torch.empty_like(gates)
    b_i, b_f, b_g, b_o = b.split(hidden, 2)
    _sigmoid_backward(g, i, grad_input=b_i)
    _sigmoid_backward(before(c, cells), f, grad_input=b_f)
    _tanh_backward(i, g, grad_input=b_g)
    _sigmoid_backward(bent, o, grad_input=b_o)
    through_h = _tanh_backward(o, bent)
    by_c = b.view(*b.shape[:2], 4, hidden)[:, :, :3]
    dhs, dcs, whole, fs = span.steps(dh), span.steps(dc), span.steps(b), span.steps(f)
    lists = (span.steps(x) for x in (by_c, b_o, through_h))
    for t, (three, o_t, factor) in reversed(list(enumerate(zip(*lists, strict=True)))):
        dh_t, dc_t = dhs[t], dcs[t]
        dc_t.addcmul_(dh_t, factor)
        three.mul_(dc_t.unsqueeze(1))
        o_t.mul_(dh_t)
        if t:
            n = len(dh_t)
            dhs[t - 1][:n].addmm_(whole[t], w_hh)
            dcs[t - 1][:n].addcmul_(dc_t, fs[t])
    return b, b[0] @ w_hh, dc[0] * f[0]


def _gru(px: Tensor, h: Tensor, c: None, w_hh: Tensor, b_hh: Tensor | None, span: Span) -> Any:
    hidden = w_hh.shape[1]
    w_rz, w_n = w_hh[: 2 * hidden].t(), w_hh[2 * hidden :].t()
    gates = _with_bias(px, None)
    inner, y = gates.new_empty(*px.shape[:2], hidden), gates.new_empty(*px.shape[:2], hidden)  # inner = W_hn h + b_hn
    inner.zero_()
    if b_hh is not None:
        gates[:, :, : 2 * hidden] += b_hh[: 2 * hidden]
        inner += b_hh[2 * hidden :]
    lists = (span.steps(x) for x in (gates[:, :, : 2 * hidden], *gates.split(hidden, 2), inner, y))
    for r_z, r, z, n, inner_t, y_t in zip(*lists, strict=True):
        h = h[: len(n)]
        r_z.addmm_(h, w_rz).sigmoid_()
        inner_t.addmm_(h, w_n)
        n.addcmul_(r, inner_t).tanh_()
        h = torch.lerp(n, h, z, out=y_t)
    return y, None, (gates, inner)


def _gru_backward(
    dh: Tensor, w_hh: Tensor, h: Tensor, y: Tensor, gates: Tensor, inner: Tensor, span: Span
) -> tuple[Tensor, Tensor]:
    """The hidden projection's gradient is that of the input projection, times r in the part that r multiplies."""
    hidden = w_hh.shape[1]
    r, z, n = gates.split(hidden, 2)
    b = torch.empty_like(gates)
    b_r, b_z, b_n = b.split(hidden, 2)
    new = _tanh_backward(1 - z, n)
    _sigmoid_backward(inner, r, grad_input=b_r).mul_(new)
    _sigmoid_backward(before(h, y) - n, z, grad_input=b_z)
    torch.mul(new, r, out=b_n)
    dhs, whole, zs, threes = span.steps(dh), span.steps(b), span.steps(z), span.steps(b.unflatten(2, (3, hidden)))
    for t in reversed(range(len(dhs))):
        dh_t = dhs[t]
        threes[t].mul_(dh_t.unsqueeze(1))
        if t:
            below = dhs[t - 1][: len(dh_t)]
            below.addmm_(whole[t], w_hh).addcmul_(dh_t, zs[t])
    dh_0 = (b[0] @ w_hh).addcmul_(dh[0], z[0])
    torch.mul(dh, new, out=b_n)
    return b, dh_0


def _rnn(bend: Any) -> Any:
    def forward(px: Tensor, h: Tensor, c: None, w_hh: Tensor, b_hh: Tensor | None, span: Span) -> Any:
        y, w = _with_bias(px, b_hh), w_hh.t()
        for y_t in span.steps(y):
            h = bend(y_t.addmm_(h[: len(y_t)], w))
        return y, None, ()

    return forward


def _rnn_backward(slope: Any) -> Any:
    def backward(dh: Tensor, w_hh: Tensor, h: Tensor, y: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        b: Tensor = slope(y)
        dhs, bs = span.steps(dh), span.steps(b)
        for t in reversed(range(len(dhs))):
            bs[t].mul_(dhs[t])
            if t:
                dhs[t - 1][: len(bs[t])].addmm_(bs[t], w_hh)
        return b, b[0] @ w_hh

    return backward


_FORWARD: dict[str, Any] = {
    "LSTM": _lstm, "GRU": _gru, "RNN_TANH": _rnn(Tensor.tanh_), "RNN_RELU": _rnn(Tensor.relu_),
}  # fmt: skip
_BACKWARD: dict[str, Any] = {
    "GRU": _gru_backward,
    "RNN_TANH": _rnn_backward(lambda y: _tanh_backward(torch.ones_like(y), y)),
    "RNN_RELU": _rnn_backward(lambda y: (y > 0).to(y.dtype)),
}
