"""What one call of a layer leaves behind for one parameter, until the clip factors are known.

A record knows its parameter's name and can do three things: say its per-example gradient norms (`norm`), form the
per-example gradients of some examples (`materialise`, the slow twin, used where records of one parameter meet), and add
the weighted sum of its per-example gradients to a total (`add`). Two kinds serve every layer:

* `Stored`: the per-example gradients themselves. Biases, scales and every layer for which they are smaller than what
  they are made of.
* `Outer`: per-example gradients ``Σ_t b_t a_tᵀ`` kept as the factors ``a`` and ``b`` (Linear, convolution).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lambdacgd.clipping import bounds, gpu
from lambdacgd.clipping.bounds import Norm

# Temporaries of the norm pass are cut into groups of examples of at most this many elements.
CHUNK_CPU, CHUNK_CUDA = 1 << 19, 1 << 27
# Per-example gradients of a convolution are kept up to this many elements, even where Gram matrices would cost less.
_KEPT_PATCHES = 1 << 25


def in_chunks(examples: int, elements_each: int, device: torch.device) -> list[slice]:
    """The examples, as many at a time as temporaries of ``elements_each`` numbers each allow."""
    budget = CHUNK_CUDA if device.type == "cuda" else CHUNK_CPU
    step = max(1, min(examples, budget // max(1, elements_each)))
    return [slice(i, min(i + step, examples)) for i in range(0, examples, step)]


class Record:
    """One parameter's share of one backward pass."""

    name: str

    def norm(self) -> Norm:
        raise NotImplementedError

    def materialise(self, rows: slice) -> Tensor:
        raise NotImplementedError

    def add(self, total: Tensor, factor: Tensor, keep: Tensor | None, *, fresh: bool) -> None:
        """``total += Σ_i factor_i g_i`` over the examples kept; ``fresh``: overwrite what the buffer holds."""
        raise NotImplementedError

    def merge(self, other: Record) -> Record | None:
        """One record for two calls that used the same parameter, cross terms included; None if they do not fit."""
        return None

    def folded(self, examples: int, *, minor: bool) -> Record:
        """The same for a layer that saw several rows of every example: their gradients are added up.

        Args:
            examples: How many there are.
            minor: Whether the first row of every example comes first, then the second of every example.
        """
        return Stored(self.name, fold(self.materialise(slice(0, self.examples)), examples, minor=minor).sum(1))

    @property
    def examples(self) -> int:
        raise NotImplementedError


def fold(x: Tensor, examples: int, *, minor: bool) -> Tensor:
    """[rows, …] as [examples, rows of each, …]; see `Record.folded`."""
    each = x.shape[0] // examples
    if minor:
        return x.reshape(each, examples, *x.shape[1:]).transpose(0, 1)
    return x.reshape(examples, each, *x.shape[1:])


def masked(x: Tensor, keep: Tensor | None) -> Tensor:
    """``x`` with the examples not kept set to zero, whatever they hold (0·NaN is NaN, so multiplying is not enough)."""
    if keep is None:
        return x
    return torch.where(keep.view(-1, *([1] * (x.dim() - 1))), x, torch.zeros((), dtype=x.dtype, device=x.device))


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """``x_i · factor_i``, computed in the factor's precision and rounded once to ``x``'s (float16 becomes float32)."""
    weight = factor.view(-1, *([1] * (x.dim() - 1)))
    if x.dtype == torch.bfloat16:
        return torch.mul(x, weight, out=torch.empty_like(x))
    return x * weight


@dataclass
class Stored(Record):
    """Per-example gradients of a parameter, [B, *shape], in float32 or float64; ``square`` [B] where it is known."""

    name: str
    gradients: Tensor
    square: Tensor | None = None

    @property
    def size(self) -> int:
        """Numbers in one example's gradient."""
        return math.prod(self.gradients.shape[1:])

    def flat(self) -> Tensor:
        g = self.gradients
        return g if g.dim() == 2 else g.reshape(g.shape[0], self.size)

    def norm(self) -> Norm:
        if self.square is not None:
            return Norm(self.square)
        return Norm(bounds.squared_norms(self.flat()))

    def materialise(self, rows: slice) -> Tensor:
        return self.gradients[rows]

    def add(self, total: Tensor, factor: Tensor, keep: Tensor | None, *, fresh: bool) -> None:
        if gpu.weighted_sum(total, self.gradients, factor, keep, fresh=fresh):
            return
        flat = masked(self.flat(), keep).t()
        if fresh:
            torch.mv(flat, factor, out=total.view(-1))
        else:
            total.view(-1).addmv_(flat, factor)

    def merge(self, other: Record) -> Record | None:
        if isinstance(other, Stored):
            return Stored(self.name, self.gradients + other.gradients)
        return None

    @property
    def examples(self) -> int:
        return self.gradients.shape[0]


