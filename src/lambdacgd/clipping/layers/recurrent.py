"""LSTM, GRU and RNN that can be seen into: the same parameters and outputs, and a gradient for every step.

The input projection of all steps is one product; its gradient b [B, T, gates] is also that of the hidden projection
(for GRU times the reset gate where that multiplies it). Hence the weights' gradients are Σ_t b_t x_tᵀ and
Σ_t b_t h_{t−1}ᵀ: two Linear records per layer and direction, whatever the length.

A recurrence leads from the input projections ``px`` [T, B, gates], W_ih x_t + b_ih, of all steps to the states of all
steps: it adds W_hh h_{t−1} + b_hh and bends. Its gradient with respect to ``px`` is b. There are two ways to it:

* `plain`: ordinary operations, some forty a step.
* `fused` (CUDA, where the weights need no gradient from autograd): PyTorch's own kernel, cuDNN's where it can be. It
  gives no gradients of the gates, but those of its input; so it is fed ``px``, with the identity in place of W_ih.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.backends.cudnn.rnn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lambdacgd.clipping.backward import Record, Stored, outer
from lambdacgd.clipping.bounds import accumulator, uncast
from lambdacgd.clipping.layers.linear import apply_linear
from lambdacgd.clipping.rules import Call, Layer, Recorder, apply_tap, register
from lambdacgd.torch_private import (
    functorch_is_active,
    fused_recurrence,
    own_parameters,
    pack_recurrent_weights,
    packs_recurrent_weights,
    recurrent_weight_names,
    recurrent_weights_have_changed,
)

#: What the clipping rule does in one layer and direction: (suffix, x, W_ih, bias, span) -> the input projection, and
#: where to put what `Keep` sees.
Project = Callable[[str, Tensor, Tensor, Tensor | None, "Span"], tuple[Tensor, list[Any] | None]]
States = tuple[Tensor, ...]  #: h and, for LSTM, c: [B, H] each


# --- drop-ins ---------------------------------------------------------------------------------------------------------


class _Open:
    """Where nobody looks, the original's own forward; else one that shows every projection."""

    def forward(self: Any, input: Any, hx: Any = None) -> Any:
        if _is_original(self, input, hx):
            return super().forward(input, hx)  # type: ignore[misc]
        return layered(self, input, hx, _projection)


class OpenLSTM(_Open, nn.LSTM):
    """Drop-in for ``nn.LSTM`` (see `convert`)."""


class OpenGRU(_Open, nn.GRU):
    """Drop-in for ``nn.GRU`` (see `convert`)."""


class OpenRNN(_Open, nn.RNN):
    """Drop-in for ``nn.RNN`` (see `convert`)."""


def _projection(suffix: str, x: Tensor, w_ih: Tensor, b_ih: Tensor | None, span: Span) -> tuple[Tensor, None]:
    px = F.linear(x.transpose(0, 1), w_ih, b_ih).transpose(0, 1)  # stand-ins want the batch first
    return px.clone(memory_format=torch.contiguous_format), None


def _is_original(m: Any, input: Any, hx: Any) -> bool:
    """Whether the original's forward does: not for stand-ins (`batch_free`), nor for weights put in place of the
    module's own, which it would lay out anew in memory (on CUDA only, where they may be FSDP2's; elsewhere parameters
    that came by ``load_state_dict(assign=True)`` are its own), nor for gradients that cuDNN does not give in eval mode.
    """
    given = [input.data if isinstance(input, PackedSequence) else input, *(hx if isinstance(hx, tuple) else (hx,))]
    weights = [getattr(m, name) for name in recurrent_weight_names(m)]
    own = not given[0].is_cuda and all(type(w) is nn.Parameter for w in weights)
    if functorch_is_active() or (recurrent_weights_have_changed(m) and not own):
        return False
    if given[0].is_cuda and not m.training and torch.is_grad_enabled():
        return False
    return all(x is None or _is_plain(x) for x in given + weights)


def _is_plain(x: Any) -> bool:
    return type(x) in (Tensor, nn.Parameter)


