"""The two passes after a backward pass: norms of all records, then their weighted sums; many layers at once where it
pays.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lambdacgd.clipping import grouped, precision
from lambdacgd.clipping.records import ColumnSum, Norm, Outer, Record, Stored

# Stored per-example gradients up to this many elements are put side by side and summed in one product.
_SMALL = 1 << 13
# Layers whose norms share a launch on CUDA; several launches, so that they overlap with the rest of the backward pass.
_TOGETHER = 24
# Sets of small parameters that get a buffer of their own; which take part may change with every batch (LayerDrop).
_PACKS = 16


def merge(found: list[Record]) -> Record:
    """One record for all uses of a parameter, cross terms included; per-example gradients where no shorter way
    exists.
    """
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


class NormPass:
    """Norms of records as they come. On CUDA, layers are collected and normed many at a time while the backward pass
    goes on.

    A parameter that turns out to have several uses is normed again from its merged record.
    """

    def __init__(self) -> None:
        self._usable: bool | None = None
        self._waiting: list[Outer] = []
        self._blocks: list[tuple[list[str], Norm]] = []

    def put(self, record: Record) -> None:
        if type(record) is Outer:
            if self._usable is None:
                self._usable = grouped.usable_on(record.device)
            if not self._usable:
                return
            self._waiting.append(record)
            if len(self._waiting) >= _TOGETHER:
                self._launch()

    def _launch(self) -> None:
        waiting, self._waiting = self._waiting, []
        for members, norm in grouped.gram_norms(waiting):
            self._blocks.append(([waiting[k].name for k in members], norm))

    def finish(self, records: list[Record], merged: set[str]) -> list[tuple[list[str], Norm]]:
        """(names, norms as rows) covering every record; ``merged`` names have several uses."""
        if self._waiting:
            self._launch()
        blocks = [block for block in self._blocks if merged.isdisjoint(block[0])]
        done = {name for names, _ in blocks for name in names}
        return blocks + [([r.name], r.norm()) for r in records if r.name not in done]


class Pack:
    """Small per-example gradients side by side: one norm and one product for all biases and scales of a model."""

    def __init__(self, records: list[Stored]) -> None:
        self.records = records
        self.flat = torch.cat([r.flat() for r in records], 1)

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(r.name for r in self.records)

    def buffers(self) -> tuple[Tensor, dict[str, Tensor]]:
        """One buffer for the sums of all, and its views by name."""
        whole = torch.empty(self.flat.shape[1], dtype=self.flat.dtype, device=self.flat.device)
        parts = whole.split([r.size for r in self.records])
        return whole, {r.name: p.view(r.gradients.shape[1:]) for r, p in zip(self.records, parts, strict=True)}


def pack_small(records: list[Record], *, apart: bool) -> tuple[list[Pack], list[Record]]:
    """Split records into packs of small stored ones, by type, and the rest. Odd sizes go last, to keep the others
    aligned.
    """
    kinds: dict[torch.dtype, list[Stored]] = {}
    alone: list[Record] = []
    for record in records:
        if not apart and isinstance(record, Stored) and record.size <= _SMALL:
            kinds.setdefault(record.gradients.dtype, []).append(record)
        else:
            alone.append(record)
    return [Pack(sorted(rs, key=lambda r: r.size % 64 != 0)) for rs in kinds.values()], alone


class Totals:
    """Buffers for the sums, kept from step to step: stable addresses for noise tables and CUDA graphs."""

    def __init__(self) -> None:
        self.filled: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        self._packs: dict[tuple[str, ...], tuple[Tensor, dict[str, Tensor]]] = {}

    def add(self, record: Record, like: Tensor, factor: Tensor, keep: Tensor | None) -> None:
        name = record.name
        fresh = name not in self.filled
        total = self.filled.get(name)
        if total is None:
            total = self._buffers.get(name)
        if total is None:
            total = torch.empty(like.shape, dtype=precision.accumulator(like.dtype), device=like.device)
            self._buffers[name] = total
        self.filled[name] = total
        record.add(total, factor.to(total.dtype), keep, fresh=fresh)

    def add_pack(self, pack: Pack, factor: Tensor, keep: Tensor | None) -> None:
        known = self._packs.get(pack.key)
        if known is None and len(self._packs) < _PACKS:
            known = self._packs[pack.key] = pack.buffers()
        if known is not None:
            whole, views = known
            fresh = not any(name in self.filled for name in views)
            if fresh or all(self.filled.get(name) is view for name, view in views.items()):
                Stored("", pack.flat).add(whole, factor.to(whole.dtype), keep, fresh=fresh)
                self.filled.update(views)
                return
        for record in pack.records:  # the small parameters of this physical batch are not those of the last one
            self.add(record, record.gradients[0], factor, keep)

    def finish(self) -> None:
        """All records of a backward pass have been added."""

    def clear(self) -> None:
        self.filled = {}

    def zeros(self, name: str, like: Tensor) -> Tensor:
        return torch.zeros(like.shape, dtype=precision.accumulator(like.dtype), device=like.device)
