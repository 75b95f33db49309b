"""LSTM, GRU and RNN that can be seen into: the same parameters and outputs, unrolled in time.

The input projection of all steps is one product; its gradient b [B, T, gates] is also that of the hidden projection
(for GRU up to the reset gate, so there a row of zeros is added to the hidden projection to read its gradient off).
Hence the weights' gradients are Σ_t b_t x_tᵀ and Σ_t b_t h_{t−1}ᵀ: two Linear records per layer and direction,
whatever the length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lambdacgd.clipping import precision
from lambdacgd.clipping.capture import Site, tap
from lambdacgd.clipping.records import Record, Stored, outer
from lambdacgd.clipping.registry import finds_batch, register

# What the clipping rule hooks into one layer and direction: (suffix, inputs, projection) -> projection.
Watch = Callable[[str, str, Tensor, Any], Tensor]


class _Open:
    """Forward of a recurrent layer in plain operations; ``watch`` sees every projection (the identity by default)."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        return unrolled(self, input, hx, lambda suffix, part, projection, inputs: projection)


class OpenLSTM(_Open, nn.LSTM):
    """Drop-in for ``nn.LSTM`` (see `convert`)."""


class OpenGRU(_Open, nn.GRU):
    """Drop-in for ``nn.GRU`` (see `convert`)."""


class OpenRNN(_Open, nn.RNN):
    """Drop-in for ``nn.RNN`` (see `convert`)."""


def unrolled(m: Any, input: Any, hx: Any, watch: Watch) -> Any:
    """All layers and directions of ``m`` on a padded or packed batch, with results shaped like the original's."""
    lengths, packed = None, isinstance(input, PackedSequence)
    x: Any
    if packed:
        x, lengths = pad_packed_sequence(input, batch_first=True)
        lengths = lengths.to(x.device)
    else:
        x = input
    single = x.dim() == 2
    if single:
        x = x.unsqueeze(0)
    elif not packed and not m.batch_first:
        x = x.transpose(0, 1)
    directions = 2 if m.bidirectional else 1
    hidden, cell = _start(m, x, hx, directions, single)
    ends: list[tuple[Tensor, Tensor]] = []
    for layer in range(m.num_layers):
        outputs = []
        for d in range(directions):
            k = layer * directions + d
            y, end = _layer(m, x, hidden[k], cell[k], f"_l{layer}" + ("_reverse" if d else ""), lengths, watch)
            outputs.append(y)
            ends.append(end)
        x = outputs[0] if directions == 1 else torch.cat(outputs, 2)
        if m.dropout and m.training and layer + 1 < m.num_layers:
            x = F.dropout(x, m.dropout)
    h, c = torch.stack([e[0] for e in ends]), torch.stack([e[1] for e in ends])
    if single:
        x, h, c = x.squeeze(0), h.squeeze(1), c.squeeze(1)
    elif not packed and not m.batch_first:
        x = x.transpose(0, 1)
    if packed:
        out: Any = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)  # type: ignore[union-attr]
        x = PackedSequence(out.data, out.batch_sizes, out.sorted_indices, out.unsorted_indices)
    return x, (h, c) if m.mode == "LSTM" else h


def _start(m: Any, x: Tensor, hx: Any, directions: int, single: bool) -> tuple[Tensor, Tensor]:
    shape = (m.num_layers * directions, x.shape[0], m.hidden_size)
    if hx is None:
        zero = torch.zeros(shape, dtype=x.dtype, device=x.device)
        return zero, zero
    h, c = hx if m.mode == "LSTM" else (hx, hx)
    return (h.unsqueeze(1), c.unsqueeze(1)) if single else (h, c)


