"""The norm pass on CUDA: layers of equal shape in one launch. The slow twin is `records.Outer.norm` and `Tensor.sum`.

In bfloat16 a transformer's step is bound by launches, not arithmetic; eight launches a layer for its norm would
double it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lambdacgd.clipping import precision
from lambdacgd.clipping.fused import kernels
from lambdacgd.clipping.records import Norm, Outer

_TILE, _DEPTH = 64, 64


def usable(x: Tensor) -> bool:
    """CUDA tensors outside a graph capture (whose replays would read a stale table of addresses)."""
    return usable_on(x.device)


def usable_on(device: torch.device) -> bool:
    return device.type == "cuda" and kernels() is not None and not torch.cuda.is_current_stream_capturing()


def _fits(record: Outer) -> bool:
    a, b = record.a, record.b
    if callable(a) or callable(b) or record.sizes[1] < 2 or a.dtype != b.dtype:
        return False
    if a.dtype == torch.float32 and not precision.tf32_in_use(a.device):
        return False
    if a.dtype not in (torch.float32, torch.bfloat16) or a.stride(2) != 1 or b.stride(2) != 1:
        return False
    if record.sizes[1] * max(a.stride(1), b.stride(1)) >= 1 << 31:  # the limit of an index, where time comes first
        return False
    return a.data_ptr() % 16 == 0 and b.data_ptr() % 16 == 0


def gram_norms(records: list[Outer]) -> list[tuple[list[int], Norm]]:
    """Norms of those records that fit a launch: positions in the list, and their norms as rows."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for k, record in enumerate(records):
        if _fits(record):
            key = (record.dtype, record.sizes, record.a.stride(), record.b.stride())  # type: ignore[union-attr]
            groups.setdefault(key, []).append(k)
    if not groups:
        return []
    device = records[0].device
    order = [records[k] for members in groups.values() for k in members]
    addresses = tuple(x.data_ptr() for r in order for x in (r.a, r.b))  # type: ignore[union-attr]
    table = _table(addresses, device)
    found, start = [], 0
    for (dtype, sizes, a_stride, b_stride), members in groups.items():
        examples, tokens, inner, outer = sizes
        tiles = -(-tokens // _TILE)
        pairs = tiles * (tiles + 1) // 2
        out = torch.empty(len(members), examples, pairs, 5, dtype=torch.float32, device=device)
        kernels().gram_kernel[(pairs, examples, len(members))](
            table[2 * start :], out, examples, tokens, inner, outer,
            a_stride[0], a_stride[1], b_stride[0], b_stride[1], pairs,
            LOW=dtype == torch.bfloat16, TILE=_TILE, DEPTH=_DEPTH if dtype == torch.bfloat16 else _DEPTH // 2,
            EXACT=False, num_warps=4, num_stages=3,
        )  # fmt: skip
        square, trace_a, trace_b, gram_a, gram_b = out.sum(2).unbind(2)  # each [layers, B]
        gamma = precision.accumulation_unit(max(inner, outer), dtype)
        kappa = precision.folding_unit(dtype, device)
        norm = Norm(square, trace_a, trace_b, gram_a.sqrt(), gram_b.sqrt(), gamma, kappa, fold_a=inner < outer)
        found.append((members, norm))
        start += len(members)
    return found


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
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    width, examples, block = sum(sizes), first.shape[0], 128
    rows = tuple(
        v for g, start in zip(gradients, starts, strict=True)
        for v in (g.data_ptr(), g.stride(0), g.stride(1), g.shape[1], g.shape[2], start)
    )  # fmt: skip
    out = torch.empty(examples, width, dtype=torch.float32, device=first.device)
    kernels().column_sum_kernel[(-(-max(sizes) // block), examples, len(gradients))](
        _table(rows, first.device), out, width, LOW=first.dtype == torch.bfloat16, BLOCK=block, ROWS=16, num_warps=4
    )
    return list(out.split(sizes, 1))


def layer_norm_sums(x: Tensor, gradient: Tensor, mean: Tensor, rstd: Tensor, size: int) -> tuple[Tensor, Tensor] | None:
    """Per-example Σ_t b∘x̂ and Σ_t b [B, size] in one launch; None where the kernel does not fit."""
    if not usable(x) or not x.is_contiguous() or x.dtype != torch.float32 or mean.dtype != torch.float32:
        return None
    gradient = gradient.contiguous()
    examples = x.shape[0]
    tokens = x.numel() // (examples * size)
    scale, shift = torch.empty(2, examples, size, dtype=torch.float32, device=x.device).unbind(0)
    kernels().layer_norm_kernel[(-(-size // 128), examples)](
        x, gradient, mean, rstd, scale, shift, tokens, size, BLOCK=128, ROWS=16, num_warps=4
    )
    return scale, shift