def layered(m: Any, input: Any, hx: Any, project: Project) -> Any:
    """All layers and directions of ``m`` on a padded or packed batch, with results shaped like the original's."""
    packed = isinstance(input, PackedSequence)
    x: Any = pad_packed_sequence(input)[0] if packed else input
    if x.dim() != 3:
        raise ValueError(f"{type(m).__name__}: expected input with 3 dimensions, got {x.dim()}.")
    if not packed and m.batch_first:
        x = x.transpose(0, 1)
    if x.shape[0] == 0:
        raise RuntimeError(f"{type(m).__name__}: expected sequences of at least one step.")
    span = Span.of(input) if packed else Span()
    directions = 2 if m.bidirectional else 1
    lstm, shape = m.mode == "LSTM", (m.num_layers * directions, x.shape[1], m.hidden_size)
    first = (x.new_zeros(shape),) * (2 if lstm else 1) if hx is None else tuple(hx) if lstm else (hx,)
    for state in first:
        m.check_hidden_size(state, shape)
    ends: list[States] = []
    for layer in range(m.num_layers):
        outputs = []
        for d in range(directions):
            suffix, states = f"_l{layer}" + ("_reverse" if d else ""), tuple(s[len(ends)] for s in first)
            y, last = _layer(m, x, states, suffix, span, project)
            outputs.append(y)
            ends.append(last)
        x = torch.cat(outputs, 2)  # a copy even of one: y itself is needed as it is
        if m.dropout and m.training and layer + 1 < m.num_layers:
            x = F.dropout(x, m.dropout)
    final = tuple(torch.stack(s) for s in zip(*ends, strict=True))
    if packed:
        data = pack_padded_sequence(span.sort(x, 1), span.lengths).data  # type: ignore[arg-type]
        x = PackedSequence(data, input.batch_sizes, input.sorted_indices, input.unsorted_indices)
    elif m.batch_first:
        x = x.transpose(0, 1)
    return x, final if lstm else final[0]


def _layer(m: Any, x: Tensor, states: States, suffix: str, span: Span, project: Project) -> tuple[Tensor, States]:
    """One layer in one direction: outputs [T, B, H] and the last states."""
    w_ih, w_hh = getattr(m, f"weight_ih{suffix}"), getattr(m, f"weight_hh{suffix}")
    b_ih = getattr(m, f"bias_ih{suffix}", None) if m.bias else None
    b_hh = getattr(m, f"bias_hh{suffix}", None) if m.bias else None
    backwards = suffix.endswith("_reverse")
    if m.mode != "GRU" and b_ih is not None and _is_plain(b_ih) and _is_plain(b_hh):
        b_ih, b_hh = b_ih + b_hh, None
    px, seen = project(suffix, x, w_ih, b_ih, span)
    px, states = span.arrange(px, backwards), tuple(map(span.sort, states))
    y, last = recurrence(m.mode, px, states, w_hh, b_hh, span)
    if seen is not None:
        reset, first = None, states[0].detach()
        if m.mode == "GRU":
            with torch.no_grad(), uncast(px):
                values: list[Any] = [None if w is None else w.as_subclass(Tensor) for w in (w_hh, b_hh)]
                reset = reset_gates(px.detach(), first, y.detach(), *values)
        y, *last = Keep.apply(seen, first, reset, y, *last)
    return span.restore(y, backwards), tuple(map(span.unsort, last))


class _OpenCell:
    """One step in ordinary operations, which stand-ins take part in (`batch_free`)."""

    def forward(self: Any, input: Tensor, hx: Any = None) -> Any:
        mode = "LSTM" if isinstance(self, nn.LSTMCell) else "GRU" if isinstance(self, nn.GRUCell) else ""
        states: Any = (input.new_zeros(*input.shape[:-1], self.hidden_size),) * 2
        if hx is not None:
            states = hx if mode == "LSTM" else (hx,)
        px, ph = F.linear(input, self.weight_ih, self.bias_ih), F.linear(states[0], self.weight_hh, self.bias_hh)
        states = _cell(mode or f"RNN_{self.nonlinearity.upper()}", px, ph, states)
        return states if mode == "LSTM" else states[0]


class OpenLSTMCell(_OpenCell, nn.LSTMCell):
    """Drop-in for ``nn.LSTMCell`` (see `convert`)."""


class OpenGRUCell(_OpenCell, nn.GRUCell):
    """Drop-in for ``nn.GRUCell`` (see `convert`)."""


class OpenRNNCell(_OpenCell, nn.RNNCell):
    """Drop-in for ``nn.RNNCell`` (see `convert`)."""


