"""The two passes after a backward pass: norms of all records, then their weighted sums; many layers at once where it pays."""

from __future__ import annotations

import torch
from torch import Tensor

from lambdacgd.clipping import grouped
from lambdacgd.clipping.records import ColumnSum, Norm, Outer, Record, Stored

# Stored per-example gradients up to this many elements are put side by side and summed in one product.
_SMALL = 1 << 16


def merge(found: list[Record]) -> Record:
    """One record for all uses of a parameter, cross terms included; per-example gradients where no shorter way exists."""
    whole = found[0]
    if len(found) == 1:
        return whole
    found = [r.formed() if isinstance(r, ColumnSum) else r for r in found]
    whole = found[0]
    for record in found[1:]:
        joined = whole.merge(record) or record.merge(whole)
        if joined is None:
            every = slice(0, whole.examples)
            joined = Stored(whole.name, whole.materialise(every) + record.materialise(every))
        whole = joined
    return whole


def resolve_sums(merged: dict[str, Record]) -> list[Record]:
    """Form the biases' gradients, on CUDA those of all layers in one launch."""
    waiting = [r for r in merged.values() if isinstance(r, ColumnSum)]
    formed: dict[str, Record] = {}
    if len(waiting) > 1 and grouped.usable(waiting[0].b):
        sums = grouped.column_sums([r.b for r in waiting])
        if sums is not None:
            formed = {r.name: Stored(r.name, s) for r, s in zip(waiting, sums, strict=True)}
    for r in waiting:
        if r.name not in formed:
            formed[r.name] = r.formed()
    return [formed.get(name, record) for name, record in merged.items()]


def norms(records: list[Record]) -> list[Norm]:
    """Every record's norm, on CUDA those of layers of equal shape in one launch."""
    found: dict[int, Norm] = {}
    linear = [k for k, r in enumerate(records) if type(r) is Outer]
    if linear and grouped.usable_on(records[linear[0]].device):  # type: ignore[attr-defined]
        together = grouped.gram_norms([records[k] for k in linear])  # type: ignore[misc]
        found = {linear[k]: norm for k, norm in together.items()}
    return [found[k] if k in found else r.norm() for k, r in enumerate(records)]


class Pack:
    """Small per-example gradients side by side: one norm and one product for all biases and scales of a model."""

    def __init__(self, records: list[Stored]) -> None:
        self.records = records
        self.flat = torch.cat([r.gradients.flatten(1) for r in records], 1)

    def add(self, sums: dict[str, Tensor], factor: Tensor, keep: Tensor | None) -> None:
        whole = Stored("", self.flat).add(None, factor, keep)
        parts = whole.split([r.gradients[0].numel() for r in self.records])
        known = []
        for record, part in zip(self.records, parts, strict=True):
            view = part.view(record.gradients.shape[1:])
            if record.name in sums:
                known.append((sums[record.name], view))
            else:
                sums[record.name] = view
        if known:
            torch._foreach_add_([k for k, _ in known], [p for _, p in known])


def pack_small(records: list[Record], *, apart: bool) -> tuple[list[Pack], list[Record]]:
    """Split records into packs of small stored ones, by type, and the rest. Odd sizes go last, to keep the others aligned."""
    kinds: dict[torch.dtype, list[Stored]] = {}
    alone: list[Record] = []
    for record in records:
        if not apart and isinstance(record, Stored) and record.gradients[0].numel() <= _SMALL:
            kinds.setdefault(record.gradients.dtype, []).append(record)
        else:
            alone.append(record)
    return [Pack(sorted(rs, key=lambda r: r.gradients[0].numel() % 64 != 0)) for rs in kinds.values()], alone
