"""Per-example gradients that are kept, on CUDA: a convolution's without its patches, and their weighted sum in one
reading. The slow twins are `records.Outer.materialise` and `records.Stored`.

Launches hold no tables of addresses, so that CUDA graphs may replay them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lambdacgd.clipping import precision


@lru_cache(maxsize=1)
def kernels() -> Any:
    """The Triton kernels, or None where they cannot run."""
    if not torch.cuda.is_available():
        return None
    try:
        from lambdacgd.clipping import kernels as module
    except ImportError:
        return None
    return module


def _usable(x: Tensor) -> bool:
    return x.device.type == "cuda" and kernels() is not None


def patch_gradients(image: Tensor, response: Tensor, geometry: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Per-example gradients [B, O, C, *kernel] of a two-dimensional convolution's weight and their squared norms [B];
    None where the kernel does not fit.

    ``image`` [B, C, H, W] is padded, ``response`` is [B, O, *out]; products are in TF32 or in their own 16 bits, added
    up in float32.
    """
    if not _usable(image) or image.dim() != 4 or image.dtype == torch.float64:
        return None
    if image.dtype == torch.float32 and not precision.tf32_in_use(image.device):
        return None
    examples, outer = response.shape[:2]
    if not 0 < examples <= 65535:  # the limit of a grid's second side
        return None
    kernel: tuple[int, int] = geometry["kernel"]
    columns = image.shape[1] * kernel[0] * kernel[1]
    positions, width = math.prod(response.shape[2:]), response.shape[3]
    # Not its strides: those of a side of length one are anything (a grey channels_last image has 1 for its channel).
    height, across = image.shape[2:]
    if max(image.shape[1] * height * across, outer * positions, outer * columns) >= 1 << 31:  # the limit of an index
        return None
    image, response = image.contiguous(), response.contiguous()
    rows, inner = _tile(outer, 128), _tile(columns, 64)
    tiles = -(-outer // rows) * -(-columns // inner)
    out = torch.empty(examples, outer, image.shape[1], *kernel, dtype=torch.float32, device=image.device)
    squares = torch.empty(examples, tiles, dtype=torch.float32, device=image.device)
    kernels().patch_gradient_kernel[(tiles, examples)](
        image, response, out, squares, outer, positions, width, columns, height * across, across,
        *geometry["stride"], *geometry["dilation"],
        KERNEL=kernel[0] * kernel[1], KERNEL_X=kernel[1], OUTER=rows, INNER=inner,
        DEPTH=32 if image.dtype == torch.float32 else 64, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out, squares.sum(1)


def weighted_sum(total: Tensor, gradients: Tensor, factor: Tensor, keep: Tensor | None, *, fresh: bool) -> bool:
    """``total += Σ_i factor_i g_i`` (``fresh``: ``=``) over the examples kept (None: all), reading gradients
    [B, *shape] once; False where the kernel does not fit.
    """
    if not _usable(gradients) or not gradients.is_contiguous():
        return False
    if any(x.dtype != torch.float32 for x in (gradients, factor, total)) or not total.is_contiguous():
        return False
    examples, size = gradients.shape[0], total.numel()
    if size == 0:  # a grid of no programs cannot be launched
        return True
    kernels().weighted_sum_kernel[(-(-size // 128),)](
        gradients, factor.contiguous(), factor if keep is None else keep.view(torch.uint8), total, examples, size,
        ALL=keep is None, FRESH=fresh, BLOCK=128, ROWS=16, num_warps=4,
    )  # fmt: skip
    return True


def group_norm_sums(x: Tensor, gradient: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor] | None:
    """Per-example Σ b∘x̂ and Σ b [B, C] over the positions of contiguous x and b [B, C, *space]; None where the kernel
    does not fit.
    """
    if not _usable(x) or x.dtype != torch.float32 or gradient.dtype != torch.float32:
        return None
    examples, channels = x.shape[:2]
    positions = math.prod(x.shape[2:])
    if x.numel() == 0 or positions >= 1 << 31 or examples * channels >= 1 << 31:
        return None
    scale, shift = torch.empty(2, examples, channels, dtype=torch.float32, device=x.device).unbind(0)
    kernels().group_norm_kernel[(examples * channels,)](
        x, gradient, mean, rstd, scale, shift, positions, channels // mean.shape[1],
        BLOCK=min(1024, max(32, 1 << (positions - 1).bit_length())), num_warps=4,
    )  # fmt: skip
    return scale, shift


def _tile(size: int, most: int) -> int:
    """A power of two from 16, the smallest side of a product, that holds ``size`` or is the most."""
    return max(16, min(most, 1 << (size - 1).bit_length()))
