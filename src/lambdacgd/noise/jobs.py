"""From the caller's tensors to checked work: which memory gets which part of the field. Nothing is touched here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lambdacgd.noise.layout import Entry, Layout, LayoutError, clean_name

SUM_TYPES = (torch.float32, torch.float64)
OUT_TYPES = (torch.float32, torch.float64, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Job:
    """Noise for one tensor: ``target`` = ``source`` + noise, elements ``offset`` … of the layout's ``entry``."""

    entry: Entry
    source: torch.Tensor
    target: torch.Tensor
    offset: int


def match(
    layout: Layout,
    sums: Mapping[str, torch.Tensor],
    *,
    out: Mapping[str, torch.Tensor] | None = None,
    offsets: Mapping[str, int] | None = None,
) -> list[Job]:
    """The jobs for these tensors, in the layout's order; an error, before anything is written, if they do not fit."""
    tensors = _by_clean_name(sums, "sums")
    targets = tensors if out is None else _by_clean_name(out, "out")
    starts = {} if offsets is None else {clean_name(name): offset for name, offset in offsets.items()}
    expected = layout.by_name
    for given, what in ((tensors, "sums"), (targets, "out")):
        if missing := expected.keys() - given.keys():
            raise LayoutError(
                f"{what} lack {sorted(missing)[0]!r} ({len(missing)} missing): every tensor of the layout must come"
            )
        if unknown := given.keys() - expected.keys():
            raise LayoutError(
                f"{what} hold {sorted(unknown)[0]!r}, which is not in the layout ({len(unknown)} unknown)"
            )
    if unknown := starts.keys() - expected.keys():
        raise LayoutError(f"offsets hold {sorted(unknown)[0]!r}, which is not in the layout")
    jobs = []
    for entry in layout.entries:
        source, target = tensors[entry.name], targets[entry.name]
        _check(entry, source, SUM_TYPES, "sum", starts.get(entry.name))
        if target is not source:
            _check(entry, target, OUT_TYPES, "out", starts.get(entry.name))
            if target.shape != source.shape or target.device != source.device:
                raise LayoutError(
                    f"out of {entry.name!r} has shape {tuple(target.shape)} on {target.device}, its sum "
                    f"{tuple(source.shape)} on {source.device}; they must match"
                )
        jobs.append(Job(entry, source, target, starts.get(entry.name, 0)))
    return jobs


def _by_clean_name(tensors: Mapping[str, torch.Tensor], what: str) -> dict[str, torch.Tensor]:
    cleaned = {clean_name(name): tensor for name, tensor in tensors.items()}
    if len(cleaned) != len(tensors):
        raise LayoutError(f"two of the {what} have the same name once wrapper names are taken out")
    return cleaned


def _check(entry: Entry, tensor: torch.Tensor, types: tuple[torch.dtype, ...], what: str, offset: int | None) -> None:
    name = entry.name
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} of {name!r} is a {type(tensor).__name__}; it must be a torch.Tensor")
    if hasattr(tensor, "to_local"):
        raise TypeError(
            f"{what} of {name!r} is a DTensor; pass its to_local() and the shard's place in offsets={{{name!r}: …}}"
        )
    if tensor.dtype not in types:
        raise TypeError(
            f"{what} of {name!r} has dtype {tensor.dtype}; allowed are {', '.join(str(t) for t in types)}. Sums are "
            f"accumulated and noised in float32 or float64 and rounded once, after the noise"
        )
    if tensor.layout != torch.strided:
        raise TypeError(f"{what} of {name!r} is sparse ({tensor.layout}); noise is dense: call to_dense() first")
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise LayoutError(
            f"{what} of {name!r} is an expanded view whose elements share memory; call contiguous() first"
        )
    if offset is None:
        if tuple(tensor.shape) != entry.shape:
            raise LayoutError(
                f"{what} of {name!r} has shape {tuple(tensor.shape)}, the layout {entry.shape}; for a shard give its "
                f"first row-major index in offsets"
            )
    elif isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset <= entry.elements - tensor.numel():
        raise LayoutError(
            f"a shard of {tensor.numel()} elements at offset {offset!r} does not fit into {name!r}, "
            f"which has {entry.elements}"
        )
