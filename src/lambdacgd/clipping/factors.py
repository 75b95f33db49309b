"""From norms to clip factors that cannot let a contribution exceed the clipping norm.

Guarantee
---------
For every example i the contribution added to the sum, ``w_i c_i g_i`` as the products round it, has norm at most
ζ(1 + tol) with ``tol = sensitivity_tolerance(dtype)``, and is exactly zero if any part of g_i is not finite or w_i = 0.
The norm used is an upper bound: with ‖·‖ from Gram matrices G_a, G_b of one layer (see `precision` for γ and κ),

    U = ( √(max(0, ⟨G_a, G_b⟩) + γ(tr G_a ‖G_b‖ + tr G_b ‖G_a‖ + ‖G_a‖ ‖G_b‖)) + κ ‖folded‖_F ‖G_other‖^½ )²

which bounds the squared norm of that layer's rounded contribution divided by c_i. The tolerance leaves room for the
rounding of the factor itself and for the float32 accumulation of a few thousand contributions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from lambdacgd.clipping.records import Norm

Mode = Literal["flat", "per-layer", "automatic"]

#: AUTO-S of Bu et al. (2022): g_i / (‖g_i‖ + 0.01), times ζ. Any positive constant keeps the norm below ζ.
AUTOMATIC_STABILITY = 0.01


def sensitivity_tolerance(dtype: torch.dtype) -> float:
    """``tol``: noise must cover sensitivity ζ(1 + tol) when sums are kept in ``dtype`` (float32 or float64)."""
    return 2.0**-30 if dtype == torch.float64 else 2.0**-10


def _column(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Constants on the device, copied there once."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # no copies from the host in a CUDA graph
        return torch.cat([torch.full((1, 1), v, dtype=dtype, device=device) for v in values])
    return _copied_column(values, dtype, device)


@lru_cache(maxsize=64)
def _copied_column(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)


def upper_squares(norms: list[Norm]) -> Tensor:
    """[parameters, B]: upper bounds on the squared norms, the norms' own errors included."""
    exact = [n.square for n in norms if n.trace_a is None]
    bounded = [n for n in norms if n.trace_a is not None]
    if not bounded:
        return _joined(exact)
    square = _joined([n.square for n in bounded]).clamp_min(0)
    trace_a, trace_b, gram_a, gram_b = (
        _joined([getattr(n, field) for n in bounded]) for field in ("trace_a", "trace_b", "gram_a", "gram_b")
    )
    many = [1 if n.square.dim() == 1 else n.square.shape[0] for n in bounded]
    units = [(n.gamma, n.kappa if n.fold_a else 0.0, 0.0 if n.fold_a else n.kappa) for n in bounded]
    gamma, kappa_a, kappa_b = (
        _column(tuple(u[k] for u, m in zip(units, many, strict=True) for _ in range(m)), square.dtype, square.device)
        for k in range(3)
    )
    error = gamma * (trace_a * gram_b + trace_b * gram_a + gram_a * gram_b)
    # Squares too small for the type are lost from one Gram matrix, whatever the other holds: T·n of them, below 2²⁶.
    error = error + torch.finfo(square.dtype).tiny * 2.0**26 * (trace_a + trace_b)
    fold = kappa_a * (trace_a * gram_b).sqrt() + kappa_b * (trace_b * gram_a).sqrt()
    bound = ((square + error).sqrt() + fold).square()
    return torch.cat([bound, _joined(exact)]) if exact else bound


def _joined(parts: list[Tensor]) -> Tensor:
    """[B] and [parameters, B] as rows of one; as few operations as possible, for models bound by the host."""
    if all(x.dim() == 1 for x in parts):
        return torch.stack(parts)
    return torch.cat([x.unsqueeze(0) if x.dim() == 1 else x for x in parts])


@dataclass
class Factors:
    """What the sum pass needs: ``weight`` [groups, B] (loss scale folded in), ``keep`` [B], ``norms`` [B]."""

    weight: Tensor
    keep: Tensor
    norms: Tensor
    finite: Tensor


def clip_factors(
    groups: list[list[Norm]],
    *,
    max_grad_norm: float,
    mode: Mode,
    scale: float | Tensor,
    weights: Tensor | None,
    layers: int = 1,
) -> Factors:
    """Factors for examples whose recorded gradients are ``1/scale`` times their own (the batch mean, a loss scale)."""
    squares = torch.stack([upper_squares(g).sum(0) for g in groups])
    slack = 1 + (2.0**-45 if squares.dtype == torch.float64 else 2.0**-18)
    upper = squares.sqrt() * (scale * slack)
    if weights is not None:
        weights = weights.to(upper).clamp(0, 1)  # whatever was written into them since
    total = torch.linalg.vector_norm(upper, dim=0)
    finite = torch.isfinite(total)
    if mode == "automatic":  # flat
        weight = max_grad_norm / (upper + AUTOMATIC_STABILITY)
    else:
        share = max_grad_norm / layers**0.5 if mode == "per-layer" else max_grad_norm
        weight = (share / upper).clamp_max(1.0)  # a zero gradient gives inf, so 1
    if weights is not None:
        weight = weight * weights
    keep = finite if weights is None else finite & (weights != 0)
    weight = torch.where(keep, weight * scale, torch.zeros((), dtype=weight.dtype, device=weight.device))
    return Factors(weight, keep, total, finite)