# --- when sequences end -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """When the sequences of a batch end. Recurrences see them longest first and from their first step on."""

    lengths: Tensor | None = None  # longest first, on the CPU; None: all are equally long
    order: Tensor | None = None  # that of the batch, where it is not theirs
    inverse: Tensor | None = None

    @classmethod
    def of(cls, packed: PackedSequence) -> Span:
        sizes = packed.batch_sizes
        lengths = (sizes.unsqueeze(1) > torch.arange(int(sizes[0]), device=sizes.device)).sum(0)
        return cls(lengths, packed.sorted_indices, packed.unsorted_indices)

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
        ends = self.lengths
        if ends is None:
            return x.flip(0)
        step = torch.arange(len(x), device=ends.device).unsqueeze(1)
        source = torch.where(step < ends, ends - 1 - step, step).to(x.device)
        return x.gather(0, source.unsqueeze(2).expand_as(x))


# --- the clipping rule ------------------------------------------------------------------------------------------------


class Keep(torch.autograd.Function):
    """The identity on a layer's results. Every gradient that reaches the projection comes by here first, so what its
    recorder needs, known only after the recurrence, is saved here.
    """

    @staticmethod
    def forward(ctx: Any, seen: list[Any], first: Tensor, reset: Tensor | None, y: Tensor, *last: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.seen = seen
        ctx.save_for_backward(y, first, reset)
        return y, *last

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.seen[:] = [None if x is None else x.detach() for x in ctx.saved_tensors]
        return None, None, None, *gradients


class TimeFirst(Call):
    """A call whose input and output are [T, B, …]. What `Keep` has ``seen`` goes with the rest of the graph's tensors:
    the graph itself lives as long as the loss.
    """

    def __init__(self, layer: Layer, recorder: Recorder, seen: list[Any]) -> None:
        super().__init__(layer, recorder)
        self.seen = seen

    def deliver(self, gradient: Tensor, *saved: Tensor) -> None:
        try:
            super().deliver(gradient.transpose(0, 1), *(x.transpose(0, 1) for x in saved))
        finally:
            self.seen.clear()


@register(OpenLSTM, OpenGRU, OpenRNN, finds_batch=True)
def recurrent(layer: Layer, input: Any, hx: Any = None) -> Any:
    m: Any = layer.module
    shapes = {name: p.shape for name, p in own_parameters(m).items() if p is not None}

    def project(suffix: str, x: Tensor, w_ih: Tensor, b_ih: Tensor | None, span: Span) -> tuple[Tensor, list[Any]]:
        if not layer.is_batched(x.transpose(0, 1)):
            raise layer.refuse(
                f"{x.shape[1]} sequences for {layer.forward_pass.batch} examples. Put the batch first in the model's "
                "input, or pass batch_of= to privatize or attach."
            )
        seen: list[Any] = []
        backwards = suffix.endswith("_reverse")

        def recorder(gradient: Tensor, x: Tensor) -> Iterator[Record]:
            total = _over_time(gradient)
            for part in ("ih", "hh"):
                weight, bias = layer.names.get(f"weight_{part}{suffix}"), layer.names.get(f"bias_{part}{suffix}")
                if part == "hh":
                    y, h, reset = seen
                    x = span.restore(before(h, y), backwards).transpose(0, 1)
                    if reset is not None:
                        gradient = _behind_reset(gradient, span.restore(reset, backwards).transpose(0, 1))
                        total = _over_time(gradient)
                if weight is not None:
                    yield outer(weight, x, gradient, shapes[f"weight_{part}{suffix}"])
                if bias is not None:
                    yield Stored(bias, total)

        anchor, call = layer.backward_pass.anchor, TimeFirst(layer, recorder, seen)
        if w_ih.requires_grad or (b_ih is not None and b_ih.requires_grad):  # computed: autograd has to see them
            return apply_tap(_projection(suffix, x, w_ih, b_ih, span)[0], anchor, call, x.detach()), seen
        return apply_linear(x, w_ih, b_ih, call), seen

    for state in (hx,) if isinstance(hx, Tensor) else hx or ():
        layer.compare(state.transpose(0, 1))
    with layer.hiding():
        return layered(m, input, hx, project)


def _over_time(gradient: Tensor) -> Tensor:
    return gradient.sum(1, dtype=accumulator(gradient.dtype))


def _behind_reset(gradient: Tensor, r: Tensor) -> Tensor:
    """The gradient of GRU's hidden projection, whose last part r multiplies, from that of the input projection."""
    rest, last = gradient.split((2 * r.shape[2], r.shape[2]), 2)
    return torch.cat([rest, last * r], 2)


# --- the recurrence ---------------------------------------------------------------------------------------------------


def recurrence(
    mode: str, px: Tensor, states: States, w_hh: Tensor, b_hh: Tensor | None, span: Span
) -> tuple[Tensor, States]:
    """h of all steps [T, B, H] and the last states, from ``px`` [T, B, gates] and the first states."""
    weights = [x for x in (w_hh, b_hh) if x is not None]
    followed = torch.is_grad_enabled() and any(x.requires_grad for x in weights)
    if followed or functorch_is_active() or not all(map(_is_plain, (px, *states, *weights))):
        return plain(mode, px, states, w_hh, b_hh, span)
    if torch.is_autocast_enabled(px.device.type):
        states, w_hh = tuple(s.to(px.dtype) for s in states), w_hh.to(px.dtype)
        b_hh = None if b_hh is None else b_hh.to(px.dtype)
    elif any(x.dtype != px.dtype for x in (*states, *weights)):
        raise RuntimeError(f"{mode} has states of {states[0].dtype}, an input of {px.dtype}: give both one type.")
    with uncast(px):
        return (fused if px.is_cuda else plain)(mode, px, states, w_hh, b_hh, span)


def plain(
    mode: str, px: Tensor, states: States, w_hh: Tensor, b_hh: Tensor | None, span: Span
) -> tuple[Tensor, States]:
    """In ordinary operations. A stand-in records row i as example i's: the batch is in its own order here."""
    outputs: list[Tensor] = []
    px, states = span.unsort(px, 1), tuple(map(span.unsort, states))
    lengths = None if span.lengths is None else span.unsort(span.lengths.to(px.device))
    for t, step in enumerate(px.unbind(0)):
        new = _cell(mode, step, F.linear(states[0], w_hh, b_hh), states)
        outputs.append(new[0])
        if lengths is not None:
            inside = (t < lengths).unsqueeze(1)
            outputs[t] = torch.where(inside, new[0], torch.zeros_like(new[0]))
            new = tuple(torch.where(inside, a, b) for a, b in zip(new, states, strict=True))
        states = new
    return span.sort(torch.stack(outputs), 1), tuple(map(span.sort, states))


def _cell(mode: str, px: Tensor, ph: Tensor, states: States) -> States:
    """The states after one step, from both projections and the states before."""
    if mode == "LSTM":
        i, f, g, o = (px + ph).chunk(4, -1)
        c = torch.sigmoid(f) * states[1] + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c
    if mode == "GRU":
        xr, xz, xn = px.chunk(3, -1)
        hr, hz, hn = ph.chunk(3, -1)
        z = torch.sigmoid(xz + hz)
        return ((1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * states[0],)
    return (torch.relu(px + ph) if mode == "RNN_RELU" else torch.tanh(px + ph),)


# --- the recurrence by PyTorch's kernels ------------------------------------------------------------------------------


def fused(
    mode: str, px: Tensor, states: States, w_hh: Tensor, b_hh: Tensor | None, span: Span
) -> tuple[Tensor, States]:
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
            pack_recurrent_weights(weights, inputs=gates, mode=number, hidden=hidden)
    given: Any = tuple(s.unsqueeze(0).contiguous() for s in states)
    given = given if mode == "LSTM" else given[0]
    how = (weights, b_hh is not None, 1, 0.0, True, False)  # one layer, no dropout, training, one direction
    if span.lengths is None:
        y, *last = fused_recurrence(mode)(px, given, *how, False)
    else:
        packed = pack_padded_sequence(px, span.lengths)
        data, *last = fused_recurrence(mode)(packed.data, packed.batch_sizes, given, *how)
        y = pad_packed_sequence(PackedSequence(data, packed.batch_sizes))[0]
    return y, tuple(s.squeeze(0) for s in last)


def _flattens(px: Tensor) -> bool:
    """Whether cuDNN will want the weights in one piece. PyTorch's own question does not know that it takes bfloat16."""
    asked = px.new_empty(0, dtype=torch.float16) if px.dtype == torch.bfloat16 else px
    return torch.backends.cudnn.is_acceptable(asked) and packs_recurrent_weights()


def reset_gates(px: Tensor, h: Tensor, y: Tensor, w_hh: Tensor, b_hh: Tensor | None) -> Tensor:
    """GRU's r at all steps, from the states of all steps."""
    part, kind = slice(w_hh.shape[1]), px.dtype
    bias = None if b_hh is None else b_hh[part].to(kind)
    return torch.sigmoid(px[..., part] + F.linear(before(h.to(kind), y.to(kind)), w_hh[part].to(kind), bias))


def before(first: Tensor, states: Tensor) -> Tensor:
    """The states before each step."""
    return torch.cat([first.unsqueeze(0), states[:-1]])
