"""Embedding and EmbeddingBag: a linear layer whose inputs are one-hot, so their Gram matrix is "the same token?".

‖g_i‖² = Σ_ts [token_t = token_s] b_t·b_s, or the norm of the few rows that g_i has. Position embeddings looked up
without a batch dimension go through `batch_free`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lambdacgd.clipping import bounds
from lambdacgd.clipping.backward import Outer, Record, fold, in_chunks, masked
from lambdacgd.clipping.batch_free import lookup
from lambdacgd.clipping.bounds import Norm
from lambdacgd.clipping.rules import Layer, register, tap


@dataclass
class Rows(Record):
    """Per-example gradients Σ_t e_{index_t} b_tᵀ of a table [V, d]; an index below zero counts for nothing."""

    name: str
    index: Tensor  # [B, T]
    b: Tensor  # [B, T, d]
    shape: torch.Size

    def reads(self) -> tuple[Tensor, ...]:
        return self.index, self.b

    def folded(self, examples: int, *, minor: bool) -> Record:
        index, b = (fold(x, examples, minor=minor).flatten(1, 2) for x in (self.index, self.b))
        return Rows(self.name, index, b, self.shape)

    def norm(self) -> Norm:
        """From the Gram matrix on CUDA, where products are cheap; from the gradient's own rows elsewhere."""
        tokens, width = self.b.shape[1:]
        if self.b.is_cuda:
            chunks = in_chunks(self.examples, 2 * tokens**2, self.b.device)
            parts = [self._from_gram(self.index[rows], self.b[rows]) for rows in chunks]
            # Sums are added in float32, so only operands that the Gram product itself rounds (TF32) can differ.
            low = self.b.dtype in (torch.bfloat16, torch.float16)
            kappa = 2.0**-22 if low else bounds.folding_unit(self.b.dtype, self.b.device)
            gamma = bounds.accumulation_unit(width, self.b.dtype)
        else:
            parts = [self._from_rows(rows) for rows in in_chunks(self.examples, 2 * tokens * width, self.b.device)]
            # A row is a sum over equal tokens: its error is that of Σ_t b_t, at most γ(T) √(tr G_b ‖G_a‖), as κ's is.
            kappa, gamma = bounds.accumulation_unit(tokens, self.b.dtype), 0.0
        sums = parts[0] if len(parts) == 1 else tuple(torch.cat(p) for p in zip(*parts, strict=True))
        return Norm(*sums, gamma=gamma, kappa=kappa)

    @staticmethod
    def _from_gram(index: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        gram = bounds.bmm(b, b.transpose(1, 2))
        used = (index >= 0).unsqueeze(2)
        same = ((index.unsqueeze(2) == index.unsqueeze(1)) & used).to(gram.dtype)
        trace_b = gram.diagonal(dim1=1, dim2=2).sum(1)
        gram_b, gram_a = torch.linalg.vector_norm(gram, dim=(1, 2)), torch.linalg.vector_norm(same, dim=(1, 2))
        return gram.mul_(same).sum((1, 2)), used.sum((1, 2), dtype=gram.dtype), trace_b, gram_a, gram_b

    def _from_rows(self, rows: slice) -> tuple[Tensor, ...]:
        """Sorted, equal tokens are neighbours: the gradient's rows are sums over runs of them."""
        index, order = self.index[rows].sort(1)
        _, b = self._scatter(rows)
        group = torch.zeros_like(index)
        torch.cumsum(index[:, 1:] != index[:, :-1], 1, out=group[:, 1:])
        place = torch.empty_like(group).scatter_(1, order, group)
        summed = torch.zeros_like(b).scatter_add_(1, place.unsqueeze(2).expand_as(b), b)
        used = (index >= 0).to(b.dtype)
        counts = torch.zeros_like(used).scatter_add_(1, group, used)
        trace_b, square = bounds.squared_norms(b.flatten(1)), bounds.squared_norms(summed.flatten(1))
        return square, used.sum(1), trace_b, torch.linalg.vector_norm(counts, dim=1), trace_b

    def _scatter(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Indices and gradients with unused entries pointing at row 0 with gradient zero."""
        index, b = self.index[rows], self.b[rows].to(bounds.accumulator(self.b.dtype))
        return index.clamp_min(0), b.masked_fill((index < 0).unsqueeze(2), 0)

    def materialise(self, rows: slice) -> Tensor:
        index, b = self._scatter(rows)
        whole = b.new_zeros(index.shape[0], *self.shape)
        return whole.scatter_add_(1, index.unsqueeze(2).expand_as(b), b)

    def add(self, total: Tensor, factor: Tensor, keep: Tensor | None, *, fresh: bool) -> None:
        index, b = self._scatter(slice(0, self.examples))
        b = masked(b, keep) * factor.view(-1, 1, 1)
        if fresh:
            total.zero_()
        total.index_add_(0, index.flatten(), b.flatten(0, 1))

    def merge(self, other: Record) -> Record | None:
        if isinstance(other, Rows):
            return Rows(self.name, torch.cat([self.index, other.index], 1), torch.cat([self.b, other.b], 1), self.shape)
        if isinstance(other, Outer) and not callable(other.a) and not other.transposed:
            return Tied(self.name, self, other)
        return None


@dataclass
class Tied(Record):
    """An embedding whose table is also the output layer's weight: both gradients and their inner product.

    ⟨Σ_t e_{k_t} b_tᵀ, Σ_s d_s h_sᵀ⟩ = Σ_ts d_s[k_t] (b_t·h_s) for output gradients d and inputs h of the output layer.
    """

    name: str
    rows: Rows
    head: Outer

    def reads(self) -> tuple[Tensor, ...]:
        return *self.rows.reads(), *self.head.reads()

    @property
    def examples(self) -> int:
        return self.rows.examples

    def norm(self) -> Norm:
        """‖rows‖² + ‖head‖² + 2⟨rows, head⟩, which may cancel against each other: no operand is rounded here (TF32).

        The traces stand in for the Gram norms, which they exceed: (tr₁ + tr₂)(tr₁ + tr₂) then bounds both parts' errors
        and, by Cauchy-Schwarz, the cross term's.
        """
        kappa, tokens = 2 * bounds.folding_unit(self.head.b.dtype, self.head.b.device), self.rows.index.shape[1]
        with bounds.full_float32():
            rows, head = self.rows.norm(), self.head.norm()
            cross = torch.cat(
                [self._cross(part) for part in in_chunks(self.examples, 2 * tokens**2, self.head.b.device)]
            )
        trace_a = 2 * (rows.trace_a + head.trace_a)  # type: ignore[operator]
        trace_b = rows.trace_b + head.trace_b  # type: ignore[operator]
        square = rows.square + head.square + 2 * cross
        gamma = max(rows.gamma, head.gamma, bounds.accumulation_unit(tokens, self.head.b.dtype))
        return Norm(square, trace_a, trace_b, trace_a, trace_b, gamma=gamma, kappa=kappa)

    def _cross(self, rows: slice) -> Tensor:
        assert isinstance(self.head.a, Tensor)
        kept = bounds.accumulator(self.head.b.dtype)
        index, b = self.rows._scatter(rows)
        inputs, outputs = self.head.a[rows].to(kept), self.head.b[rows]
        picked = outputs.gather(2, index.unsqueeze(1).expand(-1, outputs.shape[1], -1)).to(kept)  # [n, S, T]
        return (picked * torch.bmm(inputs, b.to(kept).transpose(1, 2))).sum((1, 2))

    def materialise(self, rows: slice) -> Tensor:
        return self.rows.materialise(rows) + self.head.materialise(rows)

    def add(self, total: Tensor, factor: Tensor, keep: Tensor | None, *, fresh: bool) -> None:
        self.head.add(total, factor, keep, fresh=fresh)
        self.rows.add(total, factor, keep, fresh=False)


def embedding_records(
    gradient: Tensor, index: Tensor, *, name: str, padding: int | None, shape: torch.Size
) -> Iterator[Record]:
    index = index.unsqueeze(-1).flatten(1)  # one index an example is one token
    b = gradient.reshape(gradient.shape[0], -1, gradient.shape[-1])
    if padding is not None:
        unused = index == padding
        index, b = index.masked_fill(unused, -1), b.masked_fill(unused.unsqueeze(2), 0)
    yield Rows(name, index, b, shape)


def _refuse_options(layer: Layer, module: Any) -> None:
    if module.max_norm is not None or module.scale_grad_by_freq:
        raise layer.refuse("max_norm and scale_grad_by_freq depend on the whole batch. Leave them out.")


@register(nn.Embedding, finds_batch=True, pointwise=True)
def embedding(layer: Layer, input: Tensor) -> Tensor:
    m: nn.Embedding = layer.module  # type: ignore[assignment]
    _refuse_options(layer, m)
    recorder = partial(embedding_records, name=layer.names["weight"], padding=m.padding_idx, shape=m.weight.shape)
    if not layer.batched:
        layer.compare(input, free=True)
        return lookup(layer, layer.hidden(input), input, recorder)
    return tap(layer, layer.hidden(input), recorder, input)


@register(nn.EmbeddingBag, finds_batch=True)
def embedding_bag(
    layer: Layer, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
) -> Tensor:
    m: nn.EmbeddingBag = layer.module  # type: ignore[assignment]
    _refuse_options(layer, m)
    if m.mode == "max":
        raise layer.refuse("mode='max' has no rule. Use mode='sum' or 'mean', or an Embedding followed by amax.")
    if offsets is not None:
        raise layer.refuse("with offsets. Give bags as a matrix [batch, longest], filled up with padding_idx.")
    index, weights = input, per_sample_weights
    if not layer.is_batched(index):
        raise layer.refuse("its bags are not the examples of the batch. Use an Embedding followed by sum or mean.")
    if m.padding_idx is not None:
        index = index.masked_fill(index == m.padding_idx, -1)
    used = index >= 0
    weights = used.to(m.weight.dtype) if weights is None else weights * used
    if m.mode == "mean":
        weights = weights / used.sum(1, keepdim=True).clamp_min(1)
    layer.compare(weights)

    def recorder(gradient: Tensor, index: Tensor, weights: Tensor) -> Iterator[Record]:
        yield Rows(layer.names["weight"], index, gradient.unsqueeze(1) * weights.unsqueeze(2), m.weight.shape)

    return tap(layer, layer.hidden(input, None, per_sample_weights), recorder, index, weights)
