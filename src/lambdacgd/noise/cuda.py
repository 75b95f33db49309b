"""The noise field on a CUDA device: tables in device memory, one kernel launch for all tensors of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from lambdacgd.noise.combination import Combination
from lambdacgd.noise.jobs import Job
from lambdacgd.noise.layout import GROUP_ELEMENTS

_SPARE_TABLES = 2  # kept ready for CUDA graph capture, during which nothing can be allocated on the host


@dataclass
class _Table:
    """What one launch covers: a row of the kernel's ``meta`` for each tensor, and each tensor's first tile."""

    host: torch.Tensor
    device: torch.Tensor
    sent: torch.cuda.Event | None = None


class CudaBackend:
    """One device's share of a field: the key's words, the tables of the last launches, and the flags.

    ``flags`` is one int32 in device memory: bit 0 says that a sum was not finite, bit 1 that a step left the run.
    """

    def __init__(self, subkey: bytes, device: torch.device) -> None:
        self.device = device
        # Data, never a compile-time constant: Triton keeps compiled constants in a cache on disk.
        words = np.append(np.frombuffer(subkey, dtype="<i4").astype(np.int32), np.int32(1))
        self.key = torch.from_numpy(words).to(device)
        self.flags = torch.zeros(1, dtype=torch.int32, device=device)
        self._no_step = torch.zeros(1, dtype=torch.int64, device=device)
        self._tables: dict[tuple[Any, ...], tuple[tuple[Any, ...], _Table, int]] = {}
        self._free: dict[int, list[_Table]] = {}
        self._captured: list[_Table] = []  # a graph reads these at every replay
        self._constants: dict[tuple[float, ...], torch.Tensor] = {}

    def apply(
        self, jobs: Sequence[Job], combination: Combination, step: int | torch.Tensor, *, read: bool = True
    ) -> None:
        """target = source + scale·d_t·Σ a_j z[t−j] (the noise alone if not ``read``), one launch a pair of dtypes."""
        from lambdacgd.noise.kernel import (
            META_COLUMNS,
            TILE_WARPS,
            noise_kernel,
        )  # Triton, imported only where there is CUDA

        counter, base = (step, 0) if isinstance(step, torch.Tensor) else (self._no_step, step)
        scales = combination.column_scales
        scale = combination.scale
        if scales is not None and base:
            scale, scales = scale * scales[combination.since(base) - 1], None
        kind = lambda job: (str(job.source.dtype), str(job.target.dtype))  # noqa: E731
        for types, group in groupby(sorted(jobs, key=kind), key=kind):
            batch = [job for job in group if job.source.numel()]
            if not batch:
                continue
            table, tiles = self._table(types, batch)
            rows = len(batch)
            with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
                noise_kernel[(tiles,)](
                    table[rows * META_COLUMNS :],
                    table,
                    self.key,
                    self._constant(combination.coefficients),
                    self._constant(scales) if scales is not None else self._no_step.view(torch.float32),
                    counter,
                    self.flags,
                    base,
                    combination.horizon,
                    combination.period,
                    len(combination.coefficients),
                    rows,
                    float(scale),
                    READ=read,
                    WIDE=types[0] == "torch.float64",
                    WIDE_OUT=types[1] == "torch.float64",
                    BF16_OUT=types[1] == "torch.bfloat16",
                    SCALED=scales is not None,
                    num_warps=TILE_WARPS,
                )

    def read_flags(self) -> int:
        """Wait for the device and return the flags, cleared for the next step."""
        value = int(self.flags.item())
        if value:
            self.flags.zero_()
        return value

    def _constant(self, values: tuple[float, ...]) -> torch.Tensor:
        if values not in self._constants:
            self._constants[values] = torch.tensor(values, dtype=torch.float32).to(self.device)
        return self._constants[values]

    def _table(self, types: tuple[str, str], jobs: list[Job]) -> tuple[torch.Tensor, int]:
        """The device table of these jobs, from the last launch if no tensor has moved."""
        seen = tuple(
            (j.source.data_ptr(), j.target.data_ptr(), j.offset, j.source.shape, j.source.stride(), j.target.stride())
            for j in jobs
        )
        known = self._tables.get(types)
        if known is not None and known[0] == seen and known[1].host.numel() >= len(jobs):
            return known[1].device, known[2]
        rows, tiles = table_rows(jobs)
        content = np.concatenate([rows.reshape(-1), tiles[:-1]])
        table = self._take(len(content))
        table.host[: len(content)] = torch.from_numpy(content)
        table.device.copy_(table.host, non_blocking=True)
        if self.device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                self._captured.append(table)
            else:
                table.sent = torch.cuda.Event()
                table.sent.record(torch.cuda.current_stream(self.device))
                if known is not None and known[1].host.numel() == table.host.numel() and known[1] not in self._captured:
                    self._free.setdefault(known[1].host.numel(), []).append(known[1])
        self._tables[types] = (seen, table, int(tiles[-1]))
        return table.device, int(tiles[-1])

    def _take(self, size: int) -> _Table:
        free = self._free.setdefault(size, [])
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing and not free:
            raise RuntimeError(
                "the noise has no table ready for capture: add noise to these tensors once before torch.cuda.graph(...)"
            )
        while not capturing and len(free) < _SPARE_TABLES + 1:
            pin = self.device.type == "cuda"
            host = torch.zeros(size, dtype=torch.int64, pin_memory=pin)
            free.append(_Table(host, torch.zeros(size, dtype=torch.int64, device=self.device)))
        table = free.pop(0)
        if table.sent is not None and not capturing:
            table.sent.synchronize()  # the copy out of its host half is over; only then may it be written again
        return table


def table_rows(jobs: Sequence[Job]) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's table: (tensors, META_COLUMNS) numbers, and each tensor's first tile with the total behind.

    Columns: 0 source, 1 target address, 2 unused, 3 elements, 4 offset, 5 first block, 6 first group, 7 strided,
    8–11 sizes, 12–15 source strides, 16–19 target strides (of at most four merged dimensions, outermost first).
    """
    from lambdacgd.noise.kernel import META_COLUMNS, TILE_ELEMENTS

    groups_a_tile = TILE_ELEMENTS // GROUP_ELEMENTS
    rows = np.zeros((len(jobs), META_COLUMNS), dtype=np.int64)
    tiles = np.zeros(len(jobs) + 1, dtype=np.int64)
    for index, job in enumerate(jobs):
        count = job.source.numel()
        first_group = job.offset // GROUP_ELEMENTS
        last_group = -(-(job.offset + count) // GROUP_ELEMENTS)
        tiles[index + 1] = tiles[index] - (-(last_group - first_group) // groups_a_tile)
        rows[index, :7] = (
            job.source.data_ptr(), job.target.data_ptr(), 0, count, job.offset, job.entry.first_block, first_group,
        )  # fmt: skip
        if not (job.source.is_contiguous() and job.target.is_contiguous()):
            dimensions = merged_dimensions(job)
            rows[index, 7] = 1
            rows[index, 8:12] = [d[0] for d in dimensions]
            rows[index, 12:16] = [d[1] for d in dimensions]
            rows[index, 16:20] = [d[2] for d in dimensions]
    if tiles[-1] >= 1 << 31:
        raise ValueError(f"{tiles[-1]} tiles exceed one launch (2**31); shard the model over more devices")
    return rows, tiles


def merged_dimensions(job: Job) -> list[tuple[int, int, int]]:
    """(size, source stride, target stride) of four dimensions, neighbours merged where both tensors allow it."""
    merged: list[tuple[int, int, int]] = []
    for size, source, target in zip(job.source.shape, job.source.stride(), job.target.stride(), strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * source and merged[-1][2] == size * target:
            merged[-1] = (merged[-1][0] * size, source, target)
        else:
            merged.append((size, source, target))
    if len(merged) > 4:
        raise ValueError(
            f"{job.entry.name!r} has strides {job.source.stride()} that do not merge into four dimensions; "
            f"make it contiguous or channels_last"
        )
    return [(1, 0, 0)] * (4 - len(merged)) + merged
