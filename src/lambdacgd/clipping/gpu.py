"""Launches of the Triton kernels on CUDA. Every function has a slow twin, which its caller uses where it does not fit.

Two families. *Tables*: norms and sums of many layers in one launch, their tensors in a table of addresses, because in
bfloat16 a transformer's step is bound by launches, not arithmetic; eight launches a layer for its norm would double it.
Twins: `backward.Outer.norm` and ``Tensor.sum``. *Kept gradients*: a convolution's without its patches, and their
weighted sum in one reading; these hold no addresses, so that CUDA graphs may replay them. Twins:
`backward.Outer.materialise` and `backward.Stored`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lambdacgd.clipping import bounds
from lambdacgd.clipping.bounds import Norm

DEVICE = "cuda"  #: callers ask for it before they call: on other devices no step comes here
_TILE, _DEPTH = 64, 64


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


# --- many layers in one launch ----------------------------------------------------------------------------------------


def may_use_tables() -> bool:
    """Outside a graph capture, whose replays would read a stale table of addresses."""
    return kernels() is not None and not torch.cuda.is_current_stream_capturing()


Kind = tuple[torch.dtype, torch.Size, int, tuple[int, ...], tuple[int, ...]]  #: of a pair: see `_kind_of`


def _kind_of(a: Tensor, b: Tensor) -> Kind | None:
    """What the pairs of one launch have in common; None where the kernel does not fit."""
    dtype, shape, a_stride, b_stride = a.dtype, a.shape, a.stride(), b.stride()
    if shape[1] < 2 or dtype != b.dtype or dtype not in (torch.float32, torch.bfloat16):
        return None
    if dtype == torch.float32 and not bounds.tf32_in_use(a.device):
        return None
    if a_stride[2] != 1 or b_stride[2] != 1 or a.data_ptr() % 16 or b.data_ptr() % 16:
        return None
    if shape[1] * max(a_stride[1], b_stride[1]) >= 1 << 31:  # the limit of an index, where time comes first
        return None
    return dtype, shape, b.shape[2], a_stride, b_stride


Rounding = tuple[float, float, bool]  #: gamma, kappa and fold_a of `Norm`


def norm_of(grams: Tensor, rounding: Rounding) -> Norm:
    """What `gram_norms` found, [layers, B, 5], as a norm of as many rows."""
    square, trace_a, trace_b = grams[..., :3].unbind(2)
    gamma, kappa, fold_a = rounding
    return Norm(square, trace_a, trace_b, *grams[..., 3:].sqrt().unbind(2), gamma=gamma, kappa=kappa, fold_a=fold_a)


def gram_norms(pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[list[int], Tensor, Rounding]]:
    """Norms of Σ_t b_t a_tᵀ for those pairs (a [B, T, in], b [B, T, out]) that fit a launch.

    Returns:
        For every launch, positions in the list, and for each of them and each example ⟨G_a, G_b⟩, tr G_a, tr G_b,
        ‖G_a‖² and ‖G_b‖²; `norm_of` knows them.
    """
    groups: dict[Kind, list[int]] = {}
    for k, (a, b) in enumerate(pairs):
        kind = _kind_of(a, b)
        if kind is not None:
            groups.setdefault(kind, []).append(k)
    if not groups:
        return []
    device = pairs[0][0].device
    table = _table(tuple(x.data_ptr() for members in groups.values() for k in members for x in pairs[k]), device)
    norms, start = [], 0
    for (dtype, shape, outer, a_stride, b_stride), members in groups.items():
        examples, tokens, inner = shape
        tiles = -(-tokens // _TILE)
        tile_pairs = tiles * (tiles + 1) // 2
        out = torch.empty(len(members), examples, tile_pairs, 5, dtype=torch.float32, device=device)
        kernels().gram_kernel[(tile_pairs, examples, len(members))](
            table[2 * start :], out, examples, tokens, inner, outer,
            a_stride[0], a_stride[1], b_stride[0], b_stride[1], tile_pairs,
            LOW=dtype == torch.bfloat16, TILE=_TILE, DEPTH=_DEPTH if dtype == torch.bfloat16 else _DEPTH // 2,
            num_warps=4, num_stages=3,
        )  # fmt: skip
        gamma, kappa = bounds.accumulation_unit(max(inner, outer), dtype), bounds.folding_unit(dtype, device)
        norms.append((members, out.sum(2), (gamma, kappa, inner < outer)))
        start += len(members)
    return norms


@lru_cache(maxsize=64)
def _table(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Addresses on the device; the caching allocator often gives the same ones step after step.

    Sent from pinned memory: a copy from pageable memory may wait for the device.
    """
    return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def column_sums(gradients: list[Tensor]) -> list[Tensor] | None:
    """Σ_t of each [B, T, d_l], as views of one buffer [B, Σ d_l]; None where they do not fit one launch."""
    first = gradients[0]
    if any(g.dtype != first.dtype or g.stride(2) != 1 or g.shape[0] != first.shape[0] for g in gradients):
        return None
    if first.dtype not in (torch.float32, torch.bfloat16):
        return None
    sizes = [g.shape[2] for g in gradients]
    starts = [0, *accumulate(sizes)]
    width, examples, block = sum(sizes), first.shape[0], 128
    rows = tuple(
        v for g, start in zip(gradients, starts, strict=False)
        for v in (g.data_ptr(), g.stride(0), g.stride(1), g.shape[1], g.shape[2], start)
    )  # fmt: skip
    out = torch.empty(examples, width, dtype=torch.float32, device=first.device)
    kernels().column_sum_kernel[(-(-max(sizes) // block), examples, len(gradients))](
        _table(rows, first.device), out, width, LOW=first.dtype == torch.bfloat16, BLOCK=block, ROWS=16, num_warps=4
    )
    return list(out.split(sizes, 1))


WeightedSum = tuple[Tensor, Tensor, Tensor]  #: total, gradients and factor, as `weighted_sum` takes them


def may_sum_together(total: Tensor, gradients: Tensor, factor: Tensor) -> bool:
    """Whether `weighted_sums` takes this one."""
    return may_use_tables() and _can_be_summed(total, gradients, factor) and total.numel() > 0


def weighted_sums(sums: list[WeightedSum], keep: Tensor | None, *, fresh: bool) -> None:
    """`weighted_sum` of many layers with the same examples."""
    rows = tuple(
        v for total, gradients, factor in sums
        for v in (gradients.data_ptr(), factor.data_ptr(), total.data_ptr(), total.numel())
    )  # fmt: skip
    most = max(total.numel() for total, _, _ in sums)
    table = _table(rows, sums[0][0].device)
    kernels().weighted_sums_kernel[(-(-most // 128), len(sums))](
        table, table if keep is None else keep.view(torch.uint8), sums[0][1].shape[0],
        ALL=keep is None, FRESH=fresh, BLOCK=128, ROWS=16, num_warps=4,
    )  # fmt: skip


def layer_norm_sums(x: Tensor, gradient: Tensor, mean: Tensor, rstd: Tensor, size: int) -> tuple[Tensor, Tensor] | None:
    """Per-example Σ_t b∘x̂ and Σ_t b [B, size] in one launch; None where the kernel does not fit."""
    if not may_use_tables() or not x.is_contiguous() or x.dtype != torch.float32 or mean.dtype != torch.float32:
        return None
    gradient = gradient.contiguous()
    examples = x.shape[0]
    tokens = x.numel() // (examples * size)
    scale, shift = torch.empty(2, examples, size, dtype=torch.float32, device=x.device).unbind(0)
    kernels().layer_norm_kernel[(-(-size // 128), examples)](
        x, gradient, mean, rstd, scale, shift, tokens, size, BLOCK=128, ROWS=16, num_warps=4
    )
    return scale, shift


# --- per-example gradients that are kept ------------------------------------------------------------------------------


def patch_gradients(
    image: Tensor, response: Tensor, geometry: dict[str, Any], views: int = 1
) -> tuple[Tensor, Tensor] | None:
    """Per-example gradients [B, O, C, *kernel] of a two-dimensional convolution's weight and their squared norms in
    parts, [parts, B]; None where the kernel does not fit.

    ``image`` is [B·views, C, H, W], ``response`` [B·views, O, *out]; the views of an example, neighbours, are added up.
    Products are in TF32 or in their own 16 bits, added up in float32.
    """
    if kernels() is None or image.dim() != 4 or image.dtype == torch.float64:
        return None
    if image.dtype == torch.float32 and not bounds.tf32_in_use(image.device):
        return None
    examples, outer = response.shape[0] // views, response.shape[1]
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
    squares = torch.empty(tiles, examples, dtype=torch.float32, device=image.device)
    kernels().patch_gradient_kernel[(tiles, examples)](
        image, response, out, squares, views, outer, positions, width, columns, height, across,
        *geometry["stride"], *geometry["dilation"], *geometry["padding"],
        KERNEL=kernel[0] * kernel[1], KERNEL_X=kernel[1], OUTER=rows, INNER=inner,
        DEPTH=32 if image.dtype == torch.float32 else 64, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out, squares


def weighted_sum(total: Tensor, gradients: Tensor, factor: Tensor, keep: Tensor | None, *, fresh: bool) -> bool:
    """``total += Σ_i factor_i g_i`` (``fresh``: ``=``) over the examples kept (None: all), reading gradients
    [B, *shape] once; False where the kernel does not fit.
    """
    if kernels() is None or not _can_be_summed(total, gradients, factor):
        return False
    examples, size = gradients.shape[0], total.numel()
    if size == 0:  # a grid of no programs cannot be launched
        return True
    kernels().weighted_sum_kernel[(-(-size // 128),)](
        gradients, factor, factor if keep is None else keep.view(torch.uint8), total, examples, size,
        ALL=keep is None, FRESH=fresh, BLOCK=128, ROWS=16, num_warps=4,
    )  # fmt: skip
    return True


def _can_be_summed(*tensors: Tensor) -> bool:
    return all(x.dtype == torch.float32 and x.is_contiguous() for x in tensors)


def group_norm_sums(x: Tensor, gradient: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor] | None:
    """Per-example Σ b∘x̂ and Σ b [B, C] over the positions of contiguous x and b [B, C, *space]; None where the kernel
    does not fit.
    """
    if kernels() is None or x.dtype != torch.float32 or gradient.dtype != torch.float32:
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
