"""How much rounding can change an example's contribution, and matrix products that accumulate in float32.

The clipped sum is one matrix product over all examples of ``(c_i b_it) a_itᵀ``; the norms come from other products
of the same ``a`` and ``b``. Two things differ between them:

* *Folding*: the factor ``c_i`` is multiplied into one operand, which is then rounded to the precision of the product
  (nothing to speak of in float32; at most half an ulp, 2⁻⁸ of the value, in bfloat16, which the norms use as it is;
  four times 2⁻¹⁰ in TF32 and four times 2⁻⁸ where float32 products run in bfloat16, since either operand may be cut off
  or rounded in either product). The contribution moves by at most ``κ ‖folded operand‖_F ‖other operand‖₂``.
* *Accumulation*: an inner product of length n in float32 carries an error of at most γ(n) times the sum of the absolute
  terms. γ(n) = max(8√n, n/8)·2⁻²³: the first part is the probabilistic bound of Higham and Mary (2019) with λ = 16, the
  second covers tensor cores, which cut off once per group of at least eight products.

Both bounds are added to the norm before the factor is computed (`lambdacgd.clipping.factors`), so the factor can only
err towards smaller contributions.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

_LOW = (torch.bfloat16, torch.float16)
_PIECE = 1 << 10


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums over values of ``dtype`` are kept: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tf32_in_use(device: torch.device) -> bool:
    """Whether a float32 product on ``device`` may round its operands (TF32; unknown settings count as yes)."""
    try:
        if torch.get_float32_matmul_precision() != "highest":
            return True
        return device.type == "cuda" and bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # old and new switches mixed: torch refuses to say
        return True


def cpu_float32_is_bfloat16() -> bool:
    """``torch.set_float32_matmul_precision('medium')`` lets float32 products run in bfloat16."""
    try:
        return torch.get_float32_matmul_precision() == "medium"
    except RuntimeError:
        return True


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
        return 2.0**-6 if cpu_float32_is_bfloat16() else 2.0**-8
    return 2.0**-22


def accumulation_unit(length: int, dtype: torch.dtype) -> float:
    """γ(n): the error of an inner product of ``length`` terms, relative to the sum of their absolute values."""
    ulp = 2.0**-52 if dtype == torch.float64 else 2.0**-23
    return max(8 * math.sqrt(max(length, 1)), length / 8) * ulp


# CUDA products of 16-bit operands can write float32 directly since torch 2.8. (Comparing versions takes microseconds.)
_WIDE_PRODUCTS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)


def _native_float32_out(x: Tensor) -> bool:
    return _WIDE_PRODUCTS and x.is_cuda


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
        if _native_float32_out(x):
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
    if x.dtype in _LOW and not _native_float32_out(x):
        x, y = x.float(), y.float()
    if x.dtype in _LOW:
        if fresh:
            torch.mm(x, y, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, x, y, out_dtype=torch.float32, out=total)
    elif fresh:
        torch.mm(x, y, out=total)
    else:
        total.addmm_(x, y)
