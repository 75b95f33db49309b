"""Clip factors that cannot let a contribution exceed the clipping norm, whatever the hardware rounds.

The clipped sum is one matrix product over all examples of ``(c_i b_it) a_itᵀ``; the norms come from other products
of the same ``a`` and ``b``. Two things differ between them:

* *Folding*: the factor ``c_i`` is multiplied into one operand, which is then rounded to the precision of the product
  (nothing to speak of in float32; at most half an ulp, 2⁻⁸ of the value, in bfloat16, which the norms use as it is;
  four times 2⁻¹⁰ in TF32 and four times 2⁻⁸ where float32 products run in bfloat16, since either operand may be cut off
  or rounded in either product). The contribution moves by at most ``κ ‖folded operand‖_F ‖other operand‖₂``.
* *Accumulation*: an inner product of length n in float32 carries an error of at most γ(n) times the sum of the absolute
  terms. γ(n) = max(8√n, n/8)·2⁻²³: the first part is the probabilistic bound of Higham and Mary (2019) with λ = 16, the
  second covers tensor cores, which cut off once per group of at least eight products.

Both bounds are added to the norm before the factor is computed, so the factor can only err towards smaller
contributions.

Guarantee
---------
For every example i the contribution added to the sum, ``w_i c_i g_i`` as the products round it, has norm at most
ζ(1 + tol) with ``tol = sensitivity_tolerance(dtype)``, and is exactly zero if any part of g_i is not finite or w_i = 0.
The norm used is an upper bound: with ‖·‖ from Gram matrices G_a, G_b of one layer,

    U = ( √(max(0, ⟨G_a, G_b⟩) + γ(tr G_a ‖G_b‖ + tr G_b ‖G_a‖ + ‖G_a‖ ‖G_b‖)) + κ ‖folded‖_F ‖G_other‖^½ )²

which bounds the squared norm of that layer's rounded contribution divided by c_i. The tolerance leaves room for the
rounding of the factor itself and for the float32 accumulation of 4096 contributions: four roundings of a sum that is so
many times as large. ``Clipper.leave_room`` leaves more for larger batches.

**Finite norms make finite sums**, so whoever knows that all norms are finite need not look at the sums. U ≥
γ tr G_a ‖G_b‖ and ‖G_b‖ ≥ tr G_b/√T bound the products of every token before they cancel:
c_i ‖a_i‖ ‖b_i‖ ≤ ζ (√T/γ)^½ ≤ 2¹⁵ ζ for T ≤ 2²⁰ tokens, as γ ≥ 2⁻²⁰. So no partial sum over 2²⁴ examples exceeds
2³⁹ ζ, far from 2¹²⁷ for ζ ≤ 2⁴⁰; nor does a folded operand, as U ≥ tr G_b 2⁻¹⁰⁰ bounds c_i ‖b_i‖ by 2⁵⁰ ζ. Gradients
that are kept are summed as they are.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor

Mode = Literal["flat", "per-layer", "automatic"]

#: AUTO-S of Bu et al. (2022): g_i / (‖g_i‖ + 0.01), times ζ. Any positive constant keeps the norm below ζ.
AUTOMATIC_STABILITY = 0.01

#: ζ lies above it: at 1e-24 what is clipped becomes so small that float32 loses digits (1.09 ζ was measured).
SMALLEST_CLIP = 1e-12

_LOW = (torch.bfloat16, torch.float16)
_PIECE = 1 << 10


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums over values of ``dtype`` are kept: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _float32_precision() -> str:
    """ "highest", "high" (TF32) or "medium" (float32 products may run in bfloat16)."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # old and new switches mixed: torch refuses to say
        return "medium"