def _layer(
    m: Any, x: Tensor, h: Tensor, c: Tensor, suffix: str, lengths: Tensor | None, watch: Watch
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One layer in one direction: outputs [B, T, H] and the last states."""
    w_ih, w_hh = getattr(m, f"weight_ih{suffix}"), getattr(m, f"weight_hh{suffix}")
    b_ih = getattr(m, f"bias_ih{suffix}", None) if m.bias else None
    b_hh = getattr(m, f"bias_hh{suffix}", None) if m.bias else None
    before: list[Tensor] = []
    px = watch(suffix, "ih", F.linear(x, w_ih, b_ih), (x, before))
    extra = None
    if m.mode == "GRU":
        extra = watch(suffix, "hh", torch.zeros_like(px), (x, before)).unbind(1)
    steps, length = px.unbind(1), x.shape[1]
    order = range(length - 1, -1, -1) if suffix.endswith("_reverse") else range(length)
    outputs: list[Any] = [None] * length
    states: list[Any] = [None] * length
    for t in order:
        states[t] = h.detach()
        ph = F.linear(h, w_hh, b_hh)
        new_h, new_c = _cell(m.mode, steps[t], ph if extra is None else ph + extra[t], h, c)
        if lengths is not None:
            inside = (t < lengths).unsqueeze(1)
            outputs[t] = torch.where(inside, new_h, torch.zeros_like(new_h))
            h, c = torch.where(inside, new_h, h), torch.where(inside, new_c, c)
        else:
            outputs[t], h, c = new_h, new_h, new_c
    before.append(torch.stack(states, 1))
    return torch.stack(outputs, 1), (h, c)


def _cell(mode: str, px: Tensor, ph: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    if mode == "LSTM":
        i, f, g, o = (px + ph).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c
    if mode == "GRU":
        xr, xz, xn = px.chunk(3, 1)
        hr, hz, hn = ph.chunk(3, 1)
        z = torch.sigmoid(xz + hz)
        h = (1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * h
        return h, h
    h = torch.relu(px + ph) if mode == "RNN_RELU" else torch.tanh(px + ph)
    return h, h


@register(OpenLSTM, OpenGRU, OpenRNN)
@finds_batch
def recurrent(site: Site, input: Any, hx: Any = None) -> Any:
    m: Any = site.module
    shapes = {name: p.shape for name, p in m._parameters.items()}

    def watch(suffix: str, part: str, projection: Tensor, inputs: Any) -> Tensor:
        x, before = inputs
        if not site.clipper.is_batched(site, x):
            raise site.refuse(
                f"{x.shape[0]} sequences for {site.clipper.batch} examples. Put the batch first in the model's "
                "input, or pass batch_of= to attach."
            )
        parts = ("ih", "hh") if m.mode != "GRU" else (part,)

        def recorder(gradient: Tensor, x: Tensor) -> Iterator[Record]:
            total = gradient.sum(1, dtype=precision.accumulator(gradient.dtype))
            for one in parts:
                weight, bias = site.names.get(f"weight_{one}{suffix}"), site.names.get(f"bias_{one}{suffix}")
                if weight is not None:
                    a = x if one == "ih" else before[0]
                    yield outer(weight, a, gradient, shapes[f"weight_{one}{suffix}"]).resolve()
                if bias is not None:
                    yield Stored(bias, total)

        return tap(site, projection, recorder, x)

    own = m._parameters
    kept = {name: own[name] for name in site.names}
    own.update({name: p.detach() for name, p in kept.items()})
    try:
        return unrolled(m, input, hx, watch)
    finally:
        own.update(kept)


class OpenLSTMCell(nn.LSTMCell):
    """Drop-in for ``nn.LSTMCell`` (see `convert`)."""

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        zero = input.new_zeros(*input.shape[:-1], self.hidden_size)
        h, c = (zero, zero) if hx is None else hx
        gates = F.linear(input, self.weight_ih, self.bias_ih) + F.linear(h, self.weight_hh, self.bias_hh)
        i, f, g, o = gates.chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class OpenGRUCell(nn.GRUCell):
    """Drop-in for ``nn.GRUCell`` (see `convert`)."""

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        h = input.new_zeros(*input.shape[:-1], self.hidden_size) if hx is None else hx
        xr, xz, xn = F.linear(input, self.weight_ih, self.bias_ih).chunk(3, -1)
        hr, hz, hn = F.linear(h, self.weight_hh, self.bias_hh).chunk(3, -1)
        z = torch.sigmoid(xz + hz)
        return (1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * h


class OpenRNNCell(nn.RNNCell):
    """Drop-in for ``nn.RNNCell`` (see `convert`)."""

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        h = input.new_zeros(*input.shape[:-1], self.hidden_size) if hx is None else hx
        z = F.linear(input, self.weight_ih, self.bias_ih) + F.linear(h, self.weight_hh, self.bias_hh)
        return torch.relu(z) if self.nonlinearity == "relu" else torch.tanh(z)
