"""Per-example gradients that are kept, on CUDA: a convolution's without its patches, and their weighted sum in one
reading. The slow twins are `records.Outer.materialise` and `records.Stored`.

Launches hold no tables of addresses, so that CUDA graphs may replay them.
"""

from __future__ import annotations

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
    """Per-example gradients [B, O, C·K] of a two-dimensional convolution's weight and their squared norms [B]; None
    where the kernel does not fit.

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
    largest = max(image[0].numel(), response[0].numel(), outer * columns)
    if largest >= 1 << 31:  # the limit of an index
        return None
    image, response = image.contiguous(), response.contiguous()
    positions, width = response[0, 0].numel(), response.shape[3]
    # Not its strides: those of a side of length one are anything (a grey channels_last image has 1 for its channel).
    height, across = image.shape[2:]
    rows, inner = _tile(outer, 128), _tile(columns, 64)
    tiles = -(-outer // rows) * -(-columns // inner)
    out = torch.empty(examples, outer, columns, device=image.device)
    squares = torch.empty(examples, tiles, device=image.device)
    kernels().patch_gradient_kernel[(tiles, examples)](
        image, response, out, squares, outer, positions, width, columns, height * across, across,
        *geometry["stride"], *geometry["dilation"],
        KERNEL=kernel[0] * kernel[1], KERNEL_X=kernel[1], OUTER=rows, INNER=inner,
        DEPTH=32 if image.dtype == torch.float32 else 64, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out, squares.sum(1)


def weighted_sum(total: Tensor, gradients: Tensor, factor: Tensor, keep: Tensor, *, fresh: bool) -> bool:
    """``total += Σ_i factor_i g_i`` (``fresh``: ``=``) over the examples kept, reading [B, n] gradients once; False
    where the kernel does not fit.
    """
    if not _usable(gradients) or not gradients.is_contiguous():
        return False
    if any(x.dtype != torch.float32 for x in (gradients, factor, total)) or not total.is_contiguous():
        return False
    examples, size = gradients.shape
    if size == 0:  # a grid of no programs cannot be launched
        return True
    kernels().weighted_sum_kernel[(-(-size // 128),)](
        gradients, factor.contiguous(), keep.view(torch.uint8), total, examples, size,
        FRESH=fresh, BLOCK=128, ROWS=16, num_warps=4,
    )  # fmt: skip
    return True


def _tile(size: int, most: int) -> int:
    """A power of two from 16, the smallest side of a product, that holds ``size`` or is the most."""
    return max(16, min(most, 1 << (size - 1).bit_length()))