def tf32_in_use(device: torch.device) -> bool:
    """Whether a float32 product on ``device`` may round its operands."""
    if _float32_precision() != "highest":
        return True
    return device.type == "cuda" and bool(torch.backends.cuda.matmul.allow_tf32)


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """No TF32 (nor bfloat16 in its place) in float32 products, where terms of different products may cancel."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def folding_unit(dtype: torch.dtype, device: torch.device) -> float:
    """κ: the relative change of a folded operand between the norm's product and the sum's product."""
    if dtype == torch.float64:
        return 2.0**-52
    if dtype == torch.bfloat16:
        return 2.0**-8 * (1 + 2.0**-6)
    if tf32_in_use(device):
        return 2.0**-6 if _float32_precision() == "medium" else 2.0**-8
    return 2.0**-22


def accumulation_unit(length: int, dtype: torch.dtype) -> float:
    """γ(n): the error of an inner product of ``length`` terms, relative to the sum of their absolute values."""
    ulp = 2.0**-52 if dtype == torch.float64 else 2.0**-23
    return max(8 * math.sqrt(max(length, 1)), length / 8) * ulp


# --- norms and factors ------------------------------------------------------------------------------------------------


@dataclass
class Norm:
    """Per-example ‖g_i‖² of one parameter as computed, and what bounds its error.

    Fields are [B], or [rows, B]: several parameters, or what is to be added up for one.
    """

    square: Tensor  # may come out slightly negative
    trace_a: Tensor | None = None  # ‖a_i‖_F², ‖b_i‖_F²
    trace_b: Tensor | None = None
    gram_a: Tensor | None = None  # ‖a_i a_iᵀ‖_F, ‖b_i b_iᵀ‖_F: at least the square of the spectral norm
    gram_b: Tensor | None = None  # (None: of one token, whose Gram matrix is its trace)
    _: KW_ONLY
    gamma: float = 0.0
    kappa: float = 0.0
    fold_a: bool = False

    def upper(self) -> Tensor:
        """Upper bounds on the squares, their own errors included. Small tensors: what counts is how many launches."""
        trace_a, trace_b, gram_a, gram_b, kappa = self.trace_a, self.trace_b, self.gram_a, self.gram_b, self.kappa
        if trace_a is None or trace_b is None:
            return self.square
        # Squares too small for the type are lost from one Gram matrix, whatever the other holds: at most 2²⁶ of them.
        lost = torch.finfo(self.square.dtype).tiny * 2.0**26
        if gram_a is None or gram_b is None:  # ‖a‖²‖b‖² is all that it is made of, so √(square + error) bounds the fold
            grown = (1 + kappa) ** 2
            return (trace_a + trace_b).mul_(lost * grown).add_(self.square, alpha=(1 + 3 * self.gamma) * grown)
        folded, other = (trace_a, gram_b), (trace_b, gram_a)
        if not self.fold_a:
            folded, other = other, folded
        across = torch.mul(*folded)
        error = torch.addcmul(across, *other).addcmul_(gram_a, gram_b)
        whole = self.square.clamp_min(0).add_(error, alpha=self.gamma).add_(trace_a, alpha=lost)
        return whole.add_(trace_b, alpha=lost).sqrt_().add_(across.sqrt_(), alpha=kappa).square_()


def sensitivity_tolerance(dtype: torch.dtype) -> float:
    """``tol``: noise must cover sensitivity ζ(1 + tol) when sums are kept in ``dtype`` (float32 or float64)."""
    return 2.0**-30 if dtype == torch.float64 else 2.0**-10


def room_below(tolerance: float, batch_size: float) -> float:
    """By what factor less than ζ is clipped to in training, so that a contribution with its rounding stays within ζ.

    Args:
        tolerance: Of the clipper; it covers sums of 4096 examples.
        batch_size: How many examples a sum has, about: a contribution is rounded with the sum that it is added to.
    """
    return 1 + tolerance * max(1.0, batch_size / 4096)


@dataclass
class Factors:
    """What the sum pass needs: ``weight`` [groups, B] (``scale`` folded in), ``keep`` [B], ``norms`` [B]."""

    weight: Tensor
    keep: Tensor
    norms: Tensor
    finite: Tensor


def clip_factors(
    groups: list[list[Tensor]],
    *,
    max_grad_norm: float,
    mode: Mode,
    scale: float,
    weights: Tensor | None,
    layers: int = 1,
) -> Factors:
    """Factors for examples whose recorded gradients are ``1/scale`` times their own (the batch mean, several views).

    ``groups`` hold what bounds the squared norms of their parameters, [B] or [parameters, B]; see `Norm.upper`.
    """
    squares = torch.stack([torch.cat([x.reshape(-1, x.shape[-1]) for x in group]).sum(0) for group in groups])
    slack = 1 + (2.0**-45 if squares.dtype == torch.float64 else 2.0**-18)
    upper = squares.sqrt_().mul_(scale * slack)
    if weights is not None:
        weights = weights.to(upper).clamp(0, 1)  # whatever was written into them since
    total = upper[0] if len(groups) == 1 else torch.linalg.vector_norm(upper, dim=0)
    finite = total < math.inf  # no NaN is; torch.isfinite takes four launches
    if mode == "automatic":  # flat
        weight = max_grad_norm / (upper + AUTOMATIC_STABILITY)
    else:
        share = max_grad_norm / layers**0.5 if mode == "per-layer" else max_grad_norm
        weight = (share / upper).clamp_max_(1.0)  # a zero gradient gives inf, so 1
    if weights is not None:
        weight = weight * weights
    keep = finite if weights is None else finite & (weights != 0)
    return Factors(weight.mul_(scale).masked_fill_(~keep, 0.0), keep, total, finite)


# --- products in float32 ----------------------------------------------------------------------------------------------


def uncast(x: Tensor) -> torch.autocast:
    """No autocast, also where backward() was called inside it: norms and sums choose their own precision."""
    return torch.autocast(x.device.type, enabled=False)


def squared_norms(x: Tensor) -> Tensor:
    """Σ_j x_ij² of each row, in pieces: on the CPU a norm adds one by one, and over 2²⁴ numbers loses percents."""
    rows, length = x.shape
    if x.is_cuda or length <= _PIECE:
        return torch.linalg.vector_norm(x, dim=1).square()
    whole = length // _PIECE * _PIECE
    pieces = torch.linalg.vector_norm(x[:, :whole].reshape(rows, -1, _PIECE), dim=2).square().sum(1)
    return pieces + torch.linalg.vector_norm(x[:, whole:], dim=1).square()


def bmm(x: Tensor, y: Tensor) -> Tensor:
    """Batched product, accumulated and returned in float32 (float64 for float64)."""
    if x.dtype in _LOW:
        if x.is_cuda:
            return torch.bmm(x, y, out_dtype=torch.float32)
        return torch.bmm(x.float(), y.float())
    return torch.bmm(x, y)


def bmm_into(out: Tensor, x: Tensor, y: Tensor) -> None:
    """``out = x @ y`` for batches, accumulated in ``out``'s float32 or float64."""
    if x.dtype in _LOW:
        out.copy_(bmm(x, y))
    else:
        torch.bmm(x, y, out=out)


def sum_of_products_into(total: Tensor, x: Tensor, y: Tensor, *, fresh: bool) -> None:
    """``total += Σ_i x_i @ y_i`` (``fresh``: ``=``) over a batch, in ``total``'s float32 or float64."""
    x, y = x.to(total.dtype), y.to(total.dtype)
    if total.is_cuda:  # addbmm would launch a kernel for every example there
        part = torch.bmm(x, y).sum(0)
        total.copy_(part) if fresh else total.add_(part)
    else:
        torch.addbmm(total, x, y, beta=0 if fresh else 1, out=total)


def mm_into(total: Tensor, x: Tensor, y: Tensor, *, fresh: bool) -> None:
    """``total += x @ y`` (``fresh``: ``total = x @ y``), accumulated in ``total``'s float32 or float64."""
    if x.dtype in _LOW and not x.is_cuda:
        x, y = x.float(), y.float()
    wide = {"out_dtype": torch.float32} if x.dtype in _LOW else {}
    if fresh:
        torch.mm(x, y, out=total, **wide)
    else:
        torch.addmm(total, x, y, out=total, **wide)  # type: ignore[call-overload]
