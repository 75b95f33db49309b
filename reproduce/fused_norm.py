"""GroupNorm without affine, ReLU and 2×2 max pooling in one kernel, for the sweeps' CNN on CUDA.

PyTorch's own took at least a fifth of a captured step on an H200. A group is one program's, so nothing crosses
examples. Elsewhere, and for other types and shapes, PyTorch's own operations run.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_LARGEST = 8192  # numbers in a group that a program holds


@lru_cache(maxsize=1)
def _kernels() -> Any:
    try:
        from reproduce import fused_norm_kernels
    except ImportError:
        return None
    return fused_norm_kernels


class NormReLU(nn.Module):
    """``GroupNorm(groups, affine=False)``, ReLU, and ``MaxPool2d(2)`` if ``pool``."""

    def __init__(self, groups: int, eps: float, *, pool: bool) -> None:
        super().__init__()
        self.groups, self.eps, self.pool = groups, eps, pool

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cuda" and self._fits(x) and _kernels() is not None:
            out: Tensor = _Fused.apply(x, self.groups, self.eps, self.pool)
            return out
        y = F.relu(F.group_norm(x, self.groups, eps=self.eps))
        return F.max_pool2d(y, 2) if self.pool else y

    def _fits(self, x: Tensor) -> bool:
        if x.dim() != 4 or x.dtype != torch.float32 or x.shape[1] % self.groups:  # PyTorch says what is wrong there
            return False
        size = math.prod(x.shape[1:]) // self.groups
        power = size & (size - 1) == 0 and 4 <= size <= _LARGEST
        return power and (not self.pool or (x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0))

    def extra_repr(self) -> str:
        return f"{self.groups}, eps={self.eps}, pool={self.pool}"


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int, eps: float, pool: bool) -> Tensor:
        x = x.contiguous()
        height, width = x.shape[2:]
        out = x.new_empty(*x.shape[:2], *((height // 2, width // 2) if pool else (height, width)))
        programs, size = x.shape[0] * groups, math.prod(x.shape[1:]) // groups
        moments = x.new_empty(programs, 2)
        if programs:
            kernel = _kernels().forward_kernel
            kernel[(programs,)](x, out, moments, eps, SIZE=size, WIDTH=width, POOL=pool, num_warps=_warps(size))
        ctx.save_for_backward(x, moments)
        ctx.pool = pool
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, moments = ctx.saved_tensors
        out = torch.empty_like(x)
        if programs := moments.shape[0]:
            size = x.numel() // programs
            _kernels().backward_kernel[(programs,)](
                x, gradient.contiguous(), moments, out,
                SIZE=size, WIDTH=x.shape[3], POOL=ctx.pool, num_warps=_warps(size),
            )  # fmt: skip
        return out, None, None, None


def _warps(size: int) -> int:
    return max(1, min(8, size // 512))


def fuse(model: nn.Sequential) -> nn.Sequential:
    """Put ``NormReLU`` in the place of GroupNorm, ReLU and pooling, in place; other modules keep their names."""
    layers = list(model)
    for i, norm in enumerate(layers[:-1]):
        if not isinstance(norm, nn.GroupNorm) or norm.affine or not isinstance(layers[i + 1], nn.ReLU):
            continue
        after = layers[i + 2] if i + 2 < len(layers) else None
        pool = isinstance(after, nn.MaxPool2d) and _halves(after)
        model[i] = NormReLU(norm.num_groups, norm.eps, pool=pool)
        for j in range(i + 1, i + 2 + pool):
            model[j] = nn.Identity()
    return model


def _halves(pool: nn.MaxPool2d) -> bool:
    sides = pool.kernel_size in (2, (2, 2)) and pool.stride in (2, (2, 2))
    return sides and not pool.padding and pool.dilation == 1 and not pool.ceil_mode and not pool.return_indices