@dataclass
class ColumnSum(Record):
    """Per-example gradients Σ_t b_it of a bias, not formed yet: the norm pass forms those of all layers together."""

    name: str
    b: Tensor  # [B, T, d]

    def formed(self) -> Stored:
        return Stored(self.name, self.b.sum(1, dtype=bounds.accumulator(self.b.dtype)))

    def materialise(self, rows: slice) -> Tensor:
        return self.formed().gradients[rows]

    def folded(self, examples: int, *, minor: bool) -> Record:
        return ColumnSum(self.name, fold(self.b, examples, minor=minor).flatten(1, 2))

    @property
    def examples(self) -> int:
        return self.b.shape[0]


Tokens = Tensor | Callable[[slice], Tensor]


@dataclass
class Outer(Record):
    """Per-example gradients Σ_t b_it a_itᵀ of a parameter viewed as a matrix [out, in].

    ``a`` is [B, T, in] or makes the rows asked for (patches of a convolution's input); ``b`` is [B, T, out].
    """

    name: str
    a: Tokens
    b: Tokens
    sizes: tuple[int, int, int, int]  # B, T, in, out
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    transposed: bool = False  # the parameter is stored [in, out] (Hugging Face Conv1D)

    def left(self, rows: slice) -> Tensor:
        return self.a(rows) if callable(self.a) else self.a[rows]

    def right(self, rows: slice) -> Tensor:
        return self.b(rows) if callable(self.b) else self.b[rows]

    @property
    def examples(self) -> int:
        return self.sizes[0]

    def folded(self, examples: int, *, minor: bool) -> Record:
        """Rows of an example are more of its tokens."""
        if callable(self.a) or callable(self.b):
            return super().folded(examples, minor=minor)
        a, b = (fold(x, examples, minor=minor).flatten(1, 2) for x in (self.a, self.b))
        return outer(self.name, a, b, self.shape, transposed=self.transposed).resolve()

    def resolve(self) -> Record:
        """The record to keep: the gradients themselves where they are the cheaper way."""
        if not direct(self.sizes, patches=callable(self.a)):
            return self
        return Stored(self.name, self.materialise(slice(0, self.examples)))

    def materialise(self, rows: slice) -> Tensor:
        start, stop = rows.start or 0, min(rows.stop, self.examples)
        _, tokens, inner, _ = self.sizes
        kept = bounds.accumulator(self.dtype)
        whole = torch.empty(stop - start, *self._matrix_shape(), dtype=kept, device=self.device)
        for part in in_chunks(stop - start, tokens * inner if callable(self.a) else 0, self.device):
            here = slice(start + part.start, start + part.stop)
            a, b = self.left(here), self.right(here)
            first, second = (a, b) if self.transposed else (b, a)
            bounds.bmm_into(whole[part], first.transpose(1, 2), second)
        return whole.view(-1, *self.shape)

    def norm(self) -> Norm:
        examples, tokens, inner, outer = self.sizes
        fold_a = inner < outer
        gamma = bounds.accumulation_unit(max(inner, outer), self.dtype)
        kappa = bounds.folding_unit(self.dtype, self.device)
        if callable(self.a):  # their sum is formed in float32
            kappa = max(kappa, bounds.folding_unit(bounds.accumulator(self.dtype), self.device))
        if tokens == 1:
            every = slice(0, examples)
            kept = bounds.accumulator(self.dtype)
            trace_a = torch.linalg.vector_norm(self.left(every)[:, 0], dim=1, dtype=kept).square()
            trace_b = torch.linalg.vector_norm(self.right(every)[:, 0], dim=1, dtype=kept).square()
            product = trace_a * trace_b
            return Norm(product, trace_a, trace_b, trace_a, trace_b, gamma=gamma, kappa=kappa, fold_a=fold_a)
        each = max(2 * tokens * tokens, tokens * inner if callable(self.a) else 0)
        groups = in_chunks(examples, each, self.device)
        parts = [gram_parts(self.left(rows), self.right(rows)) for rows in groups]
        sums = parts[0] if len(parts) == 1 else tuple(torch.cat(p) for p in zip(*parts, strict=True))
        return Norm(*sums, gamma=gamma, kappa=kappa, fold_a=fold_a)

    def add(self, total: Tensor, factor: Tensor, keep: Tensor | None, *, fresh: bool) -> None:
        _, tokens, inner, _ = self.sizes
        shape = self._matrix_shape()
        matrix = total if total.shape == shape else total.view(shape)
        if not callable(self.a) and not callable(self.b):
            self._add_rows(matrix, masked(self.a, keep), masked(self.b, keep), factor, fresh)
            return
        for rows in in_chunks(self.examples, tokens * inner, self.device):
            kept = None if keep is None else keep[rows]
            self._add_rows(matrix, masked(self.left(rows), kept), masked(self.right(rows), kept), factor[rows], fresh)
            fresh = False

    def _add_rows(self, matrix: Tensor, a: Tensor, b: Tensor, factor: Tensor, fresh: bool) -> None:
        """The factor goes into the smaller operand; then one product over all tokens of all examples."""
        _, _, inner, outer = self.sizes
        if inner < outer:
            a = scaled(a, factor)
            b = b if b.dtype == a.dtype else b.to(a.dtype)
        else:
            b = scaled(b, factor)
            a = a if b.dtype == a.dtype else a.to(b.dtype)
        if callable(self.a):
            bounds.sum_of_products_into(matrix, b.transpose(1, 2), a, fresh=fresh)
            return
        a, b = a.flatten(0, 1), b.flatten(0, 1)
        first, second = (a, b) if self.transposed else (b, a)
        bounds.mm_into(matrix, first.t(), second, fresh=fresh)

    def _matrix_shape(self) -> tuple[int, int]:
        _, _, inner, outer = self.sizes
        return (inner, outer) if self.transposed else (outer, inner)

    def merge(self, other: Record) -> Record | None:
        """Calls of one layer are more tokens of one call: Σ_t over both is the shared parameter's gradient."""
        if not isinstance(other, Outer) or callable(self.a) or callable(other.a):
            return None
        if callable(self.b) or callable(other.b) or self.transposed != other.transposed or self.dtype != other.dtype:
            return None
        a, b = torch.cat([self.a, other.a], 1), torch.cat([self.b, other.b], 1)
        return outer(self.name, a, b, self.shape, transposed=self.transposed)


def direct(sizes: tuple[int, int, int, int], *, patches: bool) -> bool:
    """Whether forming the per-example gradients (B, T, in, out) costs less than the two Gram matrices."""
    examples, tokens, inner, outer = sizes
    if tokens == 1:
        return False
    if inner * outer <= tokens * (inner + outer):
        return True
    # Kept gradients also save making patches again: worth their memory while they are small.
    return patches and examples * inner * outer <= _KEPT_PATCHES


def outer(name: str, a: Tensor, b: Tensor, shape: torch.Size, *, transposed: bool = False) -> Outer:
    """The record of a linear map with inputs ``a`` [B, T, in] and output gradients ``b`` [B, T, out]."""
    a, b = same_type(a, b)
    sizes = (a.shape[0], a.shape[1], a.shape[2], b.shape[2])
    return Outer(name, a, b, sizes, shape, a.dtype, a.device, transposed)


def same_type(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider type: a layer kept in float32 under autocast has two, say."""
    if x.dtype == y.dtype:
        return x, y
    wide = torch.promote_types(x.dtype, y.dtype)
    return x.to(wide), y.to(wide)


def gram_parts(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Σ_ts (a_t·a_s)(b_t·b_s) = ‖Σ_t b_t a_tᵀ‖² per example, with traces and Frobenius norms of both Gram matrices."""
    gram_a, gram_b = bounds.bmm(a, a.transpose(1, 2)), bounds.bmm(b, b.transpose(1, 2))
    trace_a, trace_b = gram_a.diagonal(dim1=1, dim2=2).sum(1), gram_b.diagonal(dim1=1, dim2=2).sum(1)
    norm_a, norm_b = torch.linalg.vector_norm(gram_a, dim=(1, 2)), torch.linalg.vector_norm(gram_b, dim=(1, 2))
    return gram_a.mul_(gram_b).sum((1, 2)), trace_a, trace_b, norm_a, norm_b
